"""A lane of which some rows lie in a store that is away: the others go out, and those go first once it is back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.broker.tiering import Water
from fabric_pipelines.errors import ColdLost, NotFetched
from fabric_pipelines.ids import sequence_of
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.testing.memory_store import MemoryStore
from tests.support_broker import EMBED, GENERATE, ids_of
from tests.support_broker_disk import DiskBench
from tests.unit.broker.test_tiering import SEGMENT_BYTES, Later, freeze, submission_of, tasks_of

SEVEN = Budget(7, 1 << 20, None)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def bench(tmp_path: Path, store: MemoryStore) -> Iterator[DiskBench]:
    made = DiskBench(
        folder=tmp_path / "journal",
        segment_bytes=SEGMENT_BYTES,
        store=store,
        water=Water(0, 0),
        porter=Later(),
    )
    yield made
    made.close()


def submit(bench: DiskBench, mark: int, sampling: dict[str, Any], batches: int = 8) -> list[int]:
    """Ids of 10 tasks a batch, all of one lane."""
    made = [tasks_of([60] * 10, seed=100 * mark + at) for at in range(batches)]
    state = bench.submit(submission_of(made, mark, sampling=sampling), made)
    assert state.first_task_id is not None
    return list(range(state.first_task_id, state.first_task_id + 10 * batches))


def half_cold(bench: DiskBench, sampling: dict[str, Any] = GENERATE) -> tuple[list[int], list[int]]:
    """Ids of one lane: those in the store, which nothing was fetched from, and those here."""
    cold = submit(bench, 1, sampling)
    freeze(bench)
    here = submit(bench, 2, sampling)
    assert len(bench.owner.core.state.lanes) == 1
    return cold, here


def lease_until(bench: DiskBench, ticks: int) -> Lease | None:
    """As a worker asks: again after a while, if rows are on their way."""
    for _ in range(ticks):
        try:
            return bench.lease("w", SEVEN)
        except NotFetched:
            bench.settle(2)
    return None


def drained(bench: DiskBench) -> list[list[int]]:
    found = []
    while (lease := lease_until(bench, 5)) is not None:
        found.append(ids_of(lease))
        bench.finish(lease)
    return found


@pytest.mark.parametrize("sampling", [GENERATE, EMBED], ids=["packed", "padded"])
@pytest.mark.parametrize("how", ["away", "missing"])
def test_rows_that_are_here_go_out_full_and_in_order_while_the_store_is_away(
    bench: DiskBench, store: MemoryStore, sampling: dict[str, Any], how: str
) -> None:
    cold, here = half_cold(bench, sampling)
    bench.attach("w")
    objects = dict(store.objects)
    store.away = how == "away"
    if how == "missing":
        store.objects.clear()
    leases = drained(bench)
    given = [task for lease in leases for task in lease]
    index = bench.owner.core.state.index
    assert sorted(given) == here
    assert len(leases[0]) <= 7, "until the store was tried, they were on their way"
    assert {len(lease) for lease in leases[1:-1]} == {7}
    keys = index.key[[sequence_of(task) for task in given]]
    assert (np.diff(keys.astype(object)) >= 0).all()
    assert bench.owner.core.stranded() == []
    with pytest.raises(NotFetched):
        bench.lease("w", SEVEN)

    store.away, store.objects = False, objects
    bench.settle(80)
    later = submit(bench, 3, sampling, batches=2)
    back = [task for lease in drained(bench) for task in lease]
    assert sorted(back[: len(cold)]) == cold, "what stood aside goes before what came since"
    assert sorted(back[len(cold) :]) == later
    assert bench.owner.core.stranded() == []
    assert bench.owner.verify().differences == []


def test_a_few_rows_of_a_lost_object_hold_up_nothing_else_of_their_lane(
    bench: DiskBench, store: MemoryStore
) -> None:
    first = submit(bench, 5, GENERATE)
    freeze(bench)
    name = sorted(store.objects)[0]
    cold, here = half_cold(bench)
    bench.attach("w")
    content = store.objects.pop(name)
    given = [task for lease in drained(bench) for task in lease]
    assert sorted(given) == sorted(cold + here)
    assert "80 tasks need it" in bench.owner.status().journal["cold_lost"][0]
    store.objects[name] = content
    bench.settle(80)
    assert sorted(task for lease in drained(bench) for task in lease) == first
    assert bench.owner.verify().differences == []


def test_one_damaged_frame_of_an_object_withholds_its_own_rows_and_the_lease_says_what_the_scrub_says(
    bench: DiskBench, store: MemoryStore
) -> None:
    """Rows 10-19 of 80 are lost; whoever submits those again under another salt has all 80."""
    cold = submit(bench, 1, GENERATE)
    freeze(bench)
    lsn = int(bench.owner.core.state.index.frames.view[1])
    segment = bench.disk._segment_of(lsn)
    name = bench.disk.cold.object_name(segment.epoch)
    offset, good = segment.offsets[lsn - segment.first_lsn], store.objects[name]
    store.objects[name] = (
        good[: offset + 300] + bytes([good[offset + 300] ^ 8]) + good[offset + 301 :]
    )
    bench.attach("w")
    given = [task for lease in drained(bench) for task in lease]
    assert sorted(given) == cold[:10] + cold[20:]
    with pytest.raises(NotFetched) as said:
        bench.lease("w", SEVEN)
    (found,) = bench.owner.scrub_report().damaged
    assert (found.lsn, found.last_lsn, found.tasks, found.live) == (lsn, lsn, 10, 10)
    address = f"memory://cold/{name}"
    assert str(said.value) == (
        f"ColdLost: object {address} of the cold tier {found.sentence.removeprefix(address + ' ')}"
    )
    bench.owner.cold_scrubbed([call() for call in bench.owner.cold_scrub()])
    assert bench.owner.scrub_report().damaged == [found], "bytes included"
    with pytest.raises(ColdLost, match=f"bytes {found.offset}..{found.end}"):
        bench.disk.read(lsn)
    store.objects[name] = good
    bench.settle(80)
    assert sorted(task for lease in drained(bench) for task in lease) == cold[10:20]
    assert bench.owner.scrub_report().ok
    assert bench.owner.verify().differences == []


def test_rows_that_are_on_their_way_are_waited_for_so_that_prefixes_stay_together(
    bench: DiskBench,
) -> None:
    cold, here = half_cold(bench)
    bench.attach("w")
    given = [task for lease in drained(bench) for task in lease]
    keys = bench.owner.core.state.index.key[[sequence_of(task) for task in given]]
    assert (np.diff(keys.astype(object)) >= 0).all()
    assert sorted(given) == sorted(cold + here)


def test_two_sessions_share_what_is_here_and_then_what_comes_back(
    bench: DiskBench, store: MemoryStore
) -> None:
    cold, here = half_cold(bench)
    for name in ("w", "v"):
        bench.attach(name)
    store.away = True
    given: list[int] = []
    for turn in range(400):
        if turn == 200:
            assert sorted(given) == here
            store.away = False
        try:
            lease = bench.lease("wv"[turn % 2], SEVEN)
        except NotFetched:
            bench.settle(1)
            continue
        if lease is not None:
            given += ids_of(lease)
            bench.finish(lease, name="wv"[turn % 2])
    assert sorted(given) == sorted(cold + here)
    assert len(set(given)) == len(given)


def test_a_restart_while_the_store_is_away_forgets_nothing_that_stood_aside(
    bench: DiskBench, store: MemoryStore
) -> None:
    cold, here = half_cold(bench)
    bench.attach("w")
    store.away = True
    first = lease_until(bench, 5)
    assert first is not None
    assert set(ids_of(first)) < set(here)
    bench.finish(first)
    bench.crash()
    bench.attach("w")
    bench.settle(60)
    rest = [task for lease in drained(bench) for task in lease]
    assert sorted(ids_of(first) + rest) == here
    store.away = False
    bench.settle(80)
    assert sorted(task for lease in drained(bench) for task in lease) == cold
    assert bench.owner.verify().differences == []
