"""Whole runs around a real broker with kills and a bad network; and the auditor sees what it must not forgive."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.broker.accounts import LEASED
from fabric_pipelines.broker.core import Core
from fabric_pipelines.broker.facts import Verdict
from fabric_pipelines.broker.owner import Owner
from fabric_pipelines.broker.pulls import ComputedQueue
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.task import task_batch
from fabric_pipelines.testing.auditor import Auditor, Tally
from fabric_pipelines.testing.simulator import Plan, World, simulate

SMALL = Plan(
    tasks=50_000,
    kills=40,
    completions=2,
    submission_tasks=5000,
    segment_bytes=1 << 20,
    checkpoint_bytes=2 << 20,
)
REGULAR = Plan(tasks=12_000, kills=0, submission_tasks=2000, upload_rows=200)
TINY = Plan(tasks=4000, kills=8, submission_tasks=1000, upload_rows=200)


@pytest.fixture(scope="module")
def outcome() -> Any:
    return simulate(SMALL)


def test_through_kills_and_a_bad_network_nothing_is_lost_doubled_or_run_again(outcome: Any) -> None:
    assert outcome.faults == []
    assert (outcome.lost, outcome.doubled, outcome.reruns, outcome.difference) == (0, 0, 0, 0)
    assert outcome.retired + outcome.dead == SMALL.tasks
    assert outcome.clean


def test_the_run_was_worth_auditing(outcome: Any) -> None:
    """Every kind of kill, lost and doubled messages, checkpoints and recycled segments were part of it."""
    assert all(count >= 2 for count in outcome.kills.values())
    assert min(outcome.dropped, outcome.repeated, outcome.dead) >= 10
    assert outcome.counters["checkpoints"] >= 2
    assert outcome.counters["segments_dropped"] >= 2
    assert outcome.counters["claimed"] > 100
    assert outcome.counters["duplicates"] > 100
    assert outcome.audits >= 5
    assert "finished work run again" in outcome.table()


def test_the_same_seed_gives_the_same_run_and_another_one_does_not() -> None:
    first, again, other = (simulate(Plan(**{**_fields(TINY), "seed": seed})) for seed in (3, 3, 4))
    assert first.counters == again.counters
    assert first.simulated_s == again.simulated_s != other.simulated_s
    assert first.clean
    assert other.clean


def _fields(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in Plan.__dataclass_fields__}


def test_a_broker_that_hands_out_finished_work_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mutation: the core takes the first success of every hundredth task for a failure."""
    honest = Core._verdicts

    def forgetful(self: Core, tasks: Any, codes: Any) -> Any:
        verdicts = honest(self, tasks, codes).copy()
        index = self.state.index
        first = (index.attempts[tasks] == 0) & (index.state[tasks] == LEASED)
        verdicts[(tasks % 100 == 0) & (codes == 0) & first] = Verdict.RETRY
        return verdicts

    monkeypatch.setattr(Core, "_verdicts", forgetful)
    found = simulate(Plan(tasks=2000, kills=0, submission_tasks=1000))
    assert not found.clean
    assert found.reruns > 0


def test_a_broker_that_forgets_computed_work_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ComputedQueue.append
    monkeypatch.setattr(ComputedQueue, "append", lambda self, tasks: honest(self, tasks[1:]))
    found = simulate(Plan(tasks=2000, kills=0, submission_tasks=1000))
    assert not found.clean
    assert found.lost > 0


@pytest.mark.parametrize("after_s", [0.0001, 0.0008, 0.1])
def test_a_broker_that_dies_with_a_lease_on_its_way_is_not_taken_to_have_given_it_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after_s: float
) -> None:
    """Leases leave before they are durable. One heard of after its broker had died was held against the next
    broker, which knew nothing of it and gave those tasks to somebody else: 31 tasks of one lease, doubled."""
    world, honest, leases = World(REGULAR, tmp_path / "journal"), Owner.lease, itertools.count()
    killed = 0

    def deadly(self: Owner, name: str, budget: Budget, call: int) -> Any:
        nonlocal killed
        answer = honest(self, name, budget, call)
        if answer[0] is not None and next(leases) % 25 == 10:
            world.after(after_s, lambda: world._kill_broker(1.0))
            killed += 1
        return answer

    monkeypatch.setattr(Owner, "lease", deadly)
    world.run()
    world.end()
    assert killed >= 5
    assert world.auditor.faults == []
    assert world.auditor.tally == Tally()


# -- the auditor


def lease_of(rows: list[int], ids: list[int], marks: list[int]) -> pa.RecordBatch:
    batch = task_batch([[mark, 0] for mark in marks], source_rows=rows)
    return batch.append_column("task_id", pa.array(ids, pa.int64()))


def told(tasks: int = 4) -> Auditor:
    """Rows 0.. were sent and acknowledged; the first token of each is its number."""
    auditor, rows = Auditor(tasks, lease_s=10.0), np.arange(tasks)
    auditor.submitted(rows, np.full(tasks, 2), rows)
    auditor.enqueued(rows)
    return auditor


NONE_FAILED = np.zeros(1, np.bool_)


def test_the_auditor_sees_finished_work_that_is_leased_again() -> None:
    auditor = told()
    auditor.leased("a", lease_of([1], [1], [1]), 0.0)
    auditor.reported(np.array([1]), NONE_FAILED, late=0)
    auditor.leased("a", lease_of([1], [1], [1]), 1.0)
    assert auditor.tally.reruns == 1


def test_the_auditor_sees_a_task_that_two_hold() -> None:
    auditor = told()
    auditor.leased("a", lease_of([1], [1], [1]), 0.0)
    auditor.leased("b", lease_of([1], [1], [1]), 5.0)
    assert auditor.tally.doubled == 1
    auditor.leased("c", lease_of([1], [1], [1]), 20.0)
    assert auditor.tally.doubled == 1  # the lease had run out


@pytest.mark.parametrize(
    ("given_s", "lost_s", "heard_s", "doubled"),
    [(5.0, 5.1, 5.2, 0), (5.0, 5.2, 5.1, 0), (5.0, 5.9, 5.1, 1), (5.0, 4.9, 5.1, 1)],
    ids=[
        "died before it was heard",
        "died just after",
        "was durable by then",
        "is of the next life",
    ],
)
def test_only_a_lease_that_a_dying_broker_may_have_forgotten_is_forgiven(
    given_s: float, lost_s: float, heard_s: float, doubled: int
) -> None:
    auditor, lease = told(), lease_of([1], [1], [1])
    if lost_s < heard_s:
        auditor.broker_lost(lost_s)
    auditor.leased("a", lease, heard_s, given_s)
    if lost_s >= heard_s:
        auditor.broker_lost(lost_s)
    auditor.leased("b", lease, 6.5, 6.4)
    assert auditor.tally.doubled == doubled


@pytest.mark.parametrize(("row", "task"), [(1, 2), (2, 1)])
def test_the_auditor_sees_two_ids_for_a_task_and_two_tasks_for_an_id(row: int, task: int) -> None:
    auditor = told()
    auditor.leased("a", lease_of([1], [1], [1]), 0.0)
    auditor.leased("a", lease_of([row], [task], [row]), 1.0)
    assert auditor.tally.doubled == 1


def test_the_auditor_sees_other_content_two_outcomes_and_a_loss() -> None:
    auditor = told()
    auditor.leased("a", lease_of([1], [1], [3]), 0.0)
    assert "other content" in auditor.faults[0]
    auditor.landing(np.array([0, 1, 2]), np.zeros(3, np.bool_))
    auditor.landing(np.array([0]), np.ones(1, np.bool_))
    assert auditor.tally.doubled == 1
    auditor.finish()
    assert auditor.tally.lost == 1
    assert not auditor.clean
