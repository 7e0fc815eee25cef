"""The law over every crash of a recorded life: what may be lost, leased, counted or left behind after it.

A state of the disk is recovered by a new broker and held to what was promised by then; everything is then run to
its end, so that a task that nobody would ever lease, or that would be leased twice, shows as well. What two states
recover to is judged once if it is the same log under the same promise. A flipped bit has a law of its own: it is
refused by name, or what it hit is never believed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fabric_pipelines.broker.accounts import COMPUTED, DEAD, RETIRED
from fabric_pipelines.clock import Clock
from fabric_pipelines.dataplane.cold_store import FolderStore
from fabric_pipelines.errors import BalanceBroken, CheckFailed, CorruptionFound, NotFetched
from fabric_pipelines.ids import sequence_of
from fabric_pipelines.journal import Journal
from fabric_pipelines.testing.broker_bench import ENGINE, LARGE, PROFILE
from fabric_pipelines.testing.crash_life import (
    COLD,
    FOLDER,
    SEGMENT_BYTES,
    SLOW,
    Life,
    Promise,
    bench_on,
    lease_of,
)
from fabric_pipelines.testing.disk_bench import DiskBench
from fabric_pipelines.testing.sim_disk import (
    CrashState,
    Create,
    Image,
    SimDisk,
    Write,
    crash_states,
    torn_states,
    writes_of,
)

TORN_EACH = 400
STILL = Clock(lambda: 0.0, lambda: 0)  # an open writes the time, and the chain covers it
NAMED_BY_VERIFY = (
    "is damaged in its ",
    "is missing or not the one",
    "the base of the log is lost",
    "the broker that runs ",
)
LOST, DOUBLED, UNBALANCED = "lost", "doubled", "unbalanced"


class Broken(AssertionError):
    """A promise was not kept; `kind` is LOST, DOUBLED or UNBALANCED."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def require(holds: bool, kind: str, sentence: str) -> None:
    if not holds:
        raise Broken(kind, sentence)


@contextmanager
def verdict(where: str) -> Iterator[None]:
    """What a broker met with, as the promise that was broken."""
    try:
        yield
    except Broken as broken:
        raise Broken(broken.kind, f"{where}{broken}") from broken
    except (CorruptionFound, NotFetched) as fault:
        raise Broken(LOST, f"{where}{fault}") from fault
    except (BalanceBroken, AssertionError) as fault:
        raise Broken(UNBALANCED, f"{where}{fault}") from fault


def lived(life: Life) -> Life:
    """`life`, lived to its end. Broken if it met with what no crash of it explains."""
    with verdict("in the recorded life itself: "):
        return life.run()


def digest_of(image: Image) -> bytes:
    mark = hashlib.blake2b(digest_size=16)
    for path, inode in sorted(image.entries.items()):
        mark.update(str(path).encode())
        mark.update(_digest(image.contents.get(inode, b"")))
    mark.update("\n".join(sorted(map(str, image.folders))).encode())
    return mark.digest()


@lru_cache(maxsize=1024)
def _digest(content: bytes) -> bytes:
    """States differ in one file or two; the others are the same bytes in the same place, whose hash Python keeps."""
    return hashlib.blake2b(content).digest()


def states_of(
    disk: SimDisk, *, seed: int, subsets: int, torn: int, torn_each: int = TORN_EACH
) -> Iterator[CrashState]:
    """Crash states of every operation, then about `torn_each` cuts in each of `torn` writes drawn by the seed and in
    each that begins a segment or an index file, where the bytes of an earlier use show through."""
    yield from crash_states(disk, seed=seed, subsets=subsets)
    drawn = np.random.default_rng(seed).permutation(writes_of(disk))[:torn].tolist()
    for after_ops in sorted(
        {*drawn, *beginnings_of(disk, ".segment"), *beginnings_of(disk, ".index")}
    ):
        yield from cuts_of(disk, after_ops, torn_each)


def beginnings_of(disk: SimDisk, suffix: str) -> Iterator[int]:
    """Values of `after_ops` for the first write of each use of a file whose name ends so."""
    made = {op.inode: op.path for op in disk.log if isinstance(op, Create)}
    for after_ops in writes_of(disk):
        write = disk.log[after_ops - 1]
        assert isinstance(write, Write)
        if made[write.inode].suffix == suffix and not write.offset:
            yield after_ops


def cuts_of(disk: SimDisk, after_ops: int, torn_each: int = TORN_EACH) -> Iterator[CrashState]:
    write = disk.log[after_ops - 1]
    assert isinstance(write, Write)
    step = 1 + 2 * len(write.content) // torn_each
    return islice(torn_states(disk, after_ops=after_ops), 0, None, step)


@dataclass
class Judge:
    """states: distinct ones that were judged; logs: distinct (log, promise) that they recovered to; broken: by kind,
    of those that `count` met."""

    life: Life
    states: set[bytes] = field(default_factory=set)
    logs: set[Any] = field(default_factory=set)
    broken: Counter[str] = field(default_factory=Counter)
    _judged: set[tuple[bytes, int, int]] = field(default_factory=set)

    def judge_all(self, states: Iterable[CrashState]) -> None:
        """Raises Broken at the first promise that was not kept."""
        for state in states:
            self.judge(state)

    def live(self) -> list[str]:
        """Lives the life, as far as it can be; a sentence if it broke a promise of itself."""
        try:
            lived(self.life)
        except Broken as broken:
            self.broken[broken.kind] += 1
            return [str(broken)]
        return []

    def count(self, states: Iterable[CrashState]) -> list[str]:
        """Judges all of them and returns a sentence for each that broke a promise."""
        found = []
        for state in states:
            try:
                self.judge(state)
            except Broken as broken:
                self.broken[broken.kind] += 1
                found.append(str(broken))
        return found

    def judge(self, state: CrashState) -> None:
        mark = digest_of(state.image)
        acked, recorded = state.notes.get("acked", -1), state.notes.get("recorded", 0)
        if (mark, acked, recorded) in self._judged:
            return
        self._judged.add((mark, acked, recorded))
        self.states.add(mark)
        where = f"after {state.after_ops} operations, {state.story}: "
        with verdict(where):
            key = acked, *self._log_in(SimDisk(state.image), recorded)
            if key not in self.logs:
                self.logs.add(key)
                self._live_on(SimDisk(state.image), acked)

    def judge_flip(self, state: CrashState) -> bool:
        """Whether damage was refused by name, at the start or when it was met; else nothing was lost by it."""
        try:
            self._live_on(SimDisk(state.image), state.notes.get("acked", -1))
        except (CorruptionFound, CheckFailed):
            return True
        except NotFetched as waits:
            if "ColdLost" in str(waits) or "CorruptionFound" in str(waits):
                return True
            raise Broken(LOST, f"{state.story}: {waits}") from waits
        except Broken as broken:
            if any(said in str(broken) for said in NAMED_BY_VERIFY):
                return True
            raise Broken(broken.kind, f"{state.story}: {broken}") from broken
        return False

    def _live_on(self, disk: SimDisk, acked: int) -> None:
        bench = bench_on(disk)
        try:
            self._keep_promise(bench, acked)
        finally:
            bench.close()

    def _log_in(self, disk: SimDisk, recorded: int) -> tuple[Any, ...]:
        """What a recovery finds: the chain covers every frame of the log, the digests every checkpoint, stub and
        object; where frames are said to lie is apart from that."""
        store = FolderStore(COLD, disk)
        with Journal.open(
            FOLDER, segment_bytes=SEGMENT_BYTES, ops=disk, lazy=True, store=store, clock=STILL
        ) as journal:
            known_durable = journal.recovered.recorded_durable_lsn
            require(
                known_durable >= recorded,
                LOST,
                f"LSN {recorded} was recorded as durable, of which the log knows {known_durable}",
            )
            chain, first_lsn, last_lsn = journal._chain, journal.first_lsn, journal.durable_lsn
            places = [s.offsets.tobytes() + s.kinds.tobytes() for s in journal._segments]
            known = {journal.cold.object_name(epoch) for epoch in journal.cold.stubs}
            there = names_in(disk, COLD / journal.journal_id)
            unknown = {
                f"{journal.journal_id}/{name.removesuffix('.new')}" for name in there
            } - known
            require(
                not unknown, LOST, f"objects {sorted(unknown)} lie in the store and have no stub"
            )
        names = [name for name in disk.names(FOLDER) if name.startswith(("checkpoint-", "epoch-"))]
        paths = [FOLDER / name for name in names] + [COLD / name for name in sorted(known)]
        files = [hashlib.blake2b(content_of(disk, path)).digest() for path in paths]
        return chain, first_lsn, last_lsn, *places, *map(str, paths), *files

    def _keep_promise(self, bench: DiskBench, acked: int) -> None:
        self._require_balance(bench)
        if acked < 0:
            return
        promise, state = self.life.promises[acked], bench.owner.core.state
        for mark, rows in promise.rows.items():
            record = state.by_submission.get(f"{mark:064x}")
            require(record is not None, LOST, f"submission {mark} is gone")
            assert record is not None
            require(rows <= record.rows, LOST, f"submission {mark} had {rows} rows acknowledged")
            given_up = mark in promise.abandoned
            require(record.abandoned or not given_up, LOST, f"submission {mark} was abandoned")
        for ids, allowed in (
            (promise.computed, (COMPUTED, RETIRED, DEAD)),
            (promise.retired, (RETIRED,)),
            (promise.dead, (DEAD,)),
        ):
            at = np.array([sequence_of(task) for task in sorted(ids)], np.int64)
            kept = np.isin(state.index.state[at], allowed).all()
            require(bool(kept), LOST, "an acknowledged step was undone")
        self._finish(bench, promise)

    def _require_balance(self, bench: DiskBench) -> None:
        """The ledger is zero in tasks, tokens and fingerprint, and the log alone gives the same state."""
        differences = bench.owner.verify().differences
        require(not differences, UNBALANCED, "; ".join(differences))
        balance = bench.owner.core.state.total().balance
        off = balance.tasks or balance.tokens or balance.fingerprint
        require(not off, UNBALANCED, f"the ledger is off by {balance}")

    def _finish(self, bench: DiskBench, promise: Promise) -> None:
        """Producers send again what they sent, then everything is run and landed: each task once, with the
        prompt it came with, and nothing that was done is done again."""
        for mark in promise.rows:
            header, batches = self.life.sent[mark]
            if bench.owner.core.state.by_submission[header.submission_id].abandoned:
                require(mark in self.life.abandoned, DOUBLED, f"submission {mark} was given up")
                continue
            enqueued = bench.submit(header, batches).enqueued
            require(enqueued == header.tasks, DOUBLED, f"submission {mark} has {enqueued} rows")
        bench.time.seconds += 31
        bench.owner.tick()
        self._run_all(bench, promise)
        landed = self._land_all(bench)
        require(len(set(landed)) == len(landed), DOUBLED, "a task was pulled twice")
        left = bench.owner.core.state.total().open_tasks
        require(not left, LOST, f"{left} tasks are never leased or landed")
        self._require_balance(bench)

    def _run_all(self, bench: DiskBench, promise: Promise) -> None:
        state = bench.owner.core.state
        states = state.index.state[: state.index.count]
        over = np.flatnonzero(np.isin(states, (COMPUTED, RETIRED, DEAD))).tolist()
        done = {sequence_of(at) for at in promise.retired | promise.dead | promise.computed}
        done.update(over)
        prompts = {sequence_of(at) for at in self.life.prompts}
        for name, engine, profile in (
            ("w", ENGINE, PROFILE),
            ("v", ENGINE, LARGE),
            ("s", SLOW, PROFILE),
        ):
            bench.attach(name, engine=engine, profile=profile)
            while (lease := lease_of(bench, name, 6)) is not None:
                for row in lease.tasks.to_pylist():
                    at = sequence_of(row["task_id"])
                    require(at not in done, DOUBLED, f"task {at} was leased after it was done")
                    done.add(at)
                    if at in prompts and row["task_id"] >> 40 == state.incarnation:
                        same = row["tokens"] == self._prompt_of(bench, at)
                        require(same, LOST, f"task {at} changed")
                bench.finish(lease, name=name)

    def _land_all(self, bench: DiskBench) -> list[int]:
        landed: list[int] = []
        while (pulled := bench.owner.pull("z", 8)) is not None:
            rows = pulled.to_pylist()
            for status, settle in ((True, bench.retire), (False, bench.bury)):
                ids = [row["task_id"] for row in rows if (row["status"] == "ok") is status]
                landed += ids
                if ids:
                    require(settle(ids) == len(ids), DOUBLED, "a task was landed twice")
        return landed

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
        for batch in self.life.sent[mark][1]:
            if row < batch.num_rows:
                tokens: list[int] = batch.column("tokens")[row].as_py()
                return tokens
            row -= batch.num_rows
        raise Broken(LOST, f"task {at} is in no batch that was sent")


def content_of(disk: SimDisk, path: Path) -> bytes:
    return disk.read_bytes(path) if path.name in names_in(disk, path.parent) else b""


def names_in(disk: SimDisk, folder: Path) -> list[str]:
    try:
        return disk.names(folder)
    except FileNotFoundError:
        return []


def flips_of(state: CrashState, *, suffixes: tuple[str, ...], every: int) -> Iterator[CrashState]:
    """One flipped bit at every so manyth byte that means something, in each file whose name ends so."""
    for path, inode in sorted(state.image.entries.items()):
        if not path.name.endswith(suffixes):
            continue
        content = state.image.contents.get(inode, b"")
        for at in range(0, len(content.rstrip(b"\0")), every):
            image = state.image.copy()
            flipped = content[at] ^ 1 << at % 8
            image.contents[inode] = content[:at] + bytes([flipped]) + content[at + 1 :]
            yield CrashState(state.after_ops, f"{path.name} flipped at {at}", state.notes, image)
