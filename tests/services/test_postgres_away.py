"""Postgres goes away in mid-run: workers go on to the high-water mark, hold, and everything lands afterwards.

FABRIC_PG_AWAY_S sets how long it stays away; the acceptance run uses 60.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric_pipelines import ids, models, settings, supervise
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.broker.replies import SubmissionState
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.postgres import EmbeddedPostgres, Place
from fabric_pipelines.errors import FabricError
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.records.task import task_batch
from tests.support import eventually, skip_or_fail

ENGINE = "all-minilm-l6-v2@onnxruntime-fp32"
VOCABULARY = 30_522
TASKS, HIGH_WATER = 1_200, 200
AWAY_S = float(os.environ.get("FABRIC_PG_AWAY_S", "5"))

pytestmark = pytest.mark.slow


@pytest.fixture
def server(open_folder: Path) -> Iterator[EmbeddedPostgres]:
    """A server of the test's own, which no supervisor brings back."""
    folder = open_folder / "away"
    folder.mkdir(mode=0o755)
    server = EmbeddedPostgres(
        Place(folder, folder / "postgres", folder / "run"), log=folder / "postgres.log"
    )
    server.start()
    yield server
    server.stop()


@pytest.fixture
def fabric(server: EmbeddedPostgres, open_folder: Path) -> Iterator[settings.Settings]:
    flags = {
        "home": open_folder / "away" / "home",
        "pg_url": server.url,
        "computed_high_water_tasks": HIGH_WATER,
        "models": os.environ.get("FABRIC_MODELS"),
    }
    loaded = settings.load(flags, {}, open_folder / "away")
    try:
        models.pull("all-minilm-l6-v2", loaded.models)
    except FabricError as fault:
        skip_or_fail(str(fault))
    supervise.up(loaded, ui=False, engines=[ENGINE])
    yield loaded
    supervise.down(loaded)


def _submit(client: BrokerClient) -> str:
    draw = random.Random(1)
    prompts = [
        [101, *(draw.randrange(1_000, VOCABULARY) for _ in range(draw.randrange(8, 40))), 102]
        for _ in range(TASKS)
    ]
    batches = [task_batch(prompts)]
    tasks, tokens, fingerprint = fingerprint_of(batches)
    header = Submission(
        submission_id=ids.digest("away"),
        function="embed",
        engine=ENGINE,
        sampling={"kind": "embed", "pooling": "mean", "normalise": True},
        vocab_size=VOCABULARY,
        tasks=tasks,
        tokens=tokens,
        fingerprint=fingerprint,
    )
    client.submit(header, batches)
    return header.submission_id


def _landed(loaded: settings.Settings, submission_id: str) -> list[int]:
    with Database.of(loaded).connect() as connection:
        rows = connection.execute(
            "select source_row from fabric.embed where submission_id = %s", (submission_id,)
        ).fetchall()
    return [row[0] for row in rows]


def test_workers_go_on_to_the_mark_hold_and_nothing_is_lost(
    server: EmbeddedPostgres, fabric: settings.Settings
) -> None:
    with BrokerClient(fabric.broker_endpoint, role="producer") as client:
        submission_id = _submit(client)

        def state() -> SubmissionState:
            found = client.submission(submission_id)
            assert found is not None
            return found

        # rows of the first tasks are visible by SQL long before the run ends
        eventually(lambda: _landed(fabric, submission_id), within_s=60, what="first rows in SQL")
        assert state().retired < TASKS / 2

        server.stop()
        gone = time.monotonic()
        eventually(
            lambda: (s := state()).computed >= HIGH_WATER and s.leased == 0,
            within_s=60,
            what="the worker holds at the high-water mark",
        )
        held = state()
        assert held.ready > 0, "the worker went through the mark"
        retired_when_gone = held.retired
        eventually(lambda: time.monotonic() - gone >= AWAY_S, within_s=AWAY_S + 1, what="time away")
        assert state().ready == held.ready
        assert state().retired == retired_when_gone

        server.start()
        eventually(lambda: state().retired == TASKS, within_s=90, what="the end of the run")
        assert sorted(_landed(fabric, submission_id)) == list(range(TASKS))
        with BrokerClient(fabric.broker_endpoint, role="admin") as admin:
            total = admin.status().total
        total.require_balanced("the whole run")
        assert (total.retired.tasks, total.dead.tasks, total.open_tasks) == (TASKS, 0, 0)
