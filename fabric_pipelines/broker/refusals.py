"""Refusals: what becomes of a task that a runtime found too large. Pure questions to the state.

Only the words "oversized" are a matter of class: a prompt with a token outside the vocabulary is refused by all
alike and dies at once. What is passed on moves to a lane that the refusing class is not served from, in O(1), and
waits there for another one; it dies of its last refusal when none is left.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.broker.accounts import READY, distinct
from fabric_pipelines.broker.classes import Roster, is_open
from fabric_pipelines.broker.facts import GivenUp, Verdict
from fabric_pipelines.broker.lanes import Lane
from fabric_pipelines.broker.state import State

Sequences = npt.NDArray[np.int64]
OVERSIZED = "oversized"


def pass_on(
    state: State,
    tasks: Sequences,
    verdicts: npt.NDArray[np.uint8],
    finish_reasons: pa.Array,
    *,
    others: Callable[[str], set[str]],
    anybody: bool,
) -> bool:
    """REFUSED becomes TOO_LARGE in `verdicts` where one of the `others` (classes, by tenant) may still take the task,
    or `anybody` might (it is not yet known who is there). Whether any did."""
    refused = np.flatnonzero(verdicts == Verdict.REFUSED)
    if not len(refused):
        return False
    reasons = finish_reasons.take(pa.array(refused))
    large = refused[pc.equal(reasons, OVERSIZED).to_numpy(zero_copy_only=False)]
    lanes = state.index.lane[tasks[large]]
    for at in distinct(lanes).tolist():
        key = state.lanes[at].key
        if anybody or is_open(key.refused_by, others(key.tenant), state.classes):
            verdicts[large[lanes == at]] = Verdict.TOO_LARGE
    return bool((verdicts == Verdict.TOO_LARGE).any())


def parked(state: State, lane: Lane, roster: Roster) -> str:
    """Why nobody who is here takes the ready tasks of a lane that some class refused; "" if somebody does."""
    key, numbers = lane.key, state.classes
    if not key.refused_by or not lane.ready:
        return ""
    if is_open(key.refused_by, roster.known(key.engine, key.tenant, here_only=True), numbers):
        return ""
    away = sorted(roster.known(key.engine, key.tenant))
    awaited = [kind for kind in away if is_open(key.refused_by, (kind,), numbers)]
    return f"too large for all that are here, waits for {', '.join(awaited) or 'another class'}"


def given_up(
    state: State, known: Callable[[str, str], set[str]], room: Callable[[], int]
) -> list[GivenUp]:
    """What every class that is `known` for its engine and tenant found too large. Nobody known: it waits; so do those
    that there is no `room` to bury."""
    facts, given = [], 0
    for lane in state.refused:
        classes = known(lane.key.engine, lane.key.tenant) if lane.ready else set()
        if classes and not is_open(lane.key.refused_by, classes, state.classes):
            ready = state.in_state(READY)
            mine = ready[state.index.lane[ready] == lane.index][: room() - given]
            given += len(mine)
            if len(mine):
                facts.append(GivenUp("no class of consumers is left for it", mine))
    return facts
