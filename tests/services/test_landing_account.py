"""What landed and is gone is found by its id, on every server; and results of one submission by an index."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fabric_pipelines.cli import app
from fabric_pipelines.dataplane import account, results
from fabric_pipelines.dataplane.account import Lost, multirange
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.writer import Writer
from tests.support import ON_EVERY_SERVER
from tests.support_completions import pulled_batch


def _land(database: Database) -> None:
    writer = Writer(database)
    bad = {4: ("failed", "EngineFailed", "boom")}
    writer.land(pulled_batch(30, function="embed", poison={3: float("nan")}))
    writer.land(pulled_batch(30, function="generate", first=100, bad=bad))
    writer.land(pulled_batch(30, function="somebody_elses", first=200))
    writer.close()


@ON_EVERY_SERVER
def test_a_row_that_is_gone_is_named_and_a_total_that_agrees_hides_nothing(
    database: Database,
) -> None:
    _land(database)
    assert account.check(database) == account.Account(3, 0, [])
    gone = [
        pulled_batch(1, function="generate", first=at).column("task_id")[0].as_py()
        for at in (103, 110)
    ]
    with database.session() as connection:
        # as many strangers as were lost: the totals are what they were
        connection.execute(
            "update fabric.generate set task_id = -task_id where task_id = any(%s)", (gone,)
        )
    assert results.counts(database)["generate"] == 29
    found = account.check(database)
    assert (found.ok, found.lost) == (False, [Lost("generate", 2, gone)])


@ON_EVERY_SERVER
def test_a_replay_and_scattered_ids_are_no_loss(database: Database) -> None:
    writer = Writer(database)
    batch = pulled_batch(60, function="embed")
    for part in (batch.slice(0, 20), batch.take(list(range(1, 60, 2))), batch, batch):
        writer.land(part)
    writer.close()
    assert account.check(database).ok
    with database.session() as connection:
        connection.execute("delete from fabric.embed")
    assert [item.tasks for item in account.check(database).lost] == [60]


def test_landings_from_before_ids_were_kept_are_counted_as_unproven(database: Database) -> None:
    _land(database)
    with database.session() as connection:
        connection.execute("update fabric.acks set ids = null where function = 'embed'")
        connection.execute("delete from fabric.embed")
    found = account.check(database)
    assert (found.landings, found.unproven, found.lost) == (2, 1, [])


def test_the_command_ends_with_3_and_names_the_ids(database: Database) -> None:
    _land(database)
    with database.session() as connection:
        connection.execute("delete from fabric.dead_letters where function = 'generate'")
    command = ["--set", f"pg_url={database.url}", "db", "check", "--without-broker", "--json"]
    done = CliRunner().invoke(app, command)
    answer = json.loads(done.stdout)
    assert done.exit_code == 3
    assert (answer["ok"], answer["lost"][0]["tasks"]) == (False, 1)
    dead = pulled_batch(1, function="generate", first=104).column("task_id")[0].as_py()
    assert answer["lost"][0]["task_ids"] == [dead]
    assert "1 task of generate" in done.stderr


@ON_EVERY_SERVER
def test_results_of_a_submission_are_found_by_the_index(database: Database) -> None:
    writer = Writer(database)
    for at in range(4):
        writer.land(
            pulled_batch(3_000, function="generate", first=at * 3_000, submission_id=f"{at}" * 64)
        )
    writer.close()
    with database.session() as connection:
        connection.execute("vacuum analyze fabric.generate")
        connection.execute("set enable_seqscan = off")
        plan = connection.execute(
            "explain (format json) select count(*) from fabric.generate where submission_id = %s",
            ("2" * 64,),
        ).fetchone()
    assert plan is not None
    assert "generate_of_submission" in json.dumps(plan[0])
    assert results.read(database, submission_id="2" * 64).num_rows == 3_000


@given(st.lists(st.integers(0, 60), max_size=30))
def test_a_multirange_holds_the_ids_and_no_others(ids: list[int]) -> None:
    text = multirange(np.array(ids, np.int64))
    held: set[int] = set()
    for part in text.strip("{}").split("),"):
        if part:
            first, end = part.strip("[)").split(",")
            held |= set(range(int(first), int(end)))
    assert held == set(ids)


def test_a_run_of_neighbours_is_one_range() -> None:
    assert multirange(np.array([7, 5, 6, 9], np.int64)) == "{[5,8),[9,10)}"
    assert multirange(np.array([], np.int64)) == "{}"
