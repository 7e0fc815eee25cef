"""Checkpoints are a cache as long as the log is whole, and a durable fact once its front was dropped."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.broker import snapshot
from fabric_pipelines.broker.index import COLUMNS
from fabric_pipelines.broker.lanes import Lane
from fabric_pipelines.broker.state import State, SubmissionRecord
from fabric_pipelines.errors import Backpressure, CorruptionFound, NotFetched
from fabric_pipelines.records.batch import Budget
from tests.support_broker import EMBED, ids_of, submission_of, tasks_of
from tests.support_broker_disk import DiskBench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[DiskBench]:
    made = DiskBench(folder=tmp_path / "journal")
    yield made
    made.close()


def work(bench: DiskBench, mark: int = 0, *, land: int | None = None) -> list[int]:
    """A submission of 40 tasks: 30 leased, 25 reported, of which `land` (default all) are landed."""
    batches = [tasks_of([30 + i] * 10, seed=mark * 10 + i) for i in range(4)]
    header = submission_of(batches, mark, sampling=EMBED if mark % 2 else {**GENERATE_ONE})
    bench.submit(header, batches)
    bench.attach()
    done: list[int] = []
    while len(done) < 30 and (lease := bench.lease(budget=Budget(5, 1 << 20, None))) is not None:
        done += ids_of(lease)
    bench.report(done[:24])
    bench.report(done[24:25], "refused")
    pulled = bench.pull()
    landed = [at for at in pulled if at in done[:24]][:land]
    bench.retire(landed)
    return landed


GENERATE_ONE = {"kind": "generate", "temperature": 0.0, "top_k": 1, "seed": 1}


def newest_file(bench: DiskBench) -> Path:
    return max(bench.folder.glob("checkpoint-*"))


def same(mine: State, theirs: State) -> list[str]:
    return snapshot.take(mine).differences(snapshot.take(theirs)) + mine.differences(theirs)


def test_a_snapshot_gives_the_state_back_bit_for_bit(bench: DiskBench) -> None:
    work(bench)
    work(bench, 1, land=3)
    state = bench.owner.core.state
    again = snapshot.restore(snapshot.take(state))
    assert same(state, again) == []
    assert again.audit() == []


@pytest.mark.parametrize("block_rows", [1, 3, 1 << 16])
def test_a_snapshot_does_not_move_with_its_state(
    bench: DiskBench, monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    """Whether a block is copied, kept as one value or handed out as it is, because all of it is retired."""
    monkeypatch.setattr(snapshot, "BLOCK_ROWS", block_rows)
    work(bench)
    before = snapshot.take(bench.owner.core.state)
    frozen = {name: column.copy() for name, column in before.columns.items()}
    work(bench, 1)
    work(bench, 2)
    assert all(np.array_equal(before.columns[name], frozen[name]) for name in frozen)


def test_a_restart_loads_the_checkpoint_and_replays_only_the_tail(bench: DiskBench) -> None:
    work(bench)
    bench.checkpoint()
    covered = bench.owner.upkeep.newest.lsn  # type: ignore[union-attr]
    work(bench, 1)
    bench.crash()
    assert bench.owner.restored.from_lsn == covered + 1
    assert bench.owner.restored.ignored == []
    assert bench.owner.verify().differences == []
    bench.attach()
    assert bench.lease() is not None


def test_a_checkpoint_with_any_byte_flipped_is_ignored_and_the_older_one_used(
    bench: DiskBench,
) -> None:
    work(bench)
    bench.checkpoint()
    older = bench.owner.upkeep.newest.lsn  # type: ignore[union-attr]
    work(bench, 1)
    bench.checkpoint()
    path = newest_file(bench)
    good = path.read_bytes()
    size = bench.owner.upkeep.newest.size  # type: ignore[union-attr]
    head = struct.unpack_from("<4sIQI", good)[2]
    counted = {*range(0, 20), *range(64, 64 + head, 97), *covered_bytes(good)}
    assert max(counted) < size
    for offset in sorted(counted):
        bad = bytearray(good)
        bad[offset] ^= 0x10
        path.write_bytes(bad)
        loaded = bench.owner._checkpoints.load(bench.owner.upkeep.newest)  # type: ignore[union-attr,arg-type]
        assert isinstance(loaded, str), offset
    bench.crash()
    assert bench.owner.restored.from_lsn == older + 1
    assert len(bench.owner.restored.ignored) == 1
    assert bench.owner.verify().differences == []


def covered_bytes(content: bytes) -> list[int]:
    """A byte in the middle of each stored column."""
    length = struct.unpack_from("<4sIQI", content)[2]
    start = (64 + length + 63) // 64 * 64
    sections = json.loads(content[64 : 64 + length])["sections"]
    return [start + s["offset"] + s["stored"] // 2 for s in sections if s["stored"]]


def test_without_any_checkpoint_file_the_whole_log_is_enough(bench: DiskBench) -> None:
    work(bench)
    bench.checkpoint()
    work(bench, 1)
    for path in bench.folder.glob("checkpoint-*"):
        path.unlink()
    bench.crash()
    assert bench.owner.restored.from_lsn == 1
    assert bench.owner.verify().differences == []


def test_a_checkpoint_that_the_log_does_not_know_is_not_there(bench: DiskBench) -> None:
    """Its file became durable, its fact did not: perhaps from a moment that was cut off the log."""
    work(bench)
    upkeep = bench.owner.upkeep
    assert upkeep is not None
    lsn = bench.journal.durable_lsn + 1000
    upkeep._checkpoints.claim(lsn)
    upkeep._checkpoints.write(snapshot.take(bench.owner.core.state), lsn)
    bench.crash()
    assert bench.owner.restored.from_lsn == 1
    assert not list(bench.folder.glob("checkpoint-*"))


def test_a_checkpoint_is_due_after_so_many_bytes_of_log(tmp_path: Path) -> None:
    bench = DiskBench(folder=tmp_path / "journal", checkpoint_bytes=30_000)
    work(bench)
    bench.settle()
    work(bench, 1)
    bench.settle()
    assert bench.owner.upkeep.counters["checkpoints"] >= 1  # type: ignore[union-attr]
    assert len(list(bench.folder.glob("checkpoint-*"))) <= 3
    bench.close()


# -- space


def drain(bench: DiskBench) -> None:
    bench.attach()
    while (lease := bench.lease(budget=Budget(40, 1 << 20, None))) is not None:
        bench.finish(lease)
    pulled = bench.owner.pull("z", 1 << 20)
    for status, settle in (("ok", bench.retire), ("refused", bench.bury)):
        rows = [] if pulled is None else pulled.to_pylist()
        if ids := [row["task_id"] for row in rows if row["status"] == status]:
            settle(ids)
    bench.owner.release_pulled("z")


def test_a_dead_front_is_dropped_and_its_files_are_used_again(bench: DiskBench) -> None:
    for mark in range(6):
        work(bench, mark)
        drain(bench)
        bench.checkpoint()
    assert bench.disk.first_lsn > 1
    assert bench.owner.upkeep.counters["segments_dropped"] >= 2  # type: ignore[union-attr]
    assert len(list(bench.folder.glob("*.segment"))) <= 4
    assert bench.owner.verify().differences == []
    bench.crash()
    assert bench.owner.verify().differences == []
    assert bench.counts() == {"retired": 234, "dead": 6}


def test_live_rows_of_a_mostly_dead_front_are_copied_forward_under_their_ids(
    bench: DiskBench,
) -> None:
    slow = tasks_of([50] * 4, seed=77)
    header = submission_of([slow], 99, engine="slow@engine")
    bench.submit(header, [slow])
    first_id = bench.owner.submission(header.submission_id).first_task_id  # type: ignore[union-attr]
    for mark in range(11):
        work(bench, mark, land=22)
        bench.checkpoint()
        if mark == 4:
            drain(bench)
    drain(bench)
    bench.checkpoint()
    counters = bench.owner.upkeep.counters  # type: ignore[union-attr]
    assert counters["moved_tasks"] >= 4
    assert counters["moved_outcomes"] >= 1
    assert bench.owner.verify().differences == []
    bench.crash()
    assert bench.owner.verify().differences == []
    assert bench.disk.first_lsn > 1
    bench.attach("s", engine="slow@engine")
    lease = bench.lease("s")
    assert lease is not None
    got = sorted(lease.tasks.to_pylist(), key=lambda row: row["task_id"])
    assert [row["task_id"] for row in got] == [first_id + i for i in range(4)]  # type: ignore[operator]
    for mine, theirs in zip(got, slow.to_pylist(), strict=True):
        assert {name: mine[name] for name in theirs} == theirs


def test_outcomes_that_were_copied_forward_are_pulled_as_they_were(bench: DiskBench) -> None:
    work(bench, 0, land=0)
    before = bench.owner.pull("a", 1 << 20)
    assert before is not None
    for mark in range(1, 8):
        work(bench, mark)
        kept = set(before.column("task_id").to_pylist())
        bench.attach()
        while (lease := bench.lease()) is not None:
            bench.finish(lease)
        bench.retire(
            [
                row["task_id"]
                for row in bench.owner.pull(f"p{mark}", 1 << 20).to_pylist()  # type: ignore[union-attr]
                if row["task_id"] not in kept and row["status"] == "ok"
            ]
        )
        bench.checkpoint()
    assert bench.owner.upkeep.counters["moved_outcomes"] >= 25  # type: ignore[union-attr]
    bench.crash()
    after = bench.owner.pull("b", 1 << 20)
    assert after is not None
    wanted = before.column("task_id")
    at = pa.compute.index_in(wanted, after.column("task_id"))
    assert after.take(at).equals(before)
    assert bench.owner.verify().differences == []


def test_the_refusal_at_the_high_water_mark_ends_when_results_have_landed(tmp_path: Path) -> None:
    bench = DiskBench(folder=tmp_path / "journal", high_water=4 << 16)
    for mark in range(100):
        batch = tasks_of([100] * 20, seed=mark)
        try:
            bench.submit(submission_of([batch], mark), [batch])
        except Backpressure:
            break
    bench.settle()
    with pytest.raises(Backpressure):
        bench.submit(submission_of([batch], mark), [batch])
    drain(bench)
    bench.settle()
    assert bench.submit(submission_of([batch], mark), [batch]).closed
    assert bench.journal.bytes_used < bench.high_water // 2
    assert bench.owner.verify().differences == []
    bench.crash()
    assert bench.owner.verify().differences == []
    bench.close()


def test_a_submission_larger_than_the_mark_goes_through_it(tmp_path: Path) -> None:
    """Its early rows leave the log while it is still open; its fingerprint is carried along."""
    bench = DiskBench(folder=tmp_path / "journal", high_water=3 << 16)
    batches = [tasks_of([100] * 20, seed=i) for i in range(60)]
    header = submission_of(batches, 5)
    bench.owner.open_submission(header)
    refused = 0
    for at, batch in enumerate(batches):
        for _ in range(3):
            try:
                bench.upload(header, at * 20, batch)
                break
            except Backpressure:
                refused += 1
                drain(bench)
                bench.settle()
        else:
            pytest.fail(f"batch {at} was refused for good")
        bench.owner.commit()
    assert refused >= 2
    assert bench.owner.close_submission(header.submission_id).closed
    assert bench.owner.core.counters["closed_unproven"] == 0
    assert bench.owner.verify().differences == []
    bench.close()


def test_a_lost_base_is_refused_by_name_and_seen_by_verify(bench: DiskBench) -> None:
    for mark in range(4):
        work(bench, mark)
        drain(bench)
        bench.checkpoint()
    upkeep = bench.owner.upkeep
    assert upkeep is not None
    assert upkeep.base is not None
    base = bench.folder / f"checkpoint-{upkeep.base.base:016d}"
    content = base.read_bytes()
    base.unlink()
    assert "base of the log is lost" in bench.owner.verify().differences[0]
    for path in bench.folder.glob("checkpoint-*"):
        path.unlink()
    with pytest.raises(CorruptionFound, match="restore the checkpoint file"):
        bench.crash()
    base.write_bytes(content)
    bench.owner = bench._open()
    assert bench.owner.verify().differences == []


def test_a_full_disk_delays_a_checkpoint_and_harms_nothing(bench: DiskBench) -> None:
    work(bench)
    upkeep = bench.owner.upkeep
    assert upkeep is not None

    class Full:
        def __getattr__(self, name: str) -> object:
            return getattr(bench.ops, name)

        def pwritev(self, fd: int, buffers: object, offset: int) -> int:
            raise OSError(28, "no space")

    upkeep._checkpoints._ops = Full()  # type: ignore[assignment]
    bench.checkpoint()
    assert upkeep.counters["checkpoints_refused"] == 1
    upkeep._checkpoints._ops = bench.ops
    bench.checkpoint()
    assert upkeep.counters["checkpoints"] == 1


# -- scrub


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


def test_the_background_scrub_comes_round_a_slice_at_a_time(bench: DiskBench) -> None:
    for mark in range(3):
        work(bench, mark)
    bench.settle()
    counters = bench.owner.scrubbing.counters  # type: ignore[union-attr]
    assert counters["scrub_rounds"] >= 2
    assert counters["scrubbed_bytes"] > 2 * (1 << 16)
    assert bench.owner.scrub_report().ok


def test_a_flipped_bit_among_live_tasks_names_segment_and_tasks_and_stops_nobody_else(
    bench: DiskBench,
) -> None:
    batch = tasks_of([100] * 10, seed=5)
    state = bench.submit(submission_of([batch], 50, engine="slow@engine"), [batch])
    for mark in range(3):
        work(bench, mark)
    segment = bench.disk._segments[0]
    lsn = int(bench.owner.core.state.index.frames.view[0])
    flip(segment.path, segment.offsets[lsn - segment.first_lsn] + 700)
    bench.settle()
    (frame,) = bench.owner.scrub_report().damaged
    first = state.first_task_id
    assert (frame.segment, frame.lsn) == (str(segment.path), lsn)
    assert (frame.tasks, frame.task_ids) == (10, f"{first}-{first + 9}")  # type: ignore[operator]
    assert frame.live == 10
    bench.attach("s", engine="slow@engine")
    with pytest.raises(NotFetched, match=f"CorruptionFound: {segment.path}"):
        bench.lease("s")
    assert bench.lease() is not None, "all others go on"
    flip(segment.path, segment.offsets[lsn - segment.first_lsn] + 700)
    bench.settle()
    assert bench.owner.scrub_report().ok
    assert bench.owner.core.fault == ""
    lease = bench.lease("s")
    assert lease is not None, "restored in place, and seen to be"
    assert lease.tasks.num_rows == 10
    assert bench.owner.status().counters["frames_repaired"] == 1


def test_verify_refuses_a_damaged_control_frame_wherever_the_scrub_stands(bench: DiskBench) -> None:
    for mark in range(4):
        work(bench, mark)
        bench.owner.commit()
        bench.disk.roll()
    sealed = [segment for segment in bench.disk._segments if segment.sealed]
    assert len(sealed) >= 3
    for looked_at in range(len(sealed) + 1):
        for segment in (sealed[0], sealed[-1]):
            seal = segment.end - 128
            flip(segment.path, seal + 80)
            report = bench.owner.verify()
            assert not report.ok
            assert (
                f"{segment.path} is damaged in its SEAL frame: bytes {seal}..{segment.end}"
                in str(report.differences)
            )
            flip(segment.path, seal + 80)
            assert bench.owner.verify().ok, looked_at
        bench.owner.scrub(1)
    assert bench.owner.core.fault == ""


def test_a_flipped_bit_among_the_dead_is_told_and_goes_with_its_segment(bench: DiskBench) -> None:
    for mark in range(4):
        work(bench, mark)
        drain(bench)
    segment = bench.disk._segments[0]
    flip(segment.path, segment.offsets[1] + 700)
    while not bench.owner.scrub(1 << 20):
        pass
    (frame,) = bench.owner.scrub_report().damaged
    assert (frame.segment, frame.tasks, frame.live) == (str(segment.path), 10, 0)
    assert bench.owner.core.fault == ""
    bench.checkpoint()
    assert bench.owner.scrub_report().ok
    assert bench.owner.verify().differences == []


def test_a_caller_that_was_acknowledged_more_than_the_journal_holds_is_told(
    bench: DiskBench,
) -> None:
    work(bench)
    journal_id, durable = bench.disk.journal_id, bench.disk.durable_lsn
    bench.owner.require_kept(journal_id, durable)
    bench.owner.require_kept("of another", durable + 5)
    with pytest.raises(CorruptionFound, match=f"ends at LSN {durable}.*up to {durable + 1}"):
        bench.owner.require_kept(journal_id, durable + 1)


def test_on_a_full_disk_leases_wait_and_no_outcome_or_retirement_does(bench: DiskBench) -> None:
    """What a worker was given has its space; what has landed must be written down, or nothing ever frees any."""
    batch = tasks_of([10] * 400)
    bench.submit(submission_of([batch]), [batch])
    bench.attach()
    full = {"on": True}

    class Full:
        def __getattr__(self, name: str) -> object:
            return getattr(bench.ops, name)

        def fallocate(self, fd: int, size: int) -> None:
            if full["on"]:
                raise OSError(28, "no space")
            bench.ops.fallocate(fd, size)

    bench.disk._ops = bench.disk._shelf._ops = Full()  # type: ignore[assignment]
    leases = []
    while (lease := bench.lease(budget=Budget(1, 1 << 20, None))) is not None:
        leases.append(lease)
    assert len(leases) >= 2
    assert bench.owner.core.counters["held_for_room"] >= 1
    for held in leases:
        assert bench.finish(held).accepted == 1
        bench.owner.idle()
    landed = bench.pull()
    assert [bench.retire([at]) for at in landed] == [1] * len(leases)
    full["on"] = False
    bench.settle(1)
    assert bench.lease(budget=Budget(10, 1 << 20, None)) is not None
    assert bench.owner.verify().differences == []


def test_a_field_that_a_snapshot_does_not_know_is_noticed() -> None:
    """A new field of the state must be saved, or named here as derived."""
    derived = {"by_submission", "session_leases", "lane_of", "refused", "recounter"}
    derived |= {"lane_beside", "held_new"}
    saved = {"incarnation", "index", "accounts", "lanes", "submissions", "submission_tasks"}
    saved |= {"retired_tokens", "output_tokens", "computed_padded_tokens", "sessions", "leases"}
    saved |= {"next_lease", "reasons", "engines", "engine_ready", "lane_engine", "frames", "cold"}
    saved |= {"classes", "suspects", "requeues", "vector_bytes", "lives"}
    assert set(vars(State(1))) == saved | derived
    index = {"count", "_capacity", "_columns", "base", "frames", "done_frames", "moved", *COLUMNS}
    assert set(vars(State(1).index)) == index
    lane = {"index", "key", "sampling", "accounts", "generation", "step", "producers", "opened_at"}
    assert set(Lane.__dataclass_fields__) == lane | {
        "metadata_bytes",
        "order",
        "waiting",
        "away",
    }
    record = {
        "index",
        "header",
        "closed",
        "rows",
        "tokens",
        "batches",
        "first_sequence",
        "lanes",
    } | {"abandoned"}
    assert set(SubmissionRecord.__dataclass_fields__) == record
