"""Whether what rows met is the table's trouble: then none is buried, landing waits and goes on by itself.

Asked once a landing, after its first rejection, and answered by trying, never by reading the owner's triggers. Without any
row: an INSERT of none fires the statement's triggers, and the defaults of columns that landing does not send are
evaluated. With rows, one at a time: where what was raised is no complaint about a value, and rows that lie apart are all
refused in the same words, the words are not about them; rows that are in the table already say nothing of it. Nothing that is tried stays. Refuses to guess from a few rows:
fewer than ROWS_ALIKE are buried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import psycopg
from psycopg import sql

from fabric_pipelines.dataplane.database import Connection
from fabric_pipelines.dataplane.sql import compose, query, relation, trusted
from fabric_pipelines.dataplane.table_locks import KEEP_ROWS_OUT
from fabric_pipelines.errors import DatabaseUnavailable

ROWS_ALIKE = 8
"""Rows that are tried, over the whole landing, before their words count as the table's."""
_ABOUT_VALUES = ("22", "23")  # data exception, integrity constraint violation


class TableTrouble(DatabaseUnavailable):
    """One table takes nothing for now; the connection is whole, and others may take rows all the while."""


class TableRefuses(TableTrouble):
    """The table takes no row at all for now, whatever it holds. words: those that an operator may accept."""

    words: Mapping[str, str] | None = None


class TableHeld(TableTrouble):
    """Somebody holds what a landing into the table waits for, or ended its statement."""


def is_of_the_table(fault: psycopg.Error) -> bool:
    """Whether the server gave one statement up and goes on: a lock was not to be had, a deadlock, a statement that took too
    long or that somebody cancelled. The rest of the classes that may pass is about the whole server."""
    state = fault.sqlstate or ""
    return state[:2] in ("40", "55") or state == "57014"


def told(table: str, where: str, fault: psycopg.Error, accepts: str = "") -> TableRefuses:
    """accepts: the command that ends the waiting by dead letters."""
    way_out = f"; if it means it, `{accepts}` makes dead letters of them" if accepts else ""
    why = fault.diag.message_primary or str(fault)
    return TableRefuses(
        f"{table} of {where} refuses every row alike ({fault.sqlstate}: {why}): nothing is buried, landing waits and goes on "
        f"by itself once that trigger, default, sequence or partitioning lets rows in{way_out}"
    )


def held(table: str, where: str, fault: psycopg.Error, connection: Connection) -> TableHeld:
    """Names who holds the table now. `connection`: outside a transaction."""
    why = fault.diag.message_primary or str(fault)
    try:
        number = connection.execute("select to_regclass(%s)::oid", [table]).fetchone()
        asked = {"relation": number and number[0], "modes": list(KEEP_ROWS_OUT)}
        holders = connection.execute(query("lock_holders"), asked).fetchall()
    except psycopg.Error:
        holders = []
    named = ", ".join(row[0] for row in holders) or "nobody any more, or not this table"
    return TableHeld(
        f"{table} of {where} cannot be written for now ({fault.sqlstate}: {why}): held by {named}; its rows wait and land once "
        "that is over (`select pg_terminate_backend(PID)`, `rollback prepared`)"
    )


def table_refuses(
    connection: Connection,
    table: str,
    sent: Sequence[str],
    fault: psycopg.Error,
    rows: int,
    attempt: Callable[[int], psycopg.Error | None],
) -> bool:
    """Whether `fault` would meet any row of `table`. sent: columns that landing gives; attempt: what the table says to the
    row at one of `rows` positions, none in the table yet, which it does not keep."""
    if _same(_without_rows(connection, table, sent), fault):
        return True
    if rows < ROWS_ALIKE or (fault.sqlstate or "")[:2] in _ABOUT_VALUES:
        return False
    apart = (at * (rows - 1) // (ROWS_ALIKE - 1) for at in range(ROWS_ALIKE))
    return all(_same(attempt(at), fault) for at in apart)


def _without_rows(connection: Connection, table: str, sent: Sequence[str]) -> psycopg.Error | None:
    columns = sql.SQL(", ").join(sql.Identifier(name) for name in sent)
    none = compose("insert_nothing", table=relation(table), columns=columns)
    found = connection.execute(query("defaults_not_sent"), {"table": table, "sent": list(sent)})
    defaults = [row[0] for row in found.fetchall()]
    for statement in (none, *(sql.SQL("select {}").format(trusted(text)) for text in defaults)):
        try:
            with connection.transaction(force_rollback=True):
                connection.execute(statement)
        except psycopg.Error as fault:
            if connection.broken:
                raise
            return fault
    return None


def _same(one: psycopg.Error | None, other: psycopg.Error) -> bool:
    return one is not None and _words(one) == _words(other)


def _words(fault: psycopg.Error) -> tuple[str | None, ...]:
    return fault.sqlstate, fault.diag.message_primary, fault.diag.constraint_name
