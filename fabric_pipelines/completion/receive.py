"""The completion loop: pull computed tasks, land them by function, retire them once the database has them.

It holds at most one pull. Whatever is away, Postgres or the broker, the loop keeps what it holds and tries
again with growing pauses; what it holds is also still in the broker's journal, so a kill loses nothing and
a replay changes nothing. Refuses to land for a journal that the database does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.dataplane.writer import ROWS_PER_LANDING, Landed
from fabric_pipelines.errors import BrokerUnavailable, CheckFailed, FabricError, TransientError
from fabric_pipelines.ids import SEQUENCE_BITS
from fabric_pipelines.ledger import Ledger
from fabric_pipelines.records.confirmation import Confirmation

PULL_WAIT_S = 0.5
PAUSE_LEAST_S = 0.1
PAUSE_MOST_S = 5.0


class Hello(Protocol):
    @property
    def journal_id(self) -> str: ...
    @property
    def incarnation(self) -> int: ...


class Status(Protocol):
    @property
    def total(self) -> Ledger: ...


class Source(Protocol):
    """What the loop asks of a broker client."""

    def hello(self) -> Hello: ...
    def status(self) -> Status: ...
    def pull_computed(self, *, rows: int, wait_s: float = 0) -> pa.RecordBatch | None: ...
    def retire(self, task_ids: Any, confirmation: Confirmation) -> int: ...
    def dead(self, task_ids: Any, confirmation: Confirmation) -> int: ...
    def release_pulled(self) -> None: ...
    def close(self) -> None: ...


class Target(Protocol):
    """What the loop asks of a writer."""

    def land(self, batch: pa.RecordBatch) -> Landed: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Counters:
    pulled: int = 0
    inserted: int = 0
    retired: int = 0
    dead: int = 0
    size: int = 0
    landings: int = 0
    faults: int = 0


@dataclass(slots=True)
class _Held:
    """One function's rows of a pull: to be landed, then to be retired."""

    batch: pa.RecordBatch
    landed: Landed | None = None


@dataclass(slots=True)
class Receiver:
    """open_source: makes a broker client. register: makes journal and database known to each other, called
    with (journal id, incarnation, tasks retired or dead) on each new connection. say: one line to people."""

    open_source: Callable[[], Source]
    target: Target
    register: Callable[[str, int, int], object]
    say: Callable[[str], None] = lambda line: None
    rows: int = ROWS_PER_LANDING
    counters: Counters = field(default_factory=Counters)
    _source: Source | None = None
    _journal_id: str = ""
    _incarnation: int = 0
    _held: list[_Held] = field(default_factory=list)
    _pause_s: float = 0.0

    @property
    def holds(self) -> int:
        return sum(held.batch.num_rows for held in self._held)

    def step(self, *, wait_s: float = PULL_WAIT_S) -> float:
        """Do the next piece of work; returns how long to pause before the next step (0 when all is well).
        Terminal errors pass through."""
        try:
            source = self._connected()
            if not self._held:
                self._pull(source, wait_s)
            while self._held:
                self._finish(source, self._held[0])
                del self._held[0]
        except TransientError as fault:
            return self._pause(fault)
        if self._pause_s:
            self.say("completion goes on")
        self._pause_s = 0.0
        return 0.0

    def close(self) -> None:
        """Hand back what was pulled and is not retired. Idempotent; the other side may be gone."""
        self.target.close()
        source, self._source = self._source, None
        if source is None:
            return
        try:
            if self._held:
                source.release_pulled()
        except TransientError as fault:
            self.say(f"the broker takes pulled tasks back by itself: {fault}")
        finally:
            self._held.clear()
            source.close()

    def _connected(self) -> Source:
        if self._source is None:
            source = self.open_source()
            try:
                self._introduce(source)
            except BaseException:
                source.close()
                raise
            self._source = source
        return self._source

    def _introduce(self, source: Source) -> None:
        info = source.hello()
        total = source.status().total
        settled = total.retired.tasks + total.dead.tasks
        self.register(info.journal_id, info.incarnation, settled)
        if self._held and info.journal_id != self._journal_id:
            # the journal they came from still has them; this broker knows nothing of them
            self.say(f"dropped {self.holds} tasks of journal {self._journal_id}, which went away")
            self._held.clear()
        self._journal_id, self._incarnation = info.journal_id, info.incarnation

    def _pull(self, source: Source, wait_s: float) -> None:
        pulled = source.pull_computed(rows=self.rows, wait_s=wait_s)
        if pulled is None or pulled.num_rows == 0:
            return
        self._require_own(pulled)
        self.counters.pulled += pulled.num_rows
        self._held = [_Held(batch) for batch in by_function(pulled)]

    def _require_own(self, pulled: pa.RecordBatch) -> None:
        found = np.unique(pulled.column("task_id").to_numpy() >> SEQUENCE_BITS).tolist()
        if found != [self._incarnation]:
            raise CheckFailed(
                f"the broker said it is incarnation {self._incarnation} and handed out tasks of {found}: "
                "restart completion, and run `fabric broker verify`"
            )

    def _finish(self, source: Source, held: _Held) -> None:
        if held.landed is None:
            held.landed = self.target.land(held.batch)
            self.counters.landings += 1
            self.counters.inserted += held.landed.rows
            self.counters.size += held.landed.size
        landed = held.landed
        if landed.confirmation is not None:
            self.counters.retired += source.retire(landed.task_ids, landed.confirmation)
        if landed.dead_confirmation is not None:
            self.counters.dead += source.dead(landed.dead_task_ids, landed.dead_confirmation)

    def _pause(self, fault: FabricError) -> float:
        self.counters.faults += 1
        if not self._pause_s:
            self.say(f"completion waits, holding {self.holds} tasks: {fault}")
        if isinstance(fault, BrokerUnavailable) and self._source is not None:
            self._source.close()
            self._source = None
        self._pause_s = min(max(self._pause_s * 2, PAUSE_LEAST_S), PAUSE_MOST_S)
        return self._pause_s


def by_function(pulled: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows of each function, in order of first appearance."""
    names = pulled.column("function")
    for name in names.unique().to_pylist():
        yield pulled.filter(pc.equal(names, name)) if len(names.unique()) > 1 else pulled
