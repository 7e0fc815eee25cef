"""The completion loop over a real Postgres and a scripted broker: nothing is lost, nothing retires early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.completion.receive import Receiver
from fabric_pipelines.completion.waiting import PAUSE_MOST_S
from fabric_pipelines.dataplane import results
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.lake import Lake
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import CheckFailed, DatabaseUnavailable, IncarnationMismatch
from fabric_pipelines.testing.scripted_computed import ScriptedComputed, ScriptedInfo
from tests.support import eventually
from tests.support_completions import pulled_batch
from tests.support_scripted_s3 import fault, scripted_store

Make = Callable[..., Receiver]


@pytest.fixture
def receiver(database: Database) -> Iterator[Make]:
    with ExitStack() as stack:

        def make(broker: ScriptedComputed, target: object = None, **more: object) -> Receiver:
            made = Receiver(
                broker.open,
                target or Writer(database),  # type: ignore[arg-type]
                lambda journal, number, retired: database.register_incarnation(
                    journal, number, retired=retired
                ),
                **more,  # type: ignore[arg-type]
            )
            stack.callback(made.close)
            return made

        yield make


class AwayWriter:
    """A writer whose database can be taken away, and that counts what reached it."""

    def __init__(self, inner: Writer) -> None:
        self.inner, self.away, self.calls = inner, True, 0

    def land(self, batch: pa.RecordBatch) -> object:
        self.calls += 1
        if self.away:
            raise DatabaseUnavailable("away")
        return self.inner.land(batch)

    def close(self) -> None:
        self.inner.close()


def test_every_function_lands_and_retires_under_its_own_confirmation(
    database: Database, receiver: Make
) -> None:
    mixed = pa.concat_batches(
        [
            pulled_batch(10, function="generate"),
            pulled_batch(10, function="embed", first=10, poison={3: float("nan")}),
            pulled_batch(10, function="own", first=20, bad={0: ("failed", "EngineFailed", "boom")}),
        ]
    )
    broker = ScriptedComputed([mixed])
    assert receiver(broker).step(wait_s=0) == 0
    assert broker.open_ids == set()
    assert (len(broker.retired), len(broker.buried)) == (28, 2)
    tables = {proof.proof["table"] for proof in broker.retired.values()}
    assert tables == {"fabric.generate", "fabric.embed", "fabric.results"}
    assert {proof.kind for proof in broker.buried.values()} == {"dead_letter"}
    ids = mixed.column("task_id").to_numpy()
    assert results.unaccounted(database, np.append(ids, 1)).tolist() == [1]


def test_while_the_database_is_away_rows_are_held_and_then_land(
    database: Database, receiver: Make
) -> None:
    broker, writer = (
        ScriptedComputed([pulled_batch(10, function="generate")]),
        AwayWriter(Writer(database)),
    )
    loop = receiver(broker, writer)
    pauses = [loop.step(wait_s=0) for _ in range(3)]
    assert pauses == sorted(pauses)
    assert pauses[0] > 0
    assert (loop.holds, len(broker.retired)) == (10, 0)
    writer.away = False
    assert loop.step(wait_s=0) == 0
    assert (loop.holds, broker.open_ids, broker.sessions) == (0, set(), 1)


def test_while_the_lake_is_throttled_only_what_needs_it_waits_and_then_lands(
    database: Database, receiver: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted_store(monkeypatch) as store:
        store.says, now_s = fault(503, "SlowDown"), [0.0]
        large = pulled_batch(2, function="hidden_states", dim=16_001)
        broker = ScriptedComputed([large, pulled_batch(3, function="embed", first=2)])
        writer = Writer(database, lake=Lake("s3://bucket/lake"))
        loop = receiver(broker, writer, clock_s=lambda: now_s[0])
        assert [loop.step(wait_s=0) for _ in range(3)] == [0, 0, 0]
        assert (len(broker.retired), list(loop.waiting)) == (3, ["hidden_states"])
        assert "the store is busy" in loop.waits_for
        store.says = None
        now_s[0] += PAUSE_MOST_S

        def landed() -> bool:  # a step does not wait for a trial that takes its time
            loop.step(wait_s=0)
            return not loop.waits_for

        eventually(landed, within_s=60, what="the function that waited to land")
        assert (loop.waits_for, loop.holds, broker.open_ids) == ("", 0, set())
        (key,) = store.objects
    rows = results.read(database, function="hidden_states").to_pylist()
    assert [row["artifact_uri"] for row in rows] == [f"s3:/{key}"] * 2


def test_a_broker_that_dies_before_it_answers_a_retire_loses_and_doubles_nothing(
    database: Database, receiver: Make
) -> None:
    broker = ScriptedComputed([pulled_batch(10, function="generate")], lose_retires=1)
    loop = receiver(broker)
    assert loop.step(wait_s=0) > 0
    assert loop.step(wait_s=0) == 0
    assert (broker.open_ids, broker.duplicates, broker.sessions) == (set(), 10, 2)
    assert results.counts(database)["generate"] == 10
    assert loop.counters.landings == 1, "what is known to be durable is not landed again"


def test_a_restart_after_landing_and_before_retiring_replays_without_effect(
    database: Database, receiver: Make
) -> None:
    batch = pulled_batch(10, function="generate")
    writer = Writer(database)
    writer.land(batch)
    writer.close()
    broker = ScriptedComputed([batch])
    loop = receiver(broker)
    loop.step(wait_s=0)
    assert (loop.counters.inserted, loop.counters.retired) == (0, 10)


def test_closing_hands_back_what_is_held(database: Database, receiver: Make) -> None:
    broker, writer = (
        ScriptedComputed([pulled_batch(10, function="generate")]),
        AwayWriter(Writer(database)),
    )
    loop = receiver(broker, writer)
    loop.step(wait_s=0)
    assert len(broker.pulled) == 10
    loop.close()
    assert broker.pulled == set()
    assert len(broker.open_ids) == 10


def test_a_journal_the_database_does_not_know_is_refused_before_anything_lands(
    database: Database, receiver: Make
) -> None:
    first = ScriptedComputed([pulled_batch(5, function="generate")])
    receiver(first).step(wait_s=0)
    other = ScriptedComputed(
        [pulled_batch(5, function="generate", incarnation=9)], ScriptedInfo("b" * 32, 9)
    )
    with pytest.raises(IncarnationMismatch):
        receiver(other).step(wait_s=0)
    assert results.counts(database)["generate"] == 5
    assert other.pulled == set()


def test_tasks_of_another_incarnation_than_announced_are_refused(receiver: Make) -> None:
    broker = ScriptedComputed([pulled_batch(5, function="generate", incarnation=9)])
    with pytest.raises(CheckFailed, match=r"\[9\]"):
        receiver(broker).step(wait_s=0)


def test_a_broker_away_at_the_start_is_waited_for(receiver: Make) -> None:
    broker = ScriptedComputed([pulled_batch(5, function="generate")], away=True)
    said: list[str] = []
    loop = receiver(broker, say=said.append)
    assert loop.step(wait_s=0) > 0
    broker.away = False
    assert loop.step(wait_s=0) == 0
    assert broker.open_ids == set()
    assert [line.split(",")[0] for line in said] == ["completion waits", "completion goes on"]
