"""A backlog that is sorted as leases need it comes out as one that was sorted at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from fabric_pipelines.broker import order as order_module
from fabric_pipelines.broker.order import PrefixOrder
from fabric_pipelines.broker.unsorted import Unsorted

Keys = npt.NDArray[np.uint64]
TOP = (1 << 64) - 1


@pytest.fixture(scope="module", autouse=True)
def small_runs() -> Iterator[None]:
    """So that a few thousand tasks are parted many times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "RUN_MAX", 16)
        patch.setattr(order_module, "SLICE", 64)
        yield


def unsorted_order(keys: Keys, part: int = 100) -> PrefixOrder:
    order = PrefixOrder(keys.__getitem__)
    tasks = np.arange(len(keys))
    order.add_unsorted([tasks[at : at + part] for at in range(0, len(keys), part)])
    return order


def drain(order: PrefixOrder, limit: int, who: str = "") -> list[int]:
    out: list[int] = []
    while len(seen := order.peek(limit, who)):
        out += seen.tolist()
        order.advance(len(seen), who)
    return out


def keys_like(kind: str, count: int) -> Keys:
    draw = np.random.default_rng(5)
    if kind == "random":
        return draw.integers(0, TOP, count, dtype=np.uint64, endpoint=True)
    if kind == "few":
        return draw.integers(0, 5, count, dtype=np.uint64)
    if kind == "skewed":  # nearly all have the smallest key
        return np.where(
            draw.random(count) < 0.97, 0, draw.integers(0, TOP, count, np.uint64)
        ).astype(np.uint64)
    return np.full(count, {"all zero": 0, "all at the top": TOP}[kind], np.uint64)


KINDS = ("random", "few", "skewed", "all zero", "all at the top")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 16, 33, 5000])
def test_an_unsorted_backlog_comes_out_by_key_and_whole(kind: str, count: int) -> None:
    keys = keys_like(kind, count)
    out = drain(unsorted_order(keys), 64)
    assert sorted(out) == list(range(count))
    assert (np.sort(keys) == keys[out]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_its_pieces_follow_one_another_and_the_first_is_small(kind: str) -> None:
    keys = keys_like(kind, 5000)
    pieces = Unsorted([np.arange(2500), np.arange(2500, 5000)]).smallest(keys.__getitem__, 100)
    spans = [keys[np.concatenate(piece.parts)] for piece in pieces]
    assert sum(map(len, pieces)) == 5000
    assert len(pieces[0]) <= 200
    assert all(a.max() <= b.min() for a, b in pairwise(spans))
    assert all(piece.low <= span.min() for piece, span in zip(pieces, spans, strict=True))


def test_of_a_large_backlog_only_the_front_is_sorted_for_the_first_lease() -> None:
    order = unsorted_order(keys_like("random", 5000))
    order.peek(8)
    left = sum(len(piece) for arc in order._arcs for piece in arc.unsorted)
    assert left >= 5000 - 64


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 60), max_size=12)),
        st.tuples(st.just("take"), st.integers(0, 2), st.integers(1, 40)),
        st.tuples(st.just("release"), st.integers(0, 2)),
        st.tuples(st.just("remove"), st.integers(0, 400)),
        st.tuples(
            st.just("rearrange"),
        ),
    ),
    max_size=30,
)


@settings(max_examples=150)
@given(backlog=st.lists(st.integers(0, 60), max_size=400), steps=steps)
def test_whatever_comes_and_goes_nothing_of_it_is_lost_or_given_twice(
    backlog: list[int],
    steps: list[tuple],  # type: ignore[type-arg]
) -> None:
    table = np.zeros(2000, np.uint64)
    number = len(backlog)
    table[:number] = backlog
    order = PrefixOrder(table.__getitem__)
    order.add_unsorted([np.arange(number)])
    twin = set(range(number))
    for step in steps:
        if step[0] == "add":
            keys = np.sort(np.array(step[1], np.uint64))
            tasks = np.arange(number, number + len(keys))
            table[tasks] = keys
            order.add(keys, tasks)
            twin |= set(tasks.tolist())
            number += len(keys)
        elif step[0] == "take":
            got = order.peek(step[2], f"w{step[1]}").tolist()
            order.advance(len(got), f"w{step[1]}")
            assert set(got) <= twin
            assert len(set(got)) == len(got)
            assert got or not twin
            twin -= set(got)
        elif step[0] == "release":
            order.release(f"w{step[1]}")
        elif step[0] == "remove":
            order.remove(np.array([step[1]]))
            twin -= {step[1]}
        else:
            order.rearrange(lambda tasks: TOP - table[tasks])
        assert sorted(order.tasks().tolist()) == sorted(twin)
