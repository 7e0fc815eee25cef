"""Lanes: which one a task belongs to, which one a session is served from, and how a lane lives.

opened (first task) -> active -> draining (every submission that feeds it is closed) -> retired (nothing left
in it); a lane that is fed again opens as its next generation. Choosing a lane never scans: lanes with ready
tasks wait in a heap per engine and tenant, longest output class and longest prompts first, so that a run
ends on short work. Tenants take turns by deficit round robin in tokens.

Output caps cut no lane any more: caps differ inside a prefix group, and a group torn over lanes is computed
once in each (`fabric bench supply` has the figures). Lanes made by rule 1 keep theirs, so that an old log gives
the state it gave.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.accounts import READY, Accounts
from fabric_pipelines.broker.order import PrefixOrder
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.shape import (
    LaneKey,
    aligned_lengths,
    output_classes,
    sampling_digest,
    sampling_kind,
)
from fabric_pipelines.records.submission import Submission

QUANTUM_TOKENS = 1 << 18
LOOKS_MAX = 8
RULE = 2  # how an index row follows from a batch; in every ENQUEUE fact, and 1 where it is missing


class Step(IntEnum):
    ACTIVE = 1
    DRAINING = 2
    RETIRED = 3


@dataclass(slots=True)
class Lane:
    """What facts say of a lane, and its `order`, which is derived from them."""

    index: int
    key: LaneKey
    sampling: dict[str, Any]
    accounts: Accounts
    generation: int = 1
    step: Step = Step.ACTIVE
    producers: set[int] = field(default_factory=set)
    order: PrefixOrder = field(default_factory=PrefixOrder)
    waiting: bool = False  # is in a heap of its engine

    @property
    def ready(self) -> int:
        return int(self.accounts.tasks[READY + 1, self.index])

    @property
    def enqueued(self) -> int:
        return int(self.accounts.tasks[0, self.index])

    @property
    def ready_tokens(self) -> int:
        return int(self.accounts.tokens[READY + 1, self.index])

    @property
    def name(self) -> str:
        key = self.key
        shape = f"out{key.output_class}" if key.output_class else f"len{key.length or '*'}"
        return f"{key.tenant}/{key.engine}/{key.sampling}/{shape}"

    def fills(self, budget: Budget) -> bool:
        tokens, kv_tokens = self.ready_tokens, budget.kv_tokens
        return (
            self.ready >= budget.sequences
            or tokens >= budget.tokens
            or (kv_tokens is not None and tokens >= kv_tokens)
        )

    @property
    def emptied_first(self) -> bool:
        """Packed work loses nothing in a partial batch, padded work may find a neighbour to share one with."""
        return self.step is Step.DRAINING and not self.key.length


def shapes(
    submission: Submission,
    lengths: npt.NDArray[np.int64],
    new: npt.NDArray[np.int64],
    rule: int = RULE,
) -> npt.NDArray[np.int64]:
    """Shape of each task as one number, int64 [rows]: negative aligned length for single-pass work, 0 for
    generation, which does not pad (by rule 1, its output class)."""
    if sampling_kind(submission.sampling) != "generate":
        return -aligned_lengths(lengths)
    return output_classes(new) if rule == 1 else np.zeros_like(lengths)


def key_of(submission: Submission, shape: int) -> LaneKey:
    return LaneKey(
        tenant=submission.tenant,
        engine=submission.engine,
        sampling=sampling_digest(submission.sampling),
        length=max(-shape, 0),
        output_class=max(shape, 0),
    )


class LaneQueue:
    """Lanes of one engine that have ready tasks."""

    __slots__ = ("_heaps", "_turns")

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[int, int, int, Lane]]] = {}
        self._turns = Turns()

    def offer(self, lane: Lane) -> None:
        """Idempotent; call when a lane has ready tasks."""
        if lane.waiting or not lane.ready:
            return
        tenant = lane.key.tenant
        self._turns.enter(tenant)
        heap = self._heaps.setdefault(tenant, [])
        heapq.heappush(heap, (-lane.key.output_class, -lane.key.length, lane.index, lane))
        lane.waiting = True

    def charge(self, tenant: str, tokens: int) -> None:
        """A lease of `tokens` went to this tenant."""
        self._turns.charge(tenant, tokens)

    def choose(self, current: Lane | None, budget: Budget, only: str | None = None) -> Lane | None:
        """The lane to serve: the session's current one until it cannot fill the budget (packed work that drains
        is emptied first) or its tenant's turn is over; else, of the tenant whose turn it is, the first that can
        fill it; else its longest. None when nothing is ready. `only` that tenant's, whoever's turn it is: a
        session that serves one tenant takes nothing from the others."""
        tenant = self._whose_turn(current) if only is None else self._if_it_has_work(only)
        if tenant is None:
            return None
        if (
            current is not None
            and current.ready
            and current.key.tenant == tenant
            and (current.fills(budget) or current.emptied_first)
        ):
            return current
        return self._first_that_fills(self._heaps[tenant], budget)

    def _whose_turn(self, current: Lane | None) -> str | None:
        asked = current.key.tenant if current is not None else None
        while (tenant := self._turns.next(asked)) is not None and not self._has_work(tenant):
            self._turns.leave(tenant)
        return tenant

    def _if_it_has_work(self, tenant: str) -> str | None:
        return tenant if tenant in self._heaps and self._has_work(tenant) else None

    def neighbours(self, lane: Lane) -> list[Lane]:
        """Draining lanes of the same work with shorter prompts, longest first."""
        found = [
            other
            for *_, other in self._heaps.get(lane.key.tenant, ())
            if other.step is Step.DRAINING
            and other.ready
            and other.key.sampling == lane.key.sampling
            and 0 < other.key.length < lane.key.length
        ]
        return sorted(found, key=lambda other: -other.key.length)

    def _has_work(self, tenant: str) -> bool:
        heap = self._heaps[tenant]
        while heap and not heap[0][3].ready:
            heapq.heappop(heap)[3].waiting = False
        return bool(heap)

    def _first_that_fills(self, heap: list[tuple[int, int, int, Lane]], budget: Budget) -> Lane:
        """Usually among the first LOOKS_MAX; else all are looked at, which only happens where work is thin."""
        best = heap[0][3]
        aside = []
        for _ in range(LOOKS_MAX):
            if not heap:
                break
            lane = heap[0][3]
            if lane.ready and (lane.fills(budget) or lane.emptied_first):
                best = lane
                break
            entry = heapq.heappop(heap)
            if lane.ready:
                aside.append(entry)
            else:
                lane.waiting = False
        else:
            best = _longest_that_fills((lane for *_, lane in heap), budget) or best
        for entry in aside:
            heapq.heappush(heap, entry)
        return best


def _longest_that_fills(lanes: Iterable[Lane], budget: Budget) -> Lane | None:
    filling = [lane for lane in lanes if lane.ready and lane.fills(budget)]
    return max(filling, key=lambda lane: (lane.key.output_class, lane.key.length), default=None)


class Turns:
    """Whose work goes next: deficit round robin in tokens (Shreedhar and Varghese, 1995).

    A tenant is served while it has credit; when nobody who waits has any, all of them get a quantum. Credit
    that was not used is lost with an empty queue, debt is not. One tenant alone is not charged.
    """

    __slots__ = ("_credit", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[str] = deque()
        self._credit: dict[str, int] = {}

    def enter(self, tenant: str) -> None:
        if tenant not in self.waiting:
            self.waiting.append(tenant)
            self._credit[tenant] = min(self._credit.get(tenant, 0), 0) + QUANTUM_TOKENS

    def leave(self, tenant: str) -> None:
        self.waiting.remove(tenant)

    def charge(self, tenant: str, tokens: int) -> None:
        if len(self.waiting) > 1:
            self._credit[tenant] -= tokens

    def next(self, current: str | None) -> str | None:
        """`current` as long as it waits and has credit."""
        if current is not None and current in self.waiting and self._credit[current] > 0:
            return current
        for _ in range(len(self.waiting)):
            self.waiting.rotate(-1)
            if self._credit[self.waiting[-1]] > 0:
                return self.waiting[-1]
        if not self.waiting:
            return None
        missing = -max(self._credit[tenant] for tenant in self.waiting)
        gift = (missing // QUANTUM_TOKENS + 1) * QUANTUM_TOKENS
        for tenant in self.waiting:
            self._credit[tenant] += gift
        return self.next(current)
