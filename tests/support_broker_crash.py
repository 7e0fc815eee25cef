"""A broker's workload on the simulated disk, what it was promised at each moment, and the law over every crash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fabric_pipelines.broker.accounts import COMPUTED, DEAD, RETIRED
from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.facts import Kind
from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.ids import sequence_of
from fabric_pipelines.journal import FileOps, Journal
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.submission import Submission
from fabric_pipelines.testing.sim_disk import (
    CrashState,
    Image,
    SimDisk,
    Write,
    crash_states,
    torn_states,
    writes_of,
)
from tests.support_broker import (
    EMBED,
    ENGINE,
    GENERATE,
    LARGE,
    PROFILE,
    ids_of,
    submission_of,
    tasks_of,
)
from tests.support_broker_disk import DiskBench

SEGMENT_BYTES = 5 * 4096
SLOW = "slow@engine"
FOLDER = Path("/simulated/journal")


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass(frozen=True)
class Promise:
    """What was acknowledged: rows of each submission, and the tasks known to be so far."""

    rows: dict[int, int]
    computed: frozenset[int]
    retired: frozenset[int]
    dead: frozenset[int]


@dataclass
class Recording:
    """One seeded life of a broker, with restarts; `promises[n]` held when the note "acked" said n."""

    disk: SimDisk
    ops: FileOps | None = None
    promises: list[Promise] = field(default_factory=list)
    sent: dict[int, tuple[Submission, list[pa.RecordBatch]]] = field(default_factory=dict)
    prompts: dict[int, list[int]] = field(default_factory=dict)  # by task id
    kinds: set[int] = field(default_factory=set)
    dropped: int = 0  # segments, in the life that dropped most

    def __post_init__(self) -> None:
        self.computed: set[int] = set()
        self.retired: set[int] = set()
        self.dead: set[int] = set()
        self.rows: dict[int, int] = {}
        self.bench = bench_on(self.ops or self.disk)
        self.promise()
        self._live()
        self._note_kinds()
        self.bench.close()

    def promise(self) -> None:
        """Everything so far is acknowledged."""
        self.bench.owner.commit()
        now = Promise(
            dict(self.rows),
            frozenset(self.computed),
            frozenset(self.retired),
            frozenset(self.dead),
        )
        self.promises.append(now)
        self.disk.note("acked", len(self.promises) - 1)

    def submit(self, mark: int, sizes: list[int], *, upto: int | None = None, **how: Any) -> None:
        batches = [
            tasks_of([20 + (mark * 7 + at * 5 + row) % 60 for row in range(size)], seed=mark + at)
            for at, size in enumerate(sizes)
        ]
        sampling = EMBED if mark % 2 else GENERATE
        header = submission_of(batches, mark, sampling=sampling, **how)
        self.sent[mark] = header, batches
        self.bench.owner.open_submission(header)
        first = 0
        for batch in batches[:upto]:
            self.disk.note("sent", mark * 1000 + first + batch.num_rows)
            state = self.bench.upload(header, first, batch)
            assert state.first_task_id is not None
            for row, task in enumerate(batch.to_pylist(), state.first_task_id + first):
                self.prompts.setdefault(row, task["tokens"])
            first += batch.num_rows
            self.rows[mark] = max(first, self.rows.get(mark, 0))
            self.promise()
        if first == header.tasks:
            self.bench.owner.close_submission(header.submission_id)
            self.promise()

    def lease(self, count: int, name: str = "w", engine: str | None = None) -> list[int]:
        self.bench.attach(name, **({"engine": engine} if engine else {}))
        lease = self.bench.lease(name, Budget(count, 1 << 20, None))
        self.bench.owner.commit()
        return [] if lease is None else ids_of(lease)

    def report(self, ids: list[int], status: str = "ok") -> None:
        self.bench.report(ids, status)
        if status != "failed":
            self.computed |= set(ids)
        self.promise()

    def land(self, rows: int = 1 << 20, *, keep: frozenset[int] = frozenset()) -> None:
        pulled = self.bench.owner.pull("c", rows)
        found = [] if pulled is None else pulled.to_pylist()
        good = [row["task_id"] for row in found if row["status"] == "ok"]
        bad = [row["task_id"] for row in found if row["status"] != "ok"]
        good = [at for at in good if at not in keep]
        if good:
            self.bench.retire(good)
            self.retired |= set(good)
        if bad:
            self.bench.bury(bad)
            self.dead |= set(bad)
        self.bench.owner.release_pulled("c")
        self.promise()

    def restart(self) -> None:
        self._note_kinds()
        self.bench.crash()
        self.promise()

    def _note_kinds(self) -> None:
        journal = self.bench.disk
        self.kinds |= {kind for kind in Kind if journal.lsns_of(kind)}
        upkeep = self.bench.owner.upkeep
        assert upkeep is not None
        self.dropped = max(self.dropped, upkeep.counters["segments_dropped"])

    def _live(self) -> None:
        self.submit(90, [3], engine=SLOW)
        self.submit(1, [4, 3])
        first = self.lease(4)
        self.report(first[:3])
        self.report(first[3:], "failed")
        kept = frozenset(first[:1])
        self.land(keep=kept)
        self.bench.owner.nack("w", np.array(self.lease(2)), "given back", False)
        self.submit(2, [5, 4], upto=1)
        self.restart()
        self.submit(2, [5, 4])
        for _ in range(3):
            ids = self.lease(5)
            self.report(ids[:-1])
            self.report(ids[-1:], "refused")
            self.land(keep=kept)
            self.bench.settle(2)
        self.bench.checkpoint()
        self.submit(6, [6])
        held = self.lease(5)
        self.restart()
        self.bench.attach("w", held=held[:2])
        self.bench.time.seconds += 40
        self.bench.owner.tick()
        self.promise()
        self._note_kinds()
        for mark in (3, 4):
            self.submit(mark, [4, 4])
            while ids := self.lease(6):
                self.report(ids)
                self.land(keep=kept)
            self.bench.checkpoint()
            self._note_kinds()
        self.restart()
        self.submit(5, [4])
        self.report(self.lease(3))
        self.land(2, keep=kept)
        self.pass_on(self.lease(2))
        self.land(keep=kept)

    def pass_on(self, ids: list[int]) -> None:
        """Too large for one class; the other one leaves, so that nobody is left to take them."""
        owner = self.bench.owner
        self.bench.attach("v", profile=LARGE)
        self.bench.time.seconds += 25
        self.bench.attach("v", profile=LARGE)
        owner.renew("w")
        self.bench.time.seconds += 10
        owner.tick()
        self.bench.report(ids, "oversized")
        self.promise()
        owner.detach("v")
        owner.tick()
        self.computed |= set(ids)
        self.promise()
        self.land()
        self.requeue(ids)
        self.report(self.lease(1))

    def requeue(self, ids: list[int]) -> None:
        """What is dead is tried again; from the request on it may be."""
        self.dead -= set(ids)
        self.computed -= set(ids)
        self.promise()
        assert self.bench.owner.requeue(np.array(ids, np.int64), "again").requeued == len(ids)
        self.promise()


def bench_on(ops: Any) -> DiskBench:
    limits = Limits(lease_s=30.0, attempts_max=3)
    return DiskBench(limits=limits, folder=FOLDER, ops=ops, segment_bytes=SEGMENT_BYTES)


def digest_of(image: Image) -> bytes:
    mark = hashlib.blake2b(digest_size=16)
    for path, inode in sorted(image.entries.items()):
        mark.update(str(path).encode())
        mark.update(image.contents.get(inode, b""))
    return mark.digest()


TORN_EACH = 400


def states_of(disk: SimDisk, *, seed: int, subsets: int, torn: int) -> Iterator[CrashState]:
    """Crash states of every operation, then about TORN_EACH cuts in each of `torn` writes drawn by the seed."""
    yield from crash_states(disk, seed=seed, subsets=subsets)
    chosen = np.random.default_rng(seed).permutation(writes_of(disk))[:torn]
    for after_ops in sorted(chosen.tolist()):
        yield from cuts_of(disk, after_ops)


def cuts_of(disk: SimDisk, after_ops: int) -> Iterator[CrashState]:
    write = disk.log[after_ops - 1]
    assert isinstance(write, Write)
    step = 1 + 2 * len(write.content) // TORN_EACH
    return islice(torn_states(disk, after_ops=after_ops), 0, None, step)


@dataclass
class Judge:
    """Holds crash states to the law. What two states recover to is judged once if it is the same log under the
    same promise: `logs` counts those."""

    recording: Recording
    states: set[bytes] = field(default_factory=set)
    logs: set[Any] = field(default_factory=set)

    def judge(self, state: CrashState) -> None:
        mark = digest_of(state.image)
        acked = state.notes.get("acked", -1)
        if mark in self.states:
            return
        self.states.add(mark)
        where = f"after {state.after_ops} operations, {state.story}: "
        try:
            key = acked, *self._log_in(SimDisk(state.image))
            if key not in self.logs:
                self.logs.add(key)
                bench = bench_on(SimDisk(state.image))
                try:
                    self._keep_promise(bench, acked)
                finally:
                    bench.close()
        except (CorruptionFound, AssertionError) as fault:
            raise Broken(f"{where}{fault}") from fault

    def _log_in(self, disk: SimDisk) -> tuple[Any, ...]:
        """What a recovery finds: the chain covers every frame of the log, the digests every checkpoint; where frames
        are said to lie is apart from that."""
        with Journal.open(FOLDER, segment_bytes=SEGMENT_BYTES, ops=disk, lazy=True) as journal:
            chain, first_lsn, last_lsn = journal._chain, journal.first_lsn, journal.durable_lsn
            places = [s.offsets.tobytes() + s.kinds.tobytes() for s in journal._segments]
        names = [name for name in disk.names(FOLDER) if name.startswith("checkpoint-")]
        files = [hashlib.blake2b(disk.read_bytes(FOLDER / name)).digest() for name in names]
        return chain, first_lsn, last_lsn, *places, *names, *files

    def _keep_promise(self, bench: DiskBench, acked: int) -> None:
        recording, index = self.recording, bench.owner.core.state.index
        assert bench.owner.verify().differences == []
        assert bench.owner.core.state.total().balance.tasks == 0
        if acked < 0:
            return
        promise = recording.promises[acked]
        for mark, rows in promise.rows.items():
            record = bench.owner.core.state.by_submission.get(f"{mark:064x}")
            assert record is not None, f"submission {mark} is gone"
            assert rows <= record.rows, f"submission {mark}: {rows} rows were acknowledged"
        for ids, allowed in (
            (promise.computed, (COMPUTED, RETIRED, DEAD)),
            (promise.retired, (RETIRED,)),
            (promise.dead, (DEAD,)),
        ):
            at = np.array([sequence_of(task) for task in sorted(ids)], np.int64)
            assert np.isin(index.state[at], allowed).all(), "an acknowledged step was undone"
        self._finish(bench, promise)

    def _finish(self, bench: DiskBench, promise: Promise) -> None:
        """Producers send again what they sent, then everything is run and landed: each task once, with the
        prompt it came with, and nothing that was done is done again."""
        incarnation = bench.owner.core.state.incarnation
        retired = {sequence_of(at) for at in promise.retired | promise.dead | promise.computed}
        prompts = {sequence_of(at): tokens for at, tokens in self.recording.prompts.items()}
        for mark in promise.rows:
            header, batches = self.recording.sent[mark]
            state = bench.submit(header, batches)
            assert state.enqueued == header.tasks
        bench.time.seconds += 31
        bench.owner.tick()
        for name, engine, profile in (
            ("w", ENGINE, PROFILE),
            ("v", ENGINE, LARGE),
            ("s", SLOW, PROFILE),
        ):
            bench.attach(name, engine=engine, profile=profile)
            while (lease := bench.lease(name, Budget(6, 1 << 20, None))) is not None:
                for row in lease.tasks.to_pylist():
                    at = sequence_of(row["task_id"])
                    assert at not in retired, f"task {at} was leased after it was done"
                    if at in prompts and row["task_id"] >> 40 == incarnation:
                        assert row["tokens"] == self._prompt_of(bench, at), f"task {at} changed"
                bench.finish(lease, name=name)
        landed: list[int] = []
        while (pulled := bench.owner.pull("z", 8)) is not None:
            rows = pulled.to_pylist()
            for status, settle in ((True, bench.retire), (False, bench.bury)):
                ids = [row["task_id"] for row in rows if (row["status"] == "ok") is status]
                landed += ids
                if ids:
                    assert settle(ids) == len(ids)
        assert len(set(landed)) == len(landed)
        total = bench.owner.core.state.total()
        assert total.open_tasks == 0
        assert bench.owner.verify().differences == []

    def _prompt_of(self, bench: DiskBench, at: int) -> list[int]:
        """By submission and row: after a crash a batch that was not acknowledged may get other ids."""
        state = bench.owner.core.state
        record = state.submissions[int(state.index.submission[at])]
        before = 0
        for ordinal in record.batches:
            rows = state.index.rows_of(ordinal)
            if rows[0] <= at <= rows[-1]:
                row = before + at - int(rows[0])
                break
            before += len(rows)
        mark = int(record.header.submission_id, 16)
        for batch in self.recording.sent[mark][1]:
            if row < batch.num_rows:
                tokens: list[int] = batch.column("tokens")[row].as_py()
                return tokens
            row -= batch.num_rows
        raise AssertionError(f"task {at} is in no batch that was sent")

    def judge_all(self, states: Iterator[CrashState]) -> None:
        for state in states:
            self.judge(state)


def recorded(make: Callable[[], SimDisk] = SimDisk) -> Recording:
    return Recording(make())
