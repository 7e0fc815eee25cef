"""Upkeep: when a checkpoint is due, which front of the log is cleared, what is scrubbed; a slice at each tick.

The owner's thread decides and writes facts; only the bytes of a checkpoint are compressed and written elsewhere
(`background`). Order is everything: the checkpoint's file is durable before its fact, its fact before a DROP
that leans on it, the DROP before the journal gives a segment up, and only then do older files go; that of a
checkpoint under way never does, whoever asked for it and whatever is cleared meanwhile. No DROP is written whose
checkpoint is not on the disk at that moment.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from errno import ENOSPC
from typing import Any

import numpy as np

from fabric_pipelines.broker import snapshot, space
from fabric_pipelines.broker.checkpoint import Checkpoints
from fabric_pipelines.broker.core import Core
from fabric_pipelines.broker.facts import CheckpointTaken, Dropped, Fact, Moved, MovedComputed
from fabric_pipelines.broker.payloads import Payloads
from fabric_pipelines.broker.recovery import Restored
from fabric_pipelines.broker.room import UPKEEP_BYTES
from fabric_pipelines.broker.tiering import Tiering
from fabric_pipelines.broker.withheld import Withheld
from fabric_pipelines.clock import Clock
from fabric_pipelines.errors import Backpressure, CorruptionFound, StorageFailed, UsageError
from fabric_pipelines.journal import Holding, Journal
from fabric_pipelines.journal.faults import journal_failed
from fabric_pipelines.records.arrow import to_ipc

MOVE_BYTES = 4 << 20
PRESSED_EVERY_S = 0.5
GIVE_BACK_S = 10.0
ROUND = 2.0  # no share of a segment that lives is too large
CHECKPOINT_BYTES, TASK_BYTES, SUBMISSION_BYTES = 1 << 16, 32, 2048  # of a file, see Upkeep
COUNTERS = (
    "checkpoints",
    "checkpoints_refused",
    "segments_dropped",
    "moved_tasks",
    "moved_outcomes",
    "cleaning_refused",
    "pins_given_up",
)

Background = Callable[[Callable[[], Any]], "Future[Any]"]


@dataclass(frozen=True, slots=True)
class Rhythm:
    """checkpoint_bytes: take one after so much log; high_water: from there on space is made in a hurry."""

    checkpoint_bytes: int = 256 << 20
    high_water: int = 8 << 30


@dataclass(frozen=True, slots=True)
class Words:
    """What upkeep asks of its owner: make facts so (StorageFailed or UsageError if a MOVE finds no room), and
    make everything durable."""

    log: Callable[[list[Fact]], None]
    commit: Callable[[], None]


def at_once(work: Callable[[], Any]) -> Future[Any]:
    """Background work in the foreground: for tests that need one order of events."""
    answer: Future[Any] = Future()
    answer.set_result(work())
    return answer


class Upkeep:
    def __init__(
        self,
        journal: Journal,
        core: Core,
        payloads: Payloads,
        checkpoints: Checkpoints,
        restored: Restored,
        words: Words,
        *,
        rhythm: Rhythm,
        clock: Clock,
        background: Background = at_once,
    ) -> None:
        self.journal, self.core, self.payloads = journal, core, payloads
        self.rhythm, self.clock = rhythm, clock
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.disk_full = self.base_is_lost = False
        self.base = restored.base
        self.newest, self.older = restored.newest, restored.older
        self._checkpoints, self._words, self._background = checkpoints, words, background
        if self.older is not None and not checkpoints.holds(self.older):
            self.older = None  # it went when the front of the log did
        self._behind = restored.tail_bytes
        self._underway: Future[CheckpointTaken | None] | None = None
        self._share = space.MOSTLY_DEAD
        self._below = 0
        self._clearing_all = False
        self._tiering: Tiering | None = None
        self._pressed_s = float("-inf")
        self._needed_bytes, self._gave_back_s = 0, clock.monotonic_s()
        core.room.may_dip = False
        self.withheld: Withheld | None = None
        self.damaged: Callable[[CorruptionFound], bool] = lambda fault: False
        self._finish_drop()
        self._keep(restored.newest, restored.older)

    def join(self, tiering: Tiering) -> None:
        """The log has a cold tier: its segments go there once they are covered, and are cleared from there."""
        self._tiering = tiering
        tiering.covered_lsn = lambda: self.newest.lsn if self.newest is not None else 0
        tiering.checkpoint = self.begin_checkpoint

    def cover(self, lsn: int) -> None:
        """That frame is damaged: the next start must not have to replay it."""
        if self.newest is None or self.newest.lsn < lsn:
            self._behind = max(self._behind, self.rhythm.checkpoint_bytes)

    def grew(self, size: int) -> None:
        """So many bytes went into the log."""
        self._behind += size

    @property
    def pressed(self) -> bool:
        tight = self.disk_full or self.core.room.is_short
        return tight or self.journal.bytes_used >= self.rhythm.high_water

    def tick(self) -> None:
        now_s = self.clock.monotonic_s()
        if self._underway is not None and self._underway.done():
            self._finish_checkpoint(self._underway.result())
        if self._below:
            self._clear_some()
        elif self._underway is None:
            if self._behind >= self.rhythm.checkpoint_bytes:
                self.begin_checkpoint()
            elif self.pressed and now_s - self._pressed_s >= PRESSED_EVERY_S:
                self._pressed_s = now_s
                self._look_again()
                self._make_room()
            elif not self.pressed:
                self.core.room.may_dip = False
                self._give_back(now_s)

    def _look_again(self) -> None:
        """What a caller found full may be so no longer, without a DROP: others freed space, or free segments gave way."""
        if self.disk_full and self.core.room.is_wide:
            size = self._checkpoint_size()
            self.disk_full = not self._has_checkpoint_room(size, self.core.room.keep)

    def _give_back(self, now_s: float) -> None:
        """Segments that nothing needed for a while: what is leased was more once."""
        self._needed_bytes = max(self._needed_bytes, self.core.room.keep)
        if now_s - self._gave_back_s >= GIVE_BACK_S:
            self.journal.release(self._needed_bytes)
            self._needed_bytes, self._gave_back_s = 0, now_s

    # -- checkpoints

    def begin_checkpoint(self) -> None:
        """Over everything up to now; written in the background, one at a time."""
        if self._underway is not None:
            return
        slack = self.core.room.slack
        if slack is not None and slack < UPKEEP_BYTES:
            return  # its fact would take what is promised
        self._words.commit()
        taken, lsn = snapshot.take(self.core.state), self.journal.durable_lsn
        self._behind = 0
        self._checkpoints.claim(lsn)
        self._underway = self._background(lambda: self._checkpoints.write(taken, lsn))

    def settle(self) -> None:
        """Wait for a checkpoint under way and write down that it is there."""
        if self._underway is not None:
            self._finish_checkpoint(self._underway.result())

    def _finish_checkpoint(self, taken: CheckpointTaken | None) -> None:
        self._underway = None
        if taken is None:
            self._checkpoints.release()
            self.counters["checkpoints_refused"] += 1
            size = self._checkpoints.refused_bytes
            lacked = self._checkpoints.lacks(size)
            if lacked and self._has_checkpoint_room(size, self.core.room.needed):
                self._behind = max(self._behind, self.rhythm.checkpoint_bytes)  # at once again
        else:
            self._words.log([taken])
            self._words.commit()
            self._checkpoints.release()
            self.counters["checkpoints"] += 1
            self._keep(taken, self.newest)
            self.newest, self.older = taken, self.newest
            self._checkpoints.reserve(2 * taken.size)
            if self.base_is_lost and self.base is not None:
                self._lean_on(taken, self.base.below)
        self._choose_front()

    def require_checkpoint_room(self) -> None:
        """Backpressure for new tasks while the disk has no room for a checkpoint with them: without one nothing of the
        log is ever freed. StorageFailed if nothing will be."""
        if self._checkpoints.is_claimed:
            return
        size = self._checkpoint_size()
        if not self._has_checkpoint_room(size, self.core.room.keep):
            self.disk_full = True
            if self.core.room.may_dip and not self.core.state.promised_bytes:
                # nothing is under way and nothing can be dropped: who waited would wait for ever
                raise journal_failed(
                    self.journal.folder, OSError(ENOSPC, ""), "keeping room for a checkpoint"
                )
            raise Backpressure(
                f"the disk of the journal is full: it has no {size} bytes for the next checkpoint, which frees space in "
                "the end; tasks are taken again when what has landed was dropped from the log, or when space is freed",
                retry_after_s=5.0,
            )

    def _checkpoint_size(self) -> int:
        """Of the next one, at most."""
        state = self.core.state
        size = CHECKPOINT_BYTES + TASK_BYTES * state.index.count
        size += SUBMISSION_BYTES * len(state.submissions)
        return max(size, 2 * self.newest.size if self.newest is not None else 0)

    def _has_checkpoint_room(self, size: int, keep: int) -> bool:
        """If need be out of free segments that are not needed to hold `keep` bytes: a drained log leaves many, and the disk
        has nothing else. None is given back in vain, since leases could use it."""
        if self._checkpoints.reserve(size):
            return True
        if self._checkpoints.lacks(size) > self.journal.freeable(keep):
            return False
        while self.journal.release(keep, most=1):
            self.core.room.look()
            if self._checkpoints.reserve(size):
                return True
        return False

    def kept(self) -> list[CheckpointTaken]:
        """Of which files are here: of the newest, of the spare before it, of the one that the log begins behind."""
        base = self.base
        begins = [] if base is None else [CheckpointTaken(base.base, base.digest, 0)]
        facts = [fact for fact in (self.newest, self.older, *begins) if fact is not None]
        return list({fact.lsn: fact for fact in reversed(facts)}.values())

    def _keep(self, *facts: CheckpointTaken | None) -> None:
        lsns = {fact.lsn for fact in facts if fact is not None}
        if self.base is not None:
            lsns.add(self.base.base)
        self._checkpoints.keep(lsns)

    # -- freeing the front of the log

    def _make_room(self) -> None:
        """Pressed for space: if a good part of the log is dead, see to it that it can be cleared. If leases wait and less
        is, the log goes round by what the floor takes, see `space.front_that_fits`. Nothing is tried that frees nothing:
        each checkpoint takes space, too."""
        need = self._needed(pinned=False)
        holdings = self.journal.holdings
        live = space.live_bytes(need, self.journal, holdings)
        here = np.array([not holding.cold for holding in holdings])
        dead = sum(holding.bytes for holding in holdings if not holding.cold) - int(
            live[here].sum()
        )
        least = min(self.rhythm.high_water, self.journal.segment_bytes) // 4
        much = max(least, int((1 - space.UNDER_PRESSURE) * self.journal.bytes_used))
        room = self.core.room
        shares = [space.UNDER_PRESSURE] if dead >= much else []
        shares += [ROUND] if room.is_short and dead >= least // 2 else []
        room.may_dip = not shares
        for share in shares:
            if self._front(holdings, live, self._covered_lsn, share):
                self._share = share
                self._choose_front()
                return
            if self._front(holdings, live, self.journal.next_lsn, share):
                self._share = share
                self.begin_checkpoint()
                return
        sealed = [*holdings[:-1], replace(holdings[-1], sealed=True)]
        for share in shares if holdings[-1].bytes > least // 2 else ():
            if self._front(sealed, live, self.journal.next_lsn, share) and self._roll(
                int(live[-1])
            ):
                self._share = share
                self.begin_checkpoint()
                return
        room.may_dip = True

    @property
    def _covered_lsn(self) -> int:
        return self.newest.lsn if self.newest is not None else 0

    def _roll(self, live: int) -> bool:
        """The rest of a segment is lost by it: never what is promised or what its own live rows are copied into, nor,
        while leases go on, the floor."""
        room, journal = self.core.room, self.journal
        if (slack := room.slack) is not None:
            rest = journal.held_bytes - journal.held_behind
            least = space.copied_bytes(live) + UPKEEP_BYTES if room.is_short else room.floor
            needed = journal.held_bytes - slack + least
            journal.hold(needed + rest)
            if journal.held_behind < needed:
                return False
        before = len(journal.holdings)
        self._words.commit()
        self.roll()
        return len(journal.holdings) > before

    def _front(self, holdings: list[Holding], live: Any, covered_lsn: int, share: float) -> int:
        """First LSN to keep, as far as a checkpoint of that LSN allows and the live rows have a place to go."""
        if (first := self._first_withheld()) is not None:  # what cannot be read cannot be copied
            holdings = [holding for holding in holdings if holding.last_lsn < first]
            live = live[: len(holdings)]
        left = self.core.room.left
        room = 1 << 60 if left is None else left + self.core.room.floor - UPKEEP_BYTES
        if share == ROUND:
            return space.front_that_fits(holdings, live, covered_lsn, room)
        below = space.front_to_clear(holdings, live, covered_lsn, share)
        over = [
            own for holding, own in zip(holdings, live, strict=True) if holding.last_lsn < below
        ]
        return below if sum(map(space.copied_bytes, over)) <= room else 0

    def roll(self) -> None:
        """Seal the segment that is written to, if there is room for another one; everything is committed."""
        try:
            self.journal.roll()
        except StorageFailed:
            self._words.commit()  # a full disk is no reason to stop, a dead journal is

    def _choose_front(self) -> None:
        share, self._share = self._share, space.MOSTLY_DEAD
        if self.newest is None:
            return
        holdings = self.journal.holdings
        need = self._needed(pinned=share == space.MOSTLY_DEAD)
        live = space.live_bytes(need, self.journal, holdings)
        self._below = self._front(holdings, live, self.newest.lsn, share)
        self._clearing_all = share != space.MOSTLY_DEAD

    def _first_withheld(self) -> int | None:
        """The first damaged frame here that somebody needs."""
        if self.withheld is None or not len(self.withheld.lsns):
            return None
        needed = np.intersect1d(self.withheld.lsns, self._needed(pinned=False).lsns)
        return int(needed[0]) if len(needed) else None

    def _clear_some(self) -> None:
        """Copy the next live rows forward, or drop the front when none are left."""
        try:
            facts = self._next_moves()
        except CorruptionFound as fault:
            self.damaged(fault)
            if not self._gave_up_pins():
                self.counters["cleaning_refused"] += 1
                self._below = 0  # up to it at the next checkpoint
            return
        if facts is None or (not facts and self._in_use(self._below)):
            return
        if not facts:
            self._drop()
            return
        try:
            self._words.log([*facts])
        except (StorageFailed, UsageError):
            # no room to copy into, or a batch that fits no segment together with its ids: it may die yet
            self.counters["cleaning_refused"] += 1
            self._below = 0
            return
        for fact in facts:
            moved = "moved_tasks" if isinstance(fact, Moved) else "moved_outcomes"
            self.counters[moved] += len(fact.tasks)

    def _gave_up_pins(self) -> bool:
        """A damaged or lost row that is kept in case of need only: rather without it than not at all. False if
        nothing was kept for that reason alone."""
        if self._clearing_all:
            return False
        self.counters["pins_given_up"] += 1
        self._clearing_all = True
        return True

    def _needed(self, *, pinned: bool) -> space.Needed:
        state, first_lsn = self.core.state, self.journal.first_lsn
        return space.needed(state, first_lsn, pin_open=pinned, pin_dead=pinned)

    def _in_use(self, below: int) -> bool:
        return self._tiering is not None and self._tiering.busy_below(below)

    def _next_moves(self) -> list[Moved | MovedComputed] | None:
        """None while rows to be copied are on their way from the cold tier."""
        state, below = self.core.state, self._below
        need = self._needed(pinned=not self._clearing_all)
        size = min(MOVE_BYTES, self.journal.segment_bytes // 8)
        batches = space.batches_to_move(state, need, self.journal, below, size)
        if len(batches):
            rows = np.concatenate([state.index.rows_of(int(batch)) for batch in batches])
            tasks = rows[need.tasks[rows]]
            if self._tiering is not None and self._tiering.near(tasks) < len(tasks):
                if self._tiering.lost_rows(tasks).any() and not self._gave_up_pins():
                    self.counters["cleaning_refused"] += 1
                    self._below = 0
                return None
            self._require_written(state.index.locate(tasks)[0])
            return [Moved(tasks, batches, to_ipc(self.payloads.tasks(tasks)))]
        outcomes = space.outcomes_to_move(state, need, self.journal, below, size)
        if len(outcomes):
            return [MovedComputed(outcomes, to_ipc(self.payloads.outcomes(outcomes)))]
        return []

    def _require_written(self, lsns: Any) -> None:
        assert int(lsns.max()) <= self.journal.durable_lsn, "what is cleared is durable"

    def _drop(self) -> None:
        assert self.newest is not None
        below, self._below = self._below, 0
        self._lean_on(self.newest, below)

    def _lean_on(self, newest: CheckpointTaken, below: int) -> None:
        """What is below that LSN is given up, or was: from here on this checkpoint stands for it."""
        self._checkpoints.require(newest)
        fact = Dropped(below, newest.lsn, newest.digest)
        self._words.log([fact])
        self._words.commit()
        self.base, self.base_is_lost = fact, False
        self._finish_drop()
        self._keep(newest)
        self.older = None

    def _finish_drop(self) -> None:
        """Do what the last DROP fact says; a crash may have come between."""
        if self.base is None:
            return
        self.payloads.forget_below(self.base.below)
        before = len(self.journal.holdings)
        self.journal.recycle_below(self.base.below)
        self.counters["segments_dropped"] += before - len(self.journal.holdings)
        if self._tiering is not None:
            self._tiering.dropped()
        self.disk_full = False

    def figures(self) -> dict[str, int]:
        """For the broker's status."""
        return {
            "checkpoint_lsn": self.newest.lsn if self.newest else 0,
            "checkpoint_bytes": self.newest.size if self.newest else 0,
            "base_lsn": self.base.base if self.base else 0,
            "first_lsn": self.journal.first_lsn,
            "segments": len(self.journal.holdings),
        }
