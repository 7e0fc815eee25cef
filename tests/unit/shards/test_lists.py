"""Cutting rows into lists: the rows and the seed decide, nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from fabric_pipelines.analytics.search import METRICS
from fabric_pipelines.errors import UsageError
from fabric_pipelines.shards.lists import cut, cut_along, nearest_list


def clustered(rows=600, dim=16, centres=6, seed=1):
    rng = np.random.default_rng(seed)
    middle = rng.standard_normal((centres, dim)) * 5
    x = middle[rng.integers(0, centres, rows)] + 0.3 * rng.standard_normal((rows, dim))
    return x.astype(np.float32), np.sort(rng.choice(10**6, rows, replace=False))


@pytest.mark.parametrize("metric", METRICS)
def test_every_row_lies_in_the_list_of_its_nearest_centroid_ordered_by_id(metric):
    x, ids = clustered()
    lists = cut(x, ids, 8, seed=7, metric=metric, iterations=20)
    assert sorted(lists.order) == list(range(600))
    assert lists.indptr[0] == 0
    assert lists.indptr[-1] == 600
    labels = np.repeat(np.arange(8), np.diff(lists.indptr))
    np.testing.assert_array_equal(nearest_list(x[lists.order], lists.centroids, metric), labels)
    for a, b in zip(lists.indptr[:-1], lists.indptr[1:], strict=True):
        assert (np.diff(ids[lists.order[a:b]]) > 0).all()


@pytest.mark.parametrize("metric", METRICS)
def test_the_order_in_which_rows_arrive_changes_nothing(metric):
    x, ids = clustered()
    one = cut(x, ids, 8, seed=7, metric=metric, iterations=20)
    mixed = np.random.default_rng(0).permutation(600)
    two = cut(x[mixed], ids[mixed], 8, seed=7, metric=metric, iterations=20)
    assert one.centroids.tobytes() == two.centroids.tobytes()
    np.testing.assert_array_equal(ids[one.order], ids[mixed][two.order])


def test_another_seed_starts_from_other_rows():
    x, ids = clustered()
    one, two = (cut(x, ids, 8, seed=s, metric="l2", iterations=1) for s in (1, 2))
    assert one.centroids.tobytes() != two.centroids.tobytes()


def test_training_tightens_the_lists():
    x, ids = clustered(centres=8)

    def spread(steps):
        lists = cut(x, ids, 8, seed=3, metric="l2", iterations=steps)
        labels = np.repeat(np.arange(8), np.diff(lists.indptr))
        return np.square(x[lists.order] - lists.centroids[labels]).sum()

    assert spread(20) < spread(1) < spread(0)


def test_spherical_centroids_have_length_one():
    x, ids = clustered()
    lists = cut(x, ids, 8, seed=7, metric="cosine", iterations=20)
    np.testing.assert_allclose(np.linalg.norm(lists.centroids, axis=1), 1, atol=1e-12)


@pytest.mark.parametrize("metric", METRICS)
def test_duplicates_leave_lists_empty_rather_than_fail(metric):
    x, ids = np.ones((20, 4), np.float32), np.arange(20)
    lists = cut(x, ids, 3, seed=0, metric=metric, iterations=5)
    assert np.diff(lists.indptr).tolist() == [20, 0, 0]


def test_a_list_that_lost_its_rows_takes_the_farthest_row():
    x = np.array([[0.0], [0.0], [0.0], [100.0], [50.0]], np.float32)
    for seed in range(8):
        lists = cut(x, np.arange(5), 3, seed=seed, metric="l2", iterations=10)
        assert sorted(np.diff(lists.indptr).tolist()) == [1, 1, 3]


def test_a_centroid_at_the_origin_is_a_centroid():
    x = np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1], [50, 50], [51, 50]], np.float32)
    lists = cut(x, np.arange(6), 2, seed=0, metric="l2", iterations=10)
    assert sorted(np.diff(lists.indptr).tolist()) == [2, 4]


def test_more_lists_than_rows_are_refused_with_the_number_that_would_do():
    with pytest.raises(UsageError, match="ask for 1 to 2 lists"):
        cut(np.ones((2, 3)), np.arange(2), 5, seed=0, metric="l2", iterations=1)


def test_cutting_along_given_centroids_does_not_move_them():
    x, ids = clustered()
    trained = cut(x, ids, 8, seed=7, metric="l2", iterations=20)
    again = cut_along(x, ids, trained.centroids, metric="l2")
    np.testing.assert_array_equal(again.order, trained.order)
    assert again.centroids is trained.centroids
