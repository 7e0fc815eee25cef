"""Withheld: tasks whose row, and outcomes that, lie in a frame on this disk which is not what was written.

A damaged frame of rows costs those rows, and nobody else's work: they are leased, copied and landed by nobody, stay in
the ledger as what they are, and all others go on. It is found before anything is said of its tasks: by the read that
comes before a lease is logged, or by the scrub. They wait until the frame is whole again or until their submission is
given up, which makes dead letters of them. Not written down anywhere: a start finds it again where it is met.

Damage in a fact is another matter: without it the state is not known. A running broker has the state, and covers the
fact with a checkpoint; a start that would have to read it is refused.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.accounts import COMPUTED, IN_DOUBT, LEASED, READY
from fabric_pipelines.broker.losses import NOTHING, Sequences
from fabric_pipelines.broker.replies import DamagedFrame
from fabric_pipelines.broker.state import State

Mask = npt.NDArray[np.bool_]


class Withheld:
    """The damaged frames here that tasks need, by LSN."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._frames: dict[int, DamagedFrame] = {}
        self.lsns: Sequences = NOTHING  # ascending

    def __contains__(self, lsn: int) -> bool:
        return lsn in self._frames

    def add(self, frame: DamagedFrame) -> None:
        self._frames[frame.lsn] = frame
        self.lsns = np.array(sorted(self._frames), np.int64)

    def remove(self, lsn: int) -> None:
        """It is whole again."""
        if self._frames.pop(lsn, None) is not None:
            self.lsns = np.array(sorted(self._frames), np.int64)

    @property
    def sentence(self) -> str:
        """What to say of the first one that tasks wait for."""
        frames = [self._frames[lsn] for lsn in self.lsns.tolist()]
        return next((frame.sentence for frame in frames if frame.live), "")

    def rows(self, tasks: Sequences) -> Mask | None:
        """Which of these tasks have their row there; None if none has."""
        if not len(self.lsns) or not len(tasks):
            return None
        gone: Mask = np.isin(self._state.index.locate(tasks)[0], self.lsns)
        return gone if gone.any() else None

    def outcomes(self, tasks: Sequences) -> Mask | None:
        """Which of these tasks have their outcome there; None if none has."""
        if not len(self.lsns) or not len(tasks):
            return None
        index = self._state.index
        done = index.done[tasks]
        gone = np.zeros(len(tasks), np.bool_)
        known = done >= 0
        gone[known] = np.isin(index.done_frames.view[done[known]], self.lsns)
        return gone if gone.any() else None

    def holds(self, batches: list[int]) -> bool:
        """Whether rows of one of these ENQUEUE batches lie there."""
        return bool(np.isin(self._state.index.frames.view[batches], self.lsns).any())

    def landable(self, tasks: Sequences) -> Sequences:
        """Those of these computed tasks whose outcome can be read."""
        gone = self.outcomes(tasks)
        return tasks if gone is None else tasks[~gone]

    def waiting(self) -> int:
        """Tasks whose row is still needed, or whose outcome is not landed, and lies there."""
        if not len(self.lsns):
            return 0
        states = self._state.index.state[: self._state.index.count]
        rows = self.rows(np.flatnonzero(np.isin(states, (READY, LEASED, IN_DOUBT))))
        outcomes = self.outcomes(np.flatnonzero(states == COMPUTED))
        return sum(int(gone.sum()) for gone in (rows, outcomes) if gone is not None)
