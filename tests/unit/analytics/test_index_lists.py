"""Lists are cut the same whatever the machine, none beyond its bound, and the nearest of them are exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_pipelines.analytics.index import coarse
from fabric_pipelines.analytics.index.coarse import Coarse, capacity_of, place, train
from fabric_pipelines.analytics.reference.balanced_place import balanced_place
from fabric_pipelines.analytics.reference.flat_topk import flat_topk


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e12])
def test_the_nearest_centroids_are_those_of_float64(scale):
    rng = np.random.default_rng(1)
    centroids = (rng.integers(-2, 3, (70, 3)) * scale).astype(np.float32)  # many ties
    rows = (rng.integers(-2, 3, (300, 3)) * scale).astype(np.float32)
    D, found = Coarse(centroids).nearest(rows, 5)
    true_d, true_i, _ = flat_topk(rows, centroids, np.arange(70), 5, metric="l2")
    np.testing.assert_array_equal(found, true_i)
    np.testing.assert_array_equal(D, true_d)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 6), st.floats(1, 3))
def test_rows_are_placed_as_by_the_plain_loop_and_no_list_is_over_its_bound(
    seed, rows, lists, balance
):
    rng = np.random.default_rng(seed)
    vectors = rng.integers(-2, 3, (rows, 2)).astype(np.float32)  # many ties and copies
    ids = rng.permutation(1000)[:rows].astype(np.int64)
    centroids = rng.integers(-2, 3, (lists, 2)).astype(np.float32)
    capacity = capacity_of(rows, lists, balance)
    labels = place(vectors, ids, Coarse(centroids), capacity)
    assert np.bincount(labels).max() <= capacity
    wide = vectors.astype(float), ids, centroids.astype(float), capacity
    np.testing.assert_array_equal(labels, balanced_place(*wide))


def test_centroids_leave_small_lists_for_large_ones():
    rng = np.random.default_rng(4)
    heavy = rng.standard_normal((3000, 8)) * 0.05
    light = rng.standard_normal((200, 8)) * 5
    rows = np.concatenate([heavy, light]).astype(np.float32)
    ids = np.arange(len(rows))
    settings_ = {"seed": 2, "metric": "l2", "iterations": 12}
    sizes = [
        np.bincount(Coarse(train(rows, ids, 32, balance=balance, **settings_)).nearest(rows, 1)[1][:, 0])
        for balance in (2.0, 1e9)
    ]  # fmt: skip
    assert sizes[0].max() < 0.75 * sizes[1].max()


def test_training_depends_neither_on_the_order_of_rows_nor_on_pieces(monkeypatch):
    rng = np.random.default_rng(5)
    rows, ids = rng.standard_normal((900, 6)).astype(np.float32), rng.permutation(900)
    options = {"seed": 9, "metric": "cosine", "iterations": 6, "balance": 2.0}
    first = train(rows, ids, 12, **options)
    monkeypatch.setattr(coarse, "ROWS_AT_ONCE", 128)
    mixed = rng.permutation(900)
    assert train(rows[mixed], ids[mixed], 12, **options).tobytes() == first.tobytes()
