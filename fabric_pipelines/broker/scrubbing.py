"""Scrubbing as the broker sees it: a slow round over all sealed segments, and what a damaged frame means.

The journal finds bytes that are not what was written; this names the tasks in them. Those that still live are
withheld, since their tokens or their outcome are lost here, and all others go on; damage among the dead is reported
only, and goes with its segment. Before it looks into any file, it looks whether each is still there at all. What was
damaged and is whole at the next look was repaired: it is told no more, and what waited for it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fabric_pipelines.broker.core import Core
from fabric_pipelines.broker.facts import Kind
from fabric_pipelines.broker.losses import rows_of, spans_of, tasks_at
from fabric_pipelines.broker.replies import DamagedFrame, ScrubReport
from fabric_pipelines.clock import Clock
from fabric_pipelines.journal import Damage, Journal, ScrubSlice
from fabric_pipelines.journal.frame import COMMIT, DURABLE, OPENED, SEAL, SEGMENT

SLICE_BYTES = 4 << 20
EVERY_S = 1.0
COUNTERS = ("scrubbed_bytes", "scrubbed_frames", "scrub_rounds", "frames_repaired")
GIVE_UP = "without a copy give these tasks up with `fabric broker abandon ID` and submit these rows again under another salt"
IN_PLACE = f"its tasks are withheld and all others go on; restore that file from a copy and restart the broker; {GIVE_UP}"
OF_NO_TASK = "restore that file from a copy, or let it go: what it says is in memory and in the next checkpoint"
AGAIN_SOON = f"it is looked at again within half a minute; {GIVE_UP}"
OF_AN_OBJECT = f"restore that object from a copy; {AGAIN_SOON}"
CONTROL_NAMES = {
    SEGMENT: "SEGMENT",
    COMMIT: "COMMIT",
    DURABLE: "DURABLE",
    SEAL: "SEAL",
    OPENED: "OPENED",
}


class Scrubbing:
    def __init__(self, journal: Journal, core: Core, clock: Clock) -> None:
        self._journal, self._core, self._clock = journal, core, clock
        self._last_s = clock.monotonic_s()
        self.damaged: dict[int, DamagedFrame] = {}
        self.files: list[DamagedFrame] = []  # at the last look
        self.look_at_files: Callable[[], list[DamagedFrame]] = list
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.damaged_here: Callable[[DamagedFrame], None] = lambda frame: None
        self.whole_again: Callable[[int], None] = lambda lsn: None

    def tick(self) -> None:
        """A slice now and then: 8 GiB in about half an hour. HomeGone if a file is not there any more."""
        now_s = self._clock.monotonic_s()
        if now_s - self._last_s >= EVERY_S:
            self._last_s = now_s
            self._journal.watch()
            self._look(SLICE_BYTES)

    def slice(self, budget_bytes: int) -> bool:
        """Look at about so many bytes more; whether that ended a round, with which goes a look at the state files. HomeGone
        as in `tick`."""
        self._journal.watch()
        ended = self._look(budget_bytes).round_ended
        if ended:
            self.files = self.look_at_files()
        return ended

    def whole(self) -> None:
        """Look at every sealed segment that is here, wherever the round stands, and at the state files. HomeGone as in
        `tick`."""
        self._journal.watch()
        self.files = self.look_at_files()
        found = self._look(SLICE_BYTES)
        begun_at = found.first_lsn if found.frames else self._journal.next_lsn
        while not found.round_ended:
            found = self._look(SLICE_BYTES)
        seen = self._journal.first_lsn - 1
        while seen < begun_at - 1:
            found = self._look(SLICE_BYTES)
            if found.round_ended:
                return
            seen = found.last_lsn

    def _look(self, budget_bytes: int) -> ScrubSlice:
        found = self._journal.scrub(budget_bytes)
        self.counters["scrub_rounds"] += found.round_ended
        self.note(found)
        return found

    def note(self, found: ScrubSlice, *, cold: bool = False) -> None:
        """Count what was looked at, name what is damaged, and forget what is whole again."""
        self.counters["scrubbed_bytes"] += found.bytes
        self.counters["scrubbed_frames"] += found.frames
        bad = {damage.lsn for damage in found.damaged}
        self.forget(
            lsn
            for lsn, known in self.damaged.items()
            if found.first_lsn <= lsn <= found.last_lsn and (lsn not in bad or known.last_lsn > lsn)
        )
        for damage in found.damaged:
            self.name(damage, cold=cold)

    def note_lost(self, lost: DamagedFrame) -> None:
        """A whole object is missing, or is not the one that was put."""
        for lsn in [lsn for lsn in self.damaged if lost.lsn <= lsn <= lost.last_lsn]:
            del self.damaged[lsn]
        self.damaged[lost.lsn] = lost

    def forget(self, lsns: Iterable[int]) -> None:
        """Those frames were looked at and are whole."""
        for lsn in list(lsns):
            if self.damaged.pop(lsn, None) is not None:
                self.counters["frames_repaired"] += 1
                self.whole_again(lsn)

    def among(self, first_lsn: int, last_lsn: int) -> list[DamagedFrame]:
        """What is known to be damaged there."""
        return [f for lsn, f in sorted(self.damaged.items()) if first_lsn <= lsn <= last_lsn]

    def report(self) -> ScrubReport:
        """What is known to be damaged in the segments that are still held, and in the files beside them."""
        held = [f for lsn, f in sorted(self.damaged.items()) if lsn >= self._journal.first_lsn]
        held += self.files
        sealed = [holding for holding in self._journal.holdings if holding.sealed]
        return ScrubReport(
            ok=not held,
            segments=len(sealed),
            frames=sum(holding.last_lsn - holding.first_lsn + 1 for holding in sealed),
            bytes=sum(holding.bytes for holding in sealed),
            damaged=held,
        )

    def frame_of(self, damage: Damage, *, cold: bool) -> DamagedFrame:
        """The damage with the tasks in it, and what to do."""
        state = self._core.state
        tasks, live = tasks_at(state, self._journal.first_lsn, damage.lsn)
        return DamagedFrame(
            segment=damage.segment,
            offset=damage.offset,
            end=damage.end,
            lsn=damage.lsn,
            last_lsn=damage.lsn,
            what=f"is damaged in its {_frame_of(damage.kind)}",
            tasks=len(tasks),
            live=live,
            task_ids=spans_of(state.task_ids(tasks)),
            remedy=OF_AN_OBJECT if cold else IN_PLACE if live else OF_NO_TASK,
            rows=rows_of(state, tasks),
        )

    def name(self, damage: Damage, *, cold: bool) -> None:
        """Only its own tasks wait: for an object see tiering, for what is damaged here withheld."""
        self.damaged[damage.lsn] = frame = self.frame_of(damage, cold=cold)
        if not cold:
            self.damaged_here(frame)


def _frame_of(kind: int) -> str:
    """A frame by the name of its kind; 0 for a control frame that does not tell its own."""
    if kind in Kind._value2member_map_:
        return f"{Kind(kind).name} frame"
    return f"{CONTROL_NAMES[kind]} frame" if kind in CONTROL_NAMES else "control frame"
