"""Which layers are folded and which lists are written whole, by counts alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fabric_pipelines.shards import compaction

counts = st.lists(st.integers(0, 60), max_size=12)


def test_a_layer_no_larger_than_the_new_one_is_folded_and_makes_room_for_the_next():
    assert compaction.layers_to_fold([40, 20, 10], 10, 1000) == [2, 1, 0]
    assert compaction.layers_to_fold([40, 20, 11], 10, 1000) == []
    assert compaction.layers_to_fold([40, 20, 10], 10, 29) == [2]
    assert compaction.layers_to_fold([0, 5], 9, 9) == [
        1
    ]  # what holds nothing is not folded but dropped


@given(counts, st.integers(0, 60), st.integers(0, 100))
def test_folding_keeps_to_the_budget_and_at_least_doubles_what_a_row_lies_in(
    layers: list[int], written: int, left: int
) -> None:
    fold = compaction.layers_to_fold(layers, written, left)
    assert len(set(fold)) == len(fold)
    assert sum(layers[number] for number in fold) <= left
    for number in fold:
        assert 0 < layers[number] <= written
        written += layers[number]


def test_a_list_half_of_which_is_written_anyway_is_written_whole():
    stored, written = np.array([10, 10, 0, 10]), np.array([10, 9, 5, 30])
    assert compaction.lists_to_rewrite(stored, written, 20).tolist() == [0, 3]
    assert compaction.lists_to_rewrite(stored, written, 19).tolist() == [0]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=20), st.integers(0, 90))
def test_rewriting_lists_keeps_to_the_budget_and_takes_the_cheapest_first(
    lists: list[tuple[int, int]], left: int
) -> None:
    stored = np.array([one for one, _ in lists], np.int64)
    written = np.array([two for _, two in lists], np.int64)
    chosen = compaction.lists_to_rewrite(stored, written, left)
    assert stored[chosen].sum() <= left
    assert (written[chosen] >= stored[chosen]).all()
    assert (stored[chosen] > 0).all()
    could = np.flatnonzero((stored > 0) & (written >= stored))
    others = np.setdiff1d(could, chosen)
    if len(others):
        assert stored[others].min() >= stored[chosen].max(initial=0)
        assert stored[chosen].sum() + stored[others].min() > left


def test_with_one_percent_moved_less_than_three_percent_of_the_rows_are_written():
    rows = 1_000_000
    assert rows // 100 + compaction.budget(rows) < 0.03 * rows
