"""Leased work in hand: what waits beside the engine, what is inside it, and how many tokens that is.

Only here does the worker know which ids it answers for. Whole leases wait in order and go to the engine
whole; a lease whose rows were lost to an expiry is cut down to the rows that are still ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import replace

import pyarrow as pa

from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.task import token_counts


class Supply:
    """Counts are exact at every moment; tokens are prompt tokens, kv_tokens prompt plus output cap."""

    def __init__(self) -> None:
        self._waiting: deque[Lease] = deque()
        self._sizes: dict[int, tuple[int, int]] = {}
        self._inside: set[int] = set()
        self.tokens = 0
        self.kv_tokens = 0
        self.inside_tokens = 0

    def __len__(self) -> int:
        return len(self._sizes)

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
        return list(self._sizes)

    def take(self, lease: Lease, *, finished: Collection[int] = ()) -> None:
        """Add a lease. Rows in hand already, or `finished` and not yet sent, are left out: their lease ran
        out and came back to us, and the result on its way answers for both."""
        ids = _ids(lease.tasks)
        fresh = [task not in self._sizes and task not in finished for task in ids]
        if not all(fresh):
            if not any(fresh):
                return
            lease = replace(lease, tasks=lease.tasks.filter(pa.array(fresh)))
        prompts = token_counts(lease.tasks)
        totals = prompts + lease.tasks.column("max_new_tokens").to_numpy()
        for task, prompt, total in zip(
            _ids(lease.tasks), prompts.tolist(), totals.tolist(), strict=True
        ):
            self._sizes[task] = (prompt, total)
            self.tokens += prompt
            self.kv_tokens += total
        self._waiting.append(lease)

    def next_lease(self) -> Lease | None:
        """The lease to feed next; it stays until `fed`."""
        return self._waiting[0] if self._waiting else None

    def fed(self) -> None:
        """The engine took the lease that `next_lease` gave."""
        for task in _ids(self._waiting.popleft().tasks):
            self._inside.add(task)
            self.inside_tokens += self._sizes[task][0]

    def finish(self, tasks: Iterable[int]) -> None:
        """These ids left our hands: finished, or handed back."""
        for task in tasks:
            prompt, total = self._sizes.pop(task)
            self.tokens -= prompt
            self.kv_tokens -= total
            if task in self._inside:
                self._inside.remove(task)
                self.inside_tokens -= prompt

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
