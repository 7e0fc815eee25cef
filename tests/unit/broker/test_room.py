"""Space for outcomes is promised when their tasks are leased: leases wait for it, and no outcome ever does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.promise import (
    LEASE_BYTES,
    OUTCOME_BYTES,
    SETTLE_BYTES,
    TASK_BYTES,
    TOKEN_BYTES,
    VECTOR_UNKNOWN_BYTES,
)
from fabric_pipelines.broker.room import NO_ROOM
from fabric_pipelines.errors import Backpressure
from fabric_pipelines.ids import sequence_of
from fabric_pipelines.journal import OsFileOps
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.completion import completion_batch
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.testing.sim_disk import SimDisk
from tests.support_broker import (
    EMBED,
    PLENTY,
    Bench,
    completions,
    ids_of,
    ipc_of,
    submission_of,
    tasks_of,
)
from tests.support_broker_disk import DiskBench

NEW = 1000
METADATA = 3  # of the longest, "m19"
OUTCOME = NEW * TOKEN_BYTES + OUTCOME_BYTES + METADATA
EACH = OUTCOME + SETTLE_BYTES + TASK_BYTES


@pytest.fixture
def bench() -> Bench:
    """Twenty tasks that may generate 1,000 tokens each."""
    made = Bench(Limits(lease_s=10.0, attempts_max=2))
    batch = tasks_of([20] * 20, new=NEW)
    made.submit(submission_of([batch]), [batch])
    made.attach()
    return made


def see(bench: Bench, room: int) -> None:
    bench.journal.room = room
    bench.time.seconds += 0.3
    bench.owner.renew("w")
    bench.owner.tick()


def reserved(bench: Bench) -> int:
    return bench.owner.core.state.reserved_bytes


def settling(bench: Bench) -> int:
    """Tasks that have space for their retirement."""
    state = bench.owner.core.state
    return (state.promised_bytes - state.reserved_bytes) // SETTLE_BYTES


def test_a_lease_is_cut_to_what_the_disk_has_room_for_and_the_next_one_waits(bench: Bench) -> None:
    see(bench, 5 * EACH + LEASE_BYTES + 400)
    lease = bench.lease()
    assert lease is not None
    assert len(ids_of(lease)) == 5
    assert reserved(bench) == 5 * OUTCOME
    nothing, reason = bench.owner.lease("w", PLENTY, -1)
    assert (nothing, reason) == (None, NO_ROOM)
    assert bench.owner.renew("w").hold
    assert bench.owner.core.counters["held_for_room"] == 1
    assert bench.counts() == {"ready": 15, "leased": 5}
    assert bench.owner.core.stranded() == []


def test_the_promise_ends_when_a_task_is_computed_fails_comes_back_or_runs_out(
    bench: Bench,
) -> None:
    lease = bench.lease(budget=Budget(8, 1 << 20, None))
    assert lease is not None
    ids = ids_of(lease)
    assert (reserved(bench), settling(bench)) == (8 * OUTCOME, 8)
    bench.report(ids[:2], "ok")
    assert (reserved(bench), settling(bench)) == (6 * OUTCOME, 8), "they are to be retired yet"
    bench.retire(bench.pull())
    assert (reserved(bench), settling(bench)) == (6 * OUTCOME, 6)
    bench.report(ids[2:3], "failed")
    assert (reserved(bench), settling(bench)) == (5 * OUTCOME, 5)
    bench.owner.nack("w", np.array(ids[3:5], np.int64), "not now", False)
    assert (reserved(bench), settling(bench)) == (3 * OUTCOME, 3)
    bench.owner.commit()
    bench.crash()
    assert reserved(bench) == 3 * OUTCOME, "a restart finds the promise of what is in doubt"
    bench.attach()
    assert (reserved(bench), settling(bench)) == (0, 0)
    assert bench.owner.verify().differences == []


def test_leases_go_on_when_space_is_there_again(bench: Bench) -> None:
    see(bench, EACH + LEASE_BYTES)
    lease = bench.lease()
    assert lease is not None
    assert len(ids_of(lease)) == 1
    assert bench.owner.lease("w", PLENTY, -1)[1] == NO_ROOM
    see(bench, 100 * EACH)
    assert not bench.owner.renew("w").hold
    again = bench.lease()
    assert again is not None
    assert len(ids_of(again)) == 19


def test_with_nothing_under_way_one_task_goes_however_full_the_disk_is(bench: Bench) -> None:
    see(bench, 10)
    seen = set()
    for _ in range(20):
        lease = bench.lease()
        assert lease is not None
        (task,) = ids_of(lease)
        seen.add(task)
        assert bench.lease() is None
        bench.finish(lease)
        assert bench.lease() is None, "what is computed frees space when it has landed"
        bench.retire(bench.pull())
    assert len(seen) == 20


def test_new_tasks_do_not_take_promised_space(bench: Bench) -> None:
    see(bench, 60 * EACH)
    lease = bench.lease()
    assert lease is not None
    batch = tasks_of([2000] * 11, seed=5)
    assert EACH < batch.nbytes < 21 * EACH
    header = submission_of([batch], 7)
    see(bench, 21 * EACH)
    with pytest.raises(Backpressure, match="promised to outcomes"):
        bench.submit(header, [batch])
    bench.finish(lease)
    bench.submit(header, [batch])


def test_the_size_of_vectors_is_learned_from_the_first_that_come(tmp_path: Path) -> None:
    bench = DiskBench(Limits(lease_s=10.0), folder=tmp_path, segment_bytes=1 << 16)
    batch = tasks_of([20] * 12, new=0)
    bench.submit(submission_of([batch], sampling=EMBED), [batch])
    bench.attach()
    first = bench.lease(budget=Budget(2, 1 << 20, None))
    assert first is not None
    beside = OUTCOME_BYTES + METADATA
    assert reserved(bench) == 2 * (beside + VECTOR_UNKNOWN_BYTES)
    columns = completions(ids_of(first)).to_pydict()
    columns["vector"] = [[0.5] * 384] * 2
    vectors = completion_batch({name: columns[name] for name in columns})
    bench.owner.computed("w", vectors, ipc_of(vectors))
    bench.owner.commit()
    assert bench.lease(budget=Budget(3, 1 << 20, None)) is not None
    assert reserved(bench) == 3 * (beside + 768)
    bench.checkpoint()
    bench.crash()
    assert reserved(bench) == 3 * (beside + 768)
    assert bench.owner.verify().differences == []
    bench.close()


def test_what_is_promised_is_enough_for_the_bytes_of_an_outcome() -> None:
    """Per row of a batch of 64, as a worker sends it, for the longest output that was allowed."""
    rows = 64
    columns = completions(list(range(rows))).to_pydict()
    columns["output"] = [list(range(NEW))] * rows
    columns["error_text"] = ["x" * 200] * rows
    columns["engine_fingerprint"] = ["f" * 64] * rows
    batch = completion_batch(columns)
    assert len(ipc_of(batch)) / rows <= OUTCOME


def test_on_a_small_disk_leases_wait_no_outcome_does_and_all_is_done() -> None:
    segment, capacity = 1 << 18, 5 << 18
    bench = DiskBench(
        Limits(lease_s=1e6, attempts_max=2),
        ops=SimDisk(capacity=capacity),
        segment_bytes=segment,
    )
    bench.attach()
    done = waited = 0
    held: list[Lease] = []
    total = 600
    batches = [tasks_of([20] * 20, seed=at, new=NEW) for at in range(total // 20)]
    header = submission_of(batches)
    bench.owner.open_submission(header)
    sent = 0
    for _ in range(2000):
        if sent < len(batches):
            try:
                bench.upload(header, sent * 20, batches[sent])
                bench.owner.commit()
                sent += 1
            except Backpressure:
                pass
        lease, reason = bench.owner.lease("w", Budget(4, 1 << 20, None), -1)
        waited += reason == NO_ROOM
        held += [] if lease is None else [lease]
        if held and (lease is None or len(held) > 60):
            lease = held.pop(0)
            columns = completions(ids_of(lease)).to_pydict()
            columns["output"] = [list(range(NEW))] * lease.tasks.num_rows
            outcome = completion_batch(columns)
            bench.owner.computed("w", outcome, ipc_of(outcome))
            bench.owner.commit()
        landed = bench.pull()
        done += bench.retire(landed) if landed else 0
        bench.settle(1)
        if sent == len(batches) and done == total:
            break
    assert (sent, done) == (len(batches), total)
    assert waited > 0, "the disk was large enough all the time"
    assert bench.owner.close_submission(header.submission_id).closed
    upkeep = bench.owner.upkeep
    assert upkeep is not None
    assert upkeep.counters["segments_dropped"] > 3
    assert bench.owner.verify().differences == []


def test_the_real_disk_is_asked(tmp_path: Path) -> None:
    assert OsFileOps().free_bytes(tmp_path) > 0
    bench = DiskBench(folder=tmp_path)
    status = bench.owner.status().journal
    assert status["reserved_bytes"] == 0
    assert status["room_bytes"] > 0
    assert sequence_of(0) == 0
    bench.close()
