"""Which tasks share a step: the oldest goes, companions are of its kind, the budget holds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fabric_pipelines.worker.engines.cuts import by_length, in_order, shared_prefix
from fabric_pipelines.worker.engines.tasks import Task


def _task(length: int, *, group: str = "g", new: int = 0, tokens: list[int] | None = None) -> Task:
    ids = np.array(tokens if tokens is not None else range(length), np.uint32)
    return Task(0, ids, new, 0, b"", 1, {}, group)


def _lengths(tasks: list[Task]) -> list[int]:
    return [task.length for task in tasks]


def test_a_packed_step_takes_arrivals_until_the_budget_is_full() -> None:
    pending = [_task(n) for n in (10, 20, 30, 1)]
    assert _lengths(in_order(pending, tokens_max=40, tasks_max=9)) == [10, 20]
    assert _lengths(in_order(pending, tokens_max=99, tasks_max=3)) == [10, 20, 30]


def test_the_head_goes_even_when_it_alone_is_above_the_budget() -> None:
    pending = [_task(100), _task(1)]
    assert _lengths(in_order(pending, tokens_max=40, tasks_max=9)) == [100]
    assert _lengths(by_length(pending, lambda longest, count: longest.length * count <= 40)) == [
        100
    ]


def test_other_samplings_and_caps_wait_for_a_step_of_their_own() -> None:
    pending = [_task(4), _task(4, group="h"), _task(4)]
    assert in_order(pending, tokens_max=40, tasks_max=9) == [pending[0], pending[2]]
    capped = [_task(4, new=8), _task(4, new=9), _task(4, new=8)]
    assert by_length(capped, lambda longest, count: True) == [capped[0], capped[2]]


def test_a_batched_step_takes_the_nearest_in_length() -> None:
    pending = [_task(n) for n in (50, 10, 48, 90, 53, 51)]
    taken = by_length(pending, lambda longest, count: count <= 4)
    assert _lengths(taken) == [48, 50, 51, 53]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    tasks_max=st.integers(1, 8),
    tokens_max=st.integers(1, 200),
)
def test_a_batched_step_always_holds_the_oldest_and_fits(
    lengths: list[int], tasks_max: int, tokens_max: int
) -> None:
    pending = [_task(n) for n in lengths]
    taken = by_length(
        pending, lambda longest, count: count <= tasks_max and count * longest.length <= tokens_max
    )
    assert pending[0] in taken
    assert len(set(map(id, taken))) == len(taken)
    if len(taken) > 1:
        assert len(taken) <= tasks_max
        assert len(taken) * max(_lengths(taken)) <= tokens_max


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=5))
def test_the_shared_prefix_leaves_every_prompt_a_token(rows: list[list[int]]) -> None:
    length = shared_prefix([_task(0, tokens=row) for row in rows])
    assert 0 <= length < min(map(len, rows))
    assert len({tuple(row[:length]) for row in rows}) == 1
    one_more = {tuple(row[: length + 1]) for row in rows}
    assert len(one_more) > 1 or length + 1 == min(map(len, rows))
