"""A disk that is full at each moment that matters: nothing half-made stays, and freed space is all it takes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.postgres import place
from tests.support_command import EMBED, MINI, Said, User, first_user, require_models, small_disk

GENERATE = "smollm2-135m-instruct@ctranslate2-int8"
MIB = 1 << 20
TASKS = 40


@pytest.fixture
def user() -> Iterator[User]:
    """Whose home is a disk of 8 MiB."""
    with first_user() as made, small_disk(made.home, "8m"):
        yield made
        if (made.home / "run").exists():
            made.done("down")


def test_no_room_for_a_journal_segment_is_said_at_the_start(user: User, database: Database) -> None:
    require_models(user, MINI)
    on = user.beside(user.home, FABRIC_PG_URL=database.url)
    up = ("up", "--no-ui", "--engine", EMBED)
    said = on.refused(*up, code=1, progress=True)
    assert said == (
        f"broker did not start: the disk of journal {user.home}/journal is full (opening): "
        "free some space and try again"
    )
    on.beside(user.home, FABRIC_SEGMENT_BYTES=str(MIB)).done(*up)


@pytest.mark.parametrize("size", ["8m", "20m"])
def test_no_room_for_the_database_is_said_and_leaves_no_half_of_one(size: str) -> None:
    with first_user() as user:
        data = place(user.settings).data if os.geteuid() else elsewhere(user)
        with small_disk(data.parent, size):
            said = user.refused("up", "--no-ui", "--engine", EMBED, code=1, progress=True)
            assert said == (
                f"postgres did not start: Postgres cannot make its data folder in {data.parent}: the disk of "
                f"{data.parent} is full: free some space, then run the same command again"
            )
            assert [path for path in data.parent.rglob("*") if path.name != "postgres.lock"] == []


def elsewhere(user: User) -> Path:
    """Where root keeps the data: known once the folder for sockets is there."""
    user.settings.runtime_dir.mkdir(parents=True, mode=0o700)
    return place(user.settings).data


def test_a_full_disk_refuses_new_work_and_takes_it_once_there_is_room(user: User) -> None:
    on = user.beside(user.home, FABRIC_SEGMENT_BYTES=str(MIB))
    broker = on.start(module="fabric_pipelines.broker")
    assert broker.stdout is not None
    assert broker.stdout.readline().startswith("broker ready")
    try:
        assert submit(on, 0).code == 0
        fill(user.home / "ballast")
        refused, said = next((n, said) for n in range(1, 5) if (said := submit(on, n)).code)
        assert (said.code, said.sentence) == (
            1,
            f"the disk of journal {user.home}/journal is full (keeping room for results): free some space and "
            "try again",
        )
        (user.home / "ballast").unlink()
        assert submit(on, refused).code == 0
        status = json.loads(on.done("broker", "status", "--json").out)
        count = refused + 1
        assert (status["ready"], status["submissions"]) == (count * TASKS, count)
        assert [status[f"balance_{unit}"] for unit in ("tasks", "tokens", "fingerprint")] == [
            0,
            0,
            0,
        ]
        assert json.loads(on.done("broker", "verify", "--json").out)["ok"]
    finally:
        broker.terminate()
        _, said_broker = broker.communicate(timeout=60)
    assert (broker.returncode, said_broker) == (0, "")


def submit(user: User, number: int) -> Said:
    """Tasks of 500 KiB together: two submissions fill a segment."""
    path = user.folder / f"{number}.jsonl"
    row = json.dumps({"tokens": [number + 1] * 3200})
    path.write_text("\n".join([row] * TASKS))
    return user.fabric("submit", str(path), "--function", "generate", "--engine", GENERATE)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 14))
        except OSError:
            return  # full, which is what it is for
