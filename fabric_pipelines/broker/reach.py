"""Reach: what a broker can read now, and what it does when it meets a damaged frame on this disk.

Rows are read before a lease of them is logged, outcomes before they are handed to a sink. What cannot be read is named
as the scrub would name it and withheld, and the question is asked again without it: one damaged frame stops nobody
else's work. Rows that are only away, in the cold tier, are `tiering`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.broker.accounts import COMPUTED, READY
from fabric_pipelines.broker.core import Core
from fabric_pipelines.broker.facts import Fact, GivenUp
from fabric_pipelines.broker.losses import NOTHING, Sequences, tasks_at
from fabric_pipelines.broker.payloads import Payloads
from fabric_pipelines.broker.recovery import Log
from fabric_pipelines.broker.replies import DamagedFrame
from fabric_pipelines.broker.scrubbing import Scrubbing
from fabric_pipelines.broker.state import SubmissionRecord
from fabric_pipelines.broker.supply import Grant
from fabric_pipelines.broker.tiering import Tiering
from fabric_pipelines.broker.upkeep import Upkeep, Words
from fabric_pipelines.errors import ColdLost, CorruptionFound, NotFetched
from fabric_pipelines.journal import Damage, Journal
from fabric_pipelines.records.batch import Budget

Mask = npt.NDArray[np.bool_]
T = TypeVar("T")
AGAIN_S = 5.0
GIVEN_UP = "its row or outcome lay in damaged bytes of the log, and its submission was given up"


class Granted(NamedTuple):
    """A lease to be logged, or one that was (without facts), and its rows. newest: the last frame of these."""

    facts: list[Fact]
    grant: Grant | None
    rows: pa.RecordBatch | None
    newest: int


class Reach:
    def __init__(self, core: Core, payloads: Payloads, words: Words, journal: Log) -> None:
        self._core, self._payloads, self._words, self._journal = core, payloads, words, journal
        self.withheld = payloads.withheld
        self.tiering: Tiering | None = None
        self._parts: tuple[Journal, Scrubbing, Upkeep] | None = None

    def join(self, journal: Journal, scrubbing: Scrubbing, upkeep: Upkeep) -> None:
        """The log lies on a disk. Without that a damaged frame is an error as any other."""
        self._parts = journal, scrubbing, upkeep
        scrubbing.damaged_here, scrubbing.whole_again = self.withhold, self.withheld.remove
        upkeep.withheld, upkeep.damaged = self.withheld, self.note

    def look_ahead(self) -> None:
        """From now on leases ask for each row whether it can be read."""
        damaged = self.withheld.rows if len(self.withheld.lsns) else None
        self._core.look_ahead(self.near, self.out_of_reach, damaged)

    def near(self, tasks: Sequences) -> int:
        """How many of these tasks, from the first on, can be read now."""
        gone = self.withheld.rows(tasks)
        count = len(tasks) if gone is None else int(np.argmax(gone))
        return count if self.tiering is None else min(count, self.tiering.near(tasks))

    def out_of_reach(self, tasks: Sequences) -> Mask | None:
        """Which of these tasks nobody can read now; None for none."""
        gone = self.withheld.rows(tasks)
        away = self.tiering.out_of_reach(tasks) if self.tiering is not None else None
        if gone is None or away is None:
            return gone if away is None else away
        return gone | away

    def why(self) -> NotFetched:
        """What to say to somebody who finds only tasks that cannot be read."""
        tiering, said = self.tiering, self.withheld.sentence
        if tiering is not None and (tiering.lost or tiering.expects or not said):
            return tiering.why()
        return NotFetched(f"CorruptionFound: {said}", retry_after_s=AGAIN_S)

    # -- damage

    def meet(self, fault: CorruptionFound) -> None:
        """A frame that was to be read is damaged: name it and withhold its tasks. Raised again if it holds none, is not
        here, or was met before."""
        if not self.note(fault):
            raise fault

    def note(self, fault: CorruptionFound) -> bool:
        """The same; whether tasks were withheld for it that were not before."""
        lsn = next((place["lsn"] for place in fault.places), 0)
        if self._parts is None or not lsn or lsn in self.withheld or isinstance(fault, ColdLost):
            return False
        (place, *_), (journal, scrubbing, _) = fault.places, self._parts
        damage = Damage(place["segment"], place["offset"], place["end"], lsn, journal.kind_of(lsn))
        scrubbing.name(damage, cold=False)
        return lsn in self.withheld

    def withhold(self, frame: DamagedFrame) -> None:
        """A frame here is damaged. What it says is in memory: the next start must not have to read it."""
        assert self._parts is not None, "who scrubs has a journal on disk"
        journal, _, upkeep = self._parts
        upkeep.cover(frame.lsn)
        tasks, _ = tasks_at(self._core.state, journal.first_lsn, frame.lsn)
        if not len(tasks):
            return
        known = frame.lsn in self.withheld
        self.withheld.add(frame)
        self._payloads.forget_between(frame.lsn, frame.lsn)
        if not journal.is_sealed(frame.lsn):
            self._words.commit()
            upkeep.roll()  # a start reads what is sealed only where it has to
        if not known:
            self.look_ahead()
            self._core.set_aside(tasks)

    def reading(self, act: Callable[[], T]) -> T:
        """What `act` gives once every damaged frame that it met with is withheld: it is asked again each time."""
        while True:
            try:
                return act()
            except CorruptionFound as fault:
                self.meet(fault)

    # -- leases and outcomes

    def granted(self, name: str, budget: Budget, call: int, now_s: float) -> Granted:
        """The next lease and its rows, read before anything is said of it: what cannot be read is not leased. Of an old
        one that is asked for again such tasks go back."""
        core = self._core
        while True:
            facts, grant = core.lease(name, budget, now_s, call)
            if grant is None:
                return Granted(facts, None, None, 0)
            tasks, old = grant.tasks, not facts
            if old and (gone := self.withheld.rows(tasks)) is not None:
                ids, reason = core.state.task_ids(tasks[gone]), self.withheld.sentence
                self._words.log(core.nack(name, ids, reason)[0])
                continue
            if old and self.tiering is not None and self.tiering.near(tasks) < len(tasks):
                raise self.tiering.why()  # its rows are on their way
            frames, _ = core.state.index.locate(tasks)
            newest = int(frames.max())
            if newest > self._journal.durable_lsn and not self._in_memory(frames):
                self._words.commit()  # a frame of the open group cannot be read back
            try:
                return Granted(facts, grant, self._payloads.tasks(tasks), newest)
            except CorruptionFound as fault:
                if not old:
                    core.take_back(name, grant, call)
                self.meet(fault)

    def _in_memory(self, frames: Sequences) -> bool:
        return all(map(self._payloads.holds, np.unique(frames).tolist()))

    def outcomes(self, tasks: Sequences) -> pa.RecordBatch | None:
        """Of those of these computed tasks whose outcome can be read; None if there are none."""

        def read() -> pa.RecordBatch | None:
            landable = self.withheld.landable(tasks)
            return self._payloads.pulled(landable) if len(landable) else None

        return self.reading(read)

    def given_up(self, record: SubmissionRecord) -> list[Fact]:
        """The end of those tasks of a submission that nobody can read: ready ones without a row, computed ones without
        an outcome. Nothing if there are none."""
        index = self._core.state.index
        parts = [index.rows_of(batch) for batch in record.batches]
        tasks = np.concatenate([NOTHING, *parts])
        ready, computed = (tasks[index.state[tasks] == at] for at in (READY, COMPUTED))
        rows, outcomes = self.withheld.rows(ready), self.withheld.outcomes(computed)
        gone = np.zeros(len(ready), np.bool_) if rows is None else rows
        if self.tiering is not None and self.tiering.lost and len(ready):
            gone = gone | self.tiering.lost_rows(ready)
        done = NOTHING if outcomes is None else computed[outcomes]
        found = np.sort(np.concatenate([ready[gone], done]))
        return [GivenUp(GIVEN_UP, found, lost=True)] if len(found) else []
