"""kill -9 of each process in each phase of a run, under the supervisor: nothing lost, nothing landed twice.

A kill shows logic, not durability: the page cache survives it. What must survive a power cut is enumerated in
tests/stateful/test_journal_crash.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from fabric_pipelines import ids, models, settings, supervise
from fabric_pipelines.broker.client import BrokerClient, SubmissionState
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.errors import FabricError, TransientError
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.records.task import task_batch
from tests.support import eventually, skip_or_fail

ENGINE = "all-minilm-l6-v2@onnxruntime-fp32"
VOCABULARY = 30_522
SAMPLING = {"kind": "embed", "pooling": "mean", "normalise": True}
TASKS, BATCHES = 480, 24
PATIENCE_S = 60.0
RUNS_MAX = 5

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fabric(open_folder: Path) -> Iterator[settings.Settings]:
    folder = open_folder / "kill-matrix"
    folder.mkdir(mode=0o755)
    # the lease time is a user's: what a killed process held must not wait for it
    flags = {"home": folder / "home", "models": os.environ.get("FABRIC_MODELS")}
    loaded = settings.load(flags, {}, folder)
    try:
        models.pull("all-minilm-l6-v2", loaded.models)
    except FabricError as fault:
        skip_or_fail(str(fault))
    supervise.up(loaded, ui=False, engines=[ENGINE])
    yield loaded
    supervise.down(loaded)


@dataclass
class Run:
    """One submission of real tasks, sent by a producer that retries as a producer would."""

    settings: settings.Settings
    seed: int

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        prompts = [
            [101, *(draw.randrange(1_000, VOCABULARY) for _ in range(draw.randrange(4, 30))), 102]
            for _ in range(TASKS)
        ]
        size = TASKS // BATCHES
        self.batches = [
            task_batch(prompts[at : at + size], source_rows=range(at, at + size))
            for at in range(0, TASKS, size)
        ]
        tasks, tokens, fingerprint = fingerprint_of(self.batches)
        self.header = Submission(
            submission_id=ids.digest({"case": self.seed}),
            function="embed",
            engine=ENGINE,
            sampling=SAMPLING,
            vocab_size=VOCABULARY,
            tasks=tasks,
            tokens=tokens,
            fingerprint=fingerprint,
        )
        self.producer = threading.Thread(target=self._produce, daemon=True)

    def _slow_batches(self) -> Iterator[object]:
        for batch in self.batches:
            time.sleep(
                0.01
            )  # a producer that takes a moment, so that "enqueue" is a phase one can hit
            yield batch

    def _produce(self) -> None:
        while True:
            try:
                with self.client("producer") as client:
                    client.submit(self.header, self._slow_batches())  # type: ignore[arg-type]
                return
            except TransientError:
                time.sleep(0.1)

    def client(self, role: str) -> BrokerClient:
        return BrokerClient(self.settings.broker_endpoint, role=role)

    def state(self) -> SubmissionState | None:
        try:
            with self.client("producer") as client:
                return client.submission(self.header.submission_id)
        except TransientError:
            return None


def _in_phase(phase: str, state: SubmissionState) -> bool:
    done = state.retired + state.dead
    return {
        "enqueue": 0 < state.enqueued < TASKS,
        "lease": state.leased > 0,
        "compute": state.computed > 0,
        "land": state.computed > 0 and done > 0,
        "retire": 0 < done < TASKS,
    }[phase]


def _caught_in(phase: str, loaded: settings.Settings, seed: int) -> Run:
    """A run that is in this phase now. One that was through it before we looked is over for good, so the next
    one is started instead of waiting for what cannot come any more."""
    for attempt in range(RUNS_MAX):
        run = Run(loaded, seed + 1000 * attempt)
        run.producer.start()
        seen = eventually(
            lambda run=run: _look(phase, run.state()),  # type: ignore[misc]
            within_s=PATIENCE_S,
            what=f"a run in phase {phase}, or at its end",
        )
        if seen == "caught":
            return run
    pytest.fail(f"{RUNS_MAX} runs were through phase {phase} before it could be seen")


def _look(phase: str, state: SubmissionState | None) -> str | None:
    if state is None:
        return None
    if _in_phase(phase, state):
        return "caught"
    return "missed" if state.retired + state.dead == TASKS else None


def _victims(loaded: settings.Settings, name: str) -> list[psutil.Process]:
    """The process itself, and for Postgres the server it runs, whose death is the point."""
    found = [p for p in supervise.state(loaded).processes if p.name.startswith(name)]
    assert found, f"the supervisor runs no {name}"
    process = psutil.Process(found[0].pid)
    return [*process.children(recursive=False), process] if name == "postgres" else [process]


def _kill(loaded: settings.Settings, name: str) -> None:
    for process in _victims(loaded, name):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def _patiently(ask: Callable[[], object], within_s: float, what: str) -> object:
    def probe() -> object:
        try:
            return ask()
        except TransientError:
            return None

    return eventually(probe, within_s=within_s, what=what)


PHASES = ("enqueue", "lease", "compute", "land", "retire")
PROCESSES = ("broker", "worker", "completion", "postgres")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("process", PROCESSES)
def test_a_killed_process_costs_nothing(
    fabric: settings.Settings, process: str, phase: str
) -> None:
    seed = PROCESSES.index(process) * 10 + PHASES.index(phase)
    begin = time.monotonic()
    run = _caught_in(phase, fabric, seed)
    _kill(fabric, process)

    eventually(
        lambda: (state := run.state()) is not None and state.retired + state.dead == TASKS,
        within_s=PATIENCE_S,
        what="the end of the run",
    )
    run.producer.join(timeout=5)
    took = time.monotonic() - begin

    rows = _patiently(
        lambda: _landed(fabric, run.header.submission_id), 10, "an answer of Postgres"
    )
    assert sorted(rows) == list(range(TASKS))  # type: ignore[call-overload]
    final = run.state()
    assert final is not None
    assert (final.retired, final.dead, final.tasks) == (TASKS, 0, TASKS)
    with run.client("admin") as client:
        total = client.status().total.as_json()
        assert client.verify().ok
    assert (total["balance_tasks"], total["balance_tokens"], total["balance_fingerprint"]) == (
        0,
        0,
        0,
    )
    print(f"{process} killed in {phase}: {took:.1f} s")  # noqa: T201 - the table of the note


def _landed(loaded: settings.Settings, submission_id: str) -> list[int]:
    with Database.of(loaded).connect() as connection:
        rows = connection.execute(
            "select source_row from fabric.embed where submission_id = %s", (submission_id,)
        ).fetchall()
    return [row[0] for row in rows]


def test_errors_of_the_fabric_are_what_a_producer_retries_on() -> None:
    """The producer above retries TransientError only; an outage must never surface as anything else."""
    with (
        pytest.raises(FabricError) as caught,
        BrokerClient("grpc+unix:///nowhere/b.sock", role="producer") as c,
    ):
        c.hello()
    assert isinstance(caught.value, TransientError)
