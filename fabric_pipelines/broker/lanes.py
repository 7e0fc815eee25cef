"""Lanes: which one a task belongs to, which one a session is served from, and how a lane lives.

opened (first task) -> active -> draining (every submission that feeds it is closed) -> retired (nothing left
in it); a lane that is fed again opens as its next generation. Choosing a lane never scans: lanes with ready
tasks wait in a heap per engine and tenant, longest output class and longest prompts first, so that a run
ends on short work. Tenants take turns by deficit round robin in tokens. Tasks that a class of consumers found
too large lie in lanes of their own, which that class is not served from and the others are served from first.

Output caps cut no lane any more: caps differ inside a prefix group, and a group torn over lanes is computed
once in each (`fabric bench supply` has the figures). Lanes made by rule 1 keep theirs, so that an old log gives
the state it gave.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.accounts import READY, Accounts
from fabric_pipelines.broker.classes import members
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
    order: PrefixOrder = field(init=False)  # see State.add_lane
    opened_at: int = (
        0  # first new task of this generation; 0 for the first one, and where old tasks opened it
    )
    waiting: bool = False  # is in a heap of its engine
    away: bool = False  # its next rows are in the cold tier: passed over while a lease is cut

    @property
    def ready(self) -> int:
        if self.away:
            return 0
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
        refused = "".join(f"!{number}" for number in members(key.refused_by))
        return f"{key.tenant}/{key.engine}/{key.sampling}/{shape}{refused}"

    def fills(self, budget: Budget) -> bool:
        tokens, kv_tokens = self.ready_tokens, budget.kv_tokens
        return (
            self.ready >= budget.sequences
            or tokens >= budget.tokens
            or (kv_tokens is not None and tokens >= kv_tokens)
        )

    @property
    def emptied_first(self) -> bool:
        """Packed work loses nothing in a partial batch, padded work may find a neighbour to share one with, and
        what others refuse comes in a trickle."""
        return self.step is Step.DRAINING and not self.key.length and not self.key.refused_by


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


Heap = list[tuple[int, int, int, Lane]]


class LaneQueue:
    """Lanes of one engine that have ready tasks: by tenant, then by the set of classes that refused them."""

    __slots__ = ("_heaps", "_turns")

    def __init__(self) -> None:
        self._heaps: dict[str, dict[int, Heap]] = {}
        self._turns = Turns()

    def offer(self, lane: Lane) -> None:
        """Idempotent; call when a lane has ready tasks."""
        if lane.waiting or not lane.ready:
            return
        tenant = lane.key.tenant
        self._turns.enter(tenant)
        heap = self._heaps.setdefault(tenant, {}).setdefault(lane.key.refused_by, [])
        heapq.heappush(heap, (-lane.key.output_class, -lane.key.length, lane.index, lane))
        lane.waiting = True

    def charge(self, tenant: str, tokens: int) -> None:
        """A lease of `tokens` went to this tenant."""
        self._turns.charge(tenant, tokens)

    def choose(
        self, current: Lane | None, budget: Budget, refuser: int = 0, only: str | None = None
    ) -> Lane | None:
        """The lane to serve: the session's current one until it cannot fill the budget (packed work that drains
        is emptied first) or its tenant's turn is over; else, of the tenant whose turn it is, the first that can
        fill it; else its longest. Never one that the session's own class (`refuser`, a set of one) refused,
        and first those that most others did. None when nothing is ready for it. `only` that tenant's, whoever's turn
        it is: a session that serves one tenant takes nothing from the others."""
        if only is not None:
            own = self._open_to(only, refuser) if only in self._heaps else []
            return self._serve(own, current, budget, refuser) if own else None
        asked = current.key.tenant if current is not None else None
        passed: set[str] = set()
        while (tenant := self._turns.next(asked, passed)) is not None:
            open_ = self._open_to(tenant, refuser)
            if open_:
                return self._serve(open_, current, budget, refuser)
            if self._heaps[tenant]:
                passed.add(tenant)  # all of it was refused by this class: others will take it
            else:
                self._turns.leave(tenant)
        return None

    def _open_to(self, tenant: str, refuser: int) -> list[Heap]:
        """Heaps with work for this class, most refused first."""
        heaps = self._heaps[tenant]
        for refused_by in list(heaps):
            heap = heaps[refused_by]
            while heap and not heap[0][3].ready:
                heapq.heappop(heap)[3].waiting = False
            if not heap:
                del heaps[refused_by]
        if len(heaps) == 1:
            return [heap for refused_by, heap in heaps.items() if not refused_by & refuser]
        sets = sorted(heaps, key=lambda found: (-found.bit_count(), found))
        return [heaps[found] for found in sets if not found & refuser]

    def _serve(self, heaps: list[Heap], current: Lane | None, budget: Budget, refuser: int) -> Lane:
        tenant, stay = heaps[0][0][3].key.tenant, None
        if (
            current is not None
            and current.ready
            and current.key.tenant == tenant
            and not current.key.refused_by & refuser
            and (current.fills(budget) or current.emptied_first)
        ):
            stay = current
        best = stay
        for heap in heaps:
            if stay is not None and _refusals(heap[0][3]) <= _refusals(stay):
                return stay
            lane = self._first_that_fills(heap, budget)
            if lane.fills(budget) or (stay is None and lane.emptied_first):
                return lane
            best = best or lane
        assert best is not None
        return best

    def neighbours(self, lane: Lane) -> list[Lane]:
        """Draining lanes of the same work with shorter prompts, longest first."""
        found = [
            other
            for *_, other in self._heaps.get(lane.key.tenant, {}).get(lane.key.refused_by, ())
            if other.step is Step.DRAINING
            and other.ready
            and other.key.sampling == lane.key.sampling
            and 0 < other.key.length < lane.key.length
        ]
        return sorted(found, key=lambda other: -other.key.length)

    def _first_that_fills(self, heap: Heap, budget: Budget) -> Lane:
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


def _refusals(lane: Lane) -> int:
    return lane.key.refused_by.bit_count()


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

    def next(self, current: str | None, passed: Container[str] = ()) -> str | None:
        """`current` as long as it waits and has credit; never one of `passed`."""
        if (
            current is not None
            and current in self.waiting
            and self._credit[current] > 0
            and current not in passed
        ):
            return current
        for _ in range(len(self.waiting)):
            self.waiting.rotate(-1)
            tenant = self.waiting[-1]
            if self._credit[tenant] > 0 and tenant not in passed:
                return tenant
        able = [tenant for tenant in self.waiting if tenant not in passed]
        if not able:
            return None
        missing = -max(self._credit[tenant] for tenant in able)
        gift = (missing // QUANTUM_TOKENS + 1) * QUANTUM_TOKENS
        for tenant in able:
            self._credit[tenant] += gift
        return self.next(current, passed)
