"""A lock on somebody else's table, waited for briefly and often.

Whoever waits for a lock lets everybody wait who comes after, so one wait is shorter than the second after which a server
looks for a deadlock, holds nothing else meanwhile, and is followed by a pause without any lock. Refuses to wait for
ever: in the end it says who holds the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psycopg
from psycopg import sql

from fabric_pipelines.dataplane.database import Connection
from fabric_pipelines.dataplane.sql import query
from fabric_pipelines.errors import DatabaseUnavailable

T = TypeVar("T")

LOCK_MS = 700
PAUSE_S = 0.8
ATTEMPTS = 20
VACUUM_MARGIN_MS = 500
WRITERS = (
    "RowExclusiveLock", "ShareUpdateExclusiveLock", "ShareLock", "ShareRowExclusiveLock", "ExclusiveLock",
    "AccessExclusiveLock",
)  # fmt: skip
"""What SHARE ROW EXCLUSIVE waits for; ACCESS EXCLUSIVE waits for readers as well."""
READERS = ("AccessShareLock", "RowShareLock", *WRITERS)


def briefly_locked(
    connection: Connection, relation: int, name: str, modes: tuple[str, ...], work: Callable[[], T]
) -> T:
    """What `work` returns, in a transaction of its own whose locks wait LOCK_MS each; again after a pause, ATTEMPTS
    times. relation: number of the table that it locks, held by others in one of `modes`. DatabaseUnavailable
    naming the holders when none of them gives way."""
    wait_ms = LOCK_MS
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_S)
        try:
            with connection.transaction():
                connection.execute(
                    sql.SQL("set local lock_timeout = {}").format(sql.Literal(wait_ms))
                )
                return work()
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as fault:
            last = fault
        # An autovacuum gives way to whoever waits until the server looks for a deadlock, and to nobody sooner.
        row = connection.execute(
            query("autovacuum_holds"), {"relation": relation, "modes": list(modes)}
        ).fetchone()
        assert row is not None
        wait_ms = int(row[1]) + VACUUM_MARGIN_MS if row[0] else LOCK_MS
    raise DatabaseUnavailable(
        f"{name} was held by others at each of {ATTEMPTS} attempts to lock it: {_holders(connection, relation, modes)}; let "
        "that transaction end, or end it (`select pg_terminate_backend(PID)`, `rollback prepared`), and try again"
    ) from last


def _holders(connection: Connection, relation: int, modes: tuple[str, ...]) -> str:
    rows = connection.execute(
        query("lock_holders"), {"relation": relation, "modes": list(modes)}
    ).fetchall()
    return ", ".join(row[0] for row in rows) or "none of them does now"
