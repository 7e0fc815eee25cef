"""`fabric db` on a server that is the user's own: made once, made again, refused with the remedy, dumped, restored."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

from fabric_pipelines.cli import app
from fabric_pipelines.dataplane import database as database_module
from fabric_pipelines.dataplane import dump, results, schema
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.postgres import EmbeddedPostgres
from fabric_pipelines.dataplane.postgres_binaries import find_program
from fabric_pipelines.dataplane.sql import migrations
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import (
    MissingDependency,
    SettingsError,
    UsageError,
    VersionRefused,
)
from tests.support import ON_EVERY_SERVER
from tests.support_completions import pulled_batch

NAMES = [item.name for item in migrations()]


@pytest.fixture
def admin(empty_database: Database) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(empty_database.url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def guest(admin: psycopg.Connection[Any], empty_database: Database) -> Iterator[Database]:
    """A role that may connect and nothing else."""
    admin.execute("create role guest login")
    yield Database(make_conninfo(empty_database.url, user="guest"))
    admin.execute("drop owned by guest cascade")
    admin.execute("drop role guest")


def _fabric(database: Database, *arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["--set", f"pg_url={database.url}", "db", *arguments, "--json"])
    assert done.exit_code == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@ON_EVERY_SERVER
def test_init_makes_the_schema_once_and_says_what_vectors_are(
    empty_database: Database, postgres: EmbeddedPostgres
) -> None:
    first, again = (_fabric(empty_database, "init") for _ in range(2))
    assert (first["applied"], again["applied"]) == (NAMES, [])
    assert postgres.binaries is not None
    kind = "bytea" if postgres.binaries.major == 15 else "halfvec"
    assert (first["vector_type"], again["vector_type"]) == (kind, kind)
    assert first["vectors"] == again["vectors"]
    assert first["vectors"].startswith(f"{kind}: the server has no" if kind == "bytea" else kind)


@ON_EVERY_SERVER
def test_status_tells_migrations_and_sizes(database: Database) -> None:
    writer = Writer(database)
    writer.land(pulled_batch(200, function="embed", dim=64))
    writer.close()
    answer = _fabric(database, "status")
    assert (answer["migrations"], answer["pending"], answer["journals"]) == (NAMES, [], 0)
    sizes = {row["name"]: row["size"] for row in answer["tables"]}
    assert sizes["embed"] > 200 * 64 * 2
    assert answer["size"] > sum(sizes.values())


def test_rows_of_a_table_never_analysed_are_unknown_and_not_minus_one(database: Database) -> None:
    rows = {row["name"]: row["rows"] for row in _fabric(database, "status")["tables"]}
    assert rows["embed"] is None
    shown = CliRunner().invoke(app, ["--set", f"pg_url={database.url}", "db", "status"]).stdout
    _, _, tables = shown.partition(
        "tables\n"
    )  # above stand a URL and names of folders, which may hold anything
    assert "unknown" in tables
    assert "-1" not in tables
    with database.session() as connection:
        connection.execute("analyze fabric.embed")
    rows = {row["name"]: row["rows"] for row in _fabric(database, "status")["tables"]}
    assert rows["embed"] == 0


def test_init_makes_a_database_that_is_missing(postgres: EmbeddedPostgres) -> None:
    url = postgres.url.replace("/fabric?", "/made_by_init?")
    try:
        done = [schema.prepare(Database(url)).created_database for _ in range(2)]
    finally:
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute("drop database made_by_init with (force)")
    assert done == [True, False]


def test_a_role_that_may_make_no_schema_is_told_the_grant(
    guest: Database, admin: psycopg.Connection[Any]
) -> None:
    with pytest.raises(SettingsError, match=r"grant create on database .* to .guest."):
        schema.prepare(guest)
    name = admin.info.dbname
    admin.execute(f'grant create on database "{name}" to guest'.encode())
    done = schema.prepare(guest)
    assert done.applied == NAMES
    assert done.vectors == "bytea: this role may not create the extension vector"


def test_a_schema_of_somebody_else_is_told_its_owner(
    guest: Database, empty_database: Database
) -> None:
    empty_database.migrate()
    with pytest.raises(SettingsError, match=r"belongs to 'postgres', and role 'guest'"):
        schema.prepare(guest)


def test_a_role_that_may_make_no_database_is_told_the_statement(guest: Database) -> None:
    missing = Database(make_conninfo(guest.url, dbname="nowhere"))
    with pytest.raises(SettingsError, match='create database "nowhere" owner guest'):
        schema.prepare(missing)


def test_a_server_that_is_too_old_is_refused(
    empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "SERVER_VERSION_LEAST", 990000)
    with pytest.raises(VersionRefused, match="needs 15 or newer"):
        schema.prepare(empty_database)


def test_status_without_a_schema_says_how_to_get_one(empty_database: Database) -> None:
    with pytest.raises(UsageError, match="fabric db init"):
        schema.state(empty_database)


@ON_EVERY_SERVER
def test_a_dump_restores_to_the_same_rows(
    database: Database, empty_database: Database, tmp_path: Path
) -> None:
    writer = Writer(database)
    writer.land(pulled_batch(50, function="embed", poison={7: float("nan")}))
    writer.land(pulled_batch(20, function="generate", first=100))
    writer.close()
    path = tmp_path / "fabric.dump"
    answer = _fabric(database, "dump", str(path))
    assert (answer["path"], answer["bytes"]) == (str(path), path.stat().st_size)
    restore = Path(answer["pg_dump"]).with_name("pg_restore")
    subprocess.run([restore, "--no-owner", f"--dbname={empty_database.url}", str(path)], check=True)
    assert results.counts(empty_database) == results.counts(database)
    for function in ("embed", "generate"):
        again = results.read(empty_database, function=function)
        assert again.equals(results.read(database, function=function))
    assert empty_database.identity.database_id == database.identity.database_id


def test_a_dump_replaces_nothing_and_leaves_nothing_half_written(
    database: Database, empty_database: Database, tmp_path: Path
) -> None:
    path = tmp_path / "fabric.dump"
    path.write_bytes(b"mine")
    with pytest.raises(UsageError, match="there already"):
        dump.write(database, path)
    assert path.read_bytes() == b"mine"
    with pytest.raises(UsageError, match="no folder"):
        dump.write(database, tmp_path / "missing" / "x.dump")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["fabric.dump"]


def test_without_a_pg_dump_as_new_as_the_server_one_sentence_says_so(
    database: Database, tmp_path: Path
) -> None:
    for name in ("postgres", "initdb"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 15.2'\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "pg_dump").touch()
    environ = {"FABRIC_PG_BIN": str(tmp_path)}
    assert find_program("pg_dump", at_least=15, environ=environ) == tmp_path / "pg_dump"
    with pytest.raises(MissingDependency, match="no pg_dump of 18 or newer"):
        dump.write(database, tmp_path / "x.dump", environ)
