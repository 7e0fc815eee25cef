"""Stand-ins for pipelines without processes: a broker in memory, rows that "landed" by rule, words as tokens.

State lives by name in this module, because Dagster copies a resource on every use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from fabric_pipelines.broker.patience import Patience
from fabric_pipelines.broker.replies import BrokerStatus, SubmissionState
from fabric_pipelines.dataplane.lake import Artifact, Lake
from fabric_pipelines.errors import BrokerUnavailable
from fabric_pipelines.ledger import Amount, Ledger
from fabric_pipelines.records.submission import Submission
from fabric_pipelines.testing.word_tokeniser import WordTokeniser
from fabric_pipelines.workloads.request import EngineChoice
from resources.broker import BrokerResource
from resources.completion import CompletionResource
from resources.gpu_worker import GpuWorkerResource
from resources.lake import LakeResource

DIM = 8


@dataclass
class MemoryBroker:
    """Keeps submissions; `finish` retires what is open. `away`: nobody answers. `off`: a broken balance."""

    submissions: dict[str, SubmissionState] = field(default_factory=dict)
    tasks: dict[str, pa.Table] = field(default_factory=dict)
    submits: int = 0
    away: bool = False
    off: int = 0

    def submit(
        self,
        submission: Submission,
        batches: Iterator[pa.RecordBatch],
        *,
        patience: Patience | None = None,
    ) -> SubmissionState:
        self.submits += 1
        table = pa.Table.from_batches(list(batches))
        if submission.submission_id not in self.submissions:
            self.tasks[submission.submission_id] = table
            self.submissions[submission.submission_id] = SubmissionState(
                submission_id=submission.submission_id,
                function=submission.function,
                engine=submission.engine,
                tasks=submission.tasks,
                tokens=submission.tokens,
                fingerprint=submission.fingerprint,
                closed=True,
                enqueued=submission.tasks,
                ready=submission.tasks,
                leased=0,
                computed=0,
                in_doubt=0,
                retired=0,
                dead=0,
                retired_tokens=0,
                output_tokens=0,
                first_task_id=1 << 40,
                batches=1,
            )
        return self.submissions[submission.submission_id]

    def submission(self, submission_id: str) -> SubmissionState | None:
        if self.away:
            raise BrokerUnavailable("no broker answers; run `fabric up`")
        return self.submissions.get(submission_id)

    def wait(
        self,
        submission_id: str,
        *,
        timeout_s: float | None = None,
        on_progress: Callable[[SubmissionState], None] | None = None,
    ) -> SubmissionState:
        self.finish()
        return self.submissions[submission_id]

    def finish(self) -> None:
        for key, state in self.submissions.items():
            self.submissions[key] = replace(
                state, ready=0, retired=state.tasks, retired_tokens=state.tokens
            )

    def status(self) -> BrokerStatus:
        return BrokerStatus(
            lanes=[],
            total=Ledger(enqueued=Amount(tasks=self.off)),
            counters={},
            journal={},
            submissions=len(self.submissions),
            consumers=[],
            hold=False,
            draining=False,
            fault="",
            progress={"tokens_total": 0, "tokens_done": 0, "tokens_per_s": 0.0, "eta_s": 0.0},
        )


BROKERS: dict[str, MemoryBroker] = {}


class MemoryBrokerResource(BrokerResource):
    name: str

    @contextmanager
    def client(self) -> Iterator[Any]:
        yield BROKERS[self.name]


class WordWorkerResource(GpuWorkerResource):
    def engine(self, name: str) -> EngineChoice:
        return EngineChoice(name, "1" * 64, WordTokeniser().vocab_size)

    def tokeniser(self, engine: str) -> WordTokeniser:
        return WordTokeniser()


class PlainLakeResource(LakeResource):
    """The real lake in a folder, without the note in Postgres."""

    def put(self, name: str, table: pa.Table) -> Artifact:
        return Lake.of(self.settings()).put(name, table)


class MadeUpCompletion(CompletionResource):
    """Rows as if they had landed: replies are "42", vectors are drawn from the row number."""

    name: str
    lose_rows: int = 0

    def landed(self, function: str, submission_id: str) -> pa.Table:
        tasks = BROKERS[self.name].tasks[submission_id]
        tasks = tasks.slice(0, tasks.num_rows - self.lose_rows)
        count = tasks.num_rows
        columns: dict[str, Any] = {
            "task_id": pa.array(range(1 << 40, (1 << 40) + count), pa.int64()),
            "source_row": tasks.column("source_row"),
            "finish_reason": ["stop"] * count,
            "prompt_tokens": pa.array(
                [len(row) for row in tasks.column("tokens").to_pylist()], pa.int32()
            ),
            "engine_fingerprint": ["f" * 64] * count,
            "t_start_us": pa.array(range(count), pa.int64()),
            "t_end_us": pa.array(range(1000, 1000 + count), pa.int64()),
        }
        if function == "generate":
            columns["text"] = ["42"] * count
            columns["output_tokens"] = pa.array([2] * count, pa.int32())
        else:
            columns["vector"] = self._vectors(tasks, function)
        return pa.table(columns)

    def _vectors(self, tasks: pa.Table, function: str) -> pa.Array:
        width = DIM * 6 if function == "hidden_states" else DIM
        generator = np.random.default_rng(0)
        drawn = generator.normal(size=(tasks.num_rows, width)).astype(np.float16)
        return pa.array(list(drawn), pa.list_(pa.float16()))
