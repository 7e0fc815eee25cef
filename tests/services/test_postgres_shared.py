"""The embedded server among others: commands that overlap share it, and a shell full of PG* does not reach it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric_pipelines import settings as settings_module
from fabric_pipelines.dataplane import dump, libpq
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.postgres import EmbeddedPostgres, at_hand
from fabric_pipelines.errors import DatabaseUnavailable, SettingsError
from fabric_pipelines.settings import Settings
from tests.support import eventually

HOSTILE = {
    "PGCLIENTENCODING": "LATIN1",
    "PGDATABASE": "elsewhere",
    "PGDATESTYLE": "bogus",
    "PGGEQO": "bogus",
    "PGHOST": "db.example",
    "PGHOSTADDR": "192.0.2.1",
    "PGOPTIONS": "-c search_path=nowhere -c default_transaction_read_only=on",
    "PGPASSWORD": "wrong",
    "PGPORT": "5433",
    "PGREQUIREAUTH": "scram-sha-256",
    "PGREQUIREPEER": "nobody-at-all",
    "PGSERVICE": "missing",
    "PGSERVICEFILE": "/nonexistent",
    "PGSSLMODE": "bogus",
    "PGTARGETSESSIONATTRS": "standby",
    "PGTZ": "Mars",
    "PGUSER": "somebody",
}


@pytest.fixture(scope="module")
def made_home() -> Iterator[Settings]:
    """A home whose database is made and stopped: making one costs seconds."""
    folder = Path(tempfile.mkdtemp(prefix="fabric-pg-"))
    folder.chmod(0o755)
    made = settings_module.load({"home": folder / "home"}, {}, folder)
    server = EmbeddedPostgres.of(made)
    server.durable_initdb = False
    server.start()
    server.stop()
    yield made
    shutil.rmtree(folder)


def _ask(settings: Settings) -> tuple[object, ...] | None:
    with Database.of(settings).session() as connection:
        return connection.execute("select 1, current_setting('TimeZone')").fetchone()


def test_no_variable_of_the_shell_leads_past_the_embedded_server(
    made_home: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)
    seen = dict(os.environ)
    with at_hand(made_home, lambda line: None):
        assert _ask(made_home) == (1, "UTC")
        database = Database.of(made_home)
        database.migrate()
        assert dump.write(database, tmp_path / "x.dump").size > 0
    assert dict(os.environ) == seen


def test_variables_that_no_parameter_overrules_come_back_after_the_last_of_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGTZ", "Mars")
    both = threading.Barrier(2)

    def connect() -> None:
        with libpq._taken_out():
            both.wait()
            seen.append(os.environ.get("PGTZ"))
            both.wait()

    seen: list[str | None] = []
    threads = [threading.Thread(target=connect) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (seen, os.environ["PGTZ"]) == ([None, None], "Mars")


def test_a_server_of_the_users_own_is_reached_by_the_variables_of_his_shell(
    made_home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmbeddedPostgres.of(made_home)
    server.start()
    try:
        monkeypatch.setenv("PGHOST", str(server.place.sockets))
        monkeypatch.setenv("PGUSER", "postgres")
        monkeypatch.setenv("PGTZ", "Asia/Tokyo")
        with Database("postgresql:///fabric").session() as connection:
            assert connection.execute("show timezone").fetchone() == ("Asia/Tokyo",)
        monkeypatch.setenv("PGPORT", "5433")
        with pytest.raises(DatabaseUnavailable):
            Database("postgresql:///fabric").connect()
        monkeypatch.setenv("PGSERVICE", "missing")
        with pytest.raises((SettingsError, DatabaseUnavailable), match="missing"):
            Database("postgresql:///fabric").connect()
    finally:
        server.stop()


COMMAND = """
import sys
from fabric_pipelines import settings
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.postgres import at_hand
def say(line):
    print(line, flush=True)
with at_hand(settings.load(), say):
    for word in ("in", "still"):
        with Database.of(settings.load()).session() as connection:
            say(word + str(connection.execute("select 1").fetchone()[0]))
        sys.stdin.readline()
say("out")
"""


def _command(settings: Settings) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        env={**os.environ, **settings.as_environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_commands_that_start_at_once_share_one_server_and_who_started_it_leaves_last(
    made_home: Settings,
) -> None:
    """Both outcomes of a race were wrong: one said that the server does not run, or lost it under its feet."""
    commands = [_command(made_home) for _ in range(2)]
    heads: list[list[str]] = []
    for command in commands:
        assert command.stdout is not None
        lines = [command.stdout.readline().strip()]
        while not lines[-1].startswith("in") and lines[-1]:
            lines.append(command.stdout.readline().strip())
        heads.append(lines)
    assert [lines[-1] for lines in heads] == ["in1", "in1"]
    started = [any("was down" in line for line in lines) for lines in heads]
    assert sorted(started) == [False, True]
    owner, guest = sorted(commands, key=lambda item: not started[commands.index(item)])
    assert owner.stdin is not None
    assert owner.stdout is not None
    owner.stdin.write("\n\n")
    owner.stdin.flush()
    said = [owner.stdout.readline().strip() for _ in range(2)]
    assert said[0] == "still1"
    assert "waiting for them to end" in said[1]
    assert guest.communicate("\n\n")[0].split() == ["still1", "out"]
    assert owner.communicate()[0].split() == ["out"]
    assert (owner.returncode, guest.returncode) == (0, 0)


def test_the_foreground_server_ends_when_asked_before_it_answers(made_home: Settings) -> None:
    """With its socket led astray it waited an hour and took no SIGTERM."""
    blind = (
        "import sys; from fabric_pipelines.dataplane import libpq, postgres; import psycopg\n"
        "def never(*_, **__):\n"
        "    raise psycopg.OperationalError('FATAL: nobody there')\n"
        "libpq.connect = never\n"
        "sys.exit(postgres.main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", blind],
        env={**os.environ, **made_home.as_environment()},
        stderr=subprocess.PIPE,
        text=True,
    )
    data = EmbeddedPostgres.of(made_home).place.data
    eventually((data / "postmaster.pid").exists, within_s=20, what="the server")
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert "asked to stop before" in said
    assert not (data / "postmaster.pid").exists()
