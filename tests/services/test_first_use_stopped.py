"""A home that worked, stopped, and was then tampered with: refused until the cause is undone, and then whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fabric_pipelines.dataplane.database import Database
from tests.support import skip_or_fail
from tests.support_command import EMBED, MINI, User, first_user, require_models

UP = ("up", "--no-ui", "--engine", EMBED)
DEBIAN_15 = Path("/usr/lib/postgresql/15/bin")


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    """Two tasks went in and came out; then everything was stopped. In the end all is still there. The path of
    this home is too long for a socket."""
    with first_user("deep" * 40) as made:
        require_models(made, MINI)
        made.done(*UP)
        (made.folder / "two.txt").write_text("one\ntwo\n")
        made.done("submit", "two.txt", "--function", "embed", "--engine", EMBED, "--wait")
        made.done("down")
        yield made
        made.done(*UP)
        status = json.loads(made.done("status", "--json").out)
        assert (status["retired"], status["balance_tasks"]) == (2, 0)
        assert json.loads(made.done("results", "embed", "--json").out)["rows"] == 2


def refused_up(user: User, *, code: int) -> str:
    said = user.refused(*UP, code=code, progress=True)
    assert user.done("down").err.startswith("nothing of"), "up left processes behind"
    return said


@contextmanager
def moved_away(folder: Path) -> Iterator[None]:
    away = folder.rename(folder.with_name(f"{folder.name}-away"))
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        away.rename(folder)


def test_a_new_journal_on_an_old_database_is_refused(user: User) -> None:
    with moved_away(user.home / "journal"):
        said = refused_up(user, code=4)
    assert said.startswith("completion did not start: database 'fabric'")
    assert "holds results of journal" in said
    assert "bring back the old journal folder, point FABRIC_PG_URL to an empty" in said


def test_an_old_journal_on_a_new_database_is_refused(user: User, empty_database: Database) -> None:
    said = refused_up(user.beside(user.home, FABRIC_PG_URL=empty_database.url), code=4)
    assert said.startswith("completion did not start: journal ")
    assert "has already retired 2 tasks" in said
    assert "point FABRIC_PG_URL to the database it worked with" in said


def test_a_damaged_journal_segment_is_named_and_stays_as_it_is(user: User) -> None:
    segment = user.home / "journal" / "00000001.segment"
    whole = segment.read_bytes()
    damaged = bytearray(whole)
    damaged[700] ^= 0xFF
    segment.write_bytes(damaged)
    try:
        said = refused_up(user, code=4)
        assert segment.read_bytes() == damaged
    finally:
        segment.write_bytes(whole)
    assert said.startswith(f"broker did not start: segment {segment} is damaged at offset")
    assert said.endswith("restore the file from a copy")


def test_data_of_another_postgres_version_is_refused(user: User) -> None:
    if not DEBIAN_15.is_dir():
        skip_or_fail(f"there is no Postgres 15 in {DEBIAN_15}")
    said = refused_up(user.beside(user.home, FABRIC_PG_BIN=str(DEBIAN_15)), code=4)
    assert said.startswith("postgres did not start: the data folder was made by Postgres 18")
    assert "point FABRIC_PG_BIN to the bin folder of a Postgres 18" in said


def test_a_missing_engine_package_is_what_up_says(user: User) -> None:
    said = refused_up(user.hiding("onnxruntime"), code=1)
    assert said.startswith("worker-0 did not start: single-pass work on CPU needs the package")
    assert said.endswith('run `pip install "fabric-pipelines[embedded]"`')


def test_a_process_that_somebody_runs_by_hand_keeps_reset_away(user: User) -> None:
    broker = user.start(module="fabric_pipelines.broker")
    assert broker.stdout is not None
    assert broker.stdout.readline().startswith("broker ready")
    said = user.fabric("reset", "--yes")
    broker.terminate()
    broker.communicate(timeout=60)
    assert (said.code, broker.returncode) == (4, 0)
    assert (
        f"is held by a process that runs ({broker.pid}): stop it before you reset" in said.sentence
    )
    assert (user.home / "journal" / "00000001.segment").exists()
