"""A stand-in engine: follows a script, computes nothing, and its results can be predicted from the prompt.

`expected_output` and `expected_vector` are the truth that tests compare with. Time is the caller's: with
`step_s` a poll really waits, without it a poll is immediate.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.clock import SYSTEM_CLOCK, Clock
from fabric_pipelines.errors import EngineBusy, EngineFailed
from fabric_pipelines.records.completion import completion_batch
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.manifest import EngineManifest
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.worker.engines.agreement import Told
from fabric_pipelines.worker.engines.door import Capabilities, EngineStats

WEIGHTS_SHA256 = "0" * 64
SAMPLING_KEYS = {
    "kind", "temperature", "top_k", "top_p", "seed", "repetition_penalty", "ignore_eos",
    "layers", "pooling", "normalise",
}  # fmt: skip


def expected_output(tokens: Sequence[int], max_new_tokens: int, vocab_size: int) -> list[int]:
    """Every third prompt (by its sum) stops at half of its cap."""
    total = sum(tokens)
    count = max_new_tokens if total % 3 else max(max_new_tokens // 2, 1)
    return [(total * 31 + place) % vocab_size for place in range(count)]


def expected_vector(tokens: Sequence[int], dim: int) -> npt.NDArray[np.float16]:
    """Unit vector [dim] that depends on the prompt only."""
    vector = np.cos(np.arange(1, dim + 1) * (1 + sum(tokens) % 97))
    unit: npt.NDArray[np.float16] = (vector / np.linalg.norm(vector)).astype(np.float16)
    return unit


@dataclass(slots=True)
class Script:
    """What goes wrong, and when. `fail_at_poll`: EngineFailed from that poll on (1 = the first);
    `busy_submits`: so many submits are refused with EngineBusy; `failed_rows`, `refused_rows`: source rows
    that come back with that status; `poison_rows`: source rows that bring the engine down; `step_s`: wall seconds of one
    step; `hold_after`: after so many steps nothing ends until the file `hold_until` exists, so that a test can act in
    mid-run however quick or slow the machine is."""

    fail_at_poll: int | None = None
    busy_submits: int = 0
    failed_rows: frozenset[int] = frozenset()
    refused_rows: frozenset[int] = frozenset()
    poison_rows: frozenset[int] = frozenset()
    step_s: float = 0.0
    hold_after: int | None = None
    hold_until: str = ""


@dataclass(slots=True)
class _Task:
    row: dict[str, Any]
    lease: Lease


@dataclass
class ScriptedEngine:
    """continuous: each poll finishes `finish_per_poll` tasks out of max_batch_size running; otherwise each
    poll finishes the oldest submitted lease whole. `seen` lists every task id in order of submission."""

    name: str = "scripted@scripted"
    kind: str = "generate"
    continuous: bool = False
    finish_per_poll: int = 1
    dim: int = 8
    vocab_size: int = 49_152
    profile: Profile = field(default_factory=lambda: Profile(4, 64, 256, 64))
    max_input_len: int = 512
    script: Script = field(default_factory=Script)
    clock: Clock = SYSTEM_CLOCK
    stats: EngineStats = field(default_factory=EngineStats)
    seen: list[int] = field(default_factory=list)
    polls: int = 0
    steps: int = 0
    opened: bool = False

    def __post_init__(self) -> None:
        self.manifest = EngineManifest(
            version="scripted 1",
            architecture="Scripted",
            weight_quantisation="none",
            kv_quantisation="none" if self.kind == "generate" else "single_pass",
            world_size=1,
            max_batch_size=self.profile.max_batch_size,
            max_num_tokens=self.profile.max_num_tokens,
            max_input_len=self.max_input_len,
            max_seq_len=2 * self.max_input_len,
        )
        self.fingerprint = self.manifest.fingerprint(WEIGHTS_SHA256)
        self.capabilities = Capabilities(
            kinds=frozenset({self.kind}),
            continuous=self.continuous,
            packed=True,
            device="cpu",
            vocab_size=self.vocab_size,
        )
        self._queue: deque[_Task] = deque()

    def open(self) -> None:
        self.opened = True

    def introspect(self) -> Mapping[str, Told]:
        return {name: Told(value, "the script") for name, value in self.manifest.as_json().items()}

    def close(self) -> None:
        self.opened = False

    def submit(self, lease: Lease) -> None:
        assert self.opened, "submit before open"
        if self.script.busy_submits > 0:
            self.script.busy_submits -= 1
            raise EngineBusy("scripted engine takes no more")
        for row in lease.tasks.to_pylist():
            self._queue.append(_Task(row, lease))
            self.seen.append(row["task_id"])

    def unfinished(self) -> list[int]:
        return [task.row["task_id"] for task in self._queue]

    def withdraw_unstarted(self) -> list[int]:
        keep = self._running_count()
        taken = [task.row["task_id"] for task in list(self._queue)[keep:]]
        self._queue = deque(list(self._queue)[:keep])
        return taken

    def poll(self, timeout_s: float) -> list[pa.RecordBatch]:
        self.polls += 1
        if self.script.fail_at_poll is not None and self.polls >= self.script.fail_at_poll:
            raise EngineFailed("scripted engine failed: device lost")
        if not self._queue:
            return []
        if self._holds():
            time.sleep(min(timeout_s, 0.01))
            return []
        self.steps += 1
        started_us = self.clock.wall_us()
        if self.script.step_s:
            time.sleep(self.script.step_s)
            self.stats.busy_s += self.script.step_s
        count = self.finish_per_poll if self.continuous else self._running_count()
        running = [task.row["source_row"] for task in list(self._queue)[: self._running_count()]]
        if self.script.poison_rows.intersection(running):
            raise EngineFailed("scripted engine failed: poison in its batch")
        done = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        return [self._complete(done, started_us)]

    def _holds(self) -> bool:
        after = self.script.hold_after
        return (
            after is not None and self.steps >= after and not Path(self.script.hold_until).exists()
        )

    def _running_count(self) -> int:
        if self.continuous:
            return min(self.profile.max_batch_size, len(self._queue))
        head = self._queue[0].lease if self._queue else None
        return sum(task.lease is head for task in self._queue)

    def _complete(self, done: list[_Task], started_us: int) -> pa.RecordBatch:
        outcomes = [self._outcome(task) for task in done]
        self.stats.tasks += len(done)
        for task, (_, _, output, _, _) in zip(done, outcomes, strict=True):
            self.stats.offered_tokens += len(task.row["tokens"])
            self.stats.computed_tokens += len(task.row["tokens"])
            self.stats.generated_tokens += len(output or ())
        count = len(done)
        return completion_batch(
            {
                "task_id": [task.row["task_id"] for task in done],
                "source_row": [task.row["source_row"] for task in done],
                "status": [status for status, _, _, _, _ in outcomes],
                "finish_reason": [reason for _, reason, _, _, _ in outcomes],
                "output": [output for _, _, output, _, _ in outcomes],
                "vector": [vector for _, _, _, vector, _ in outcomes],
                "prompt_tokens": [len(task.row["tokens"]) for task in done],
                "padded_tokens": [0] * count,
                "error_code": ["scripted" if text else None for _, _, _, _, text in outcomes],
                "error_text": [text for _, _, _, _, text in outcomes],
                "attempts": [task.row["attempts"] for task in done],
                "engine": [self.name] * count,
                "engine_fingerprint": [self.fingerprint] * count,
                "t_start_us": [started_us] * count,
                "t_end_us": [self.clock.wall_us()] * count,
                "metadata": [task.row["metadata"] for task in done],
            }
        )

    def _outcome(
        self, task: _Task
    ) -> tuple[str, str, list[int] | None, npt.NDArray[np.float16] | None, str | None]:
        """(status, finish reason, output, vector, error text) of one task."""
        row, tokens, cap = task.row, task.row["tokens"], task.row["max_new_tokens"]
        if len(tokens) > self.max_input_len:
            why = f"{len(tokens)} tokens are above max_input_len {self.max_input_len}"
            return "refused", "oversized", None, None, why
        if row["source_row"] in self.script.refused_rows:
            return "refused", "oversized", None, None, "as the script says"
        if row["source_row"] in self.script.failed_rows:
            return "failed", "error", None, None, "as the script says"
        if max(tokens) >= self.vocab_size:
            return "refused", "error", None, None, f"token {max(tokens)} is beyond the vocabulary"
        if unknown := set(task.lease.sampling) - SAMPLING_KEYS:
            return "refused", "error", None, None, f"{sorted(unknown)} are unknown fields"
        if self.kind != "generate":
            return "ok", "single_pass", None, expected_vector(tokens, self.dim), None
        output = expected_output(tokens, cap, self.vocab_size)
        return "ok", "length" if len(output) == cap else "stop", output, None, None
