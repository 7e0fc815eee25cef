"""Leased work in hand: what waits beside the engine, what is inside it, and how many tokens that is.

Only here does the worker know which ids it answers for, and what was asked of each. Whole leases wait in order and go to the engine
whole; a lease whose rows were lost to an expiry is cut down to the rows that are still ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa

from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.task import token_counts


class Asked(NamedTuple):
    """What the sampling of a lease asks for. output, vector: which of them a result holds (both, where the kind is none that
    is known here: one of them is then as good as the other); layers: how many lie end to end in its vector."""

    output: bool
    vector: bool
    layers: int


class Given(NamedTuple):
    """A task as its result is compared with it; prompt in tokens, new: at most so many more."""

    prompt: int
    new: int
    source_row: int
    attempts: int
    metadata: bytes
    asked: Asked


def asked_of(lease: Lease) -> Asked:
    kind, layers = lease.sampling.get("kind"), lease.sampling.get("layers")
    several = len(layers) if kind == "hidden" and isinstance(layers, list | tuple) else 1
    return Asked(kind not in ("hidden", "embed"), kind != "generate", max(several, 1))


class Supply:
    """Counts are exact at every moment; tokens are prompt tokens, kv_tokens prompt plus output cap."""

    def __init__(self) -> None:
        self._waiting: deque[Lease] = deque()
        self._given: dict[int, Given] = {}
        self._inside: set[int] = set()
        self.tokens = 0
        self.kv_tokens = 0
        self.inside_tokens = 0

    def __len__(self) -> int:
        return len(self._given)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return self.tokens - self.inside_tokens

    @property
    def inside(self) -> int:
        return len(self._inside)

    def is_inside(self, task: int) -> bool:
        return task in self._inside

    def task_ids(self) -> list[int]:
        return list(self._given)

    def given(self, tasks: Iterable[int]) -> list[Given]:
        """Of tasks in hand, in their order."""
        return [self._given[task] for task in tasks]

    def take(self, lease: Lease, *, finished: Collection[int] = ()) -> None:
        """Add a lease. Rows in hand already, or `finished` and not yet sent, are left out: their lease ran
        out and came back to us, and the result on its way answers for both."""
        ids = _ids(lease.tasks)
        fresh = [task not in self._given and task not in finished for task in ids]
        if not all(fresh):
            if not any(fresh):
                return
            lease = replace(lease, tasks=lease.tasks.filter(pa.array(fresh)))
        asked, rows = asked_of(lease), lease.tasks
        prompts = token_counts(rows)
        columns = (
            rows.column(name).to_pylist()
            for name in ("task_id", "max_new_tokens", "source_row", "attempts", "metadata")
        )
        for prompt, task, new, source_row, attempts, metadata in zip(
            prompts.tolist(), *columns, strict=True
        ):
            self._given[task] = Given(prompt, new, source_row, attempts, metadata, asked)
            self.tokens += prompt
            self.kv_tokens += prompt + new
        self._waiting.append(lease)

    def next_lease(self) -> Lease | None:
        """The lease to feed next; it stays until `fed`."""
        return self._waiting[0] if self._waiting else None

    def fed(self) -> None:
        """The engine took the lease that `next_lease` gave."""
        for task in _ids(self._waiting.popleft().tasks):
            self._inside.add(task)
            self.inside_tokens += self._given[task].prompt

    def finish(self, tasks: Iterable[int]) -> None:
        """These ids left our hands: finished, or handed back."""
        for task in tasks:
            given = self._given.pop(task)
            self.tokens -= given.prompt
            self.kv_tokens -= given.prompt + given.new
            if task in self._inside:
                self._inside.remove(task)
                self.inside_tokens -= given.prompt

    def drop_waiting(self) -> list[int]:
        """Forget everything that waits beside the engine; the ids are for the nack."""
        tasks = [task for lease in self._waiting for task in _ids(lease.tasks)]
        self._waiting.clear()
        self.finish(tasks)
        return tasks

    def keep(self, valid: Collection[int]) -> int:
        """After a reattach: drop waiting rows that are no longer ours. What is inside the engine goes on (it
        cannot be told to forget one row; the broker counts the late result as a duplicate). Returns dropped."""
        dropped = 0
        kept: deque[Lease] = deque()
        for lease in self._waiting:
            mine = [task in valid for task in _ids(lease.tasks)]
            lost = [task for task, ours in zip(_ids(lease.tasks), mine, strict=True) if not ours]
            self.finish(lost)
            dropped += len(lost)
            if not lost:
                kept.append(lease)
            elif any(mine):
                kept.append(replace(lease, tasks=lease.tasks.filter(pa.array(mine))))
        self._waiting = kept
        return dropped


def _ids(tasks: pa.RecordBatch) -> list[int]:
    ids: list[int] = tasks.column("task_id").to_pylist()
    return ids
