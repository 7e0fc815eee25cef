"""Dead letters between broker and database: why, again, once; and a drain with its way back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from fabric_pipelines.cli import app
from fabric_pipelines.dataplane import results
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.writer import Landed, Writer
from tests.support import eventually
from tests.support_completions import pulled_batch
from tests.support_stage import Stage, stage

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@pytest.fixture
def on(database: Database) -> Iterator[Stage]:
    with stage(pg_url=database.url) as made:
        yield made


def fabric(on: Stage, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "fabric_pipelines", *arguments, "--json"],
        env={**os.environ, **on.settings.as_environment()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    [line] = done.stdout.splitlines()
    answer: dict[str, Any] = json.loads(line)
    return answer


def here(on: Stage, *arguments: str) -> dict[str, Any]:
    """The same within this process, which costs no start."""
    done = CliRunner().invoke(app, [*arguments, "--json"], env=on.settings.as_environment())
    assert done.exit_code == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def settled(on: Stage, retired: int, dead: int) -> None:
    def is_there() -> bool:
        total = on.total()
        return (total["retired"], total["dead"]) == (retired, dead)

    eventually(is_there, within_s=30, what=f"{retired} retired, {dead} dead")


def replace_worker(worker: subprocess.Popen[str], on: Stage, **fields: Any) -> None:
    worker.terminate()
    worker.wait(30)
    on.start_worker(**fields)


def test_requeued_by_reason_a_task_lands_and_its_letter_is_gone(
    on: Stage, database: Database
) -> None:
    on.spawn("fabric_pipelines.completion")
    worker = on.start_worker(script={"refused_rows": [1]})
    submission = on.submit(PROMPTS)
    settled(on, 2, 1)
    listed = fabric(on, "broker", "dead", "list")
    [letter] = listed["letters"]
    assert (listed["dead"], letter["state"], letter["source_row"]) == (1, "dead", 1)
    assert listed["reasons"] == [{"reason": letter["error_code"], "letters": 1}]
    assert letter["reason"] == "as the script says"
    with on.client("admin") as client:
        [worker_session] = [consumer["session"] for consumer in client.status().consumers]
    assert letter["consumer"] == worker_session
    reason = ("broker", "dead", "requeue", "--reason", letter["error_code"])
    assert fabric(on, *reason, "--function", "embed")["requeued"] == 0
    replace_worker(worker, on)
    assert fabric(on, *reason) == {"requeued": 1, "not_dead": 0, "gone": 0, "unknown": 0}
    settled(on, 3, 0)
    assert fabric(on, "results", submission)["rows"] == 3
    assert results.counts(database)["dead_letters"] == 0
    assert fabric(on, "broker", "dead", "list") == {
        "dead": 0,
        "reasons": [],
        "letters": [],
        "refusals": [],
    }
    assert fabric(on, *reason)["requeued"] == 0
    assert fabric(on, "broker", "verify")["ok"]


def test_a_task_that_dies_again_has_one_letter_which_tells_the_last_death(
    on: Stage, database: Database
) -> None:
    on.spawn("fabric_pipelines.completion")
    worker = on.start_worker(script={"refused_rows": [1]})
    on.submit(PROMPTS)
    settled(on, 2, 1)
    [letter] = fabric(on, "broker", "dead", "list")["letters"]
    replace_worker(worker, on, script={"failed_rows": [1]})
    ids = ("broker", "dead", "requeue", "--id", str(letter["task_id"]))
    assert fabric(on, *ids)["requeued"] == 1

    def died_again() -> bool:
        letters = results.dead_letters(database).to_pylist()
        return [(row["status"], row["requeues"]) for row in letters] == [("failed", 1)]

    eventually(died_again, within_s=30, what="the second death is told")
    settled(on, 2, 1)
    assert fabric(on, *ids[:-1], "12345", code=5)["unknown"] == 1


def test_a_result_that_the_database_refuses_is_a_dead_letter_and_completion_goes_on(
    on: Stage, database: Database
) -> None:
    with database.session() as connection:
        connection.execute("alter table fabric.generate add check (source_row <> 1)")
    completion = on.spawn("fabric_pipelines.completion")
    on.start_worker()
    on.submit(PROMPTS)
    settled(on, 2, 1)
    on.submit(PROMPTS[:1], name="another")
    settled(on, 3, 1)
    assert completion.poll() is None
    [letter] = fabric(on, "broker", "dead", "list")["letters"]
    assert letter["error_code"] == "23514"


def test_one_command_ends_the_waiting_for_a_table_that_says_the_same_to_every_row(
    on: Stage, database: Database
) -> None:
    with database.session() as connection:
        connection.execute(
            "create function closed() returns trigger language plpgsql as "
            "$$ begin raise exception 'this year is closed'; end $$"
        )
        connection.execute(
            "create trigger t before insert on fabric.generate for each row execute function closed()"
        )
    completion = on.spawn("fabric_pipelines.completion")
    on.start_worker()
    on.submit([[1, 2, at] for at in range(9)])

    def waits() -> bool:
        shown = here(on, "status")
        said = " ".join(wait["for"] for wait in shown["waits"])
        return "`fabric broker dead accept generate`" in said and shown["completion"][
            "waiting"
        ] == {"generate": said.partition("function generate: ")[2]}

    eventually(waits, within_s=30, what="status tells the command")
    accepted = here(on, "broker", "dead", "accept", "generate")
    assert (accepted["sqlstate"], accepted["message"]) == ("P0001", "this year is closed")
    settled(on, 0, 9)
    assert completion.poll() is None
    assert on.total()["balance_tasks"] == on.total()["balance_fingerprint"] == 0
    listed = here(on, "broker", "dead", "list")
    assert listed["reasons"] == [{"reason": "P0001", "letters": 9}]
    assert [each["accepted_at"] is None for each in listed["refusals"]] == [False]
    assert here(on, "broker", "dead", "accept", "generate", "--withdraw")["withdrawn"] == 1


def test_requeue_wants_to_know_which(on: Stage) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fabric_pipelines", "broker", "dead", "requeue"],
        env={**os.environ, **on.settings.as_environment()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--reason" in done.stderr


def land(database: Database, requeues: int, bad: dict[int, Any] | None = None) -> Landed:
    writer = Writer(database)
    batch = pulled_batch(3, function="generate", requeues=requeues, bad=bad)
    try:
        return writer.land(batch)
    finally:
        writer.close()


def deaths(database: Database) -> list[tuple[str, int]]:
    rows = results.dead_letters(database).to_pylist()
    return [(row["reason"], row["requeues"]) for row in rows]


def test_the_latest_death_counts_however_late_an_earlier_one_is_written(
    database: Database,
) -> None:
    first, second = {1: ("refused", "X", "first")}, {1: ("failed", "Y", "second")}
    land(database, 0, first)
    assert deaths(database) == [("first", 0)]
    landed = land(database, 1, second)
    assert landed.dead_requeues.tolist() == [1]
    assert deaths(database) == [("second", 1)]
    land(database, 0, first)
    assert deaths(database) == [("second", 1)]
    land(database, 2)
    assert deaths(database) == []
    land(database, 1, second)
    assert deaths(database) == [], "it landed since"


def test_a_drain_ends_what_runs_keeps_what_is_ready_and_is_undone(on: Stage) -> None:
    on.spawn("fabric_pipelines.completion")
    on.start_worker(script={"step_s": 0.05})
    on.submit([[n + 1, n + 2] for n in range(4000)])
    eventually(lambda: on.total()["leased"] > 0, within_s=30, what="work runs")
    report = fabric(on, "broker", "drain")
    assert (report["draining"], report["drained"], report["in_flight"]) == (True, True, 0)
    assert report["ready"] > 0
    account = fabric(on, "broker", "status")
    assert (account["draining"], account["hold"]) == (True, True)
    progress = account["progress"]
    assert 0 < progress["tokens_done"] < progress["tokens_total"] == 8000
    assert set(progress) == {"tokens_total", "tokens_done", "tokens_per_s", "eta_s"}
    assert on.total()["ready"] == report["ready"]
    undone = fabric(on, "broker", "drain", "--undo")
    assert (undone["draining"], undone["drained"]) == (False, False)
    before = on.total()["retired"]
    eventually(lambda: on.total()["retired"] > before, within_s=30, what="work goes on")
