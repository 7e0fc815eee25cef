"""Scrubbing as the broker sees it: a slow round over all sealed segments, and what a damaged frame means.

The journal finds bytes that are not what was written; this names the tasks in them. Leasing stops when one of
them still lives, since its tokens or its outcome are lost here; damage among the dead is reported only, and
goes with its segment.
"""

from __future__ import annotations

import numpy as np

from fabric_pipelines.broker import space
from fabric_pipelines.broker.core import Core
from fabric_pipelines.broker.replies import DamagedFrame, ScrubReport
from fabric_pipelines.broker.space import Sequences
from fabric_pipelines.clock import Clock
from fabric_pipelines.journal import Damage, Journal, ScrubSlice

SLICE_BYTES = 4 << 20
EVERY_S = 1.0
SPANS_MAX = 16


class Scrubbing:
    def __init__(self, journal: Journal, core: Core, clock: Clock) -> None:
        self._journal, self._core, self._clock = journal, core, clock
        self._last_s = clock.monotonic_s()
        self.damaged: dict[int, DamagedFrame] = {}
        self.counters = dict.fromkeys(("scrubbed_bytes", "scrubbed_frames", "scrub_rounds"), 0)

    def tick(self) -> None:
        """A slice now and then: 8 GiB in about half an hour."""
        now_s = self._clock.monotonic_s()
        if now_s - self._last_s >= EVERY_S:
            self._last_s = now_s
            self.slice(SLICE_BYTES)

    def slice(self, budget_bytes: int) -> bool:
        """Look at about so many bytes more; whether that ended a round."""
        found = self._journal.scrub(budget_bytes)
        self.counters["scrub_rounds"] += found.round_ended
        self.note(found)
        return found.round_ended

    def note(self, found: ScrubSlice, *, cold: bool = False) -> None:
        """Count what was looked at and name what is damaged."""
        self.counters["scrubbed_bytes"] += found.bytes
        self.counters["scrubbed_frames"] += found.frames
        for damage in found.damaged:
            if damage.lsn not in self.damaged:
                self._name(damage, cold=cold)

    def forget(self, first_lsn: int, last_lsn: int) -> None:
        """Those frames were damaged and are whole again: an object was restored."""
        self.damaged = {
            lsn: frame for lsn, frame in self.damaged.items() if not first_lsn <= lsn <= last_lsn
        }

    def report(self) -> ScrubReport:
        """What is known to be damaged in the segments that are still held."""
        held = [f for lsn, f in sorted(self.damaged.items()) if lsn >= self._journal.first_lsn]
        sealed = [holding for holding in self._journal.holdings if holding.sealed]
        return ScrubReport(
            ok=not held,
            segments=len(sealed),
            frames=sum(holding.last_lsn - holding.first_lsn + 1 for holding in sealed),
            bytes=sum(holding.bytes for holding in sealed),
            damaged=held,
        )

    def _name(self, damage: Damage, *, cold: bool) -> None:
        """Damage in a cold segment stops the lanes that need it (see tiering), damage here stops all leasing."""
        tasks, live = self._tasks_at(damage.lsn)
        ids = spans_of(self._core.state.task_ids(tasks))
        self.damaged[damage.lsn] = frame = DamagedFrame(
            damage.segment, damage.offset, damage.lsn, len(tasks), live, ids
        )
        if live and not cold and not self._core.fault:
            self._core.fault = (
                f"segment {frame.segment} is damaged at offset {frame.offset}: LSN {frame.lsn} with tasks "
                f"{ids} cannot be read; leasing has stopped, restore the file from a copy and restart"
            )

    def _tasks_at(self, lsn: int) -> tuple[Sequences, int]:
        """The tasks whose row or outcome lies in that frame, and how many of them still need it."""
        state, index = self._core.state, self._core.state.index
        need = space.needed(state, self._journal.first_lsn, pin_dead=False)
        moved = index.moved.get(lsn)
        if moved is not None:
            return moved, int(need.tasks[moved].sum())
        batches = np.flatnonzero(index.frames.view == lsn)
        if len(batches):
            rows = np.concatenate([index.rows_of(int(batch)) for batch in batches])
            return rows, int(need.tasks[rows].sum())
        reports = np.flatnonzero(index.done_frames.view == lsn)
        rows = np.flatnonzero(np.isin(index.done[: index.count], reports))
        return rows, int(np.isin(rows, need.outcomes).sum())


def spans_of(numbers: Sequences) -> str:
    """Ascending numbers as "3, 5-9"; a long list ends with how many spans more there are."""
    if not len(numbers):
        return "none"
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    parts = np.split(numbers, breaks)
    shown = [f"{p[0]}" if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts[:SPANS_MAX]]
    more = len(parts) - len(shown)
    return ", ".join(shown) + (f" and {more} spans more" if more else "")
