"""Whose fault it is that rows cannot land: a row's, which becomes a dead letter, or that of table, server or connection.

What an owner's constraints and triggers raise has no end, since any five letters are an SQLSTATE. So the list is of what is
*not* a row's fault; whatever else a statement raises while rows go in was raised by what they hold. Refuses to bury tasks
for a table that is broken: then landing stops, and the journal keeps them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psycopg

from fabric_pipelines.dataplane.database import Connection, translate
from fabric_pipelines.dataplane.sinks import Rejection
from fabric_pipelines.dataplane.table_trouble import held, is_of_the_table
from fabric_pipelines.dataplane.table_trouble import told as refuses_all
from fabric_pipelines.errors import StorageFailed

_NOT_THE_ROWS_CLASSES = frozenset(
    (
        "03",  # SQL statement not yet complete
        "08",  # connection exception
        "0A",  # feature not supported: a rule on the table, a generated column
        "0B",  # invalid transaction initiation
        "0L",  # invalid grantor
        "0P",  # invalid role specification
        "24",  # invalid cursor state
        "25",  # invalid transaction state: read only
        "26",  # invalid SQL statement name
        "27",  # triggered data change violation: two triggers write the same row
        "28",  # invalid authorization
        "2B",  # dependent privilege descriptors
        "2D",  # invalid transaction termination: a trigger that commits
        "34",  # invalid cursor name
        "38",  # external routine exception
        "39",  # external routine invocation: a trigger that is none
        "3B",  # savepoint exception
        "3D",  # invalid catalog name
        "3F",  # invalid schema name
        "40",  # transaction rollback: serialization failure, deadlock
        "42",  # syntax error, undefined table, column or function, insufficient privilege
        "53",  # insufficient resources: disk full, out of memory
        "55",  # object not in the needed state: lock not available
        "57",  # operator intervention: shutdown, statement timeout
        "58",  # system error outside Postgres
        "72",  # snapshot too old
        "HV",  # foreign data wrapper
        "XX",  # internal error, corruption
    )
)
_NOT_THE_ROWS = frozenset(
    (
        "2200H",  # a sequence has given its last number
        "22P03",  # invalid binary representation: a column has another type than what is sent
        "22P04",  # bad COPY file format: likewise
    )
)
_NOT_THE_ROWS_AT_COMMIT = frozenset(("54",))  # the queue of NOTIFY is full, which passes

DEAD_BEFORE = "DeadBefore"
DROPPED = "RowDropped"
_DROPPED_REASON = "the table took the row and kept none: a trigger or rule of its owner dropped it"


def is_rejection(fault: psycopg.Error, *, at_commit: bool = False) -> bool:
    """Whether `fault` is about what a row holds. A fault without an SQLSTATE is the client's or the connection's."""
    state = fault.sqlstate
    if not state or state in _NOT_THE_ROWS or lacks_partition(fault):
        return False
    if at_commit and state[:2] in _NOT_THE_ROWS_AT_COMMIT:
        return False
    return state[:2] not in _NOT_THE_ROWS_CLASSES


def lacks_value(fault: psycopg.Error, sent: Sequence[str]) -> bool:
    """Whether a column that is not among `sent` has neither value nor default: then no row can land, unless a trigger
    gives it one."""
    return fault.sqlstate == "23502" and fault.diag.column_name not in sent


def lacks_partition(fault: psycopg.Error) -> bool:
    """Whether a partitioned table has no partition for the row. The server says of it what it says of a CHECK, without a
    constraint's name, and names the table, which a trigger that raises the code does only by choice."""
    return (fault.sqlstate, fault.diag.constraint_name) == ("23514", None) and bool(
        fault.diag.table_name
    )


def row_at_fault(fault: psycopg.Error, rows: int) -> int | None:
    """Position of the row that the server names ("COPY stage, line 618, ..."), or the only one there is."""
    if rows == 1:
        return 0
    named = re.search(r"^COPY \S+, line (\d+)", fault.diag.context or "", re.MULTILINE)
    at = int(named[1]) - 1 if named else -1
    return at if 0 <= at < rows else None


def rejection(fault: psycopg.Error, row: int) -> Rejection:
    context = (fault.diag.context or "").split("\n", 1)[0]
    reason = fault.diag.message_primary or str(fault)
    return Rejection(row, fault.sqlstate or "", f"{reason} ({context})" if context else reason)


def dropped(row: int) -> Rejection:
    """Of a row that raised nothing and is not in the table all the same."""
    return Rejection(row, DROPPED, _DROPPED_REASON)


def dead_before(row: int) -> Rejection:
    """Of a row whose dead letter stands already, and is kept as it is: only a requeue takes that back."""
    return Rejection(row, DEAD_BEFORE, "an earlier landing of the task buried it")


@contextmanager
def landing_into(table: str, where: str, connection: Connection) -> Iterator[None]:
    """As `translated`, for the statements of a landing that roll back what they began; a fault of the table comes with its
    remedy."""
    try:
        yield
    except psycopg.Error as fault:
        if fault.sqlstate == "2200H" or lacks_partition(fault):
            raise refuses_all(table, where, fault) from fault
        if is_of_the_table(fault):
            raise held(table, where, fault, connection) from fault
        told = translate(fault, where)
        # 08P01 within COPY: a column narrower or wider than what is sent; elsewhere a pooler says it of a lost server
        mistyped = fault.sqlstate == "08P01" and (fault.diag.context or "").startswith("COPY")
        if mistyped:
            told = StorageFailed(f"{where} cannot read a row ({' '.join(str(fault).split())})")
        if type(told) is StorageFailed:
            told = StorageFailed(
                f"{told}: {table}, or a trigger or rule of its owner, is not as landing needs it; put that right and "
                "start completion again, the journal keeps every task until then"
            )
        raise told from fault
