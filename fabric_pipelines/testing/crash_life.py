"""One seeded life of a broker on a simulated disk, and what it was promised at each moment of it.

It does everything a broker does: every kind of fact, rolls, recycled files, checkpoints, restarts, groups that pile
up before a sync, segments that go cold, come back and are dropped. The disk remembers each operation, so that
`crash_judge` can hold every crash of it to the promises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.facts import Kind
from fabric_pipelines.broker.tiering import Water
from fabric_pipelines.dataplane.cold_store import FolderStore
from fabric_pipelines.errors import NotFetched
from fabric_pipelines.folders import make_folders
from fabric_pipelines.journal import FileOps, ObjectStore
from fabric_pipelines.journal.frame import CONTROL_FRAME_BYTES
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.submission import Submission
from fabric_pipelines.testing.broker_bench import (
    EMBED,
    ENGINE,
    GENERATE,
    LARGE,
    ids_of,
    submission_of,
    tasks_of,
)
from fabric_pipelines.testing.disk_bench import DiskBench
from fabric_pipelines.testing.sim_disk import (
    SECTOR_BYTES,
    ContentOp,
    ProcessKilled,
    SimDisk,
    Write,
)

SEGMENT_BYTES = 5 * 4096
SLOW = "slow@engine"
FOLDER = Path("/simulated/journal")
COLD = Path("/elsewhere/cold")  # no folder of the journal's leads there


@dataclass(frozen=True)
class Promise:
    """What was acknowledged: rows of each submission, the tasks known to be so far, the submissions given up."""

    rows: dict[int, int]
    computed: frozenset[int]
    retired: frozenset[int]
    dead: frozenset[int]
    abandoned: frozenset[int]


@dataclass
class Life:
    """`promises[n]` held when the note "acked" said n. `run` lives it, once."""

    disk: SimDisk
    ops: FileOps | None = None
    store: ObjectStore | None = None  # by default a folder on the same disk
    promises: list[Promise] = field(default_factory=list)
    sent: dict[int, tuple[Submission, list[pa.RecordBatch]]] = field(default_factory=dict)
    prompts: dict[int, list[int]] = field(default_factory=dict)  # by task id
    kinds: set[int] = field(default_factory=set)
    epochs: set[int] = field(default_factory=set)  # of every segment there was
    counters: Counter[str] = field(default_factory=Counter)  # over all restarts
    computed: set[int] = field(default_factory=set)
    retired: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    rows: dict[int, int] = field(default_factory=dict)
    abandoned: set[int] = field(default_factory=set)

    def run(self) -> Life:
        for folder in (FOLDER, COLD):
            self.die_in_making(folder)
        self.bench = self.bench_again()
        self.promise()
        self._live()
        self._note()
        self.bench.close()
        return self

    def bench_again(self) -> DiskBench:
        """A broker on what is there."""
        return bench_on(self.ops or self.disk, self.store)

    def promise(self) -> None:
        """Everything so far is acknowledged."""
        self.bench.owner.commit()
        now = Promise(
            dict(self.rows),
            frozenset(self.computed),
            frozenset(self.retired),
            frozenset(self.dead),
            frozenset(self.abandoned),
        )
        self.promises.append(now)
        self._look()
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

    def abandon(self, mark: int) -> None:
        """No more of it is sent; from the request on it may be known as given up."""
        assert self.bench.owner.abandon_submission(self.sent[mark][0].submission_id).abandoned
        self.bench.owner.commit()
        self.abandoned.add(mark)
        self.promise()

    def pile_up(self, mark: int, sizes: list[int]) -> None:
        """Groups that are written before the one in front is synced, as a busy broker does; then one sync for all."""
        batches = [
            tasks_of([25 + row for row in range(size)], seed=mark + at)
            for at, size in enumerate(sizes)
        ]
        header = submission_of(batches, mark, sampling=GENERATE)
        self.sent[mark] = header, batches
        self.bench.owner.open_submission(header)
        self.bench.owner.write()
        first = 0
        for batch in batches:
            state = self.bench.upload(header, first, batch)
            assert state.first_task_id is not None
            for row, task in enumerate(batch.to_pylist(), state.first_task_id + first):
                self.prompts.setdefault(row, task["tokens"])
            first += batch.num_rows
            self.bench.owner.write()
        self.rows[mark] = first
        self.promise()
        self.bench.owner.close_submission(header.submission_id)
        self.promise()

    def lease(self, count: int, name: str = "w", engine: str = ENGINE) -> list[int]:
        self.bench.attach(name, engine=engine)
        lease = lease_of(self.bench, name, count)
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

    def freeze(self) -> None:
        """Seal what is written, cover it, and let all of it go cold that may."""
        bench = self.bench
        bench.owner.commit()
        bench.disk.roll()
        bench.checkpoint()
        before, bench.tiering.water = bench.tiering.water, Water(0, 0)
        bench.checkpoint()
        bench.tiering.water = before
        self.promise()

    def restart(self) -> None:
        self._note()
        self.bench.crash()
        self.promise()

    def rest(self) -> None:
        """Nothing to do: from here on the log itself knows what of it is durable."""
        self.bench.owner.idle()
        self.disk.note("recorded", self.bench.disk.durable_lsn)

    @contextmanager
    def _dying(self, call: str, count: int = 0) -> Iterator[None]:
        """Before that sync; a source that never asks for it lives on until the end of this, and is judged by what it
        leaves like any other."""
        self.disk.kill_at_sync(count, call)
        try:
            yield
        except ProcessKilled:
            self.counters[f"killed_before_{call}"] += 1
        self.disk.restart()

    def _note(self) -> None:
        """What there is to see before this process ends."""
        upkeep, tiering = self.bench.owner.upkeep, self.bench.tiering
        assert upkeep is not None
        self.counters.update({**upkeep.counters, **tiering.counters})

    def _look(self) -> None:
        journal = self.bench.disk
        self.kinds |= {kind for kind in Kind if journal.lsns_of(kind)}
        self.epochs |= {holding.epoch for holding in journal.holdings}

    def _live(self) -> None:
        self.submit(90, [3], engine=SLOW)
        self.submit(1, [4, 3])
        self.freeze()
        first = self.lease(4)
        self.report(first[:3])
        self.report(first[3:], "failed")
        kept = frozenset(first[:1])
        self.land(keep=kept)
        self.bench.owner.nack("w", np.array(self.lease(2)), "given back", False)
        self.rest()
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
        for mark in (3, 4):
            self.submit(mark, [4, 4])
            while ids := self.lease(6):
                self.report(ids)
                self.land(keep=kept)
            self.bench.checkpoint()
        self.restart()
        self.submit(5, [4])
        self.pile_up(8, [2, 3, 2])
        self.report(self.lease(3))
        self.land(2, keep=kept)
        self.pass_on(self.lease(2))
        self.land(keep=kept)
        self.lose_a_group_before_one_that_stays()
        self.submit(10, [3])
        self.die_in_a_roll()
        self.report(self.lease(2))
        self.land(keep=kept)
        self.submit(11, [2, 3], upto=1)
        self.abandon(11)

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

    def die_in_making(self, folder: Path) -> None:
        """The process is killed when folders were made and none above them synced; the next one finds them there."""
        with self._dying("fsync_folder"):
            make_folders(folder, self.ops or self.disk)

    def die_in_a_roll(self) -> None:
        """The process is killed between the write of the SEAL frame and its sync; the next one finds it in the cache."""
        self._note()
        with self._dying("fdatasync", 1):  # the first is that of the new segment
            self.bench.disk.roll()
        self.bench.crash()
        self.promise()

    def lose_a_group_before_one_that_stays(self) -> None:
        """A power cut takes the front of one group and leaves the whole one behind it, which the recovery must cut. What
        it and the new broker write first takes just the place and the LSN of the lost group: from then on nothing but
        the chain tells that the group behind is not of this course of the log."""
        self.submit(9, [3])
        bench, journal = self.bench, self.bench.disk
        journal.roll()
        held = self.lease(3)
        if journal._segments[-1].end % SECTOR_BYTES < CONTROL_FRAME_BYTES:
            bench.owner.idle()  # so that the lost group does not lie within one sector
        begin = journal._segments[-1].end
        bench.owner.nack("w", np.array(held), "given back: ".ljust(164, "."), False)
        bench.owner.write()
        border, following = journal._segments[-1].end, journal.next_lsn
        lease_of(bench, "w", 3)
        bench.owner.write()
        file, shared = self.disk.inode_of(journal._segments[-1].path), border // SECTOR_BYTES

        def survives(op: ContentOp) -> bool:
            return not (
                isinstance(op, Write)
                and op.inode == file
                and begin <= op.offset < shared * SECTOR_BYTES
            )

        self._note()
        self.disk.cut_power(lambda sectors: [op for op in sectors if survives(op)])
        bench.crash()
        bench.owner.idle()
        journal = bench.disk
        assert journal.recovered.cut_frames >= 2, "the group behind the lost one is not there"
        assert (journal._segments[-1].end, journal.next_lsn) == (border, following), (
            "another length of reason fits"
        )
        self.promise()
        bench.attach("w", held=held)
        bench.owner.commit()
        self.report(held)

    def requeue(self, ids: list[int]) -> None:
        """What is dead is tried again; from the request on it may be."""
        self.dead -= set(ids)
        self.computed -= set(ids)
        self.promise()
        assert self.bench.owner.requeue(np.array(ids, np.int64), "again").requeued == len(ids)
        self.promise()


def bench_on(ops: Any, store: ObjectStore | None = None) -> DiskBench:
    limits = Limits(lease_s=30.0, attempts_max=3)
    return DiskBench(
        limits=limits,
        folder=FOLDER,
        ops=ops,
        segment_bytes=SEGMENT_BYTES,
        store=store or FolderStore(COLD, ops),
    )


def lease_of(bench: DiskBench, name: str, count: int) -> Lease | None:
    """The next lease, once its rows have come back from the cold tier. NotFetched if they do not."""
    for _ in range(20):
        try:
            return bench.lease(name, Budget(count, 1 << 20, None))
        except NotFetched:
            bench.settle(2)
    return bench.lease(name, Budget(count, 1 << 20, None))
