"""The pull loop: lease, run, report, until told to stop. Start full, end clean.

Work is pulled ahead of need (`window_tokens` beside what runs), refilled per finished task for an engine with
in-flight batching and per step otherwise. A result stays in the outbox until the broker has journaled it,
through any number of broker restarts; a reattach claims every id that is still in hand, so that what runs on
the device is never run again. The loop knows nothing of an engine beyond the door, nor of a broker beyond
`Source`; it decides no policy: the ladder names the rung, here it is obeyed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.clock import SYSTEM_CLOCK, Clock
from fabric_pipelines.errors import (
    Backpressure,
    BrokerUnavailable,
    EngineBusy,
    EngineFailed,
    FabricError,
    TransientError,
)
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.worker.backpressure import Ladder, Rung, Signals
from fabric_pipelines.worker.engines.door import Engine
from fabric_pipelines.worker.first_batch import FirstBatch
from fabric_pipelines.worker.outbox import Outbox
from fabric_pipelines.worker.results import Results
from fabric_pipelines.worker.reuse import Reuse
from fabric_pipelines.worker.supply import Supply
from fabric_pipelines.worker.throughput import Throughput

LOG = logging.getLogger("fabric.worker")
LEASES_PER_REFILL_MAX = 16  # a bound on the loop; one step of any engine outlasts so many

STALLS, STALLS_MAX = 4, 10  # of the slowest progress that was seen, and at most of the setting
NO_MORE = "the broker gives out no more work for now"


class Attached(Protocol):
    """held: ids of the claim that are ours (a field of the broker's AttachReply)."""

    @property
    def held(self) -> Collection[int]: ...


class Renewed(Protocol):
    @property
    def hold(self) -> bool: ...
    @property
    def retry_after_s(self) -> float: ...


class Delivered(Protocol):
    @property
    def accepted(self) -> int: ...
    @property
    def duplicates(self) -> int: ...
    @property
    def late(self) -> int: ...
    @property
    def unknown(self) -> int: ...


class Source(Protocol):
    """What the loop asks of a broker: broker.client.BrokerClient in production. hold_reason: why the last `lease`
    gave nothing although work may be ready; empty otherwise."""

    hold_reason: str

    def hello(self) -> object: ...
    def attach(
        self,
        *,
        engine: str,
        engine_fingerprint: str,
        device: str,
        profile: Profile,
        held: Sequence[int] = (),
    ) -> Attached: ...
    def lease(self, *, sequences: int, tokens: int, kv_tokens: int | None) -> Lease | None: ...
    def renew(self) -> Renewed: ...
    def computed(self, batch: pa.RecordBatch) -> Delivered: ...
    def nack(self, task_ids: Sequence[int], *, reason: str, attempted: bool = False) -> int: ...
    def detach(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between the loop's habits. `heartbeat_s` must stay well below the lease time; completions wait
    at most `coalesce_s` for company (one fsync for many); `drain_s` bounds how long an ending worker waits for
    a broker that is away, or for a step; an engine that makes no progress for `stall_s`, or for STALLS times as long as it once did and went on (at most STALLS_MAX times `stall_s`), is broken; with `until_idle` the loop ends once nothing is ready, and gives a broker that is away no
    longer than `patience_s`, since nobody would start it for a worker that is about to end. `start_full_s` bounds how long the
    first work waits for more (see first_batch), 0 = not at all."""

    heartbeat_s: float = 5.0
    coalesce_s: float = 0.05
    coalesce_tasks: int = 256
    poll_s: float = 0.1
    ask_again_s: float = 0.05
    ask_again_max_s: float = 1.0
    retry_s: float = 0.1
    retry_max_s: float = 5.0
    drain_s: float = 45.0  # below what a supervisor grants before it kills
    stall_s: float = 600.0
    report_s: float = 30.0
    patience_s: float = 30.0
    start_full_s: float = 2.0
    until_idle: bool = False


class Meter(Protocol):
    """What watches a run from beside it, e.g. worker.meter.RunMeter."""

    def turn(self, running_s: float) -> None:
        """Once a turn of the loop; running_s: since the engine was first given work, 0 before."""

    def as_json(self, tokens: int) -> dict[str, Any]:
        """Its keys of the exit line; tokens: in and out, of outcomes that are ok."""


class WorkerLoop:
    """One engine, one device, one session. `run` returns the counters; EngineFailed leaves it after the
    unfinished work was nacked and the finished work sent, also for an exception that nobody foresaw; another FabricError
    goes through, its leases given back. `request_stop` is safe in a signal handler."""

    def __init__(
        self,
        engine: Engine,
        source: Source,
        *,
        device: str,
        wait: Callable[[float], object],
        tell: Callable[[str], object] = lambda reason: None,
        pace: Pace | None = None,
        clock: Clock = SYSTEM_CLOCK,
        outbox: Outbox | None = None,
        ladder: Ladder | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._engine = engine
        self._source = source
        self._device = device
        self._wait, self._tell = wait, tell
        self._pace = pace or Pace()
        self._now = clock.monotonic_s
        self._meter = meter
        self._fed_s: float | None = None
        self.outbox = outbox or Outbox()
        self.ladder = ladder or Ladder()
        self.supply = Supply()
        self._results = Results(engine, self.supply)
        self._first = FirstBatch(
            engine.profile,
            continuous=engine.capabilities.continuous,
            wait_s=self._pace.start_full_s,
        )
        self.counts = Throughput()
        self._reuse = Reuse(engine.stats, engine.profile.kv_cache_tokens)
        self._attached = False
        self._stopping = False
        self._hold = False
        self._lane: str | None = None
        self._last_step_s = self._started_s = self._report_s = self._away_s = self._now()
        self._empty_since_s: float | None = self._started_s
        self._stop_s: float | None = None
        self._busy_since_s: float | None = None
        self._ask_s = self._renew_s = self._retry_s = 0.0
        self._ask_delay = self._pace.ask_again_s
        self._retry_delay = self._pace.retry_s
        self._source_is_dry = False
        self._suspect_inside = False
        self._why_away = self._why_held = ""
        self._moved_s: float | None = None
        self._progress: tuple[float, ...] = ()
        self._slowest_s = 0.0  # between two progresses with tasks inside

    @property
    def last_step_s(self) -> float:
        """When the loop last came round, for the pulse that renews leases while a step computes."""
        return self._last_step_s

    @property
    def attached(self) -> bool:
        return self._attached

    @property
    def waits_for(self) -> str:
        """What keeps this worker from its work; "" while it has some, or nobody has any for it."""
        if not self._attached:
            return self._why_away
        return self._why_held if self._hold and not len(self.supply) else ""

    def request_stop(self) -> None:
        self._stopping = True

    def run(self) -> Throughput:
        try:
            while not self._finished():
                self.step()
            self._hand_back("stopped")
        except EngineFailed:
            self._give_up("engine failed")
            raise
        except FabricError as fault:
            self._hand_back(f"worker ended: {fault.code}")
            raise
        except Exception as fault:
            self._give_up("engine failed")
            raise EngineFailed(
                f"the worker of {self._engine.name} met a fault that nobody foresaw ({type(fault).__name__}: {fault}): "
                "what had ended was sent, the rest goes back"
            ) from fault
        finally:
            self._deliver_last()
            self._detach()
            self.counts.undelivered = self.outbox.tasks
            self.counts.seconds = self._now() - self._started_s
        return self.counts

    def report(self) -> dict[str, Any]:
        told = self.counts.as_json(self._engine.stats, self.ladder.climbed)
        if self._meter is not None:
            told |= self._meter.as_json(self.counts.prompt_tokens + self.counts.output_tokens)
        return told

    def step(self) -> None:
        """One turn: see where we stand, refill, compute or wait, send."""
        now = self._last_step_s = self._now()
        if not self._attached:
            self._attach(now)
        if self._attached:
            self._renew(now)  # first: a hold that is over must not cost another pause
        rung = self.ladder.observe(self._signals(now), now)
        if rung >= Rung.NACK_UNSTARTED:
            self._nack_unstarted(rung.name.lower())
        if self._attached and rung < Rung.HOLD:
            self._refill(rung)
        self._feed()
        self._compute()
        if self._send_is_due():
            self._deliver()
        self._tell(self.waits_for)
        if self._meter is not None:
            self._meter.turn(0.0 if self._fed_s is None else self._now() - self._fed_s)
        self._report()

    # ---- where we stand

    def _finished(self) -> bool:
        if self._stopping:
            self._stop_s = self._stop_s if self._stop_s is not None else self._now()
            drained = not len(self.supply) and not self.outbox.tasks
            gave_up = self._now() - self._stop_s > self._pace.drain_s
            return drained or gave_up
        idle = self._source_is_dry and not len(self.supply) and not self.outbox.tasks
        return self._pace.until_idle and idle

    def _signals(self, now: float) -> Signals:
        busy = 0.0 if self._busy_since_s is None else max(now - self._busy_since_s, 0.001)
        return Signals(
            outbox_share=self.outbox.share,
            engine_busy_s=busy,
            broker_hold=self._hold,
            broker_away=not self._attached,
            stopping=self._stopping,
        )

    # ---- broker, and what happens while it is away

    def _attach(self, now: float) -> None:
        if now < self._retry_s:
            return
        held = [*self.supply.task_ids(), *self.outbox.task_ids()]
        try:
            self._source.hello()  # VersionRefused ends the worker: no retry changes a protocol
            reply = self._source.attach(
                engine=self._engine.name,
                engine_fingerprint=self._engine.fingerprint,
                device=self._device,
                profile=self._engine.profile,
                held=held,
            )
        except TransientError as fault:
            self._lost(fault, now)
            return
        self._attached, self._hold = True, False
        self._retry_delay = self._pace.retry_s
        self._renew_s = now + self._pace.heartbeat_s
        if held:
            self.counts.reattached += 1
            self.counts.expired += self.supply.keep(set(reply.held))
        self._deliver()

    def _lost(self, fault: TransientError, now: float) -> None:
        """No answer: keep everything, come back at once (it may have restarted unnoticed), then with a delay
        that doubles up to its bound."""
        self._why_away = str(fault)
        if self._attached:
            LOG.warning("broker away, %d results kept: %s", self.outbox.tasks, fault)
            self._attached = False
            self._retry_s = self._away_s = now
            return
        self._require_patience(fault, now)
        if self._retry_delay == self._pace.retry_s:
            LOG.warning("waiting for the broker: %s", fault)
        self._retry_s = now + self._retry_delay
        self._retry_delay = min(2 * self._retry_delay, self._pace.retry_max_s)

    def _require_patience(self, fault: TransientError, now: float) -> None:
        away_s = now - self._away_s
        if not self._pace.until_idle or self.supply.inside or away_s < self._pace.patience_s:
            return
        kept = self.outbox.tasks
        lost = f", and {kept} results stay undelivered (their tasks are run again)" if kept else ""
        raise BrokerUnavailable(f"no broker for {away_s:.0f} s{lost}: {fault}") from fault

    def _renew(self, now: float) -> None:
        if now < self._renew_s:
            return
        try:
            reply = self._source.renew()
        except TransientError as fault:
            self._lost(fault, now)
            return
        self._hold = reply.hold
        self._why_held = (self._why_held or NO_MORE) if reply.hold else ""
        pause = (
            max(reply.retry_after_s, self._pace.poll_s) if reply.hold else self._pace.heartbeat_s
        )
        self._renew_s = now + min(pause, self._pace.heartbeat_s)

    def _send_is_due(self) -> bool:
        if not self._attached or self.outbox.oldest_s is None:
            return False
        return (
            self.outbox.tasks >= self._pace.coalesce_tasks
            or not self.supply.inside
            or self._now() - self.outbox.oldest_s >= self._pace.coalesce_s
        )

    def _deliver(self) -> None:
        """Send until empty or the broker goes away."""
        while self.outbox.tasks and self._attached:
            batch, spans = self.outbox.head()
            sent_s = self._now()
            try:
                reply = self._source.computed(batch)
            except TransientError as fault:
                self.counts.resends += 1
                self._lost(fault, self._now())
                return
            self.outbox.confirm(spans, self._now())
            self.counts.send_s += self._now() - sent_s
            self.counts.sends += 1
            self.counts.sent += reply.accepted
            self.counts.duplicates += reply.duplicates
            self.counts.late += reply.late
            self.counts.unknown += reply.unknown
            if not len(self.supply):
                # The broker gives out suspects of a crash one piece at a time: what was told sets the next one free.
                self._source_is_dry, self._ask_s = False, 0.0

    def _nack(self, tasks: Sequence[int], reason: str, *, attempted: bool = False) -> None:
        if not tasks:
            return
        if self._attached:
            try:
                self._source.nack(tasks, reason=reason, attempted=attempted)
                self.counts.nacked += len(tasks)
                return
            except TransientError as fault:
                self._lost(fault, self._now())
        # Nobody to tell: the leases run out, or the next attach does not claim these ids.
        self.counts.expired += len(tasks)

    def _nack_unstarted(self, reason: str) -> None:
        tasks = self.supply.drop_waiting()
        self._busy_since_s = None  # nothing is offered any more; coming down the ladder tries again
        if self.supply.inside:
            withdrawn = self._engine.withdraw_unstarted()
            self.supply.finish(withdrawn)
            tasks += withdrawn
        self._nack(tasks, reason)

    def _give_up(self, reason: str) -> None:
        """The engine is beyond use: what it finished is delivered, if the broker comes back in time; all else
        goes back. Only what was inside may be to blame: the broker finds out which by halving."""
        until_s = self._now() + self._pace.drain_s
        while not self._attached and self._now() < until_s:
            self._attach(self._now())
            self._wait(0.0 if self._attached else max(self._retry_s - self._now(), 0.001))
        self._deliver_last()
        unstarted, inside = self._let_go()
        self._nack(unstarted, reason)
        self._nack(inside, reason, attempted=True)

    def _hand_back(self, reason: str) -> None:
        """The worker ends, not by its engine: nothing is to blame for what is still in hand."""
        if len(self.supply):
            LOG.warning("%d tasks go back: %s", len(self.supply), reason)
            unstarted, inside = self._let_go()
            self._nack([*unstarted, *inside], reason)

    def _let_go(self) -> tuple[list[int], list[int]]:
        """Everything in hand: what did not start, and what did."""
        unstarted = self.supply.drop_waiting()
        try:
            withdrawn = [n for n in self._engine.withdraw_unstarted() if self.supply.is_inside(n)]
        except Exception as fault:  # noqa: BLE001 - an engine beyond use may not even say what it holds
            LOG.warning("%s does not give back what it did not start: %s", self._engine.name, fault)
            withdrawn = []
        self.supply.finish(withdrawn)
        inside = self.supply.task_ids()
        self.supply.finish(inside)
        return [*unstarted, *withdrawn], inside

    def _deliver_last(self) -> None:
        """As _deliver, for a worker that ends: results that the broker will not take are given back as failed attempts,
        for nobody else sends them."""
        try:
            self._deliver()
        except Exception as fault:  # noqa: BLE001 - what ended the worker is on its way up
            tasks = self.outbox.task_ids()
            LOG.error("%d results are not taken, their tasks go back: %s", len(tasks), fault)
            self.outbox.clear()
            self._nack(tasks, "result not taken", attempted=True)

    def _detach(self) -> None:
        """Nothing is in hand any more: the broker need not wait for this session's time to run out."""
        if self._attached and not len(self.supply) and not self.outbox.tasks:
            try:
                self._source.detach()
            except TransientError as fault:
                self._lost(fault, self._now())
            self._attached = False

    # ---- supply

    def _refill(self, rung: Rung) -> None:
        if self._now() < self._ask_s:
            return
        for _ in range(LEASES_PER_REFILL_MAX):
            room = self._room(rung)
            if room is None:
                self._first.enough_is_in_hand()
                return
            asked_s = self._now()
            try:
                lease = self._source.lease(
                    sequences=room.sequences, tokens=room.tokens, kv_tokens=room.kv_tokens
                )
            except Backpressure as fault:
                self._hold, self._renew_s = True, self._now() + fault.retry_after_s
                self._why_held = str(fault)
                return
            except TransientError as fault:
                self._lost(fault, self._now())
                return
            self.counts.lease_s += self._now() - asked_s
            if lease is None:
                if self._source.hold_reason:
                    self._why_held = self._source.hold_reason
                    self._hold, self._renew_s = (
                        True,
                        self._now(),
                    )  # a renewal tells when to come back
                    return
                self._source_is_dry = True
                self._first.nothing_came()
                self._ask_s = self._now() + self._ask_delay
                self._ask_delay = min(2 * self._ask_delay, self._pace.ask_again_max_s)
                return
            self._source_is_dry = False
            self._ask_delay = self._pace.ask_again_s
            if not self._admit(lease, rung):
                return

    def _admit(self, lease: Lease, rung: Rung) -> bool:
        if rung >= Rung.NO_NEW_LANE and self._lane not in (None, lease.lane) and len(self.supply):
            self._nack(lease.tasks.column("task_id").to_pylist(), "no new lane under pressure")
            self._ask_s = self._now() + self._pace.ask_again_max_s
            return False
        self.counts.leases += 1
        self._first.came(self._now())
        finished = frozenset(self.outbox.task_ids()) if self.outbox.tasks else frozenset()
        self.supply.take(lease, finished=finished)
        return True

    def _room(self, rung: Rung) -> Budget | None:
        """What to ask for next, None when enough is in hand."""
        profile = self._engine.profile
        window = profile.window_tokens if rung < Rung.PREFETCH_OFF else 0
        if self._engine.capabilities.continuous:
            return self._room_in_flight(profile, window)
        appetite = max(profile.max_num_tokens - self.supply.inside_tokens, 0)
        if self.supply.waiting_tokens >= window + appetite:
            return None
        kv = profile.kv_cache_tokens
        return Budget(profile.max_batch_size, profile.max_num_tokens, kv if kv else None)

    def _room_in_flight(self, profile: Profile, window: int) -> Budget | None:
        """The room is what engine and window hold together, less what is in hand. It is asked for once half the
        window is used up: the engine is refilled per finished task from the window, while a lease, which costs the
        broker an fsync, brings many. The broker always gives one task, so less than a usual one is never asked."""
        kv = bool(profile.kv_cache_tokens)
        held = self._cache_held() if kv else self.supply.tokens
        usual = max(held // max(len(self.supply), 1), 1)
        room = (profile.kv_cache_tokens or profile.max_num_tokens) + window - held
        if window:
            sequences = self._inside_max(profile) + window // usual - len(self.supply)
        else:
            sequences = profile.max_batch_size - len(self.supply)
        if room < max(usual, window // 2) or sequences < max(window // usual // 2, 1):
            return None
        sequences = min(sequences, profile.max_batch_size)
        return Budget(sequences, room, room if kv else None)

    def _cache_held(self) -> int:
        """Tokens of KV cache that what is in hand takes: prefixes that its tasks share lie there once. How much they share is
        what the engine has reported of its reuse; counted whole, prefix-heavy work held a quarter of the sequences that a
        small cache had room for. Too low a figure costs nothing: the engine lets no more in than fits."""
        return self.supply.kv_tokens - round(self.supply.tokens * self._reuse.share())

    def _feed(self) -> None:
        asks = self._attached and self.ladder.rung < Rung.HOLD
        if not self._first.is_due(self.supply, self._now(), asks=asks):
            return
        while (lease := self.supply.next_lease()) is not None and self._may_feed(lease):
            try:
                self._engine.submit(lease)
            except EngineBusy:
                if self._busy_since_s is None:
                    self._busy_since_s = self._now()
                return
            except Exception:
                self.supply.fed()  # what breaks an engine on its way in was tried: the broker finds it by halving
                raise
            self._busy_since_s = None
            self._note_first()
            self.supply.fed()
            self._suspect_inside = _is_suspect(lease)
            self._close_gap()
            if self._lane not in (None, lease.lane):
                self.counts.lane_switches += 1
            self._lane = lease.lane

    def _note_first(self) -> None:
        if not self._first.begun:
            self._fed_s = self._now()
            self.counts.first_fill = self._first.share(self.supply)
            self.counts.first_wait_s = self._first.begin(self._fed_s)

    def _may_feed(self, lease: Lease) -> bool:
        """A lease with an earlier failed attempt runs alone: if it brings the engine down again, nothing else
        is blamed with it, and if it does not, it is cleared."""
        if not self.supply.inside:
            return True
        if self._suspect_inside or _is_suspect(lease):
            return False
        return self._engine_is_hungry()

    def _engine_is_hungry(self) -> bool:
        """In-flight engines keep half a batch queued inside (their scheduler needs choice); the others at
        most one batch behind the one that runs, so that a drain has little to take back."""
        profile = self._engine.profile
        if self._engine.capabilities.continuous:
            return self.supply.inside < self._inside_max(profile)
        return self.supply.inside_tokens < profile.max_num_tokens

    @staticmethod
    def _inside_max(profile: Profile) -> int:
        return profile.max_batch_size + (profile.max_batch_size + 1) // 2

    # ---- engine

    def _compute(self) -> None:
        if not self.supply.inside:
            self._moved_s = None
            if not self._finished():
                self._wait(self._pause())
            return
        filled, since_s = self._places_taken(), self._now()
        batches = self._engine.poll(self._pace.poll_s)
        polled_s = self._now() - since_s
        self.counts.filled_s += polled_s
        self.counts.fill_s += polled_s * filled
        for batch in batches:
            self._collect(batch)
        self._require_progress()
        if not self.supply.inside:
            self._empty_since_s = self._now()

    def _require_progress(self) -> None:
        """EngineFailed when nothing has moved for the pace's stall_s: no result, no step, no token. An engine that was as slow
        before and went on is waited for STALLS times as long, within bounds: waits just below the limit must not stretch it for ever."""
        stats, counts = self._engine.stats, self.counts
        progress: tuple[float, ...] = (
            *(counts.ok, counts.refused, counts.failed, stats.tasks, stats.steps),
            *(stats.generated_tokens, stats.extra.get("steps", 0.0)),
        )
        now = self._now()
        if self._moved_s is None:
            self._moved_s, self._progress = now, progress
        elif progress != self._progress:
            self._slowest_s = max(self._slowest_s, now - self._moved_s)
            self._moved_s, self._progress = now, progress
        elif now - self._moved_s > max(
            self._pace.stall_s, min(STALLS * self._slowest_s, STALLS_MAX * self._pace.stall_s)
        ):
            raise EngineFailed(
                f"engine {self._engine.name} made no progress for {now - self._moved_s:.0f} s with "
                f"{self.supply.inside} tasks inside: its step is taken for hung, so the worker ends and its leases go back; "
                "where steps take that long, raise the setting stall_s"
            )

    def _places_taken(self) -> float:
        """Share of the batch that could be computing now, by sequences or by cache, whichever is fuller."""
        profile = self._engine.profile
        cache = profile.kv_cache_tokens
        held = self._cache_held() / cache if cache else 0.0
        return min(max(self.supply.inside / profile.max_batch_size, held), 1.0)

    def _pause(self) -> float:
        """Nothing runs: until the next thing is due."""
        first_s = self._first.waits_until_s()
        if self.supply.waiting and first_s is None:  # the engine is busy with nothing of ours
            return self._pace.poll_s
        if not self._attached:
            due = self._retry_s
        elif self.ladder.rung >= Rung.HOLD:
            due = self._renew_s
        else:
            due = min(self._ask_s, self._renew_s)
        if self.supply.waiting and first_s is not None:
            due = min(due, first_s)
        return min(max(due - self._now(), 0.001), self._pace.ask_again_max_s)

    def _collect(self, batch: pa.RecordBatch) -> None:
        batch = self._results.taken(batch)
        self.outbox.put(batch, self._now())
        self._count_tokens(batch)
        self.counts.wrong = self._results.wrong
        for status in batch.column("status").to_pylist():
            if status == "ok":
                self.counts.ok += 1
            elif status == "refused":
                self.counts.refused += 1
            else:
                self.counts.failed += 1

    def _count_tokens(self, batch: pa.RecordBatch) -> None:
        good = pc.equal(batch.column("status"), "ok")
        prompts, outputs = (
            batch.column("prompt_tokens"),
            pc.list_value_length(batch.column("output")),
        )
        self.counts.prompt_tokens += pc.sum(prompts.filter(good)).as_py() or 0
        self.counts.output_tokens += pc.sum(outputs.filter(good)).as_py() or 0

    def _close_gap(self) -> None:
        if self._empty_since_s is not None:
            self.counts.close_gap(self._now() - self._empty_since_s)
            self._empty_since_s = None

    def _report(self) -> None:
        now = self._now()
        self.counts.seconds = now - self._started_s
        if now - self._report_s >= self._pace.report_s:
            self._report_s = now
            LOG.info("%s", self.counts.as_line(self._engine.stats, self.ladder.rung.name.lower()))


def _is_suspect(lease: Lease) -> bool:
    return bool(lease.tasks.column("attempts").to_numpy().any())
