"""A function whose table takes nothing waits by itself: the others land all the while, and its rows lie with the broker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from threading import Event

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.completion.receive import PULLS_HELD, TRIAL_ROWS, OpenGate, Receiver
from fabric_pipelines.completion.waiting import PAUSE_MOST_S
from fabric_pipelines.dataplane.table_trouble import TableHeld, TableRefuses
from fabric_pipelines.dataplane.writer import Landed
from fabric_pipelines.errors import DatabaseUnavailable, FabricError, StorageFailed
from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.testing.scripted_computed import ScriptedComputed
from tests.support_completions import pulled_batch

PROOF = {"cluster": "1", "xid": "2", "table": "t"}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Tables:
    """A writer over one table a function. `trouble`: what a landing of that function meets; `landed`: each id as often as
    it landed; `tried`: (function, rows) of each landing."""

    def __init__(self) -> None:
        self.trouble: dict[str, FabricError] = {}
        self.landed: list[int] = []
        self.tried: list[tuple[str, int]] = []

    def land(self, batch: pa.RecordBatch) -> Landed:
        function = batch.column("function")[0].as_py()
        self.tried.append((function, batch.num_rows))
        if function in self.trouble:
            raise self.trouble[function]
        ids = batch.column("task_id").to_numpy()
        self.landed += ids.tolist()
        proof = Confirmation("postgres", PROOF)
        return Landed(ids, proof, ids[:0], np.zeros(0, np.uint8), None, rows=len(ids), size=0)

    def close(self) -> None:
        return None


def mixed(functions: str, rows: int, first: int) -> pa.RecordBatch:
    parts = [
        pulled_batch(rows, function=name, first=first + rows * at)
        for at, name in enumerate(functions)
    ]
    return pa.concat_batches(parts)


class Bench:
    def __init__(self, *batches: pa.RecordBatch, rows: int = 1000) -> None:
        self.broker = ScriptedComputed(list(batches))
        self.tables, self.clock, self.said = Tables(), Clock(), list[str]()
        self.most_held = 0
        self.loop = Receiver(
            self.broker.open,
            self.tables,
            lambda *introduction: None,
            say=self.said.append,
            rows=rows,
            clock_s=self.clock,
        )

    def step(self, steps: int = 1, *, of_s: float = 0.0) -> list[float]:
        pauses = []
        for _ in range(steps):
            pauses.append(self.loop.step(wait_s=0))
            self.most_held = max(self.most_held, self.loop.holds)
            self.clock.now_s += of_s
        return pauses

    def open_of(self, function: str) -> int:
        return len(self.ids_of(function) & self.broker.open_ids)

    def ids_of(self, function: str) -> set[int]:
        return {
            row["task_id"]
            for batch in self.broker.batches
            for row in batch.select(["task_id", "function"]).to_pylist()
            if row["function"] == function
        }


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(*(mixed("abc", 100, 1000 * at) for at in range(8)))
    yield made
    made.loop.close()


@pytest.mark.parametrize("fault", [TableRefuses("never"), TableHeld("locked")])
def test_others_land_and_retire_in_the_same_pull_and_in_later_ones(
    bench: Bench, fault: FabricError
) -> None:
    bench.tables.trouble["a"] = fault
    assert bench.step(9, of_s=0.05) == [0.0] * 9
    assert [bench.open_of(name) for name in "abc"] == [800, 0, 0]
    assert bench.loop.waiting == {"a": str(fault)}
    assert bench.loop.waits_for == f"function a: {fault}"
    assert bench.said == [f"function a waits, its tasks stay with the broker: {fault}"]


def test_once_the_table_heals_everything_lands_once_and_within_one_pause(bench: Bench) -> None:
    bench.tables.trouble["a"] = TableHeld("locked")
    bench.step(60, of_s=1.0)
    tried = sum(name == "a" for name, _ in bench.tables.tried)
    assert tried <= 60 / PAUSE_MOST_S + 8, "it is tried with growing pauses"
    bench.tables.trouble.clear()
    bench.clock.now_s += PAUSE_MOST_S
    bench.step(10)
    assert (bench.broker.open_ids, bench.loop.waits_for) == (set(), "")
    assert sorted(bench.tables.landed) == sorted(set(bench.tables.landed))
    assert (len(bench.tables.landed), bench.broker.duplicates) == (2400, 0)
    assert bench.said[1:] == ["function a goes on"]


def test_a_backlog_of_the_one_that_waits_before_all_others_starves_nobody_and_fills_no_memory() -> (
    None
):
    bench = Bench(*(mixed("a", 1000, 1000 * at) for at in range(9)), mixed("b", 50, 90_000))
    bench.tables.trouble["a"] = TableRefuses("never")
    bench.step(3)
    assert bench.open_of("b") == 0
    bench.step(30, of_s=1.0)
    assert bench.most_held <= PULLS_HELD * 1000
    assert bench.loop.holds == 0
    assert max(rows for _, rows in bench.tables.tried[2:]) == TRIAL_ROWS
    bench.tables.trouble.clear()
    bench.step(12)
    assert len(bench.tables.landed) == len(set(bench.tables.landed)) == 9050
    bench.loop.close()


def test_several_that_wait_are_tried_in_turn_and_told_apart() -> None:
    bench = Bench(mixed("abcd", 40, 0))
    bench.tables.trouble |= {"a": TableHeld("locked"), "b": TableRefuses("never")}
    bench.step(40, of_s=1.0)
    assert bench.loop.waiting == {"a": "locked", "b": "never"}
    assert {name for name, _ in bench.tables.tried[-2:]} == {"a", "b"}
    del bench.tables.trouble["a"]
    bench.step(12, of_s=1.0)
    assert (bench.loop.waiting, bench.open_of("a")) == ({"b": "never"}, 0)
    bench.loop.close()


def test_a_database_that_is_away_pauses_everything_and_a_broken_table_ends_the_process(
    bench: Bench,
) -> None:
    bench.tables.trouble["a"] = DatabaseUnavailable("away")
    pauses = bench.step(2)
    assert 0 < pauses[0] < pauses[1]
    assert (bench.loop.waits_for, bench.loop.waiting) == ("away", {})
    bench.tables.trouble["a"] = TableHeld("locked")
    bench.step(2)
    bench.tables.trouble["b"] = StorageFailed("no such column")
    with pytest.raises(StorageFailed):
        bench.step(9)


def test_a_broker_that_restarts_meanwhile_is_given_nothing_that_it_did_not_hand_out(
    bench: Bench,
) -> None:
    bench.tables.trouble["a"] = TableHeld("locked")
    bench.broker.lose_retires = 1
    bench.step(12, of_s=1.0)
    assert bench.broker.sessions == 2
    assert [bench.open_of(name) for name in "abc"] == [800, 0, 0]
    bench.tables.trouble.clear()
    bench.clock.now_s += PAUSE_MOST_S
    bench.step(12)
    assert bench.broker.open_ids == set()
    times = Counter(bench.tables.landed)
    assert {times[task] for task in bench.ids_of("a")} == {1}


class Locked(Tables):
    """A landing of "a" takes as long as somebody holds its table."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = Event()

    def land(self, batch: pa.RecordBatch) -> Landed:
        if batch.column("function")[0].as_py() == "a" and self.trouble:
            self.let_go.wait(60)
        return super().land(batch)


class OneWriter(OpenGate):
    def __init__(self) -> None:
        super().__init__(writers=1)


def test_while_a_trial_waits_for_a_lock_others_come_and_land_although_bulk_may_have_one_writer() -> (
    None
):
    bench = Bench(mixed("ab", 20, 0))
    tables = [Locked() for _ in range(3)]
    loop = bench.loop = Receiver(
        bench.broker.open,
        tables[0],
        lambda *introduction: None,
        more_targets=tables[1:],
        gate=OneWriter(),
        clock_s=bench.clock,
    )
    for each in tables:
        each.trouble["a"] = TableHeld("locked")
        each.let_go.set()
    bench.step(2)
    for each in tables:
        each.let_go.clear()
    bench.clock.now_s += 1
    for at in range(3):  # the trial of "a" runs from here on
        bench.broker.batches.append(mixed("ba", 20, 1000 + 100 * at))
        bench.step()
    assert (bench.open_of("b"), loop.holds) == (0, 20)
    for each in tables:
        each.trouble.clear()
        each.let_go.set()
    bench.step(4)
    assert (bench.broker.open_ids, loop.waits_for) == (set(), "")
    loop.close()
