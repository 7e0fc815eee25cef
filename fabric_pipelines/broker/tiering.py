"""Tiering: which sealed segments leave this disk for the object store, and which of their rows come back.

Above the high water mark of what lies here, segments go until the low one is reached: dead ones first, since nobody
reads them again, then the newest, since the oldest are worked on and die first. Order is everything: copied and
read back, then the UPLOADED fact, durable, then the local file; dropped by the log, then removed from the store.
Rows are asked for ahead of need, and a lane whose next rows are on their way waits while others go on. The store
may be away or slow: its calls run in helper threads, are tried again with growing patience, and hold up no
acknowledgement. What is lost, a frame that was changed or all of an object that is missing, is named with its tasks,
and those rows alone wait until it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker import space
from fabric_pipelines.broker.core import Core
from fabric_pipelines.broker.facts import Fact, Kind, Uploaded
from fabric_pipelines.broker.losses import rows_of, spans_of
from fabric_pipelines.broker.payloads import Payloads
from fabric_pipelines.broker.replies import DamagedFrame
from fabric_pipelines.broker.scrubbing import AGAIN_SOON, OF_AN_OBJECT, Scrubbing
from fabric_pipelines.clock import Clock
from fabric_pipelines.errors import (
    FULL,
    ColdLost,
    CorruptionFound,
    FabricError,
    NotFetched,
    SettingsError,
    StorageFailed,
)
from fabric_pipelines.journal import Damage, Holding, Journal, ScrubSlice, Stub
from fabric_pipelines.journal.segment import Segment

Sequences = npt.NDArray[np.int64]
T = TypeVar("T")
Background = Callable[[Callable[[], Any]], "Future[Any]"]
FETCH_BYTES = 64 << 20
WITNESSES = 8  # cold segments asked for before another goes
PATIENCE_S = (1.0, 60.0)
LOST_AGAIN_S = 30.0
SOON_S = 0.1
COUNTERS = (
    "cold_uploads",
    "cold_uploaded_bytes",
    "cold_upload_failures",
    "cold_fetches",
    "cold_fetched_bytes",
    "cold_fetch_failures",
    "cold_removals",
    "cold_removal_failures",
)


@dataclass(frozen=True, slots=True)
class Water:
    """Bytes of the log on this disk: above `high` segments go cold, until `low` is reached."""

    high: int = 4 << 30
    low: int = 2 << 30

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise SettingsError(
                f"broker_hot_low_water_bytes is {self.low}; it must not be above "
                f"broker_hot_high_water_bytes, which is {self.high}"
            )


@dataclass(slots=True)
class Patience:
    """When a call that failed may be tried again."""

    due_s: float = 0.0
    delay_s: float = PATIENCE_S[0]

    def lost(self, now_s: float) -> None:
        self.due_s = now_s + self.delay_s
        self.delay_s = min(2 * self.delay_s, PATIENCE_S[1])

    def found(self) -> None:
        self.due_s, self.delay_s = 0.0, PATIENCE_S[0]


@dataclass(frozen=True, slots=True)
class ColdScrub:
    """One cold segment read through, or why it could not be."""

    segment: Segment
    found: ScrubSlice | FabricError | OSError


@dataclass(frozen=True, slots=True)
class Lost:
    """Frames up to and with `last_lsn` that cannot be had from their object, and whose live tasks wait for them: one that
    was changed, or all of an object that is missing."""

    sentence: str
    last_lsn: int
    again_s: float
    all: bool = False


@dataclass(slots=True)
class _Job:
    """One kind of call, at most one of it under way. `fault`: why the last one failed, until one succeeds."""

    underway: Future[Any] | None = None
    fault: str = ""
    patience: Patience = field(default_factory=Patience)

    def free(self, now_s: float) -> bool:
        return self.underway is None and now_s >= self.patience.due_s

    def succeeded(self) -> None:
        self.fault = ""
        self.patience.found()

    def answer(self) -> Any:
        """What came of it, once; None while there is nothing."""
        if self.underway is None or not self.underway.done():
            return None
        done, self.underway = self.underway, None
        return done.result()


class Tiering:
    def __init__(
        self,
        journal: Journal,
        core: Core,
        payloads: Payloads,
        log: Callable[[list[Fact]], None],
        commit: Callable[[], None],
        *,
        water: Water,
        clock: Clock,
        background: Background,
    ) -> None:
        self.journal, self.core, self.payloads = journal, core, payloads
        self.water, self.clock = water, clock
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.lost: dict[int, Lost] = {}  # by the first LSN
        self.scrubbing: Scrubbing | None = None
        self.covered_lsn: Callable[[], int] = lambda: 0
        self.checkpoint: Callable[[], None] = lambda: None
        self._log, self._commit, self._background = log, commit, background
        self._out, self._back, self._gone, self._again = _Job(), _Job(), _Job(), _Job()
        self._looked_s = 0.0
        self._uploading: Segment | None = None
        self._wanted: dict[int, None] = {}  # LSNs, in the order of need
        self._refused: set[int] = set()  # epochs that are damaged here
        self._filling = False
        self._ranges: tuple[Sequences, Sequences] = (space.NOTHING, space.NOTHING)
        self._reconcile()

    def _reconcile(self) -> None:
        """Stubs and facts must agree; and what an earlier life wrote down and did not finish is finished."""
        facts, held = self.core.state.cold, {h.epoch: h for h in self.journal.holdings}
        for epoch, holding in held.items():
            stub, fact = self.journal.cold.stubs.get(epoch), facts.get(epoch)
            if stub is None or (not holding.cold and fact is None):
                continue
            mine = stub.size, stub.crc, stub.first_lsn, stub.last_lsn
            if fact is None or (fact.size, fact.crc32c, fact.first_lsn, fact.last_lsn) != mine:
                raise CorruptionFound(
                    f"the stub {stub.file_name} does not agree with the UPLOADED fact of epoch {epoch}: restore "
                    "the journal folder from a copy"
                )
            if not holding.cold:
                self.journal.went_cold(stub, self.journal.durable_lsn)
        self._survey()

    def _survey(self) -> None:
        """Which LSNs are cold."""
        cold = [holding for holding in self.journal.holdings if holding.cold]
        self._ranges = (
            np.array([holding.first_lsn for holding in cold], np.int64),
            np.array([holding.last_lsn for holding in cold], np.int64),
        )
        first = min((holding.first_lsn for holding in cold), default=self.journal.next_lsn)
        self.lost = {lsn: lost for lsn, lost in self.lost.items() if lsn >= first}

    # -- the owner's clock

    def tick(self) -> None:
        now_s = self.clock.monotonic_s()
        self._take_answers(now_s)
        self._remove_next(now_s)
        self._upload_next(now_s)
        self._fetch_next(now_s)
        self._look_again(now_s)

    def settle(self) -> None:
        """The end of this life: what is under way ends soon; what it did is written down."""
        self.journal.cold.stopping = True
        for job in (self._out, self._back, self._gone, self._again):
            if job.underway is not None:
                job.underway.exception()
        self._take_answers(self.clock.monotonic_s())

    def _take_answers(self, now_s: float) -> None:
        if (copied := self._out.answer()) is not None:
            segment, self._uploading = self._uploading, None
            assert segment is not None
            self._uploaded(segment, copied, now_s)
        if (fetched := self._back.answer()) is not None:
            self._fetched(fetched, now_s)
        if (removed := self._gone.answer()) is not None:
            self._removed(removed, now_s)
        if (looked := self._again.answer()) is not None:
            self._looked_again(looked, now_s)

    def _start(self, job: _Job, work: Callable[[], Any]) -> None:
        job.underway = self._background(lambda: _attempt(work))
        if job.underway.done():  # in the foreground
            self._take_answers(self.clock.monotonic_s())

    def _failed(self, job: _Job, fault: FabricError | OSError, what: str, now_s: float) -> None:
        """The store's failures are waited out; a local disk that failed ends the process."""
        if isinstance(fault, OSError) and fault.errno not in FULL:
            raise StorageFailed(
                f"the journal's disk failed while {what} ({fault.strerror or fault}): check the disk, then start "
                "the broker again"
            ) from fault
        job.fault = f"while {what}: {fault}"
        job.patience.lost(now_s)

    @property
    def last_fault(self) -> str:
        """What keeps the cold tier from its work now; empty when nothing does."""
        lost = self._said()
        jobs = (self._back, self._out, self._gone, self._again)
        return next(filter(None, [job.fault for job in jobs] + lost), "")

    def _said(self) -> list[str]:
        return [self.lost[lsn].sentence for lsn in sorted(self.lost)]

    # -- out

    def busy_below(self, lsn: int) -> bool:
        """Whether a segment with frames below that LSN is being read for its copy."""
        return self._uploading is not None and self._uploading.first_lsn < lsn

    def _upload_next(self, now_s: float) -> None:
        hot = self.journal.bytes_used
        self._filling = hot > (self.water.low if self._filling else self.water.high)
        if not self._filling or not self._out.free(now_s):
            return
        holding = self._next_to_go()
        if holding is None:
            return
        segment = self.journal.sealed_segment(holding.epoch)
        assert segment is not None, "holdings are segments"
        self._uploading = segment
        cold = sorted((h.epoch for h in self.journal.holdings if h.cold), reverse=True)
        self._start(self._out, lambda: self._copy_out(segment, cold[:WITNESSES]))

    def _copy_out(self, segment: Segment, witnesses: list[int]) -> Stub:
        self.journal.cold.require_there(witnesses)
        return self.journal.cold.copy_out(segment)

    def _next_to_go(self) -> Holding | None:
        """The sealed segment that is needed last. None of those that a restart reads, nor with outcomes that wait to
        be landed; those behind the newest checkpoint get one first."""
        holdings = self.journal.holdings
        sealed = [h for h in holdings if h.sealed and not h.cold and h.epoch not in self._refused]
        covered = self.covered_lsn()
        pinned = self._pinned()
        able = [h for h in sealed if h.last_lsn <= covered and not _touches(h, pinned)]
        if not able:
            if any(h.last_lsn > covered for h in sealed):
                self.checkpoint()
            return None
        need = space.needed(self.core.state, self.journal.first_lsn)
        live = dict(
            zip(
                (h.epoch for h in holdings),
                space.live_bytes(need, self.journal, holdings).tolist(),
                strict=True,
            )
        )
        index = self.core.state.index
        waiting = np.unique(index.done_frames.view[index.done[need.outcomes]])
        able = [h for h in able if not _touches(h, waiting)]
        return min(able, key=lambda h: (4 * live[h.epoch] // h.bytes, -h.epoch), default=None)

    def _pinned(self) -> Sequences:
        """Frames that every start reads: the last DROP and the CHECKPOINT facts that count."""
        drops, taken = self.journal.lsns_of(Kind.DROP), self.journal.lsns_of(Kind.CHECKPOINT)
        return np.array(drops[-1:] + taken[-2:], np.int64)

    def _uploaded(
        self, segment: Segment, copied: Stub | FabricError | OSError, now_s: float
    ) -> None:
        if not isinstance(copied, Stub):
            self.counters["cold_upload_failures"] += 1
            if isinstance(copied, CorruptionFound) and not isinstance(copied, ColdLost):
                self._refused.add(segment.epoch)
            self._failed(self._out, copied, "a segment went to the cold tier", now_s)
            return
        self._out.succeeded()
        if self.journal.sealed_segment(copied.epoch) is None:
            return  # dropped meanwhile: its object goes, as that of any dropped segment
        fact = Uploaded(copied.epoch, copied.first_lsn, copied.last_lsn, copied.size, copied.crc)
        self._log([fact])
        self._commit()
        self.payloads.forget_between(copied.first_lsn, copied.last_lsn)
        self.journal.went_cold(copied, self.journal.durable_lsn)
        self.counters["cold_uploads"] += 1
        self.counters["cold_uploaded_bytes"] += copied.size
        self._survey()

    # -- back

    def near(self, tasks: Sequences) -> int:
        """How many of these tasks, from the first on, have rows that can be read now. The others are asked for."""
        lsns, away = self._away(tasks)
        if not away:
            return len(tasks)
        self._wanted.update(dict.fromkeys(away))
        return int(np.argmax(np.isin(lsns, away)))

    def out_of_reach(self, tasks: Sequences) -> npt.NDArray[np.bool_] | None:
        """Which of these tasks have rows that nobody can fetch now, because the store failed last time or their object
        is lost; bool [n], None if there are none. Nothing is asked for."""
        if not (self.lost or self._back.fault):
            return None
        lsns, away = self._away(tasks)
        gone = np.isin(lsns, away)
        if not self._back.fault:
            gone &= _within(lsns, self.lost)
        return gone if gone.any() else None

    def _away(self, tasks: Sequences) -> tuple[Sequences, list[int]]:
        """(LSN of each task's row, those of them that are cold and were not fetched, in the order of need)."""
        firsts, lasts = self._ranges
        if not len(firsts) or not len(tasks):
            return space.NOTHING, []
        lsns, _ = self.core.state.index.locate(tasks)
        at = np.searchsorted(firsts, lsns, side="right") - 1
        cold = (at >= 0) & (lsns <= lasts[np.maximum(at, 0)])
        if not cold.any():
            return lsns, []
        distinct, first_at = np.unique(lsns[cold], return_index=True)
        return lsns, [
            lsn
            for lsn in distinct[np.argsort(first_at)].tolist()
            if not (self.journal.cold.holds(lsn) or self.payloads.holds(lsn))
        ]

    @property
    def expects(self) -> bool:
        """Whether rows are on their way, beside those that are lost."""
        if self._back.fault:
            return False
        wanted = np.array(list(self._wanted), np.int64)
        return self._back.underway is not None or not bool(_within(wanted, self.lost).all())

    def why(self, tasks_wait: bool = True) -> NotFetched:
        """What to say to somebody who finds only lanes that wait."""
        if self.lost and not self.expects:
            lost = self.lost[min(self.lost)]
            return NotFetched(f"ColdLost: {lost.sentence}", retry_after_s=5.0)
        return NotFetched(
            "the next tasks are on their way from the cold tier"
            + (f" ({self.last_fault})" if self._back.patience.due_s else ""),
            retry_after_s=SOON_S if not self._back.patience.due_s else 1.0,
        )

    def lost_rows(self, tasks: Sequences) -> npt.NDArray[np.bool_]:
        """Which of these tasks have their row in lost frames."""
        lsns, _ = self.core.state.index.locate(tasks)
        return _within(lsns, self.lost)

    def _fetch_next(self, now_s: float) -> None:
        if not self._wanted or not self._back.free(now_s):
            return
        wanted = np.array(list(self._wanted), np.int64)
        waiting = {lsn: lost for lsn, lost in self.lost.items() if now_s < lost.again_s}
        wanted = wanted[~_within(wanted, waiting)]
        parts, size = [], 0
        for segment, away in self.journal.away(wanted):
            taken = []
            for lsn in away:
                if size < FETCH_BYTES:
                    taken.append(lsn)
                    size += segment.extent(lsn)
            if taken:
                parts.append((segment, taken))
        self._wanted = {}
        if parts:
            cold = self.journal.cold
            self._start(
                self._back,
                lambda: [
                    (segment, _attempt(_fetching(cold.fetch_each, segment, lsns)))
                    for segment, lsns in parts
                ],
            )

    def _fetched(self, parts: list[tuple[Segment, Any]], now_s: float) -> None:
        self._back.succeeded()
        for segment, found in parts:
            if self.journal.sealed_segment(segment.epoch) is not segment:
                continue  # dropped meanwhile
            if isinstance(found, tuple):
                frames, damaged = found
                self._came_back(segment, frames)
                for lsn, fault in damaged.items():
                    self.counters["cold_fetch_failures"] += 1
                    self._lose_frame(segment, lsn, fault, now_s)
                continue
            self.counters["cold_fetch_failures"] += 1
            if isinstance(found, ColdLost):
                self.lose(segment, found, now_s)
            else:
                self._failed(self._back, found, "tasks came back from the cold tier", now_s)

    def _came_back(self, segment: Segment, frames: dict[int, memoryview]) -> None:
        self.journal.cold.keep(frames)
        self.counters["cold_fetches"] += bool(frames)
        self.counters["cold_fetched_bytes"] += sum(map(len, frames.values()))
        self._is_there(segment)
        for lsn in frames:
            self.lost.pop(lsn, None)
        if self.scrubbing is not None:
            self.scrubbing.forget(lsn for lsn in frames if not self._is_whole_lost(lsn))

    def _is_there(self, segment: Segment) -> None:
        """What is said of it as a whole is over; its frames are looked at one by one."""
        known = self.lost.get(segment.first_lsn)
        if known is not None and known.all:
            del self.lost[segment.first_lsn]

    def _found(self, first: int, last: int, but: Container[int] = ()) -> None:
        """None of the frames from `first` to `last` counts as lost any more, `but` these."""
        for lsn in [lsn for lsn in self.lost if first <= lsn <= last and lsn not in but]:
            del self.lost[lsn]

    def _lose_frame(self, segment: Segment, lsn: int, fault: ColdLost, now_s: float) -> None:
        """Name the tasks that wait for this frame; its neighbours go on. In the words of the scrub."""
        self._is_there(segment)
        (place,) = fault.places
        kind = segment.kinds[lsn - segment.first_lsn]
        damage = Damage(place["segment"], place["offset"], place["end"], lsn, kind)
        scrubbing = self.scrubbing
        assert scrubbing is not None, "whoever reads cold segments has a list of what is damaged"
        frame = scrubbing.frame_of(damage, cold=True)
        said = frame.sentence.removeprefix(frame.segment)
        sentence = f"object {frame.segment} of the cold tier{said}"
        self.lost[lsn] = Lost(sentence, lsn, now_s + LOST_AGAIN_S)
        if not any(known.last_lsn > known.lsn for known in self._listed(segment)):
            scrubbing.name(damage, cold=True)

    def lose(self, segment: Segment, fault: ColdLost, now_s: float) -> None:
        """Name the tasks that wait for all of this object."""
        tasks = self.tasks_in(segment)
        ids = spans_of(self.core.state.task_ids(tasks))
        named = "".join(f"; {part}" for part in rows_of(self.core.state, tasks)[:3])
        need = f"{len(tasks)} tasks need it ({ids}{named})" if len(tasks) else "no task needs it"
        self._found(segment.first_lsn, segment.last_lsn)
        again_s = now_s + LOST_AGAIN_S
        sentence = f"{fault}; {need}; {AGAIN_SOON}"
        self.lost[segment.first_lsn] = Lost(sentence, segment.last_lsn, again_s, all=True)
        if self.scrubbing is not None:
            self._list(segment)

    def _listed(self, segment: Segment) -> list[DamagedFrame]:
        assert self.scrubbing is not None
        return self.scrubbing.among(segment.first_lsn, segment.last_lsn)

    def _list(self, segment: Segment) -> None:
        """Among what is damaged, as a whole: it is looked at again until it is back."""
        assert self.scrubbing is not None
        tasks = self.tasks_in(segment)
        self.scrubbing.note_lost(
            DamagedFrame(
                segment=self.journal.cold.address(segment.epoch),
                offset=0,
                end=segment.end,
                lsn=segment.first_lsn,
                last_lsn=segment.last_lsn,
                what="is missing or not the one that was put",
                tasks=len(tasks),
                live=len(tasks),
                task_ids=spans_of(self.core.state.task_ids(tasks)),
                remedy=OF_AN_OBJECT,
                rows=rows_of(self.core.state, tasks),
            )
        )

    def tasks_in(self, segment: Segment) -> Sequences:
        """Tasks whose rows lie there and are needed."""
        index = self.core.state.index
        need = space.needed(self.core.state, self.journal.first_lsn, pin_dead=False).tasks
        tasks = np.flatnonzero(need)
        if not len(tasks):
            return tasks
        lsns, _ = index.locate(tasks)
        return tasks[(lsns >= segment.first_lsn) & (lsns <= segment.last_lsn)]

    def all_near(self, batches: list[int]) -> bool:
        """Whether every row of these ENQUEUE batches can be read now; nothing is asked for."""
        lsns = self.core.state.index.frames.view[batches]
        return not self.journal.away(lsns)

    # -- scrub

    def _is_whole_lost(self, lsn: int) -> bool:
        """Whether a whole object is listed there, of which one frame that came back says too little."""
        assert self.scrubbing is not None
        known = self.scrubbing.damaged.get(lsn)
        return known is not None and known.last_lsn > known.lsn

    def _look_again(self, now_s: float) -> None:
        """Objects that are listed as damaged or missing may have been restored: of one that is of the right size again
        what was damaged is read, or all of it if it was missing."""
        due = now_s - self._looked_s >= LOST_AGAIN_S and self._again.free(now_s)
        if self.scrubbing is None or not due:
            return
        self._looked_s = now_s
        calls = []
        for holding in self.journal.holdings:
            segment = self.journal.sealed_segment(holding.epoch)
            if holding.cold and segment is not None:
                known = self.scrubbing.among(holding.first_lsn, holding.last_lsn)
                if known:
                    calls.append(self._looking(segment, known))
        if calls:
            self._start(self._again, lambda: [call() for call in calls])

    def _looking(
        self, segment: Segment, known: list[DamagedFrame]
    ) -> Callable[[], list[ColdScrub]]:
        cold = self.journal.cold
        if any(frame.last_lsn > frame.lsn for frame in known):
            return lambda: [ColdScrub(segment, _attempt(lambda: cold.scrub(segment)))]
        lsns = [frame.lsn for frame in known]

        def look() -> list[ColdScrub]:
            found = _attempt(lambda: cold.look_again(segment, lsns))
            parts = found if isinstance(found, list) else [found]
            return [ColdScrub(segment, part) for part in parts]

        return look

    def _looked_again(self, looked: list[list[ColdScrub]], now_s: float) -> None:
        assert self.scrubbing is not None
        self._again.succeeded()
        for found in looked:
            try:
                self.scrubbed(found)
            except (FabricError, OSError) as fault:
                self._failed(self._again, fault, "damaged objects were looked at again", now_s)

    def scrub_calls(self) -> list[Callable[[], ColdScrub]]:
        segments = [
            self.journal.sealed_segment(holding.epoch)
            for holding in self.journal.holdings
            if holding.cold
        ]
        return [self._scrubbing(segment) for segment in segments if segment is not None]

    def _scrubbing(self, segment: Segment) -> Callable[[], ColdScrub]:
        cold = self.journal.cold
        return lambda: ColdScrub(segment, _attempt(lambda: cold.scrub(segment)))

    def scrubbed(self, found: Sequence[ColdScrub]) -> None:
        """Count what was read, name what is damaged or lost, and forget what is whole again. Raises the first reason
        why a segment could not be looked at."""
        scrubbing = self.scrubbing
        assert scrubbing is not None, "whoever reads cold segments has a list of what is damaged"
        for scrub in found:
            segment, answer = scrub.segment, scrub.found
            if self.journal.sealed_segment(segment.epoch) is not segment:
                continue  # dropped meanwhile
            if isinstance(answer, ScrubSlice):
                scrubbing.note(answer, cold=True)
                self._is_there(segment)
                bad = {damage.lsn for damage in answer.damaged}
                self._found(answer.first_lsn, answer.last_lsn, bad)
            elif isinstance(answer, ColdLost):
                self.lose(segment, answer, self.clock.monotonic_s())
            else:
                raise answer

    # -- over

    def _remove_next(self, now_s: float) -> None:
        """Objects of segments that the log gave up. Not while one is put: it may be of the same name, and the list of
        stubs is the helper's until then."""
        if self._uploading is not None or not self._gone.free(now_s):
            return
        first = self.journal.holdings[0].epoch
        stale = [stub for epoch, stub in self.journal.cold.stubs.items() if epoch < first]
        if not stale:
            return
        cold = self.journal.cold

        def work() -> int:
            for stub in stale:
                cold.remove(stub)
            return len(stale)

        self._start(self._gone, work)

    def _removed(self, removed: int | FabricError | OSError, now_s: float) -> None:
        if isinstance(removed, int):
            self._gone.succeeded()
            self.counters["cold_removals"] += removed
        else:
            self.counters["cold_removal_failures"] += 1
            self._failed(self._gone, removed, "objects of dropped segments were removed", now_s)

    def dropped(self) -> None:
        """The log gave up a front."""
        self._survey()

    def figures(self) -> dict[str, Any]:
        """For the broker's status."""
        cold = [holding for holding in self.journal.holdings if holding.cold]
        store = self.journal.cold.store
        return {
            "hot_bytes": self.journal.bytes_used,
            "cold_bytes": sum(holding.bytes for holding in cold),
            "cold_segments": len(cold),
            "cold_store": store.where if store is not None else "",
            "cold_fault": self.last_fault,
            "cold_lost": self._said(),
        }


def _within(lsns: Sequences, lost: Mapping[int, Lost]) -> npt.NDArray[np.bool_]:
    """Whether each lies in lost frames; their ranges never overlap."""
    if not lost:
        return np.zeros(len(lsns), np.bool_)
    firsts = np.array(sorted(lost), np.int64)
    lasts = np.array([lost[lsn].last_lsn for lsn in firsts.tolist()], np.int64)
    at = np.searchsorted(firsts, lsns, side="right") - 1
    inside: npt.NDArray[np.bool_] = (at >= 0) & (lsns <= lasts[np.maximum(at, 0)])
    return inside


def _touches(holding: Holding, lsns: Sequences) -> bool:
    return bool(((lsns >= holding.first_lsn) & (lsns <= holding.last_lsn)).any())


def _fetching(
    fetch: Callable[[Segment, list[int]], T], segment: Segment, lsns: list[int]
) -> Callable[[], T]:
    return lambda: fetch(segment, lsns)


def _attempt(work: Callable[[], T]) -> T | FabricError | OSError:
    """What came of it: a helper's thread has nobody to raise to."""
    try:
        return work()
    except (FabricError, OSError) as fault:
        return fault
