"""Dead tasks that are tried again: as new, under their ids, once, and only as long as their prompts are there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.replies import RequeueReply
from fabric_pipelines.errors import UsageError
from fabric_pipelines.ids import sequence_of
from tests.support_broker import BURIED, LARGE, Bench, ids_of, submission_of, tasks_of
from tests.support_broker_disk import DiskBench


@pytest.fixture
def bench() -> Bench:
    made = Bench(Limits(lease_s=30.0, attempts_max=2))
    batch = tasks_of([10, 20, 30, 40])
    made.submit(submission_of([batch]), [batch])
    made.attach()
    return made


def kill(bench: Bench, count: int, status: str = "refused") -> list[int]:
    """So many tasks die and are buried."""
    lease = bench.lease()
    assert lease is not None
    ids = ids_of(lease)
    bench.report(ids[:count], status)
    bench.owner.nack("w", np.array(ids[count:], np.int64), "not now", False)
    bench.owner.release_pulled("c")
    dead = bench.pull()
    assert bench.bury(dead) == len(dead) == count
    return dead


def lease_all(bench: Bench) -> dict[int, int]:
    """Attempts by task of everything that is ready."""
    found: dict[int, int] = {}
    while (lease := bench.lease()) is not None:
        found |= {row["task_id"]: row["attempts"] for row in lease.tasks.to_pylist()}
    return found


def requeue(bench: Bench, ids: list[int]) -> RequeueReply:
    reply = bench.owner.requeue(np.array(ids, np.int64), "try again")
    bench.owner.commit()
    return reply


def test_requeued_tasks_are_ready_as_if_new_and_the_ledger_moves_with_them(bench: Bench) -> None:
    dead = kill(bench, 3)
    before = bench.owner.core.state.total()
    assert requeue(bench, dead) == RequeueReply(requeued=3)
    after = bench.owner.core.state.total()
    moved = before.dead - after.dead
    assert moved.tasks == 3
    assert after.ready - before.ready == moved
    assert after.enqueued == before.enqueued
    after.require_balanced("everything")
    assert bench.owner.verify().differences == []
    attempts = lease_all(bench)
    assert len(attempts) == 4
    assert set(attempts.values()) == {0}


def test_asking_twice_requeues_once_and_says_why_not(bench: Bench) -> None:
    dead = kill(bench, 2)
    unknown = [12345]
    assert requeue(bench, dead + unknown) == RequeueReply(requeued=2, unknown=1)
    assert requeue(bench, dead) == RequeueReply(not_dead=2)
    assert bench.owner.core.counters["requeued"] == 2
    assert bench.owner.states(np.array([*dead, 5], np.int64)) == ["ready", "ready", "unknown"]


def test_a_requeued_task_has_all_its_attempts_again_and_can_die_again(bench: Bench) -> None:
    dead = kill(bench, 1)
    requeue(bench, dead)
    for attempt in range(2):
        assert lease_all(bench)[dead[0]] == attempt
        bench.report(dead, "failed")
    bench.owner.release_pulled("c")
    pulled = bench.owner.pull("c", 10)
    assert pulled is not None
    (row,) = pulled.to_pylist()
    assert (row["task_id"], row["attempts"], row["requeues"]) == (dead[0], 2, 1)
    assert bench.bury(dead) == 0, "the word of a sink that saw the first death only"
    counts = np.array([1], np.uint8)
    assert bench.owner.settle(np.array(dead), BURIED, dead=True, requeues=counts) == 1


def test_a_requeued_task_that_succeeds_is_retired_and_leaves_no_trace(bench: Bench) -> None:
    dead = kill(bench, 4)
    assert bench.owner.core.state.lanes[0].step.name == "RETIRED"
    requeue(bench, dead)
    lane = bench.owner.core.state.lanes[0]
    assert (lane.step.name, lane.generation) == ("DRAINING", 2)
    bench.finish(bench.lease())  # type: ignore[arg-type]
    bench.owner.release_pulled("c")
    assert bench.retire(bench.pull()) == 4
    assert bench.counts() == {"retired": 4}
    assert bench.owner.core.state.requeues == {}
    submission = bench.owner.submission(f"{0:064x}")
    assert submission is not None
    assert submission.finished
    assert bench.owner.verify().differences == []


def test_a_requeue_survives_a_crash_and_a_late_word_about_the_old_life_changes_nothing(
    bench: Bench,
) -> None:
    dead = kill(bench, 2)
    requeue(bench, dead)
    bench.crash()
    bench.attach()
    assert bench.counts() == {"ready": 4}
    assert bench.report(dead, "ok").accepted == 0
    assert bench.counts() == {"ready": 4}
    assert bench.owner.verify().differences == []


def test_what_classes_refused_is_forgotten_with_the_requeue(bench: Bench) -> None:
    lease = bench.lease()
    assert lease is not None
    bench.attach("v", profile=LARGE)
    bench.report(ids_of(lease), "oversized")
    bench.owner.detach("v")
    bench.owner.tick()
    bench.owner.release_pulled("c")
    dead = bench.pull()
    assert bench.bury(dead) == 4
    requeue(bench, dead)
    assert bench.lease() is not None
    assert bench.owner.verify().differences == []


def test_what_a_sink_refuses_is_buried_though_it_was_computed_well(bench: Bench) -> None:
    """A vector that the database rejects, for example: completion has nowhere else to put it."""
    lease = bench.lease()
    assert lease is not None
    bench.finish(lease)
    assert bench.bury(ids_of(lease)) == 4
    assert bench.counts() == {"dead": 4}
    with pytest.raises(UsageError, match="retires nothing"):
        bench.owner.settle(np.array(ids_of(lease)), BURIED, dead=False)


def on_disk(folder: Path, high_water: int = 1 << 40) -> DiskBench:
    made = DiskBench(
        Limits(lease_s=30.0, attempts_max=2),
        folder=folder,
        segment_bytes=1 << 14,
        high_water=high_water,
    )
    batch = tasks_of([30] * 40)
    made.submit(submission_of([batch]), [batch])
    made.attach()
    return made


def work_off(bench: DiskBench, marks: range) -> None:
    """More submissions, done and landed, until the front of the log has been cleared."""
    for mark in marks:
        batch = tasks_of([30] * 40, seed=mark)
        bench.submit(submission_of([batch], mark), [batch])
        bench.finish(bench.lease())  # type: ignore[arg-type]
        bench.owner.release_pulled("c")
        bench.retire(bench.pull())
        bench.checkpoint()


def test_prompts_of_dead_tasks_outlive_the_segments_they_came_in(tmp_path: Path) -> None:
    bench = on_disk(tmp_path)
    prompts = {}
    lease = bench.lease()
    assert lease is not None
    for row in lease.tasks.to_pylist():
        prompts[row["task_id"]] = row["tokens"]
    bench.report(ids_of(lease)[:3], "refused")
    bench.report(ids_of(lease)[3:], "ok")
    pulled = {row["task_id"]: row["status"] for row in bench.owner.pull("c", 99).to_pylist()}  # type: ignore[union-attr]
    dead = [at for at, status in pulled.items() if status != "ok"]
    bench.retire([at for at, status in pulled.items() if status == "ok"])
    assert bench.bury(dead) == 3
    work_off(bench, range(1, 8))
    assert bench.disk.first_lsn > bench.owner.core.state.index.done_frames.view[0]
    bench.crash()
    assert requeue(bench, dead) == RequeueReply(requeued=3)
    bench.attach()
    again = bench.lease()
    assert again is not None
    for row in again.tasks.to_pylist():
        assert row["tokens"] == prompts[row["task_id"]]
    assert bench.owner.verify().differences == []
    bench.close()


def test_prompts_that_made_room_under_pressure_are_told_as_gone(tmp_path: Path) -> None:
    bench = on_disk(tmp_path, high_water=1 << 17)
    lease = bench.lease()
    assert lease is not None
    bench.finish(lease, "refused")
    dead = bench.pull()
    assert bench.bury(dead) == 40
    upkeep = bench.owner.upkeep
    assert upkeep is not None
    bench.owner.commit()
    bench.disk.roll()
    upkeep.disk_full = True
    upkeep._make_room()
    bench.settle()
    assert bench.disk.first_lsn > 1
    assert requeue(bench, dead) == RequeueReply(gone=40)
    assert bench.counts() == {"dead": 40}
    assert bench.owner.verify().differences == []
    bench.close()


def test_an_open_submission_that_lost_rows_to_pressure_is_cleared_again_without_them(
    tmp_path: Path,
) -> None:
    """Rows that are gone were copied forward from wherever the next ones lay, and the submission then had
    other content than its fingerprint says."""
    bench = on_disk(tmp_path)
    parts = [tasks_of([30] * 30, seed=seed) for seed in (50, 51)]
    header = submission_of(parts, 99)
    bench.owner.open_submission(header)
    bench.upload(header, 0, parts[0])
    bench.owner.commit()
    while (lease := bench.lease()) is not None:
        bench.finish(lease)
    bench.retire(bench.pull())
    upkeep = bench.owner.upkeep
    assert upkeep is not None
    bench.disk.roll()
    upkeep.disk_full = True
    upkeep._make_room()
    bench.settle()
    assert bench.disk.first_lsn > 1
    work_off(bench, range(1, 8))
    bench.upload(header, 30, parts[1])
    bench.owner.commit()
    assert bench.owner.close_submission(header.submission_id).closed
    rest = bench.lease()
    assert rest is not None
    wanted = parts[1].column("tokens").to_pylist()
    first = sequence_of(min(ids_of(rest)))
    for row in rest.tasks.to_pylist():
        assert row["tokens"] == wanted[sequence_of(row["task_id"]) - first]
    assert bench.owner.verify().differences == []
    bench.close()
