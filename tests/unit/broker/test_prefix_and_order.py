"""Whole-backlog prefix order reaches the bound of the workload; arrival order and windows do not."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt
import pytest

from fabric_pipelines.broker.order import RUN_MAX, PrefixOrder
from fabric_pipelines.broker.prefix import BLOCK, DEPTHS, leaders, prefix_keys, shared_tokens

Prompt = list[int]


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


def test_prompts_share_key_bits_exactly_down_to_their_common_depth() -> None:
    draw = np.random.default_rng(5)
    trunk = draw.integers(0, 1000, 600).tolist()
    for depth in DEPTHS:
        twig = trunk[: depth * BLOCK] + [1001] * (600 - depth * BLOCK)
        keys = keys_of([trunk, twig])
        assert shared_tokens(keys, np.array([600, 600]))[1] == depth * BLOCK


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
    order = PrefixOrder()
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
    order = PrefixOrder()
    order.add(np.arange(100, 100_100, dtype=np.uint64), np.arange(100_000))
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
