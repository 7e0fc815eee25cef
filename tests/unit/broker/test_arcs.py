"""Several consumers on one order: each walks its own arc, nothing is lost or given twice, few groups are torn."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from fabric_pipelines.broker.order import PrefixOrder

Walks = dict[str, list[int]]


def take(order: PrefixOrder, who: str, limit: int) -> list[int]:
    seen = order.peek(limit, who).tolist()
    order.advance(len(seen), who)
    return seen


def walked(order: PrefixOrder, consumers: int, limit: int, seed: int = 0) -> Walks:
    """All of them lease in a random turn until nothing is left."""
    draw, walks = np.random.default_rng(seed), {f"w{i}": [] for i in range(consumers)}
    while len(order.tasks()):
        who = f"w{draw.integers(consumers)}"
        walks[who] += take(order, who, limit)
    return walks


def sorted_order(keys: npt.NDArray[np.uint64], runs: int = 1) -> PrefixOrder:
    order = PrefixOrder(keys.__getitem__)
    for part in np.array_split(np.arange(len(keys)), runs):
        by_key = part[np.argsort(keys[part], kind="stable")]
        order.add(keys[by_key], by_key)
    return order


@pytest.mark.parametrize("consumers", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("limit", [1, 32])
def test_each_consumer_walks_few_stretches_of_the_order_and_all_is_given_once(
    consumers: int, limit: int
) -> None:
    keys = np.random.default_rng(1).integers(0, 1 << 63, 20_000, dtype=np.uint64)
    walks = walked(sorted_order(keys, runs=7), consumers, limit)
    given_out = [task for walk in walks.values() for task in walk]
    assert sorted(given_out) == list(range(len(keys)))
    stretches = sum(
        1 + int((np.diff(keys[walk].astype(np.int64)) < 0).sum()) for walk in walks.values()
    )
    assert stretches <= 1 if consumers == 1 else stretches <= consumers * (math.log2(len(keys)) + 1)


def test_few_prefix_groups_are_torn_between_consumers() -> None:
    """2,000 groups of 10: a group that two consumers see is computed twice."""
    groups = np.repeat(np.random.default_rng(2).integers(0, 1 << 63, 2000, dtype=np.uint64), 10)
    walks = walked(sorted_order(groups), 4, limit=1)
    pairs = sum(len(np.unique(groups[walk])) for walk in walks.values())
    assert pairs <= 2000 + 4 * (math.log2(len(groups)) + 1)


def test_a_late_consumer_takes_half_of_the_largest_arc() -> None:
    order = sorted_order(np.arange(1000, dtype=np.uint64))
    assert take(order, "w0", 100) == list(range(100))
    assert take(order, "w1", 1)[0] == pytest.approx(550, abs=20)
    assert take(order, "w2", 1)[0] in range(300, 800)
    assert take(order, "w0", 1) == [100]


def test_an_arc_of_one_who_left_goes_whole_to_the_next_who_comes() -> None:
    order = sorted_order(np.arange(1000, dtype=np.uint64))
    take(order, "w0", 10)
    middle = take(order, "w1", 10)[-1]
    order.release("w1")
    assert take(order, "w2", 10) == list(range(middle + 1, middle + 11))


def test_one_prefix_for_all_is_cut_by_count() -> None:
    order = sorted_order(np.zeros(1000, np.uint64))
    take(order, "w0", 10)
    assert 490 <= take(order, "w1", 1)[0] <= 510


def test_a_lease_is_full_although_its_arc_ends_in_the_middle() -> None:
    order = sorted_order(np.arange(1000, dtype=np.uint64))
    take(order, "w0", 1)
    take(order, "w1", 1)
    arc = dict(order.arcs)["w1"]
    take(order, "w1", arc - 5)
    assert len(take(order, "w1", 64)) == 64


def test_a_lease_is_full_however_many_arcs_have_to_give_for_it() -> None:
    order = sorted_order(np.arange(64, dtype=np.uint64))
    for at in range(8):
        take(order, f"w{at}", 1)
    assert len(take(order, "w3", 50)) == 50
    assert sum(length for _, length in order.arcs) == 64 - 8 - 50


def test_what_comes_ahead_goes_with_the_next_and_what_steps_aside_waits_for_its_recall() -> None:
    order = sorted_order(np.arange(20, dtype=np.uint64))
    assert order.peek(6, "w").tolist() == [0, 1, 2, 3, 4, 5]
    order.step_aside(np.array([True, False, True, False]), "w")
    assert order.peek(4, "w").tolist() == [1, 3, 4, 5]
    assert order.has_aside
    order.add_ahead(order.recall(1))
    assert order.peek(4, "w").tolist() == [0, 1, 3, 4]
    order.aside(order.recall(5))
    assert sorted(order.tasks().tolist()) == list(range(20))
    order.remove(np.array([0, 2]))
    assert not order.has_aside
    assert order.peek(2, "w").tolist() == [1, 3]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 40), max_size=12)),
        st.tuples(st.just("front"), st.integers(1, 3)),
        st.tuples(st.just("ahead"), st.integers(1, 3)),
        st.tuples(st.just("aside"), st.integers(0, 2), st.integers(1, 9)),
        st.tuples(st.just("recall"), st.integers(1, 9), st.booleans()),
        st.tuples(st.just("take"), st.integers(0, 2), st.integers(1, 9)),
        st.tuples(st.just("release"), st.integers(0, 2)),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(steps=steps)
def test_whatever_comes_and_goes_the_order_holds_what_a_set_holds(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    table, twin, number = np.zeros(2000, np.uint64), set(), 0
    aside: set[int] = set()
    order = PrefixOrder(table.__getitem__)
    for step in steps:
        if step[0] == "add":
            keys = np.sort(np.array(step[1], np.uint64))
            tasks = np.arange(number, number + len(keys))
            table[tasks] = keys
            order.add(keys, tasks)
            twin |= set(tasks.tolist())
            number += len(keys)
        elif step[0] in ("front", "ahead"):
            new = np.arange(number, number + step[1])
            (order.add_front if step[0] == "front" else order.add_ahead)(new)
            twin |= set(range(number, number + step[1]))
            number += step[1]
        elif step[0] == "take":
            got = take(order, f"w{step[1]}", step[2])
            assert set(got) <= twin
            assert len(set(got)) == len(got) <= step[2]
            assert got or not twin - aside
            assert not set(got) & aside
            twin -= set(got)
        elif step[0] == "aside":
            shown = order.peek(step[2], f"w{step[1]}", front=False)
            odd = shown % 2 == 1
            if len(shown):
                order.step_aside(odd, f"w{step[1]}")
            aside |= set(shown[odd].tolist())
            assert order.has_aside or not aside
        elif step[0] == "recall":
            back = order.recall(step[1])
            assert set(back.tolist()) <= aside
            assert len(back) <= step[1]
            (order.add_ahead if step[2] else order.aside)(back)
            aside -= set(back.tolist()) if step[2] else set()
        else:
            order.release(f"w{step[1]}")
        assert sorted(order.tasks().tolist()) == sorted(twin)
