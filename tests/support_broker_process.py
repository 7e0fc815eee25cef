"""A broker in a process of its own, for tests over real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from fabric_pipelines import settings
from fabric_pipelines.broker.client import BrokerClient
from tests.support_broker import ENGINE, PROFILE


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
