"""Either side is killed and comes back, and work goes on where it was: on one machine, and over mutual TLS.

The broker keeps its address and its journal, the worker its session and the ids in its hands; nobody restarts what
still lives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.broker import certificates
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.settings import Settings
from fabric_pipelines.supervise.table import free_port
from fabric_pipelines.testing.scripted_engine import expected_output
from tests.support import eventually
from tests.support_stage import Stage, stage

PROMPTS = [[1 + n % 40, 2, 3 + n] for n in range(120)]
SLOW = {
    "script": {"step_s": 0.1}
}  # slow enough that who looks in on a busy machine still meets it in mid lease
SMALL = {"profile": [4, 64, 256, 400]}


@dataclass
class Apart:
    """A broker and workers that reach it as `worker_settings` say."""

    stage: Stage
    worker_settings: Settings

    def start_worker(self, **fields: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "fabric_pipelines.testing.scripted_worker", json.dumps(fields)],
            env={**os.environ, **self.worker_settings.as_environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.stage.started.append(process)
        return process


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("papers")
    clients = ["consumer", "completion", "default/producer"]
    certificates.make(folder, hosts=["127.0.0.1"], clients=clients)
    return folder


@contextmanager
def apart(where: str, papers: Path, folder: Path, **flags: Any) -> Iterator[Apart]:
    if where == "same machine":
        with stage(**flags) as on:
            yield Apart(on, on.settings)
        return
    endpoint = f"grpc+tls://127.0.0.1:{free_port('127.0.0.1', 18_671)}"
    tls = {"broker_listen": endpoint, "tls_ca": papers / "ca.pem"}
    own = {"tls_cert": papers / "broker.pem", "tls_key": papers / "broker.key"}
    with stage(**flags, **tls, **own) as on:
        yield Apart(on, elsewhere(on.settings, endpoint, papers, folder, "consumer"))


def elsewhere(
    settings: Settings, endpoint: str, papers: Path, folder: Path, certificate: str
) -> Settings:
    """The settings of another machine, which shares nothing but the CA."""
    return replace(
        settings,
        home=folder / "elsewhere",
        broker_url=endpoint,
        broker_listen="",
        tls_cert=str(papers / f"{certificate}.pem"),
        tls_key=str(papers / f"{certificate}.key"),
    )


@pytest.fixture(params=["same machine", "mutual TLS"])
def where(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def ended(worker: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = worker.communicate(timeout=60)
    assert worker.returncode == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


def in_mid_lease(on: Stage, computed: int) -> None:
    """So many are computed, and others are in a worker's hands."""

    def probe() -> bool:
        total = on.total()
        return total["computed"] >= computed and total["leased"] > 0

    eventually(probe, within_s=30, what=f"{computed} tasks are computed and some are leased")


def expect_every_result_once(on: Stage, prompts: list[list[int]] = PROMPTS) -> None:
    with on.client("completion") as client:
        found = on.pull(client)
    assert found == {row: expected_output(tokens, 4, 49_152) for row, tokens in enumerate(prompts)}


def test_a_broker_killed_twice_in_mid_lease_costs_no_result_and_no_second_run(
    where: str, papers: Path, tmp_path: Path
) -> None:
    with apart(where, papers, tmp_path) as each:
        each.stage.submit(PROMPTS)
        worker = each.start_worker(until_idle=True, **SLOW)
        for mark in (20, 60):
            in_mid_lease(each.stage, mark)
            each.stage.kill_broker()
            each.stage.start_broker()
        report = ended(worker)
        assert report["ok"] == len(PROMPTS), "what was finished or running was not run again"
        assert report["reattached"] >= 2
        assert each.stage.total()["computed"] == len(PROMPTS)
        expect_every_result_once(each.stage)


def test_a_worker_that_was_killed_is_replaced_and_its_tasks_come_back(
    where: str, papers: Path, tmp_path: Path
) -> None:
    prompts = PROMPTS[
        :30
    ]  # what a dead worker held comes back in small pieces, one after the other
    with apart(where, papers, tmp_path, lease_ms=1500) as each:
        each.stage.submit(prompts)
        worker = each.start_worker(**SLOW, **SMALL)
        in_mid_lease(each.stage, 8)
        worker.kill()
        worker.communicate()
        each.start_worker()
        each.stage.reached("computed", len(prompts))
        expect_every_result_once(each.stage, prompts)


def test_when_both_are_killed_nothing_is_lost_and_nothing_is_there_twice(
    where: str, papers: Path, tmp_path: Path
) -> None:
    with apart(where, papers, tmp_path, lease_ms=1500) as each:
        each.stage.submit(PROMPTS)
        worker = each.start_worker(**SLOW, **SMALL)
        in_mid_lease(each.stage, 8)
        each.stage.kill_broker()
        worker.kill()
        worker.communicate()
        each.stage.start_broker()
        each.start_worker()
        each.stage.reached("computed", len(PROMPTS))
        expect_every_result_once(each.stage)
        with each.stage.client("admin") as admin:
            assert admin.verify().differences == []


def test_a_producer_elsewhere_submits_and_waits_through_a_restart(
    papers: Path, tmp_path: Path
) -> None:
    with apart("mutual TLS", papers, tmp_path) as each:
        endpoint = each.worker_settings.broker_url
        mine = elsewhere(each.stage.settings, endpoint, papers, tmp_path, "default-producer")
        submission_id = each.stage.submit(PROMPTS)
        with BrokerClient.of(mine, role="producer", timeout_s=20) as producer:
            before = producer.submission(submission_id)
            each.stage.kill_broker()
            each.stage.start_broker()
            seen = producer.wait(submission_id, timeout_s=0)
            assert before is not None
            assert (seen.tasks, seen.ready) == (before.tasks, len(PROMPTS))
            ended(each.start_worker(until_idle=True))
            eventually(
                lambda: producer.wait(submission_id, timeout_s=0).computed == len(PROMPTS),
                within_s=20,
                what="all of it is computed",
            )
