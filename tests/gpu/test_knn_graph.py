"""Kernel family knn_graph against its twin: the source on the CPU, and the cubin on a real card."""

from itertools import pairwise

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels
from fabric_pipelines.analytics.reference import knn_graph as twin
from fabric_pipelines.device.card import Card
from tests.gpu.grid import both

NEAR = 3
Lists = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def lists(sizes: list[int], width: int, seed: int = 0) -> Lists:
    """Neighbours by distance inside each cluster, of points on a few line pieces, so that clusters fall apart and have
    hubs and copies; a tenth of the rows is left out and has no list."""
    rng = np.random.default_rng([seed, width])
    indptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    count = int(indptr[-1])
    row, distance = np.full((count, width), -1), np.full((count, width), np.nan)
    flag = (rng.random(count) < 0.1).astype(np.uint8)
    if len(sizes) > 4:
        flag[indptr[3] : indptr[4]] = 1  # a cluster without a member
    point = 50 * rng.integers(0, 3, count) + rng.exponential(1, count)
    point[rng.random(count) < 0.1] = 50.0
    for low, high in pairwise(indptr):
        own = low + np.flatnonzero(flag[low:high] == 0)
        apart = np.abs(point[own, None] - point[own])
        np.fill_diagonal(apart, np.inf)
        k = min(width, max(0, len(own) - 1))
        order = np.argsort(apart, axis=1, kind="stable")[:, :k]
        row[own, :k] = own[order] if k else 0
        distance[own, :k] = np.take_along_axis(apart, order, axis=1)
    return row, distance, flag, indptr


def run(card: Card, host: Lists, blocks: int | None = None) -> list[np.ndarray]:
    found = kernels.knn_graph(card, *(card.upload(part) for part in host), NEAR, blocks=blocks)
    return [
        card.download(part) for part in (found.degree, found.factor, found.label, found.largest)
    ]


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@both("width", [1, 2, 7, 8, 9, 10, 20, 33], [1, 8, 20])
def test_degrees_factors_and_components_equal_the_twin(
    card: Card, width: int, kind: type[np.generic]
) -> None:
    row, distance, flag, indptr = lists([0, 1, 2, 3, 31, 33, 128, 129, 500, 0, 12, 1100], width)
    found = run(card, (row.astype(kind), distance, flag, indptr))
    expected = twin.of_lists(row, distance, flag == 0, indptr, NEAR)
    for at in (0, 2, 3):
        assert np.array_equal(found[at], expected[at]), twin.ListsTwin._fields[at]
    np.testing.assert_allclose(found[1], expected.factor, rtol=8 * np.finfo(float).eps * width)


def test_a_long_chain_handed_over_backwards_is_one_component(card: Card) -> None:
    """Every row knows only the one before it, or only the one behind it: the longest walks there are."""
    count = 3000
    for step in (-1, -1, 1, 1):  # hooked in both orders of threads
        row = (np.arange(count) + step)[:, None]
        row[row == count] = -1
        host = (row, np.ones((count, 1)), np.zeros(count, np.uint8), np.array([0, count]))
        _, _, label, largest = run(card, host)
        assert not label.any()
        assert largest.tolist() == [count]


def test_no_rows_and_no_lists(card: Card) -> None:
    nothing = (
        np.empty((0, 3), np.int32),
        np.empty((0, 3)),
        np.empty(0, np.uint8),
        np.zeros(3, int),
    )
    assert run(card, nothing)[3].tolist() == [0, 0]
    alone = (np.empty((2, 0), np.int32), np.empty((2, 0)), np.zeros(2, np.uint8), np.array([0, 2]))
    degree, factor, label, largest = run(card, alone)
    assert (degree.tolist(), factor.tolist()) == ([0, 0], [1, 1])
    assert (label.tolist(), largest.tolist()) == ([0, 1], [1])


def test_ten_runs_and_any_grid_give_the_same_bytes(card: Card) -> None:
    host = lists([129, 700, 33], 20)
    first = [part.tobytes() for part in run(card, host)]
    for blocks in (None, None, None, None, None, None, 1, 7, 100):
        assert [part.tobytes() for part in run(card, host, blocks)] == first
