"""Supply: which ready tasks a session gets next. Owns the orders of the lanes and who walks them; all derived
from facts, lost with the process and made again.

A session stays in its lane (lanes.py), walks its own arc of the lane's prefix order (order.py) and gets the
longest stretch that fits it (packing.py). What lanes promise by their counts is checked when a batch is cut: one that
turns out under-filled goes only if no other lane of its tenant fills one. Only then, too, do padded lanes that
drain share one, as far as the declared waste allows. Decides nothing about states: that is the core's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.accounts import READY
from fabric_pipelines.broker.lanes import Lane, LaneQueue, Step
from fabric_pipelines.broker.order import RUN_MAX
from fabric_pipelines.broker.packing import (
    end_keys,
    guided,
    is_end,
    is_full_batch,
    merge,
    pack,
)
from fabric_pipelines.broker.prefix import leaders, shared_tokens
from fabric_pipelines.broker.room import NO_ROOM, Room
from fabric_pipelines.broker.state import Effects, State
from fabric_pipelines.records.batch import Budget

Sequences = npt.NDArray[np.int64]
NO_PLACES: Sequences = np.zeros(0, np.int64)
PASSED_OVER_MAX = 64
LOOKED_AT_ONCE, LOOKED_MAX = (
    1 << 12,
    1 << 16,
)  # rows, for those that can be read while a store is away
ASKED_AGAIN = 256  # rows of a lane that stand aside
THIN_MAX = 8  # lanes that promised a full batch and had none, looked at for one lease
SUSPECTS_ALONE = "work that may have ended a worker goes out by itself: finish what is held first"
SHARED_WALK = ""  # padded lanes, and the end of others, gain nothing from arcs: all sessions walk them together


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease to be sent: `tasks` in order, of `tokens` in all; `shared` of each are cached once the one before it ran.
    All are padded to the shape of `lane`, though some may come from lanes of shorter prompts."""

    lease_id: int
    lane: Lane
    tasks: Sequences
    shared: npt.NDArray[np.int64]
    tokens: int

    @property
    def leader(self) -> npt.NDArray[np.bool_]:
        return leaders(self.shared)


@dataclass(frozen=True, slots=True)
class Asker:
    """A session that asks for work, one of `consumers` of its engine. refuser: its class, as a set of one. busy: it
    holds leased tasks. tenant: the one it serves, None for all. share: (its tokens a step, those of all of them).
    larger: the profile of the largest session beside it, if that is larger than its own."""

    name: str
    engine: str
    refuser: int
    consumers: int
    busy: bool
    tenant: str | None = None
    share: tuple[int, int] = (1, 1)
    larger: Budget | None = None


@dataclass(frozen=True, slots=True)
class _View:
    """The next `seen` of a lane's order, of which those `at` these places are ready."""

    lane: Lane
    who: str
    seen: Sequences
    at: npt.NDArray[np.int64]
    front: bool = True

    @property
    def tasks(self) -> Sequences:
        return self.seen if len(self.at) == len(self.seen) else self.seen[self.at]

    def upto(self, count: int) -> _View:
        """Without the ready one at that place and what follows it."""
        if count >= len(self.at):
            return self
        return replace(self, seen=self.seen[: self.at[count]], at=self.at[:count])


@dataclass(frozen=True, slots=True)
class _Cut:
    """The first `count` of a view, and what each shares with the one before it. is_full: no other would fit."""

    view: _View
    prompt: npt.NDArray[np.int64]
    shared: npt.NDArray[np.int64]
    count: int
    is_full: bool


class _RowsAway(Exception):
    """The next rows of a lane lie in the cold tier."""


class Supply:
    def __init__(self, state: State, merge_waste: float, room: Room | None = None) -> None:
        """`room`: for the outcomes of what is leased; without one there is no end of it."""
        self._state = state
        self._room = room or Room(state)
        self._merge_waste = merge_waste
        self._queues = defaultdict[str, LaneQueue](lambda: LaneQueue(merge_waste))  # by engine
        self._passed_over: dict[int, int] = {}  # by lane: leases given past a suspect piece
        self.held_back = ""  # why the last one who asked got nothing although work is ready for it
        # how many of these tasks, from the first, can be read now; and the lanes that the last grant passed over
        self.near: Callable[[Sequences], int] | None = None
        # which of these tasks cannot be read before a store answers again; None: none
        self.out_of_reach: Callable[[Sequences], npt.NDArray[np.bool_] | None] | None = None
        # those of them whose row is damaged here, which no store gives back; None: none
        self.damaged: Callable[[Sequences], npt.NDArray[np.bool_] | None] | None = None
        self.withheld: list[Lane] = []

    def begin(self) -> None:
        """Every ready task of the state into the order of its lane, which is empty. What is under suspicion waits
        in front, the rest is sorted when leases need it."""
        state, parts = self._state, defaultdict[int, list[Sequences]](list)
        suspects = np.array(sorted(state.suspects), np.int64)
        suspects = suspects[state.index.state[suspects] == READY]
        self.absorb(Effects(pieces=state.suspect_pieces(suspects)))
        for begin in range(0, state.index.count, RUN_MAX):
            states = state.index.state[begin : min(begin + RUN_MAX, state.index.count)]
            ready = begin + np.flatnonzero(states == READY)
            for lane, tasks in state.by_lane(state.unsuspected(ready)):
                parts[lane].append(tasks)
                state.index.queued[tasks] = True
        for lane, tasks_of in parts.items():
            state.lanes[lane].order.add_unsorted(tasks_of)
            self._offer(state.lanes[lane])

    def absorb(self, effects: Effects) -> None:
        """Tasks became ready."""
        queued = self._state.index.queued
        for at, tasks in effects.left:
            old = tasks[queued[tasks]]
            if len(old):
                self._state.lanes[at].order.remove(old)
                queued[old] = False
        for at, keys, tasks in effects.runs:
            new = ~queued[tasks]
            if not new.all():  # claimed or late while in the order: its old place is still there
                keys, tasks = keys[new], tasks[new]
            queued[tasks] = True
            self._state.lanes[at].order.add(keys, tasks)
            self._offer(self._state.lanes[at])
        for at, tasks in effects.pieces:
            order, old = self._state.lanes[at].order, tasks[queued[tasks]]
            if len(old):  # claimed while in the order, where its old place still is
                order.remove(old)
            queued[tasks] = True
            gone = self.damaged(tasks) if self.damaged is not None else None
            if gone is not None:  # in a piece that goes out by itself they would stop the lane
                order.aside(tasks[gone])
                tasks = tasks[~gone]
            suspects = self._state.suspects
            if suspects and any(task in suspects for task in tasks.tolist()):
                order.add_front(tasks)
            else:
                order.add_ahead(tasks)
            self._offer(self._state.lanes[at])

    def take_back(self, grant: Grant, tenant: str | None) -> None:
        """It was not sent: its tasks go first again. `tenant`: as of the asker."""
        if tenant is None:
            queue = self._queues[grant.lane.key.engine]
            queue.charge(grant.lane.key.tenant, -grant.tokens)
        self.absorb(Effects(pieces=self._state.by_lane(grant.tasks)))

    def set_aside(self, tasks: Sequences) -> None:
        """Those of them that wait in an order are in nobody's way until they can be read again; all of it is looked at."""
        index = self._state.index
        waiting = tasks[(index.state[tasks] == READY) & index.queued[tasks]]
        for at, mine in self._state.by_lane(waiting):
            order = self._state.lanes[at].order
            order.remove(mine)
            order.aside(mine)

    def _offer(self, lane: Lane) -> None:
        self._queues[lane.key.engine].offer(lane)

    def ready_for(self, engine: str, refuser: int, tenant: str | None = None) -> int:
        """Ready tasks of the engine (and tenant), less those that this class of consumers refused."""
        if tenant is not None:
            return sum(
                lane.ready
                for lane in self._state.lanes
                if (lane.key.engine, lane.key.tenant) == (engine, tenant)
                and not lane.key.refused_by & refuser
            )
        number = self._state.engines.get(engine)
        if number is None:
            return 0
        ready = int(self._state.engine_ready[number])
        if refuser:
            for lane in self._state.refused_lanes(engine):
                ready -= lane.ready if lane.key.refused_by & refuser else 0
        return ready

    def grant(self, asker: Asker, current: Mapping[str, Lane], budget: Budget) -> Grant | None:
        """The next lease of a session, which was last served from `current`, by tenant; its tasks leave the order.
        None when nothing is ready for it, or it is held back."""
        self.held_back = ""
        queue = self._queues.get(asker.engine)
        if queue is None:
            return None
        self.withheld = []
        thin: list[Lane] = []  # promised a full batch, and have none
        try:
            while lane := queue.choose(
                current,
                budget,
                asker.refuser,
                thin[0].key.tenant if thin else asker.tenant,
                asker.larger,
            ):
                promised = lane.fills(budget)
                if thin and not promised:
                    break
                if not lane.key.length:
                    self._arrange(lane, budget.sequences, asker.consumers)
                try:
                    cut = self._cut(lane, self._fair(lane, asker, budget, promised), asker)
                except _RowsAway:
                    lane.away = True
                    self.withheld.append(lane)
                    continue
                stays = lane is current.get(lane.key.tenant) and not lane.key.length
                if promised and not (stays or cut is None or cut.is_full or len(thin) == THIN_MAX):
                    lane.away = True
                    thin.append(lane)
                    continue
                return self._grant(queue, asker, current, lane, budget, cut)
            if not thin:
                return None
            lane = thin[0]
            lane.away = False
            cut = self._cut(lane, self._fair(lane, asker, budget, promised=True), asker)
            return self._grant(queue, asker, current, lane, budget, cut)
        finally:
            for passed in (*self.withheld, *thin):
                passed.away = False

    def _fair(self, lane: Lane, asker: Asker, budget: Budget, promised: bool) -> Budget:
        """What the session may take of what it asks for, see `guided`. A full batch of padded work is never made
        smaller: it runs as it is cut."""
        if asker.consumers == 1 or (promised and lane.key.length):
            return budget
        ready = self.ready_for(asker.engine, asker.refuser, asker.tenant)
        return replace(budget, sequences=guided(budget.sequences, ready, *asker.share))

    def _grant(
        self,
        queue: LaneQueue,
        asker: Asker,
        current: Mapping[str, Lane],
        lane: Lane,
        budget: Budget,
        cut: _Cut | None,
    ) -> Grant | None:
        if cut is None:
            self.held_back = self.held_back or SUSPECTS_ALONE
            return None
        left = current.get(lane.key.tenant, lane)
        if left is not lane:
            left.order.release(asker.name)
        grant = self._take_cut(queue, cut, self._fair(lane, asker, budget, cut.is_full))
        if asker.tenant is None:
            queue.charge(lane.key.tenant, grant.tokens)
        return grant

    def _front_is_for(self, lane: Lane, asker: Asker) -> bool:
        """What may have ended a worker goes out by itself, to a session that holds nothing: whatever ends that
        one was in the piece. Others pass it over, but not for ever."""
        suspects = self._state.suspects
        piece = self._first_piece(lane) if suspects else NO_PLACES
        if not asker.busy or not any(task in suspects for task in piece.tolist()):
            self._passed_over.pop(lane.index, None)
            return True
        passed = self._passed_over[lane.index] = self._passed_over.get(lane.index, 0) + 1
        return passed > PASSED_OVER_MAX

    def _first_piece(self, lane: Lane) -> Sequences:
        """What is still ready of the next thing that came back; pieces of which nothing is are dropped."""
        while len(piece := lane.order.first_piece):
            ready: Sequences = piece[self._state.index.state[piece] == READY]
            if len(ready):
                return ready
            self._take(_View(lane, SHARED_WALK, piece, NO_PLACES), 0)
        return piece

    def _arrange(self, lane: Lane, sequences: int, consumers: int) -> None:
        """The end of a draining lane of packed work goes by output, not by prefix."""
        order, index = lane.order, self._state.index
        if lane.step is not Step.DRAINING:
            order.rearranged = False
        elif not order.rearranged and is_end(lane.ready, lane.enqueued, sequences, consumers):
            order.rearrange(
                lambda tasks: end_keys(index.new[tasks].astype(np.int64), index.key[tasks])
            )

    def again(self, lease_id: int) -> Grant:
        """What is still open of a lease, as it was sent."""
        index, lease = self._state.index, self._state.leases[lease_id]
        tasks = lease.tasks[index.lease[lease.tasks] == lease_id]
        lanes = [self._state.lanes[at] for at in np.unique(index.lane[tasks]).tolist()]
        lane = max(lanes, key=lambda lane: lane.key.length)
        return self._granted(lease_id, lane, tasks)

    def release(self, who: str) -> None:
        """The session is gone; its arcs are free."""
        for lane in self._state.lanes:
            lane.order.release(who)

    def _cut(self, lane: Lane, budget: Budget, asker: Asker) -> _Cut | None:
        """The next batch of a lane that has ready tasks, which leaves it only with `_take_cut`. None if there is none
        for this session."""
        index, front = self._state.index, self._front_is_for(lane, asker)
        self._recall(lane)
        view = self._look(lane, budget.sequences, asker.name, front=front)
        if view is not None and not len(view.at) and front and lane.order.has_front:
            view = self._look(lane, budget.sequences, asker.name, front=False) or view
        if view is None:
            return None
        if not len(view.at):
            raise _RowsAway
        tasks = view.tasks
        prompt = index.prompt[tasks].astype(np.int64)
        shared = self._shared(lane, tasks, prompt)
        new = index.new[tasks].astype(np.int64) if budget.kv_tokens is not None else NO_PLACES
        count = pack(prompt, new, budget, padded_length=lane.key.length, shared=shared)
        own = (prompt - shared)[:count]
        is_full = count < len(tasks) or is_full_batch(
            own, new[:count], budget, padded_length=lane.key.length
        )
        roomy = self._room.cut(lane, tasks[:count])
        if not roomy:
            self.held_back = NO_ROOM
            return None
        alone = view.front and lane.order.has_front  # suspects go as they are, and before others
        return _Cut(view, prompt, shared, roomy, is_full or alone or roomy < count)

    def _take_cut(self, queue: LaneQueue, cut: _Cut, budget: Budget) -> Grant:
        view, count, lane = cut.view, cut.count, cut.view.lane
        thin = lane.step is Step.DRAINING and lane.key.length and not cut.is_full
        if thin and count == lane.ready and not lane.order.has_front:
            others = sum(other.ready for other in queue.neighbours(lane))
            most = max(count, self._room.sequences(min(budget.sequences, count + others)))
            tasks = self._take_merged(queue, view, replace(budget, sequences=most))
            return self._granted(self._state.next_lease, lane, tasks)
        tokens = int(cut.prompt[:count].sum())
        return Grant(
            self._state.next_lease, lane, self._take(view, count), cut.shared[:count], tokens
        )

    def _granted(self, lease_id: int, lane: Lane, tasks: Sequences) -> Grant:
        prompt = self._state.index.prompt[tasks].astype(np.int64)
        return Grant(lease_id, lane, tasks, self._shared(lane, tasks, prompt), int(prompt.sum()))

    def _take_merged(self, queue: LaneQueue, home: _View, budget: Budget) -> Sequences:
        """All that is left of a draining lane, and of its shorter neighbours what pads little enough."""
        views, count = [home], len(home.at)
        for lane in queue.neighbours(home.lane):
            if count >= budget.sequences:
                break
            if not lane.order.has_front:
                view = self._look(lane, budget.sequences - count, SHARED_WALK)
                assert view is not None
                views.append(view)
                count += len(view.at)
        count = merge(
            self._state.index.prompt[np.concatenate([view.tasks for view in views])],
            len(home.at),
            budget,
            padded_length=home.lane.key.length,
            waste=self._merge_waste,
        )
        parts = []
        for view in views:
            given = min(count, len(view.at))
            if given:
                parts.append(self._take(view, given))
            count -= given
        return np.concatenate(parts)

    def _look(self, lane: Lane, limit: int, who: str, *, front: bool = True) -> _View | None:
        """Entries of the order that are no longer ready are dropped on the way, and those out of reach step aside.
        Without a place in it: nobody can read its next rows now. None, which only happens without `front`: nothing is
        ready."""
        who = SHARED_WALK if lane.key.length or lane.order.rearranged else who
        wanted, looked = limit, 0
        while True:
            seen = lane.order.peek(wanted, who, front=front)
            if (not len(seen) and lane.order.has_aside) or looked > LOOKED_MAX:
                return _View(lane, who, NO_PLACES, NO_PLACES, front)
            if not len(seen) and not front:
                return None
            assert len(seen), (
                f"lane {lane.name} counts {lane.ready} ready tasks that its order lost"
            )
            at = (self._state.index.state[seen] == READY).nonzero()[0]
            view = _View(lane, who, seen, at, front)
            if not len(at):
                self._take(view, 0)
            elif self._step_aside(view):
                wanted, looked = max(limit, LOOKED_AT_ONCE), looked + len(seen)
            elif len(at) < limit and len(seen) == wanted:
                wanted += limit  # some of these were claimed out of the order
            else:
                view = view.upto(limit)
                return view if self.near is None else view.upto(self.near(view.tasks))

    def _step_aside(self, view: _View) -> bool:
        """Rows that nobody can read before the store answers again let those behind them pass, and go first once it
        does. Rows that are only on their way do not: were they passed, a lane would go in the order in which its
        segments come back, and not by prefix. Suspects stay where they are. Whether any did."""
        order = view.lane.order
        if self.out_of_reach is None or (view.front and order.has_front):
            return False
        gone = self.out_of_reach(view.tasks)
        if gone is None:
            return False
        places = np.zeros(len(view.seen), np.bool_)
        places[view.at[gone]] = True
        order.step_aside(places, view.who)
        return True

    def _recall(self, lane: Lane) -> None:
        """Those of the longest aside that can be read, or asked for, again go first now; some of the others are asked
        for, so that it shows when they can."""
        order = lane.order
        if self.near is None or self.out_of_reach is None or not order.has_aside:
            return
        tasks = order.recall(LOOKED_AT_ONCE)
        gone = self.out_of_reach(tasks)
        if gone is not None:
            self.near(tasks[gone][:ASKED_AGAIN])
            order.aside(tasks[gone])
            self._rejoin(lane, tasks[~gone])
            return
        while len(tasks):
            self._rejoin(lane, tasks)
            tasks = order.recall(LOOKED_AT_ONCE)

    def _rejoin(self, lane: Lane, tasks: Sequences) -> None:
        """They stood aside and go first now; what is under suspicion by itself, as ever."""
        lane.order.add_ahead(self._state.unsuspected(tasks))
        for _, piece in self._state.suspect_pieces(tasks):
            lane.order.add_front(piece)

    def _take(self, view: _View, count: int) -> Sequences:
        """The first `count` ready ones of a view leave the order, and the stale ones between them."""
        used = len(view.seen) if count == len(view.at) else int(view.at[count])
        self._state.index.queued[view.seen[:used]] = False
        view.lane.order.advance(used, view.who, front=view.front)
        return view.tasks[:count]

    def _shared(
        self, lane: Lane, tasks: Sequences, prompt: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Keys of lanes by rule 1 are of another layout: nothing is counted as shared there."""
        if lane.key.output_class:
            return np.zeros(len(tasks), np.int64)
        return shared_tokens(self._state.index.key[tasks], prompt, among=lane.enqueued)

    def ahead(self, who: str, lane: Lane, sequences: int) -> None:
        """Rows that this session will need soon are asked for, should they be away."""
        if self.near is not None and lane.ready:
            who = SHARED_WALK if lane.key.length or lane.order.rearranged else who
            self.near(lane.order.peek(sequences, who))

    def stranded(self) -> list[str]:
        """Lanes whose order does not hold exactly their ready tasks once: those tasks would wait for ever."""
        found = []
        index = self._state.index
        for lane in self._state.lanes:
            held = lane.order.tasks()
            ready = np.sort(held[index.state[held] == READY])
            if len(ready) != lane.ready or len(np.unique(ready)) != len(ready):
                found.append(
                    f"lane {lane.name} has {lane.ready} ready tasks, its order holds {len(ready)}"
                )
        return found
