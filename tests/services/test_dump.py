"""A dump reaches the server that the fabric reaches, waits for a lock for so long, and takes nobody's name."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from urllib.parse import quote

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from typer.testing import CliRunner

from fabric_pipelines.cli import app
from fabric_pipelines.dataplane import dump, encode
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import DatabaseUnavailable, UsageError
from tests.support_completions import pulled_batch


def test_a_dump_goes_where_a_service_file_and_the_shell_lead_the_fabric(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent by the URL alone: `service=` was no service to it, and PGPORT nothing."""
    parts = conninfo_to_dict(database.url)
    (tmp_path / "services").write_text(f"[mine]\ndbname={parts['dbname']}\nuser=postgres\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    monkeypatch.setenv("PGHOST", str(parts["host"]))
    monkeypatch.setenv("PGOPTIONS", "-c client_encoding=latin1 -c statement_timeout=1h")
    reached = Database("service=mine")
    path = tmp_path / "x.dump"
    done = dump.write(reached, path)
    restore = done.program.with_name("pg_restore")
    shown = subprocess.run([restore, "-l", path], capture_output=True, text=True, check=True).stdout
    assert f"dbname: {parts['dbname']}" in shown
    assert "TABLE DATA fabric embed" in shown


def test_no_secret_stands_in_the_arguments_of_pg_dump(
    database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PGTZ", "UTC")
    url = make_conninfo(database.url, password="one secret", sslpassword="two secrets")
    with (
        Database(url).session() as connection,
        dump.login(connection, "x") as (where, environment),
    ):
        text = Path(environment["PGSERVICEFILE"]).read_text()
        mode = Path(environment["PGSERVICEFILE"]).stat().st_mode & 0o777
    assert "secret" not in where
    assert (environment["PGPASSWORD"], text, mode) == (
        "one secret",
        "[fabric]\nsslpassword=two secrets\n",
        0o600,
    )
    assert "PGTZ" not in environment
    assert environment["PATH"] == os.environ["PATH"]


def test_a_password_of_a_password_file_reaches_pg_dump(
    database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passwords = tmp_path / "pgpass"
    passwords.write_text("*:*:*:postgres:se'cret pw\n")
    passwords.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    with (
        database.session() as connection,
        dump.login(connection, "x") as (_, environment),
    ):
        assert environment["PGPASSWORD"] == "se'cret pw"


def test_a_dump_waits_so_long_for_a_locked_table_and_names_it_and_its_holder(
    database: Database, tmp_path: Path
) -> None:
    """It waited for ever without a word."""
    said: list[str] = []
    with psycopg.connect(database.url, application_name="holder") as holder:
        holder.execute("lock table fabric.embed in access exclusive mode")
        pid = holder.info.backend_pid
        with pytest.raises(
            DatabaseUnavailable, match=rf"waited 1.5 s for fabric\.embed.*pid {pid} "
        ):
            dump.write(database, tmp_path / "x.dump", lock_wait_s=1.5, say=said.append)
    assert [line.startswith("the dump waits for fabric.embed, held by pid") for line in said] == [
        True
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_dump_says_how_far_it_is(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump, "HEARTBEAT_S", 0.0)
    monkeypatch.setattr(dump, "LOOK_S", 0.01)
    said: list[str] = []
    dump.write(database, tmp_path / "x.dump", say=said.append)
    assert said[0].startswith("the dump has ")


def test_two_dumps_to_one_name_tear_nothing(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both wrote the same file beside, and the one that ended first said success over half of the other's."""
    path, targets, run = tmp_path / "x.dump", [], dump._run

    def twice(database: Database, program: Path, target: Path, *rest: object) -> None:
        targets.append(target)
        if len(targets) == 1:
            dump.write(database, path)
        run(database, program, target, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(dump, "_run", twice)
    with pytest.raises(UsageError, match="there already"):
        dump.write(database, path)
    assert len(set(targets)) == 2
    assert [item.name for item in tmp_path.iterdir()] == ["x.dump"]
    size = path.stat().st_size
    path.write_bytes(b"mine")
    monkeypatch.setattr(dump, "_run", run)
    command = ["--set", f"pg_url={database.url}", "db", "dump", str(path)]
    assert CliRunner().invoke(app, command).exit_code == 2
    assert path.read_bytes() == b"mine"
    assert CliRunner().invoke(app, [*command, "--replace"]).exit_code == 0
    assert path.stat().st_size == size


def test_the_url_of_a_database_with_an_odd_name_leads_there(database: Database) -> None:
    name = 'p%"q ünï'
    with psycopg.connect(database.url, autocommit=True) as admin:
        admin.execute('create database "p%""q ünï"')
    url = database.url.replace(f"/{conninfo_to_dict(database.url)['dbname']}?", f"/{quote(name)}?")
    try:
        with (
            Database(url).session() as connection,
            dump.login(connection, "x") as (where, _),
            psycopg.connect(where) as again,
        ):
            assert again.info.dbname == name
    finally:
        with psycopg.connect(database.url, autocommit=True) as admin:
            admin.execute('drop database "p%""q ünï" with (force)')


def test_a_row_in_a_dump_is_less_than_twice_what_lands_so_that_any_row_that_lands_is_dumped(
    database: Database,
) -> None:
    """Two values of 600 MB landed, and pg_dump ended with `invalid memory alloc request size` ever after."""
    size = 1 << 20
    outputs = pa.array([[1 << 31] * (size // 4)] * 2, pa.list_(pa.uint32()))
    given = pulled_batch(2, function="generate")
    given = given.set_column(
        given.schema.get_field_index("output"), given.schema.field("output"), outputs
    )
    texts = ["\\\t\n" * (size // 3), "ü" * (size // 2)]
    writer = Writer(database, decode=lambda engine, outputs: pa.array(texts))
    landed = writer.land(given)
    writer.close()
    with database.session() as connection, connection.cursor() as cursor:
        lines = []
        with cursor.copy("copy fabric.generate to stdout") as copy:
            lines = [len(bytes(line)) for line in copy]
    assert len(landed.task_ids) == len(lines) == 2
    streamed = 2 * size
    assert max(lines) > 1.9 * streamed
    assert max(lines) < 2 * streamed + (1 << 12)
    assert 2 * encode.STREAM_BYTES_MAX + (1 << 20) < 1 << 30
