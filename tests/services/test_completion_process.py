"""The completion process beside a real broker and a real Postgres: kills anywhere, and every task once."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.broker.client import BrokerClient, SubmissionState
from fabric_pipelines.completion import account
from fabric_pipelines.dataplane import results
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.postgres import EmbeddedPostgres, Place
from fabric_pipelines.records.completion import completion_batch
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.records.task import task_batch
from fabric_pipelines.settings import load
from tests.support import eventually, send

ENGINE = "smollm2-135m-instruct@ctranslate2-int8"
TASKS = 400


class Machine:
    """A broker and a completion process of one home, started and killed at will."""

    def __init__(self, home: Path, database: Database) -> None:
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")},
            "FABRIC_HOME": str(home),
            "FABRIC_PG_URL": database.url,
            "FABRIC_BROKER_URL": f"grpc+unix://{home}/b.sock",
            "FABRIC_SEGMENT_BYTES": str(4 << 20),
            "FABRIC_MODELS": str(home / "no-models"),
        }
        self.endpoint = self.environment["FABRIC_BROKER_URL"]
        self._stack = ExitStack()

    def start(self, module: str, *, ready: bool = True) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", f"fabric_pipelines.{module}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        if ready:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "ready" not in line:
                pytest.fail(f"{module} is not ready: {line}{process.communicate(timeout=60)[1]}")
        return process

    def client(self, role: str) -> BrokerClient:
        return self._stack.enter_context(BrokerClient(self.endpoint, role=role))

    def submit(self, tasks: int = TASKS) -> str:
        batch = task_batch([[1, 2, 3]] * tasks, max_new_tokens=4)
        count, tokens, mark = fingerprint_of([batch])
        name = hashlib.sha256(b"completion test").hexdigest()
        submission = Submission(
            submission_id=name,
            function="generate",
            engine=ENGINE,
            sampling={"kind": "generate", "temperature": 0.0, "top_k": 1, "seed": 0},
            vocab_size=100,
            tasks=count,
            tokens=tokens,
            fingerprint=mark,
        )
        self.client("producer").submit(submission, [batch])
        return name

    def compute(self, *, at_most: int = TASKS) -> int:
        """Be the worker: lease tasks and report them computed, each tenth as refused for good. Not for its size: what
        is too large for one worker waits for a larger one."""
        worker = self.client("consumer")
        worker.attach(
            engine=ENGINE,
            engine_fingerprint="f" * 64,
            device="cpu:0",
            profile=Profile(64, 4096, 8192, 0),
        )
        done = 0
        while done < at_most and (lease := worker.lease(sequences=64, tokens=4096, kv_tokens=8192)):
            worker.computed(_computed(lease.tasks))
            done += lease.tasks.num_rows
        worker.detach()
        return done

    def close(self) -> None:
        self._stack.close()


def _computed(tasks: pa.RecordBatch) -> pa.RecordBatch:
    rows = tasks.num_rows
    bad = tasks.column("source_row").to_numpy() % 10 == 0
    return completion_batch(
        {
            "task_id": tasks.column("task_id"),
            "source_row": tasks.column("source_row"),
            "status": np.where(bad, "refused", "ok").tolist(),
            "finish_reason": np.where(bad, "error", "length").tolist(),
            "output": pa.array([None if no else [5, 6, 7] for no in bad], pa.list_(pa.uint32())),
            "prompt_tokens": [3] * rows,
            "padded_tokens": [0] * rows,
            "error_code": pa.array(["UnknownField" if no else None for no in bad], pa.string()),
            "error_text": pa.array(
                ["colour is unknown" if no else None for no in bad], pa.string()
            ),
            "attempts": [1] * rows,
            "engine": [ENGINE] * rows,
            "engine_fingerprint": ["f" * 64] * rows,
            "t_start_us": [1] * rows,
            "t_end_us": [2] * rows,
            "metadata": tasks.column("metadata"),
        }
    )


@pytest.fixture
def machine(
    open_folder: Path, database: Database, request: pytest.FixtureRequest
) -> Iterator[Machine]:
    home = open_folder / hashlib.sha256(request.node.name.encode()).hexdigest()[:8]
    home.mkdir()
    made = Machine(home, database)
    yield made
    made.close()


def _finished(machine: Machine, submission: str) -> SubmissionState:
    client = machine.client("producer")
    return client.wait(submission, timeout_s=30)


def _require_every_task_once(machine: Machine, database: Database, submission: str) -> None:
    state = _finished(machine, submission)
    assert (state.retired, state.dead) == (TASKS - TASKS // 10, TASKS // 10)
    counts = results.counts(database)
    assert (counts["generate"], counts["dead_letters"]) == (state.retired, state.dead)
    assert state.first_task_id is not None
    ids = np.arange(state.first_task_id, state.first_task_id + TASKS)
    assert results.unaccounted(database, ids).size == 0
    total = machine.client("admin").status().total
    total.require_balanced("test")
    assert machine.client("admin").verify().ok


def test_computed_tasks_land_retire_and_the_process_ends_cleanly_on_sigterm(
    machine: Machine, database: Database
) -> None:
    machine.start("broker")
    completion = machine.start("completion")
    submission = machine.submit()
    assert machine.compute() == TASKS
    _require_every_task_once(machine, database, submission)
    settings = load({}, machine.environment)
    kept = eventually(
        lambda: (
            (seen := account.read(settings))
            and seen["counters"]["retired"] + seen["counters"]["dead"] == TASKS
            and seen
        ),
        within_s=60,
        what="completion's own account",
    )
    assert kept["pid"] == completion.pid
    classes = kept["governor"]["classes"]
    assert (classes["bulk"]["rows"], classes["regular"]["rows"]) == (TASKS * 9 // 10, TASKS // 10)
    assert kept["governor"]["signals"]["wal_since_redo"] is not None
    completion.send_signal(signal.SIGTERM)
    _, err = completion.communicate(timeout=90)
    assert completion.returncode == 0, err
    assert account.read(settings) is None, "no process, no account"
    letters = results.dead_letters(database)
    assert set(letters.column("reason").to_pylist()) == {"colour is unknown"}


def test_a_completion_killed_in_mid_landing_is_replaced_and_nothing_is_lost_or_doubled(
    machine: Machine, database: Database
) -> None:
    machine.start("broker")
    submission = machine.submit()
    machine.compute()
    with database.session() as blocker:
        blocker.execute("begin; lock table fabric.acks in share mode")
        first = machine.start("completion", ready=False)
        eventually(_waits_for_lock(database), within_s=60, what="a landing that waits for the lock")
        first.kill()
        first.wait(timeout=60)
        blocker.execute("rollback")
    machine.start("completion")
    _require_every_task_once(machine, database, submission)


def test_completion_goes_on_after_the_broker_was_killed_and_started_again(
    machine: Machine, database: Database
) -> None:
    broker = machine.start("broker")
    completion = machine.start("completion")
    submission = machine.submit()
    machine.compute(at_most=100)
    broker.kill()
    broker.wait(timeout=60)
    machine.start("broker")
    machine.compute()
    _require_every_task_once(machine, database, submission)
    assert completion.poll() is None


def test_completion_outlives_its_database_and_lands_what_it_held(
    machine: Machine, open_folder: Path
) -> None:
    folder = open_folder / "own"
    folder.mkdir()
    server = EmbeddedPostgres(
        Place(folder, folder / "postgres", folder / "run"),
        options={"shared_buffers": "32MB"},
        durable_initdb=False,
    )
    database = Database(server.start())
    machine.environment["FABRIC_PG_URL"] = database.url
    machine.start("broker")
    completion = machine.start("completion")
    submission = machine.submit()
    machine.compute(at_most=100)
    eventually(lambda: results.counts(database)["generate"], within_s=60, what="rows have landed")
    assert server.pid is not None
    send(server.pid)
    server.stop()
    machine.compute()  # the broker takes completions while the database is away
    server.start()
    _require_every_task_once(machine, database, submission)
    assert completion.poll() is None
    machine.close()
    server.stop()


def test_a_broker_with_another_journal_ends_completion_with_the_refusal(
    machine: Machine, database: Database
) -> None:
    broker = machine.start("broker")
    completion = machine.start("completion")
    machine.submit()
    machine.compute()
    eventually(lambda: results.counts(database)["generate"], within_s=60, what="rows have landed")
    broker.kill()
    broker.wait(timeout=60)
    machine.environment["FABRIC_HOME"] += "/other"
    Path(machine.environment["FABRIC_HOME"]).mkdir()
    machine.start("broker")
    _, err = completion.communicate(timeout=90)
    assert completion.returncode == 4
    assert "admit" in err


def _waits_for_lock(database: Database) -> Callable[[], bool]:
    def probe() -> bool:
        with database.session() as connection:
            row = connection.execute(
                "select count(*) from pg_stat_activity "
                "where datname = current_database() and wait_event_type = 'Lock'"
            ).fetchone()
        return bool(row and row[0])

    return probe
