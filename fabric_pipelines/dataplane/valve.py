"""The governor among threads: one lock, one clock, and the names that landing knows.

Writers ask and report from several threads, the watcher from another; the governor itself stays pure. Refuses
nothing: a bulk transaction that does not ask wait_s first is charged all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.dataplane.governor import Governor, Limits, Pass
from fabric_pipelines.dataplane.pressure import Signals
from fabric_pipelines.dataplane.sinks import DEAD_LETTERS, sink_of
from fabric_pipelines.dataplane.writer import Landed


class Valve:
    def __init__(self, limits: Limits, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._governor = Governor(limits, clock_s())

    @property
    def rows(self) -> int:
        """Rows of the next bulk transaction."""
        with self._lock:
            return self._governor.effective_rows(self._clock_s())

    @property
    def writers(self) -> int:
        """Bulk transactions that may run at once."""
        with self._lock:
            return self._governor.writers

    @property
    def busy(self) -> bool:
        """Whether bulk runs right now."""
        with self._lock:
            return self._governor.in_flight > 0

    @property
    def wanted(self) -> bool:
        """Whether bulk runs, or was made to wait since the last look."""
        with self._lock:
            return self._governor.in_flight > 0 or self._governor.throttled

    @property
    def started(self) -> int:
        """Bulk transactions begun so far: whoever looks twice knows whether one ran between."""
        with self._lock:
            return self._governor.started

    def wait_s(self) -> float:
        with self._lock:
            return self._governor.wait_s(self._clock_s())

    def waited(self, seconds: float) -> None:
        with self._lock:
            self._governor.waited(seconds)

    def admit(self, batch: pa.RecordBatch, *, bulk: bool) -> Pass:
        """Charge the landing of `batch` (one function); dead letters and the like are not bulk."""
        table = sink_of(batch.column("function")[0].as_py()).table if bulk else DEAD_LETTERS
        with self._lock:
            return self._governor.admit(
                table, batch.num_rows, batch.nbytes, self._clock_s(), bulk=bulk
            )

    def settle(self, leave: Pass, landed: Landed) -> None:
        rows = landed.rows + (0 if leave.in_class == "bulk" else int(landed.dead_task_ids.size))
        with self._lock:
            self._governor.settle(
                leave,
                rows=rows,
                size=landed.size,
                wal_bytes=landed.wal_bytes,
                commit_ms=landed.commit_ms,
            )

    def withdraw(self, leave: Pass) -> None:
        with self._lock:
            self._governor.withdraw(leave)

    def probed(self, latency_ms: float, *, loaded: bool) -> None:
        with self._lock:
            self._governor.probed(latency_ms, loaded=loaded)

    def hush(self, seconds: float) -> None:
        """No bulk begins for so long; 0 ends it."""
        with self._lock:
            self._governor.hush(self._clock_s() + seconds)

    def observe(self, signals: Signals | None) -> None:
        with self._lock:
            self._governor.observe(signals, self._clock_s())

    def built_of(self, parts: Mapping[str, Sequence[str]]) -> None:
        """Per table its indexes and triggers (names of prices.SURCHARGES)."""
        with self._lock:
            for table, names in parts.items():
                self._governor.built_of(table, tuple(names))

    def as_json(self) -> dict[str, Any]:
        with self._lock:
            return self._governor.as_json(self._clock_s())


def is_regular(batch: pa.RecordBatch) -> pa.Array:
    """Per row, whether it is of the class that never waits: outcomes that become dead letters."""
    return pc.not_equal(batch.column("status"), "ok")
