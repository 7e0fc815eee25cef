"""The order in which one lane hands out its ready tasks: by prefix key over the whole backlog.

An enqueue leaves a sorted run. Runs are merged when they are small, never above RUN_MAX, and otherwise only
slice by slice as leases need them, so that the first lease is cheap at any backlog. The walk is cyclic: what
arrives behind the cursor waits for the next lap, so a stream of small keys starves nobody. What came back
from a lease goes to the front, in pieces that no lease crosses (see `Core` on halving).

Knows keys and sequence numbers only. Whether a task is still ready is the owner's business: the order may hold
tasks that no longer are.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Sequences = npt.NDArray[np.int64]

RUN_MAX = 1 << 17
SLICE = 1 << 16
NOTHING: Sequences = np.zeros(0, np.int64)
_KEY_MAX = (1 << 64) - 1


class _Run:
    """Sorted keys with their tasks; `at` is the first one not yet handed to a slice."""

    __slots__ = ("at", "keys", "tasks")

    def __init__(self, keys: Keys, tasks: Sequences) -> None:
        self.keys, self.tasks, self.at = keys, tasks, 0

    def __len__(self) -> int:
        return len(self.keys) - self.at


def _merged(runs: list[_Run]) -> _Run:
    keys = np.concatenate([run.keys[run.at :] for run in runs])
    tasks = np.concatenate([run.tasks[run.at :] for run in runs])
    order = np.argsort(keys, kind="stable")  # timsort underneath: sorted runs merge in linear time
    return _Run(keys[order], tasks[order])


class PrefixOrder:
    """add / add_front, then peek and advance."""

    __slots__ = ("_at", "_cursor", "_front", "_lap", "_next_lap", "_slice")

    def __init__(self) -> None:
        self._front: deque[Sequences] = deque()
        self._slice, self._at = NOTHING, 0
        self._lap: list[_Run] = []
        self._next_lap: list[_Run] = []
        self._cursor = 0

    def add(self, keys: Keys, tasks: Sequences) -> None:
        """A run sorted by key."""
        if self._cursor:
            behind = int(np.searchsorted(keys, np.uint64(self._cursor), side="left"))
            _push(self._next_lap, keys[:behind], tasks[:behind])
            _push(self._lap, keys[behind:], tasks[behind:])
        else:
            _push(self._lap, keys, tasks)

    def add_front(self, tasks: Sequences) -> None:
        """A piece to be handed out before anything else, by itself."""
        if len(tasks):
            self._front.append(tasks)

    def peek(self, limit: int) -> Sequences:
        """Up to `limit` next tasks; empty only if there are none at all."""
        if self._front:
            return self._front[0][:limit]
        if len(self._slice) - self._at < limit:
            self._extend_slice()
        return self._slice[self._at : self._at + limit]

    def advance(self, count: int) -> None:
        """Drop the first `count` of what `peek` showed."""
        if self._front:
            rest = self._front.popleft()[count:]
            if len(rest):
                self._front.appendleft(rest)
        else:
            self._at += count

    def tasks(self) -> Sequences:
        """Everything inside, in no order; for audits."""
        runs = [run.tasks[run.at :] for run in (*self._lap, *self._next_lap)]
        return np.concatenate([NOTHING, *self._front, self._slice[self._at :], *runs])

    def _extend_slice(self) -> None:
        """Cut the next SLICE or so tasks off the runs, in order over all of them.

        The cut is at the smallest of the keys that end each run's share, so no run gives more than its share
        and everything left has a key at or above the cut. Equal keys stay behind in the other runs, or one
        lane of short prompts (all keys 0) would be sorted at once.
        """
        left = self._slice[self._at :]
        if not self._lap:
            self._lap, self._next_lap, self._cursor = self._next_lap, [], 0
        if not self._lap:
            return
        share = max(256, SLICE // len(self._lap))
        ends = [
            (int(run.keys[min(run.at + share, len(run.keys)) - 1]), i)
            for i, run in enumerate(self._lap)
        ]
        cut, chosen = min(ends)
        parts = []
        for i, run in enumerate(self._lap):
            if i == chosen:
                end = min(run.at + share, len(run.keys))
            else:
                end = int(np.searchsorted(run.keys, np.uint64(cut), side="left"))
            if end > run.at:
                part = _Run(run.keys[run.at : end], run.tasks[run.at : end])
                parts.append(part)
                run.at = end
        self._lap = [run for run in self._lap if len(run)]
        self._cursor = min(cut, _KEY_MAX)
        self._slice, self._at = np.concatenate([left, _merged(parts).tasks]), 0


def _push(runs: list[_Run], keys: Keys, tasks: Sequences) -> None:
    """Append, then merge neighbours of like size: O(log n) small runs, each task moved O(log n) times."""
    if not len(keys):
        return
    runs.append(_Run(keys, tasks))
    while len(runs) > 1:
        last, before = len(runs[-1]), len(runs[-2])
        if before > 2 * last or before + last > RUN_MAX:
            return
        newest = runs.pop()
        runs[-1] = _merged([runs[-1], newest])
