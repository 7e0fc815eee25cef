"""The command against real services: JSON shapes, files handed over, exit codes 0, 3, 5 and 130."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.testing.scripted_engine import expected_output
from tests.support import eventually
from tests.support_stage import Stage, stage

GENERATE = "smollm2-135m-instruct@ctranslate2-int8"
BALANCE = ("balance_tasks", "balance_tokens", "balance_fingerprint")


@pytest.fixture
def on(database: Database) -> Iterator[Stage]:
    """Broker and database; tests add workers and completion."""
    with stage(pg_url=database.url) as made:
        yield made


def spawn_fabric(on: Stage, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fabric_pipelines", *arguments],
        env={**os.environ, **on.settings.as_environment()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fabric(on: Stage, *arguments: str, code: int = 0) -> dict[str, Any]:
    process = spawn_fabric(on, *arguments, "--json")
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    [line] = out.splitlines()
    answer: dict[str, Any] = json.loads(line)
    return answer


def prompts_file(on: Stage, rows: list[dict[str, Any]]) -> str:
    path = on.settings.home / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def submit(on: Stage, rows: list[dict[str, Any]], *more: str, code: int = 0) -> dict[str, Any]:
    file = prompts_file(on, rows)
    return fabric(
        on, "submit", file, "--function", "generate", "--engine", GENERATE, *more, code=code
    )


def test_a_file_goes_in_and_its_results_come_out_as_parquet(on: Stage) -> None:
    on.spawn("fabric_pipelines.completion")
    on.start_worker(name=GENERATE)
    rows = [{"tokens": [n, n + 1], "max_new_tokens": 4, "metadata": {"n": n}} for n in range(1, 9)]
    answer = submit(on, rows, "--wait")
    assert (answer["retired"], answer["dead"]) == (8, 0)
    out = on.settings.home / "out.parquet"
    handed = fabric(on, "results", answer["submission_id"], "--out", str(out))
    table = pq.read_table(out).to_pylist()
    assert (handed["rows"], handed["bytes"]) == (8, out.stat().st_size)
    assert [row["output"] for row in table] == [
        expected_output(row["tokens"], 4, 49_152) for row in rows
    ]
    assert table[2]["metadata"] == b'{"n":3}'


def test_dead_letters_make_exit_code_5(on: Stage) -> None:
    on.spawn("fabric_pipelines.completion")
    on.start_worker(name=GENERATE, script={"refused_rows": [1]})
    answer = submit(on, [{"tokens": [1]}, {"tokens": [2]}], "--wait", code=5)
    assert (answer["retired"], answer["dead"]) == (1, 1)


def test_ctrl_c_says_that_all_is_kept_and_how_to_go_on(on: Stage) -> None:
    file = prompts_file(on, [{"tokens": [1, 2]}])
    waiting = spawn_fabric(
        on, "submit", file, "--function", "generate", "--engine", GENERATE, "--wait", "--json"
    )
    eventually(lambda: on.total()["ready"] == 1, within_s=60, what="the work is durable")
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=90)
    assert waiting.returncode == 130
    error = json.loads(out)["error"]
    assert (error["kind"], error["exit_code"]) == ("Interrupted", 130)
    assert "run the same command again" in err
    assert "Traceback" not in err
    assert on.total()["ready"] == 1


def test_status_and_verify_tell_the_balance_and_agree(on: Stage) -> None:
    submit(on, [{"tokens": [1, 2]}, {"tokens": [3]}])
    found = fabric(on, "broker", "status")
    assert (found["ready"], found["enqueued"]) == (2, 2)
    assert [found[name] for name in BALANCE] == [0, 0, 0]
    assert sum(lane["ready"] for lane in found["lanes"]) == 2
    whole = fabric(on, "status")
    states = ("ready", "leased", "computed", "in_doubt", "retired", "dead")
    assert [whole[name] for name in (*states, *BALANCE)] == [2, 0, 0, 0, 0, 0, 0, 0, 0]
    assert (whole["lanes"], whole["processes"]) == (found["lanes"], [])
    verified = fabric(on, "broker", "verify")
    assert (verified["ok"], verified["differences"]) == (True, [])


def test_the_database_is_described_and_migrating_twice_changes_nothing(on: Stage) -> None:
    described = fabric(on, "db", "status")
    assert described["server_version"] >= 150000
    assert fabric(on, "db", "migrate") == {"applied": []}


def test_the_same_file_submitted_twice_is_one_submission(on: Stage) -> None:
    first = submit(on, [{"tokens": [1, 2]}])
    again = submit(on, [{"tokens": [1, 2]}])
    assert again["submission_id"] == first["submission_id"]
    assert on.total()["enqueued"] == 1


def test_results_for_a_folder_that_is_not_there_are_one_sentence(on: Stage, tmp_path: Path) -> None:
    process = spawn_fabric(on, "results", "generate", "--out", str(tmp_path / "no" / "x.csv"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "cannot be written" in err
    assert "Traceback" not in err
