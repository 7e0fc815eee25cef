"""The completion loop: pull computed tasks, land them by function, retire them once the database has them.

Outcomes that become dead letters land first and never wait; results are bulk, which a gate cuts into transactions
and lets through. It holds little more than one pull. Whatever is away, Postgres or the broker, the loop keeps
what it holds and tries again with growing pauses; what it holds is also still in the broker's journal, so a
kill loses nothing and a replay changes nothing. Where one function's table is in trouble, its rows go back to the broker,
which passes them over until a few of them land (`waiting.py`), and the others go on. Only the loop's own thread speaks with the broker, and only of what
has landed. Refuses to land for a journal that the database does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from threading import get_ident
from time import monotonic
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.completion.waiting import Waiting, longer
from fabric_pipelines.dataplane.cpu_slices import give_way
from fabric_pipelines.dataplane.table_trouble import TableTrouble
from fabric_pipelines.dataplane.valve import is_regular
from fabric_pipelines.dataplane.writer import ROWS_PER_LANDING, CommitRefused, Landed
from fabric_pipelines.errors import (
    BrokerUnavailable,
    CheckFailed,
    FabricError,
    StoreUnreachable,
    TransientError,
)
from fabric_pipelines.ids import SEQUENCE_BITS
from fabric_pipelines.ledger import Ledger
from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.records.settled import Settled, Sums

PULL_WAIT_S = 0.5
PULLS_HELD = 2
"""While bulk waits at the gate, so many pulls are taken in: what must not wait may be among the next rows."""
TRIAL_ROWS = 500
"""Of a function that waits, taken to see whether its table takes rows again: enough to tell the table's fault from a row's."""
SKIPPED_MAX = 1000  # names that one pull may give
OF_THE_FUNCTION = (TableTrouble, StoreUnreachable)
"""What a landing may meet that leaves the landings of other functions alone."""


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
    def settled_sums(self) -> Sums: ...
    def settled_page(self, begin: int) -> Settled: ...
    def pull_computed(
        self, *, rows: int, wait_s: float = 0, skip: Sequence[str] = ()
    ) -> pa.RecordBatch | None: ...
    def retire(self, task_ids: Any, confirmation: Confirmation) -> int: ...
    def dead(self, task_ids: Any, confirmation: Confirmation, *, requeues: Any = None) -> int: ...
    def release_pulled(self, task_ids: Any = None) -> None: ...
    def close(self) -> None: ...


class Target(Protocol):
    """What the loop asks of a writer."""

    def land(self, batch: pa.RecordBatch) -> Landed: ...
    def close(self) -> None: ...


class Gate(Protocol):
    """What the loop asks of a governor before it writes, and tells it afterwards."""

    @property
    def rows(self) -> int: ...
    @property
    def writers(self) -> int: ...
    def wait_s(self) -> float: ...
    def waited(self, seconds: float) -> None: ...
    def admit(self, batch: pa.RecordBatch, *, bulk: bool) -> Any: ...
    def settle(self, leave: Any, landed: Landed) -> None: ...
    def withdraw(self, leave: Any) -> None: ...


class OpenGate:
    """Lets everything through at once, in transactions of ROWS_PER_LANDING."""

    rows = ROWS_PER_LANDING

    def __init__(self, writers: int = 1) -> None:
        self.writers = writers

    def wait_s(self) -> float:
        return 0.0

    def waited(self, seconds: float) -> None:
        assert seconds == 0

    def admit(self, batch: pa.RecordBatch, *, bulk: bool) -> None:
        return None

    def settle(self, leave: None, landed: Landed) -> None:
        return None

    def withdraw(self, leave: None) -> None:
        return None


@dataclass(slots=True)
class Counters:
    """retired_prompt_tokens, retired_output_tokens: of tasks that the broker retired on our word; those whose answer was
    lost and who were found retired already are in neither, so both are lower bounds."""

    pulled: int = 0
    inserted: int = 0
    retired: int = 0
    dead: int = 0
    size: int = 0
    landings: int = 0
    faults: int = 0
    retired_prompt_tokens: int = 0
    retired_output_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Held:
    """Rows of one function: to be landed, then to be retired. session: number of the one that pulled them. trial: their
    function waits. `at`: the writer that has them, or had them last and may know what became of a commit without an answer."""

    function: str
    batch: pa.RecordBatch
    bulk: bool
    session: int
    trial: bool = False
    at: int | None = None
    leave: Any = None
    running: Future[Landed] | None = None
    landed: Landed | None = None

    @property
    def waits(self) -> bool:
        return self.running is None and self.landed is None


@dataclass(slots=True)
class Receiver:
    """open_source: makes a broker client. target, more_targets: writers, each with a thread of its own; with more
    than one the last is kept for what is not bulk. register: makes journal and database known to each other, called
    with (journal id, incarnation, tasks retired or dead) on each new connection. require_landed: called after it with
    that broker and the journal id, and refuses a database that has not landed all that it has settled. say: one line to people.
    elastic: the thread that steps gives way for the CPU, for good: it slices and counts what bulk lands. clock_s: monotonic."""

    open_source: Callable[[], Source]
    target: Target
    register: Callable[[str, int, int], object]
    require_landed: Callable[[Source, str], object] = lambda source, journal_id: None
    say: Callable[[str], None] = lambda line: None
    rows: int = ROWS_PER_LANDING
    more_targets: Sequence[Target] = ()
    gate: Gate = field(default_factory=OpenGate)
    elastic: bool = False
    clock_s: Callable[[], float] = monotonic
    counters: Counters = field(default_factory=Counters)
    _source: Source | None = None
    _journal_id: str = ""
    _incarnation: int = 0
    _held: list[_Held] = field(default_factory=list)
    _pause_s: float = 0.0
    _waits_for: str = ""
    _again: bool = False  # a new session is handed again what is held, so nothing is pulled before that is done
    _gave_way: bool = False
    _session: int = 0
    _returns: list[Any] = field(default_factory=list)  # task ids that go back to the broker
    _waiting: Waiting = field(init=False)
    _targets: list[Target] = field(init=False)
    _threads: list[ThreadPoolExecutor] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = Waiting(self.clock_s, self.say)
        self._targets = [self.target, *self.more_targets]
        # one each and not a pool: a thread that gives way for bulk (cpu_slices.py) must never carry what is not
        self._threads = [ThreadPoolExecutor(1, f"writer-{at}") for at in range(len(self._targets))]
        if self.elastic:
            # a thread takes after the one that makes it: those of writers are made before this one gives way
            wait([thread.submit(get_ident) for thread in self._threads])

    @property
    def holds(self) -> int:
        return sum(held.batch.num_rows for held in self._held)

    @property
    def waits_for(self) -> str:
        """What went wrong in the last step and may heal, and what single functions wait for; "" when all is well."""
        of_functions = [f"function {name}: {reason}" for name, reason in self.waiting.items()]
        return "; ".join([self._waits_for, *of_functions] if self._waits_for else of_functions)

    @property
    def waiting(self) -> dict[str, str]:
        """By function that waits by itself, for what."""
        return self._waiting.reasons

    def step(self, *, wait_s: float = PULL_WAIT_S) -> float:
        """Do the next piece of work; returns how long to pause before the next step: 0 when all is well and
        nothing waits at the gate, at most PULL_WAIT_S when bulk waits there. Terminal errors pass through."""
        if self.elastic and not self._gave_way:
            give_way()
            self._gave_way = True
        try:
            source = self._connected()
            self._again = self._again and bool(self._held)
            if not self._again:
                self._try_one(source)
                if self.holds <= (PULLS_HELD - 1) * self.rows:
                    most_s = min(wait_s, self._waiting.due_in_s())
                    self._pull(source, 0.0 if self._held else most_s)
            gate_s = min(self._work_off(source), PULL_WAIT_S)
        except TransientError as fault:
            return self._pause(fault)
        if self._pause_s:
            self.say("completion goes on")
        self._pause_s, self._waits_for = 0.0, ""
        self.gate.waited(gate_s)
        return gate_s

    def close(self) -> None:
        """Hand back what was pulled and is not retired. Idempotent; the other side may be gone."""
        for (
            thread
        ) in self._threads:  # a landing that runs is awaited: its rows are handed back all the same
            thread.shutdown()
        for target in self._targets:
            target.close()
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
        self.require_landed(source, info.journal_id)
        if self._held and info.journal_id != self._journal_id:
            # the journal they came from still has them; this broker knows nothing of them
            self.say(f"dropped {self.holds} tasks of journal {self._journal_id}, which went away")
            self._drop_held()
        self._again = bool(self._held)
        self._session += 1
        self._returns.clear()
        self._journal_id, self._incarnation = info.journal_id, info.incarnation

    def _try_one(self, source: Source) -> None:
        """Take a few rows of a function that has waited long enough, one function at a time."""
        if any(held.trial for held in self._held):
            return
        function = self._waiting.try_next()
        if function is not None:
            self._pull(source, 0.0, rows=TRIAL_ROWS, trying=function)
            if not any(held.function == function for held in self._held):
                self._waiting.tried(function)  # nothing of it is left

    def _pull(
        self, source: Source, wait_s: float, *, rows: int | None = None, trying: str = ""
    ) -> None:
        self._hand_back(source)
        skip = [name for name in self._waiting.functions if name != trying][:SKIPPED_MAX]
        try:
            pulled = source.pull_computed(rows=rows or self.rows, wait_s=wait_s, skip=skip)
        except TransientError:
            self._again = bool(self._held)  # the broker may begin again at the oldest
            raise
        if pulled is None or pulled.num_rows == 0:
            return
        self._require_own(pulled)
        self.counters.pulled += pulled.num_rows
        first, bulk = by_class(pulled)
        self._held[:0] = [self._taken(batch, bulk=False) for batch in by_function(first)]
        self._held += [self._taken(batch, bulk=True) for batch in by_function(bulk)]

    def _taken(self, batch: pa.RecordBatch, *, bulk: bool) -> _Held:
        function = batch.column("function")[0].as_py()
        return _Held(function, batch, bulk, self._session, trial=function in self._waiting)

    def _hand_back(self, source: Source) -> None:
        while self._returns:
            source.release_pulled(self._returns[0])
            self._returns.pop(0)

    def _require_own(self, pulled: pa.RecordBatch) -> None:
        found = np.unique(pulled.column("task_id").to_numpy() >> SEQUENCE_BITS).tolist()
        if found != [self._incarnation]:
            raise CheckFailed(
                f"the broker said it is incarnation {self._incarnation} and handed out tasks of {found}: "
                "restart completion, and run `fabric broker verify`"
            )

    def _work_off(self, source: Source) -> float:
        """Until nothing is held but what is tried, or the gate lets nothing through for the time that is returned."""
        while self._held:
            for held in [held for held in self._held if held.landed is not None]:
                self._settle(source, held)
                self._held.remove(held)
                if held.trial and not any(item.function == held.function for item in self._held):
                    self._waiting.tried(held.function)
            gate_s = self._start()
            running = [held.running for held in self._held if held.running is not None]
            if not running:
                return gate_s
            # one that is tried may wait for a lock, and meanwhile others may have come
            alone = all(held.trial for held in self._held if held.running is not None)
            limit_s = PULL_WAIT_S if alone else None
            if not wait(running, limit_s, FIRST_COMPLETED).done:
                return 0.0
            self._harvest()
        self._hand_back(source)
        return 0.0

    def _start(self) -> float:
        """Give writers what may be written now; returns how long bulk must wait at the gate."""
        busy = {held.at for held in self._held if held.running is not None}
        for held in self._held:  # grows under this loop: what _cut leaves over comes next
            if not held.waits:
                continue
            bulk_running = sum(
                item.bulk and item.running is not None and not item.trial for item in self._held
            )
            at = self._free(held, busy)
            full = held.bulk and not held.trial and bulk_running >= max(self.gate.writers, 1)
            if at is None or full:
                continue
            if held.bulk:
                gate_s = self.gate.wait_s()
                if gate_s:
                    return gate_s
                self._cut(held)
            held.at = at
            busy.add(at)
            held.leave = self.gate.admit(held.batch, bulk=held.bulk)
            held.running = self._threads[at].submit(self._targets[at].land, held.batch)
        return 0.0

    def _free(self, held: _Held, busy: set[int | None]) -> int | None:
        """A writer for `held`: the one that tried it before, else any of its class."""
        if held.at is not None:
            return None if held.at in busy else held.at
        last = len(self._targets) - 1
        usable = range(max(last, 1)) if held.bulk else (last,)
        return next((at for at in usable if at not in busy), None)

    def _cut(self, held: _Held) -> None:
        """Make `held` one transaction; the rest stays behind it. What was tried before stays as it is."""
        rows = self.gate.rows
        if held.at is not None or held.batch.num_rows <= rows:
            return
        rest = replace(held, batch=held.batch.slice(rows))
        held.batch = held.batch.slice(0, rows)
        self._held.insert(self._held.index(held) + 1, rest)

    def _halve(self, held: _Held) -> None:
        """A row of `held` made COMMIT fail, and nothing landed: as two transactions, so that the rest lands without it."""
        middle = held.batch.num_rows // 2
        rest = replace(held, batch=held.batch.slice(middle))
        held.batch = held.batch.slice(0, middle)
        self._held.insert(self._held.index(held) + 1, rest)

    def _harvest(self) -> None:
        """Take over what writers have done. A fault of one leaves the others running, and its rows held or with the broker."""
        faults: list[BaseException] = []
        for held in list(self._held):  # _halve puts in, _set_aside takes out
            if held.running is None or not held.running.done():
                continue
            done, held.running = held.running, None
            fault = done.exception()
            if fault is not None:
                self.gate.withdraw(held.leave)
                if isinstance(fault, CommitRefused):
                    self._halve(held)
                elif isinstance(fault, OF_THE_FUNCTION):
                    self._set_aside(held, str(fault))
                else:
                    faults.append(fault)
                continue
            held.landed = done.result()
            self.gate.settle(held.leave, held.landed)
            self.counters.landings += 1
            self.counters.inserted += held.landed.rows
            self.counters.size += held.landed.size
        faults.sort(
            key=lambda fault: isinstance(fault, TransientError)
        )  # a terminal one ends the process
        if faults:
            raise faults[0]

    def _set_aside(self, failed: _Held, reason: str) -> None:
        """What is held of this function and class, and no writer has, goes back to the broker."""
        self.counters.faults += 1
        self._waiting.failed(failed.function, reason)
        for held in list(self._held):
            if held.waits and (held.function, held.bulk) == (failed.function, failed.bulk):
                self._held.remove(held)
                if held.session == self._session:  # else the new one is handed it without a word
                    self._returns.append(held.batch.column("task_id").to_numpy())

    def _settle(self, source: Source, held: _Held) -> None:
        landed = held.landed
        assert landed is not None
        if landed.confirmation is not None:
            retired = source.retire(landed.task_ids, landed.confirmation)
            self.counters.retired += retired
            if retired == len(landed.task_ids):
                self._count_tokens(held.batch, landed.task_ids)
        if landed.dead_confirmation is not None:
            self.counters.dead += source.dead(
                landed.dead_task_ids, landed.dead_confirmation, requeues=landed.dead_requeues
            )

    def _count_tokens(self, batch: pa.RecordBatch, task_ids: Any) -> None:
        retired = pa.array(np.isin(batch.column("task_id").to_numpy(), np.asarray(task_ids)))
        prompts, outputs = (
            batch.column("prompt_tokens"),
            pc.list_value_length(batch.column("output")),
        )
        self.counters.retired_prompt_tokens += pc.sum(prompts.filter(retired)).as_py() or 0
        self.counters.retired_output_tokens += pc.sum(outputs.filter(retired)).as_py() or 0

    def _drop_held(self) -> None:
        running = [held.running for held in self._held if held.running is not None]
        wait(running)
        for held in self._held:
            if held.running is not None:
                self.gate.withdraw(held.leave)
        self._held.clear()

    def _pause(self, fault: FabricError) -> float:
        self.counters.faults += 1
        self._waits_for = str(fault)
        if not self._pause_s:
            self.say(f"completion waits, holding {self.holds} tasks: {fault}")
        if isinstance(fault, BrokerUnavailable) and self._source is not None:
            self._source.close()
            self._source = None
        self._pause_s = longer(self._pause_s)
        return self._pause_s


def by_function(pulled: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows of each function, in order of first appearance."""
    names = pulled.column("function")
    for name in names.unique().to_pylist():
        yield pulled.filter(pc.equal(names, name)) if len(names.unique()) > 1 else pulled


def by_class(pulled: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """(what never waits, bulk)."""
    regular = is_regular(pulled)
    if not pc.any(regular).as_py():
        return pulled.slice(0, 0), pulled
    return pulled.filter(regular), pulled.filter(pc.invert(regular))
