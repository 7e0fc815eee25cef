"""Looks at the database every half second on behalf of the governor, over a connection of its own.

Signals are read one statement each, since a role may see some and not others, and a server's version decides which
exist; one that is refused is not asked for again on that connection. Beside them a probe, the smallest transaction
that must reach the disk, tells what any small writer waits. Refuses to decide: it reports, the governor judges. While
the database does not answer it reports just that, and the governor falls to its floor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import psycopg

from fabric_pipelines.dataplane.database import Connection, Database
from fabric_pipelines.dataplane.governor import TICK_S
from fabric_pipelines.dataplane.pressure import Signals
from fabric_pipelines.dataplane.sinks import DEAD_LETTERS, GENERIC, SINKS
from fabric_pipelines.dataplane.sql import query
from fabric_pipelines.dataplane.valve import Valve
from fabric_pipelines.errors import FabricError

PROBE_S = 0.1
FIRST_PROBES = 24
FIRST_PROBE_S = 0.02
"""Apart from each other, or they all hit the same moment of the disk."""
IDLE_LOOK_S, IDLE_PROBE_S = 2.0, 5.0
"""Without bulk a probe is WAL that nobody needs, and a look is work for a server that may sleep otherwise."""
SILENCE_S = 4.0
SILENCE_PROBES = 6
HUSH_S = 0.3
"""While bulk runs without a gap, it is held back for a few probes every SILENCE_S, or nobody would know what silence
sounds like by now. It costs bulk about 2 % of its time; a transaction that outlasts HUSH_S is not waited for."""
CATALOGUE_S = 30.0
MILLISECOND = timedelta(milliseconds=1)
TABLES = (*(sink.table for sink in SINKS.values()), GENERIC.table, DEAD_LETTERS)
CHECKPOINTER_SINCE = 170000


class Gauge:
    """Signals over one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        version = connection.info.server_version
        requested = "17" if version >= CHECKPOINTER_SINCE else "15"
        self._queries = {
            "wal_since_redo": "signal_wal_since_redo",
            "checkpoints_requested": f"signal_checkpoints_requested_{requested}",
            "wal_buffers_full": "signal_wal_buffers_full",
            "replication_lag_bytes": "signal_replication_lag_bytes",
            "lock_waiters": "signal_lock_waiters",
        }

    def read(self, application: str) -> Signals:
        """What can be seen. Raises psycopg.OperationalError when nobody answers."""
        seen: dict[str, Any] = {}
        for name, block in list(self._queries.items()):
            try:
                row = self._connection.execute(
                    query(block), {"application": application}
                ).fetchone()
            except (psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedObject):
                del self._queries[name]  # this role or server will not say it later either
                continue
            if row is not None:
                seen[name] = row[0]
        return Signals(**seen)

    def parts(self, tables: Sequence[str]) -> dict[str, list[str]]:
        return {
            table: [
                row[0]
                for row in self._connection.execute(
                    query("table_parts"), {"table": table}
                ).fetchall()
            ]
            for table in tables
        }

    def probe_ms(self) -> float:
        """Milliseconds by the server's clock, from the first statement of the probe to the end of its commit."""
        moments: list[datetime] = []
        with self._connection.execute(query("probe")) as answer:
            more: bool | None = True
            while more:
                if answer.description is not None:
                    moments += [row[0] for row in answer.fetchall()]
                more = answer.nextset()
        return (moments[-1] - moments[0]) / MILLISECOND


class Watch:
    """A thread from `start` to `close`."""

    def __init__(self, database: Database, valve: Valve) -> None:
        self._database = database
        self._valve = valve
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._connection: Connection | None = None
        self._gauge: Gauge | None = None
        self._looked_s = self._catalogue_s = float("-inf")
        self._silence_s = time.monotonic()
        self._probed_s = float("-inf")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Idempotent; also before `start`."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        self._forget()

    def look(self, *, works: bool = True) -> None:
        """One turn: a probe and what else is due. `works`: bulk has run since the last turn."""
        try:
            gauge = self._opened()
            now_s = time.monotonic()
            if works or now_s - self._probed_s >= IDLE_PROBE_S:
                self._probe(gauge)
                self._probed_s = now_s = time.monotonic()
            if now_s - self._silence_s >= SILENCE_S:
                if self._valve.busy:
                    self._listen(gauge)
                self._silence_s = now_s
            if now_s - self._catalogue_s >= CATALOGUE_S:
                self._valve.built_of(gauge.parts(TABLES))
                self._catalogue_s = now_s
            if now_s - self._looked_s >= TICK_S:
                self._valve.observe(gauge.read(self._database.application))
                self._looked_s = now_s
        except (FabricError, psycopg.Error):
            self._forget()
            self._valve.observe(None)

    def _run(self) -> None:
        pause_s, started, works = 0.0, 0, False
        while not self._done.wait(pause_s):
            self.look(works=works)
            before, started = started, self._valve.started
            works = started != before or self._valve.wanted
            if self._gauge is None:
                pause_s = TICK_S
            else:
                pause_s = PROBE_S if works else min(max(pause_s * 2, TICK_S), IDLE_LOOK_S)

    def _opened(self) -> Gauge:
        if self._gauge is None:
            self._connection = self._database.connect()
            self._connection.execute(query("durable_commits"))
            self._connection.execute(query("bounded_waits"))
            self._gauge = Gauge(self._connection)
            for _ in range(FIRST_PROBES):
                if self._done.wait(FIRST_PROBE_S):
                    break
                self._probe(self._gauge)
        return self._gauge

    def _probe(self, gauge: Gauge) -> None:
        busy, started = self._valve.busy, self._valve.started
        latency_ms = gauge.probe_ms()
        self._valve.probed(latency_ms, loaded=busy or self._valve.started != started)

    def _listen(self, gauge: Gauge) -> None:
        """Probes between two bulk transactions."""
        self._valve.hush(HUSH_S)
        try:
            end_s = time.monotonic() + HUSH_S
            while self._valve.busy and time.monotonic() < end_s:
                if self._done.wait(0.002):
                    return
            for _ in range(SILENCE_PROBES):
                if self._valve.busy:
                    return
                self._probe(gauge)
        finally:
            self._valve.hush(0)

    def _forget(self) -> None:
        connection, self._connection, self._gauge = self._connection, None, None
        if connection is not None:
            connection.close()
