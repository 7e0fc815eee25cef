"""However a worker ends, its leases go back at once, what had ended is sent, and the end has a name."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from fabric_pipelines.errors import EngineFailed, UsageError, VersionRefused
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.testing.scripted_broker import ScriptedBroker, ScriptedDelivery, ScriptedTask
from fabric_pipelines.testing.scripted_engine import ScriptedEngine
from fabric_pipelines.worker.loop import Pace, WorkerLoop
from tests.unit.engines.test_stepping import Gate, Toy

HUNG_AT_EXIT = """
import sys
from types import SimpleNamespace
from fabric_pipelines.worker import service
from tests.tiny_models import lease_of
from tests.unit.engines.test_stepping import ANY, Gate, Toy
service.CLOSE_S = 0.1
service.kept_profile = lambda *given: None
gate = Gate()
toy = Toy(gate)
with service._opened(toy, SimpleNamespace(models=None), "cpu:0"):
    toy.submit(lease_of([[1]] * 2, ANY))
    toy.poll(0.01)
print("left", toy.freed)
"""


def tasks(count: int) -> list[ScriptedTask]:
    return [ScriptedTask(n, (1, 2, 3 + n)) for n in range(count)]


def worker(engine: ScriptedEngine | Toy, broker: ScriptedBroker, pace: Pace) -> WorkerLoop:
    engine.open()
    return WorkerLoop(engine, broker, device="cpu:0", wait=time.sleep, pace=pace)


@pytest.fixture
def hung() -> Iterator[Toy]:
    """Its step never ends."""
    toy = Toy(Gate())
    yield toy
    toy.gate.opened.set()
    toy.close()


class Ends(ScriptedEngine):
    """From its fourth poll on something is wrong with what it does."""

    how: Callable[[list[pa.RecordBatch]], object]

    def poll(self, timeout_s: float) -> list[pa.RecordBatch]:
        batches = super().poll(timeout_s)
        return self.how(batches) if self.polls > 3 else batches  # type: ignore[return-value]


def _raises(fault: Exception) -> Callable[[list[pa.RecordBatch]], object]:
    def how(batches: list[pa.RecordBatch]) -> object:
        raise fault

    return how


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (_raises(AssertionError("one outcome a task")), "AssertionError: one outcome a task"),
        (_raises(OSError(5, "disk")), "OSError"),
        (_raises(KeyError("x")), "KeyError"),
        (lambda batches: None, "TypeError"),
        (
            lambda batches: [batch.drop_columns(["output"]) for batch in batches],
            "no completion batch .*lacks the column 'output'",
        ),
    ],
)
def test_an_exception_that_nobody_foresaw_has_a_name_and_keeps_no_lease(
    how: Callable[[list[pa.RecordBatch]], object], says: str
) -> None:
    broker = ScriptedBroker(tasks(40))
    engine = Ends()
    engine.how = how
    loop = worker(engine, broker, Pace(until_idle=True))
    with pytest.raises(EngineFailed, match=says):
        loop.run()
    assert not broker.leased
    assert len(broker.computed_rows) == loop.counts.ok > 0, "what had ended was sent"
    assert broker.blamed == set(range(12, 20)), "what ran and what came next, not what waited"
    broker.require_exactly_once()


def test_what_breaks_an_engine_on_its_way_in_is_found_by_halving() -> None:
    class Chokes(ScriptedEngine):
        def submit(self, lease: Lease) -> None:
            raise ValueError("no such value")

    broker = ScriptedBroker(tasks(40))
    loop = worker(Chokes(), broker, Pace(until_idle=True))
    with pytest.raises(EngineFailed, match="ValueError: no such value"):
        loop.run()
    assert broker.blamed == set(range(4)), "the lease that it choked on, and nothing that waited"
    assert not broker.leased
    broker.require_exactly_once()


def test_results_that_the_broker_will_not_take_give_their_tasks_back() -> None:
    class Picky(ScriptedBroker):
        def computed(self, batch: pa.RecordBatch) -> ScriptedDelivery:
            if len(self.computed_rows) >= 8:
                raise UsageError("a result is longer than any engine's")
            return super().computed(batch)

    broker = Picky(tasks(40))
    loop = worker(ScriptedEngine(), broker, Pace(until_idle=True, coalesce_s=0.0))
    with pytest.raises(UsageError, match="longer than any engine's"):
        loop.run()
    assert not broker.leased
    assert broker.blamed, "what was not taken counts as tried"
    broker.require_exactly_once()


def test_a_broker_of_another_version_gets_its_leases_back() -> None:
    class Other(ScriptedBroker):
        def hello(self) -> None:
            if self.computed_rows:
                raise VersionRefused("another protocol")
            super().hello()

    broker = Other(tasks(40))
    loop = worker(ScriptedEngine(), broker, Pace(until_idle=True, coalesce_s=0.0))
    while not loop.counts.sent:
        loop.step()
    broker.restart()
    with pytest.raises(VersionRefused):
        loop.run()
    assert loop.counts.expired > 0, "there is nobody to tell: they run out"


def test_a_step_that_hangs_ends_the_worker_and_only_what_ran_is_blamed(hung: Toy) -> None:
    broker = ScriptedBroker(tasks(6))
    loop = worker(hung, broker, Pace(until_idle=True, poll_s=0.01, stall_s=0.2))
    with pytest.raises(EngineFailed, match=r"made no progress for .* s with . tasks inside"):
        loop.run()
    assert not broker.leased
    assert broker.blamed == {0, 1}
    broker.require_exactly_once()


def test_an_engine_that_gives_nothing_back_is_noticed() -> None:
    engine = Ends()
    engine.how = lambda batches: []
    broker = ScriptedBroker(tasks(40))
    loop = worker(engine, broker, Pace(until_idle=True, poll_s=0.01, stall_s=0.2))
    with pytest.raises(EngineFailed, match="made no progress"):
        loop.run()
    assert not broker.leased


def test_an_engine_that_was_as_slow_before_and_went_on_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, now_s = ScriptedEngine(continuous=True), 0.0
    loop = worker(engine, ScriptedBroker(tasks(2)), Pace(stall_s=600.0))
    monkeypatch.setattr(loop, "_now", lambda: now_s)

    def waited(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        loop._require_progress()

    waited(0.0)
    for gap_s in (
        500.0,
        1900.0,
        5900.0,
    ):  # each below four times the one before, and ten times the setting
        waited(gap_s)
        engine.stats.steps += 1
        waited(0.0)
    with pytest.raises(EngineFailed, match="raise the setting stall_s"):
        waited(6001.0)


def test_a_slow_engine_that_moves_is_left_alone() -> None:
    broker = ScriptedBroker(tasks(12))
    engine = ScriptedEngine(continuous=True)
    loop = worker(engine, broker, Pace(until_idle=True, stall_s=0.0))
    assert loop.run().ok == 12


def test_a_stop_ends_a_worker_whose_step_hangs_and_blames_nothing(hung: Toy) -> None:
    broker = ScriptedBroker(tasks(6))
    loop = worker(hung, broker, Pace(poll_s=0.01, drain_s=0.1))
    while not loop.supply.inside:
        loop.step()
    loop.request_stop()
    loop.run()
    assert not broker.leased
    assert not broker.blamed
    assert sorted(broker.ready) == list(range(6))


def test_a_process_ends_though_its_engine_hangs() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HUNG_AT_EXIT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "left 0"), ended.stderr
