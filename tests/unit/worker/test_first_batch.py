"""Start full: the first batch waits for a full one as long as more keeps coming, and not for what will not come."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.testing.scripted_broker import ScriptedBroker
from fabric_pipelines.testing.scripted_engine import ScriptedEngine
from fabric_pipelines.worker.account import summary
from fabric_pipelines.worker.loop import Pace, WorkerLoop
from tests.unit.worker.test_loop import Hand, tasks

BATCH = 64
BUDGETS = {  # the bound that 64 tasks of 8 tokens and 4 new ones reach
    "sequences": Profile(BATCH, 8192, 0, 1024),
    "tokens": Profile(512, BATCH * 8, 0, 1024),
    "cache": Profile(512, 8192, BATCH * 12, 1024),
}


@dataclass
class Trickle(ScriptedBroker):
    """As while a producer submits: a piece of `piece` tasks, then nothing until it is asked again."""

    piece: int = 4
    asks: int = 0
    empty: int = 0

    def lease(self, *, sequences: int, tokens: int, kv_tokens: int | None) -> Lease | None:
        self.asks += 1
        lease = None
        if self.asks % 2:
            lease = super().lease(
                sequences=min(sequences, self.piece), tokens=tokens, kv_tokens=kv_tokens
            )
        self.empty += lease is None
        return lease


def started(
    broker: ScriptedBroker,
    start_full_s: float,
    *,
    continuous: bool = False,
    budget: str = "sequences",
) -> tuple[WorkerLoop, ScriptedEngine, Hand]:
    """A loop that has just given its engine the first work."""
    hand, engine = Hand(), ScriptedEngine(continuous=continuous, profile=BUDGETS[budget])
    engine.open()
    pace = Pace(until_idle=True, start_full_s=start_full_s)
    loop = WorkerLoop(engine, broker, device="cpu:0", wait=hand.wait, pace=pace, clock=hand.clock)
    while not engine.seen:
        loop.step()
        assert hand.now < 60
    return loop, engine, hand


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_first_batch_is_a_full_one_where_it_was_the_first_piece(
    budget: str, continuous: bool
) -> None:
    if continuous and budget == "tokens":
        budget = "cache"  # one that refills takes its prompts over many steps
    _, before, _ = started(Trickle(tasks(400)), 0.0, continuous=continuous, budget=budget)
    loop, after, _ = started(Trickle(tasks(400)), 5.0, continuous=continuous, budget=budget)
    assert (len(before.seen), len(after.seen)) == (4, BATCH)
    assert loop.report()["first_fill"] == 1.0
    assert 0 < loop.report()["first_wait_s"] < 2
    loop.run()
    assert sorted(after.seen) == list(range(400))


def test_a_small_job_waits_for_two_empty_asks_and_not_for_the_deadline() -> None:
    broker = Trickle(tasks(4))
    loop, engine, hand = started(broker, 600.0)
    assert broker.empty == 2
    assert hand.now < 0.2
    assert loop.counts.first_fill == 4 / BATCH
    loop.run()
    assert sorted(engine.seen) == list(range(4))


def test_what_is_full_at_once_waits_for_nothing() -> None:
    loop, engine, hand = started(ScriptedBroker(tasks(400)), 600.0)
    assert hand.waits == []
    assert len(engine.seen) >= BATCH
    assert loop.counts.first_wait_s < 0.1


def test_work_that_keeps_dripping_in_is_begun_at_the_deadline() -> None:
    broker = Trickle(tasks(400), piece=1)
    loop, engine, _ = started(broker, 2.0)
    assert 2.0 <= loop.counts.first_wait_s < 2.2
    assert len(engine.seen) > 4
    assert loop.counts.first_fill == len(engine.seen) / BATCH < 1


def test_a_window_that_takes_no_more_is_enough() -> None:
    """Lanes of single tasks never fill the batch that the window is too small for."""
    BUDGETS["no window"] = Profile(512, 64, 0, 0)
    loop, _, hand = started(Trickle(tasks(400)), 600.0, budget="no window")
    assert hand.now < 5
    assert loop.counts.first_fill == 1.0


@pytest.mark.parametrize("what", ["hold", "away"])
def test_a_broker_that_gives_no_more_is_not_waited_for(what: str) -> None:
    class Then(ScriptedBroker):
        def lease(self, *, sequences: int, tokens: int, kv_tokens: int | None) -> Lease | None:
            setattr(self, what, bool(self.asked))
            return super().lease(sequences=4, tokens=tokens, kv_tokens=kv_tokens)

    broker = Then(tasks(400))
    loop, _, hand = started(broker, 600.0)
    assert hand.now < 5
    assert loop.counts.first_fill == 4 / BATCH


def test_a_worker_that_is_stopped_while_it_waits_runs_nothing_and_gives_all_back() -> None:
    broker, hand, engine = (
        Trickle(tasks(400), piece=1),
        Hand(),
        ScriptedEngine(profile=BUDGETS["sequences"]),
    )
    engine.open()
    loop = WorkerLoop(engine, broker, device="cpu:0", wait=hand.wait, pace=Pace(), clock=hand.clock)
    loop.step()
    assert broker.leased
    loop.request_stop()
    loop.run()
    assert not engine.seen
    assert not broker.leased
    broker.require_exactly_once()


def test_the_line_for_a_person_tells_how_full_the_first_batch_was() -> None:
    loop, _, _ = started(Trickle(tasks(16)), 5.0)
    facts = loop.report() | {"tokens_per_joule": None}
    assert ", the first 25 % after 0." in summary(facts)
    assert "the first" not in summary(facts | {"first_fill": None})
