"""Accounts: tasks, tokens and fingerprint per state, for every lane and in total, moved by each transition.

The ledger's law is asserted for the touched lanes at every move; `recount` derives the same figures from the
index itself, which sees a task that sits in a state nobody moved it to.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fabric_pipelines.ledger import Amount, Ledger, hash64

READY, LEASED, COMPUTED, IN_DOUBT, RETIRED, DEAD = range(6)
STATE_NAMES = ("ready", "leased", "computed", "in_doubt", "retired", "dead")
STATES = len(STATE_NAMES)

Groups = npt.NDArray[np.int32]


class Accounts:
    """Arrays [states + 1, groups]: row 0 is what was enqueued, row state + 1 what is in that state."""

    __slots__ = ("groups", "marks", "tasks", "tokens")

    def __init__(self) -> None:
        self.groups = 0
        self.tasks = np.zeros((STATES + 1, 16), np.int64)
        self.tokens = np.zeros((STATES + 1, 16), np.int64)
        self.marks = np.zeros((STATES + 1, 16), np.uint64)

    def grow(self, groups: int) -> None:
        capacity = self.tasks.shape[1]
        if groups > capacity:
            extra = ((0, 0), (0, max(capacity, groups - capacity)))
            self.tasks = np.pad(self.tasks, extra)
            self.tokens = np.pad(self.tokens, extra)
            self.marks = np.pad(self.marks, extra)
        self.groups = max(self.groups, groups)

    def enter(
        self, groups: Groups, task_ids: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
    ) -> None:
        """New tasks: enqueued and ready."""
        marks = hash64(task_ids)
        for row in (0, READY + 1):
            self._add(row, groups, tokens, marks)

    def move(
        self,
        groups: Groups,
        task_ids: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        source: int,
        target: int,
    ) -> None:
        marks = hash64(task_ids)
        self._subtract(source + 1, groups, tokens, marks)
        self._add(target + 1, groups, tokens, marks)

    def _add(
        self, row: int, groups: Groups, tokens: npt.NDArray[np.int64], marks: npt.NDArray[np.uint64]
    ) -> None:
        np.add.at(self.tasks[row], groups, 1)
        np.add.at(self.tokens[row], groups, tokens)
        np.add.at(self.marks[row], groups, marks)

    def _subtract(
        self, row: int, groups: Groups, tokens: npt.NDArray[np.int64], marks: npt.NDArray[np.uint64]
    ) -> None:
        np.subtract.at(self.tasks[row], groups, 1)
        np.subtract.at(self.tokens[row], groups, tokens)
        np.subtract.at(self.marks[row], groups, marks)

    def unbalanced(self, groups: Groups | None = None) -> npt.NDArray[np.int64]:
        """Groups (of those given, else of all) whose account does not add up."""
        chosen = np.arange(self.groups) if groups is None else np.unique(groups).astype(np.int64)
        wrong = np.zeros(len(chosen), np.bool_)
        for figures in (self.tasks, self.tokens, self.marks):
            part = figures[:, chosen]
            wrong |= part[0] != part[1:].sum(axis=0)
        return chosen[wrong]

    def ledger(self, group: int) -> Ledger:
        rows = (
            Amount(int(self.tasks[r, group]), int(self.tokens[r, group]), int(self.marks[r, group]))
            for r in range(STATES + 1)
        )
        return Ledger(*rows)

    def total(self) -> Ledger:
        live = slice(0, self.groups)
        rows = (
            Amount(
                int(self.tasks[r, live].sum()),
                int(self.tokens[r, live].sum()),
                int(self.marks[r, live].sum(dtype=np.uint64)),
            )
            for r in range(STATES + 1)
        )
        return Ledger(*rows)

    def in_state(self, state: int) -> int:
        return int(self.tasks[state + 1, : self.groups].sum())

    def differences(self, other: Accounts, names: list[str]) -> list[str]:
        found = []
        for group in range(max(self.groups, other.groups)):
            mine, theirs = self.ledger(group), other.ledger(group)
            found += [
                f"lane {names[group]}: {field} is {getattr(mine, field)}, the log gives "
                f"{getattr(theirs, field)}"
                for field in Ledger.__dataclass_fields__
                if getattr(mine, field) != getattr(theirs, field)
            ]
        return found


def recount(
    states: npt.NDArray[np.uint8],
    groups: Groups,
    tokens: npt.NDArray[np.int64],
    task_ids: npt.NDArray[np.int64],
    count: int,
) -> Accounts:
    """The same accounts, from the state of every task."""
    fresh = Accounts()
    fresh.grow(count)
    marks = hash64(task_ids)
    for state in range(STATES):
        chosen = np.flatnonzero(states == state)
        for row in (0, state + 1):
            fresh._add(row, groups[chosen], tokens[chosen], marks[chosen])
    return fresh
