"""Packing fits every budget and never skips; aligned lanes pad at most 2.5 %; choosing a lane stays put."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_pipelines.broker.accounts import READY, Accounts
from fabric_pipelines.broker.lanes import Lane, LaneQueue, Step, key_of, shapes
from fabric_pipelines.broker.packing import guided, merge, pack
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


def test_generation_has_one_lane_and_by_the_old_rule_one_per_output_class() -> None:
    header = submission_of([tasks_of([1])])
    lengths, caps = np.array([3, 900, 70]), np.array([16, 16, 100])
    assert shapes(header, lengths, caps).tolist() == [0, 0, 0]
    assert shapes(header, lengths, caps, rule=1).tolist() == [16, 16, 128]


def test_a_shared_prefix_counts_once_a_group() -> None:
    prompt, new = np.full(6, 100), np.full(6, 10)
    shared = np.array([0, 96, 96, 0, 96, 96])
    budget = Budget(sequences=64, tokens=10_000, kv_tokens=250)
    assert pack(prompt, new, budget) == 2
    assert pack(prompt, new, budget, shared=shared) == 4  # 110 + 14 + 14 + 110


def merge_plainly(prompt: list[int], first: int, budget: Budget, padded: int, waste: float) -> int:
    """The slow twin: the largest batch of all that are allowed."""
    best = min(first, budget.sequences, max(budget.tokens // padded, 1))
    for count in range(1, min(len(prompt), budget.sequences, max(budget.tokens // padded, 1)) + 1):
        if 1 - sum(prompt[:count]) / (count * padded) <= waste:
            best = max(best, count)
    return best


@given(
    prompt=st.lists(st.integers(1, 64), min_size=1, max_size=30),
    first=st.integers(1, 30),
    budget=st.builds(Budget, st.integers(1, 40), st.integers(1, 2500), st.none()),
    waste=st.sampled_from([0.0, 0.05, 0.1, 0.3]),
)
def test_merging_equals_its_plain_twin(
    prompt: list[int], first: int, budget: Budget, waste: float
) -> None:
    prompt, first = sorted(prompt, reverse=True), min(first, len(prompt))
    found = merge(np.array(prompt), first, budget, padded_length=64, waste=waste)
    assert found == merge_plainly(prompt, first, budget, 64, waste)


@pytest.mark.parametrize(
    ("ready", "share", "expected"),
    [
        (1000, (1, 2), 32),
        (100, (1, 2), 25),
        (3, (1, 2), 1),
        (0, (1, 2), 1),
        (10, (1, 1), 32),
        (100, (512, 4096 + 512), 5),
        (100, (4096, 4096 + 512), 32),
        (60, (4096, 4096 + 512), 26),
    ],
)
def test_leases_shrink_at_the_end_when_consumers_share(
    ready: int, share: tuple[int, int], expected: int
) -> None:
    assert guided(32, ready, *share) == expected


def lanes_with(ready: list[int], *, tenant: str = "default", first: int = 0) -> list[Lane]:
    """Longest prompts first."""
    accounts = Accounts()
    accounts.grow(first + len(ready))
    header = submission_of([tasks_of([1])], sampling=EMBED, tenant=tenant)
    out = []
    for i, count in enumerate(ready, first):
        lane = Lane(i, key_of(header, -(1024 - 8 * i)), EMBED, accounts)
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
    assert queue.choose({}, BUDGET) is first
    assert queue.choose({second.key.tenant: second}, BUDGET) is second
    second.accounts.tasks[READY + 1, 1] = 3
    assert queue.choose({second.key.tenant: second}, BUDGET) is first


def test_a_padded_lane_that_drains_waits_while_another_fills_a_batch() -> None:
    first, second = lanes_with([20, 3])
    second.step = Step.DRAINING
    queue = LaneQueue()
    for lane in (first, second):
        queue.offer(lane)
    assert queue.choose({second.key.tenant: second}, BUDGET) is first


def test_a_packed_lane_that_drains_is_emptied_before_the_session_leaves_it() -> None:
    padded, packed = lanes_with([20, 3])
    packed.key = replace(packed.key, length=0)
    packed.step = Step.DRAINING
    queue = LaneQueue()
    for lane in (padded, packed):
        queue.offer(lane)
    assert queue.choose({packed.key.tenant: packed}, BUDGET) is packed


def test_a_session_that_comes_goes_to_a_full_batch_before_packed_work_that_drains() -> None:
    padded, packed = lanes_with([20, 3])
    packed.key = replace(packed.key, length=0)
    packed.step = Step.DRAINING
    queue = LaneQueue()
    for lane in (packed, padded):
        queue.offer(lane)
    assert queue.choose({}, BUDGET) is padded
    padded.accounts.tasks[READY + 1, 0] = 7
    assert queue.choose({}, BUDGET) is packed


def test_a_padded_batch_is_full_when_no_other_task_of_its_length_fits() -> None:
    (lane,) = lanes_with([3])
    lane.key = replace(lane.key, length=320)
    assert lane.fills(Budget(64, 3 * 320 + 319, None))
    assert not lane.fills(Budget(64, 4 * 320, None))
    assert lane.fills(Budget(64, 100, None)), "one that is too large for any goes alone"


def test_a_small_session_leaves_the_lanes_that_a_large_one_needs() -> None:
    lanes = lanes_with([100, 30, 40, 3])
    queue = LaneQueue()
    for lane in lanes:
        queue.offer(lane)
    large = Budget(64, 1 << 20, None)
    assert queue.choose({}, BUDGET, larger=large) is lanes[1]
    assert queue.choose({}, large) is lanes[0]
    for at in (1, 2):
        lanes[at].accounts.tasks[READY + 1, at] = 7
    assert queue.choose({}, BUDGET, larger=large) is lanes[0]


budgets = st.builds(
    Budget, st.integers(1, 40), st.integers(1, 3000), st.none() | st.integers(1, 900)
)


@given(
    ready=st.lists(st.integers(0, 50), min_size=1, max_size=12),
    away=st.sets(st.integers(0, 11)),
    packed=st.sets(st.integers(0, 11)),
    budget=budgets,
    larger=st.none() | budgets,
)
def test_choosing_among_lanes_equals_its_plain_twin(
    ready: list[int], away: set[int], packed: set[int], budget: Budget, larger: Budget | None
) -> None:
    lanes, queue = lanes_with(ready), LaneQueue()
    for lane in lanes:
        if lane.index in packed:
            lane.key = replace(lane.key, length=0)
        queue.offer(lane)
        lane.away = lane.index in away
    open_ = sorted(
        (lane for lane in lanes if lane.is_open), key=lambda lane: (-lane.key.length, lane.index)
    )
    full = [lane for lane in open_ if lane.fills(budget)]
    spared = [lane for lane in full if larger and not lane.fills(larger)]
    found = queue.choose({}, budget, larger=larger)
    assert found is next(iter(spared or full or open_), None)


def test_a_full_batch_is_found_however_many_thin_lanes_lie_before_it() -> None:
    lanes = lanes_with([1] * 40 + [20] + [1] * 40)
    queue = LaneQueue()
    for lane in lanes:
        queue.offer(lane)
    assert queue.choose({}, BUDGET) is lanes[40]
    assert queue.choose({}, BUDGET) is lanes[40]


def test_a_rest_in_an_active_lane_goes_out_when_nothing_else_is_there() -> None:
    (lane,) = lanes_with([3])
    queue = LaneQueue()
    queue.offer(lane)
    assert queue.choose({}, BUDGET) is lane
    lane.accounts.tasks[READY + 1, 0] = 0
    assert queue.choose({lane.key.tenant: lane}, BUDGET) is None
    lane.accounts.tasks[READY + 1, 0] = 1
    queue.offer(lane)
    assert queue.choose({}, BUDGET) is lane
