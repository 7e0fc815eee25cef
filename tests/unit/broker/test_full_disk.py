"""A disk that is full to the last segment: what is leased is taken, retired and freed, whatever its size and order."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.facts import Computed, Settled
from fabric_pipelines.broker.promise import (
    NAME_BYTES_MAX,
    OUTCOME_BYTES,
    PROOF_BYTES_MAX,
    SETTLE_BYTES,
    TEXT_BYTES_MAX,
    TOKEN_BYTES,
    bounded,
    require_name,
    require_proof,
)
from fabric_pipelines.broker.room import Room
from fabric_pipelines.errors import Backpressure, SchemaError, StorageFailed, UsageError
from fabric_pipelines.journal.frame import CONTROL_FRAME_BYTES, HEADER_BYTES, padded
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.completion import ERROR_TEXT_BYTES_MAX, completion_batch
from fabric_pipelines.testing.sim_disk import SimDisk
from tests.support_broker import completions, ids_of, ipc_of, submission_of, tasks_of
from tests.support_broker_disk import DiskBench

NEW = 300
ALONE = 2 * CONTROL_FRAME_BYTES + 256  # COMMIT, the mark that it is durable, a step of its lane


def largest(ids: list[int], status: str, attempts: list[int], new: int = NEW) -> pa.RecordBatch:
    """Outcomes with all that a worker may say about a task."""
    columns = completions(ids, status, attempts).to_pydict()
    columns |= {name: ["x" * most] * len(ids) for name, most in TEXT_BYTES_MAX.items()}
    columns["finish_reason"] = ["stop" if status == "ok" else "error"] * len(ids)
    columns["error_text"] = ["e" * ERROR_TEXT_BYTES_MAX] * len(ids)
    columns["output"] = [list(range(new))] * len(ids)
    return completion_batch(columns)


def frame_bytes(fact: Any) -> int:
    return HEADER_BYTES + padded(sum(map(len, fact.encode())))


def test_what_is_promised_is_enough_for_the_largest_outcome_alone_and_its_retirement() -> None:
    batch = largest([1], "ok", [0], new=1000)
    name = "n" * (NAME_BYTES_MAX - 2)
    one, token = np.arange(1), np.zeros(1, np.int32)
    verdict = np.ones(1, np.uint8)
    fact = Computed(name, one, verdict, token, 1 << 40, ipc_of(batch), "k" * 64, 1 << 20)
    assert frame_bytes(fact) + ALONE <= 1000 * TOKEN_BYTES + OUTCOME_BYTES
    settled = Settled(False, one, "dead_letter", {"uri": "u" * (PROOF_BYTES_MAX - 10)})
    assert frame_bytes(settled) + ALONE <= SETTLE_BYTES


def test_text_is_bounded_where_it_enters() -> None:
    columns = completions([1, 2], "failed").to_pydict()
    columns["error_text"] = ["ä" * 4000, None]
    cut = bounded(completion_batch(columns)).column("error_text").to_pylist()
    assert cut == ["ä" * (ERROR_TEXT_BYTES_MAX // 2), None]
    columns["engine"] = ["e" * 257, "e"]
    with pytest.raises(SchemaError, match="'engine' of 257 bytes"):
        bounded(completion_batch(columns))
    with pytest.raises(UsageError, match="proof is of"):
        require_proof({"uri": "u" * PROOF_BYTES_MAX})
    with pytest.raises(UsageError, match="session is a name"):
        require_name("\U0001f600" * 200)


class Course:
    """Tasks of one submission after another through a disk of so many segments."""

    def __init__(self, segment: int, segments: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.bench = DiskBench(
            Limits(lease_s=1e6, attempts_max=2),
            ops=SimDisk(capacity=segments * segment + (1 << 18)),
            segment_bytes=segment,
        )
        self.held: list[int] = []
        self.mark = 0
        self.said = ""

    def fill(self, most: int = 1 << 20) -> int:
        """Submit until the broker takes no more; how many times it took something."""
        taken = 0
        while taken < most:
            batch = tasks_of([5 + 7 * self.mark % 56] * 20, seed=self.mark, new=NEW)
            try:
                self.bench.submit(submission_of([batch], self.mark), [batch])
            except (Backpressure, StorageFailed) as refused:
                self.said = str(refused)
                return taken
            taken, self.mark = taken + 1, self.mark + 1
        return taken

    def restart(self) -> None:
        held = self.held
        self.bench.crash()
        reply = self.bench.attach(held=held)
        assert sorted(reply.accepted) == sorted(held), "what was leased is still promised"

    def lease(self) -> None:
        lease = self.bench.lease(budget=Budget(self.draw.choice([1, 3, 40]), 1 << 20, None))
        self.held += [] if lease is None else ids_of(lease)

    def report(self) -> None:
        """One alone, or some."""
        count = self.draw.choice([1, 1, 1, 7])
        ids, self.held = self.held[:count], self.held[count:]
        index = self.bench.owner.core.state.index
        attempts = [int(index.attempts[at & ((1 << 40) - 1)]) for at in ids]
        status = self.draw.choice(["ok", "ok", "failed"])
        batch = largest(ids, status, attempts)
        reply = self.bench.owner.computed("w", batch, ipc_of(batch))
        assert reply.accepted == len(ids)
        self.bench.owner.commit()
        self.bench.owner.idle()

    def land(self) -> None:
        """One by one."""
        pulled = self.bench.owner.pull("c", self.draw.choice([1, 5, 1000]))
        for row in [] if pulled is None else pulled.to_pylist():
            settle = self.bench.retire if row["status"] == "ok" else self.bench.bury
            assert settle([row["task_id"]]) == 1
            self.bench.owner.idle()

    def drain(self, steps: int, restarts: int) -> None:
        due = {self.draw.randrange(steps // 2) for _ in range(restarts)}
        for step in range(steps):
            if step in due:
                self.restart()
            self.lease()
            while self.held and (self.draw.random() < 0.7 or step % 9 == 8):
                self.report()
            if self.draw.random() < 0.5:
                self.land()
            self.bench.settle(1)
            if set(self.bench.counts()) <= {"retired", "dead"}:
                return
        pytest.fail(f"wedged at {self.bench.counts()} {self.bench.owner.status().journal}")


@pytest.mark.parametrize(
    ("segment", "segments", "seed", "taken_by_others"),
    [(1 << 16, 6, 1, False), (1 << 16, 9, 2, True), (1 << 17, 6, 3, True)],
)
def test_a_disk_full_of_work_drains_to_empty_and_takes_new_tasks_again(
    segment: int, segments: int, seed: int, taken_by_others: bool
) -> None:
    """Whatever is left of it is taken by another program while the tasks run: what was promised is held."""
    course = Course(segment, segments, seed)
    course.bench.attach()
    first = course.fill()
    assert first >= 30
    disk = course.bench.ops
    assert isinstance(disk, SimDisk)
    if taken_by_others:
        disk.capacity -= disk.free_bytes(course.bench.folder)
    course.drain(3000, restarts=3)
    course.fill()  # refused or not: it tells upkeep that space is wanted
    course.bench.settle(60)
    course.drain(3000, restarts=1)
    course.bench.settle(60)
    disk.capacity = 1 << 40
    assert course.fill(10) == 10
    course.drain(3000, restarts=1)
    assert course.bench.owner.core.counters["late_acks"] == 0
    assert course.bench.owner.verify().differences == []
    course.bench.close()


class FullDisk(SimDisk):
    """On which a file that was not allocated cannot grow either."""

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        grown = offset + sum(map(len, buffers)) - self.size_of(self._open[fd])
        if grown > max(self.free_bytes(DiskBench.folder), 0):
            raise OSError(errno.ENOSPC, "full")
        return super().pwritev(fd, buffers, offset)

    def take_rest(self) -> None:
        """Another program does."""
        self.capacity -= max(self.free_bytes(DiskBench.folder), 0)


def drained(*, is_dropped: bool) -> tuple[FullDisk, DiskBench]:
    """All that the disk has lies in free segments, or in a log of which nothing lives; the broker was restarted."""
    disk = FullDisk(capacity=24 << 16)
    bench = DiskBench(Limits(lease_s=1e6, attempts_max=2), ops=disk, segment_bytes=1 << 16)
    bench.attach()
    assert all(takes(bench, mark) for mark in range(12))
    while (lease := bench.lease()) is not None:
        bench.finish(lease)
        bench.retire(bench.pull())
    assert set(bench.counts()) == {"retired"}
    if is_dropped:
        bench.disk.roll()
        bench.checkpoint()
    disk.unlink(bench.folder / "checkpoint.new")
    bench.disk.hold(1 << 40)
    disk.take_rest()
    bench.crash()
    return disk, bench


def takes(bench: DiskBench, mark: int) -> bool:
    batch = tasks_of([1500] * 7, seed=mark)
    try:
        bench.submit(submission_of([batch], mark), [batch])
    except (Backpressure, StorageFailed):
        return False
    return True


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_drained_disk_takes_a_producer_that_comes_every_five_seconds_again(
    is_dropped: bool,
) -> None:
    disk, bench = drained(is_dropped=is_dropped)
    upkeep = bench.owner.upkeep
    assert upkeep is not None
    assert disk.free_bytes(bench.folder) == 0
    tries = 1
    while not takes(bench, 100):
        assert tries < 2, "the second try gets in"
        tries += 1
        bench.settle(8)  # 4.8 s
        upkeep.settle()  # nobody gets in only because a checkpoint is under way
    bench.settle(8)
    assert all(takes(bench, 101 + more) for more in range(3))
    bench.settle(2)
    assert not upkeep.disk_full
    assert bench.owner.verify().differences == []
    bench.close()


def test_a_disk_full_of_tasks_that_nobody_runs_is_told_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is under way and nothing can be dropped: Backpressure would have the producer come back for ever."""
    _, bench = drained(is_dropped=True)
    upkeep = bench.owner.upkeep
    assert upkeep is not None
    mark = 100
    while takes(bench, mark):
        mark += 1
        bench.settle(1)
    monkeypatch.setattr(upkeep, "_has_checkpoint_room", lambda size, keep: False)
    monkeypatch.setattr(Room, "require", lambda self, size: None)
    for _ in range(3):
        bench.settle(8)
        with pytest.raises(StorageFailed, match="keeping room for a checkpoint"):
            bench.submit(submission_of([tasks_of([9])], mark + 1), [tasks_of([9])])
    assert bench.owner.verify().differences == []
    bench.close()


def test_a_checkpoint_that_the_disk_refused_gets_its_space_from_free_segments() -> None:
    """Beyond what is promised and the floor, and the log is dropped behind it."""
    _, bench = drained(is_dropped=False)
    upkeep = bench.owner.upkeep
    assert upkeep is not None
    segments = len(bench.disk.holdings)
    upkeep.begin_checkpoint()
    bench.settle(4)
    figures = (upkeep.counters["checkpoints_refused"], upkeep.counters["checkpoints"])
    assert figures == (1, 1)
    assert len(bench.disk.holdings) < segments
    assert bench.disk.held_bytes >= bench.owner.core.room.needed
    bench.close()


def test_free_segments_that_are_promised_or_the_floor_never_give_way() -> None:
    disk, bench = drained(is_dropped=True)
    bench.attach()
    assert takes(bench, 100)
    assert bench.lease() is not None
    room, upkeep = bench.owner.core.room, bench.owner.upkeep
    assert upkeep is not None
    bench.disk.release(room.needed)
    disk.take_rest()
    held = bench.disk.held_bytes
    assert bench.owner.core.state.promised_bytes > 0
    assert not upkeep._has_checkpoint_room(1 << 20, room.needed)
    assert (bench.disk.held_bytes, upkeep.disk_full) == (held, False)
    assert not takes(bench, 101)
    bench.settle(3)
    assert bench.disk.held_bytes >= room.needed
    bench.close()
