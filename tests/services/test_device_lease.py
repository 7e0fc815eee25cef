"""The device lease on a real Postgres, and a process that dies while it copies to its card."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fabric_pipelines import settings, shards
from fabric_pipelines.cli import app
from fabric_pipelines.dataplane import vectors
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.errors import AlreadyRunning, FencingLost, StorageFailed
from fabric_pipelines.shards.residence import Residence
from fabric_pipelines.testing.standin_card import StandInCard
from tests.services.test_shards import ROWS, build, land
from tests.support_resident import same_answers


def run_out(database: Database) -> None:
    with database.session() as connection:
        connection.execute("update fabric.device_lease set expires = clock_timestamp()")


def test_one_card_holds_a_shard_and_its_token_only_grows(
    database: Database, tmp_path: Path
) -> None:
    land(database)
    build(database, tmp_path)
    first = vectors.acquire_device(database, "corpus", "one:cuda:0", ttl_s=60)
    with pytest.raises(
        AlreadyRunning, match=r"is on the card one:cuda:0 \(token 1\) for another \d+ s"
    ):
        vectors.acquire_device(database, "corpus", "two:cuda:0", ttl_s=60)
    vectors.publish_device(database, first, generation=1)
    assert [(row.holder, row.generation) for row in vectors.devices(database)] == [
        ("one:cuda:0", 1)
    ]
    again = vectors.acquire_device(database, "corpus", "one:cuda:0", ttl_s=60)
    assert again.token == 2
    assert [row.generation for row in vectors.devices(database, "corpus")] == [None]
    with pytest.raises(FencingLost, match="under device token 1"):
        vectors.renew_device(database, first, ttl_s=60)
    assert not vectors.release_device(database, first)
    with pytest.raises(StorageFailed, match="is not present in table"):
        vectors.publish_device(database, again, generation=7)
    assert vectors.release_device(database, again)
    assert vectors.devices(database) == []
    assert vectors.acquire_device(database, "corpus", "two:cuda:0", ttl_s=60).token == 3


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_zombie_loads_to_the_end_and_publishes_nothing(
    database: Database, tmp_path: Path, taken_over: bool
) -> None:
    land(database)
    build(database, tmp_path)
    done = []

    def sleep(step: str) -> None:
        if step == "products" and not done:
            done.append(step)
            run_out(database)
            if taken_over:
                vectors.acquire_device(database, "corpus", "elsewhere", ttl_s=60)

    card = StandInCard(before=sleep)
    with (
        Residence(database, tmp_path, "corpus", card, keep=False) as held,
        pytest.raises(FencingLost, match="no longer holds"),
    ):
        held.open()
    assert card.memory().free_bytes == card.memory().total_bytes
    expected = [("elsewhere", None)] if taken_over else []
    assert [(row.holder, row.generation) for row in vectors.devices(database)] == expected


def _switch_and_die(url: str, root: Path, step: str, number: int) -> None:
    """Serve what is current, build and publish the next generation, die while it goes to the card."""
    seen, armed = [], []

    def before(name: str) -> None:
        seen.append(name)
        if armed and seen.count(step) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    database = Database(url)
    held = Residence(database, root, "corpus", StandInCard(before=before), keep=False)
    held.open(1)
    build(database, root)
    seen.clear()
    armed.append(True)
    held.open()


@pytest.mark.parametrize(
    ("step", "number"),
    [("empty", 1), ("send", 1), ("read_back", 3), ("launch", 1), ("download", 9)],
)
def test_kill_nine_in_the_device_copy_leaves_the_old_generation_whole_and_the_row_true(
    database: Database, tmp_path: Path, step: str, number: int
) -> None:
    land(database)
    build(database, tmp_path)
    with shards.open_shard(database, tmp_path, "corpus") as shard:
        before = shard.search(np.ones((1, 16)), 10)
    land(database, first=ROWS, rows=20)
    child = multiprocessing.get_context("spawn").Process(
        target=_switch_and_die, args=(database.url, tmp_path, step, number)
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    child.close()
    assert [row.generation for row in vectors.devices(database)] == [1]
    assert shards.scrub(database, tmp_path, "corpus", 1).ok
    assert shards.scrub(database, tmp_path, "corpus", 2).ok
    # the lease of the dead process is of this machine's card, and its lock went with it
    with Residence(database, tmp_path, "corpus", StandInCard(), keep=False) as held:
        assert held.lease.token == 2
        same_answers(held.open(1).search(np.ones((1, 16)), 10), before)
        assert held.open().manifest.rows == ROWS + 20
        assert [row.generation for row in vectors.devices(database)] == [2]


def test_the_commands_load_search_and_say_who_holds_it(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    land(database)
    monkeypatch.setenv("FABRIC_HOME", str(tmp_path))
    monkeypatch.setenv("FABRIC_PG_URL", database.url)
    root = settings.load().shards_dir
    root.mkdir(parents=True)
    generation = build(database, root)

    def said(*words: str) -> tuple[int, dict[str, Any]]:
        done = CliRunner().invoke(app, ["shard", *words, "--json"])
        assert isinstance(done.exception, SystemExit | None), done.exception
        return done.exit_code, json.loads(done.stdout)

    code, answer = said("load", "corpus")
    assert (code, answer["rows"], answer["device"]) == (0, ROWS, "cpu")
    assert answer["bytes"] == ROWS * (16 * 4 + 8)
    with shards.open_shard(database, root, "corpus") as shard:
        name = int(shard.ids()[5])
    code, answer = said("search", "corpus", "--like", str(name), "-k", "3")
    assert code == 0
    assert [row["like"] for row in answer["rows"]] == [name] * 3
    assert answer["rows"][0]["id"] == name
    assert said("devices") == (0, {"devices": []})
    with Residence(database, root, "corpus", StandInCard(), keep=False) as held:
        held.open()
        code, answer = said("devices")
    assert [(row["name"], row["generation"]) for row in answer["devices"]] == [("corpus", 1)]
    path = generation.folder / generation.manifest.of_role("ids")[0].path
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    done = CliRunner().invoke(app, ["shard", "load", "corpus"])
    assert done.exit_code == 4
    assert "ids block of lists 0..1" in done.stderr
