"""The fabric's schema in a database: make it, and say what is there.

`prepare` may be run again at any time: it makes the database where it is missing and the role may, brings the schema up
to this program's version and changes nothing else. Refuses with one sentence that names what is missing and the
statement that mends it.
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fabric_pipelines.dataplane.database import (
    Connection,
    Database,
    get_meta,
    missing_database,
)
from fabric_pipelines.dataplane.libpq import ENCODING
from fabric_pipelines.dataplane.sql import migrations, query, trusted
from fabric_pipelines.errors import SettingsError, UsageError
from fabric_pipelines.settings import redact

MAINTENANCE = "postgres"


@dataclass(frozen=True, slots=True)
class Prepared:
    """applied: names of migrations, empty when all were there; vectors: why the vector type is what it is."""

    created_database: bool
    applied: list[str]
    vector_type: str
    vectors: str


@dataclass(frozen=True, slots=True)
class Table:
    """rows: the planner's estimate, None before the table was first analysed; size: bytes with indexes and TOAST."""

    name: str
    rows: int | None
    size: int


@dataclass(frozen=True, slots=True)
class State:
    """pending: migrations of this program that the database lacks."""

    migrations: list[str]
    pending: list[str]
    vectors: str
    size: int
    tables: list[Table]
    journals: int


def prepare(database: Database) -> Prepared:
    """Raises VersionRefused for a server before 15 or a schema of a newer program, SettingsError for a role that may
    not do it, DatabaseUnavailable when nobody answers."""
    created = _ensure_database(database)
    with database.session() as connection:
        _require_rights(connection, database)
    applied = database.migrate()
    with database.session() as connection:
        return Prepared(
            created,
            applied,
            get_meta(connection, "vector_type") or "",
            get_meta(connection, "vectors") or "",
        )


def state(database: Database) -> State:
    """Raises UsageError when there is no schema."""
    with database.session() as connection:
        try:
            applied = [row[1] for row in connection.execute(query("applied_migrations")).fetchall()]
        except psycopg.errors.UndefinedTable as fault:
            raise UsageError(
                f"the database at {redact(database.url)} has no fabric schema yet: run `fabric db init`"
            ) from fault
        known = [item.name for item in migrations()]
        tables = connection.execute(query("table_sizes")).fetchall()
        journals = connection.execute(query("journals")).fetchall()
        size = connection.execute(query("database_size")).fetchone()
        assert size is not None
        return State(
            migrations=applied,
            pending=[name for name in known if name not in applied],
            vectors=get_meta(connection, "vectors") or "",
            size=int(size[0]),
            tables=[
                Table(name, None if rows < 0 else int(rows), int(of)) for name, rows, of in tables
            ],
            journals=len(journals),
        )


def _ensure_database(database: Database) -> bool:
    """Make the database that the URL names, if the server is there and has it not; True if it was made."""
    try:
        database.connect().close()
    except SettingsError as refused:
        cause = refused.__cause__
        missing = missing_database(cause) if isinstance(cause, psycopg.Error) else None
        if missing is None:
            raise
        maintenance = Database(make_conninfo(database.url, dbname=MAINTENANCE))
        with maintenance.connect(for_rows=False) as connection:
            try:
                connection.execute(_create(connection, missing))
            except psycopg.errors.InsufficientPrivilege as fault:
                raise SettingsError(
                    f"there is no database {missing!r} at {redact(database.url)}, and this role may not make one: "
                    f'ask the owner of the server for `create database "{missing}" owner {connection.info.user} '
                    "encoding 'UTF8' template template0`"
                ) from fault
            except psycopg.errors.DuplicateDatabase:
                return False  # somebody else was faster
        return True
    return False


def _create(connection: Connection, name: str) -> sql.Composed:
    """From the server's own template, with what its owner put there, unless that cannot hold all text."""
    row = connection.execute(query("template_encoding")).fetchone()
    statement = sql.SQL("create database {}").format(sql.Identifier(name))
    if row is None or row[0] == ENCODING:
        return statement
    # the locale of such a server may fit its own encoding only; C fits any, and the fabric sorts no text
    options = "encoding 'UTF8' template template0 locale_provider libc locale 'C'"
    return statement + trusted(f" {options}")


def _require_rights(connection: Connection, database: Database) -> None:
    row = connection.execute(query("schema_rights")).fetchone()
    assert row is not None
    role, name, may_create, owner, may_use = row
    if owner is None and not may_create:
        raise SettingsError(
            f"role {role!r} may not make a schema in database {name!r} at {redact(database.url)}: "
            f'run `grant create on database "{name}" to "{role}"` as its owner'
        )
    if owner is not None and not may_use:
        raise SettingsError(
            f"the schema fabric of database {name!r} belongs to {owner!r}, and role {role!r} may not change it: "
            f'use that role in FABRIC_PG_URL, or run `alter schema fabric owner to "{role}"` as {owner!r}'
        )
