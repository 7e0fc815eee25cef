"""The index keeps narrow columns and loses nothing by it: what does not fit widens its column first."""

from __future__ import annotations

import numpy as np
import pytest

from fabric_pipelines.broker import snapshot
from fabric_pipelines.broker.index import COLUMNS, LARGEST, WIDER, TaskIndex
from fabric_pipelines.broker.order import PrefixOrder
from fabric_pipelines.broker.state import State

ORDER_BYTES = 4  # of a ready task in the order of its lane


def index_of(rows: int) -> TaskIndex:
    index = TaskIndex()
    index.extend(rows, lsn=1)
    return index


@pytest.mark.parametrize("name", WIDER)
def test_a_number_that_does_not_fit_widens_its_column_and_leaves_the_others(name: str) -> None:
    index, top = index_of(5), LARGEST[np.dtype(COLUMNS[name])]
    index.put(name, slice(0, 5), np.array([0, 1, 2, top - 1, top]))
    assert getattr(index, name).dtype == COLUMNS[name]
    index.put(name, np.array([1]), top + 1)
    assert getattr(index, name).dtype == WIDER[name]
    assert getattr(index, name)[:5].tolist() == [0, top + 1, 2, top - 1, top]
    others = [other for other in COLUMNS if other != name]
    assert [getattr(index, other).dtype for other in others] == [COLUMNS[o] for o in others]


@pytest.mark.parametrize("name", WIDER)
def test_a_column_that_might_be_too_narrow_is_written_by_nobody_directly(name: str) -> None:
    with pytest.raises(ValueError, match="read-only"):
        getattr(index_of(2), name)[0] = 1


def test_a_wide_column_stays_wide_while_the_index_grows_and_through_a_snapshot() -> None:
    state = State(1)
    state.index.extend(10, lsn=1)
    state.index.put("prompt", np.array([3]), 70_000)
    state.index.extend(5000, lsn=2)
    again = snapshot.restore(snapshot.take(state)).index
    for index in (state.index, again):
        assert index.prompt.dtype == np.int32
        assert (index.prompt[3], index.prompt[:5010].sum()) == (70_000, 70_000)
    assert not again.differences(state.index)


def test_snapshots_of_wider_columns_of_an_older_broker_are_read() -> None:
    state = State(1)
    state.index.extend(10, lsn=1)
    taken = snapshot.take(state)
    old = {
        name: column.astype(np.int64) if name in WIDER else column
        for name, column in taken.columns.items()
    }
    again = snapshot.restore(snapshot.Snapshot(taken.head, old)).index
    assert {name: getattr(again, name).dtype for name in COLUMNS} == COLUMNS


def test_a_task_takes_at_most_36_bytes_ready_or_done() -> None:
    """What a waiting task has not got yet lies in pages that nobody touched."""
    sizes = {name: getattr(index_of(1), name).itemsize for name in COLUMNS}
    of_outcomes = ("attempts", "verdict", "done_row", "output")
    assert sum(sizes.values()) <= 36
    assert sum(sizes.values()) - sum(sizes[name] for name in of_outcomes) + ORDER_BYTES <= 36


def test_a_ready_task_takes_four_bytes_in_its_order() -> None:
    keys = np.random.default_rng(1).integers(0, 1 << 63, 100_000, dtype=np.uint64)
    order = PrefixOrder(keys.__getitem__)
    for part in np.array_split(np.arange(len(keys)), 100):
        by_key = part[np.argsort(keys[part])]
        order.add(keys[by_key], by_key)
    held = [run.tasks for arc in order._arcs for run in arc.runs]
    assert sum(tasks.nbytes for tasks in held) <= 1.01 * ORDER_BYTES * len(keys)


def test_sequence_numbers_beyond_32_bits_are_kept_whole() -> None:
    first = (1 << 32) - 2
    order = PrefixOrder(lambda tasks: np.asarray(tasks).astype(np.uint64))
    order.add(np.arange(4, dtype=np.uint64) + np.uint64(first), np.arange(4) + first)
    assert order.peek(8).tolist() == [first, first + 1, first + 2, first + 3]
