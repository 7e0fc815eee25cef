"""The queue of computed tasks that completion sessions pull, oldest first.

Each session has its own place in it, so that a completion process that died is replaced at once and nothing
waits for a timeout; sinks are keyed by task id and the broker retires a task once, so two pulls of one row cost
time and change nothing.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.accounts import COMPUTED

Sequences = npt.NDArray[np.int64]
NOTHING: Sequences = np.zeros(0, np.int64)


class ComputedQueue:
    """Batches of tasks at positions that only grow; `_places` holds the next position of each session."""

    __slots__ = ("_batches", "_first", "_places")

    def __init__(self) -> None:
        self._batches: deque[Sequences] = deque()
        self._first = 0
        self._places: dict[str, int] = {}

    def append(self, tasks: Sequences) -> None:
        if len(tasks):
            self._batches.append(tasks)

    def pull(self, session: str, rows: int, states: npt.NDArray[np.uint8]) -> Sequences:
        """Up to `rows` tasks that are still computed and that this session has not pulled yet."""
        self._forget_settled(states)
        at = max(self._places.get(session, 0), self._first) - self._first
        parts, wanted = [NOTHING], rows
        while wanted and at < len(self._batches):
            if len(self._batches[at]) > wanted:
                self._split(at, wanted)
            batch = self._batches[at]
            waiting = batch[states[batch] == COMPUTED]
            parts.append(waiting)
            wanted -= len(waiting)
            at += 1
        self._places[session] = self._first + at
        return np.concatenate(parts)

    def forget(self, tasks: Sequences) -> None:
        """These are no longer computed, and may come again with another outcome: once, not from two places."""
        if len(tasks):
            self._batches = deque(batch[~np.isin(batch, tasks)] for batch in self._batches)

    def release(self, session: str) -> None:
        """The session starts again at the oldest."""
        self._places.pop(session, None)

    def _split(self, at: int, rows: int) -> None:
        """Cut a batch in two, so that a place is always between whole batches."""
        batch = self._batches[at]
        self._batches[at] = batch[:rows]
        self._batches.insert(at + 1, batch[rows:])
        for session, place in self._places.items():
            if place > self._first + at:
                self._places[session] = place + 1

    def _forget_settled(self, states: npt.NDArray[np.uint8]) -> None:
        while self._batches and not (states[self._batches[0]] == COMPUTED).any():
            self._batches.popleft()
            self._first += 1
