"""What the fast search is judged by is the twin's list, and the twin is asked of few rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_pipelines.analytics import truth
from fabric_pipelines.analytics.reference.flat_topk import flat_topk
from fabric_pipelines.analytics.truth import candidates, true_neighbours

METRICS = ("cosine", "l2")


def assert_is_the_twins(xq, xb, ids, k, metric):
    _, expected, _ = flat_topk(xq, xb, ids, k, metric=metric)
    np.testing.assert_array_equal(true_neighbours(xq, xb, ids, k, metric=metric), expected)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dim", [1, 2, 7, 64, 129, 384])
def test_it_is_the_list_of_the_twin_and_few_rows_are_scored_one_by_one(metric, dim):
    rng = np.random.default_rng(dim)
    xb = rng.standard_normal((3000, dim)).astype(np.float32)
    xq = xb[::400] + 0.01
    assert_is_the_twins(xq, xb, rng.permutation(3000).astype(np.int64), 10, metric)
    if dim > 1:  # under cosine all rows of one dimension are one of two directions
        assert len(candidates(xq, xb, 10, metric=metric)) <= 10 * len(xq)


@pytest.mark.parametrize("metric", METRICS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_ties_rows_that_cannot_be_scored_and_short_tables_are_answered_as_the_twin_does(
    metric, data
):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows, dim = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 9))
    xb = rng.integers(-2, 3, (rows, dim)).astype(np.float64)  # many equal rows, and zeros
    bad = data.draw(st.lists(st.sampled_from([np.nan, np.inf, 1e100, 1e-200]), max_size=4))
    for value in bad[:rows]:
        xb[rng.integers(rows), rng.integers(dim)] = value
    xq = np.concatenate([xb[:3], rng.standard_normal((2, dim)), np.zeros((1, dim))])
    assert_is_the_twins(xq, xb, rng.permutation(rows).astype(np.int64), 7, metric)


def shuffled_sums(seed):
    """Rows with the same values in other orders, asked with ones: one distance, rounded in as many ways."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(96) * 10.0 ** rng.integers(-6, 6, 96)
    return np.ones((1, 96)), np.stack([rng.permutation(values) for _ in range(200)])


@pytest.mark.parametrize("metric", METRICS)
def test_rows_that_only_rounding_tells_apart_are_all_given_to_the_twin(metric, monkeypatch):
    for seed in range(8):
        xq, xb = shuffled_sums(seed)
        assert_is_the_twins(xq, xb, np.arange(200), 10, metric)
        assert len(candidates(xq, xb, 10, metric=metric)) == 200
    monkeypatch.setattr(truth, "UNIT", 0.0)  # without a bound the product's rounding would choose
    wrong = []
    for seed in range(8):
        xq, xb = shuffled_sums(seed)
        _, expected, _ = flat_topk(xq, xb, np.arange(200), 10, metric=metric)
        found = true_neighbours(xq, xb, np.arange(200), 10, metric=metric)
        wrong.append(not np.array_equal(found, expected))
    assert any(wrong)


@pytest.mark.parametrize("metric", METRICS)
def test_blocks_change_nothing(metric, monkeypatch):
    rng = np.random.default_rng(4)
    xb, ids = rng.standard_normal((500, 12)), rng.permutation(500)
    whole = true_neighbours(xb[:20], xb, ids, 10, metric=metric)
    for rows in (1, 7, 499):
        monkeypatch.setattr(truth, "BLOCK_FLOATS", rows * 12)
        np.testing.assert_array_equal(true_neighbours(xb[:20], xb, ids, 10, metric=metric), whole)
