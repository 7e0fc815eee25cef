"""Real broker processes and real worker processes around a scripted engine: restarts, kills, drains, holds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.errors import BrokerUnavailable
from fabric_pipelines.ids import digest
from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.records.task import task_batch
from fabric_pipelines.settings import Settings, load
from fabric_pipelines.testing.scripted_engine import expected_output
from tests.support import eventually

ENGINE = "scripted@scripted"
LANDED = Confirmation("postgres", {"cluster": "1", "xid": "2", "table": "t"})
PROMPTS = [[1 + n % 40, 2, 3 + n] for n in range(120)]


@dataclass
class Stage:
    """One home: its broker, its workers, and the means to hurt them."""

    settings: Settings
    broker: subprocess.Popen[str] | None = None
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def spawn(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env={**os.environ, **self.settings.as_environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def start_broker(self) -> None:
        self.broker = self.spawn("fabric_pipelines.broker")
        eventually(self.answers, within_s=20, what="the broker answers")

    def answers(self) -> bool:
        try:
            with self.client("admin") as client:
                client.hello()
        except BrokerUnavailable:
            return False
        return True

    def kill_broker(self) -> None:
        assert self.broker is not None
        self.broker.kill()
        self.broker.communicate()

    def start_worker(self, **fields: Any) -> subprocess.Popen[str]:
        return self.spawn("fabric_pipelines.testing.scripted_worker", json.dumps(fields))

    def client(self, role: str) -> BrokerClient:
        return BrokerClient(self.settings.broker_endpoint, role=role)

    def submit(self, prompts: list[list[int]], name: str = "one") -> str:
        batches = [task_batch(prompts, max_new_tokens=4)]
        tasks, tokens, fingerprint = fingerprint_of(batches)
        header = Submission(
            digest(name),
            "generate",
            ENGINE,
            {"kind": "generate"},
            49_152,
            tasks,
            tokens,
            fingerprint,
        )
        with self.client("producer") as client:
            client.submit(header, batches)
        return header.submission_id

    def total(self) -> dict[str, int]:
        with self.client("admin") as client:
            total = client.status().total.as_json()
        assert total["balance_tasks"] == total["balance_tokens"] == 0
        assert total["balance_fingerprint"] == 0
        return total

    def reached(self, state: str, count: int) -> None:
        eventually(
            lambda: self.total()[state] >= count, within_s=30, what=f"{count} tasks are {state}"
        )

    def pull(self, client: BrokerClient) -> dict[int, list[int]]:
        """All that is computed: output by source row."""
        found: dict[int, list[int]] = {}
        while (batch := client.pull_computed(rows=1000)) is not None and batch.num_rows:
            for row in batch.to_pylist():
                assert row["source_row"] not in found, "one task was computed twice"
                found[row["source_row"]] = row["output"]
        return found


@contextmanager
def stage(**settings: Any) -> Iterator[Stage]:
    folder = Path(tempfile.mkdtemp(prefix="fabric-w-"))
    made = Stage(load({"home": folder, "segment_bytes": 1 << 20, **settings}, {}, folder))
    try:
        made.start_broker()
        yield made
    finally:
        for process in made.started:
            process.kill()
            process.communicate()
        shutil.rmtree(folder)


def ended(worker: subprocess.Popen[str], code: int = 0) -> dict[str, Any]:
    """The counters that a worker prints at its end."""
    out, err = worker.communicate(timeout=40)
    assert worker.returncode == code, err
    report: dict[str, Any] = json.loads(out) if out else {}
    return report


def expect_every_result(on: Stage) -> None:
    with on.client("completion") as client:
        found = on.pull(client)
    wanted = {row: expected_output(tokens, 4, 49_152) for row, tokens in enumerate(PROMPTS)}
    assert found == wanted


def test_a_worker_computes_everything_once_and_ends_with_its_counters() -> None:
    with stage() as on:
        on.submit(PROMPTS)
        report = ended(on.start_worker(until_idle=True))
        assert on.total()["computed"] == len(PROMPTS)
        assert report["ok"] == report["sent"] == len(PROMPTS)
        assert report["undelivered"] == report["duplicates"] == report["late"] == 0
        assert report["offered_tokens"] == 3 * len(PROMPTS)
        expect_every_result(on)


def test_a_broker_killed_in_mid_run_costs_no_result_and_no_second_run() -> None:
    with stage() as on:
        on.submit(PROMPTS)
        worker = on.start_worker(until_idle=True, script={"step_s": 0.05})
        on.reached("computed", 20)
        on.kill_broker()
        on.start_broker()
        report = ended(worker)
        assert on.total()["computed"] == len(PROMPTS)
        assert report["ok"] == len(PROMPTS), "what was finished or running was not run again"
        assert report["reattached"] >= 1
        expect_every_result(on)


def test_sigterm_drains_and_hands_back_what_did_not_start() -> None:
    with stage() as on:
        on.submit(PROMPTS)
        worker = on.start_worker(script={"step_s": 0.05}, profile=[4, 64, 256, 400])
        on.reached("computed", 8)
        worker.send_signal(signal.SIGTERM)
        report = ended(worker)
        total = on.total()
        assert total["leased"] == 0
        assert total["computed"] == report["ok"] < len(PROMPTS)
        assert report["nacked"] > 0
        ended(on.start_worker(until_idle=True))
        expect_every_result(on)


def test_a_killed_workers_tasks_come_back_when_its_leases_run_out() -> None:
    with stage(lease_ms=1500) as on:
        on.submit(PROMPTS)
        worker = on.start_worker(script={"step_s": 0.05}, profile=[4, 64, 256, 400])
        on.reached("computed", 8)
        worker.kill()
        worker.communicate()
        assert on.total()["leased"] > 0
        on.start_worker(script={"step_s": 0.0})
        on.reached("computed", len(PROMPTS))
        expect_every_result(on)


def test_a_failed_engine_ends_its_worker_and_the_next_one_finishes_the_work() -> None:
    with stage(lease_ms=1500) as on:
        on.submit(PROMPTS)
        ended(on.start_worker(script={"fail_at_poll": 4}), code=1)
        assert 0 < on.total()["computed"] < len(PROMPTS)
        on.start_worker()
        on.reached("computed", len(PROMPTS))
        expect_every_result(on)


def test_a_second_worker_on_a_device_is_refused_with_the_pid_of_the_first() -> None:
    with stage() as on:
        on.submit(PROMPTS[:8])
        first = on.start_worker()
        on.reached("computed", 8)
        second = on.start_worker()
        _, err = second.communicate(timeout=20)
        assert second.returncode == 4
        assert f"pid {first.pid}" in err
        assert "Traceback" not in err
        first.terminate()
        assert ended(first)["ok"] == 8


def test_at_the_high_water_mark_workers_hold_until_results_have_landed() -> None:
    with stage(computed_high_water_tasks=20) as on:
        on.submit(PROMPTS)
        worker = on.start_worker(script={"step_s": 0.01}, profile=[4, 16, 64, 16])
        on.reached("computed", 20)
        eventually(lambda: on.total()["leased"] == 0, within_s=20, what="the worker holds")
        with on.client("completion") as client:
            landed: dict[int, list[int]] = {}

            def land() -> bool:
                batch = client.pull_computed(rows=1000, wait_s=0.2)
                if batch is not None and batch.num_rows:
                    for row in batch.to_pylist():
                        landed[row["source_row"]] = row["output"]
                    client.retire(batch.column("task_id").to_numpy(), LANDED)
                return len(landed) == len(PROMPTS)

            held = on.total()
            assert held["computed"] < 20 + 3 * 16, "work beyond the mark is only what was in hand"
            eventually(land, within_s=30, what="all results are pulled")
        worker.terminate()
        report = ended(worker)
        assert on.total()["retired"] == len(PROMPTS)
        assert report["rungs"]["hold"] >= 1


@pytest.mark.slow
def test_a_worker_that_starts_before_its_broker_waits_for_it() -> None:
    with stage() as on:
        on.submit(PROMPTS[:8])
        on.kill_broker()
        worker = on.start_worker(until_idle=True)
        on.start_broker()
        assert ended(worker)["ok"] == 8
