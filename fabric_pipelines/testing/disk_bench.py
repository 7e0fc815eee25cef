"""A broker's owner over a real journal, on a disk or a simulated one, with checkpoints and upkeep."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fabric_pipelines.broker.checkpoint import Checkpoints
from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.owner import Owner
from fabric_pipelines.broker.tiering import Tiering, Water
from fabric_pipelines.broker.upkeep import Background, at_once
from fabric_pipelines.journal import FileOps, Journal, ObjectStore, OsFileOps
from fabric_pipelines.testing.broker_bench import Bench, TurnedClock


@dataclass
class DiskBench(Bench):
    """`crash` forgets what was not committed, as a killed process does."""

    folder: Path = Path("/simulated/journal")
    ops: FileOps = field(default_factory=OsFileOps)
    segment_bytes: int = 1 << 16
    checkpoint_bytes: int = 1 << 40
    limits: Limits = field(default_factory=lambda: Limits(lease_s=30.0, attempts_max=3))
    time: TurnedClock = field(default_factory=TurnedClock)
    store: ObjectStore | None = None
    water: Water | None = None
    porter: Background = at_once
    writer: Background = at_once

    def _open(self) -> Owner:
        journal = Journal.open(
            self.folder,
            segment_bytes=self.segment_bytes,
            clock=self.time.clock,
            ops=self.ops,
            lazy=True,
            store=self.store,
        )
        self.journal = journal  # type: ignore[assignment]
        try:
            return Owner(
                journal,
                self.limits,
                journal_high_water=self.high_water,
                clock=self.time.clock,
                checkpoints=Checkpoints(self.folder, journal.journal_id, self.ops),
                checkpoint_bytes=self.checkpoint_bytes,
                background=self.writer,
                water=self.water,
                cold_background=self.porter,
            )
        except BaseException:
            journal.close()
            raise

    @property
    def disk(self) -> Journal:
        journal = self.owner.journal
        assert isinstance(journal, Journal)
        return journal

    @property
    def tiering(self) -> Tiering:
        assert self.owner.tiering is not None
        return self.owner.tiering

    def crash(self) -> None:
        self.disk._stopped = "killed"
        self.disk.close()
        self.owner = self._open()

    def close(self) -> None:
        self.disk.close()

    def checkpoint(self) -> None:
        """Take one now and let upkeep do all that follows from it."""
        assert self.owner.upkeep is not None
        self.owner.upkeep.begin_checkpoint()
        self.settle()

    def settle(self, ticks: int = 20) -> None:
        for _ in range(ticks):
            self.time.seconds += 0.6
            for session in self.owner.core.sessions.values():
                session.deadline_s += 0.6
            self.owner.tick()
        self.owner.commit()
