"""The governor's line: what a small writer beside bulk waits, and how much of its speed bulk keeps.

Three modes in turn, several rounds: nobody lands; completion's own loop lands all it can, two writers and large
transactions; the same loop behind the governor, which starts anew each time and knows nothing. Each mode warms up
before it counts, on an empty table and after a checkpoint. A figure is over all samples of all rounds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from fabric_pipelines.bench.landing.foreground import TABLE
from fabric_pipelines.bench.landing.rows import INCARNATION, batch
from fabric_pipelines.completion.receive import OpenGate, Receiver
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.governor import Limits
from fabric_pipelines.dataplane.valve import Valve
from fabric_pipelines.dataplane.watch import Watch
from fabric_pipelines.dataplane.writer import ROWS_PER_LANDING, Writer
from fabric_pipelines.ledger import Ledger
from fabric_pipelines.records.confirmation import Confirmation

WARM_UP_S = 4.0
SETTLE_S = 1.5
MODES = ("idle", "ungoverned", "governed")


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

    def pull_computed(self, *, rows: int, wait_s: float = 0) -> pa.RecordBatch:
        ids = pa.array(self._ids + self.next)
        self.next += ROWS_PER_LANDING
        at = self._batch.schema.get_field_index("task_id")
        return self._batch.set_column(at, self._batch.schema.field(at), ids)

    def hello(self) -> _Info:
        return _Info()

    def status(self) -> _Status:
        return _Status()

    def retire(self, task_ids: Any, confirmation: Confirmation) -> int:
        return len(task_ids)

    def dead(self, task_ids: Any, confirmation: Confirmation, *, requeues: Any = None) -> int:
        return len(task_ids)

    def release_pulled(self) -> None:
        """Nobody else wants them."""

    def close(self) -> None:
        """Holds nothing."""


@dataclass(slots=True)
class Mode:
    waits_ms: list[float] = field(default_factory=list)
    rows: int = 0
    seconds: float = 0.0

    def as_json(self, name: str) -> dict[str, Any]:
        return {
            "mode": name,
            "transactions": len(self.waits_ms),
            "p50_ms": round(float(np.percentile(self.waits_ms, 50)), 2),
            "p99_ms": round(float(np.percentile(self.waits_ms, 99)), 2),
            "rows_per_s": round(self.rows / self.seconds),
        }


def measure(
    database: Database, seconds: float, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """`seconds` a mode and round that count."""
    with database.session() as connection:
        connection.execute(TABLE.encode())
    modes = {name: Mode() for name in MODES}
    account: dict[str, Any] = {}
    first = 0
    for number in range(rounds):
        # there and back: what one mode leaves to the disk must not always fall to the same next one
        for name in MODES if number % 2 == 0 else MODES[::-1]:
            with psycopg.connect(database.url, autocommit=True) as admin:
                admin.execute("truncate fabric.embed")
                admin.execute(
                    "checkpoint"
                )  # WAL segments are recycled, as on a server that runs for a while
            with _bulk(database, name, first) as bulk:
                time.sleep(WARM_UP_S)
                before = bulk.inserted()
                waits, took = _foreground(database.url, seconds)
                modes[name].rows += bulk.inserted() - before
                modes[name].seconds += took
                modes[name].waits_ms += waits
                account = bulk.account() or account
            first = bulk.next()
            say(f"governor, round {number + 1} of {rounds}, {name}: {modes[name].as_json(name)}")
    lines = [modes[name].as_json(name) for name in MODES]
    idle, free, governed = lines
    return {
        "modes": lines,
        "p99_ratio_ungoverned": round(free["p99_ms"] / idle["p99_ms"], 2),
        "p99_ratio": round(governed["p99_ms"] / idle["p99_ms"], 2),
        "rate_share": round(governed["rows_per_s"] / max(free["rows_per_s"], 1), 2),
        "account": account,
    }


@dataclass(frozen=True, slots=True)
class Bulk:
    inserted: Callable[[], int]
    account: Callable[[], dict[str, Any] | None]
    next: Callable[[], int]


@contextmanager
def _bulk(database: Database, mode: str, first: int) -> Iterator[Bulk]:
    """Completion's loop in a thread of its own until the block ends; nothing at all in mode idle."""
    if mode == "idle":
        yield Bulk(lambda: 0, lambda: None, lambda: first)
        return
    source, valve = EndlessSource(first), Valve(Limits())
    gate: Any = valve if mode == "governed" else OpenGate(writers=2)
    watch = Watch(Database(database.url, application="bench"), valve)
    target, *more = (Writer(Database(database.url, application="bench")) for _ in range(3))
    loop = Receiver(lambda: source, target, lambda *_: None, more_targets=more, gate=gate)
    done, faults = threading.Event(), []

    def land() -> None:
        try:
            while not done.is_set():
                time.sleep(loop.step(wait_s=0))
        except Exception as fault:  # noqa: BLE001 whatever it is, the measuring thread raises it
            faults.append(fault)

    thread = threading.Thread(target=land)
    if mode == "governed":
        watch.start()
        time.sleep(
            SETTLE_S
        )  # as at the start of completion: the watcher has seen silence before bulk comes
    thread.start()
    try:
        yield Bulk(
            lambda: loop.counters.inserted,
            lambda: valve.as_json() if mode == "governed" else None,
            lambda: source.next,
        )
    finally:
        done.set()
        thread.join()
        watch.close()
        loop.close()
    if faults:
        raise faults[0]


def _foreground(url: str, seconds: float) -> tuple[list[float], float]:
    """(milliseconds of each transaction, wall seconds meanwhile)."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "fabric_pipelines.bench.landing.foreground", url, str(seconds)],
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout), time.perf_counter() - began
