"""Tasks and outcomes inside an engine: a lease taken apart, completions put together.

The engine thinks in tasks, the wire in columns; this is the one place where they meet. Vectors leave as
fp16, and one that fp16 cannot hold is a failure of its task, with the reason, never an infinity in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.records.completion import clip_error_text, completion_batch
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.manifest import EngineManifest
from fabric_pipelines.records.shape import sampling_digest
from fabric_pipelines.worker.engines.faults import told

EMPTY = "its prompt is empty: a task has at least one token"
FP16_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One leased task. group: digest of its sampling, tasks of one group may share a step."""

    task_id: int
    tokens: npt.NDArray[np.uint32]
    max_new_tokens: int
    source_row: int
    metadata: bytes
    attempts: int
    sampling: Mapping[str, Any]
    group: str

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Outcome:
    """What became of one task; exactly one of output and vector when status is "ok"."""

    task: Task
    status: str
    finish_reason: str
    output: npt.NDArray[np.uint32] | None = None
    vector: npt.NDArray[np.float16] | None = None
    padded_tokens: int = 0
    error_code: str | None = None
    error_text: str | None = None
    started_us: int = 0
    ended_us: int = 0


def tasks_of(lease: Lease) -> list[Task]:
    batch = lease.tasks
    column = batch.column("tokens")
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy()
    group = sampling_digest(lease.sampling)
    rest = zip(
        *(
            batch.column(name).to_pylist()
            for name in ("task_id", "max_new_tokens", "source_row", "metadata", "attempts")
        ),
        strict=True,
    )
    return [
        Task(task_id, values[start:end], new, row, metadata, attempts, lease.sampling, group)
        for (task_id, new, row, metadata, attempts), start, end in zip(
            rest, offsets[:-1], offsets[1:], strict=True
        )
    ]


def refused(task: Task, finish_reason: str, code: str, text: str) -> Outcome:
    return Outcome(task, "refused", finish_reason, error_code=code, error_text=text)


def failed(task: Task, code: str, text: str) -> Outcome:
    return Outcome(task, "failed", "error", error_code=code, error_text=text)


def oversized(task: Task, limits: EngineManifest, engine: str) -> Outcome | None:
    """The refusal of a task that is longer than the engine takes, or None."""
    total = task.length + task.max_new_tokens
    if task.length > limits.max_input_len:
        why = f"its prompt of {task.length} tokens is above max_input_len {limits.max_input_len}"
    elif total > limits.max_seq_len:
        why = f"its {total} tokens with output are above max_seq_len {limits.max_seq_len}"
    else:
        return None
    return refused(task, "oversized", "Oversized", f"{engine} refuses the task: {why}")


def refusal_of(
    task: Task, limits: EngineManifest, engine: str, judge: Callable[[Task], str | None]
) -> Outcome | None:
    """Why the engine does not take `task`: its length, or what `judge` says of its sampling; None where it is taken."""
    if task.length == 0:
        return refused(task, "error", "UsageError", EMPTY)
    too_long = oversized(task, limits, engine)
    if too_long is not None:
        return too_long
    try:
        objection = judge(task)
    except Exception as fault:  # noqa: BLE001 - whatever a field makes of the judgement, it is this task's
        objection = f"it cannot be judged ({told(fault)})"
    return None if objection is None else refused(task, "error", "UsageError", objection)


def with_vector(task: Task, vector: npt.NDArray[np.float32], padded_tokens: int) -> Outcome:
    """A single-pass result, or the failure of that task when fp16 cannot hold its vector."""
    largest = float(np.abs(vector).max())
    if not largest <= FP16_MAX:  # also true for NaN
        return failed(
            task,
            "VectorOverflow",
            f"the vector holds {largest}, beyond the {FP16_MAX:.0f} that fp16 can hold",
        )
    half = vector.astype(np.float16)
    return Outcome(task, "ok", "single_pass", vector=half, padded_tokens=padded_tokens)


@dataclass(slots=True)
class Outbox:
    """Outcomes waiting to be fetched by the loop."""

    engine: str
    fingerprint: str
    outcomes: list[Outcome] = field(default_factory=list)

    def take(self) -> list[pa.RecordBatch]:
        """Everything as one completion batch, or nothing."""
        outcomes, self.outcomes = self.outcomes, []
        if not outcomes:
            return []
        tasks = [outcome.task for outcome in outcomes]
        count = len(outcomes)
        return [
            completion_batch(
                {
                    "task_id": [task.task_id for task in tasks],
                    "source_row": [task.source_row for task in tasks],
                    "status": [outcome.status for outcome in outcomes],
                    "finish_reason": [outcome.finish_reason for outcome in outcomes],
                    "output": _lists([outcome.output for outcome in outcomes], np.uint32),
                    "vector": _lists([outcome.vector for outcome in outcomes], np.float16),
                    "prompt_tokens": [task.length for task in tasks],
                    "padded_tokens": [outcome.padded_tokens for outcome in outcomes],
                    "error_code": [outcome.error_code for outcome in outcomes],
                    "error_text": [
                        None if outcome.error_text is None else clip_error_text(outcome.error_text)
                        for outcome in outcomes
                    ],
                    "attempts": [task.attempts for task in tasks],
                    "engine": [self.engine] * count,
                    "engine_fingerprint": [self.fingerprint] * count,
                    "t_start_us": [outcome.started_us for outcome in outcomes],
                    "t_end_us": [outcome.ended_us for outcome in outcomes],
                    "metadata": [task.metadata for task in tasks],
                }
            )
        ]


def _lists(rows: list[npt.NDArray[Any] | None], dtype: type[np.generic]) -> pa.Array:
    """list<dtype> column; None rows are null."""
    lengths = [0 if row is None else len(row) for row in rows]
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    offsets = pa.array(ends, mask=np.array([*(row is None for row in rows), False]))
    present = [row for row in rows if row is not None]
    values = np.concatenate(present) if present else np.empty(0, dtype)
    return pa.ListArray.from_arrays(offsets, pa.array(values.astype(dtype, copy=False)))
