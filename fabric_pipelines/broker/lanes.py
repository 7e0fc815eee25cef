"""Lanes: which one a task belongs to, which one a session is served from, and how a lane lives.

opened (first task) -> active -> draining (every submission that feeds it is closed) -> retired (nothing left
in it); a lane that is fed again opens as its next generation. A session stays in its lane while that fills what it
asks for; who has to leave looks over the lanes of its tenant for one that does, so that a batch is under-filled only
when no lane could fill it. Longest output class and longest prompts come first, so that a run ends on short work.
Tenants take turns of one lease by deficit round robin in tokens. Tasks that a class of consumers found
too large lie in lanes of their own, which that class is not served from and the others are served from first.

Output caps cut no lane any more: caps differ inside a prefix group, and a group torn over lanes is computed
once in each (`fabric bench supply` has the figures). Lanes made by rule 1 keep theirs, so that an old log gives
the state it gave.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Mapping
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

MANY = 1 << 62
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
    metadata_bytes: int = 0  # of the longest that a task of it ever had
    waiting: bool = False  # is in a heap of its engine
    away: bool = False  # passed over while a lease is cut, see Supply.grant

    @property
    def ready(self) -> int:
        return int(self.accounts.tasks[READY + 1, self.index])

    @property
    def is_open(self) -> bool:
        return not self.away and self.ready > 0

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
        """Whether its ready tasks are a full batch: no other of their mean size would fit. Of packed work, as far as its
        prompts share nothing."""
        ready, tokens = self.ready, self.ready_tokens
        if ready >= budget.sequences:
            return True
        if not ready:
            return False
        kv_tokens = budget.kv_tokens if budget.kv_tokens is not None else MANY
        if length := self.key.length:
            return (ready + 1) * length > budget.tokens or tokens + tokens // ready > kv_tokens
        return tokens + tokens // ready > min(budget.tokens, kv_tokens)

    @property
    def emptied_first(self) -> bool:
        """A session does not leave packed work that drains before it is done, though another lane would fill its
        budget: such a lease tops up a batch that is running, so nothing runs under-filled, while a rest that is left
        behind waits for the end of all, and its prefixes are computed again. Padded work runs as it is cut, may
        find a neighbour to share a batch with, and what others refuse comes in a trickle."""
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


TOGETHER_MAX = 64  # lanes looked at as the longest of a shared batch

Heap = list[tuple[int, int, int, Lane]]


class LaneQueue:
    """Lanes of one engine that have ready tasks: by tenant, then by the set of classes that refused them."""

    __slots__ = ("_heaps", "_turns", "_waste")

    def __init__(self, merge_waste: float = 0.0) -> None:
        """merge_waste: how much of a batch that draining lanes share may be padding, for `neighbours`."""
        self._waste = merge_waste
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
        """A lease of `tokens` went to this tenant, to a session that serves the others too."""
        self._turns.charge(tenant, tokens)

    def choose(
        self,
        current: Mapping[str, Lane],
        budget: Budget,
        refuser: int = 0,
        only: str | None = None,
        larger: Budget | None = None,
    ) -> Lane | None:
        """The lane to serve, of the tenant whose turn it is: the one where the session is with it (`current`, by tenant)
        until that cannot fill the budget (packed work that drains is emptied first); else one that can fill it, if
        any can: the longest, of those that a session of this `larger` budget has no use for if there are some, or the
        small ones would eat up what the large ones need. Never one that the session's own class (`refuser`, a set of
        one) refused, and first those that most others did. None when nothing is ready for it. `only` that tenant's,
        whoever's turn it is: a session that serves one tenant takes nothing from the others."""
        if only is not None:
            own = self._open_to(only, refuser) if only in self._heaps else []
            mine = current.get(only)
            return self._serve(own, mine, budget, refuser, larger) if own else None
        passed: set[str] = set()
        while (tenant := self._turns.next(passed)) is not None:
            open_ = self._open_to(tenant, refuser)
            if open_:
                return self._serve(open_, current.get(tenant), budget, refuser, larger)
            if self._heaps[tenant]:
                passed.add(tenant)  # this class refused all of it, or nobody can read it now
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
        found = [
            refused_by
            for refused_by, heap in heaps.items()
            if not refused_by & refuser
            and (heap[0][3].is_open or any(lane.is_open for *_, lane in heap))
        ]
        if len(found) > 1:
            found.sort(key=lambda refused_by: (-refused_by.bit_count(), refused_by))
        return [heaps[refused_by] for refused_by in found]

    def _serve(
        self,
        heaps: list[Heap],
        current: Lane | None,
        budget: Budget,
        refuser: int,
        larger: Budget | None,
    ) -> Lane:
        stay = None
        if (
            current is not None
            and current.is_open
            and not current.key.refused_by & refuser
            and (current.fills(budget) or current.emptied_first)
        ):
            stay = current
        thin: list[Lane] = []
        for heap in heaps:
            if stay is not None and _refusals(heap[0][3]) <= _refusals(stay):
                return stay
            lane = _best(heap, budget, larger, self._waste)
            if lane.fills(budget):
                return lane
            thin.append(lane)
        return stay or next((lane for lane in thin if lane.emptied_first), thin[0])

    def neighbours(self, lane: Lane) -> list[Lane]:
        """Draining lanes of the same work with shorter prompts, longest first."""
        found = [
            other
            for *_, other in self._heaps.get(lane.key.tenant, {}).get(lane.key.refused_by, ())
            if other.step is Step.DRAINING
            and other.is_open
            and other.key.sampling == lane.key.sampling
            and 0 < other.key.length < lane.key.length
        ]
        return sorted(found, key=lambda other: -other.key.length)


def _refusals(lane: Lane) -> int:
    return lane.key.refused_by.bit_count()


def _best(heap: Heap, budget: Budget, larger: Budget | None, waste: float) -> Lane:
    """The first that fills the budget, of those that leave the `larger` one unfilled if there are any; else packed work
    that drains, else the one that its neighbours help to the fullest batch, else the first. Only the first is looked at by itself; then all are at once, 50 us for a hundred and
    0.7 ms for two thousand: a session asks for this only when it has to leave its lane."""
    first = heap[0][3]
    if first.is_open and first.fills(budget) and not (larger and first.fills(larger)):
        return first
    rows = _Rows(heap)
    full = rows.filling(budget)
    if larger is not None and full.any():
        spared = full & ~rows.filling(larger)
        full = spared if spared.any() else full
    if full.any():
        return min(heap[at] for at in np.flatnonzero(full))[3]
    packed = [heap[at] for at in np.flatnonzero(rows.open & (rows.length == 0))]
    emptied = [entry for entry in packed if entry[3].emptied_first]
    if emptied:
        return min(emptied)[3]
    shared = _fullest_together(heap, rows, budget, waste)
    if shared is not None:
        return shared
    return first if first.is_open else min(heap[at] for at in np.flatnonzero(rows.open))[3]


def _fullest_together(heap: Heap, rows: _Rows, budget: Budget, waste: float) -> Lane | None:
    """Where no lane fills a batch by itself: the draining one that fills the largest share of it together with shorter
    ones, the longest of equals. Else the thin lanes of a long tail would go first, each in a batch of its own, while
    dense ones behind them could share a full one. None without padded lanes that drain."""
    open_ = np.flatnonzero(rows.open & (rows.length > 0)).tolist()
    order = sorted(
        (at for at in open_ if heap[at][3].step is Step.DRAINING), key=lambda at: heap[at][:3]
    )
    ready, tokens = rows.ready.tolist(), rows.tokens.tolist()
    thin = [(heap[at][3], ready[at], tokens[at]) for at in order]
    best, best_share = None, 0.0
    for at, (lane, *_) in enumerate(thin[:TOGETHER_MAX]):
        share = _share_together(thin[at:], budget, waste)
        if share > best_share:
            best, best_share = lane, share
        if share == 1.0:
            break
    return best


def _share_together(thin: list[tuple[Lane, int, int]], budget: Budget, waste: float) -> float:
    """How much of a batch of the first of these lanes, each with its ready tasks and tokens, it fills with what the
    others have of its work: each at its mean length, until padding is more than may be."""
    (lane, count, tokens), *others = thin
    length = lane.key.length
    most = max(1, min(budget.sequences, budget.tokens // length))
    for other, ready, held in others:
        if count >= most:
            break
        if other.key.sampling != lane.key.sampling or other.key.length == length:
            continue
        missing = (1 - waste) * length - held / ready
        spare = tokens - (1 - waste) * length * count
        added = ready if missing <= 0 else min(ready, max(0, int(spare / missing)))
        count += added
        tokens += added * held // ready
        if added < ready:
            break
    return min(count, most) / most


class _Rows:
    """The lanes of a heap as columns: int64 [lanes], `open` bool."""

    __slots__ = ("length", "open", "ready", "tokens")

    def __init__(self, heap: Heap) -> None:
        accounts, count = heap[0][3].accounts, len(heap)
        at = np.fromiter((entry[2] for entry in heap), np.int64, count)
        away = np.fromiter((entry[3].away for entry in heap), np.bool_, count)
        self.length = np.fromiter((-entry[1] for entry in heap), np.int64, count)
        self.ready, self.tokens = accounts.tasks[READY + 1, at], accounts.tokens[READY + 1, at]
        self.open = (self.ready > 0) & ~away

    def filling(self, budget: Budget) -> npt.NDArray[np.bool_]:
        """Which of the open ones fill the budget, as `Lane.fills` has it."""
        with_another = self.tokens + self.tokens // np.maximum(self.ready, 1)
        step = np.where(self.length > 0, (self.ready + 1) * self.length, with_another)
        full = (self.ready >= budget.sequences) | (step > budget.tokens)
        if budget.kv_tokens is not None:
            full |= with_another > budget.kv_tokens
        found: npt.NDArray[np.bool_] = full & self.open
        return found


class Turns:
    """Whose work goes next: deficit round robin in tokens (Shreedhar and Varghese, 1995) without a quantum.

    A tenant owes what its last lease took, and is served again when nobody who waits owes less: then that much is
    forgiven to all of them. So a turn is one lease, whatever sessions ask for, and a debt never more than one. There is
    no credit: nobody gains by waiting or by coming back, and who comes late owes nothing. One tenant alone is not
    charged. Longer turns cost fairness and gained nothing, since sessions keep their lanes with each tenant
    (docs/rejected.md).
    """

    __slots__ = ("_debt", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[str] = deque()
        self._debt: dict[str, int] = {}  # that of who left is kept

    def enter(self, tenant: str) -> None:
        if tenant not in self.waiting:
            self.waiting.append(tenant)
            self._debt.setdefault(tenant, 0)

    def leave(self, tenant: str) -> None:
        self.waiting.remove(tenant)

    def charge(self, tenant: str, tokens: int) -> None:
        if len(self.waiting) > 1:
            self._debt[tenant] += tokens

    def next(self, passed: Container[str] = ()) -> str | None:
        """Who owes least, in the order of waiting; never one of `passed`."""
        able = [tenant for tenant in self.waiting if tenant not in passed]
        if not able:
            return None
        least = min(self._debt[tenant] for tenant in able)
        for tenant in able if least else ():
            self._debt[tenant] -= least
        chosen = next(tenant for tenant in able if not self._debt[tenant])
        self.waiting.rotate(-1 - self.waiting.index(chosen))
        return chosen
