"""Whole-backlog prefix order reaches the bound of the workload; arrival order and windows do not."""

from __future__ import annotations

from collections import OrderedDict

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given

from fabric_pipelines.broker.order import RUN_MAX, PrefixOrder
from fabric_pipelines.broker.prefix import (
    BLOCK,
    CURRENT,
    LAYOUTS,
    leaders,
    prefix_keys,
    shared_tokens,
)

Prompt = list[int]
OLD_KEYS = [16455027138504949760, 15614235112244708076]


def keys_of(prompts: list[Prompt]) -> npt.NDArray[np.uint64]:
    flat = np.array([token for prompt in prompts for token in prompt], np.uint32)
    return prefix_keys(flat, np.array([len(p) for p in prompts], np.int64))


def hit_rate(prompts: list[Prompt], cached_blocks: int) -> float:
    """Share of prompt tokens found in an LRU cache of prefix blocks: the twin of an engine's prefix cache."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = total = 0
    for prompt in prompts:
        total += len(prompt)
        missed = False
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            block = tuple(prompt[:end])
            if block in cache and not missed:
                hits += BLOCK
                cache.move_to_end(block)
                continue
            missed = True
            cache[block] = None
            if len(cache) > cached_blocks:
                cache.popitem(last=False)
    return hits / total


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """4 system prompts x 60 documents x 6 questions, shuffled."""
    draw = np.random.default_rng(11)
    systems = [draw.integers(0, 32_000, 64).tolist() for _ in range(4)]
    out = []
    for system in systems:
        for _ in range(60):
            document = draw.integers(0, 32_000, int(draw.integers(48, 160))).tolist()
            out += [system + document + draw.integers(0, 32_000, 24).tolist() for _ in range(6)]
    return [out[i] for i in draw.permutation(len(out))]


def test_sorting_the_whole_backlog_reaches_the_bound_with_a_small_cache(
    prompts: list[Prompt],
) -> None:
    bound = hit_rate(prompts, cached_blocks=1 << 30)
    ordered = [prompts[i] for i in np.argsort(keys_of(prompts), kind="stable")]
    assert hit_rate(ordered, cached_blocks=32) >= 0.97 * bound


def test_sorting_inside_windows_gains_next_to_nothing(prompts: list[Prompt]) -> None:
    keys = keys_of(prompts)
    windowed: list[Prompt] = []
    for start in range(0, len(prompts), 64):
        order = start + np.argsort(keys[start : start + 64], kind="stable")
        windowed += [prompts[i] for i in order]
    bound = hit_rate(prompts, cached_blocks=1 << 30)
    assert hit_rate(windowed, cached_blocks=32) < 0.7 * bound


def share_plainly(a: Prompt, b: Prompt) -> int:
    """The slow twin: tokens of the deepest whole depth that two prompts have in common."""
    deepest = 0
    for depth in LAYOUTS[CURRENT].depths:
        end = depth * BLOCK
        if len(a) >= end and len(b) >= end and a[:end] == b[:end]:
            deepest = end
    return deepest


@given(
    trunk=st.integers(1, 2000),
    first=st.integers(0, 400),
    second=st.integers(0, 400),
    seed=st.integers(0, 99),
)
def test_prompts_share_what_their_keys_vouch_for_and_never_less_than_they_do(
    trunk: int, first: int, second: int, seed: int
) -> None:
    """By chance the next depth may look alike too, 1 in 8 where it has 3 bits."""
    draw = np.random.default_rng(seed)
    common = draw.integers(0, 1000, trunk).tolist()
    a, b = (common + draw.integers(0, 1000, n).tolist() for n in (first, second))
    found = int(shared_tokens(keys_of([a, b]), np.array([len(a), len(b)]))[1])
    assert found >= share_plainly(a, b) or (found == 0 and share_plainly(a, b) <= BLOCK)
    assert found <= min(len(a), len(b))


def test_neighbours_of_a_long_order_are_not_taken_for_sharers_by_chance() -> None:
    draw = np.random.default_rng(8)
    tokens = draw.integers(0, 32_000, 100_000 * 64, dtype=np.uint32)
    lengths = np.full(100_000, 64, np.int64)
    keys = np.sort(prefix_keys(tokens, lengths))
    assert shared_tokens(keys, lengths).mean() < 2.0  # of 64; none is shared in truth


def test_old_layouts_give_the_keys_they_gave() -> None:
    tokens = np.arange(600, dtype=np.uint32)
    found = prefix_keys(tokens, np.array([20, 580]), layout=1)
    assert found.tolist() == OLD_KEYS


def test_a_key_does_not_depend_on_where_its_prompt_lies_in_the_batch() -> None:
    draw = np.random.default_rng(6)
    prompts = [draw.integers(0, 1000, n).tolist() for n in (5, 40, 700, 16, 33, 512, 1)]
    together = keys_of(prompts)
    assert together.tolist() == [int(keys_of([prompt])[0]) for prompt in prompts]


def test_short_prompts_have_key_zero_and_share_nothing() -> None:
    keys = keys_of([[1] * 15, [1] * 15])
    assert keys.tolist() == [0, 0]
    assert shared_tokens(keys, np.array([15, 15])).tolist() == [0, 0]


def test_the_first_prompt_of_each_group_is_its_leader() -> None:
    a, b = [7] * 64, [8] * 64
    keys = keys_of([a, a, b, b, b])
    flags = leaders(shared_tokens(keys, np.full(5, 64)))
    assert flags.tolist() == [True, False, True, False, False]


def drain(order: PrefixOrder, limit: int) -> list[int]:
    out: list[int] = []
    while len(seen := order.peek(limit)):
        out += seen.tolist()
        order.advance(len(seen))
    return out


def filled(keys: npt.NDArray[np.uint64], run: int) -> PrefixOrder:
    order = PrefixOrder(keys.__getitem__)
    for start in range(0, len(keys), run):
        part = keys[start : start + run]
        by_key = np.argsort(part, kind="stable")
        order.add(part[by_key], start + by_key)
    return order


@pytest.mark.parametrize("run", [1, 7, 1000])
def test_runs_come_out_as_one_sorted_order(run: int) -> None:
    keys = np.random.default_rng(run).integers(0, 50, 3000, dtype=np.uint64)
    out = drain(filled(keys, run), 64)
    assert sorted(out) == list(range(3000))
    assert (np.diff(keys[out].astype(np.int64)) >= 0).all()


def test_a_backlog_larger_than_a_run_comes_out_sorted_and_whole() -> None:
    count = 3 * RUN_MAX
    keys = np.random.default_rng(1).integers(0, 1 << 63, count, dtype=np.uint64)
    order = filled(keys, RUN_MAX // 2)
    seen = order.peek(10_000).copy()
    assert (keys[seen] == np.sort(keys)[:10_000]).all()
    assert len(drain(order, 1 << 16)) == count


def test_what_arrives_behind_the_cursor_waits_for_the_next_lap() -> None:
    table = np.zeros(500_003, np.uint64)
    table[:100_000] = np.arange(100, 100_100)
    order = PrefixOrder(table.__getitem__)
    order.add(table[:100_000], np.arange(100_000))
    first = order.peek(10)
    assert first.tolist() == list(range(10))
    order.advance(10)
    order.add(np.zeros(3, np.uint64), np.array([500_000, 500_001, 500_002]))
    assert drain(order, 4096)[-3:] == [500_000, 500_001, 500_002]


def test_what_came_back_goes_first_and_piece_by_piece() -> None:
    order = filled(np.arange(5, dtype=np.uint64), 5)
    order.add_front(np.array([91, 92]))
    order.add_front(np.array([93]))
    assert order.peek(10).tolist() == [91, 92]
    order.advance(1)
    assert order.peek(10).tolist() == [92]
    order.advance(1)
    assert order.peek(10).tolist() == [93]
    order.advance(1)
    assert order.peek(10).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bits", [0, 2, 16, 63])
def test_whoever_walks_and_however_little_they_take_each_task_goes_out_once(bits: int) -> None:
    """Consumers that come, take less than they saw, run dry and leave, beside tasks that arrive, come back and are
    taken out: what is inside is what was added and not handed on, and arcs stay in the order of their keys."""
    out = sum(_walk(np.random.default_rng([bits, seed]), bits) for seed in range(120))
    assert out > 20_000


def _walk(draw: np.random.Generator, bits: int) -> int:
    """Tasks that went out."""
    keys = np.zeros(4096, np.uint64)
    order, inside, count, out = PrefixOrder(keys.__getitem__), set[int](), 0, 0
    for step in range(60):
        who = "abcd"[draw.integers(4)]
        match draw.choice(5, p=[0.35, 0.5, 0.05, 0.05, 0.05]):
            case 0:
                tasks = np.arange(count, count + draw.integers(1, 60))
                keys[tasks] = draw.integers(0, 1 << bits, len(tasks), dtype=np.uint64)
                by_key = tasks[np.argsort(keys[tasks], kind="stable")]
                if step or draw.random() < 0.5:
                    order.add(keys[by_key], by_key)
                else:
                    order.add_unsorted([tasks])
                count += len(tasks)
                inside |= set(tasks.tolist())
            case 1:
                front = bool(draw.integers(2))
                seen = order.peek(int(draw.integers(1, 40)), who, front=front)
                taken = seen[: draw.integers(len(seen) + 1)].tolist()
                order.advance(len(taken), who, front=front)
                assert inside.issuperset(taken)
                assert len(set(taken)) == len(taken)
                inside -= set(taken)
                out += len(taken)
            case 2:
                order.release(who)
            case 3:
                piece = np.array([count, count + 1])
                count += 2
                order.add_front(piece)
                inside |= set(piece.tolist())
            case 4:
                gone = [task for task in inside if draw.random() < 0.1]
                order.remove(np.array(gone, np.int64))
                inside -= set(gone)
        assert sorted(order.tasks().tolist()) == sorted(inside)
        assert order.lows == sorted(order.lows)
    return out
