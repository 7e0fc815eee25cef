"""A broker that is full, or gone for a moment: producers wait for it and go on where they were."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from fabric_pipelines import api, cli, settings
from fabric_pipelines.broker.patience import Patience
from fabric_pipelines.errors import Backpressure
from fabric_pipelines.journal.frame import CONTROL_FRAME_BYTES
from tests.support_broker import submission_of, tasks_of
from tests.support_broker_process import Broker, finish_everything, require_whole

SHARE = 400_000


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    brokers: list[Broker] = []

    def started(**flags: Any) -> Broker:
        home = {"home": tmp_path / "home", "segment_bytes": 1 << 20, "lease_ms": 5_000}
        brokers.append(Broker(settings.load(home | flags, {}, tmp_path)))
        brokers[-1].start()
        return brokers[-1]

    yield started
    for broker in brokers:
        if broker.process is not None:
            broker.kill()


def batches_of(count: int) -> list[pa.RecordBatch]:
    return [tasks_of([1000] * 20, seed=at) for at in range(count)]  # 80 kB each


def test_a_tenant_at_its_share_is_told_when_to_come_back_and_nothing_is_written(
    start: Any,
) -> None:
    broker = start(tenant_high_water_bytes=SHARE)
    held = batches_of(5)
    with broker.client("producer") as client, broker.client("admin") as admin:
        client.submit(submission_of(held, 1), held)
        size, lsn = admin.status().journal["bytes"], admin.hello().durable_lsn
        with pytest.raises(Backpressure, match="tenant 'default'") as refused:
            client.submit(submission_of(held, 2), held)
        assert refused.value.retry_after_s > 0
        assert admin.hello().durable_lsn == lsn
        # an idle broker may have marked that what was there is durable
        assert admin.status().journal["bytes"] - size in (0, CONTROL_FRAME_BYTES)
        assert client.submission(submission_of(held, 2).submission_id) is None
        other = submission_of(held[:1], 3, tenant="other")
        assert client.submit(other, held[:1]).closed


def test_a_producer_with_patience_goes_on_in_the_middle_of_its_upload_once_there_is_room(
    start: Any,
) -> None:
    """Its batches come from a generator, which nobody can start again."""
    broker, batches = start(tenant_high_water_bytes=SHARE), batches_of(15)
    said: list[str] = []
    patience = Patience(60, said.append, sleep=lambda _: finish_everything(broker) and None)
    with broker.client("producer") as client:
        state = client.submit(submission_of(batches), iter(batches), patience=patience)
    assert (state.enqueued, state.closed) == (300, True)
    assert patience.waits >= 2
    assert all(line.startswith("waiting for room in the broker") for line in said)
    finish_everything(broker)
    with broker.client("admin") as admin:
        assert admin.status().total.retired.tasks == 300
        assert admin.verify().differences == []


def test_a_producer_with_patience_outlives_a_kill_of_the_broker(start: Any) -> None:
    broker, batches = start(), batches_of(10)

    def with_kills() -> Iterator[pa.RecordBatch]:
        for at, batch in enumerate(batches):
            if at in (3, 7):
                broker.kill()
                broker.start()
            yield batch

    said: list[str] = []
    with broker.client("producer") as client:
        client.hello()
        patience = Patience(30, said.append, sleep=lambda _: None)
        state = client.submit(submission_of(batches), with_kills(), patience=patience)
    assert (state.enqueued, state.closed) == (200, True)
    assert all(line.startswith("waiting for the broker") for line in said)
    require_whole(broker, 200, finish_everything(broker))


def test_a_person_who_submits_to_a_full_broker_reads_that_it_waits_for_room(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, held = start(tenant_high_water_bytes=SHARE), batches_of(5)
    with broker.client("producer") as client:
        client.submit(submission_of(held, 1), held)

    def while_it_waits(seconds: float) -> None:
        finish_everything(broker)

    monkeypatch.setattr(api, "Patience", partial(Patience, sleep=while_it_waits))
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"tokens": [1, 2, 3]}\n')
    engine = "smollm2-135m-instruct@ctranslate2-int8"
    what = ["submit", str(file), "--function", "generate", "--engine", engine, "--json"]
    done = CliRunner().invoke(cli.app, ["--home", str(broker.settings.home), *what])
    assert done.exit_code == 0, done.output
    assert "waiting for room in the broker, asking again in" in done.stderr
    assert json.loads(done.stdout)["enqueued"] == 1
