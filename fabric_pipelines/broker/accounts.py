"""Accounts: tasks, tokens and fingerprint per state, for every lane and in total, moved by each transition.

The ledger's law is asserted for the touched lanes at every move; `recount.py` derives the same figures from the
index itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.ledger import MASK64, Amount, Ledger, hash64

READY, LEASED, COMPUTED, IN_DOUBT, RETIRED, DEAD = range(6)
STATE_NAMES = ("ready", "leased", "computed", "in_doubt", "retired", "dead")
STATES = len(STATE_NAMES)

Groups = npt.NDArray[np.int32]
Sums = (
    tuple[int, int, int, int]
    | tuple[Groups, npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint64]]
)


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
        self, groups: Groups, task_ids: npt.NDArray[np.int64], tokens: npt.NDArray[Any]
    ) -> None:
        """New tasks: enqueued and ready."""
        sums = _sums(groups, tokens, hash64(task_ids))
        for row in (0, READY + 1):
            self._add(row, sums)

    def move(
        self,
        groups: Groups,
        task_ids: npt.NDArray[np.int64],
        tokens: npt.NDArray[Any],
        source: int,
        target: int,
    ) -> Sums:
        """Returns what was moved: the groups touched, then tasks, tokens and marks of each; plain numbers if it
        was one group."""
        sums = _sums(groups, tokens, hash64(task_ids))
        self._subtract(source + 1, sums)
        self._add(target + 1, sums)
        return sums

    def transfer(
        self,
        groups: Groups,
        task_ids: npt.NDArray[np.int64],
        tokens: npt.NDArray[Any],
        state: int,
        target: int,
    ) -> None:
        """Tasks in `state` belong to the group `target` from now on, as if they had been enqueued there."""
        marks = hash64(task_ids)
        out = _sums(groups, tokens, marks)
        into = _sums(np.full(len(groups), target, np.int32), tokens, marks)
        for row in (0, state + 1):
            self._subtract(row, out)
            self._add(row, into)

    def _add(self, row: int, sums: Sums) -> None:
        at, tasks, tokens, marks = sums
        self.tasks[row, at] += tasks
        self.tokens[row, at] += tokens
        if isinstance(at, int):
            self.marks[row, at] = (int(self.marks[row, at]) + int(marks)) & MASK64
        else:
            self.marks[row, at] += marks

    def _subtract(self, row: int, sums: Sums) -> None:
        at, tasks, tokens, marks = sums
        self.tasks[row, at] -= tasks
        self.tokens[row, at] -= tokens
        if isinstance(at, int):
            self.marks[row, at] = (int(self.marks[row, at]) - int(marks)) & MASK64
        else:
            self.marks[row, at] -= marks

    def unbalanced(self, groups: Groups | int | None = None) -> list[int]:
        """Groups (of those given, else of all) whose account does not add up."""
        if isinstance(groups, int):
            return [groups] if self._is_unbalanced(groups) else []
        chosen = np.arange(self.groups) if groups is None else distinct(groups).astype(np.int64)
        wrong = np.zeros(len(chosen), np.bool_)
        for figures in (self.tasks, self.tokens, self.marks):
            part = figures[:, chosen]
            wrong |= part[0] != part[1:].sum(axis=0)
        found: list[int] = chosen[wrong].tolist()
        return found

    def _is_unbalanced(self, group: int) -> bool:
        """As `unbalanced` for one group, in plain numbers, which are a sixth of the arrays' price."""
        figures = (self.tasks, self.tokens, self.marks)
        columns = [each[:, group].tolist() for each in figures]
        return any((column[0] - sum(column[1:])) & MASK64 for column in columns)

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


def distinct(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """np.unique, which takes 30 us of a lease's 150, with a short way for the usual case of a single value."""
    return np.unique(values) if only(values) is None else values[:1]


def only(values: npt.NDArray[Any]) -> int | None:
    """The one value that all of these are; None if they differ, or there are none."""
    if not len(values):
        return None
    first = values[0]
    # half the price of .all(), whose wrapper is Python
    return int(first) if np.count_nonzero(values == first) == len(values) else None


def has_repeats(values: npt.NDArray[np.int64]) -> bool:
    """Whether a value occurs twice: one sort, a third of what np.unique takes."""
    ordered = values.copy()
    ordered.sort()
    return bool(np.count_nonzero(ordered[1:] == ordered[:-1]))


def add_counts(target: npt.NDArray[np.int64], at: npt.NDArray[np.int32], change: int) -> None:
    """target[i] += change for each i of `at`, repeats counted."""
    if (one := only(at)) is not None:
        target[one] += change * len(at)
    else:
        np.add.at(target, at, change)


def add_sums(
    target: npt.NDArray[np.int64], at: npt.NDArray[np.int32], amounts: npt.NDArray[np.int32]
) -> None:
    """target[at[i]] += amounts[i], repeats added up."""
    if (one := only(at)) is not None:
        target[one] += int(amounts.sum(dtype=np.int64))
    else:
        np.add.at(target, at, amounts.astype(np.int64))


def _sums(groups: Groups, tokens: npt.NDArray[Any], marks: npt.NDArray[np.uint64]) -> Sums:
    """(groups that occur, then tasks, tokens and marks of each). A lease lies in one lane, so that one sum each
    will mostly do, in plain numbers; the general way takes ten times as long."""
    if (one := only(groups)) is not None:
        return one, len(groups), int(tokens.sum(dtype=np.int64)), int(marks.sum())
    found, inverse = np.unique(groups, return_inverse=True)
    tasks = np.bincount(inverse, minlength=len(found)).astype(np.int64)
    token_sums, mark_sums = np.zeros(len(found), np.int64), np.zeros(len(found), np.uint64)
    np.add.at(token_sums, inverse, tokens.astype(np.int64))  # of its own type, 40 times as fast
    np.add.at(mark_sums, inverse, marks)
    return found, tasks, token_sums, mark_sums
