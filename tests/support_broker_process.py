"""A broker in a process of its own, for tests over real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_pipelines import settings
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.broker.transport import Credentials
from tests.support import eventually
from tests.support_broker import ENGINE, LANDED, PROFILE, completions, ids_of


@dataclass
class Broker:
    settings: settings.Settings
    process: subprocess.Popen[str] | None = None

    def start(self) -> str:
        """Start the process and return its ready line."""
        environ = {**os.environ, **self.settings.as_environment()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fabric_pipelines.broker"],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("broker ready on "), self.end(signal.SIGTERM)
        return line

    def refused(self) -> tuple[int, str]:
        """(exit code, stderr) of a broker that does not start."""
        environ = {**os.environ, **self.settings.as_environment()}
        argv = [sys.executable, "-m", "fabric_pipelines.broker"]
        done = subprocess.run(
            argv, env=environ, capture_output=True, text=True, timeout=30, check=False
        )
        return done.returncode, done.stderr

    def end(self, number: int) -> tuple[int, str]:
        """(exit code, stderr) after the signal."""
        assert self.process is not None
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=15)
        code, self.process = self.process.returncode, None
        return code, errors

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def client(self, role: str, session: str | None = None) -> BrokerClient:
        return BrokerClient(self.settings.broker_endpoint, role=role, session=session, timeout_s=5)


def attach(client: BrokerClient, held: list[int] | None = None) -> tuple[int, ...]:
    return client.attach(
        engine=ENGINE, engine_fingerprint="f", device="cpu:0", profile=PROFILE, held=held or []
    ).accepted


def finish_everything(broker: Broker) -> list[int]:
    """A worker and a completion of a new life; the ids that were retired, in order."""
    retired: list[int] = []
    with broker.client("worker") as worker, broker.client("completion") as completion:
        attach(worker)

        def step() -> bool:
            worker.renew()
            while (lease := worker.lease(sequences=64, tokens=1 << 20, kv_tokens=None)) is not None:
                worker.computed(completions(ids_of(lease)))
            while (rows := completion.pull_computed(rows=500)) is not None:
                ids = rows.column("task_id")
                assert completion.retire(ids, LANDED) == len(ids)
                retired.extend(ids.to_pylist())
            return worker.status().total.open_tasks == 0

        eventually(step, within_s=60, what="the end of the backlog")
    return retired


def require_whole(broker: Broker, tasks: int, retired: list[int]) -> None:
    assert len(set(retired)) == len(retired)
    with broker.client("admin") as client:
        total = client.status().total
        assert (total.enqueued.tasks, total.retired.tasks) == (tasks, tasks)
        total.require_balanced("everything")
        assert client.verify().differences == []


@dataclass
class Served:
    """A broker with both doors."""

    broker: Broker
    papers: Path
    endpoint: str

    def remote(self, name: str, *, role: str = "", session: str | None = None) -> BrokerClient:
        """With that certificate; whatever `role` it declares counts for nothing."""
        return BrokerClient(
            self.endpoint,
            role=role or name.rpartition("-")[2],
            session=session,
            timeout_s=5,
            credentials=credentials_of(self.papers, name),
        )


def credentials_of(papers: Path, name: str) -> Credentials:
    return Credentials(
        *((papers / f"{file}").read_bytes() for file in ("ca.pem", f"{name}.pem", f"{name}.key"))
    )


def served_settings(home: Path, papers: Path, endpoint: str) -> settings.Settings:
    flags: dict[str, Any] = {
        "home": home,
        "segment_bytes": 1 << 20,
        "lease_ms": 1_000,
        "broker_listen": endpoint,
        "tls_ca": papers / "ca.pem",
        "tls_cert": papers / "broker.pem",
        "tls_key": papers / "broker.key",
    }
    return settings.load(flags, {}, home.parent)
