"""Completion names functions it has no use for now: their rows stay, starve nobody, and come once they are wanted."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_pipelines.broker import pulls
from fabric_pipelines.broker.accounts import COMPUTED, RETIRED
from fabric_pipelines.broker.pulls import ComputedQueue
from fabric_pipelines.ids import SEQUENCE_BITS

NAMES = "abc"
INCARNATION = 7
TASKS = 60


def state_of(functions: list[str]) -> SimpleNamespace:
    """As much of a state as the queue asks for: task t is of the function of submission t % 3."""
    index = SimpleNamespace(
        submission=np.arange(TASKS * 20, dtype=np.uint16) % len(functions),
        state=np.full(TASKS * 20, COMPUTED, np.uint8),
        count=TASKS * 20,
    )
    records = [SimpleNamespace(header=SimpleNamespace(function=name)) for name in functions]
    return SimpleNamespace(index=index, submissions=records, incarnation=INCARNATION)


@dataclass
class Twin:
    """What one session has and may have, by lists; order is asked of what was passed over by function only."""

    state: SimpleNamespace
    queued: list[int] = field(default_factory=list)
    pulled: set[int] = field(default_factory=set)

    def may(self, skip: tuple[str, ...]) -> set[int]:
        names = [record.header.function for record in self.state.submissions]
        return {
            task
            for task in self.queued
            if task not in self.pulled
            and self.state.index.state[task] == COMPUTED
            and names[self.state.index.submission[task]] not in skip
        }


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "pull", "retire", "back", "release", "forget", "again"]),
        st.integers(1, 9),
        st.sets(st.sampled_from(NAMES)),
        st.booleans(),
    ),
    max_size=40,
)


@settings(max_examples=120, deadline=None)
@given(STEPS)
def test_whatever_is_skipped_retired_or_given_back_each_row_is_handed_once_and_none_is_forgotten(
    steps: list[tuple[str, int, set[str], bool]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pulls, "LOOSE_BATCHES", 3)
        state = state_of(list(NAMES))
        queue, twins, made = ComputedQueue(state), {at: Twin(state) for at in "xy"}, 0  # type: ignore[arg-type]
        for what, count, names, other in steps:
            session = "xy"[other]
            twin, skip = twins[session], tuple(sorted(names))
            if what == "append":
                tasks = np.arange(made, made + count)
                made += count
                queue.append(tasks)
                for each in twins.values():
                    each.queued += tasks.tolist()
            elif what == "pull":
                may = twin.may(skip)
                got = queue.pull(session, count, skip).tolist()
                assert len(set(got)) == len(got) == min(count, len(may))
                assert set(got) <= may
                twin.pulled |= set(got)
            elif what == "retire":
                state.index.state[sorted(twin.pulled)[:count]] = RETIRED
            elif what == "back":
                back = sorted(twin.pulled)[-count:]
                twin.pulled -= set(back)
                ids = np.array(back, np.int64) + (INCARNATION << SEQUENCE_BITS)
                queue.release(session, ids)
            elif what == "release":
                queue.release(session)
                twin.pulled.clear()
            elif what == "again":  # requeued, and computed anew with another outcome
                risen = np.flatnonzero(state.index.state[:made] == RETIRED)[:count]
                state.index.state[risen] = COMPUTED
                queue.forget(risen)
                queue.append(risen)
                for each in twins.values():
                    each.pulled -= set(risen.tolist())
            elif what == "forget":
                gone = np.arange(made)[:count]
                state.index.state[gone] = RETIRED
                queue.forget(gone)
        for session, twin in twins.items():
            assert set(queue.pull(session, 1 << 20).tolist()) == twin.may(())


def test_a_long_run_of_what_nobody_wants_costs_bounded_looks_and_hides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulls, "LOOKED_ROWS_MAX", 100)
    state = state_of(["a"])
    state.submissions.append(SimpleNamespace(header=SimpleNamespace(function="b")))
    state.index.submission[990:] = 1
    queue = ComputedQueue(state)  # type: ignore[arg-type]
    queue.append(np.arange(1000))
    got = [queue.pull("s", 20, ("a",)).tolist() for _ in range(11)]
    assert [row for part in got for row in part] == list(range(990, 1000))
    assert queue.pull("s", 5, ("b",)).tolist() == [0, 1, 2, 3, 4], (
        "what was passed over, oldest first"
    )
    assert queue.pull("s", 1 << 20).tolist() == list(range(5, 990))


def test_what_others_settle_behind_a_function_that_waits_does_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulls, "LOOSE_BATCHES", 10)
    state = state_of(["a", "b"])
    queue = ComputedQueue(state)  # type: ignore[arg-type]
    for at in range(0, 1000, 10):
        queue.append(np.arange(at, at + 10))
        state.index.state[queue.pull("s", 10, ("a",))] = RETIRED
    assert len(queue._batches) <= 12
    assert sorted(queue.pull("s", 1000).tolist()) == list(range(0, 1000, 2))
