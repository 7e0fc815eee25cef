"""Every metric against NumPy or scikit-learn, on edges first."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    calinski_harabasz_score,
    davies_bouldin_score,
    silhouette_samples,
)

from fabric_pipelines.analytics import health
from fabric_pipelines.analytics.csr import Csr, group
from fabric_pipelines.analytics.health import METRICS, HealthTable, Metric, Status, measure
from fabric_pipelines.analytics.plan import PASSES
from fabric_pipelines.analytics.sweeps import Admitted, CpuSweeps
from fabric_pipelines.errors import UsageError

DIMS = [1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 384, 768, 1000, 1024, 1025,
        1536, 3072, 4096]  # fmt: skip
COUNTS = [0, 1, 2, 31, 32, 33, 127, 128, 129, 4095, 4096, 4097]


def planted(clusters: int, size: int, dim: int, seed: int = 0, spread: float = 0.3) -> Csr:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, clusters, clusters * size)
    labels[:clusters] = np.arange(clusters)
    centre = rng.standard_normal((clusters, dim))
    rows = centre[labels] + spread * rng.standard_normal((len(labels), dim)) / np.sqrt(dim)
    return group(rows.astype(np.float32), labels, np.arange(len(labels)), clusters)[0]


def table(csr: Csr, metric: Metric = "l2", **rest: object) -> HealthTable:
    return measure(csr.rows, csr.indptr, csr.ids, metric=metric, **rest)  # type: ignore[arg-type]


def own_rows(csr: Csr, cluster: int, metric: Metric) -> np.ndarray:
    rows = csr.rows[csr.indptr[cluster] : csr.indptr[cluster + 1]].astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True) if metric == "cosine" else rows


def value(found: HealthTable, name: str, cluster: int = 0) -> float:
    assert found.readings[name].status[cluster] == Status.OK
    return float(found.readings[name].value[cluster])


def plain(rows: np.ndarray) -> dict[str, float]:
    """The per-cluster metrics in the words of the catalogue, for n >= 2 spread rows."""
    direction = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = direction @ direction.T
    count = len(rows)
    radii = np.linalg.norm(rows - rows.mean(axis=0), axis=1)
    rms = np.sqrt((radii**2).mean())
    return {
        "mean_resultant_length": np.linalg.norm(direction.mean(axis=0)),
        "medoid_offset": radii.min() / rms,
        "rms_radius": rms,
        "radius_median": np.quantile(radii, 0.5),
        "radius_p95": np.quantile(radii, 0.95),
        "radius_tail_ratio": np.quantile(radii, 0.99) / np.quantile(radii, 0.5),
        "cosine_diversity": 1 - (cosines.sum() - np.trace(cosines)) / (count * (count - 1)),
    }


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("dim", DIMS)
def test_shape_metrics_equal_plain_numpy_at_every_dimension(dim: int, metric: Metric) -> None:
    csr = planted(3, 12, dim)
    found = table(csr, metric)
    assert len(found.breaches) == 0
    for cluster in range(3):
        rows = own_rows(csr, cluster, metric)
        if metric == "cosine" and dim == 1:
            continue  # all directions are +1 or -1: covered by the degenerate cases
        for name, expected in plain(rows).items():
            assert value(found, name, cluster) == pytest.approx(expected, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("count", COUNTS)
def test_shape_metrics_equal_plain_numpy_at_every_size(count: int) -> None:
    rows = np.random.default_rng(count).standard_normal((count, 8)).astype(np.float32)
    csr = Csr(rows, np.array([0, 0, count, count], dtype=np.int64), np.arange(count))
    found = table(csr)
    assert value(found, "size", 1) == count
    expected = plain(rows.astype(np.float64)) if count > 1 else {}
    for name, number in expected.items():
        assert value(found, name, 1) == pytest.approx(number, rel=1e-9), name


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("name", METRICS)
def test_small_clusters_answer_as_the_registry_says(name: str, size: int) -> None:
    first, others = [[1, 0], [1, 0.1]], [[0, 1], [0.2, 1], [0.1, 1]]
    rows = np.array(first[:size] + others, dtype=np.float32)
    csr = Csr(rows, np.array([0, size, size + 3]), np.arange(size + 3))
    found = table(csr, "cosine", reference=table(csr, "cosine").reference())
    said, status = METRICS[name].sizes[size], Status(found.readings[name].status[0])
    if name == "centroid_shift" and size < 2:
        assert status in (Status.U_SIZE, Status.U_DEGENERATE)  # the reference has no spread either
    elif said == "U":
        assert status == Status.U_SIZE
        assert np.isnan(found.readings[name].value[0])
    elif said[0].isdigit() and "or" not in said:
        assert value(found, name) == pytest.approx(float(said), abs=1e-12)
    else:
        assert status == Status.OK


@pytest.mark.parametrize(
    ("metric", "clusters", "dim"),
    [
        ("l2", 2, 1), ("l2", 3, 2), ("l2", 7, 33), ("l2", 40, 129),
        ("cosine", 3, 2), ("cosine", 7, 33), ("cosine", 40, 129),
    ],
)  # fmt: skip
def test_separation_metrics_equal_scikit_learn(clusters: int, dim: int, metric: Metric) -> None:
    csr = planted(clusters, 20, dim, spread=3.0)
    rows = np.concatenate([own_rows(csr, c, metric) for c in range(clusters)])
    found, owner = table(csr, metric), csr.owner()
    kind = "sqeuclidean" if metric == "l2" else "cosine"
    samples = silhouette_samples(rows, owner, metric=kind)
    size = csr.sizes
    for cluster in range(clusters):
        own = samples[owner == cluster]
        assert value(found, "silhouette", cluster) == pytest.approx(own.mean(), abs=1e-9)
        assert value(found, "silhouette_negative_fraction", cluster) == (own < 0).mean()
    terms = found.readings["davies_bouldin_term"].value
    assert terms.mean() == pytest.approx(davies_bouldin_score(rows, owner), rel=1e-9)
    within = np.array([((own_rows(csr, c, metric) - own_rows(csr, c, metric).mean(0)) ** 2).sum()
                       for c in range(clusters)])  # fmt: skip
    weight = np.where(size > 1, within, 0)
    ch = np.nansum(weight * found.readings["calinski_harabasz_term"].value) / within.sum()
    assert ch == pytest.approx(calinski_harabasz_score(rows, owner), rel=1e-9)


def test_margins_equal_distances_to_all_centroids() -> None:
    csr = planted(6, 30, 5, spread=4.0)
    means = np.stack([own_rows(csr, c, "l2").mean(axis=0) for c in range(6)])
    apart = np.linalg.norm(csr.rows[:, None, :].astype(np.float64) - means, axis=2)
    owner = csr.owner()
    own = apart[np.arange(len(owner)), owner]
    apart[np.arange(len(owner)), owner] = np.inf
    margin = (apart.min(axis=1) - own) / (apart.min(axis=1) + own)
    found = table(csr)
    assert found.facts.points is not None
    counted = np.histogram(margin, 50, (-1, 1))[0]
    assert found.facts.points.margins.tolist() == counted.tolist()
    for c in range(6):
        mine = margin[owner == c]
        assert value(found, "centroid_margin_p10", c) == pytest.approx(np.quantile(mine, 0.1))
        assert value(found, "boundary_fraction", c) == (mine < 0.05).mean()
        assert found.aux["misassigned_rows"][c] == (mine < 0).sum()


def test_bad_rows_are_counted_and_left_out_of_everything_else() -> None:
    csr = planted(3, 50, 17)
    rows = csr.rows.copy()
    at = int(csr.indptr[1])
    rows[at, 16], rows[at + 1, 0], rows[at + 2] = np.nan, np.inf, 0.0
    keep = np.ones(len(rows), dtype=np.bool_)
    keep[at : at + 3] = False
    clean = group(rows[keep], csr.owner()[keep], csr.ids[keep], 3)[0]
    for metric in ("l2", "cosine"):
        found = table(Csr(rows, csr.indptr, csr.ids), metric)
        expected = table(clean, metric)
        assert value(found, "bad_row_fraction", 1) == 3 / csr.sizes[1]
        counts = [found.aux[name][1] for name in ("nan_rows", "inf_rows", "zero_rows", "n_raw")]
        assert counts == [1, 1, 1, csr.sizes[1]]
        for name in METRICS:
            if name not in ("bad_row_fraction", "exact_duplicate_fraction"):
                np.testing.assert_allclose(
                    found.readings[name].value,
                    expected.readings[name].value,
                    rtol=1e-12,
                    atol=1e-12,
                )
        assert (found.aux["medoid_id"] == expected.aux["medoid_id"]).all()


def test_a_cluster_of_bad_rows_only_has_no_values_but_is_counted() -> None:
    rows = np.array([[np.nan, 1], [1, 0], [1, 0.5], [0, 1]], dtype=np.float32)
    found = table(Csr(rows, np.array([0, 1, 3, 4]), np.arange(4)), "cosine")
    assert value(found, "bad_row_fraction") == 1.0
    assert value(found, "size") == 0.0
    assert found.readings["silhouette"].status.tolist() == [Status.U_SIZE, Status.OK, Status.OK]


def test_copies_are_counted_by_their_bytes() -> None:
    csr = planted(2, 40, 9)
    rows = csr.rows.copy()
    rows[1:4] = rows[0]
    found = table(Csr(rows, csr.indptr, csr.ids))
    assert value(found, "exact_duplicate_fraction", 0) == pytest.approx(3 / csr.sizes[0])
    assert value(found, "exact_duplicate_fraction", 1) == 0.0


def test_rows_whose_hashes_collide_are_told_apart_by_their_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OneHash(CpuSweeps):
        def admit(self, min_norm: float, *, hashed: bool) -> Admitted:
            found = super().admit(min_norm, hashed=hashed)
            return found._replace(hash=np.zeros_like(found.hash))

    monkeypatch.setattr(health, "_sweeps", lambda _, csr, _bytes: OneHash(csr))
    csr = planted(2, 40, 9)
    rows = csr.rows.copy()
    rows[2] = rows[0]
    found = table(Csr(rows, csr.indptr, csr.ids))
    assert value(found, "exact_duplicate_fraction", 0) == pytest.approx(1 / csr.sizes[0])


def test_a_cluster_of_copies_is_degenerate_where_spread_divides() -> None:
    rows = np.repeat(np.array([[0.1, 0.7, 0.3], [5, 1, 2]], np.float32), 7, axis=0)
    for metric in ("l2", "cosine"):
        found = table(Csr(rows, np.array([0, 7, 14]), np.arange(14)), metric)
        for name in ("medoid_offset", "radius_tail_ratio", "calinski_harabasz_term"):
            assert found.readings[name].status.tolist() == [Status.U_DEGENERATE] * 2
        assert value(found, "rms_radius") == pytest.approx(0, abs=1e-12)
        assert value(found, "silhouette") == pytest.approx(1.0)


def test_coincident_centroids_are_degenerate_and_not_infinite() -> None:
    rows = np.array([[1, 0], [-1, 0], [0, 2], [0, -2], [9, 9], [9, 8]], np.float32)
    found = table(Csr(rows, np.array([0, 2, 4, 6]), np.arange(6)))
    status = found.readings["davies_bouldin_term"].status.tolist()
    assert status == [Status.U_DEGENERATE, Status.U_DEGENERATE, Status.OK]


def test_one_filled_cluster_has_no_separation() -> None:
    csr = planted(1, 9, 4)
    found = table(Csr(csr.rows, np.array([0, 0, 9, 9]), csr.ids))
    for name in ("silhouette", "centroid_margin_p10", "davies_bouldin_term"):
        expected = [Status.U_SIZE, Status.U_CONTEXT, Status.U_SIZE]
        assert found.readings[name].status.tolist() == expected


def test_no_rows_and_no_clusters_are_defined() -> None:
    nothing = np.zeros((0, 4), np.float32)
    found = table(Csr(nothing, np.zeros(1, np.int64), np.zeros(0, np.int64)))
    assert found.to_arrow().num_rows == 0
    found = table(Csr(nothing, np.zeros(3, np.int64), np.zeros(0, np.int64)))
    assert found.readings["size"].value.tolist() == [0, 0]


def test_a_reference_shows_damage_and_drift() -> None:
    csr = planted(3, 30, 40)
    before = table(csr).reference()
    assert table(csr, reference=before).readings["checksum_mismatch"].value.tolist() == [0, 0, 0]
    rows = csr.rows.copy()
    rows.view(np.uint32)[csr.indptr[1], 39] ^= 1
    moved = table(Csr(rows, csr.indptr, csr.ids), reference=before)
    assert moved.readings["checksum_mismatch"].value.tolist() == [0, 1, 0]
    rows[csr.indptr[2] :] += np.float32(2.0)
    moved = table(Csr(rows, csr.indptr, csr.ids), reference=before)
    shift = 2.0 * np.sqrt(40) / before.rms_radius[2]
    assert value(moved, "centroid_shift", 2) == pytest.approx(shift, rel=1e-6)
    with pytest.raises(UsageError, match="measure it again"):
        table(planted(2, 5, 40), reference=before)


def test_a_pass_over_budget_is_skipped_whole_and_says_so() -> None:
    csr = planted(4, 30, 16)
    found = table(csr, budget_flop=float(2 * len(csr.rows) * 16))
    assert set(found.readings["silhouette"].status) == {Status.SKIPPED_BUDGET}
    assert found.pass_flop["P8"] == 2 * len(csr.rows) * 4 * 16
    assert "P8" not in found.pass_seconds
    assert value(found, "rms_radius") > 0


def test_sweeps_that_drop_dimensions_past_128_are_caught_as_corrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Narrow(CpuSweeps):
        def admit(self, min_norm: float, *, hashed: bool) -> Admitted:
            whole = super().admit(min_norm, hashed=hashed)
            norm2 = (self._csr.rows[:, :128].astype(np.float64) ** 2).sum(axis=1)
            return whole._replace(norm2=norm2)

    monkeypatch.setattr(health, "_sweeps", lambda _, csr, _bytes: Narrow(csr))
    for metric in ("l2", "cosine"):
        assert len(table(planted(2, 9, 128), metric).breaches) == 0
        found = table(planted(2, 9, 129), metric)
        assert found.breaches.tolist() == [0, 1]
        assert set(found.readings["rms_radius"].status) == {Status.CORRUPT}
        assert np.isnan(found.readings["rms_radius"].value).all()


def test_the_table_travels_as_arrow_and_json() -> None:
    csr = planted(2, 3, 4)
    found = table(csr)
    arrow = found.to_arrow()
    assert arrow.num_rows == 2
    assert arrow["norm_drift"].null_count == 2
    assert arrow["norm_drift_status"].to_pylist() == ["U_CONTEXT"] * 2
    parsed = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert parsed["metrics"]["norm_drift"] == {"values": [None] * 2, "status": ["U_CONTEXT"] * 2}
    assert set(parsed["pass_seconds"]) == {"open", *PASSES}
    assert set(parsed["backend"].values()) == {"cpu"}


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), dim=st.integers(2, 9), clusters=st.integers(2, 5))
def test_a_permutation_of_rows_and_a_rotation_change_nothing(
    seed: int, dim: int, clusters: int
) -> None:
    rng = np.random.default_rng(seed)
    csr = planted(clusters, 8, dim, seed)
    turn = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    mixed = rng.permutation(len(csr.rows))

    def check(other: Csr, rtol: float) -> None:
        before, after = table(csr, "cosine"), table(other, "cosine")
        for name in METRICS:
            np.testing.assert_allclose(
                before.readings[name].value, after.readings[name].value, rtol=rtol, atol=rtol
            )

    check(group(csr.rows[mixed], csr.owner()[mixed], csr.ids[mixed], clusters)[0], 1e-9)
    turned = (csr.rows.astype(np.float64) @ turn).astype(np.float32)
    with warnings.catch_warnings():
        before, after = table(csr, "cosine"), table(Csr(turned, csr.indptr, csr.ids), "cosine")
    for name in ("rms_radius", "mean_resultant_length", "silhouette", "cosine_diversity"):
        np.testing.assert_allclose(
            before.readings[name].value, after.readings[name].value, rtol=1e-4, atol=1e-5
        )


def test_blocks_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    csr = planted(9, 30, 6, spread=2.0)
    whole = table(csr)
    monkeypatch.setattr("fabric_pipelines.analytics.csr.BLOCK_VALUES", 70)
    monkeypatch.setattr("fabric_pipelines.analytics.passes.TILE_VALUES", 70)
    for name, reading in table(csr).readings.items():
        np.testing.assert_allclose(reading.value, whole.readings[name].value, rtol=1e-12)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda c: measure(c.rows, c.indptr, c.ids, metric="dot"), "metric 'dot'"),  # type: ignore[arg-type]
        (lambda c: measure(c.rows, c.indptr, c.ids, metric="l2", backend="tpu"), "backend 'tpu'"),  # type: ignore[arg-type]
    ],
)
def test_unknown_words_are_refused(call: Callable[[Csr], HealthTable], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        call(planted(2, 3, 2))


def test_every_spec_is_complete_and_numbered_once() -> None:
    assert [spec.number for spec in METRICS.values()] == list(range(1, 39))
    for spec in METRICS.values():
        told = spec.as_json()
        assert all(told[key] for key in ("name", "formula", "range", "source", "family"))
        assert spec.pass_name in PASSES


def test_the_page_on_analytics_lists_every_metric_with_its_policy() -> None:
    page = (Path(__file__).parents[3] / "docs" / "analytics.md").read_text()
    for spec in METRICS.values():
        row = next(line for line in page.splitlines() if f"| `{spec.name}` |" in line)
        assert row.startswith(f"| {spec.number} |")
        assert f"| {' / '.join(spec.sizes)} | {spec.pass_name} |" in row


def test_centroids_a_hair_apart_keep_their_distance() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(-8, 8, 40).astype(np.float32)
    rows = np.stack([base, base, base, base, -base, -base])
    rows[2:4, 0] += np.float32(2.0**-20)
    rows[1, 1] += 1
    rows[3, 1] += 1
    csr = Csr(rows, np.array([0, 2, 4, 6]), np.arange(6))
    expected = (0.5 + 0.5) / 2.0**-20
    assert value(table(csr), "davies_bouldin_term", 0) == pytest.approx(expected, rel=1e-12)
    assert table(csr).aux["davies_bouldin_partner"].tolist()[:2] == [1, 0]
