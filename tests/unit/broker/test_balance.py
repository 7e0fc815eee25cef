"""A ledger that does not add up stops leasing and says so; nobody puts it right."""

from __future__ import annotations

import numpy as np
import pytest

from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.owner import AUDIT_EVERY_S, Fatal
from fabric_pipelines.errors import BalanceBroken
from fabric_pipelines.ledger import ZERO
from fabric_pipelines.records.batch import Budget
from tests.support_broker import Bench, submission_of, tasks_of

FIGURES = ("tasks", "tokens", "marks")
FEW = Budget(2, 1 << 20, None)


@pytest.fixture
def bench() -> Bench:
    made = Bench(Limits(lease_s=1e6))
    batch = tasks_of([10, 20, 30, 40])
    made.submit(submission_of([batch]), [batch])
    made.attach()
    return made


def corrupt(bench: Bench, figure: str, row: int) -> np.ndarray:
    """One counter of one lane is off by one; returns all of that kind as they are now."""
    counters: np.ndarray = getattr(bench.owner.core.state.accounts, figure)
    counters[row, 0] += counters.dtype.type(1)
    return counters.copy()


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("row", range(7))
def test_the_next_fact_of_a_lane_that_is_off_stops_the_broker(
    bench: Bench, figure: str, row: int
) -> None:
    wrong = corrupt(bench, figure, row)
    with pytest.raises(Fatal, match="is off by"):
        bench.lease(budget=FEW)
    core = bench.owner.core
    assert "keep the journal folder" in core.fault
    with pytest.raises(BalanceBroken, match="is off by"):
        core.lease("w", FEW, 0.0)
    assert core.state.total().balance != ZERO
    moved = getattr(core.state.accounts, figure) - wrong
    assert int(moved[0, 0]) == 0
    assert int(moved[:, 0].sum()) == 0, "what was off by one is off by one"


@pytest.mark.parametrize("figure", FIGURES)
def test_an_audit_finds_a_pair_of_counters_that_are_off_alike(bench: Bench, figure: str) -> None:
    """Each lane adds up, and still they are not what the tasks say."""
    corrupt(bench, figure, 0)
    corrupt(bench, figure, 3)
    with pytest.raises(Fatal, match="do not match the tasks"):
        go_round(bench)


def go_round(bench: Bench) -> None:
    """An audit goes round in slices."""
    for _ in range(100):
        bench.time.seconds += AUDIT_EVERY_S
        bench.owner.tick()


@pytest.mark.parametrize("figure", FIGURES)
def test_verify_names_a_counter_that_is_off_and_leasing_stops(bench: Bench, figure: str) -> None:
    wrong = corrupt(bench, figure, 1)
    report = bench.owner.verify()
    assert not report.ok
    assert any("ready is" in line for line in report.differences)
    with pytest.raises(BalanceBroken, match="verify found"):
        bench.lease(budget=FEW)
    assert (getattr(bench.owner.core.state.accounts, figure) == wrong).all()
    again = bench.owner.verify()
    assert again.differences == report.differences


def test_after_a_restart_the_log_gives_the_right_ledger_again(bench: Bench) -> None:
    corrupt(bench, "tasks", 1)
    bench.crash()
    bench.attach()
    assert bench.owner.verify().differences == []
    assert bench.lease() is not None
