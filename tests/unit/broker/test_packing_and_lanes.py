"""Packing fits every budget and never skips; aligned lanes pad at most 2.5 %; choosing a lane stays put."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_pipelines.broker.accounts import READY, Accounts
from fabric_pipelines.broker.lanes import Lane, LaneQueue, Step, key_of, shapes
from fabric_pipelines.broker.packing import guided, pack
from fabric_pipelines.records.batch import Budget
from tests.support_broker import EMBED, submission_of, tasks_of


def pack_plainly(prompt: list[int], new: list[int], budget: Budget, padded: int) -> int:
    """The slow twin: add tasks one by one until one does not fit."""
    step = held = count = 0
    for length, cap in zip(prompt, new, strict=True):
        step += padded or length
        held += length + cap
        too_much = step > budget.tokens or (
            budget.kv_tokens is not None and held > budget.kv_tokens
        )
        if count and (too_much or count == budget.sequences):
            break
        count += 1
        if too_much:
            break
    return count


lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(
    prompt=lengths,
    caps=st.integers(0, 30),
    budget=st.builds(
        Budget, st.integers(1, 50), st.integers(1, 500), st.none() | st.integers(1, 900)
    ),
    padded=st.sampled_from([0, 64]),
)
def test_packing_equals_its_plain_twin(
    prompt: list[int], caps: int, budget: Budget, padded: int
) -> None:
    new = [caps] * len(prompt)
    found = pack(np.array(prompt), np.array(new), budget, padded_length=padded)
    assert found == pack_plainly(prompt, new, budget, padded)


def test_a_task_larger_than_every_budget_goes_alone() -> None:
    budget = Budget(sequences=8, tokens=100, kv_tokens=100)
    assert pack(np.array([5000, 1]), np.array([10, 10]), budget) == 1


def test_lanes_pad_at_most_two_and_a_half_percent_on_log_normal_lengths() -> None:
    """Mean 452, p99 about 2,112 tokens; every batch is padded to its longest prompt."""
    draw = np.random.default_rng(2026)
    lengths = np.clip(draw.lognormal(5.85, 0.74, 60_000), 1, 4096).astype(np.int64)
    header = submission_of([tasks_of([1])], sampling=EMBED)
    lanes = shapes(header, lengths, np.zeros_like(lengths))
    padded = sum(
        int(cut.max()) * len(cut)
        for lane in np.unique(lanes)
        for cut in _cuts(lengths[lanes == lane], 64)
    )
    waste = 1 - int(lengths.sum()) / padded
    first_come = sum(int(cut.max()) * len(cut) for cut in _cuts(lengths, 64))
    assert waste <= 0.025
    assert 1 - int(lengths.sum()) / first_come > 0.6


def _cuts(lengths: npt.NDArray[np.int64], size: int) -> list[npt.NDArray[np.int64]]:
    return [lengths[i : i + size] for i in range(0, len(lengths), size)]


def test_generation_lanes_know_no_prompt_length() -> None:
    header = submission_of([tasks_of([1])])
    found = shapes(header, np.array([3, 900, 70]), np.array([16, 16, 100]))
    assert found.tolist() == [16, 16, 128]


@pytest.mark.parametrize(
    ("ready", "consumers", "expected"),
    [(1000, 2, 32), (100, 2, 25), (3, 2, 1), (0, 2, 1), (10, 1, 32)],
)
def test_leases_shrink_at_the_end_when_consumers_share(
    ready: int, consumers: int, expected: int
) -> None:
    assert guided(32, ready, consumers) == expected


def lanes_with(ready: list[int], *, tenant: str = "default", first: int = 0) -> list[Lane]:
    accounts = Accounts()
    accounts.grow(first + len(ready))
    header = submission_of([tasks_of([1])], sampling=EMBED, tenant=tenant)
    out = []
    for i, count in enumerate(ready, first):
        lane = Lane(i, key_of(header, -(64 - 8 * i)), EMBED, accounts)
        accounts.tasks[READY + 1, i] = count
        accounts.tokens[READY + 1, i] = count * 10
        out.append(lane)
    return out


BUDGET = Budget(sequences=8, tokens=1 << 20, kv_tokens=None)


def test_a_session_stays_in_its_lane_until_it_cannot_fill_a_batch() -> None:
    first, second = lanes_with([20, 20])
    queue = LaneQueue()
    for lane in (first, second):
        queue.offer(lane)
    assert queue.choose(None, BUDGET) is first
    assert queue.choose(second, BUDGET) is second
    second.accounts.tasks[READY + 1, 1] = 3
    assert queue.choose(second, BUDGET) is first


def test_a_draining_lane_is_emptied_before_the_session_leaves_it() -> None:
    first, second = lanes_with([20, 3])
    second.step = Step.DRAINING
    queue = LaneQueue()
    for lane in (first, second):
        queue.offer(lane)
    assert queue.choose(second, BUDGET) is second


def test_a_rest_in_an_active_lane_goes_out_when_nothing_else_is_there() -> None:
    (lane,) = lanes_with([3])
    queue = LaneQueue()
    queue.offer(lane)
    assert queue.choose(None, BUDGET) is lane
    lane.accounts.tasks[READY + 1, 0] = 0
    assert queue.choose(lane, BUDGET) is None
    lane.accounts.tasks[READY + 1, 0] = 1
    queue.offer(lane)
    assert queue.choose(None, BUDGET) is lane


def test_tenants_take_turns_by_tokens() -> None:
    queue = LaneQueue()
    (mine,), (theirs,) = lanes_with([1 << 30]), lanes_with([1 << 30], tenant="other")
    queue.offer(mine)
    queue.offer(theirs)
    served = {"default": 0, "other": 0}
    lane = None
    for _ in range(4000):
        lane = queue.choose(lane, BUDGET)
        assert lane is not None
        cost = 1000 if lane is mine else 300
        served[lane.key.tenant] += cost
        queue.charge(lane.key.tenant, cost)
    assert abs(served["default"] - served["other"]) <= 1 << 19
