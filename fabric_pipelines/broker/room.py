"""Room: what the disk can still take, and what of it is promised to the outcomes of leased tasks.

A task's outcome is promised its space when the task is leased (4 bytes for each token it may generate, its vector
where the size is known, and the fixed columns) and gives it back when it is computed, fails or comes back. The
promise is a sum over the tasks that are leased or in doubt, so that a restart finds it again. New tasks never get
promised space; a lease is cut to what is left, or waits. With nothing under way one task goes all the same: what waits
for space that nothing will free would wait for ever.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.accounts import COMPUTED, IN_DOUBT, LEASED
from fabric_pipelines.broker.lanes import Lane
from fabric_pipelines.broker.state import OUTCOME_BYTES, TOKEN_BYTES, State
from fabric_pipelines.errors import Backpressure

Sequences = npt.NDArray[np.int64]
NO_ROOM = (
    "the disk has no room for more outcomes than those of the tasks under way: free some space"
)


class Room:
    """Knows nothing until somebody has looked (`seen`); then nothing is withheld for want of space."""

    __slots__ = ("_grown", "_seen", "_state", "_wanted")

    def __init__(self, state: State) -> None:
        self._state = state
        self._seen: int | None = None
        self._grown = 0
        self._wanted = 0

    def seen(self, free: int | None) -> None:
        """The disk takes so many bytes of frames more; None: nobody knows."""
        self._seen, self._grown = free, 0

    def grew(self, size: int) -> None:
        """So many bytes went into the log since."""
        self._grown += size

    @property
    def left(self) -> int | None:
        """Bytes that are promised to nobody; below 0 when other things filled the disk."""
        if self._seen is None:
            return None
        return self._seen - self._grown - self._state.reserved_bytes

    @property
    def is_tight(self) -> bool:
        """Whether the last lease that waited would still wait."""
        left = self.left
        return left is not None and left < self._wanted and self._is_under_way()

    def cut(self, lane: Lane, tasks: Sequences) -> int:
        """How many of the first tasks of a lease have room for their outcomes."""
        left = self.left
        if left is None or not len(tasks):
            return len(tasks)
        new = self._state.index.new[tasks].astype(np.int64)
        fixed = OUTCOME_BYTES + int(self._state.lane_vector.view[lane.index])
        if TOKEN_BYTES * int(new.sum()) + fixed * len(tasks) <= left:
            return len(tasks)
        needs = np.cumsum(TOKEN_BYTES * new + fixed)
        count = int(np.searchsorted(needs, left, side="right"))
        self._wanted = int(needs[0])
        return count if count or self._is_under_way() else 1

    def sequences(self, lane: Lane, most: int) -> int:
        """How many single-pass tasks have room, at most so many."""
        left = self.left
        if left is None:
            return most
        return min(most, left // (OUTCOME_BYTES + int(self._state.lane_vector.view[lane.index])))

    def require(self, size: int) -> None:
        """Backpressure for new tasks of so many bytes that would take promised space. Of space that is not there at
        all the journal speaks for itself."""
        left, promised = self.left, self._state.reserved_bytes
        if left is not None and left < size <= left + promised:
            raise Backpressure(
                f"the disk has room for {left + promised} bytes, {promised} of them promised to outcomes of leased "
                f"tasks, and the batch is of {size}: tasks are taken again when results have landed",
                retry_after_s=5.0,
            )

    def _is_under_way(self) -> bool:
        accounts = self._state.accounts
        return any(accounts.in_state(state) for state in (LEASED, IN_DOUBT, COMPUTED))
