"""The pull loop against a scripted engine and a scripted broker: what is in hand, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pytest

from fabric_pipelines.clock import Clock
from fabric_pipelines.errors import BrokerUnavailable, EngineFailed
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.testing.scripted_broker import ScriptedBroker, ScriptedRenew, ScriptedTask
from fabric_pipelines.testing.scripted_engine import Script, ScriptedEngine, expected_output
from fabric_pipelines.worker.backpressure import Rung
from fabric_pipelines.worker.engines.door import EngineStats
from fabric_pipelines.worker.loop import NO_MORE, Pace, WorkerLoop
from fabric_pipelines.worker.outbox import Outbox
from fabric_pipelines.worker.reuse import Reuse


@dataclass
class Hand:
    """Time that moves when the loop waits, and by a little on every look at the clock."""

    now: float = 0.0
    waits: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        self.now += 2e-3
        return self.now

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    @property
    def clock(self) -> Clock:
        return Clock(monotonic_s=self.monotonic, wall_us=lambda: int(self.now * 1e6))


def tasks(
    count: int, *, lane: str = "lane-a", first: int = 0, length: int = 8
) -> list[ScriptedTask]:
    return [
        ScriptedTask(first + n, tuple(range(n, n + length)), max_new_tokens=4, lane=lane)
        for n in range(count)
    ]


def worker(
    engine: ScriptedEngine,
    broker: ScriptedBroker,
    *,
    until_idle: bool = True,
    outbox: Outbox | None = None,
    drain_s: float = 60.0,
    tell: Callable[[str], object] = lambda reason: None,
) -> tuple[WorkerLoop, Hand]:
    hand = Hand()
    engine.open()
    pace = Pace(until_idle=until_idle, drain_s=drain_s)
    loop = WorkerLoop(
        engine,
        broker,
        device="cpu:0",
        wait=hand.wait,
        pace=pace,
        clock=hand.clock,
        outbox=outbox,
        tell=tell,
    )
    return loop, hand


def turn_until(loop: WorkerLoop, condition: object, turns: int = 2000) -> None:
    assert callable(condition)
    for _ in range(turns):
        if condition():
            return
        loop.step()
    raise AssertionError(f"not reached in {turns} turns: {loop.counts}")


@pytest.mark.parametrize("continuous", [False, True])
def test_every_task_is_run_once_and_its_result_reported(continuous: bool) -> None:
    broker = ScriptedBroker(tasks(50))
    engine = ScriptedEngine(continuous=continuous)
    loop, _ = worker(engine, broker)
    counts = loop.run()
    assert sorted(engine.seen) == list(range(50))
    assert counts.ok == counts.sent == 50
    for task in broker.tasks:
        row = broker.computed_rows[task.task_id]
        assert row["output"] == expected_output(task.tokens, 4, engine.vocab_size)
    broker.require_exactly_once()


def test_a_step_engine_asks_for_its_whole_budget_and_holds_the_window_beside_it() -> None:
    broker = ScriptedBroker(tasks(100))
    engine = ScriptedEngine(profile=Profile(4, 64, 0, window_tokens=96))
    loop, _ = worker(engine, broker)
    loop.step()
    assert {tuple(ask.values()) for ask in broker.asked} == {(4, 64, None)}
    turn_until(loop, lambda: engine.polls >= 3)
    assert 96 <= loop.supply.waiting_tokens <= 96 + 64
    loop.run()


def test_a_continuous_engine_is_refilled_per_finished_task() -> None:
    broker = ScriptedBroker(tasks(100))
    engine = ScriptedEngine(continuous=True, profile=Profile(4, 64, 96, window_tokens=24))
    loop, _ = worker(engine, broker)
    turn_until(loop, lambda: loop.counts.ok >= 10)
    leases_before, done_before = len(broker.leases), loop.counts.ok
    turn_until(loop, lambda: loop.counts.ok >= 30)
    assert len(broker.leases) - leases_before == loop.counts.ok - done_before
    assert loop.supply.kv_tokens <= 96 + 24


def test_one_lease_brings_many_tasks_and_the_engine_stays_full_meanwhile() -> None:
    broker = ScriptedBroker(tasks(600))
    engine = ScriptedEngine(
        continuous=True, profile=Profile(8, 256, kv_cache_tokens=1 << 20, window_tokens=384)
    )
    loop, _ = worker(engine, broker)
    turn_until(loop, lambda: loop.counts.ok >= 50)
    leases, done, inside, held = loop.counts.leases, loop.counts.ok, [], []
    turn_until(
        loop,
        lambda: (
            inside.append(loop.supply.inside),
            held.append(len(loop.supply)),
            loop.counts.ok >= 450,
        )[2],
    )
    assert min(inside) >= 8, "a finished task is replaced at once, from the window"
    assert max(held) <= 12 + 384 // 12, "a big cache is no reason to hoard what others could run"
    assert loop.counts.leases - leases <= (loop.counts.ok - done) / 7
    loop.run()
    broker.require_exactly_once()


@pytest.mark.parametrize(("shared", "least", "most"), [(0.0, 8, 10), (0.75, 16, 30)])
def test_prefixes_that_the_engine_reuses_leave_room_for_more_tasks(
    shared: float, least: int, most: int
) -> None:
    """Each task is 8 tokens of prompt and 4 of answer, the cache 96 and the window 24."""
    engine = ScriptedEngine(continuous=True, profile=Profile(16, 64, 96, window_tokens=24))
    loop, _ = worker(engine, ScriptedBroker(tasks(200)))

    def computed_and_reused() -> bool:
        engine.stats.reused_tokens = round(engine.stats.computed_tokens * shared / (1 - shared))
        return loop.counts.ok >= 20

    turn_until(loop, computed_and_reused)
    assert least <= len(loop.supply) <= most


def test_reuse_is_that_of_the_work_at_hand_not_of_what_ran_before() -> None:
    stats = EngineStats(reused_tokens=0, computed_tokens=1_000_000)
    reuse = Reuse(stats, horizon=1000)
    assert reuse.share() == 0
    stats.reused_tokens, stats.computed_tokens = 900, 1_000_100
    assert reuse.share() == 0.9
    stats.computed_tokens += 4000
    assert reuse.share() < 0.2


def test_failures_and_refusals_are_reported_per_task_and_stop_nothing() -> None:
    broker = ScriptedBroker(tasks(20))
    engine = ScriptedEngine(
        script=Script(failed_rows=frozenset({3}), refused_rows=frozenset({5, 6}))
    )
    loop, _ = worker(engine, broker)
    counts = loop.run()
    assert (counts.ok, counts.failed, counts.refused) == (17, 1, 2)
    assert broker.computed_rows[5]["finish_reason"] == "oversized"


def test_a_broker_restart_in_mid_run_loses_nothing_and_runs_nothing_twice() -> None:
    broker = ScriptedBroker(tasks(60))
    engine = ScriptedEngine(continuous=True)
    loop, _ = worker(engine, broker)
    turn_until(loop, lambda: loop.counts.sent >= 10)
    broker.away = True
    turn_until(loop, lambda: not len(loop.supply))
    kept = loop.outbox.tasks
    assert kept > 0
    assert loop.ladder.rung is Rung.HOLD
    broker.restart()
    loop.run()
    assert len(broker.claims[-1]) == kept
    assert sorted(engine.seen) == list(range(60))
    assert len(broker.computed_rows) == 60
    assert loop.counts.reattached == 1


def test_a_restart_that_nobody_noticed_is_answered_with_a_reattach() -> None:
    broker = ScriptedBroker(tasks(40))
    engine = ScriptedEngine()
    loop, _ = worker(engine, broker)
    turn_until(loop, lambda: loop.counts.sent >= 8)
    broker.restart()
    loop.run()
    assert len(broker.claims) == 2
    assert sorted(engine.seen) == list(range(40))
    broker.require_exactly_once()


def test_an_answer_lost_after_the_journal_is_sent_again_and_counted_as_duplicates() -> None:
    broker = ScriptedBroker(tasks(20), lose_answers=2)
    engine = ScriptedEngine()
    loop, _ = worker(engine, broker)
    counts = loop.run()
    assert counts.resends == 2
    assert counts.duplicates > 0
    assert counts.sent + counts.duplicates == len(broker.computed_rows) == 20
    assert sorted(engine.seen) == list(range(20))


def test_tasks_that_expired_while_the_broker_was_away_are_dropped_unless_they_run() -> None:
    broker = ScriptedBroker(tasks(40))
    engine = ScriptedEngine(profile=Profile(4, 32, 0, window_tokens=128))
    loop, _ = worker(engine, broker)
    turn_until(loop, lambda: loop.supply.waiting_tokens >= 64)
    broker.restart(expire=True)
    counts = loop.run()
    assert counts.expired > 0
    assert len(set(engine.seen)) == len(broker.computed_rows) == 40
    assert len(engine.seen) - 40 == counts.late, "only what ran when its lease was lost runs again"
    broker.require_exactly_once()


def test_at_the_high_water_mark_the_worker_finishes_what_it_has_and_leases_no_more() -> None:
    broker = ScriptedBroker(tasks(200))
    engine = ScriptedEngine(profile=Profile(4, 64, 256, window_tokens=64))
    loop, hand = worker(engine, broker, until_idle=False)
    turn_until(loop, lambda: loop.counts.ok >= 8)
    broker.hold = True
    turn_until(loop, lambda: not len(loop.supply) and not loop.outbox.tasks)
    asked = len(broker.asked)
    for _ in range(50):
        loop.step()
    assert len(broker.asked) == asked
    assert loop.ladder.climbed["hold"] == 1
    assert min(hand.waits[-40:]) >= 0.05, "a holding worker does not spin"
    broker.hold = False
    turn_until(loop, lambda: loop.counts.sent == 200)


def test_a_worker_tells_what_it_waits_for_and_that_it_no_longer_does() -> None:
    broker = ScriptedBroker(tasks(4), away=True)
    told: list[str] = []
    loop, _ = worker(ScriptedEngine(), broker, until_idle=False, tell=told.append)
    loop.step()
    assert "away" in told[-1], told
    broker.away, broker.hold = False, True
    turn_until(loop, lambda: told[-1] == "at the high-water mark")
    assert loop.attached
    broker.hold = False
    turn_until(loop, lambda: len(broker.computed_rows) == 4)
    assert told[-1] == ""
    broker.hold = True  # heard of by a renewal, which gives no reason
    turn_until(loop, lambda: told[-1] == NO_MORE or told[-1] == "at the high-water mark")
    broker.hold = False
    turn_until(loop, lambda: told[-1] == "")


def test_a_filling_outbox_climbs_rung_by_rung_and_the_prefetch_ends_first() -> None:
    broker = ScriptedBroker(tasks(200))
    engine = ScriptedEngine(profile=Profile(4, 32, 0, window_tokens=64))
    loop, _ = worker(engine, broker, outbox=Outbox(tasks_max=16), until_idle=False)
    turn_until(loop, lambda: loop.supply.waiting_tokens >= 64)
    broker.away = True
    turn_until(loop, lambda: not len(loop.supply))
    assert loop.ladder.climbed["prefetch_off"] >= 1
    assert loop.ladder.climbed["hold"] >= 1
    assert loop.outbox.tasks <= 16 + 4
    broker.restart()
    turn_until(loop, lambda: loop.counts.sent + loop.counts.duplicates == 200)


def test_under_pressure_no_new_lane_is_admitted() -> None:
    broker = ScriptedBroker([*tasks(8), *tasks(8, lane="lane-b", first=100)])
    engine = ScriptedEngine(
        profile=Profile(4, 32, 0, window_tokens=0), script=Script(busy_submits=0)
    )
    loop, hand = worker(engine, broker)
    turn_until(loop, lambda: loop.counts.leases >= 2)
    engine.script.busy_submits = 10**6
    turn_until(loop, lambda: loop.ladder.rung >= Rung.NO_NEW_LANE)
    assert loop.ladder.climbed["no_new_lane"] == 1
    hand.now += 60
    turn_until(loop, lambda: bool(broker.nacks))
    engine.script.busy_submits = 0
    loop.run()
    assert len(broker.computed_rows) == 16


def test_a_busy_engine_gets_its_unstarted_work_taken_back_for_others() -> None:
    broker = ScriptedBroker(tasks(40))
    engine = ScriptedEngine(script=Script(busy_submits=10**6))
    loop, hand = worker(engine, broker, until_idle=False)
    turn_until(loop, lambda: loop.supply.waiting > 0)
    hand.now += 31
    turn_until(loop, lambda: loop.ladder.rung is Rung.NACK_UNSTARTED)
    loop.step()
    assert broker.nacks[-1][1] == "nack_unstarted"
    assert not broker.leased
    assert len(broker.ready) == 40


def test_sigterm_finishes_what_runs_and_hands_back_what_did_not_start() -> None:
    broker = ScriptedBroker(tasks(100))
    engine = ScriptedEngine(continuous=True, profile=Profile(4, 64, 96, window_tokens=96))
    loop, _ = worker(engine, broker, until_idle=False)
    turn_until(loop, lambda: loop.counts.ok >= 6)
    loop.request_stop()
    counts = loop.run()
    assert counts.nacked > 0
    assert counts.undelivered == 0
    assert not broker.leased
    assert not broker.session_known, "the session is given up, not left to run out"
    assert len(broker.computed_rows) == counts.ok
    broker.require_exactly_once()


def test_a_stop_while_the_broker_is_away_waits_for_it_and_delivers() -> None:
    broker = ScriptedBroker(tasks(30))
    engine = ScriptedEngine()
    loop, hand = worker(engine, broker, until_idle=False)
    turn_until(loop, lambda: loop.counts.ok >= 4)
    broker.away = True
    turn_until(loop, lambda: loop.outbox.tasks > 0 and not loop.attached)
    loop.request_stop()
    for _ in range(5):
        loop.step()
    broker.restart()
    counts = loop.run()
    assert counts.undelivered == 0
    assert hand.now < 60


def test_a_stop_with_a_broker_that_never_returns_ends_and_tells_what_was_not_delivered() -> None:
    broker = ScriptedBroker(tasks(30))
    engine = ScriptedEngine()
    loop, _ = worker(engine, broker, until_idle=False, drain_s=10)
    turn_until(loop, lambda: loop.counts.ok >= 4)
    broker.away = True
    turn_until(loop, lambda: loop.outbox.tasks > 0 and not loop.attached)
    loop.request_stop()
    counts = loop.run()
    assert counts.undelivered > 0


def test_a_failed_engine_delivers_its_results_nacks_the_rest_and_raises() -> None:
    broker = ScriptedBroker(tasks(40))
    engine = ScriptedEngine(script=Script(fail_at_poll=4))
    loop, _ = worker(engine, broker)
    with pytest.raises(EngineFailed, match="device lost"):
        loop.run()
    assert broker.nacks[-1][1] == "engine failed"
    assert broker.blamed == {12, 13, 14, 15}, "only what ran, not what waited inside the engine"
    assert not broker.leased
    assert len(broker.computed_rows) == loop.counts.ok == 12
    broker.require_exactly_once()


@pytest.mark.parametrize("continuous", [False, True])
def test_a_task_with_a_failed_attempt_runs_alone(continuous: bool) -> None:
    suspect = replace(tasks(1, first=50)[0], attempts=1, lane="lane-s")
    broker = ScriptedBroker([*tasks(8), suspect, *tasks(8, first=100)])
    engine = ScriptedEngine(continuous=continuous)
    loop, _ = worker(engine, broker)
    company = []
    turn_until(
        loop,
        lambda: (
            company.append(loop.supply.inside) if loop.supply.is_inside(50) else None,
            loop.counts.ok == 17,
        )[1],
    )
    assert set(company) <= {1}
    assert engine.seen.index(50) == 8


def test_a_crash_leaves_its_leases_to_run_out() -> None:
    class Crash(BaseException):
        """As a kill: nothing is caught."""

    class CrashingEngine(ScriptedEngine):
        def poll(self, timeout_s: float) -> list[pa.RecordBatch]:
            if self.polls == 3:
                raise Crash
            return super().poll(timeout_s)

    broker = ScriptedBroker(tasks(40))
    loop, _ = worker(CrashingEngine(), broker)
    with pytest.raises(Crash):
        loop.run()
    assert not broker.nacks
    assert broker.leased
    broker.require_exactly_once()


def test_an_engine_that_returns_a_task_it_does_not_hold_is_not_trusted() -> None:
    class Echo(ScriptedEngine):
        def poll(self, timeout_s: float) -> list[pa.RecordBatch]:
            return [batch for batch in super().poll(timeout_s) for _ in range(2)]

    broker = ScriptedBroker(tasks(4))
    loop, _ = worker(Echo(), broker)
    with pytest.raises(EngineFailed, match="cannot be trusted"):
        loop.run()


def test_leases_are_renewed_while_work_goes_on() -> None:
    broker = ScriptedBroker(tasks(200))
    engine = ScriptedEngine()
    loop, hand = worker(engine, broker)
    for _ in range(20):
        loop.step()
        hand.now += 1
    assert broker.renewals in (3, 4, 5)


def test_an_idle_worker_asks_ever_more_rarely_and_wakes_for_new_work() -> None:
    broker = ScriptedBroker(tasks(1))
    engine = ScriptedEngine()
    loop, hand = worker(engine, broker, until_idle=False)
    turn_until(loop, lambda: hand.now > 30)
    assert len(broker.asked) < 60
    broker.computed_rows.clear()
    broker.ready = [0]
    turn_until(loop, lambda: 0 in broker.computed_rows)


@dataclass
class OneAtATime(ScriptedBroker):
    """Gives two tasks, and more only once it has heard of those; in between it has none, or says that it holds."""

    says_hold: bool = False

    def lease(self, *, sequences: int, tokens: int, kv_tokens: int | None) -> Lease | None:
        self.hold = self.says_hold and bool(self.leased)
        if self.leased and not self.hold:
            return None
        return super().lease(sequences=min(sequences, 2), tokens=tokens, kv_tokens=kv_tokens)

    def renew(self) -> ScriptedRenew:
        self.hold = self.says_hold and bool(self.leased)
        return super().renew()


@pytest.mark.parametrize("says_hold", [True, False])
@pytest.mark.parametrize("continuous", [True, False])
def test_what_a_report_sets_free_is_asked_for_at_once_and_not_taken_for_the_end(
    continuous: bool, says_hold: bool
) -> None:
    broker = OneAtATime(tasks(40), says_hold=says_hold)
    loop, hand = worker(ScriptedEngine(continuous=continuous), broker)
    loop.run()
    assert sorted(broker.computed_rows) == list(range(40))
    assert hand.now < 5, "twenty pieces, with no pause between them"


def test_counters_tell_lane_switches_idle_gaps_and_tokens() -> None:
    broker = ScriptedBroker([*tasks(8), *tasks(8, lane="lane-b", first=100)])
    engine = ScriptedEngine()
    loop, _ = worker(engine, broker)
    loop.run()
    report = loop.report()
    assert report["lane_switches"] == 1
    assert report["offered_tokens"] == report["computed_tokens"] == 16 * 8
    assert report["generated_tokens"] == engine.stats.generated_tokens > 0
    assert report["idle_gaps"] >= 1
    assert set(report["rungs"]) == {"prefetch_off", "no_new_lane", "hold", "nack_unstarted", "stop"}


def test_until_idle_without_a_broker_ends_with_the_reason() -> None:
    broker = ScriptedBroker(tasks(3), away=True)
    loop, hand = worker(ScriptedEngine(), broker)
    with pytest.raises(BrokerUnavailable, match=r"^no broker for 3\d s: "):
        loop.run()
    assert hand.now < 2 * Pace().patience_s


def test_until_idle_that_loses_its_broker_finishes_what_runs_and_says_what_is_undelivered() -> None:
    broker = ScriptedBroker(tasks(6))
    engine = ScriptedEngine()
    loop, _ = worker(engine, broker)
    turn_until(loop, lambda: loop.supply.inside > 0)
    broker.away = True
    with pytest.raises(BrokerUnavailable, match="and 6 results stay undelivered"):
        loop.run()
    assert loop.counts.ok == loop.counts.undelivered == 6


def test_a_worker_that_runs_for_good_waits_for_its_broker_without_end() -> None:
    broker = ScriptedBroker(tasks(3), away=True)
    loop, hand = worker(ScriptedEngine(), broker, until_idle=False)
    turn_until(loop, lambda: hand.now > 100 * Pace().patience_s, turns=100_000)
    broker.restart()
    turn_until(loop, lambda: loop.counts.sent == 3)
    assert not broker.ready


def test_a_run_until_idle_ends_when_nothing_is_left_and_not_a_pause_later() -> None:
    """The broker's last "nothing" was followed by a wait of up to a second before the end was noticed."""
    broker = ScriptedBroker(tasks(40))
    loop, hand = worker(ScriptedEngine(), broker)
    turn_until(loop, lambda: loop.counts.sent == 40)
    hand.waits.clear()
    loop.run()
    assert hand.waits == []
