"""Life cycle of lanes: which step of a lane is due, and which words come from an earlier life of it. Pure questions.

A lane opens with the first task that an ENQUEUE (or a refusal, or a requeue) puts into it, and is active while a
submission that feeds it is open; then it drains, then it is retired with its closing counts. Fed again it opens as the
next generation.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.accounts import DEAD, RETIRED
from fabric_pipelines.broker.facts import Fact, LanesStepped
from fabric_pipelines.broker.lanes import Lane, Step
from fabric_pipelines.broker.state import State

Sequences = npt.NDArray[np.int64]


def steps_due(state: State, lanes: Iterable[int]) -> list[Fact]:
    """One fact for the steps that have become due in `lanes`."""
    rows = []
    for at in sorted(lanes):
        lane = state.lanes[at]
        step = _due(state, lane)
        if step is not lane.step:
            ledger = state.accounts.ledger(at)
            rows.append((at, lane.generation, int(step), ledger.retired.tasks, ledger.dead.tasks))
    return [LanesStepped(np.array(rows, np.int64))] if rows else []


def _due(state: State, lane: Lane) -> Step:
    if lane.producers:
        return lane.step
    tasks = state.accounts.tasks[:, lane.index]
    left = int(tasks[0] - tasks[RETIRED + 1] - tasks[DEAD + 1])
    return Step.DRAINING if left else Step.RETIRED


def of_old_generations(state: State, tasks: Sequences) -> int:
    """How many of these tasks ended in a life of their lane that is over: it is retired, or was opened again
    by later tasks."""
    count = 0
    ended = tasks[np.isin(state.index.state[tasks], (RETIRED, DEAD))]
    lanes = state.index.lane[ended]
    for at in np.unique(lanes).tolist():
        lane = state.lanes[at]
        mine = ended[lanes == at]
        over = len(mine) if lane.step is Step.RETIRED else int((mine < lane.opened_at).sum())
        count += over
    return count
