"""The governor's line: what a small writer beside bulk waits, and how much of its speed bulk keeps.

In a run silence and two kinds of bulk take turns of a few seconds, so that whatever else the machine does falls on all of
them: completion's own loop landing all it can, two writers and large transactions; and the same loop behind the
governor, which begins anew in each run and knows nothing. A figure is over all samples of its kind. Before the
first run the WAL is made as large as it gets, as on a server that runs for a while; before each run the table is
emptied and a checkpoint made. What other processes took of the CPUs in silence is measured: it says whose p99 that was.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import psutil
import psycopg
import pyarrow as pa

from fabric_pipelines.bench.landing.foreground import TABLE
from fabric_pipelines.bench.landing.rows import INCARNATION, batch
from fabric_pipelines.bench.landing.turns import Run, Turns, line, verdict
from fabric_pipelines.completion.receive import OpenGate, Receiver
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.governor import Limits
from fabric_pipelines.dataplane.valve import Valve
from fabric_pipelines.dataplane.watch import Watch
from fabric_pipelines.dataplane.writer import ROWS_PER_LANDING, Writer
from fabric_pipelines.errors import CheckFailed
from fabric_pipelines.ledger import Ledger
from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.records.settled import Settled, Sums

SETTLE_S = 1.5
WARM_S = 12.0
"""Of governed bulk before the first turn: what it finds out at the start of a process, it finds out once."""
TURN_S = 4.0
"""The watcher may notice bulk two seconds late, as it does at work."""
BREATH_S = 0.3
"""Between two turns, counted for neither: what was begun ends."""
TAP_STEP_S = 0.1
"""A loop whose turn it is not asks so seldom: each time takes a moment of the core that the small writer has."""
FILL_SEGMENTS_MOST = 512
OTHER_IDS = 1 << 36
"""Where those of governed bulk begin: the two never meet in the table."""
TURNS = ("idle", "ungoverned", "idle", "governed")


@dataclass(frozen=True, slots=True)
class _Info:
    journal_id: str = "b" * 32
    incarnation: int = INCARNATION


@dataclass(frozen=True, slots=True)
class _Status:
    total: Ledger = field(default_factory=Ledger)


class EndlessSource:
    """A broker that always has more: the same vectors under ever new ids."""

    def __init__(self, first: int) -> None:
        self._batch = batch("embed", ROWS_PER_LANDING, 0)
        self._ids = self._batch.column("task_id").to_numpy()
        self.next = first

    def pull_computed(
        self, *, rows: int, wait_s: float = 0, skip: Sequence[str] = ()
    ) -> pa.RecordBatch:
        ids = pa.array(self._ids + self.next)
        self.next += ROWS_PER_LANDING
        at = self._batch.schema.get_field_index("task_id")
        return self._batch.set_column(at, self._batch.schema.field(at), ids)

    def hello(self) -> _Info:
        return _Info()

    def status(self) -> _Status:
        return _Status()

    def settled_sums(self) -> Sums:
        return Sums.of(Settled.joined([]).ids(), 1, 0)

    def settled_page(self, begin: int) -> Settled:
        return Settled.joined([])

    def retire(self, task_ids: Any, confirmation: Confirmation) -> int:
        return len(task_ids)

    def dead(self, task_ids: Any, confirmation: Confirmation, *, requeues: Any = None) -> int:
        return len(task_ids)

    def release_pulled(self, task_ids: Any = None) -> None:
        """Nobody else wants them."""

    def close(self) -> None:
        """Holds nothing."""


class Tap:
    """A gate before the gate, which opens and closes at once; rows that were pulled wait behind it."""

    def __init__(self, gate: Any) -> None:
        self._gate = gate
        self.open = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gate, name)

    def wait_s(self) -> float:
        wait_s: float = self._gate.wait_s() if self.open else TAP_STEP_S
        return wait_s

    def waited(self, seconds: float) -> None:
        if self.open:
            self._gate.waited(seconds)


class HalfDeaf(Valve):
    """A valve that hears no probe while bulk runs that is not its own: a probe would be taken for silence."""

    deaf = False

    def probed(self, latency_ms: float, *, loaded: bool) -> None:
        if not self.deaf:
            super().probed(latency_ms, loaded=loaded)


def measure(
    database: Database, seconds: float, runs: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """`seconds` of each kind of bulk in each run, and twice as many of silence."""
    with database.session() as connection:
        connection.execute(TABLE.encode())
    _fill(database.url)
    found: list[dict[str, Any]] = []
    pooled: Run = {name: Turns() for name in TURNS}
    account: dict[str, Any] = {}
    for number in range(runs):
        run, account = _run(database, seconds)
        for name, turns in run.items():
            pooled[name].waits_ms += turns.waits_ms
            pooled[name].each_ms += turns.each_ms
            pooled[name].rows += turns.rows
            pooled[name].seconds += turns.seconds
            pooled[name].busy_s += turns.busy_s
        found.append(line(run))
        say(f"governor, run {number + 1} of {runs}: {found[-1]}")
    return {"runs": found, "all": line(pooled), "verdict": verdict(found), "account": account}


def _fill(url: str) -> None:
    """A new segment of WAL is 16 MB of zeros that everybody waits for: a server that ran for a while has old ones."""
    with psycopg.connect(url, autocommit=True) as admin:
        row = admin.execute(
            "select pg_size_bytes(current_setting('max_wal_size'))"
            " / pg_size_bytes(current_setting('wal_segment_size'))"
        ).fetchone()
        assert row is not None
        for _ in range(min(int(row[0]), FILL_SEGMENTS_MOST)):
            admin.execute("select pg_logical_emit_message(true, 'bench', 'x')")
            admin.execute("select pg_switch_wal()")
        admin.execute("checkpoint")


def _run(database: Database, seconds: float) -> tuple[Run, dict[str, Any]]:
    """One run, and what the governor says of itself at its end."""
    with psycopg.connect(database.url, autocommit=True) as admin:
        admin.execute("truncate fabric.embed")
        admin.execute("checkpoint")
    valve = HalfDeaf(Limits())
    watch = Watch(Database(database.url, application="bench"), valve)
    cycles = max(1, round(seconds / TURN_S))
    turn_s = seconds / cycles
    with (
        closing(watch),
        _bulk(database, OpenGate(writers=2), 0, elastic=False) as free,
        _bulk(database, valve, OTHER_IDS, elastic=True) as governed,
    ):
        watch.start()
        time.sleep(SETTLE_S)  # as at the start of completion: silence is seen before bulk comes
        kinds = {"ungoverned": free, "governed": governed}
        for bulk, warm_s in ((free, turn_s), (governed, WARM_S)):  # and none of this counts
            with bulk.turn():
                valve.deaf = bulk is free
                time.sleep(warm_s)
        run: Run = {name: Turns() for name in TURNS}
        spans: list[tuple[str, float, float]] = []
        with _foreground(database.url, cycles * len(TURNS) * (turn_s + BREATH_S)) as samples:
            for name in TURNS * cycles:
                valve.deaf = name == "ungoverned"
                with kinds[name].turn() if name in kinds else nullcontext():
                    time.sleep(BREATH_S)
                    began, before = time.time(), _inserted(kinds, name)
                    busy_s = _busy_s()
                    time.sleep(turn_s)
                    spans.append((name, began, time.time()))
                    run[name].busy_s += _busy_s() - busy_s
                    run[name].rows += _inserted(kinds, name) - before
                run[name].seconds += spans[-1][2] - began
        account = valve.as_json()
    for name, began, ended in spans:
        run[name].each_ms.append([took for at, took in samples if began <= at < ended])
        run[name].waits_ms += run[name].each_ms[-1]
    return run, account


def _busy_s() -> float:
    """Seconds that all CPUs together have worked, for whomever."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def _inserted(kinds: dict[str, Bulk], name: str) -> int:
    return kinds[name].inserted() if name in kinds else 0


@dataclass(frozen=True, slots=True)
class Bulk:
    """One loop that lands in its turns."""

    tap: Tap
    inserted: Callable[[], int]
    check: Callable[[], None]

    @contextmanager
    def turn(self) -> Iterator[None]:
        self.check()
        self.tap.open = True
        yield
        self.tap.open = False


@contextmanager
def _bulk(database: Database, gate: Any, first: int, *, elastic: bool) -> Iterator[Bulk]:
    """Completion's loop in a thread of its own until the block ends."""
    source, tap = EndlessSource(first), Tap(gate)
    here = Database(database.url, application="bench")
    target, *more = (Writer(here, elastic=elastic and bulk) for bulk in (True, True, False))
    loop = Receiver(
        lambda: source, target, lambda *_: None, more_targets=more, gate=tap, elastic=elastic
    )
    done, faults = threading.Event(), []

    def land() -> None:
        try:
            while not done.is_set():
                time.sleep(loop.step(wait_s=0))
        except Exception as fault:  # noqa: BLE001 whatever it is, the measuring thread raises it
            faults.append(fault)

    def check() -> None:
        if faults:
            raise faults[0]

    thread = threading.Thread(target=land)
    thread.start()
    try:
        yield Bulk(tap, lambda: loop.counters.inserted, check)
    finally:
        done.set()
        thread.join()
        loop.close()
    check()


@contextmanager
def _foreground(url: str, seconds: float) -> Iterator[list[tuple[float, float]]]:
    """(when it began, milliseconds) of each small transaction, complete after the block."""
    command = [sys.executable, "-m", "fabric_pipelines.bench.landing.foreground", url, str(seconds)]
    samples: list[tuple[float, float]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        yield samples
        out, _ = process.communicate()
    if process.returncode:
        raise CheckFailed(f"the small writer ended with exit code {process.returncode}")
    samples += [(at, took) for at, took in json.loads(out)]
