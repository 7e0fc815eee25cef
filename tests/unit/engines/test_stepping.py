"""The shared half of an engine: nothing is lost, nothing comes back twice, failures have names."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.errors import EngineFailed
from fabric_pipelines.records.manifest import EngineManifest
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.worker.engines.agreement import Told
from fabric_pipelines.worker.engines.door import Capabilities
from fabric_pipelines.worker.engines.stepping import SteppingEngine
from fabric_pipelines.worker.engines.tasks import Outcome, Task
from tests.support import eventually
from tests.tiny_models import drain, lease_of, polled_until_it_fails

MANIFEST = EngineManifest("toy 1", "Toy", "none", "none", 1, 2, 100, 10, 20)
ANY = {"kind": "generate"}


@dataclass
class Gate:
    """Steps wait until it is opened; `steps` lists the task ids of each."""

    opened: threading.Event = field(default_factory=threading.Event)
    steps: list[list[int]] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)
    short: bool = False


UNJUDGED = 14


class Toy(SteppingEngine):
    def __init__(self, gate: Gate) -> None:
        super().__init__(
            "toy",
            MANIFEST,
            "f" * 64,
            Capabilities(frozenset({"generate"}), False, True, "cpu"),
            Profile(2, 100, 0, 0),
        )
        self.gate = gate
        self.freed = 0

    def introspect(self) -> Mapping[str, Told]:
        return {name: Told(value, "the toy") for name, value in MANIFEST.as_json().items()}

    def _load(self) -> None:
        return

    def _free(self) -> None:
        self.freed += 1

    def _objection(self, task: Task) -> str | None:
        if UNJUDGED in task.tokens:
            raise IndexError("beyond the end")
        return "13 is not served" if 13 in task.tokens else None

    def _cut(self, pending: Sequence[Task]) -> list[Task]:
        return list(pending[:2])

    def _run(self, tasks: list[Task]) -> list[Outcome]:
        self.gate.steps.append([task.task_id for task in tasks])
        assert self.gate.opened.wait(30)
        if self.gate.faults:
            raise self.gate.faults.pop()
        if self.gate.short:
            tasks = tasks[1:]
        return [Outcome(task, "ok", "stop", output=np.array([9], np.uint32)) for task in tasks]


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def engine(gate: Gate) -> Iterator[Toy]:
    toy = Toy(gate)
    toy.open()
    yield toy
    gate.opened.set()
    toy.close()


def test_every_task_comes_back_once_over_many_steps(engine: Toy, gate: Gate) -> None:
    gate.opened.set()
    engine.submit(lease_of([[1]] * 5, ANY))
    engine.submit(lease_of([[1]] * 2, ANY, first_id=5))
    assert sorted(drain(engine)) == list(range(7))
    assert gate.steps == [[0, 1], [2, 3], [4, 5], [6]]


def test_a_poll_returns_at_its_timeout_while_a_step_runs(engine: Toy, gate: Gate) -> None:
    engine.submit(lease_of([[1]] * 3, ANY))
    assert engine.poll(0.01) == []
    assert engine.unfinished() == [0, 1, 2]


def test_unstarted_tasks_can_be_taken_back_and_started_ones_finish(engine: Toy, gate: Gate) -> None:
    engine.submit(lease_of([[1]] * 5, ANY))
    assert engine.poll(0) == []
    assert engine.withdraw_unstarted() == [2, 3, 4]
    assert engine.unfinished() == [0, 1]
    gate.opened.set()
    assert sorted(drain(engine)) == [0, 1]


def test_the_next_step_starts_before_the_last_is_handed_out(engine: Toy, gate: Gate) -> None:
    gate.opened.set()
    engine.submit(lease_of([[1]] * 4, ANY))
    (first,) = engine.poll(30)
    assert first.column("task_id").to_pylist() == [0, 1]
    eventually(lambda: len(gate.steps) == 2, within_s=60, what="the second step started unasked")


@pytest.mark.parametrize(
    ("tokens", "new", "says"),
    [
        ([1] * 11, 1, "its prompt of 11 tokens is above max_input_len 10"),
        ([1] * 10, 11, "its 21 tokens with output are above max_seq_len 20"),
    ],
)
def test_an_oversized_task_is_refused_at_once_and_the_rest_runs(
    engine: Toy, gate: Gate, tokens: list[int], new: int, says: str
) -> None:
    gate.opened.set()
    engine.submit(lease_of([tokens, [1]], ANY, new=[new, 1]))
    rows = drain(engine)
    assert (rows[0]["status"], rows[0]["finish_reason"]) == ("refused", "oversized")
    assert says in rows[0]["error_text"]
    assert rows[1]["status"] == "ok"


def test_a_sampling_that_is_not_served_is_refused_with_the_reason(engine: Toy, gate: Gate) -> None:
    engine.submit(lease_of([[13]], ANY))
    row = drain(engine)[0]
    assert (row["status"], row["error_text"]) == ("refused", "13 is not served")


def test_a_failed_step_fails_its_own_tasks_only(engine: Toy, gate: Gate) -> None:
    gate.opened.set()
    gate.faults.append(RuntimeError("bad step"))
    engine.submit(lease_of([[1]] * 3, ANY))
    rows = drain(engine)
    assert [rows[task]["status"] for task in range(3)] == ["failed", "failed", "ok"]
    assert (rows[0]["error_code"], rows[0]["error_text"]) == ("EngineFailed", "bad step")


def test_an_engine_that_keeps_failing_says_so_and_loses_no_task(engine: Toy, gate: Gate) -> None:
    gate.opened.set()
    gate.faults.extend(RuntimeError("broken") for _ in range(3))
    engine.submit(lease_of([[1]] * 6, ANY))
    returned: dict[int, Any] = {}
    with pytest.raises(EngineFailed, match="failed 3 steps in a row, last with: broken"):
        polled_until_it_fails(engine, returned)
    assert sorted([*returned, *engine.unfinished()]) == list(range(6))


@pytest.mark.parametrize("kind", [ValueError, TypeError, IndexError, KeyError, OverflowError])
def test_a_librarys_judgement_fails_its_tasks_however_often_it_comes(
    engine: Toy, gate: Gate, kind: type[Exception]
) -> None:
    gate.opened.set()
    gate.faults.extend(kind("no such value") for _ in range(5))
    engine.submit(lease_of([[1]] * 14, ANY))
    rows = drain(engine)
    assert [rows[task]["status"] for task in range(14)] == ["failed"] * 10 + ["ok"] * 4
    assert rows[0]["error_text"].startswith(f"{kind.__name__}: ")


def test_a_lost_device_is_said_at_once_and_loses_no_task(engine: Toy, gate: Gate) -> None:
    gate.opened.set()
    gate.faults.append(RuntimeError("CUDA error: unspecified launch failure"))
    engine.submit(lease_of([[1]] * 6, ANY))
    with pytest.raises(EngineFailed, match="is broken: CUDA error"):
        polled_until_it_fails(engine, {})
    assert sorted(engine.unfinished()) == list(range(6))


def test_results_that_are_not_one_a_task_are_not_trusted(engine: Toy, gate: Gate) -> None:
    gate.opened.set()
    gate.short = True
    engine.submit(lease_of([[1]] * 3, ANY))
    with pytest.raises(EngineFailed, match="1 results to 2 tasks, not one each"):
        polled_until_it_fails(engine, {})
    assert sorted(engine.unfinished()) == [0, 1, 2]


def test_what_had_ended_is_handed_out_before_the_engine_says_it_is_broken(
    engine: Toy, gate: Gate
) -> None:
    gate.opened.set()
    gate.faults.append(RuntimeError("CUDA error: unspecified launch failure"))
    engine.submit(lease_of([[1], [1]], ANY))
    engine.submit(lease_of([[13]], ANY, first_id=2))
    returned: dict[int, Any] = {}
    with pytest.raises(EngineFailed, match="is broken"):
        polled_until_it_fails(engine, returned)
    assert list(returned) == [2]


def test_a_task_that_cannot_even_be_judged_is_refused_alone(engine: Toy, gate: Gate) -> None:
    gate.opened.set()
    engine.submit(lease_of([[1], [UNJUDGED], [1]], ANY))
    rows = drain(engine)
    assert [rows[task]["status"] for task in range(3)] == ["ok", "refused", "ok"]
    assert "cannot be judged" in rows[1]["error_text"]


def test_an_empty_prompt_is_refused_in_our_words(engine: Toy, gate: Gate) -> None:
    """They were NumPy's: zero-size array to reduction operation maximum which has no identity."""
    gate.opened.set()
    engine.submit(lease_of([[1], [], [1]], ANY))
    rows = drain(engine)
    assert [rows[task]["status"] for task in range(3)] == ["ok", "refused", "ok"]
    assert rows[1]["error_text"] == "its prompt is empty: a task has at least one token"


def test_a_bug_of_ours_is_not_dressed_up_as_a_failed_task(engine: Toy, gate: Gate) -> None:
    gate.opened.set()
    gate.faults.append(AssertionError("bug"))
    engine.submit(lease_of([[1]], ANY))
    with pytest.raises(AssertionError, match="bug"):
        engine.poll(30)


def test_closing_twice_frees_once(engine: Toy, gate: Gate) -> None:
    gate.opened.set()
    engine.close()
    engine.close()
    assert engine.freed == 1


def test_times_and_counters_are_those_of_the_work(engine: Toy, gate: Gate) -> None:
    gate.opened.set()
    engine.submit(lease_of([[1, 2, 3], [13]], ANY))
    rows = drain(engine)
    assert rows[0]["t_start_us"] <= rows[0]["t_end_us"]
    assert rows[0]["t_start_us"] > 1_600_000_000_000_000
    assert (engine.stats.tasks, engine.stats.offered_tokens) == (1, 4)
    assert engine.stats.busy_s > 0
