"""What a plan says that a pass holds on a card is what it takes: arrays are counted as the stand-in hands them out.

Only the host's half: a card's own allocator rounds, and its figures are of no use here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.analytics import card_plan, health, kernels, kernels_moments, threads
from fabric_pipelines.analytics.csr import Csr, group
from fabric_pipelines.analytics.health import HealthTable, Metric, Status
from fabric_pipelines.analytics.plan import PASSES
from fabric_pipelines.analytics.sweeps import CpuSweeps
from fabric_pipelines.device.card import DeviceArray, Memory
from fabric_pipelines.testing.host_gpu import HostGpu

ROOT = Path(__file__).parents[2]


class Counting(HostGpu):
    """Bytes handed out and not yet back, and the most of them at once."""

    peak = 0
    free = 1 << 30

    def memory(self) -> Memory:
        return Memory(self.free, self.free)

    def held(self) -> int:
        return sum(pages.size for pages in self._pages.values())

    def empty(self, shape: Any, dtype: Any) -> DeviceArray:
        array = super().empty(shape, dtype)
        self.peak = max(self.peak, self.held())
        return array


@pytest.fixture
def counting(host: HostGpu, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """`host` says whether there is a compiler."""
    card = Counting(ROOT / "cuda", ROOT / "build" / "host_cuda")
    monkeypatch.setattr(kernels, "Gpu", lambda ordinal: card)
    return card


def store(dim: int, count: int) -> Csr:
    rng = np.random.default_rng(dim)
    labels = np.minimum(
        rng.geometric(0.3, count), 9
    )  # clusters of very different sizes, and an empty one
    rows = rng.standard_normal((count, dim), dtype=np.float32)
    rows[3, -1], rows[9], rows[11] = np.nan, 0, rows[10]
    return group(rows, labels, np.arange(count), 10)[0]


def measured(csr: Csr, metric: Metric = "l2", **rest: Any) -> HealthTable:
    return health.measure(csr.rows, csr.indptr, csr.ids, metric=metric, backend="cuda", **rest)


def taken(
    card: Counting, csr: Csr, metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> tuple[HealthTable, dict[str, int]]:
    """Most bytes of each pass beyond those that it began with."""
    most: list[int] = []
    timed = health.timed

    @contextmanager
    def counted() -> Iterator[dict[str, float]]:
        before = card.peak = card.held()
        with timed() as clock:
            yield clock
        most.append(card.peak - before)

    with monkeypatch.context() as patch:
        patch.setattr(health, "timed", counted)
        table = measured(csr, metric)
    return table, dict(zip(table.pass_seconds, most, strict=True))


@pytest.mark.parametrize(
    ("dim", "count", "metric", "window"),
    [(3, 300, "l2", 1 << 30), (40, 200, "cosine", 1 << 30), (140, 190, "l2", 20_000)],
)
def test_no_pass_takes_more_of_the_card_than_was_planned(
    counting: Counting,
    monkeypatch: pytest.MonkeyPatch,
    dim: int,
    count: int,
    metric: Metric,
    window: int,
) -> None:
    monkeypatch.setattr(card_plan, "WINDOW_BYTES", window)
    monkeypatch.setattr(kernels_moments, "WINDOW_BYTES", window)
    csr = store(dim, count)
    table, most = taken(counting, csr, metric, monkeypatch)
    assert set(most) == set(table.pass_card_bytes) | {"open"} == {*PASSES, "open"}
    assert most.pop("open") <= card_plan.opening_bytes(csr)
    for name, size in most.items():
        assert size <= table.pass_card_bytes[name] <= table.pass_bytes[name], name
        assert table.pass_card_bytes[name] <= 3 * size, name  # and it is no guess
    assert counting.held() == 0


def test_passes_that_the_card_has_no_room_for_go_to_the_cpu_and_cost_what_they_cost_there(
    counting: Counting,
) -> None:
    csr = store(40, 200)
    planned = card_plan.costs(csr)
    tiles = max(planned[name].card_bytes for name in ("P7", "P8", "P9", "P11"))
    assert planned["P6"].card_bytes != tiles
    counting.free = min(planned["P6"].card_bytes, tiles)
    table = measured(csr)
    left = {name for name, where in table.backend.items() if where == "cpu"}
    assert left in ({"P6"}, {"P7", "P8", "P9", "P11"})
    assert set(table.pass_card_bytes) == set(PASSES) - left
    alone = health.measure(csr.rows, csr.indptr, csr.ids, metric="l2")
    assert {table.pass_bytes[name] for name in left} == {alone.pass_bytes[name] for name in left}
    assert alone.pass_card_bytes == {}


def test_where_the_card_has_the_tiles_the_host_sorts_for_no_quantile(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(CpuSweeps, "quantiles")
    table = measured(store(3, 60), only=["radius_p95", "centroid_margin_p10", "kernel_temperature"])
    assert all((one.status == Status.OK).sum() >= 8 for one in table.readings.values())
    assert counting.launches["csr_select_large"] == 3  # P4, P8 and P9


def test_spans_of_rows_on_the_host_change_no_bit(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    csr, only = store(3, 200), ["geometric_median_offset", "silhouette", "density_modes"]
    whole = measured(csr, only=only)
    monkeypatch.setattr(threads, "SPAN_VALUES", 30)
    spans = measured(csr, only=only)
    for name in only:
        assert spans.readings[name].value.tobytes() == whole.readings[name].value.tobytes(), name


def test_a_pass_whose_share_of_the_card_is_beyond_the_workspace_is_skipped(
    counting: Counting,
) -> None:
    csr = store(40, 200)
    needed = measured(csr, only=["vendi_score"]).pass_bytes["P6"]
    held = measured(csr, only=["vendi_score"], workspace_bytes=needed - 1)
    assert (held.readings["vendi_score"].status == Status.SKIPPED_BUDGET).all()
    assert "spectrum_32" in counting.launches
