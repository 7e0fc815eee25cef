"""A broker's owner on the bench: tasks, completions, a clock to turn, a journal in memory that a crash can cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.owner import Owner, TaskUpload
from fabric_pipelines.broker.replies import SubmissionState
from fabric_pipelines.broker.state import BatchColumns
from fabric_pipelines.clock import Clock
from fabric_pipelines.ids import sequence_of
from fabric_pipelines.records.arrow import to_ipc
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.completion import completion_batch
from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.records.shape import KIND_OF_FUNCTION
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.records.task import task_batch
from fabric_pipelines.testing.memory_journal import MemoryJournal

ENGINE = "model@engine"
GENERATE: dict[str, Any] = {"kind": "generate", "temperature": 0.0, "top_k": 1, "seed": 0}
FUNCTION_OF: dict[Any, str] = {kind: name for name, kind in KIND_OF_FUNCTION.items()}
EMBED: dict[str, Any] = {"kind": "embed", "pooling": "mean", "normalise": True}
PROFILE = Profile(max_batch_size=8, max_num_tokens=512, kv_cache_tokens=0, window_tokens=64)
LARGE = Profile(max_batch_size=64, max_num_tokens=8192, kv_cache_tokens=0, window_tokens=64)
LANDED = Confirmation("postgres", {"cluster": "c", "xid": 1, "table": "fabric.generate"})
BURIED = Confirmation("dead_letter", {"cluster": "c", "xid": 2, "table": "fabric.dead_letters"})
PLENTY = Budget(sequences=1 << 20, tokens=1 << 40, kv_tokens=None)


@dataclass
class TurnedClock:
    """Time moves when the test says so."""

    seconds: float = 1000.0
    stepped_s: float = 0.0  # of the wall clock alone, as an operator or NTP may set it

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.seconds, lambda: round((self.seconds + self.stepped_s) * 1e6))


@dataclass
class Bench:
    """An owner over a memory journal, with a crash that keeps what was committed."""

    limits: Limits = field(default_factory=lambda: Limits(lease_s=30.0, attempts_max=3))
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    time: TurnedClock = field(default_factory=TurnedClock)
    high_water: int = 1 << 40

    def __post_init__(self) -> None:
        self.owner = self._open()

    def _open(self) -> Owner:
        return Owner(
            self.journal, self.limits, journal_high_water=self.high_water, clock=self.time.clock
        )

    def crash(self) -> None:
        self.journal = self.journal.crash()
        self.owner = self._open()

    def attach(
        self,
        name: str = "w",
        held: Sequence[int] = (),
        engine: str = ENGINE,
        profile: Profile = PROFILE,
    ) -> Any:
        return self.owner.attach(name, engine, "fingerprint", "cpu:0", profile, held)

    def upload(self, header: Submission, first_row: int, batch: pa.RecordBatch) -> SubmissionState:
        columns = BatchColumns.of(header, batch)
        return self.owner.enqueue(TaskUpload(header.submission_id, first_row, batch, columns))

    def submit(self, header: Submission, batches: Iterable[pa.RecordBatch]) -> SubmissionState:
        self.owner.open_submission(header)
        first = 0
        for batch in batches:
            self.upload(header, first, batch)
            first += batch.num_rows
        state = self.owner.close_submission(header.submission_id)
        self.owner.commit()
        return state

    def lease(self, name: str = "w", budget: Budget = PLENTY, call: int = -1) -> Lease | None:
        return self.owner.lease(name, budget, call)[0]

    def finish(self, lease: Lease, status: str = "ok", name: str = "w") -> Any:
        return self.report(ids_of(lease), status, name)

    def report(
        self, ids: Sequence[int], status: str = "ok", name: str = "w", attempts: int | None = None
    ) -> Any:
        """Of the attempt at hand, unless `attempts` names an earlier one."""
        index = self.owner.core.state.index
        at_hand = {
            at: int(index.attempts[sequence_of(at)]) for at in ids if sequence_of(at) < index.count
        }
        batch = completions(
            ids, status, [at_hand.get(at, 0) if attempts is None else attempts for at in ids]
        )
        reply = self.owner.computed(name, batch, ipc_of(batch))
        self.owner.commit()
        return reply

    def pull(self, rows: int = 1 << 20, name: str = "c") -> list[int]:
        batch = self.owner.pull(name, rows)
        return [] if batch is None else batch.column("task_id").to_pylist()

    def retire(self, ids: Sequence[int]) -> int:
        count = self.owner.settle(np.array(ids, np.int64), LANDED, dead=False)
        self.owner.commit()
        return count

    def bury(self, ids: Sequence[int]) -> int:
        count = self.owner.settle(np.array(ids, np.int64), BURIED, dead=True)
        self.owner.commit()
        return count

    def counts(self) -> dict[str, int]:
        total = self.owner.core.state.total().as_json()
        return {name: total[name] for name in STATES if total[name]}


STATES = ("ready", "leased", "computed", "in_doubt", "retired", "dead")


def submission_of(
    batches: Sequence[pa.RecordBatch],
    mark: int = 0,
    *,
    sampling: dict[str, Any] = GENERATE,
    tenant: str = "default",
    vocab_size: int = 1000,
    engine: str = ENGINE,
    function: str | None = None,
) -> Submission:
    """`function`: by default the one whose table fits the sampling."""
    if function is None:
        function = FUNCTION_OF.get(sampling.get("kind"), "generate")
    tasks, tokens, fingerprint = fingerprint_of(batches)
    return Submission(
        submission_id=f"{mark:064x}",
        function=function,
        engine=engine,
        sampling=sampling,
        vocab_size=vocab_size,
        tasks=tasks,
        tokens=tokens,
        fingerprint=fingerprint,
        tenant=tenant,
    )


def tasks_of(lengths: Iterable[int], *, seed: int = 0, new: int = 16) -> pa.RecordBatch:
    """One task batch of random prompts."""
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, 1000, length).tolist() for length in lengths]
    return task_batch(
        prompts, max_new_tokens=new, metadata=[b"m%d" % i for i in range(len(prompts))]
    )


def completions(
    ids: Sequence[int], status: str = "ok", attempts: Sequence[int] | None = None
) -> pa.RecordBatch:
    """`status`: "oversized" stands for a refusal of that kind."""
    count = len(ids)
    good, large = status == "ok", status == "oversized"
    return completion_batch(
        {
            "task_id": list(ids),
            "source_row": list(range(count)),
            "status": ["refused" if large else status] * count,
            "finish_reason": ["oversized" if large else "stop" if good else "error"] * count,
            "output": [[1, 2] if good else None] * count,
            "prompt_tokens": [1] * count,
            "padded_tokens": [0] * count,
            "error_code": [None if good else "EngineFailed"] * count,
            "error_text": [None if good else "said so"] * count,
            "attempts": [0] * count if attempts is None else list(attempts),
            "engine": [ENGINE] * count,
            "engine_fingerprint": ["fingerprint"] * count,
            "t_start_us": [0] * count,
            "t_end_us": [1] * count,
            "metadata": [b""] * count,
        }
    )


def ipc_of(batch: pa.RecordBatch) -> bytes:
    return to_ipc(batch)


def ids_of(lease: Lease) -> list[int]:
    ids: list[int] = lease.tasks.column("task_id").to_pylist()
    return ids
