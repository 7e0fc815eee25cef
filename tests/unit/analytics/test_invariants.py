"""Damage in one pass is seen by another: planted faults, each with the pair that must name it."""

import numpy as np
import pytest

from fabric_pipelines.analytics import health, neighbours, passes, spectrum, stacks, two_means
from fabric_pipelines.analytics.health import METRICS, Metric, Status
from fabric_pipelines.analytics.sweeps import Admitted, CpuSweeps
from tests.unit.analytics.edges import store, table

both = pytest.mark.parametrize("metric", ["l2", "cosine"])
SIZES = [0, 1, 2, 40, 300]


def named(dim: int, metric: Metric) -> dict[str, list[int]]:
    found = table(store(dim, SIZES), metric)
    broken = sorted({c for clusters in found.disagreements.values() for c in clusters.tolist()})
    assert found.breaches.tolist() == broken
    for name, reading in found.readings.items():
        if METRICS[name].pass_name != "P1":
            assert (reading.status[broken] == Status.CORRUPT).all(), name
            assert np.isnan(reading.value[broken]).all()
    return {pair: clusters.tolist() for pair, clusters in found.disagreements.items()}


@both
def test_what_is_whole_agrees_at_every_edge(metric: Metric) -> None:
    assert named(129, metric) == {}
    assert named(700, metric) == {}


@both
def test_a_first_sweep_that_drops_dimensions_past_128_is_seen(
    monkeypatch: pytest.MonkeyPatch, metric: Metric
) -> None:
    class Narrow(CpuSweeps):
        def admit(self, min_norm: float, *, hashed: bool) -> Admitted:
            whole = super().admit(min_norm, hashed=hashed)
            wide = self._csr.rows[:, :128].astype(np.float64)
            return whole._replace(norm2=np.einsum("nd,nd->n", wide, wide))

    monkeypatch.setattr(health, "_sweeps", lambda _, csr, _bytes: Narrow(csr))
    assert named(128, metric) == {}
    assert set(named(129, metric)["P1 and P2, P3"]) == {1, 2, 3, 4}


@both
@pytest.mark.parametrize("dim", [129, 257])
def test_passes_inside_clusters_that_drop_dimensions_past_128_are_seen(
    monkeypatch: pytest.MonkeyPatch, metric: Metric, dim: int
) -> None:
    whole = stacks.Stack.rows

    def narrow(self: stacks.Stack, part: slice, weight: np.ndarray | None = None) -> np.ndarray:
        rows = whole(self, part, weight)
        rows[:, :, 128:] = self.mean[:, None, 128:]
        return rows

    monkeypatch.setattr(stacks.Stack, "rows", narrow)
    found = named(dim, metric)
    assert set(found["P3 and P6"]) == {2, 3, 4}
    assert set(found["P3 and P9"]) == {2, 3, 4}
    assert set(found["P3 and P12"]) == {3, 4}


@both
def test_one_wrong_tile_of_distances_is_seen(
    monkeypatch: pytest.MonkeyPatch, metric: Metric
) -> None:
    whole = neighbours.tiles

    def damaged(*rest: object) -> object:
        for tile in whole(*rest):  # type: ignore[arg-type]
            if tile.distance2.shape[1:] == (300, 300):
                tile.distance2[0, 7, 9] *= 1.001
            yield tile

    monkeypatch.setattr(neighbours, "tiles", damaged)
    assert named(33, metric) == {"P3 and P9": [4]}


@both
def test_wrong_eigenvalues_are_seen(monkeypatch: pytest.MonkeyPatch, metric: Metric) -> None:
    whole = spectrum._eigenvalues
    monkeypatch.setattr(spectrum, "_eigenvalues", lambda moment: whole(moment) * (1 + 1e-6))
    assert named(33, metric) == {"P6 and its eigenvalues": [2, 3, 4]}


@both
def test_halves_that_do_not_add_up_are_seen(
    monkeypatch: pytest.MonkeyPatch, metric: Metric
) -> None:
    whole = two_means._centres

    def moved(stack: stacks.Stack, side: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        under, over = whole(stack, side)
        return under, over * 1.001

    monkeypatch.setattr(two_means, "_centres", moved)
    assert named(33, metric) == {"P3 and P12": [3, 4]}


def test_centroid_pairs_that_do_not_add_up_to_the_store_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = passes.pairs

    def moved(*rest: object) -> passes.Pairs:
        found = whole(*rest)  # type: ignore[arg-type]
        found.between[3] *= 1.001
        return found

    monkeypatch.setattr(passes, "pairs", moved)
    assert named(33, "l2") == {"P1 and P3, P7": [1, 2, 3, 4]}
