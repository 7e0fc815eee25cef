"""Words in which a table refused every row of a function alike, and the operator's word that they are final.

The writer notes them beside the landing that it rolled back, so that whoever decides reads what was said, from any machine;
once they are accepted, a landing buries what it meets in the same words. Refuses to accept what was never said.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import psycopg

from fabric_pipelines.dataplane.database import Connection, Database
from fabric_pipelines.dataplane.sql import query
from fabric_pipelines.dataplane.table_trouble import TableRefuses, told
from fabric_pipelines.errors import UsageError

MESSAGE_CHARACTERS = 500  # the rest is not told apart


@dataclass(frozen=True, slots=True)
class Refusal:
    """since, last_said: when landing met these words first and last; accepted_at: None while the function waits for it."""

    function: str
    sqlstate: str
    message: str
    constraint: str
    since: datetime
    last_said: datetime
    accepted_at: datetime | None


def require_accepted(connection: Connection, function: str, table: str, where: str, fault: psycopg.Error) -> None:  # fmt: skip
    """TableRefuses unless the operator accepted these words of the function's table."""
    words = _words(function, fault)
    row = connection.execute(query("refusal_accepted"), words).fetchone()
    if row is None or not row[0]:
        refuses = told(table, where, fault, f"fabric broker dead accept {function}")
        refuses.words = words
        raise refuses


def note(connection: Connection, fault: TableRefuses) -> None:
    """For whoever decides. `connection`: outside a transaction. Words that changed replace those that nobody accepted."""
    if fault.words:
        with connection.transaction():
            connection.execute(query("forget_refusals"), fault.words)
            connection.execute(query("note_refusal"), fault.words)


def listed(database: Database, function: str | None = None) -> list[Refusal]:
    with database.session() as connection:
        rows = connection.execute(query("refusals"), {"function": function}).fetchall()
    return [Refusal(*row) for row in rows]


def accept(database: Database, function: str) -> Refusal:
    """From now on rows that the function's table refuses in the words that it said last become dead letters. Idempotent.
    UsageError where it said none."""
    with database.session() as connection:
        row = connection.execute(query("accept_refusal"), {"function": function}).fetchone()
    if row is None:
        raise UsageError(
            f"no table refused the rows of function {function!r} alike, so there is nothing to accept: `fabric status` says who "
            "waits and for what, `fabric broker dead list` which words there are"
        )
    return Refusal(*row)


def withdraw(database: Database, function: str) -> int:
    """How many words count no more: rows that are refused in them wait again."""
    with database.session() as connection:
        return connection.execute(query("withdraw_refusals"), {"function": function}).rowcount


def _words(function: str, fault: psycopg.Error) -> dict[str, str]:
    return {
        "function": function,
        "sqlstate": fault.sqlstate or "",
        "message": (fault.diag.message_primary or "")[:MESSAGE_CHARACTERS],
        "constraint": fault.diag.constraint_name or "",
    }
