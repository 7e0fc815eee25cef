"""Our broker as it ships: its process, its socket, its client; nothing is switched off.

The round goes through a submission (with its fingerprint over the whole content), leases in prefix order, completion
batches, and retirement with a confirmation: more than any peer is asked for.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

import fabric_pipelines
from fabric_pipelines.bench.peers.peer import (
    OUTCOME_TOKENS,
    VOCAB_SIZE,
    Durable,
    Held,
    Processes,
    Tokens,
    Work,
)
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.errors import BrokerUnavailable
from fabric_pipelines.ids import digest
from fabric_pipelines.records.completion import completion_batch
from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.records.task import TASK_SCHEMA
from fabric_pipelines.settings import Settings

ENGINE = "bench@none"
FINGERPRINT = digest(ENGINE)
SAMPLING = {"kind": "generate", "temperature": 0.0, "top_k": 1, "seed": 0}
PROFILE = Profile(256, 1 << 30, 0, 0)


class FabricServer:
    name = "fabric"
    version = fabric_pipelines.__version__
    durable = Durable(
        enqueue="fdatasync before ack",
        lease="logged, synced with the next ack; a restart claims it again at reattach",
        computed="fdatasync before ack",
        retire="fdatasync before ack",
        lease_is_a_choice=True,
    )

    def __init__(self) -> None:
        self._processes = Processes()
        self.endpoint = ""

    def start(self, folder: Path) -> None:
        settings = Settings(home=folder)
        self.endpoint = settings.broker_endpoint
        self._processes.spawn(
            [sys.executable, "-m", "fabric_pipelines.broker"], folder, settings.as_environment()
        )
        with BrokerClient(self.endpoint, role="admin", timeout_s=1) as client:
            self._processes.await_answer(lambda: _hello(client))

    def stop(self) -> None:
        self._processes.stop()

    @property
    def pids(self) -> list[int]:
        return self._processes.pids


def _hello(client: BrokerClient) -> None:
    try:
        client.hello()
    except BrokerUnavailable as fault:
        raise ConnectionError(str(fault)) from fault


class FabricClient:
    def __init__(self, endpoint: str) -> None:
        self._producer = BrokerClient(endpoint, role="producer", timeout_s=60)
        self._worker = BrokerClient(endpoint, role="worker", timeout_s=60)
        self._completion = BrokerClient(endpoint, role="completion", timeout_s=60)
        self._confirmation = Confirmation(
            "postgres", {"cluster": "bench", "xid": 1, "table": "fabric.generate"}
        )

    def prepare(self, work: Work) -> None:
        self._work = work
        self._batches = [_task_batch(tokens) for tokens in work.batches()]
        self._worker.attach(
            engine=ENGINE, engine_fingerprint=FINGERPRINT, device="bench:0", profile=PROFILE
        )

    def enqueue(self) -> None:
        tasks, tokens, fingerprint = fingerprint_of(self._batches)
        submission = Submission(
            digest(self._work.number),
            "generate",
            ENGINE,
            SAMPLING,
            VOCAB_SIZE,
            tasks,
            tokens,
            fingerprint,
        )
        self._producer.submit(submission, self._batches)

    def lease(self) -> Held | None:
        lease = self._worker.lease(
            sequences=self._work.lease,
            tokens=1 << 40,
            kv_tokens=None,
            synced=self._work.synced_leases,
        )
        return None if lease is None else Held(lease, _rows(lease))

    def computed(self, held: Held) -> None:
        tasks: pa.RecordBatch = held.handles.tasks
        self._worker.computed(_outcomes(tasks))

    def retire(self) -> int:
        pulled = self._completion.pull_computed(rows=self._work.lease)
        if pulled is None:
            return 0
        return self._completion.retire(pulled.column("task_id"), self._confirmation)

    def close(self) -> None:
        for client in (self._producer, self._worker, self._completion):
            client.close()


connect = FabricClient


def _task_batch(tokens: Tokens) -> pa.RecordBatch:
    count, width = tokens.shape
    offsets = np.arange(count + 1, dtype=np.int32) * width
    return pa.RecordBatch.from_arrays(
        [
            pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens.reshape(-1))),
            pa.array(np.full(count, OUTCOME_TOKENS, np.uint32)),
            pa.array(np.arange(count)),
            pa.array([b""] * count, pa.binary()),
        ],
        schema=TASK_SCHEMA,
    )


def _rows(lease: Lease) -> list[int]:
    tokens = lease.tasks.column("tokens").flatten().to_numpy().reshape(lease.tasks.num_rows, -1)
    rows: list[int] = (tokens[:, 0] + tokens[:, 1].astype(np.int64) * VOCAB_SIZE).tolist()
    return rows


def _outcomes(tasks: pa.RecordBatch) -> pa.RecordBatch:
    count = tasks.num_rows
    offsets = np.arange(count + 1, dtype=np.int32) * OUTCOME_TOKENS
    prompts = tasks.column("tokens").flatten().to_numpy().reshape(count, -1)
    given, width = prompts[:, :OUTCOME_TOKENS], prompts.shape[1]
    output = pa.ListArray.from_arrays(pa.array(offsets), pa.array(given.reshape(-1)))
    words = pa.array(["ok", "length", ENGINE, FINGERPRINT], pa.string())
    ok, length, engine, fingerprint = (
        words.take(pa.array(np.full(count, at, np.int32))) for at in range(4)
    )
    return completion_batch(
        {
            "task_id": tasks.column("task_id"),
            "source_row": tasks.column("source_row"),
            "status": ok,
            "finish_reason": length,
            "output": output,
            "prompt_tokens": pa.array(np.full(count, width, np.uint32)),
            "padded_tokens": pa.array(np.zeros(count, np.uint32)),
            "attempts": tasks.column("attempts"),
            "engine": engine,
            "engine_fingerprint": fingerprint,
            "t_start_us": pa.array(np.ones(count, np.int64)),
            "t_end_us": pa.array(np.ones(count, np.int64)),
            "metadata": tasks.column("metadata"),
        }
    )
