"""P1, P2, P3 and P8 in one go on a card: what is queued, copied and taken is counted, and the answers are those of the long way.

The card is the stand-in that runs kernels on the CPU, so nothing here says how long any of it takes on one.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fabric_pipelines.analytics import card_plan, card_points, kernels, summed
from fabric_pipelines.analytics.csr import Csr, group
from fabric_pipelines.analytics.health import HealthTable, Metric, Status, measure
from fabric_pipelines.device.card import DeviceArray, Lent
from fabric_pipelines.errors import DeviceRefused, MissingDependency
from fabric_pipelines.testing.host_gpu import HostGpu
from tests.support import skip_or_fail

ROOT = Path(__file__).parents[3]
LEAN = ["silhouette"]
QUEUED = {  # of one window of rows
    "row_admit": 1, "point_score_admit": 1, "csr_reduce_moments": 3, "csr_reduce_fold": 3, "csr_centroid": 2,
    "point_score_means": 1, "csr_radius": 1, "point_score_roots": 1, "point_score_origin": 1,
    "point_score_reach": 1, "point_score_unit": 1, "point_score_centres": 1, "pair_tile_rows": 1,
    "centre_tile_points": 1, "point_score_rows": 1, "csr_reduce_words": 2,
}  # fmt: skip


class Counting(HostGpu):
    """Calls, and the bytes that go each way."""

    room = 1 << 40

    def __init__(self) -> None:
        super().__init__(ROOT / "cuda", ROOT / "build" / "host_cuda")
        self.calls: Counter[str] = Counter()
        self.sent: list[int] = []
        self.fetched: list[int] = []
        self.lent: list[int] = []

    def empty(self, shape: Any, dtype: Any) -> DeviceArray:
        self.calls["empty"] += 1
        return super().empty(shape, dtype)

    def store(self, target: DeviceArray, host: npt.NDArray[Any]) -> None:
        self.sent.append(host.nbytes)
        super().store(target, host)

    def download(self, source: DeviceArray) -> npt.NDArray[Any]:
        self.fetched.append(source.nbytes)
        return super().download(source)

    def fill(self, target: DeviceArray, byte: int) -> None:
        self.calls["fill"] += 1
        super().fill(target, byte)

    def lend(self, size: int) -> Lent:
        if size > self.room:
            raise DeviceRefused("no room")
        self.lent.append(size)
        return super().lend(size)

    def synchronize(self) -> None:
        self.calls["synchronize"] += 1

    def close(self) -> None:
        self.calls["close"] += 1

    def forget(self) -> None:
        for counted in (self.calls, self.launches, self.sent, self.fetched, self.lent):
            counted.clear()


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    try:
        card = Counting()
    except MissingDependency as fault:
        skip_or_fail(str(fault))
    monkeypatch.setattr(kernels, "Gpu", lambda ordinal: card)
    return card


def store(dim: int, count: int, clusters: int = 9, spread: float = 1.0) -> Csr:
    """Bad rows of each kind, copies, a cluster of one row, and an empty one in the middle."""
    rng = np.random.default_rng([dim, clusters])
    labels = np.minimum(rng.geometric(0.4, count), clusters)
    labels[20], labels[labels == 4] = 0, 5
    rows = rng.standard_normal((clusters + 1, dim))[labels] + spread * rng.standard_normal(
        (count, dim)
    )
    rows = rows.astype(np.float32)
    rows[3, -1], rows[9], rows[11], rows[12, 0] = np.nan, 0, rows[10], np.inf
    return group(rows, labels, rng.permutation(count).astype(np.int64), clusters + 1)[0]


def measured(csr: Csr, only: list[str] | None, metric: Metric = "l2", **rest: Any) -> HealthTable:
    return measure(csr.rows, csr.indptr, csr.ids, metric=metric, backend="cuda", only=only, **rest)


def by_rows(csr: Csr, metric: Metric = "l2") -> HealthTable:
    """P4 orders rows, so all of them go the long way."""
    return measured(csr, [*summed.READ, "radius_median"], metric)


def went_at_once(table: HealthTable) -> bool:
    return len(table.facts.radii.radius2) == 0 < table.facts.points.silhouette_sum.size  # type: ignore[union-attr]


def compare(one: HealthTable, rows: HealthTable) -> None:
    """The same bytes, but for the sum of silhouettes, which is numpy's in one and csr_reduce's in the other."""
    assert went_at_once(one)
    assert not went_at_once(rows)
    for name, reading in one.readings.items():
        assert np.array_equal(reading.status, rows.readings[name].status), name
        slack = 1e-15 if name == "silhouette" else 0
        np.testing.assert_allclose(
            reading.value, rows.readings[name].value, rtol=0, atol=slack, err_msg=name
        )
    assert {name: each.tobytes() for name, each in one.aux.items()} == {
        name: each.tobytes() for name, each in rows.aux.items()
    }
    assert one.breaches.tolist() == rows.breaches.tolist()
    assert one.backend.items() <= rows.backend.items()


def test_one_call_queues_sixteen_kinds_of_launch_takes_nothing_and_fetches_once(
    counting: Counting,
) -> None:
    csr = store(36, 3000)
    first = measured(csr, LEAN)
    assert counting.calls["empty"] == 1  # the block, which is kept
    counting.forget()
    again = measured(csr, LEAN)
    assert (
        again.readings["silhouette"].value.tobytes() == first.readings["silhouette"].value.tobytes()
    )
    assert counting.calls == {
        "close": 1
    }  # no memory, no filling, and no wait but that of the copy back
    found = Counter[str]()
    for symbol, times in counting.launches.items():
        family = max((name for name in QUEUED if symbol.startswith(name)), key=len)
        found[family] += times
    assert found == QUEUED
    assert counting.launches.total() == 22
    listed = int((csr.sizes > 0).sum())
    borders = 8 * (4 * (listed + 1) + 1)
    assert counting.sent == [csr.rows.nbytes, csr.ids.nbytes, borders, csr.indptr.nbytes]
    [fetched] = counting.fetched
    assert fetched <= 400 * (listed + 1) + 8 * card_points.ALIGN
    assert again.pass_card_bytes["P8"] + sum(counting.sent) <= counting.lent[0]
    assert counting.lent[0] <= again.pass_card_bytes["P8"] + sum(counting.sent) + 10 * 3000 + 2048
    counting.forget()
    measured(csr, ["silhouette", "centroid_margin_p10"])
    assert (counting.calls, counting.fetched) == ({"close": 1}, [fetched])
    assert counting.launches.total() == 24
    assert counting.sent[4:] == [8]  # which quantile
    counting.forget()
    measured(store(36, 6000), LEAN)
    assert counting.fetched == [fetched]  # whatever the rows


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize(
    ("dim", "count", "window"), [(7, 900, 1 << 30), (33, 1100, 20_000), (129, 300, 1 << 30)]
)
def test_answers_are_those_of_the_long_way(
    counting: Counting,
    monkeypatch: pytest.MonkeyPatch,
    dim: int,
    count: int,
    window: int,
    metric: Metric,
) -> None:
    monkeypatch.setattr(card_plan, "WINDOW_BYTES", window)
    csr = store(dim, count, spread=0.5)
    once, rows = measured(csr, sorted(summed.READ), metric), by_rows(csr, metric)
    compare(once, rows)
    assert (once.readings["silhouette"].status == Status.OK).sum() == 9
    assert (
        once.aux["nan_rows"].sum() == once.aux["inf_rows"].sum() == 1 == once.aux["zero_rows"].sum()
    )


def test_a_block_that_is_kept_serves_another_store_and_metric_after_another(
    counting: Counting,
) -> None:
    large, small = store(40, 800), store(7, 500, clusters=5)
    alone = [measured(csr, LEAN, metric) for csr, metric in ((small, "l2"), (small, "cosine"))]  # type: ignore[arg-type]
    measured(large, LEAN)
    counting.forget()
    for before, metric in zip(alone, ("l2", "cosine"), strict=True):
        table = measured(small, LEAN, metric)  # type: ignore[arg-type]
        assert (
            table.readings["silhouette"].value.tobytes()
            == before.readings["silhouette"].value.tobytes()
        )
    assert counting.calls["empty"] == 0
    counting.trim()
    measured(small, LEAN)
    assert counting.calls["empty"] == 1


def spoilt(csr: Csr, how: str) -> Csr:
    rows = csr.rows.copy()
    if how == "a cluster of bad rows only":
        rows[csr.indptr[3] : csr.indptr[4]] = np.nan
    if how == "a row on another centre":
        other = rows[csr.indptr[3] : csr.indptr[4]].astype(np.float64)
        rows[5] = other[np.isfinite(other).all(axis=1) & (other != 0).all(axis=1)].mean(axis=0)
    if how == "one dimension":
        rows = np.ascontiguousarray(rows[:, 1:2])
    return Csr(rows, csr.indptr, csr.ids)


@pytest.mark.parametrize(
    "how", ["a cluster of bad rows only", "a row on another centre", "one dimension"]
)
def test_what_needs_a_look_at_rows_goes_the_long_way_to_the_same_bytes(
    counting: Counting, how: str
) -> None:
    csr = spoilt(store(5, 400), how)
    once, rows = measured(csr, LEAN), by_rows(csr)
    assert not went_at_once(once)
    assert (
        once.readings["silhouette"].value.tobytes() == rows.readings["silhouette"].value.tobytes()
    )
    assert once.backend.items() <= rows.backend.items()
    assert once.pass_card_bytes["P8"] == rows.pass_card_bytes["P8"]


def test_without_memory_or_workspace_for_all_at_once_it_goes_the_long_way(
    counting: Counting,
) -> None:
    csr = store(5, 4000)
    cost = card_points.Shape.of(csr).cost
    assert went_at_once(measured(csr, LEAN, workspace_bytes=64 << 20))
    assert (
        cost.bytes < card_plan.costs(csr)["P8"].bytes + 600 * 4000
    )  # of which the host holds most by rows
    counting.room = cost.card_bytes
    assert not went_at_once(measured(csr, LEAN))
    counting.room = 1 << 40
    tight = measured(csr, LEAN, workspace_bytes=cost.bytes - 1)
    assert tight.facts.points is None or not went_at_once(tight)


@pytest.mark.parametrize(
    ("symbol", "argument", "pair"),
    [
        ("row_admit", 4, "P1 and P2, P3"),
        ("csr_centroid_fold", 6, "P1 and P2, P3"),
        ("csr_radius", 7, "P1 and P2, P3"),
        ("pair_tile_rows", 9, "P3 and P8"),
        ("centre_tile_points", 10, "P3 and P8"),
    ],
)
def test_damage_in_what_stays_on_the_card_is_named_by_the_pair_that_sees_it(
    counting: Counting, monkeypatch: pytest.MonkeyPatch, symbol: str, argument: int, pair: str
) -> None:
    honest = Counting.launch

    def damaged(self: Counting, family: str, name: str, blocks: int, given: Any) -> None:
        honest(self, family, name, blocks, given)
        if name.startswith(symbol):
            flat = given[argument].reshape(-1)
            flat[len(flat) // 4 :] *= 1.01

    monkeypatch.setattr(Counting, "launch", damaged)
    csr = store(40, 600)
    found = measured(csr, LEAN)
    assert went_at_once(found)
    assert pair in found.disagreements
    broken = found.disagreements[pair]
    assert (found.readings["silhouette"].status[broken] == Status.CORRUPT).all()
    assert np.isnan(found.readings["silhouette"].value[broken]).all()


def test_a_sum_that_loses_rows_makes_its_cluster_corrupt(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, folds = Counting.launch, []

    def losing(self: Counting, family: str, name: str, blocks: int, given: Any) -> None:
        honest(self, family, name, blocks, given)
        if name == "csr_reduce_fold":
            folds.append(name)
            if len(folds) == 3:  # of the scores
                given[5][1, 0] -= 1

    monkeypatch.setattr(Counting, "launch", losing)
    csr = store(6, 300)
    found = measured(csr, LEAN)
    second = int(np.flatnonzero(csr.sizes > 0)[1])
    assert {pair: at.tolist() for pair, at in found.disagreements.items()} == {
        "P3 and P8": [second]
    }
