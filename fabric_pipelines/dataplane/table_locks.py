"""A lock on somebody else's table, waited for briefly and often.

Whoever waits for a lock lets everybody wait who comes after, so one wait is shorter than the second after which a server
looks for a deadlock, holds nothing else meanwhile, and is followed by a pause without any lock. Refuses to wait for
ever: in the end it says who holds the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg import sql

from fabric_pipelines.dataplane.sql import query
from fabric_pipelines.errors import DatabaseUnavailable

if TYPE_CHECKING:  # it waits by this module itself
    from fabric_pipelines.dataplane.database import Connection

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
KEEP_ROWS_OUT = ("ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock")
"""What a row that goes in waits for."""
READERS = ("AccessShareLock", "RowShareLock", *WRITERS)


def again_while_held(connection: Connection, work: Callable[[], T]) -> T:
    """What `work` returns, in a transaction of its own; again after a pause, ATTEMPTS times, while somebody holds what it
    waited for. Then that error of the server."""
    for left in reversed(range(ATTEMPTS)):
        try:
            with connection.transaction():
                return work()
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            if not left:
                raise
            time.sleep(PAUSE_S)
    raise AssertionError("ATTEMPTS is not above 0")


def wait_at_most(connection: Connection, wait_ms: int = LOCK_MS) -> None:
    """For each lock, until this transaction ends."""
    connection.execute(sql.SQL("set local lock_timeout = {}").format(sql.Literal(wait_ms)))


def briefly_locked(
    connection: Connection, relation: int, name: str, modes: tuple[str, ...], work: Callable[[], T]
) -> T:
    """What `work` returns, in a transaction of its own whose locks wait LOCK_MS each; again after a pause, ATTEMPTS
    times. relation: number of the table that it locks, held by others in one of `modes`. DatabaseUnavailable
    naming the holders when none of them gives way."""
    waited = False

    def once() -> T:
        nonlocal waited
        wait_at_most(connection, _wait_ms(connection, relation, modes) if waited else LOCK_MS)
        waited = True
        return work()

    try:
        return again_while_held(connection, once)
    except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as fault:
        held = connection.execute(
            query("lock_holders"), {"relation": relation, "modes": list(modes)}
        )
        raise held_by_others(f"{name} was held by others", "lock it", held.fetchall()) from fault


def held_by_others(said: str, what: str, holders: Sequence[tuple[Any, ...]]) -> DatabaseUnavailable:
    named = ", ".join(row[0] for row in holders) or "none of them does now"
    return DatabaseUnavailable(
        f"{said} at each of {ATTEMPTS} attempts to {what}: {named}; let that transaction end, or end it "
        "(`select pg_terminate_backend(PID)`, `rollback prepared`), and try again"
    )


def _wait_ms(connection: Connection, relation: int, modes: tuple[str, ...]) -> int:
    """An autovacuum gives way to whoever waits until the server looks for a deadlock, and to nobody sooner."""
    row = connection.execute(
        query("autovacuum_holds"), {"relation": relation, "modes": list(modes)}
    ).fetchone()
    assert row is not None
    return int(row[1]) + VACUUM_MARGIN_MS if row[0] else LOCK_MS
