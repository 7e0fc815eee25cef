"""One Postgres database as the fabric knows it: connections, migrations, identity, registered journals.

Every psycopg error leaves here as a member of the error tree: away or recovering is DatabaseUnavailable
(retry), everything else is terminal. Refuses servers below 15, databases migrated by a newer program, and
journals it does not know once it holds another one's results.
"""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from fabric_pipelines import settings as settings_module
from fabric_pipelines.dataplane import libpq, postgres, table_locks
from fabric_pipelines.dataplane.sql import migrations, query
from fabric_pipelines.errors import (
    DatabaseUnavailable,
    FabricError,
    IncarnationMismatch,
    SettingsError,
    StorageFailed,
    UsageError,
    VersionRefused,
)
from fabric_pipelines.redaction import redact_words
from fabric_pipelines.settings import Settings, redact

SERVER_VERSION_LEAST = 150000
CONNECT_TIMEOUT_S = 10
SILENCE_MS = 60_000
Connection = libpq.Connection

REMEDY_ENCODING = "create database \"NAME\" encoding 'UTF8' template template0"


def database_url(settings: Settings) -> str:
    """FABRIC_PG_URL, or the socket URL of the embedded server of this home (running or not)."""
    return settings.pg_url or postgres.place(settings).url


@dataclass(frozen=True, slots=True)
class Identity:
    """cluster_id: Postgres system identifier; database_id: drawn when the schema was made, so that two
    databases of one cluster differ; vector_type: "halfvec" or "bytea"."""

    cluster_id: str
    database_id: str
    server_version: int
    database: str
    vector_type: str


class Database:
    """A database by URL. Holds no connection: `connect` makes one, its caller closes it."""

    def __init__(self, url: str, *, application: str = "fabric") -> None:
        self.url = url
        self.application = application
        self._identity: Identity | None = None

    @classmethod
    def of(cls, settings: Settings) -> Database:
        return cls(database_url(settings))

    def __repr__(self) -> str:
        return f"Database({redact(self.url)!r})"

    def connect(self, *, for_rows: bool = True) -> Connection:
        """An autocommit connection; use `with connection.transaction()` for more than one statement. Its text is UTF-8.
        `for_rows`: False where nothing is kept in this very database, whose encoding is then no matter.
        Raises DatabaseUnavailable, SettingsError (wrong login, name or encoding) or VersionRefused."""
        with translated(self.url):
            try:
                connection = libpq.connect(
                    self.url,
                    embedded=postgres.is_embedded(self.url),
                    autocommit=True,
                    connect_timeout=CONNECT_TIMEOUT_S,
                    tcp_user_timeout=SILENCE_MS,  # a host that vanished is away, not slow
                    application_name=self.application,
                )
            except (psycopg.ProgrammingError, UnicodeError) as fault:
                raise SettingsError(
                    f"the database URL {redact(self.url)!r} cannot be read ({redact_words(str(fault), self.url)}); "
                    "it looks like postgresql://user:password@host:port/name"
                ) from fault
        version = connection.info.server_version
        if version < SERVER_VERSION_LEAST:
            connection.close()
            raise VersionRefused(
                f"the server at {redact(self.url)} is Postgres {version // 10000}; "
                "the fabric needs 15 or newer, point FABRIC_PG_URL to one"
            )
        if for_rows:
            self._require_utf8(connection)
        # what another commits while one of ours waits for its lock is seen, whatever server, role or URL make the default
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        return connection

    def _require_utf8(self, connection: Connection) -> None:
        """Any other encoding lacks characters that engines write, and SQL_ASCII keeps bytes that may be anything."""
        encoding = connection.info.parameter_status("server_encoding")
        if encoding != libpq.ENCODING:
            name = connection.info.dbname
            connection.close()
            raise SettingsError(
                f"database {name!r} at {redact(self.url)} keeps its text in {encoding}, which cannot hold every "
                f"character: make one that can (`{REMEDY_ENCODING}`) and name it in FABRIC_PG_URL"
            )

    @contextmanager
    def session(self) -> Iterator[Connection]:
        """A connection for one piece of work, closed at the end; errors come out of the fabric's tree."""
        connection = self.connect()
        try:
            with translated(self.url):
                yield connection
        finally:
            connection.close()

    @property
    def identity(self) -> Identity:
        """Cached after the first look; the database must be migrated."""
        if self._identity is None:
            with self.session() as connection:
                self._identity = read_identity(connection)
        return self._identity

    @property
    def cluster_id(self) -> str:
        return self.identity.cluster_id

    @property
    def vector_type(self) -> str:
        return self.identity.vector_type

    def migrate(self) -> list[str]:
        """Bring the schema up to this program's version; returns the names of what was applied. Safe to call
        from several processes at once. Raises VersionRefused when the database is ahead of the program, DatabaseUnavailable
        when others hold tables of the fabric all the time: a migration waits for a lock only briefly, since whoever writes to
        a watched table would wait behind it."""
        with self.session() as connection:

            def once() -> list[str]:
                connection.execute(query("migration_lock"))  # another migration is waited for
                _require_writable(connection)
                _refuse_template(connection)
                table_locks.wait_at_most(connection)
                connection.execute(query("bootstrap"))
                return _apply_migrations(connection)

            try:
                return table_locks.again_while_held(connection, once)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as fault:
                held = connection.execute(query("fabric_holders")).fetchall()
                raise table_locks.held_by_others(
                    f"tables of the fabric in {redact(self.url)} were held by others",
                    "migrate",
                    held,
                ) from fault

    def register_incarnation(self, journal_id: str, incarnation: int, *, retired: int = 0) -> bool:
        """Make journal and database known to each other; True if it was new. `retired` is how many tasks the
        journal says were retired or dead: proof that it has worked with some database before.

        Raises IncarnationMismatch for a new journal on a database with results, and for an old journal
        on a database that does not know it.
        """
        with self.session() as connection, connection.transaction():
            connection.execute(query("journals_lock"))
            known = dict(connection.execute(query("journals")).fetchall())
            if known.get(journal_id) == incarnation:
                return False
            identity = read_identity(connection)
            where = f"database {identity.database!r} (cluster {identity.cluster_id})"
            _refuse_clash(known, journal_id, incarnation, where)
            if known and _scalar(connection, "holds_results"):
                raise IncarnationMismatch(
                    f"{where} holds results of journal {', '.join(known)}, and this broker's journal is "
                    f"{journal_id}: bring back the old journal folder, point FABRIC_PG_URL to an empty "
                    f"database, or admit the new journal on purpose with `{_admit(journal_id, incarnation)}`"
                )
            if retired:
                raise IncarnationMismatch(
                    f"journal {journal_id} has already retired {retired} tasks, and {where} does not know "
                    "it: point FABRIC_PG_URL to the database it worked with, or admit it on purpose with "
                    f"`{_admit(journal_id, incarnation)}`"
                )
            _add_journal(connection, journal_id, incarnation)
            return True

    def admit_journal(self, journal_id: str, incarnation: int) -> None:
        """The operator's word that this journal may land here beside the known ones."""
        with self.session() as connection, connection.transaction():
            connection.execute(query("journals_lock"))
            known = dict(connection.execute(query("journals")).fetchall())
            if known.get(journal_id) == incarnation:
                return
            _refuse_clash(known, journal_id, incarnation, "the database")
            _add_journal(connection, journal_id, incarnation)


def read_identity(connection: Connection) -> Identity:
    row = connection.execute(query("cluster")).fetchone()
    assert row is not None
    try:
        meta = {key: get_meta(connection, key) for key in ("database_id", "vector_type")}
    except psycopg.errors.UndefinedTable as fault:
        raise UsageError(
            f"database {row[2]!r} has no fabric schema yet: run `fabric db init`, or `fabric up`"
        ) from fault
    return Identity(row[0], meta["database_id"] or "", row[1], row[2], meta["vector_type"] or "")


def get_meta(connection: Connection, key: str) -> str | None:
    row = connection.execute(query("get_meta"), {"key": key}).fetchone()
    return None if row is None else str(row[0])


def set_meta(connection: Connection, key: str, value: str) -> None:
    connection.execute(query("set_meta"), {"key": key, "value": value})


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turn psycopg errors into the fabric's: what may pass is DatabaseUnavailable, the rest is terminal."""
    try:
        yield
    except psycopg.Error as fault:
        raise translate(fault, url) from fault


_AWAY_CLASSES = (
    "08",  # connection exception
    "40",  # serialization failure, deadlock: the server asks for the transaction again
    "53",  # insufficient resources: disk full, too many connections
    "55",  # object not in the needed state: lock not available
    "57",  # operator intervention: shutdown, crash, starting up
    "58",  # system error outside Postgres
)
_NOBODY_WORDS = ("No such file or directory", "Connection refused")
_LOGIN_WORDS = (
    "authentication failed",
    "does not exist",
    "is not permitted to log in",
    "no password supplied",
    "no pg_hba.conf entry",
)
_NOWHERE = re.compile(
    # what a resolver says for sure; while it is away itself it says "Temporary failure in name resolution"
    "Name or service not known|No address associated with hostname|"
    r"invalid port number|invalid \w+ value|does not support SSL, but SSL was required"
)


def translate(fault: psycopg.Error, url: str) -> FabricError:
    where, why = redact(url), redact_words(" ".join(str(fault).split()), url)
    state = fault.sqlstate or ""
    if (missing := missing_database(fault)) is not None:
        return SettingsError(
            f"the server of {where} has no database {missing!r}: make it with `fabric db init`, or check "
            "FABRIC_PG_URL"
        )
    if "is not currently accepting connections" in why:
        return SettingsError(
            f"the database of {where} takes no connections ({why}); name another one in FABRIC_PG_URL"
        )
    if not state and _NOWHERE.search(why):
        return SettingsError(f"{where} leads to no Postgres ({why}); check FABRIC_PG_URL")
    if state[:2] in ("28", "3D") or (not state and any(word in why for word in _LOGIN_WORDS)):
        return SettingsError(f"Postgres at {where} refuses the login ({why}); check FABRIC_PG_URL")
    if state == "25006":
        return DatabaseUnavailable(f"Postgres at {where} is read-only for now ({why})")
    if state == "42501":
        return SettingsError(
            f"the role of {where} may not do this ({why}); it must own the schema fabric"
        )
    if state[:2] in _AWAY_CLASSES:
        return DatabaseUnavailable(f"Postgres at {where} is away or busy ({state}: {why})")
    if not state and isinstance(fault, psycopg.OperationalError | psycopg.InterfaceError):
        if postgres.is_embedded(url) and any(word in why for word in _NOBODY_WORDS):
            return DatabaseUnavailable(
                f"the embedded Postgres at {where} does not run: start it with `fabric up`"
            )
        return DatabaseUnavailable(
            f"no Postgres answers at {where} ({why}): start that server, or check FABRIC_PG_URL"
        )
    return StorageFailed(f"Postgres at {where} rejected a statement ({state}: {why})")


def missing_database(fault: psycopg.Error) -> str | None:
    """The name of the database whose absence `fault` is about."""
    found = re.search(r'database "(.*)" does not exist', str(fault))
    return found[1] if found and fault.sqlstate in (None, "3D000") else None


def _apply_migrations(connection: Connection) -> list[str]:
    applied = {row[0]: row for row in connection.execute(query("applied_migrations")).fetchall()}
    newest = migrations()[-1].number
    if applied and max(applied) > newest:
        raise VersionRefused(
            f"the database has migration {max(applied)}, this program knows up to {newest}: "
            "install the newer fabric-pipelines that wrote it"
        )
    vector_type = get_meta(connection, "vector_type") or ""
    if not vector_type:
        vector_type, why = _choose_vector_type(connection)
        set_meta(connection, "vectors", why)
    if not applied:
        set_meta(connection, "vector_type", vector_type)
        set_meta(connection, "database_id", uuid.uuid4().hex)
    names = []
    for migration in migrations():
        if migration.number in applied:
            if applied[migration.number][2] != migration.sha256:
                raise VersionRefused(
                    f"migration {migration.number} ({migration.name}) was applied from another text; "
                    "use the program version that made this database"
                )
            continue
        connection.execute(migration.text.replace("{{vector}}", vector_type).encode())
        connection.execute(
            query("record_migration"),
            {"number": migration.number, "name": migration.name, "sha256": migration.sha256},
        )
        names.append(migration.name)
    return names


def _choose_vector_type(connection: Connection) -> tuple[str, str]:
    """halfvec if pgvector (0.7 or newer) is or can be made available to this role, else bytea; and why."""
    try:
        with connection.transaction():
            connection.execute("create extension if not exists vector")
    except psycopg.errors.InsufficientPrivilege:
        return "bytea", "bytea: this role may not create the extension vector"
    except psycopg.DatabaseError as fault:
        why = fault.diag.message_primary or str(fault)
        return "bytea", f"bytea: the server has no pgvector ({why})"
    row = connection.execute(query("pgvector")).fetchone()
    assert row is not None
    version, has_halfvec = row
    if not has_halfvec:
        return "bytea", f"bytea: pgvector {version} has no halfvec yet (0.7 has)"
    return "halfvec", f"halfvec of pgvector {version}"


def _require_writable(connection: Connection) -> None:
    row = connection.execute("select pg_is_in_recovery()").fetchone()
    if row and row[0]:
        raise DatabaseUnavailable(
            "the database is a standby or still recovering; it takes no writes"
        )


def _refuse_template(connection: Connection) -> None:
    """What stands in a template is in every database made from it ever after."""
    if _scalar(connection, "is_template"):
        raise SettingsError(
            f"database {connection.info.dbname!r} is a template, from which the server makes databases: name another "
            "one in FABRIC_PG_URL; `fabric db init` makes it where it is missing"
        )


def _scalar(connection: Connection, name: str) -> Any:
    row = connection.execute(query(name)).fetchone()
    return None if row is None else row[0]


def _add_journal(connection: Connection, journal_id: str, incarnation: int) -> None:
    connection.execute(query("add_journal"), {"journal_id": journal_id, "incarnation": incarnation})


def _refuse_clash(known: dict[str, int], journal_id: str, incarnation: int, where: str) -> None:
    for other, number in known.items():
        if (other == journal_id) != (number == incarnation):
            raise IncarnationMismatch(
                f"{where} knows journal {other} as incarnation {number}, and this broker says journal "
                f"{journal_id} is incarnation {incarnation}: one of the two was copied or edited; "
                "use the journal folder that belongs to this database"
            )


def _admit(journal_id: str, incarnation: int) -> str:
    return f"python -m fabric_pipelines.dataplane.database admit {journal_id} {incarnation}"


def main(arguments: list[str]) -> int:
    """`admit JOURNAL INCARNATION`: see Database.admit_journal."""
    match arguments:
        case ["admit", journal_id, incarnation] if incarnation.isdigit():
            database = Database.of(settings_module.load())
            database.migrate()
            database.admit_journal(journal_id, int(incarnation))
            sys.stdout.write(f"journal {journal_id} may now land in {database!r}\n")
            return 0
    sys.stderr.write(
        "usage: python -m fabric_pipelines.dataplane.database admit JOURNAL INCARNATION\n"
    )
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except FabricError as problem:
        sys.stderr.write(f"{problem}\n")
        sys.exit(problem.exit_code)
