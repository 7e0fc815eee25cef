"""Kernel family csr_syrk against its twin: the source on the CPU, and the cubin on a real card."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels_moments as moments
from fabric_pipelines.analytics.csr import Csr
from fabric_pipelines.analytics.reference import csr_syrk as twin
from fabric_pipelines.device.card import Card
from tests.gpu.grid import DIMS, SIZES, both

# dimension, sizes of clusters: the edges of both combined, fewer rows than dimensions and more, where one run is cheap
EDGES = [
    (1, [0, 1, 2, 4097]), (2, [31, 1, 2]), (31, [32, 0, 33, 31, 5]), (33, [1, 32, 127]), (128, [3, 129]), (129, [128]),
    (257, [97, 2]), (384, [33, 1]), (1025, [4]),
]  # fmt: skip
CARD_EDGES = [(dim, [size for size in SIZES if size * dim < 1 << 23]) for dim in DIMS]


class Given(NamedTuple):
    """A store whose rows of a cluster lie in disorder, NaN and zeros among them; `place` lists those that count."""

    csr: Csr
    weight: np.ndarray
    place: np.ndarray
    first: np.ndarray
    size: np.ndarray
    mean: np.ndarray


def given(dim: int, sizes: list[int], seed: int = 0) -> Given:
    rng = np.random.default_rng([seed, dim])
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    raw = np.concatenate([[0], np.cumsum([size + 1 for size in sizes])]).astype(np.int64)
    rows = (3 + rng.standard_normal((raw[-1], dim))).astype(np.float32)
    weight, place = rng.uniform(0.5, 2, len(rows)), []
    for (low, high), size in zip(pairwise(raw), sizes, strict=True):
        own = rng.permutation(np.arange(low, high))
        weight[own[0]], rows[own[0], rng.integers(dim)] = 0, np.nan
        place.append(own[1:])
        if size >= 10:
            rows[own[3]] = rows[own[4]]
    listed = np.concatenate(place).astype(np.int64)
    wide = twin.values(rows, weight, listed, None)
    mean = np.zeros((len(sizes), dim))
    for cluster, (low, high) in enumerate(pairwise(bounds)):
        mean[cluster] = wide[low:high].mean(axis=0) if low < high else 0
    csr = Csr(rows, raw, np.arange(len(rows)))
    return Given(csr, weight, listed, bounds[:-1], np.diff(bounds), mean)


def upload(card: Card, host: Given) -> moments.Store:
    given = (host.csr.rows, host.weight, host.place, host.mean)
    return moments.Store(*(card.upload(part) for part in given))


def run(card: Card, host: Given, *, centred: bool = True, **how: Any) -> dict[int, np.ndarray]:
    """The matrix of every cluster with rows."""
    found, window = {}, how.pop("window_bytes", moments.WINDOW_BYTES)
    there = upload(card, host)
    for work in moments.waves(host.first, host.size, host.csr.dim, window):
        out = card.download(moments.csr_syrk(card, there, work, centred=centred, **how))
        for (cluster, _, _, _, at), side in zip(
            work.list.tolist(), work.side.tolist(), strict=True
        ):
            found[cluster] = out[at : at + side * side].reshape(side, side)
    return found


def own(host: Given, cluster: int, *, centred: bool = True) -> np.ndarray:
    listed = host.place[host.first[cluster] :][: host.size[cluster]]
    return twin.values(host.csr.rows, host.weight, listed, host.mean[cluster] if centred else None)


def require_equal(found: dict[int, np.ndarray], host: Given, *, centred: bool = True) -> None:
    assert sorted(found) == np.flatnonzero(host.size).tolist()
    for cluster, matrix in found.items():
        expected = twin.moment(own(host, cluster, centred=centred))
        slack = 4 * np.finfo(float).eps * max(own(host, cluster).shape) * np.trace(expected)
        np.testing.assert_allclose(matrix, expected, rtol=0, atol=slack)
        assert np.array_equal(matrix, matrix.T)


@both("dim,sizes", CARD_EDGES, EDGES)
def test_moments_equal_the_twin_at_every_size_and_dimension(
    card: Card, dim: int, sizes: list[int]
) -> None:
    host = given(dim, sizes)
    for centred in (True, False):
        require_equal(run(card, host, centred=centred), host, centred=centred)


@both(
    "dim,sizes",
    [(dim, [2000, 130, 33]) for dim in DIMS if dim > 96],
    [(98, [7, 103]), (130, [101])],
)
def test_matrix_units_find_what_multiply_adds_do(card: Card, dim: int, sizes: list[int]) -> None:
    host = given(dim, sizes)
    require_equal(run(card, host, units=True), host)


@both("dim", [1, 31, 32, 33, 128, 129, 768, 1025], [1, 33, 129])
def test_a_signal_in_the_last_dimension_alone_is_seen(card: Card, dim: int) -> None:
    rows = np.zeros((5 + 2 * dim, dim), np.float32)
    rows[:5, -1] = [1, 2, 3, 4, 5]
    rows[5:10, -1] = rows[: len(rows[5:10]), -1]
    size = np.array([5, 2 * dim])
    host = Given(Csr(rows, np.append(0, size.cumsum()), np.arange(len(rows))), np.ones(len(rows)),
                 np.arange(len(rows)), np.array([0, 5]), size, np.zeros((2, dim)))  # fmt: skip
    found = run(card, host)
    few = np.arange(1.0, 6.0)
    assert np.array_equal(found[0], np.outer(few, few) / 5 if dim > 5 else [[11.0]])
    several = few[: 2 * dim]
    assert found[1].sum() == found[1][-1, -1] == several @ several / (2 * dim)


def test_a_tight_cluster_far_from_the_origin_keeps_its_digits(card: Card) -> None:
    rng = np.random.default_rng(0)
    rows = (1000 + 1e-3 * rng.standard_normal((60, 40))).astype(np.float32)
    mean = rows.astype(np.float64).mean(axis=0, keepdims=True)
    host = Given(Csr(rows, np.array([0, 60]), np.arange(60)), np.ones(60), np.arange(60),
                 np.array([0]), np.array([60]), mean)  # fmt: skip
    require_equal(run(card, host), host)


@both("dim,sizes", [(3, [70_000, 40]), (128, [20_000, 129]), (768, [5000, 100])], [(2, [9000, 3])])
def test_large_clusters_are_cut_and_any_grid_and_window_give_the_same_bytes(
    card: Card, dim: int, sizes: list[int]
) -> None:
    host = given(dim, sizes)
    assert moments.chunk_rows(host.size, dim)[0] < sizes[0]
    first = run(card, host)
    require_equal(first, host)
    for how in ({"blocks": 1}, {"blocks": 7}, {"window_bytes": 1}):
        again = run(card, host, **how)
        assert all(again[cluster].tobytes() == first[cluster].tobytes() for cluster in first)


@both("dim", [1, 2, 33, 129, 768], [1, 33])
def test_sides_of_an_axis_equal_the_twin(card: Card, dim: int) -> None:
    host = given(dim, [0, 1, 5, 40, 130])
    (work,) = moments.waves(host.first, host.size, dim)
    axis = np.random.default_rng(dim).standard_normal(int(work.vector[-1]))
    side = card.empty(len(host.csr.rows), np.uint8)
    card.fill(side, 0)
    moments.csr_syrk_sides(card, upload(card, host), work, card.upload(axis), side)
    found = card.download(side)
    for cluster, (low, high) in zip(work.clusters, pairwise(work.vector), strict=True):
        listed = host.place[host.first[cluster] :][: host.size[cluster]]
        assert np.array_equal(found[listed] != 0, twin.sides(own(host, cluster), axis[low:high]))


def test_chunks_never_hold_much_more_than_a_matrix() -> None:
    size = np.array([0, 1, 31, 4096, 10_000, 10**7, 2**31])
    for dim in (1, 31, 128, 384, 768, 4096):
        held = moments.held_values(size, dim)
        assert (8 * held <= np.maximum(8 * np.minimum(size, dim) ** 2, 160 << 20)).all()


@pytest.mark.parametrize("window_bytes", [1, 100_000, 1 << 30])
def test_waves_list_every_cluster_once_and_keep_to_the_window(window_bytes: int) -> None:
    size = np.random.default_rng(0).integers(0, 200, 50)
    first = np.cumsum(size) - size
    listed = []
    for work in moments.waves(first, size, 64, window_bytes):
        held = moments.held_bytes(size[work.clusters], 64).sum()
        assert held <= window_bytes or len(work.clusters) == 1
        listed += work.clusters.tolist()
    assert sorted(listed) == np.flatnonzero(size).tolist()
