"""Deaths: dead tasks that are tried again, and what then still arrives about their earlier life. Pure questions.

The broker owns whether a task is dead, the database why. A dead task's row stays in the log until it is needed
elsewhere (space.py), so that it can be requeued under its id; each requeue is a round, and only the round that is
current can be buried.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.accounts import DEAD
from fabric_pipelines.broker.facts import Fact, Requeued
from fabric_pipelines.broker.replies import RequeueReply
from fabric_pipelines.broker.state import State

Sequences = npt.NDArray[np.int64]


def requeued(
    state: State,
    tasks: Sequences,
    unknown: int,
    reason: str,
    first_lsn: int,
    gone: Callable[[Sequences], npt.NDArray[np.bool_] | None],
) -> tuple[list[Fact], RequeueReply]:
    """`tasks` are of this journal, each once; `unknown` is how many more were named; `gone`: which of them have a row that
    cannot be read, None for none."""
    dead = tasks[state.index.state[tasks] == DEAD]
    here = dead[state.index.present(dead, first_lsn)]
    if (lost := gone(here)) is not None:
        here = here[~lost]
    reply = RequeueReply(len(here), len(tasks) - len(dead), len(dead) - len(here), unknown)
    return [Requeued(reason[:256], here)] if len(here) else [], reply


def earlier_rounds(
    state: State, tasks: Sequences, requeues: npt.NDArray[np.uint8] | None
) -> npt.NDArray[np.bool_]:
    """Which of these outcomes were pulled before their task was requeued."""
    now: npt.NDArray[np.uint8] = np.array(
        [min(state.requeues.get(task, 0), 255) for task in tasks.tolist()], np.uint8
    )
    pulled = np.zeros(len(tasks), np.uint8) if requeues is None else requeues
    return np.not_equal(now, pulled)
