"""Lanes: which one a task belongs to, which one a session is served from, and how a lane lives.

opened (first task) -> active -> draining (every submission that feeds it is closed) -> retired (nothing left
in it); a lane that is fed again opens as its next generation. Choosing a lane never scans: lanes with ready
tasks wait in a heap per engine and tenant, longest output class and longest prompts first, so that a run
ends on short work. Tenants take turns by deficit round robin in tokens.
"""

from __future__ import annotations

import heapq
from collections import deque
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
    def ready_tokens(self) -> int:
        return int(self.accounts.tokens[READY + 1, self.index])

    @property
    def name(self) -> str:
        key = self.key
        shape = f"out{key.output_class}" if key.output_class else f"len{key.length}"
        return f"{key.tenant}/{key.engine}/{key.sampling}/{shape}"

    def fills(self, budget: Budget) -> bool:
        return self.ready >= budget.sequences or self.ready_tokens >= budget.tokens


def shapes(
    submission: Submission, lengths: npt.NDArray[np.int64], new: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Shape of each task as one number, int64 [rows]: output class for generation, negative aligned length for
    single-pass work."""
    if sampling_kind(submission.sampling) == "generate":
        return output_classes(new)
    return -aligned_lengths(lengths)


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

    __slots__ = ("_heaps", "_owed", "_turn")

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[int, int, int, Lane]]] = {}
        self._owed: dict[str, int] = {}
        self._turn: deque[str] = deque()

    def offer(self, lane: Lane) -> None:
        """Idempotent; call when a lane has ready tasks."""
        if lane.waiting or not lane.ready:
            return
        tenant = lane.key.tenant
        heap = self._heaps.setdefault(tenant, [])
        if not heap and tenant not in self._turn:
            self._turn.append(tenant)
        heapq.heappush(heap, (-lane.key.output_class, -lane.key.length, lane.index, lane))
        lane.waiting = True

    def charge(self, tenant: str, tokens: int) -> None:
        """A lease of `tokens` went to this tenant; one that used up its quantum goes behind the others."""
        if len(self._turn) < 2:
            return
        owed = self._owed.get(tenant, QUANTUM_TOKENS) - tokens
        if owed <= 0 and self._turn[0] == tenant:
            self._turn.rotate(-1)
        while owed <= 0:
            owed += QUANTUM_TOKENS
        self._owed[tenant] = owed

    def choose(self, current: Lane | None, budget: Budget) -> Lane | None:
        """The lane to serve: the session's current one until it cannot fill the budget (one that drains is
        emptied first), else the first in line. None when nothing is ready."""
        self._forget_empty()
        if not self._turn:
            return None
        tenant = self._turn[0]
        if (
            current is not None
            and current.ready
            and current.key.tenant == tenant
            and (current.fills(budget) or current.step is Step.DRAINING)
        ):
            return current
        return self._first_that_fills(self._heaps[tenant], budget)

    def _forget_empty(self) -> None:
        while self._turn:
            heap = self._heaps[self._turn[0]]
            while heap and not heap[0][3].ready:
                heapq.heappop(heap)[3].waiting = False
            if heap:
                return
            self._turn.popleft()

    def _first_that_fills(self, heap: list[tuple[int, int, int, Lane]], budget: Budget) -> Lane:
        """Among the first LOOKS_MAX lanes; an active lane that cannot fill a batch may yet be fed."""
        best = heap[0][3]
        aside = []
        for _ in range(LOOKS_MAX):
            if not heap:
                break
            lane = heap[0][3]
            if lane.ready and (lane.fills(budget) or lane.step is Step.DRAINING):
                best = lane
                break
            entry = heapq.heappop(heap)
            if lane.ready:
                aside.append(entry)
            else:
                lane.waiting = False
        for entry in aside:
            heapq.heappush(heap, entry)
        return best
