"""The door's own tests (tests/unit/analytics/test_index.py) with every scan on a card: the kernels' sources on the CPU, and
the cubins on a real card."""

from typing import Any

import numpy as np
import pytest

from fabric_pipelines.analytics.index import (
    Answer,
    Exact,
    Faiss,
    Inverted,
    Lattice,
    VectorIndex,
    card_places,
    quality,
)
from fabric_pipelines.analytics.index.traffic import LEVEL
from fabric_pipelines.device import gpu as device
from fabric_pipelines.device.card import Card
from fabric_pipelines.errors import DeviceRefused, UsageError
from fabric_pipelines.testing.host_gpu import HostGpu
from tests.bench import search_systems
from tests.gpu.grid import both
from tests.unit.analytics import test_index as door

KINDS = (Exact(), Inverted(lists=9), Lattice(lists=9), Lattice(bits=2, lists=1))
EFFORT: dict[str, dict[str, int]] = {
    "exact": {},
    "inverted": {"nprobe": 3},
    "lattice": {"nprobe": 3, "rerank": 25},
}
USE = VectorIndex.use


@pytest.fixture
def opening(card: Card, monkeypatch: pytest.MonkeyPatch) -> Card:
    """What opens a card gets this one."""
    monkeypatch.setattr(device, "Gpu", lambda ordinal: card)
    if isinstance(card, HostGpu):  # recall is measured at every build
        monkeypatch.setattr(quality, "QUESTIONS_MAX", 16)
    return card


@pytest.fixture
def made(opening: Card, monkeypatch: pytest.MonkeyPatch) -> list[VectorIndex]:
    """Every index opens the card, whatever it was told; those that were made."""
    opened: list[VectorIndex] = []

    def on_card(self: VectorIndex, backend: str) -> None:
        USE(self, "cuda")
        opened.append(self)

    monkeypatch.setattr(VectorIndex, "use", on_card)
    return opened


def build(rows: np.ndarray, kind: Any, metric: str, backend: str) -> VectorIndex:
    ids = np.random.default_rng(len(rows)).permutation(len(rows)) * 7
    return VectorIndex.build(
        rows, ids, kind=kind, metric=metric, backend=backend
    )  # fmt: skip


def same(one: Answer, other: Answer) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("metric", door.METRICS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@both("dim", [1, 7, 33, 129], [1, 33])
def test_looking_at_everything_a_card_is_exact(
    made: list[VectorIndex], kind: Any, metric: str, dim: int
) -> None:
    door.test_looking_at_everything_every_kind_is_exact(kind, metric, dim)
    assert [index.asked > 0 for index in made] == [True]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_history_of_adds_and_removals_answers_as_its_rows_do(
    made: list[VectorIndex], kind: Any
) -> None:
    door.test_any_history_of_adds_and_removals_answers_as_its_rows_do(kind=kind)
    assert sum(index.asked for index in made) > 0


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_index_without_rows_finds_nothing_and_takes_rows_afterwards(
    made: list[VectorIndex], kind: Any
) -> None:
    door.test_an_index_without_rows_finds_nothing_and_takes_rows_afterwards(kind)
    assert len(made) == 1


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_scales_that_break_float32_squares_are_left_to_the_cpu(
    made: list[VectorIndex], kind: Any
) -> None:
    door.test_scales_that_break_float32_squares_do_not_break_the_list(kind, 1e25)
    assert made[0].left == made[0].asked > 0


@pytest.mark.parametrize("metric", door.METRICS)
@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
@both("count,dim", [(20_000, 128)], [(700, 24)])
def test_a_card_answers_as_the_cpu_does_through_upserts_and_removals_and_leaves_it_little(
    opening: Card, kind: Any, metric: str, count: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, xq = door.clustered(count, dim), door.clustered(40, dim, seed=5)
    here, there = (build(rows, kind, metric, where) for where in ("cpu", "cuda"))
    assert here.quality == there.quality
    monkeypatch.setattr(card_places, "WORK_BYTES", 1 << 16)  # several launches for one batch
    laid_out = []
    for change in range(4):
        for index in (here, there):
            if change == 1:
                index.remove(np.arange(0, 7 * count, 14))
            if change == 2:  # half of them are there
                index.add(door.clustered(30, dim, seed=change), np.arange(30) * 7)
            if change == 3:
                index.add(door.clustered(count, dim, seed=change), np.arange(count) + (7 << 40))
        k = (10, 1, 30, 3)[change]
        assert same(
            here.search(xq, k, **EFFORT[kind.name]), there.search(xq, k, **EFFORT[kind.name])
        )
        laid_out.append(there._card._places.start)  # type: ignore[union-attr]
    assert there.left <= 0.1 * there.asked
    assert laid_out[0] is laid_out[2]  # written in place,
    assert len(laid_out[3]) >= len(laid_out[2])  # until a list had outgrown its room
    assert laid_out[3] is not laid_out[2]
    assert (here.stats().where, there.stats().where) == ("cpu", opening.name)
    there.use("cpu")
    assert same(here.search(xq, 5), there.search(xq, 5))


def test_codes_too_wide_for_float32_products_are_scored_as_the_cpu_does(opening: Card) -> None:
    rows = door.clustered(40, 2056, clusters=2)
    here, there = (build(rows, Lattice(bits=2, lists=1), "l2", where) for where in ("cpu", "cuda"))
    assert same(here.search(rows[:5], 5, rerank=9), there.search(rows[:5], 5, rerank=9))
    assert there.left == 0


@pytest.mark.parametrize("metric", door.METRICS)
@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_what_a_search_on_a_card_met_is_what_it_met_on_the_cpu(
    opening: Card, kind: Any, metric: str
) -> None:
    rows, xq = door.clustered(400, 20, clusters=5), door.clustered(30, 20, clusters=5, seed=3)
    rows[40:80] = rows[40]  # more copies than a scan has to spare: such queries go to the CPU
    xq[3], xq[4] = np.nan, rows[40]
    here, there = (build(rows, kind, metric, where) for where in ("cpu", "cuda"))
    plain = there.search(xq, 7, **EFFORT[kind.name])
    cpu, card = (index.search(xq, 7, **EFFORT[kind.name], health=True) for index in (here, there))
    assert same(plain, card)
    assert same(cpu, card)
    assert kind.name == "exact" or there.left > 0
    assert cpu.health is not None
    assert card.health is not None
    for name in ("probe", "hit", "wasted", "margin"):
        found, true = getattr(card.health, name), getattr(cpu.health, name)
        assert found.tolist() == true.tolist(), name
    if kind.name != "exact":
        assert card.health.probe.sum() == card.health.margin.sum() == 29 * 3
    slot = there._rows.find(plain.I[:1, 0])[0][0]  # rotten behind the back of every scan
    there._rows.vectors[slot, 0] = np.nan
    met = there.search(xq[:1], 7, **EFFORT[kind.name], health=True).health
    assert met is not None
    assert met.nonfinite == 1


@pytest.mark.parametrize(("alike", "left"), [(3, 0), (40, 1)])
def test_the_nearest_row_of_a_list_is_not_decided_by_rounding(
    opening: Card, alike: int, left: int
) -> None:
    """Both neighbours are at 1 in one list. In the other, float32 sees `alike` rows and one more at 3, of which that one is
    nearer, by 1e-8, than 3, and the others are not: its margin (b - w) / (b + w) lies just below 1/2. A few such rows are all looked at
    as they are stored; where there are more than a scan lists, the query must be asked again."""
    around = np.zeros((60, 12), np.float32)
    around[:, 5] = np.linspace(1, 1.2, 60)
    around[1, 5] = 1
    beside = np.zeros((alike + 1, 12), np.float32)
    beside[:, :3], beside[:alike, 3] = 1, 1e-4
    rows = np.vstack([around, beside])
    xq = np.zeros((1, 12))
    xq[0, 0] = 1e-9
    here, there = (
        VectorIndex.build(
            rows, np.arange(len(rows)), kind=Inverted(lists=2), metric="l2",
            backend=where,
        )
        for where in ("cpu", "cuda")
    )  # fmt: skip
    before = there.left
    cpu, card = (index.search(xq, 2, nprobe=2, health=True) for index in (here, there))
    assert same(cpu, card)
    assert cpu.health is not None
    assert card.health is not None
    assert np.flatnonzero(cpu.health.margin).tolist() == [LEVEL, LEVEL + LEVEL // 2 - 1]
    assert card.health.margin.tolist() == cpu.health.margin.tolist()
    assert there.left - before == left


def test_queries_are_cut_so_that_no_launch_leaves_more_than_it_may() -> None:
    cost = np.array([3, 9, 1, 1, 1, 50, 2], np.int64) << 26
    cut = [(part.start, part.stop) for part in card_places.parts(cost, 2)]
    assert cut == [(0, 1), (1, 2), (2, 4), (4, 5), (5, 6), (6, 7)]
    huge = [part.stop for part in card_places.parts(np.full(3, 1 << 60, np.int64), 9)]
    assert huge == [1, 2, 3]


def test_what_has_no_kernels_is_refused() -> None:
    index = VectorIndex(3, kind=Exact(), metric="l2")
    with pytest.raises(UsageError, match="'tpu' is unknown"):
        index.use("tpu")  # type: ignore[arg-type]
    with pytest.raises(DeviceRefused, match="no kernels of its own"):
        VectorIndex(3, kind=Faiss(), metric="l2", backend="cuda")
    assert index.search(np.ones((1, 3)), 1).found.tolist() == [0]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_card_without_room_refuses_each_search_until_there_is_some(
    opening: Card, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    def no_room(size: int, what: str, remedy: str) -> None:
        raise DeviceRefused(f"{what} takes {size:,} bytes: {remedy}")

    rows = door.clustered(300, 12)
    index, twin = (build(rows, kind, "l2", backend) for backend in ("cuda", "cpu"))
    for grown in (False, True):
        if grown:  # what lies on the card is too small now
            for one in (index, twin):
                one.add(rows[:200] + 1, np.arange(200) + 10_000)
        else:
            index.use("cuda")
        with monkeypatch.context() as full:
            full.setattr(type(opening), "require_memory", staticmethod(no_room))
            for _ in range(2):
                with pytest.raises(DeviceRefused, match="use the cpu backend"):
                    index.search(rows[:3], 4)
        assert same(index.search(rows[:3], 4), twin.search(rows[:3], 4))


def test_the_benchmark_finds_the_same_on_a_card(opening: Card) -> None:
    xb, xq = door.clustered(300, 12), door.clustered(9, 12, seed=4)
    skip = ["lattice, 2 bits"]
    systems = {one.name: one for one in search_systems.ours(xb, skip)}
    for name in ("exact", "inverted", "lattice, 4 bits"):
        here, there = systems[name], systems[f"{name}, on a card"]
        assert isinstance(here, search_systems.System)
        assert isinstance(there, search_systems.System)
        assert there.where == opening.name
        effort = here.efforts[-3] if here.efforts else None
        assert np.array_equal(here.ask(xq, effort), there.ask(xq, effort))
