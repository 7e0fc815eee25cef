"""The floor: 20,000 generated rows from the broker's hand until they are durable and retired.

Completion's own loop behind a governor that begins anew and knows nothing, with its watcher, three writers, dead-letter
check, ack rows and confirmations, against wall time and CPU: that of this process and of the whole server. The second does
not depend on who else uses the machine, so it is what a test may hold. Every round has new task ids and the same table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from fabric_pipelines.bench.landing.governed import SETTLE_S, EndlessSource
from fabric_pipelines.bench.landing.rows import batch
from fabric_pipelines.completion.receive import Receiver
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.governor import Limits
from fabric_pipelines.dataplane.valve import Valve
from fabric_pipelines.dataplane.watch import Watch
from fabric_pipelines.dataplane.writer import ROWS_PER_LANDING, Writer
from fabric_pipelines.errors import CheckFailed

ROWS = 20_000
WITHIN_S = 3.0


class Handful(EndlessSource):
    """A broker that has ROWS computed tasks and then none."""

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self._rows = [
            batch("generate", ROWS_PER_LANDING, first + at)
            for at in range(0, ROWS, ROWS_PER_LANDING)
        ]

    def pull_computed(
        self, *, rows: int, wait_s: float = 0, skip: Sequence[str] = ()
    ) -> pa.RecordBatch:
        return self._rows.pop(0) if self._rows else batch("generate", 0, 0)


def measure(database: Database, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds of each round, and of CPU, what the governor's watcher takes meanwhile included; CheckFailed when the table does not hold what was retired."""
    took: list[float] = []
    cpu: list[float] = []
    with database.session() as connection:
        server = psutil.Process(connection.info.backend_pid).parent()
    assert server is not None
    for number in range(rounds):
        before = time.process_time() + _server_s(server)
        took.append(_round(database, number * ROWS))
        cpu.append(time.process_time() + _server_s(server) - before)
        say(f"floor, round {number + 1} of {rounds}: {took[-1]:.2f} s, {cpu[-1]:.2f} s of CPU")
    with database.session() as connection:
        row = connection.execute("select count(*) from fabric.generate").fetchone()
    if row != (rounds * ROWS,):
        raise CheckFailed(f"{rounds * ROWS:,} rows were retired and the table has {row}")
    return {
        "rows": ROWS,
        "within_s": WITHIN_S,
        "seconds": [round(each, 2) for each in took],
        "median_s": round(float(np.median(took)), 2),
        "worst_s": round(max(took), 2),
        "cpu_s": [round(each, 2) for each in cpu],
    }


def _server_s(server: psutil.Process) -> float:
    """CPU seconds of a Postgres server with all its processes, those that have ended included."""
    own = server.cpu_times()
    ended = float(own.children_user + own.children_system)
    total = float(own.user + own.system) + ended
    for process in server.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += float(times.user + times.system)
    return total


def _round(database: Database, first: int) -> float:
    valve, source = Valve(Limits()), Handful(first)
    here = Database(database.url, application="bench")
    target, *more = (Writer(here, elastic=bulk) for bulk in (True, True, False))
    loop = Receiver(lambda: source, target, lambda *_: None, more_targets=more, gate=valve)
    with closing(Watch(here, valve)) as watch, closing(loop):
        watch.start()
        time.sleep(SETTLE_S)
        began = time.perf_counter()
        while loop.counters.retired < ROWS:
            time.sleep(loop.step(wait_s=0))
        return time.perf_counter() - began
