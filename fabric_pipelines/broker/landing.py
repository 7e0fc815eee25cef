"""Landing: which tasks a sink's confirmation settles. A pure question to the state."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.accounts import COMPUTED, DEAD, RETIRED, STATE_NAMES, has_repeats
from fabric_pipelines.broker.deaths import earlier_rounds
from fabric_pipelines.broker.facts import Verdict
from fabric_pipelines.broker.state import State
from fabric_pipelines.errors import UsageError

Sequences = npt.NDArray[np.int64]


def settled_by(
    state: State, tasks: Sequences, requeues: npt.NDArray[np.uint8] | None, *, dead: bool
) -> Sequences:
    """Those of `tasks` that are settled with it, ascending; `dead`: buried as dead letters. What is settled already, or
    was pulled before a requeue, is left alone. UsageError if one of them cannot be."""
    if dead and state.requeues:
        tasks = tasks[~earlier_rounds(state, tasks, requeues)]
    tasks = np.sort(tasks)
    if has_repeats(tasks):
        tasks = np.unique(tasks)
    index = state.index
    states = index.state[tasks]
    settled = (states == RETIRED) | (states == DEAD)
    right = (states == COMPUTED) & (dead | (index.verdict[tasks] == Verdict.OK))
    wrong = ~settled & ~right
    if wrong.any():
        at = int(np.argmax(wrong))
        raise UsageError(
            f"task {int(state.task_ids(tasks[at : at + 1])[0])} is {STATE_NAMES[states[at]]}"
            f" with verdict {Verdict(index.verdict[tasks[at]]).name}: it cannot be "
            f"{'buried' if dead else 'retired'}, and nothing was"
        )
    fresh: Sequences = tasks[right]
    return fresh
