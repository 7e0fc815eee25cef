"""What an engine hands back is compared with what it was given: nothing wrong is reported as ok, nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.errors import EngineFailed
from fabric_pipelines.records.completion import COMPLETION_SCHEMA
from fabric_pipelines.testing.scripted_broker import ScriptedBroker, ScriptedTask
from fabric_pipelines.testing.scripted_engine import ScriptedEngine
from fabric_pipelines.worker.loop import Pace, WorkerLoop
from fabric_pipelines.worker.results import WRONG, WRONG_MOST

Row = dict[str, Any]
HIDDEN = {"kind": "hidden", "layers": [1, 2], "pooling": "mean"}


class Forger(ScriptedEngine):
    """Hands its batches to `forge` on their way out, as rows."""

    forge: Callable[[list[Row]], list[Row]]

    def poll(self, timeout_s: float) -> list[pa.RecordBatch]:
        return [batch_of(self.forge(batch.to_pylist())) for batch in super().poll(timeout_s)]


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    columns = [
        pa.array([row[field.name] for row in rows], field.type) for field in COMPLETION_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=COMPLETION_SCHEMA)


def run(
    forge: Callable[[list[Row]], list[Row]], *, kind: str = "generate", count: int = 20
) -> tuple[WorkerLoop, ScriptedBroker, EngineFailed | None]:
    """Each task has a prompt of its own length and asks for four tokens, or for two layers of four numbers."""
    generates = kind == "generate"
    given = [
        ScriptedTask(100 + n, tuple(range(5 + n)), max_new_tokens=4 if generates else 0)
        for n in range(count)
    ]
    broker = ScriptedBroker(given, sampling={"kind": "generate"} if generates else HIDDEN)
    engine = Forger(kind=kind, dim=8)
    engine.capabilities = replace(engine.capabilities, dim=4)
    engine.forge = forge
    engine.open()
    loop = WorkerLoop(engine, broker, device="cpu:0", wait=time.sleep, pace=Pace(until_idle=True))
    try:
        loop.run()
    except EngineFailed as fault:
        return loop, broker, fault
    return loop, broker, None


def only(task: int, /, **new: Any) -> Callable[[list[Row]], list[Row]]:
    def forge(rows: list[Row]) -> list[Row]:
        return [{**row, **new} if row["task_id"] == task else row for row in rows]

    return forge


def swapped(column: str) -> Callable[[list[Row]], list[Row]]:
    """Each result has the column of the next one, as when rows are handed back in another order."""

    def forge(rows: list[Row]) -> list[Row]:
        return [{**row, column: rows[n - 1][column]} for n, row in enumerate(rows)]

    return forge


@pytest.mark.parametrize(
    ("forge", "says"),
    [
        (only(107, task_id=999), "task 999, which it does not hold"),
        (only(107, task_id=100), "task 100, which it does not hold or has returned before"),
        (only(107, task_id=106), "task 106 twice at once"),
        (lambda rows: [*rows, *rows], "twice at once"),
        (swapped("source_row"), "another task's source_row"),
        (swapped("prompt_tokens"), "another task's prompt_tokens"),
        (only(107, attempts=3), "task 107 with another task's attempts"),
        (only(107, metadata=b"?"), "task 107 with another task's metadata"),
        (only(107, engine="other@vllm"), "engine 'other@vllm', not scripted@scripted"),
        (only(107, engine_fingerprint="0" * 64), "engine_fingerprint '0000"),
        (only(107, status="done"), "status 'done', not ok or refused or failed"),
    ],
)
def test_an_engine_that_is_wrong_about_whose_result_it_is_ends_the_worker(
    forge: Callable[[list[Row]], list[Row]], says: str
) -> None:
    loop, broker, fault = run(forge)
    assert fault is not None, "taken as it was"
    assert says in str(fault)
    assert "cannot be trusted" in str(fault)
    assert not broker.leased, "every lease went back"
    assert broker.blamed, "what was inside is to be tried alone"
    assert len(broker.computed_rows) == loop.counts.ok, "what came before was sent"
    broker.require_exactly_once()


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ({"output": None}, "is ok and holds no result"),
        ({"output": [1] * 5}, "output of 5 tokens is above the 4 asked for"),
        ({"output": [1, 49_152]}, "token 49152, beyond the vocabulary of 49152"),
        ({"output": [1, None]}, "output holds a null"),
        ({"output": [], "finish_reason": "length"}, "ended with 'length'"),
        ({"output": None, "vector": np.ones(8, np.float16)}, "a vector where tokens"),
        ({"vector": np.ones(8, np.float16)}, "an output and a vector"),
        ({"finish_reason": "single_pass"}, "ended with 'single_pass'"),
        ({"finish_reason": "done"}, "ended with 'done'"),
    ],
)
def test_a_generation_that_is_not_what_was_asked_fails_alone_and_by_name(
    new: Row, says: str
) -> None:
    loop, broker, fault = run(only(107, **new))
    assert fault is None
    row = broker.computed_rows[107]
    assert (row["status"], row["finish_reason"], row["error_code"]) == ("failed", "error", WRONG)
    assert says in str(row["error_text"])
    assert row["output"] is None
    assert row["vector"] is None
    assert (loop.counts.ok, loop.counts.failed, loop.counts.wrong) == (19, 1, 1)
    assert loop.report()["wrong"] == 1
    assert all(row["output"] for task, row in broker.computed_rows.items() if task != 107)
    broker.require_exactly_once()


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ({"vector": None}, "holds no result"),
        ({"vector": np.ones(7, np.float16)}, "vector has 7 numbers, not 8"),
        ({"vector": np.ones(0, np.float16)}, "vector has 0 numbers, not 8"),
        ({"vector": np.array([1] * 7 + [np.nan], np.float16)}, "not a finite number"),
        ({"vector": np.array([-np.inf] + [1] * 7, np.float16)}, "not a finite number"),
        ({"vector": [np.float16(1), None] * 4}, "vector holds a null"),
        ({"vector": None, "output": [1]}, "holds tokens where a vector"),
        ({"finish_reason": "length"}, "ended with 'length'"),
    ],
)
def test_hidden_states_that_are_not_what_was_asked_fail_alone_and_by_name(
    new: Row, says: str
) -> None:
    loop, broker, fault = run(only(107, **new), kind="hidden")
    assert fault is None
    row = broker.computed_rows[107]
    assert (row["status"], row["error_code"]) == ("failed", WRONG)
    assert says in str(row["error_text"])
    assert (loop.counts.ok, loop.counts.wrong) == (19, 1)
    assert len([r for r in broker.computed_rows.values() if r["vector"] is not None]) == 19


def test_the_right_ones_of_a_batch_are_told_apart_from_several_wrong_ones() -> None:
    bad = {101: [1] * 9, 102: [50_000], 107: [3, 60_000], 119: [1] * 6}

    def forge(rows: list[Row]) -> list[Row]:
        return [{**row, "output": bad.get(row["task_id"], row["output"])} for row in rows]

    _, broker, fault = run(forge)
    assert fault is None
    failed = {n for n, row in broker.computed_rows.items() if row["status"] == "failed"}
    assert failed == set(bad)


def test_an_engine_that_is_wrong_every_time_is_not_trusted_with_the_rest() -> None:
    loop, broker, fault = run(lambda rows: [{**row, "output": [1] * 5} for row in rows], count=200)
    assert fault is not None
    assert "wrong results in a row" in str(fault)
    assert loop.counts.ok == 0
    assert loop.counts.wrong < WRONG_MOST + 4, "the rest was not spent on it"
    assert not broker.leased
    broker.require_exactly_once()


def test_wrong_results_with_right_ones_between_cost_no_worker() -> None:
    def forge(rows: list[Row]) -> list[Row]:
        return [{**row, "output": [1] * 5} if row["task_id"] % 4 else row for row in rows]

    loop, _, fault = run(forge, count=100)
    assert fault is None
    assert (loop.counts.ok, loop.counts.wrong) == (25, 75)


def test_numbers_that_are_not_finite_are_the_tasks_and_cost_no_worker_however_many() -> None:
    nan = np.full(8, np.nan, np.float16)
    loop, broker, fault = run(
        lambda rows: [{**row, "vector": nan} for row in rows], kind="hidden", count=80
    )
    assert fault is None
    assert (loop.counts.ok, loop.counts.wrong) == (0, 80)
    assert {row["error_code"] for row in broker.computed_rows.values()} == {WRONG}
