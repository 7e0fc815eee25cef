"""Exact search returns the float64 brute force's list, whatever the data looks like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_pipelines.analytics import search
from fabric_pipelines.analytics.reference.flat_topk import flat_topk
from fabric_pipelines.analytics.search import FlatScan, Queries, exact_topk, recall_at_k
from fabric_pipelines.errors import UsageError


def assert_equals_twin(xq, xb, ids, k, metric):
    got = exact_topk(xq, xb, ids, k, metric=metric)
    true_d, true_i, found = flat_topk(xq, xb, ids, k, metric=metric)
    np.testing.assert_array_equal(got.I, true_i)
    np.testing.assert_array_equal(got.found, found)
    np.testing.assert_array_equal(got.D, true_d)


@pytest.mark.parametrize("metric", search.METRICS)
@pytest.mark.parametrize("dim", [1, 2, 7, 33, 128, 129, 384])
def test_search_equals_the_float64_brute_force(metric, dim):
    rng = np.random.default_rng(dim)
    xb = rng.standard_normal((400, dim)).astype(np.float32)
    xq = rng.standard_normal((9, dim)).astype(np.float32)
    assert_equals_twin(xq, xb, rng.permutation(400).astype(np.int64), 10, metric)


@pytest.mark.parametrize("metric", search.METRICS)
def test_near_ties_that_float32_cannot_tell_apart_come_in_float64_order(metric):
    rng = np.random.default_rng(3)
    base = rng.standard_normal(64)
    xb = base + 1e-9 * rng.standard_normal((300, 64))  # float64 rows, equal once in float32
    assert len(np.unique(xb.astype(np.float32), axis=0)) < 300
    assert_equals_twin(rng.standard_normal((4, 64)), xb, np.arange(300), 20, metric)


@pytest.mark.parametrize("metric", search.METRICS)
def test_equal_rows_come_by_id(metric):
    xb = np.ones((50, 16), np.float32)
    ids = np.arange(50, dtype=np.int64)[::-1] * 7
    got = exact_topk(np.full((1, 16), 2.0), xb, ids, 5, metric=metric)
    assert got.I.tolist() == [[0, 7, 14, 21, 28]]


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e8])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e25])
def test_offsets_and_scales_that_break_float32_squares_do_not_break_the_list(offset, scale):
    rng = np.random.default_rng(5)
    xb = (offset + rng.standard_normal((300, 24))) * scale
    assert_equals_twin(xb[:5] + 0.1 * scale, xb, np.arange(300), 7, "l2")


def test_more_neighbours_than_rows_are_answered_with_found_and_no_id():
    xb = np.eye(3, dtype=np.float32)
    got = exact_topk(np.ones((2, 3)), xb, np.array([5, 6, 7]), 10, metric="cosine")
    assert got.found.tolist() == [3, 3]
    assert got.I[0].tolist() == [5, 6, 7] + [search.NO_ID] * 7
    assert np.isnan(got.D[:, 3:]).all()


def test_an_empty_base_finds_nothing():
    got = exact_topk(np.ones((2, 3)), np.empty((0, 3)), np.empty(0, np.int64), 4, metric="l2")
    assert got.found.tolist() == [0, 0]
    assert (got.I == search.NO_ID).all()


@pytest.mark.parametrize(
    ("metric", "bad"),
    [(m, v) for m in search.METRICS for v in (np.nan, np.inf)]
    + [("cosine", 0.0), ("cosine", 1e-14)],
)
def test_rows_and_queries_that_have_no_distance_are_never_scored(metric, bad):
    rng = np.random.default_rng(6)
    xb = rng.standard_normal((40, 8)).astype(np.float32)
    xb[3] = bad
    xq = np.stack([xb[0], np.full(8, bad, np.float32)])
    got = exact_topk(xq, xb, np.arange(40), 40, metric=metric)
    assert 3 not in got.I[0]
    assert got.found.tolist() == [39, 0]
    assert_equals_twin(xq, xb, np.arange(40), 40, metric)


def test_the_origin_is_a_point_like_any_other_under_l2():
    xb = np.array([[0.0, 0.0], [3.0, 4.0]], np.float32)
    assert exact_topk(np.zeros((1, 2)), xb, np.arange(2), 2, metric="l2").D.tolist() == [[0, 25]]
    assert_equals_twin(np.zeros((1, 2)), xb, np.arange(2), 2, "l2")


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.integers(1, 12),
    st.sampled_from(search.METRICS),
)
def test_the_list_does_not_depend_on_how_rows_are_cut_into_blocks(seed, rows, k, metric):
    rng = np.random.default_rng(seed)
    xb = rng.integers(-2, 3, (rows, 3)).astype(np.float32)  # many exact ties
    xq = rng.integers(-2, 3, (4, 3)).astype(np.float32)
    scan = FlatScan(Queries(xq, metric), k)
    for part in np.array_split(rng.permutation(rows), 3):
        scan.add(xb[part], part.astype(np.int64))
    np.testing.assert_array_equal(
        scan.ranked().I, exact_topk(xq, xb, np.arange(rows), k, metric=metric).I
    )
    assert_equals_twin(xq, xb, np.arange(rows), k, metric)


def test_small_tiles_give_the_list_of_large_ones(monkeypatch):
    rng = np.random.default_rng(8)
    xb, xq = rng.standard_normal((500, 20)), rng.standard_normal((30, 20))
    whole = exact_topk(xq, xb, np.arange(500), 6, metric="l2")
    monkeypatch.setattr(search, "TILE_PAIRS", 2000)
    monkeypatch.setattr(search, "RESCORE_FLOATS", 64)
    np.testing.assert_array_equal(exact_topk(xq, xb, np.arange(500), 6, metric="l2").I, whole.I)


def test_a_pair_scores_the_same_alone_and_among_others():
    rng = np.random.default_rng(9)
    q, x = rng.standard_normal((64, 385)), rng.standard_normal((64, 385))
    for metric in search.METRICS:
        alone = [search.pair_distance(q[i : i + 1], x[i : i + 1], metric)[0] for i in range(64)]
        assert search.pair_distance(q, x, metric).tolist() == alone


def test_recall_counts_true_neighbours_only():
    truth = np.array([[1, 2, 3], [4, 5, search.NO_ID]])
    assert recall_at_k(truth, truth) == 1.0
    assert recall_at_k(np.array([[1, 2, 9], [9, 9, search.NO_ID]]), truth) == pytest.approx(2 / 5)


def test_a_wrong_question_is_a_usage_error():
    rows, ids = np.ones((2, 3)), np.arange(2)
    with pytest.raises(UsageError, match="dimension 4"):
        exact_topk(np.ones((1, 4)), rows, ids, 1, metric="l2")
    with pytest.raises(UsageError, match="k is 0"):
        exact_topk(rows, rows, ids, 0, metric="l2")
    with pytest.raises(UsageError, match="'dot' is unknown"):
        exact_topk(rows, rows, ids, 1, metric="dot")
