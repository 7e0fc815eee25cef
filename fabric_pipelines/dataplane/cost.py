"""What one landing really cost, as the server itself tells it, and which way rows go so that it can tell.

Postgres 18 counts WAL per backend, so every landing is measured. Before 18 only EXPLAIN of a statement tells, and
COPY cannot be explained: there each MEASURED_EVERY-th landing goes through the staging table, whose merge can. Refuses
to guess: None is "not known".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from fabric_pipelines.dataplane.database import Connection
from fabric_pipelines.dataplane.sql import compose, query

BACKEND_WAL_SINCE = 180000
MEASURED_EVERY = 16


@dataclass(slots=True)
class Meter:
    """Of one connection. `open` in a transaction, `seal` after its commit; between them `goes_straight`, `merge` and
    `staged` per put."""

    connection: Connection
    _counts: bool = field(init=False)
    _before: int | None = None
    _merged: int | None = None
    _puts: dict[str, int] = field(default_factory=dict)
    _replaying: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._counts = self.connection.info.server_version >= BACKEND_WAL_SINCE

    @property
    def counts(self) -> bool:
        """Whether the server counts WAL by backend, so that no statement need be explained."""
        return self._counts

    def open(self) -> None:
        self._merged = None
        if self._counts:
            self.connection.execute(query("flush_statistics"))
            if self._before is None:
                self._before = self._total()

    def seal(self) -> int | None:
        """WAL bytes since `open`, or of the merge alone before 18. The commit stands, whatever fails here."""
        if not self._counts:
            return self._merged
        try:
            before, self._before = self._before, self._total()
        except psycopg.Error:
            self._before = None
            return None
        return None if before is None or self._before is None else self._before - before

    def goes_straight(self, table: str) -> bool:
        """Whether the next rows of `table` are tried without staging: not while they come a second time, and before
        18 not when it is time to measure."""
        number = self._puts[table] = self._puts.get(table, -1) + 1
        if table in self._replaying:
            return False
        return self._counts or number % MEASURED_EVERY != 0

    def staged(self, table: str, *, conflicts: int) -> None:
        """What a merge met decides the way of the next rows."""
        if conflicts:
            self._replaying.add(table)
        else:
            self._replaying.discard(table)

    def merge(self, statement: sql.Composed) -> int:
        """Run the merge; rows inserted, where it is explained with those that a trigger of the owner dropped."""
        if self._counts:
            return self.connection.execute(statement).rowcount
        row = self.connection.execute(compose("explain", statement=statement)).fetchone()
        assert row is not None
        plan: dict[str, Any] = row[0][0]["Plan"]
        self._merged = (self._merged or 0) + int(plan["WAL Bytes"])
        return int(plan["Tuples Inserted"])

    def _total(self) -> int | None:
        row = self.connection.execute(query("own_wal")).fetchone()
        return None if row is None or row[0] is None else int(row[0])
