"""What lies inside a cluster: edges, blocks, budgets, and signals in one dimension alone."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from fabric_pipelines.analytics import pair_tiles, stacks
from fabric_pipelines.analytics.csr import Csr, group
from fabric_pipelines.analytics.health import METRICS, Status
from fabric_pipelines.analytics.metrics_within import WITHIN
from fabric_pipelines.analytics.plan import PASSES
from fabric_pipelines.analytics.threads import ONE_THREAD, Scratch
from fabric_pipelines.errors import UsageError
from tests.unit.analytics.edges import store, table, value

INSIDE = [spec.name for spec in WITHIN]


def test_a_cluster_of_copies_says_what_it_has_and_leaves_out_what_it_has_not() -> None:
    rows = np.repeat(np.array([[0.1, 0.7, 0.3], [5, 1, 2]], np.float32), 40, axis=0)
    for metric in ("l2", "cosine"):
        found = table(Csr(rows, np.array([0, 40, 80]), np.arange(80)), metric)
        for name, expected in {
            "mean_pairwise_distance": 0.0, "nn_distance_mean": 0.0, "hubness_skewness": None,
            "lof_outlier_fraction": 0.0, "largest_component_share": 1.0, "vendi_score": 1.0,
            "coding_rate": None,
        }.items():  # fmt: skip
            got = value(found, name)
            assert expected is None or got == pytest.approx(expected, abs=1e-12), name
        for name in (
            "geometric_median_offset", "anisotropy", "effective_rank", "intrinsic_dimension",
            "nn_distance_cv", "kernel_temperature", "free_energy", "pair_entropy", "density_modes",
            "split_gain_ratio", "split_balance", "dip",
        ):  # fmt: skip
            assert found.readings[name].status.tolist() == [Status.U_DEGENERATE] * 2, name
            assert np.isnan(found.readings[name].value).all()


def test_half_a_cluster_of_copies_has_no_temperature_but_pairs() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((60, 9)).astype(np.float32)
    rows[:40] = rows[0]
    found = table(Csr(rows, np.array([0, 60]), rng.permutation(60)))
    assert found.readings["kernel_temperature"].status[0] == Status.U_DEGENERATE
    assert found.readings["free_energy"].status[0] == Status.U_DEGENERATE
    assert value(found, "mean_pairwise_distance") > 0
    assert value(found, "intrinsic_dimension") > 0  # of the rows that have no copy
    assert 0 < value(found, "split_balance") <= 0.5


@pytest.mark.parametrize("others", [
    [[2, 1], [2, -1], [-1, 0], [-3, 0]],  # the pulls nearly cancel: the median stays on the row
    [[1, 1], [1, -1], [6, 0], [-8, 0]],  # they do not: it leaves
])  # fmt: skip
def test_a_mean_that_is_a_row_holds_the_median_no_longer_than_the_others_let_it(
    others: list[list[int]],
) -> None:
    rows = np.array([[0, 0], *others], np.float32)
    assert (rows.mean(axis=0) == 0).all()
    found = table(Csr(rows + np.float32(16), np.array([0, 5]), np.arange(5)))
    line = np.linspace(-1, 1, 200_001)[:, None]  # both are symmetric about the first axis
    cost = np.hypot(line - rows[:, 0], rows[:, 1]).sum(axis=1)
    radius = np.sqrt((rows.astype(np.float64) ** 2).sum(axis=1).mean())
    expected = abs(line[cost.argmin(), 0]) / radius
    assert (expected > 0.01) == (others[0] == [1, 1])
    assert value(found, "geometric_median_offset") == pytest.approx(expected, abs=2e-5)


def test_equal_distances_go_to_the_lower_id_however_rows_are_stored() -> None:
    grid = np.stack(np.meshgrid(*[np.arange(4)] * 3), axis=-1).reshape(-1, 3).astype(np.float32)
    rng = np.random.default_rng(1)
    ids = rng.permutation(64)
    first = table(Csr(grid, np.array([0, 64]), ids))
    for _ in range(5):
        mixed = rng.permutation(64)
        again = table(Csr(grid[mixed], np.array([0, 64]), ids[mixed]))
        for name in ("hubness_skewness", "largest_component_share", "density_modes"):
            assert value(again, name) == pytest.approx(value(first, name), rel=1e-12)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_stacks_and_blocks_do_not_change_the_answer(
    monkeypatch: pytest.MonkeyPatch, metric: str
) -> None:
    csr = store(6, [0, 1, 2, 3, 33, 33, 33, 129, 257, 40])
    whole = table(csr, metric)  # type: ignore[arg-type]
    monkeypatch.setattr(stacks, "STACK_VALUES", 200)
    monkeypatch.setattr(pair_tiles, "STACK_VALUES", 200)
    monkeypatch.setattr(pair_tiles, "SIDE_VALUES", 130)
    for held in (stacks.HELD_VALUES, 300):
        monkeypatch.setattr(stacks, "HELD_VALUES", held)
        again = table(csr, metric)  # type: ignore[arg-type]
        for name in INSIDE:
            assert np.array_equal(again.readings[name].status, whole.readings[name].status), name
            np.testing.assert_allclose(
                again.readings[name].value, whole.readings[name].value, rtol=1e-9, err_msg=name
            )


@pytest.mark.parametrize(("dim", "at"), [(129, 128), (300, 128), (300, 299), (1025, 1024)])
def test_a_signal_in_one_dimension_alone_is_seen_by_every_metric(dim: int, at: int) -> None:
    """Two lumps and far rows that only dimension `at` shows, beside the same rows without it."""
    rng = np.random.default_rng(dim)
    labels = np.repeat([0, 1], 80)
    rows = 1 + 0.05 * rng.standard_normal((160, dim))
    rows[:, at] = 1.0
    blind = rows.astype(np.float32)
    rows[:50, at] += 9 + rng.uniform(size=50)
    rows[50:80, at] += rng.uniform(size=30)
    rows[77:80, at] += [40, 60, -50]
    rows[80:, at] -= 30
    seeing = rows.astype(np.float32)
    ids = np.arange(160)
    reference = table(group(blind, labels, ids, 2)[0]).reference()
    before = table(group(blind, labels, ids, 2)[0], reference=reference)
    after = table(group(seeing, labels, ids, 2)[0], reference=reference)
    for name in METRICS:
        if name in ("bad_row_fraction", "exact_duplicate_fraction", "size"):
            continue  # of bytes and counts: the tests below
        assert abs(value(after, name) - value(before, name)) > 1e-4, name


@pytest.mark.parametrize(("dim", "at"), [(129, 128), (300, 128), (300, 299), (1025, 1024)])
def test_a_bad_or_different_value_in_one_dimension_alone_is_counted(dim: int, at: int) -> None:
    rows = np.ones((6, dim), np.float32)
    rows[0, at], rows[1, at] = np.nan, 2.0
    found = table(Csr(rows, np.array([0, 6]), np.arange(6)))
    assert value(found, "bad_row_fraction") == pytest.approx(1 / 6)
    assert value(found, "exact_duplicate_fraction") == pytest.approx(3 / 6)
    assert value(found, "size") == 5


def skipped(found: object) -> set[str]:
    return {
        METRICS[name].pass_name
        for name, reading in found.readings.items()  # type: ignore[attr-defined]
        if (reading.status == Status.SKIPPED_BUDGET).all()
    }


@pytest.mark.parametrize(
    ("dear", "expected"),
    [("P4", {"P4", "P9", "P10", "P11"}), ("P9", {"P9", "P10", "P11"}), ("P6", {"P6", "P12"}),
     ("P5", {"P5"}), ("P11", {"P11"}), ("P12", {"P12"})],
)  # fmt: skip
def test_a_pass_over_budget_takes_those_that_need_it_along(
    monkeypatch: pytest.MonkeyPatch, dear: str, expected: set[str]
) -> None:
    from fabric_pipelines.analytics import plan

    csr = store(5, [9, 40])
    free = dict.fromkeys(PASSES, 1.0)
    monkeypatch.setattr(plan, "_flop", lambda csr: {**free, dear: 100.0})
    found = table(csr, budget_flop=10.0)
    assert skipped(found) == expected
    assert set(found.pass_seconds) == {"open", *PASSES} - expected
    assert found.pass_flop[dear] == 100.0


def test_a_pass_that_would_outgrow_the_workspace_is_skipped_and_says_so() -> None:
    csr = store(700, [3, 900])
    needed = table(csr).pass_bytes
    found = table(csr, workspace_bytes=needed["P6"] - 1)
    assert skipped(found) >= {"P6", "P12"}
    assert skipped(table(csr, workspace_bytes=max(needed.values()))) == set()


def test_costs_grow_with_the_square_of_a_cluster_and_not_of_the_store() -> None:
    apart = table(store(4, [100] * 8)).pass_flop["P9"]
    together = table(store(4, [800])).pass_flop["P9"]
    assert 7 < together / apart < 9


def test_a_million_rows_in_one_store_of_tiny_clusters_need_no_loop_over_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    monkeypatch.setattr(
        stacks.Stack, "rows", lambda self, part, weight=None, plain=stacks.Stack.rows: (
            made.append(len(self.clusters)), plain(self, part, weight))[1],
    )  # fmt: skip
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((20_000, 4)).astype(np.float32)
    indptr = np.arange(0, 20_001, 5)
    found = table(Csr(rows, indptr, np.arange(20_000)))
    assert (found.readings["mean_pairwise_distance"].status == Status.OK).all()
    assert len(made) <= 5 * 4  # five passes, a few stacks each, for 4,000 clusters


def test_only_the_passes_that_the_metrics_asked_for_need_are_run() -> None:
    csr = store(5, [9, 40])
    whole, part = table(csr), table(csr, only=["dip", "silhouette"])
    assert list(part.readings) == ["silhouette", "dip"]
    assert set(part.pass_seconds) == {"open", "P1", "P2", "P3", "P6", "P8", "P12"}
    for name, reading in part.readings.items():
        np.testing.assert_array_equal(reading.value, whole.readings[name].value)
    with pytest.raises(UsageError, match="metric 'dap' is unknown"):
        table(csr, only=["dap"])
    with pytest.raises(UsageError, match="'checksum_mismatch' in `only`"):
        part.reference()
    again = table(csr, only=["checksum_mismatch"], reference=whole.reference())
    assert again.readings["checksum_mismatch"].value.tolist() == [0.0, 0.0]
    again.reference()


def test_measuring_leaves_the_threads_of_the_library_as_they_were() -> None:
    def blas() -> list[int]:
        return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

    csr, before = store(5, [9, 40]), blas()
    assert before
    with ThreadPoolExecutor(4) as pool:
        sizes = [found.clusters for found in pool.map(lambda _: table(csr), range(8))]
    assert sizes == [2] * 8
    assert blas() == before


def test_whoever_is_the_last_to_need_one_thread_restores_the_library_for_all() -> None:
    def blas() -> list[int]:
        return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

    before, (first, last) = blas(), (ThreadPoolExecutor(1), ThreadPoolExecutor(1))
    for _ in range(3):
        for thread in (first, last):
            thread.submit(ONE_THREAD.__enter__).result()
        for thread in (first, last):
            thread.submit(ONE_THREAD.__exit__).result()
        assert blas() == before


def test_scratch_is_nobody_elses_while_it_is_taken_and_kept_afterwards() -> None:
    scratch = Scratch()
    with scratch.taken(3, 5) as one, scratch.taken(2, 5) as other:
        assert (one.shape, other.shape) == ((3, 5), (2, 5))
        assert not np.shares_memory(one, other)
    with scratch.taken(1, 4) as again, scratch.taken(7, 9) as larger:
        assert np.shares_memory(again, one) or np.shares_memory(again, other)
        larger[:] = 1.0
        assert larger.sum() == 63
    with pytest.raises(ZeroDivisionError), scratch.taken(7, 9) as lost:
        raise ZeroDivisionError
    with scratch.taken(7, 9) as found:
        assert np.shares_memory(found, lost), "a piece that fails keeps nothing"
