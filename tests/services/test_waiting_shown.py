"""While nothing lands, `fabric status` says who waits, for what and since when; and no longer once it goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fabric_pipelines import waits
from fabric_pipelines.dataplane.database import Database
from tests.support import eventually
from tests.support_command import small_disk
from tests.support_stage import Stage, stage

ENGINE = "smollm2-135m-instruct@ctranslate2-int8"
NOWHERE = "postgresql://nobody:secret@127.0.0.1:1/fabric"


@pytest.fixture
def nowhere() -> Iterator[Stage]:
    """A broker, and a database URL at which nobody answers."""
    with stage(pg_url=NOWHERE) as made:
        yield made


@pytest.fixture
def on(database: Database) -> Iterator[Stage]:
    with stage(pg_url=database.url) as made:
        yield made


def status(on: Stage, *more: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fabric_pipelines", "status", *more],
        env={**os.environ, **on.settings.as_environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def waiting(on: Stage, code: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(status(on, "--json", code=code))["waits"]
    return found


def begun(on: Stage, who: str) -> None:
    eventually(
        lambda: [wait.name for wait in waits.read(on.settings.waits_dir)] == [who],
        within_s=60,
        what=f"{who} waits",
    )


def over(on: Stage) -> None:
    eventually(lambda: waits.read(on.settings.waits_dir) == [], within_s=60, what="nobody waits")


def test_a_database_that_is_away_is_what_completion_is_shown_to_wait_for(nowhere: Stage) -> None:
    assert waiting(nowhere) == []
    assert re.search(r"^waits +none$", status(nowhere), re.MULTILINE)
    completion = nowhere.spawn("fabric_pipelines.completion")
    begun(nowhere, "completion")
    [row] = waiting(nowhere)
    assert (row["name"], row["pid"]) == ("completion", completion.pid)
    assert row["for"].startswith(
        "no Postgres answers at postgresql://nobody:***@127.0.0.1:1/fabric"
    )
    assert datetime.fromisoformat(row["since"]).utcoffset() is not None
    assert row["seconds"] >= 0
    shown = status(nowhere)
    assert f"completion ({completion.pid})  for 0:" in shown
    assert "no Postgres answers at" in shown
    completion.kill()
    completion.communicate(timeout=60)
    assert waiting(nowhere) == [], "what a killed process waited for is over"


def test_a_landing_that_the_server_has_no_room_for_is_shown_until_it_has(
    on: Stage, database: Database
) -> None:
    """A trigger raises what a full disk raises: 53100."""
    database.migrate()
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(
            "create function fabric.no_room() returns trigger language plpgsql as $$ begin "
            "raise exception 'No space left on device' using errcode = '53100'; end $$"
        )
        connection.execute(
            "create trigger no_room before insert on fabric.generate execute function fabric.no_room()"
        )
        on.spawn("fabric_pipelines.completion")
        on.start_worker()
        on.submit([[1, 2], [3]])
        begun(on, "completion")
        [row] = waiting(on)
        assert "53100" in row["for"]
        assert "No space left on device" in row["for"]
        connection.execute("drop trigger no_room on fabric.generate")
    on.reached("retired", 2)
    over(on)
    assert waiting(on) == []


def test_a_worker_without_its_broker_is_shown_though_status_itself_gets_no_answer(
    nowhere: Stage,
) -> None:
    nowhere.start_worker()
    eventually(lambda: consumers(nowhere) == 1, within_s=60, what="the worker is attached")
    nowhere.kill_broker()
    begun(nowhere, "scripted@scripted on cpu:0")
    [row] = waiting(nowhere, code=1)
    assert row["for"]
    nowhere.start_broker()
    over(nowhere)


def consumers(on: Stage) -> int:
    with on.client("admin") as client:
        return len(client.status().consumers)


def test_a_reset_home_keeps_no_wait(nowhere: Stage) -> None:
    completion = nowhere.spawn("fabric_pipelines.completion")
    begun(nowhere, "completion")
    folder: Path = nowhere.settings.waits_dir
    completion.terminate()
    completion.communicate(timeout=60)
    assert list(folder.iterdir()) == [], "a process that ends takes its file along"
    shutil.rmtree(folder)
    assert waiting(nowhere) == []


def test_a_disk_without_a_free_block_still_takes_what_is_waited_for(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", "256k") as run, waits.Waits(run, "completion") as mine:
        with (run / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
            while ballast.write(bytes(4096)):
                pass
        mine.tell("No space left on device")
        assert [wait.reason for wait in waits.read(run)] == ["No space left on device"]
        lines: list[str] = []
        with waits.Waits(run, "another", say=lines.append):
            pass
        assert "No space left on device" in lines[0]
