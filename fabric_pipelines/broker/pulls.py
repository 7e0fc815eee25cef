"""The queue of computed tasks that completion sessions pull, oldest first.

Each session has its own place in it, so that a completion process that died is replaced at once and nothing
waits for a timeout; sinks are keyed by task id and the broker retires a task once, so two pulls of one row cost
time and change nothing. A session may name functions whose rows it has no use for now: these are passed over, kept by
number, and come first once it names them no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.accounts import COMPUTED
from fabric_pipelines.broker.state import State
from fabric_pipelines.ids import SEQUENCE_BITS

Sequences = npt.NDArray[np.int64]
NOTHING: Sequences = np.zeros(0, np.int64)
LOOKED_ROWS_MAX = 1 << 18
"""Of one pull, however few of them are wanted: a few ms of the owner's time."""
LOOSE_BATCHES = 4096
"""More than at the last joining, before they are joined again: the settled ones behind a function that waits must not pile up."""


class ComputedQueue:
    """Batches of tasks at positions that only grow. `_places` holds the next position of each session, `_passed` what
    lies before it and was passed over, by session and function."""

    __slots__ = ("_batches", "_first", "_functions", "_joined", "_numbers", "_passed", "_places", "_state")  # fmt: skip

    def __init__(self, state: State) -> None:
        self._state = state
        self._batches: deque[Sequences] = deque()
        self._first = self._joined = 0
        self._places: dict[str, int] = {}
        self._passed: dict[str, dict[int, deque[Sequences]]] = {}
        self._functions: dict[str, int] = {}
        self._numbers = NOTHING  # of its function, by submission

    def append(self, tasks: Sequences) -> None:
        if len(tasks):
            self._batches.append(tasks)

    def pull(self, session: str, rows: int, skip: Collection[str] = ()) -> Sequences:
        """Up to `rows` tasks that are still computed, of no function in `skip`, and that this session has not pulled yet.
        Fewer, or none, where LOOKED_ROWS_MAX were looked at: the next pull goes on there."""
        self._forget_settled()
        self._number_functions()
        unwanted = [self._functions[name] for name in skip if name in self._functions]
        parts = self._passed_before(session, rows, unwanted)
        wanted, looked = rows - sum(map(len, parts)), 0
        at = max(self._places.get(session, 0), self._first) - self._first
        while wanted and at < len(self._batches) and looked < LOOKED_ROWS_MAX:
            if len(self._batches[at]) > wanted:
                self._split(at, wanted)
            waiting = self._computed(self._batches[at])
            if unwanted:
                looked += len(self._batches[at])
                waiting = self._pass_over(session, waiting, unwanted)
            parts.append(waiting)
            wanted -= len(parts[-1])
            at += 1
        self._places[session] = self._first + at
        return np.concatenate([NOTHING, *parts])

    def forget(self, tasks: Sequences) -> None:
        """These are no longer computed, and may come again with another outcome: once, not from two places."""
        if len(tasks):
            self._batches = deque(batch[~np.isin(batch, tasks)] for batch in self._batches)
            for passed in self._passed.values():
                for number, batches in passed.items():
                    passed[number] = deque(batch[~np.isin(batch, tasks)] for batch in batches)

    def release(self, session: str, task_ids: Sequences | None = None) -> None:
        """The session starts again at the oldest; or is given once more those of `task_ids` that it pulled, before what
        it has not seen yet."""
        if task_ids is None:
            self._places.pop(session, None)
            self._passed.pop(session, None)
            return
        tasks = task_ids - np.int64(self._state.incarnation << SEQUENCE_BITS)
        tasks = tasks[(tasks >= 0) & (tasks < self._state.index.count)]
        self._number_functions()
        numbers = self._functions_of(tasks)
        for number in np.unique(numbers).tolist():
            self._passed_of(session, number).appendleft(tasks[numbers == number])

    def _passed_before(self, session: str, rows: int, unwanted: list[int]) -> list[Sequences]:
        """Up to `rows` of what this session passed over and wants now."""
        parts: list[Sequences] = []
        passed = self._passed.get(session, {})
        for number in [number for number in passed if number not in unwanted]:
            batches = passed[number]
            while batches and rows:
                waiting = self._computed(batches.popleft())
                if len(waiting) > rows:
                    batches.appendleft(waiting[rows:])
                parts.append(waiting[:rows])
                rows -= len(parts[-1])
            if not batches:
                del passed[number]
        return parts

    def _pass_over(self, session: str, tasks: Sequences, unwanted: list[int]) -> Sequences:
        """Those of `tasks` that are wanted; the others are kept for later."""
        numbers = self._functions_of(tasks)
        passed = np.isin(numbers, unwanted)
        for number in np.unique(numbers[passed]).tolist():
            self._passed_of(session, number).append(tasks[numbers == number])
        return tasks[~passed]

    def _passed_of(self, session: str, number: int) -> deque[Sequences]:
        return self._passed.setdefault(session, {}).setdefault(number, deque())

    def _functions_of(self, tasks: Sequences) -> Sequences:
        numbers: Sequences = self._numbers[self._state.index.submission[tasks]]
        return numbers

    def _number_functions(self) -> None:
        records = self._state.submissions[len(self._numbers) :]
        if records:
            known = self._functions
            new = [known.setdefault(each.header.function, len(known)) for each in records]
            self._numbers = np.append(self._numbers, new)

    def _computed(self, tasks: Sequences) -> Sequences:
        waiting: Sequences = tasks[self._state.index.state[tasks] == COMPUTED]
        return waiting

    def _split(self, at: int, rows: int) -> None:
        """Cut a batch in two, so that a place is always between whole batches."""
        batch = self._batches[at]
        self._batches[at] = batch[:rows]
        self._batches.insert(at + 1, batch[rows:])
        for session, place in self._places.items():
            if place > self._first + at:
                self._places[session] = place + 1

    def _forget_settled(self) -> None:
        while self._batches and not len(self._computed(self._batches[0])):
            self._batches.popleft()
            self._first += 1
        if len(self._batches) > self._joined + LOOSE_BATCHES:
            self._join()

    def _join(self) -> None:
        """One batch between two places, without what is settled."""
        ends = {place - self._first for place in self._places.values()}
        cuts = sorted(
            {0, len(self._batches), *(end for end in ends if 0 < end < len(self._batches))}
        )
        every = list(self._batches)
        joined = [self._computed(np.concatenate(every[begin:end])) for begin, end in pairwise(cuts)]
        moved = {cut: at for at, cut in enumerate(cuts)}
        self._places = {
            session: self._first + moved[min(max(place - self._first, 0), len(every))]
            for session, place in self._places.items()
        }
        self._batches, self._joined = deque(joined), len(joined)
