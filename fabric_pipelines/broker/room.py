"""Room: whether the space that the journal holds is enough for what is promised out of it, and for one more promise.

The one rule: **the journal holds what every leased task may still write** (promise.py), **and behind that the floor.**
A promise is made at the lease, out of segments that are allocated already, so that no other program can take it; it is
a sum over the tasks that are leased, in doubt or computed, so that a restart finds it again. A lease is cut to what is
left above the floor, or waits. The floor is a segment and a half that only upkeep uses: with it the front of the
log is copied forward and dropped, whatever else the disk has. New tasks stop half a segment before leases do. With
nothing under way, and nothing that upkeep could free, one task goes all the same, out of the floor, if its promise can
be kept: what waits for space that nothing will free would wait for ever.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.accounts import COMPUTED, IN_DOUBT, LEASED
from fabric_pipelines.broker.facts import (
    Computed,
    Enqueued,
    Fact,
    Moved,
    MovedComputed,
    Requeued,
    SubmissionClosed,
    SubmissionOpened,
)
from fabric_pipelines.broker.lanes import Lane
from fabric_pipelines.broker.promise import (
    LEASE_BYTES,
    OUTCOME_BYTES,
    SETTLE_BYTES,
    TASK_BYTES,
    TOKEN_BYTES,
)
from fabric_pipelines.broker.state import State
from fabric_pipelines.errors import Backpressure

Sequences = npt.NDArray[np.int64]
NO_ROOM = (
    "the disk has no room for more outcomes than those of the tasks under way: free some space"
)
UPKEEP_BYTES = 4096  # of a checkpoint's fact, of a DROP and what is written around them
SETTLED = SETTLE_BYTES + TASK_BYTES
EACH = OUTCOME_BYTES + SETTLED
SETTLED_MAX = 1 << 40
LEAVING = (Requeued, SubmissionClosed, Moved, MovedComputed, Computed)


class Space(Protocol):
    """What the journal has for frames, see `Journal`; None: there is no end of it."""

    frame_max: int

    @property
    def segment_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int | None: ...
    @property
    def room_bytes(self) -> int | None: ...
    def hold(self, size: int) -> int | None: ...


class Room:
    """Knows nothing before it was given a `space`; then nothing is withheld for want of it."""

    __slots__ = ("_outside", "_refused", "_space", "_state", "_wanted", "may_dip")

    def __init__(self, state: State) -> None:
        self._state = state
        self._space: Space | None = None
        self._outside = 0
        self._refused = False
        self._wanted = 0
        self.may_dip = True  # into the floor: upkeep has nothing to free

    def of(self, space: Space) -> None:
        self._space = space
        if len(held := self._state.under_way):
            self._expect(self._outcomes(held))
        self.look()

    def look(self) -> None:
        """At the disk, now and then; and have ready what the next leases may need."""
        space = self._space
        if space is None or (held := space.held_bytes) is None:
            return
        self._refused = False
        room = space.room_bytes
        assert room is not None, "a journal that knows what it holds knows what it may"
        self._outside = room - held

    @property
    def floor(self) -> int:
        """For upkeep alone."""
        return 0 if self._space is None else self._space.segment_bytes * 3 // 2

    @property
    def needed(self) -> int:
        """What nobody may take but those whom it is for."""
        return self._state.promised_bytes + self.floor

    @property
    def keep(self) -> int:
        """What new tasks leave."""
        return self.needed + (0 if self._space is None else self._space.segment_bytes // 2)

    @property
    def is_wide(self) -> bool:
        """Whether new tasks that fill a segment would leave that."""
        if self._space is None or (left := self.left) is None:
            return True
        return left >= self._space.segment_bytes * 3 // 2

    @property
    def slack(self) -> int | None:
        """Bytes held that are promised to nobody, floor included."""
        held = None if self._space is None else self._space.held_bytes
        return None if held is None else held - self._state.promised_bytes

    @property
    def left(self) -> int | None:
        """What leases may still be promised, if the disk stays as it is; below 0 when other things filled it."""
        slack = self.slack
        return None if slack is None else slack + self._outside - self.floor

    def keeps(self, fact: Fact) -> int | None:
        """Bytes held that such a fact leaves to others; None for one that was promised its space or only frees some."""
        if isinstance(fact, Enqueued | SubmissionOpened):
            return self.keep
        if not isinstance(fact, LEAVING):
            return None
        promised = self._state.promised_bytes
        if isinstance(fact, Requeued):
            return self.needed
        if isinstance(fact, SubmissionClosed):
            return promised + self.floor // 2
        if isinstance(fact, Moved | MovedComputed):
            return promised + UPKEEP_BYTES
        if isinstance(fact, Computed):
            own = int(self._outcomes(fact.tasks).sum())
            if len(fact.ipc) > own:  # more than its tasks may generate
                return max(promised - own, 0) + UPKEEP_BYTES
        return None

    @property
    def is_tight(self) -> bool:
        """Whether the last lease that waited would still wait."""
        left = self.left
        return left is not None and left < self._wanted and not self._dips(self._wanted)

    @property
    def is_short(self) -> bool:
        """Whether leases wait, or upkeep lacks a part of its floor."""
        left = self.left
        return left is not None and (left < 0 or left < self._wanted)

    def cut(self, lane: Lane, tasks: Sequences) -> int:
        """How many of the first tasks of a lease have room for all that becomes of them."""
        if self._space is None or not len(tasks) or self._space.held_bytes is None:
            return len(tasks)
        new = self._state.index.new[tasks]
        each = EACH + int(self._state.lane_beside.view[lane.index])
        tokens = TOKEN_BYTES * int(new.sum(dtype=np.int64))
        if tokens + each - SETTLED > self._space.frame_max:  # no single one is more than that
            self._expect(TOKEN_BYTES * new.astype(np.int64) + each - SETTLED)
        total = tokens + each * len(tasks) + LEASE_BYTES
        left = self._free(total)
        if total <= left:
            self._wanted = 0
            return len(tasks)
        needs = np.cumsum(TOKEN_BYTES * new.astype(np.int64) + each) + LEASE_BYTES
        count = int(np.searchsorted(needs, left, side="right"))
        self._wanted = 0 if count else int(needs[0])
        return count or int(self._dips(self._wanted))

    def takes(self, tasks: Sequences, which: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """`which` of those tasks, as far as there is such room for them."""
        if self._space is None or not which.any() or self._space.held_bytes is None:
            return which
        at = np.flatnonzero(which)
        needs = np.cumsum(self._outcomes(tasks[at]) + SETTLED) + LEASE_BYTES
        taken = np.zeros(len(tasks), np.bool_)
        taken[at[: np.searchsorted(needs, self._free(int(needs[-1])), side="right")]] = True
        return taken

    def settlements(self) -> int:
        """How many tasks that were not leased can be retired or buried beside all that is promised."""
        left = self.left
        return SETTLED_MAX if left is None else max(left, 0) // SETTLED

    def _outcomes(self, tasks: Sequences) -> Sequences:
        index = self._state.index
        beside = self._state.lane_beside.view[index.lane[tasks]]
        sizes: Sequences = TOKEN_BYTES * index.new[tasks].astype(np.int64) + beside + OUTCOME_BYTES
        return sizes

    def sequences(self, most: int) -> int:
        """How many single-pass tasks have room, at most so many."""
        each = EACH + int(self._state.lane_beside.view.max())  # others may share the batch
        left = self._free(each * most + LEASE_BYTES)
        return min(most, max(left - LEASE_BYTES, 0) // each)

    def has(self, size: int) -> bool:
        """Whether so much can be promised beyond what is."""
        return size <= self._free(size)

    def require(self, size: int) -> None:
        """Backpressure for new tasks of so many bytes that would take promised space. Of space that is not there at
        all the journal speaks for itself."""
        left = self.left
        if left is not None and left < size:
            self.require_end(size)

    def require_end(self, size: int) -> None:
        """Backpressure, if there will be space for so many bytes that do not go in now once results have landed."""
        left, promised = self.left, self._state.promised_bytes
        if left is not None and promised:
            raise Backpressure(
                f"the disk has room for {max(left, 0) + promised} bytes, {promised} of them promised to outcomes of leased "
                f"tasks, and the batch is of {size}: tasks are taken again when results have landed",
                retry_after_s=5.0,
            )

    def _free(self, size: int) -> int:
        """What can be promised now; segments are allocated for `size` of it if need be."""
        slack = self.slack
        if slack is None or self._space is None:
            return size
        if slack - self.floor < size and not self._refused:
            wanted = size + self.floor + self._state.promised_bytes
            held = self._space.hold(wanted)
            assert held is not None, "what was held is not"
            self._refused = held < wanted  # not again before the next look
            slack = held - self._state.promised_bytes
        return max(slack - self.floor, 0)

    def _expect(self, sizes: Sequences) -> None:
        """Outcomes so large are to be written: what segments lose at their ends may be as much."""
        if self._space is not None:
            self._space.frame_max = max(self._space.frame_max, int(sizes.max()))

    def _dips(self, size: int) -> bool:
        slack = self.slack
        if slack is None or not self.may_dip or size > slack:
            return False
        accounts = self._state.accounts
        return not any(accounts.in_state(state) for state in (LEASED, IN_DOUBT, COMPUTED))
