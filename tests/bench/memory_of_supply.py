"""What broker, completion and Postgres hold while many more tasks go through them than fill the broker's cache of batches.

    python -m tests.bench.memory_of_supply --tasks 170000

The soak of soak_on_cuda without a card: the same producer, tasks, loop and processes behind it, and an engine that answers at once.
A row each 8,000 retired tasks: RSS of each process in MB (PSS of Postgres), and bytes of the log that are still needed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa

from fabric_pipelines.bench import behind
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.worker.engines.door import Capabilities, EngineStats
from fabric_pipelines.worker.engines.tasks import Outbox, Outcome, Task, tasks_of
from fabric_pipelines.worker.loop import Pace, WorkerLoop
from tests.bench.soak_on_cuda import memory_mb, producing

NAME, FINGERPRINT = "qwen2.5-7b-shape-random-weights@vllm-fp8", "ab" * 32
A_ROW = 8_000
A_TURN, TURN_S = 60, 0.02  # answers at once, and the pause before them


class AtOnce:
    """The loop's side of an engine that fills every cap with the numbers from 0."""

    name, fingerprint = NAME, FINGERPRINT
    capabilities = Capabilities(
        frozenset({"generate"}), continuous=True, packed=True, device="cuda"
    )
    profile = Profile(1024, 16_384, 4_312_288, 131_072)  # of the H200 in docs/benchmarks/feeding.md

    def __init__(self, a_turn: int, turn_s: float) -> None:
        self._a_turn, self._turn_s = a_turn, turn_s
        self.stats = EngineStats()
        self._outbox = Outbox(NAME, FINGERPRINT)
        self._held: list[Task] = []

    def submit(self, lease: Lease) -> None:
        self._held.extend(tasks_of(lease))

    def poll(self, timeout_s: float) -> list[pa.RecordBatch]:
        time.sleep(self._turn_s)
        ended, self._held = self._held[: self._a_turn], self._held[self._a_turn :]
        for task in ended:
            outcome = Outcome(
                task, "ok", "length", output=np.arange(task.max_new_tokens, dtype=np.uint32)
            )
            outcome.started_us = outcome.ended_us = time.time_ns() // 1000
            self._outbox.outcomes.append(outcome)
        return self._outbox.take()

    def unfinished(self) -> list[int]:
        return [task.task_id for task in self._held]

    def withdraw_unstarted(self) -> list[int]:
        taken, self._held = self._held, []
        return [task.task_id for task in taken]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=170_000)
    parser.add_argument("--a-turn", type=int, default=A_TURN, help="answers at once")
    parser.add_argument("--turn-s", type=float, default=TURN_S, help="pause before them")
    parser.add_argument("--inside", type=Path, help="file for what the broker's memory is made of")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fabric-") as folder, ExitStack() as stack:
        home = Path(folder)
        server = stack.enter_context(behind.postgres(home / "pg"))
        program = ["-m", "fabric_pipelines.broker"]
        if given.inside is not None:
            program = ["-m", "tests.bench.broker_inside", str(given.inside.resolve())]
        endpoint = stack.enter_context(behind.broker(home / "broker", program))
        watcher = stack.enter_context(BrokerClient(endpoint, role="producer"))
        stack.enter_context(behind.completion(home / "broker", behind.database(server, "held")))
        stack.enter_context(producing(endpoint, NAME))
        client = stack.enter_context(BrokerClient(endpoint, role="consumer"))
        told = 0

        def turn(_: str) -> None:
            nonlocal told
            if loop.counts.sent < told + A_ROW:
                return
            told = loop.counts.sent
            status = watcher.status()
            row = {
                "retired": status.total.as_json()["retired"],
                "log_mb": round(status.journal["bytes"] / 1e6, 1),
                "checkpoint_lsn": status.journal["checkpoint_lsn"],
                "memory_mb": memory_mb(),
            }
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            if told >= given.tasks:
                loop.request_stop()

        loop = WorkerLoop(
            AtOnce(given.a_turn, given.turn_s),
            client,
            device="cuda:0",
            wait=time.sleep,
            tell=turn,
            pace=Pace(),
        )
        loop.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
