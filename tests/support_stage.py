"""One home with a real broker and real workers around a scripted engine, and the means to hurt them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.errors import BrokerUnavailable
from fabric_pipelines.ids import digest
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.records.task import task_batch
from fabric_pipelines.settings import Settings, load
from tests.support import eventually

ENGINE = "scripted@scripted"


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
        eventually(self.answers, within_s=60, what="the broker answers")

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
        self.broker.communicate(timeout=60)

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
            lambda: self.total()[state] >= count, within_s=60, what=f"{count} tasks are {state}"
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
            process.communicate(timeout=60)
        shutil.rmtree(folder)
