"""A damaged frame on this disk costs its own rows and nobody else's work: they are withheld, told and given up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines.broker.facts import Kind
from fabric_pipelines.broker.tiering import Water
from fabric_pipelines.errors import CorruptionFound, NotFetched, UsageError
from fabric_pipelines.ids import sequence_of
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.testing.memory_store import MemoryStore
from tests.support_broker import ids_of, submission_of, tasks_of
from tests.support_broker_disk import DiskBench

ROWS = 10


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[DiskBench]:
    made = DiskBench(folder=tmp_path / "journal", segment_bytes=1 << 16)
    yield made
    made.close()


def submit(bench: DiskBench, mark: int, batches: int = 3) -> tuple[str, list[int]]:
    """Submission id and its tasks."""
    made = [tasks_of([30] * ROWS, seed=100 * mark + at) for at in range(batches)]
    header = submission_of(made, mark)
    state = bench.submit(header, made)
    assert state.first_task_id is not None
    return header.submission_id, [state.first_task_id + at for at in range(ROWS * batches)]


def seal(bench: DiskBench) -> None:
    bench.owner.commit()
    bench.disk.roll()


def spoil(bench: DiskBench, kind: Kind, at: int, place: int = 700) -> int:
    """One bit of the payload of the frame `at` of that kind; its LSN."""
    lsn = bench.disk.lsns_of(kind)[at]
    segment = bench.disk._segment_of(lsn)
    flip(segment.path, segment.offsets[lsn - segment.first_lsn] + place)
    return lsn


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def damaged(bench: DiskBench, at: int = 1) -> tuple[str, list[int], list[int]]:
    """Two submissions; the batch `at` of the first is damaged in a sealed segment, and nobody has seen it yet. Its id,
    the tasks that it costs, all others."""
    name, tasks = submit(bench, 1)
    _, others = submit(bench, 2)
    seal(bench)
    bench.checkpoint()
    spoil(bench, Kind.ENQUEUE, at)
    bench.crash()
    bench.attach("w")
    bench.settle(1)
    lost = tasks[ROWS * at : ROWS * (at + 1)]
    return name, lost, sorted({*tasks, *others} - {*lost})


def run_all(bench: DiskBench, budget: int = 7) -> list[int]:
    """Leases and finishes all that it gets until it is told that the rest cannot be read, or there is none."""
    done: list[int] = []
    while True:
        try:
            lease = bench.lease("w", Budget(budget, 1 << 20, None))
        except NotFetched:
            return sorted(done)
        if lease is None:
            return sorted(done)
        done += ids_of(lease)
        bench.finish(lease)


def test_what_is_damaged_is_not_leased_and_all_others_are(bench: DiskBench) -> None:
    name, lost, others = damaged(bench)
    leases = len(bench.disk.lsns_of(Kind.LEASE))
    assert run_all(bench) == others
    held = {
        sequence_of(task)
        for lease in bench.owner.core.state.leases.values()
        for task in lease.tasks.tolist()
    }
    assert not held, "nothing damaged was logged as leased"
    assert len(bench.disk.lsns_of(Kind.LEASE)) > leases
    assert bench.counts() == {"ready": ROWS, "computed": len(others)}
    assert bench.owner.core.fault == ""
    status = bench.owner.status()
    assert status.journal["withheld_tasks"] == ROWS
    (said,) = status.journal["damaged"]
    assert f"rows 10-19 of submission {name[:12]}" in said
    assert f"({lost[0]}-{lost[-1]}" in said
    assert "its tasks are withheld and all others go on" in said
    assert "`fabric broker abandon ID`" in said
    with pytest.raises(NotFetched, match=r"CorruptionFound: .*00000001\.segment is damaged in its"):
        bench.lease("w")
    assert bench.owner.core.state.audit() == []
    assert bench.owner.core.stranded() == []


def test_it_is_withheld_again_after_a_restart(bench: DiskBench) -> None:
    _, _, others = damaged(bench)
    first = run_all(bench)[:1]
    assert first == others[:1]
    bench.settle()
    bench.crash()
    bench.attach("w")
    bench.settle()
    assert run_all(bench) == []
    assert bench.owner.status().journal["withheld_tasks"] == ROWS
    assert sorted(bench.pull()) == others


def test_given_up_its_rows_become_dead_letters_and_the_log_is_whole_without_them(
    bench: DiskBench,
) -> None:
    name, lost, others = damaged(bench)
    run_all(bench)
    state = bench.owner.abandon_submission(name)
    assert (state.closed, state.abandoned) == (True, False), "all of it had come"
    bench.owner.commit()
    assert bench.owner.status().journal["withheld_tasks"] == 0
    pulled = bench.owner.pull("c", 1000)
    assert pulled is not None
    dead = {row["task_id"]: row for row in pulled.to_pylist() if row["status"] != "ok"}
    assert sorted(dead) == lost
    assert [dead[at]["source_row"] for at in lost] == list(range(10, 20)), "of its submission"
    assert {row["error_code"] for row in dead.values()} == {"RowLost"}
    assert "was given up" in dead[lost[0]]["error_text"]
    assert bench.bury(lost) == ROWS
    assert bench.retire(others) == len(others)
    assert bench.owner.core.state.total().open_tasks == 0
    reply = bench.owner.requeue(np.array(lost), "again")
    assert (reply.requeued, reply.gone) == (0, ROWS), "nobody could run them"
    with pytest.raises(UsageError, match="there is nothing to abandon"):
        bench.owner.abandon_submission(name)
    seal(bench)
    bench.checkpoint()
    bench.checkpoint()
    assert bench.owner.scrub_report().ok, "its segment went, damage and all"
    assert bench.owner.verify().ok
    bench.crash()
    assert bench.owner.verify().ok


def test_giving_up_is_a_fact_that_a_replay_gives_again(bench: DiskBench) -> None:
    name, lost, _ = damaged(bench)
    run_all(bench)
    bench.settle()
    bench.owner.abandon_submission(name)
    bench.owner.commit()
    before = bench.owner.core.state
    bench.crash()
    parts = before.differences(bench.owner.core.state)
    assert all(part.startswith(("frames ", "lives ")) for part in parts), parts  # of the new life
    assert bench.owner.states(np.array(lost)) == ["computed"] * ROWS


def test_an_outcome_that_rots_is_passed_over_and_can_be_made_again(bench: DiskBench) -> None:
    name, tasks = submit(bench, 1)
    bench.attach("w")
    for _ in range(2):
        lease = bench.lease("w", Budget(ROWS, 1 << 20, None))
        assert lease is not None
        bench.finish(lease)
    seal(bench)
    bench.checkpoint()
    spoil(bench, Kind.COMPUTED, 0)
    bench.crash()
    landed = bench.pull()
    assert len(landed) == ROWS, "those of the other report"
    assert bench.owner.status().journal["withheld_tasks"] == ROWS
    bench.retire(landed)
    bench.owner.abandon_submission(name)
    lost = bench.pull()
    assert len(lost) == ROWS
    assert not set(lost) & set(landed)
    bench.bury(lost)
    assert bench.owner.requeue(np.array(lost), "again").requeued == ROWS, "their rows are here"
    bench.attach("w")
    bench.settle(1)
    assert run_all(bench) == sorted({*tasks} - {*landed})
    bench.retire(bench.pull())
    assert bench.counts() == {"retired": len(tasks)}


def test_a_row_that_rots_while_it_is_leased_is_reported_or_withheld_when_it_comes_back(
    bench: DiskBench,
) -> None:
    _, tasks = submit(bench, 1)
    bench.attach("w")
    lease = bench.lease("w", Budget(12, 1 << 20, None), call=1)
    assert lease is not None
    seal(bench)
    bench.checkpoint()
    spoil(bench, Kind.ENQUEUE, 0)
    while not bench.owner.scrub(1 << 20):
        pass
    held = ids_of(lease)
    rotten = set(tasks[:ROWS])
    again = bench.lease("w", Budget(12, 1 << 20, None), call=1)
    got = set() if again is None else set(ids_of(again))
    assert got == set(held) - rotten, "the answer was lost: what cannot be read goes back"
    assert bench.counts()["ready"] == len(tasks) - len(got)
    bench.report([at for at in held if at in rotten])  # the answer came, and it was worked on
    bench.report(sorted(got))
    assert sorted([*run_all(bench), *held]) == sorted({*tasks} - ({*tasks[:ROWS]} - {*held}))


def test_poison_halves_go_on_without_the_rows_that_cannot_be_read(bench: DiskBench) -> None:
    _, tasks = submit(bench, 1, batches=2)
    seal(bench)
    bench.checkpoint()
    bench.attach("w")
    lease = bench.lease("w", Budget(20, 1 << 20, None))
    assert lease is not None
    spoil(bench, Kind.ENQUEUE, 0)
    while not bench.owner.scrub(1 << 20):
        pass
    bench.owner.nack("w", np.array(ids_of(lease)), "it died", attempted=True)
    done: list[int] = []
    while True:
        bench.attach("w")
        try:
            lease = bench.lease("w", Budget(20, 1 << 20, None))
        except NotFetched:
            break
        assert lease is not None
        done += ids_of(lease)
        bench.finish(lease)
    assert sorted(done) == tasks[ROWS:]
    lsn = bench.disk.lsns_of(Kind.ENQUEUE)[0]
    segment = bench.disk._segment_of(lsn)
    flip(segment.path, segment.offsets[lsn - segment.first_lsn] + 700)
    while not bench.owner.scrub(1 << 20):
        pass
    lease = bench.lease("w", Budget(20, 1 << 20, None))
    assert lease is not None
    assert len(ids_of(lease)) < ROWS, "restored, they still go out by halves"


def test_damage_that_no_checkpoint_covers_is_covered_by_the_next_one(bench: DiskBench) -> None:
    submit(bench, 1)
    seal(bench)
    lsn = spoil(bench, Kind.ENQUEUE, 0)
    while not bench.owner.scrub(1 << 20):
        pass
    upkeep = bench.owner.upkeep
    assert upkeep is not None
    assert upkeep.newest is None
    bench.settle(2)
    assert upkeep.newest is not None
    assert upkeep.newest.lsn > lsn
    bench.crash()
    bench.attach("w")
    bench.settle(1)
    assert len(run_all(bench)) == 2 * ROWS


def test_damage_in_a_fact_costs_no_task_and_is_covered_by_a_checkpoint(bench: DiskBench) -> None:
    submit(bench, 1)
    bench.attach("w")
    lease = bench.lease("w")
    assert lease is not None
    seal(bench)
    at = bench.disk.lsns_of(Kind.LEASE)[0]
    segment = bench.disk._segment_of(at)
    flip(segment.path, segment.offsets[at - segment.first_lsn] + 80)
    content = segment.path.read_bytes()
    bench.close()
    with pytest.raises(CorruptionFound, match=f"LSN {at} "):
        bench._open()  # what it says is not known otherwise
    flip(segment.path, segment.offsets[at - segment.first_lsn] + 80)
    bench.owner = bench._open()
    segment.path.write_bytes(content)
    while not bench.owner.scrub(1 << 20):
        pass
    (frame,) = bench.owner.scrub_report().damaged
    assert (frame.lsn, frame.tasks) == (at, 0)
    bench.settle(2)
    bench.crash()
    assert bench.counts()


def test_a_damaged_segment_does_not_go_cold_and_is_cleared_up_to(tmp_path: Path) -> None:
    store = MemoryStore()
    bench = DiskBench(
        folder=tmp_path / "journal",
        segment_bytes=1 << 15,
        store=store,
        water=Water(1 << 30, 1 << 29),
    )
    _, lost, others = damaged(bench)
    assert run_all(bench) == others
    epoch = bench.disk._segment_of(bench.disk.lsns_of(Kind.ENQUEUE)[1]).epoch
    bench.retire(bench.pull())
    bench.tiering.water = Water(0, 0)
    for mark in (3, 4):
        submit(bench, mark)
        seal(bench)
        bench.checkpoint()
    held = {h.epoch: h.cold for h in bench.disk.holdings}
    assert held[epoch] is False, "neither put, nor dropped"
    assert any(held.values()), "others went"
    assert bench.disk.cold.object_name(epoch) not in store.objects
    assert (
        sorted(bench.owner.core.state.task_ids(bench.owner.core.state.in_state(0)))[:1] == lost[:1]
    )
    bench.close()


def test_damage_in_the_segment_that_is_written_to_is_found_by_a_verify_and_withheld(
    bench: DiskBench,
) -> None:
    _, tasks = submit(bench, 1)
    spoil(bench, Kind.ENQUEUE, 1)
    report = bench.owner.verify()
    assert not report.ok
    (frame,) = report.damaged
    assert (frame.tasks, frame.live) == (ROWS, ROWS)
    assert bench.disk._segments[0].sealed, "so that a start does not read it through"
    bench.settle(2)
    bench.crash()
    bench.attach("w")
    bench.settle(1)
    assert run_all(bench) == tasks[:ROWS] + tasks[2 * ROWS :]


@pytest.mark.parametrize("place", [300, 700, 1100])
@pytest.mark.parametrize("kind", [Kind.ENQUEUE, Kind.COMPUTED])
def test_what_rots_after_it_was_read_is_found_as_well(
    bench: DiskBench, kind: Kind, place: int
) -> None:
    """A mapped frame was compared once and stays in memory as a view of its file: whoever reads that file again."""
    _, tasks = submit(bench, 1, batches=2)
    bench.attach("w")
    if kind is Kind.COMPUTED:
        lease = bench.lease("w", Budget(12, 1 << 20, None))
        assert lease is not None
        bench.finish(lease)
    seal(bench)
    bench.checkpoint()
    bench.crash()
    bench.attach("w")
    bench.settle(1)
    whole = {sequence_of(at): row for at, row in zip(tasks, rows_of(bench, 20), strict=True)}
    bench.pull()
    bench.owner.release_pulled("c")
    spoil(bench, kind, 0, place)
    lease = None
    try:
        lease = bench.lease("w", Budget(20, 1 << 20, None))
    except NotFetched:
        assert kind is Kind.ENQUEUE
    for row in lease.tasks.to_pylist() if lease is not None else ():
        assert row["tokens"] == whole[sequence_of(row["task_id"])]
    if kind is Kind.COMPUTED:
        assert bench.pull() == []
        assert bench.owner.status().journal["withheld_tasks"] == 12
    else:
        bench.owner.scrub(1 << 20)
        assert bench.owner.status().journal["withheld_tasks"] == ROWS


def rows_of(bench: DiskBench, count: int) -> list[list[int]]:
    """Prompts of the first tasks, out of order, so that several frames are gathered from."""
    index = np.arange(count, dtype=np.int64)[::-1].copy()
    found = bench.owner.payloads.tasks(index).column("tokens").to_pylist()
    return found[::-1]


def test_a_submission_with_a_damaged_batch_can_still_be_ended(bench: DiskBench) -> None:
    """Its fingerprint cannot be proven any more, which is counted."""
    made = [tasks_of([30] * ROWS, seed=at) for at in range(3)]
    header = submission_of(made, 1)
    bench.owner.open_submission(header)
    for at, batch in enumerate(made):
        bench.upload(header, at * ROWS, batch)
    seal(bench)
    bench.checkpoint()
    spoil(bench, Kind.ENQUEUE, 1)
    bench.crash()
    assert bench.owner.close_submission(header.submission_id).closed
    assert bench.owner.core.counters["closed_unproven"] == 1
    assert bench.owner.status().journal["withheld_tasks"] == ROWS
