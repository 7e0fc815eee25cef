"""Kernel family two_means against its twin: the source on the CPU, and the cubin on a real card."""

from itertools import pairwise

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels
from fabric_pipelines.analytics.csr import Csr
from fabric_pipelines.analytics.reference.two_means import from_sides
from fabric_pipelines.analytics.sweeps import CpuSweeps
from fabric_pipelines.device.card import Card
from tests.gpu.grid import HOST_DIMS, both

DIMS = [*HOST_DIMS, 4, 20, 64, 384, 1028, 2048]
Given = tuple[np.ndarray, ...]


def given(dim: int, sizes: list[int], seed: int = 0) -> tuple[Given, list[np.ndarray]]:
    """Clusters of two lumps on top of a common centre far away, started on sides that are partly wrong; bad rows are NaN and
    weigh nothing. Also the rows that count of each cluster, less their mean."""
    rng = np.random.default_rng([seed, dim])
    indptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    count = int(indptr[-1])
    lump = rng.random(count) < 0.4
    rows = rng.standard_normal((count, dim)) + 20
    rows[lump, -1] += 4  # told apart by the last dimension alone
    rows = rows.astype(np.float32)
    weight = np.where(rng.random(count) < 0.1, 0.0, rng.uniform(0.9, 1.1, count))
    rows[(weight == 0) & (rng.random(count) < 0.5), 0] = np.nan
    start = (lump ^ (rng.random(count) < 0.3)).astype(np.uint8)
    csr = Csr(rows, indptr, np.arange(count))
    size = np.add.reduceat(np.append(weight != 0, 0), indptr[:-1]) * (csr.sizes > 0)
    mean = CpuSweeps(csr).centroid(weight) / np.maximum(size, 1)[:, None]
    apart = rows.astype(np.float64) * weight[:, None] - mean[csr.owner()]
    return (rows, weight, indptr, mean, size.astype(np.int64), start), [
        apart[low:high][weight[low:high] != 0] for low, high in pairwise(indptr)
    ]


def run(card: Card, host: Given, **rest: int) -> list[np.ndarray]:
    found = kernels.two_means(card, *(card.upload(part) for part in host), **rest)
    parts = (found.side, found.place, found.apart2, found.above, found.norm2)
    return [card.download(part) for part in parts]


@both("dim", DIMS, [1, 2, 4, 31, 33, 64, 129, 257, 1028])
def test_sides_distances_and_coordinates_equal_the_twin(card: Card, dim: int) -> None:
    host, clusters = given(dim, [0, 1, 2, 3, 31, 33, 127, 129, 300, 0, 5, 64])
    _, weight, indptr, _, size, start = host
    side, place, apart2, above, norm2 = run(card, host)
    left_out = weight == 0
    assert not side[left_out].any()
    assert not place[left_out].any()
    assert not apart2[left_out].any()
    for cluster, (low, high) in enumerate(pairwise(indptr)):
        own = low + np.flatnonzero(weight[low:high] != 0)
        if len(own) == 0:
            continue
        expected = from_sides(clusters[cluster], start[own] != 0)
        scale = 1e-9 * np.abs(clusters[cluster]).max()
        if expected[0].any() and not expected[0].all():
            assert np.array_equal(side[own] != 0, expected[0])
            assert above[cluster] == expected[0].sum()
        else:
            assert min(above[cluster], size[cluster] - above[cluster]) == 0
        np.testing.assert_allclose(apart2[own], expected[1], rtol=1e-9, atol=scale)
        np.testing.assert_allclose(place[own], expected[2], rtol=1e-9, atol=scale)
        upper = clusters[cluster][side[own] != 0].sum(axis=0)
        np.testing.assert_allclose(norm2[cluster], upper @ upper, rtol=1e-9, atol=scale)


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_it_stops_after_the_rounds_allowed(
    card: Card, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fabric_pipelines.analytics.reference.two_means.ROUNDS_MAX", rounds)
    host, clusters = given(8, [200])
    counts = host[1] != 0
    expected = from_sides(clusters[0], host[5][counts] != 0)
    assert np.array_equal(run(card, host, rounds=rounds)[0][counts] != 0, expected[0])


def test_a_side_that_would_fall_empty_ends_it_before_it_does(card: Card) -> None:
    """Both means lie at the same place but for rounding, or a single side is all there is."""
    rows = np.array([[-1], [1], [-1], [1], [5], [5], [5]], np.float32)
    indptr, start = np.array([0, 4, 7]), np.array([1, 1, 0, 0, 0, 1, 0], np.uint8)
    host = (rows, np.ones(7), indptr, np.array([[0.0], [5.0]]), np.array([4, 3]), start)
    side, _, apart2, above, norm2 = run(card, host)
    assert above.tolist() == [2, 1]
    assert norm2.tolist() == [0, 0]
    assert side.tolist() == start.tolist()
    assert apart2.tolist() == [1, 1, 1, 1, 0, 0, 0]


def test_a_row_as_near_to_both_means_is_of_the_lower_side(card: Card) -> None:
    rows = np.array([[-2], [0], [1], [1]], np.float32)
    host = (rows, np.ones(4), np.array([0, 4]), np.zeros((1, 1)), np.array([4]))
    side, place, _, _, _ = run(card, (*host, np.array([0, 0, 1, 1], np.uint8)))
    assert side.tolist() == [0, 0, 1, 1]
    assert place.tolist() == [-2, 0, 1, 1]


def test_no_rows_and_empty_clusters(card: Card) -> None:
    none = (np.empty((0, 3), np.float32), np.empty(0), np.zeros(3, int), np.zeros((2, 3)),
            np.zeros(2, int), np.empty(0, np.uint8))  # fmt: skip
    assert run(card, none)[3].tolist() == [0, 0]


@both("dim", [3, 128, 768, 1025], [3, 132])
def test_ten_runs_any_grid_and_any_window_give_the_same_bytes(card: Card, dim: int) -> None:
    host, _ = given(dim, [129, 400, 33, 1, 0, 300])
    first = [part.tobytes() for part in run(card, host)]
    for blocks in (None, 1, 7, 100):
        assert [part.tobytes() for part in run(card, host, blocks=blocks)] == first
    assert [part.tobytes() for part in run(card, host, window_bytes=1)] == first
