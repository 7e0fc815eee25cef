"""Accounting that can see a loss: every quantity in tasks, in tokens and as a multiset fingerprint.

Counts alone cannot see one task lost and another retired twice; the fingerprint (sum of hash64(task id)
modulo 2^64) can. The one law, per lane and in total:

    enqueued = ready + leased + computed + in_doubt + retired + dead

A difference is never repaired; whoever finds one stops leasing and raises BalanceBroken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import BalanceBroken

MASK64 = (1 << 64) - 1
_ADD, _TIMES_1, _TIMES_2 = map(
    np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_BY_30, _BY_27, _BY_31 = map(np.uint64, (30, 27, 31))


def hash64(task_ids: npt.NDArray[np.int64] | npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64 finaliser of each id (Steele, Lea, Flood 2014); a bijection, so ids never collide."""
    x = task_ids.astype(np.uint64)
    x += _ADD
    y = x >> _BY_30
    x ^= y
    x *= _TIMES_1
    np.right_shift(x, _BY_27, out=y)
    x ^= y
    x *= _TIMES_2
    np.right_shift(x, _BY_31, out=y)
    x ^= y
    return x


@dataclass(frozen=True, slots=True)
class Amount:
    """How much: tasks, prompt tokens, fingerprint. Adds and subtracts like a vector."""

    tasks: int = 0
    tokens: int = 0
    fingerprint: int = 0

    @classmethod
    def of(cls, task_ids: npt.NDArray[np.int64], token_counts: npt.NDArray[Any]) -> Amount:
        with np.errstate(over="ignore"):
            mark = int(hash64(task_ids).sum(dtype=np.uint64)) if len(task_ids) else 0
        return cls(len(task_ids), int(token_counts.sum(dtype=np.int64)), mark)

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.tasks + other.tasks,
            self.tokens + other.tokens,
            (self.fingerprint + other.fingerprint) & MASK64,
        )

    def __sub__(self, other: Amount) -> Amount:
        return Amount(
            self.tasks - other.tasks,
            self.tokens - other.tokens,
            (self.fingerprint - other.fingerprint) & MASK64,
        )


ZERO = Amount()


@dataclass(frozen=True, slots=True)
class Ledger:
    """One lane's, or everything's, account. `balance` must be ZERO at every moment."""

    enqueued: Amount = ZERO
    ready: Amount = ZERO
    leased: Amount = ZERO
    computed: Amount = ZERO
    in_doubt: Amount = ZERO
    retired: Amount = ZERO
    dead: Amount = ZERO

    @property
    def balance(self) -> Amount:
        held = self.ready + self.leased + self.computed + self.in_doubt
        return self.enqueued - (held + self.retired + self.dead)

    @property
    def open_tasks(self) -> int:
        """Tasks that are neither retired nor dead."""
        return self.enqueued.tasks - self.retired.tasks - self.dead.tasks

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(
            *(getattr(self, name) + getattr(other, name) for name in Ledger.__dataclass_fields__)
        )

    def require_balanced(self, where: str) -> None:
        if self.balance != ZERO:
            raise BalanceBroken(
                f"the ledger of {where} is off by {self.balance}: leasing has stopped; "
                "keep the journal folder and run `fabric broker verify`"
            )

    def as_json(self) -> dict[str, int]:
        """Stable keys of `fabric status`: per state the tasks, then the balance three ways."""
        balance = self.balance
        return {
            **{name: getattr(self, name).tasks for name in Ledger.__dataclass_fields__},
            "enqueued_tokens": self.enqueued.tokens,
            "ready_tokens": self.ready.tokens,
            "retired_tokens": self.retired.tokens,
            "balance_tasks": balance.tasks,
            "balance_tokens": balance.tokens,
            "balance_fingerprint": balance.fingerprint,
        }
