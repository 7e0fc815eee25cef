"""Kernel family pair_tile against its twin: the source on the CPU, and the cubin on a real card."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels_tiles as tiles
from fabric_pipelines.analytics.reference import pair_tile as twin
from fabric_pipelines.device.card import Card
from fabric_pipelines.errors import UsageError
from tests.gpu.grid import DIMS, both

# side of the tile, dimension, sizes of clusters: the edges of both combined pairwise, where one run is cheap
EDGES = [
    (32, 1, [0, 33, 1, 2]), (32, 33, [31, 32, 0]), (32, 127, [3, 1, 33]), (32, 31, [65]),
    (64, 2, [65, 1]), (64, 65, [64, 2, 0]), (64, 129, [63]),
    (128, 3, [129]), (128, 36, [128, 1]), (128, 257, [127, 0, 2]), (128, 1025, [5]),
]  # fmt: skip
CARD_EDGES = [
    *((side, dim, sizes) for side, sizes in ((32, [0, 1, 2, 31, 32, 33, 127, 0]), (64, [63, 64, 65, 129]), (128, [1, 127, 128, 129, 257])) for dim in DIMS),
    *((side, dim, [4097, 513]) for side in (64, 128) for dim in (2, 33, 129)),
]  # fmt: skip


def cloud(dim: int, sizes: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """f32 rows less the mean of their cluster; in every cluster of ten and more a copy and a near pair."""
    rng = np.random.default_rng([seed, dim])
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows = rng.standard_normal((bounds[-1], dim)).astype(np.float32)
    for start, size in zip(bounds, sizes, strict=False):
        if size >= 10:
            rows[start + 7] = rows[start + 2]
            rows[start + 9] = rows[start + 4] * np.float32(1 + 1e-4)
    return rows, bounds


def upload(card: Card, rows: np.ndarray, bounds: np.ndarray) -> tiles.TileRows:
    dim = rows.shape[1]
    padded = np.zeros((len(rows), tiles.pitch_of(dim)), dtype=np.float32)
    padded[:, :dim] = rows
    norm2 = (rows.astype(np.float64) ** 2).sum(axis=1).astype(np.float32)
    return tiles.TileRows(card.upload(padded), card.upload(norm2), card.upload(bounds), bounds, dim)


def copies(rows: np.ndarray) -> np.ndarray:
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def run(
    card: Card, rows: np.ndarray, bounds: np.ndarray, k: int, **how: Any
) -> tuple[np.ndarray, ...]:
    held = upload(card, rows, bounds)
    found = tiles.pair_tile(card, held, card.upload(copies(rows)), k, **how)
    return tuple(card.download(part) for part in found)


def tolerance2(rows: np.ndarray) -> np.ndarray:
    """What the expansion may lose of a squared distance, a row, against its furthest."""
    dim = rows.shape[1]
    norm2 = (rows.astype(np.float64) ** 2).sum(axis=1)
    return 4 * max(1, dim) ** 0.5 * 2.0**-24 * (norm2 + norm2.max(initial=0)) + 1e-30


@both("side,dim,sizes", CARD_EDGES, EDGES)
def test_sums_extremes_and_neighbours_equal_the_twin(
    card: Card, side: int, dim: int, sizes: list[int]
) -> None:
    rows, bounds = cloud(dim, sizes)
    k = 1 + dim % 32
    total, total2, greatest2, near = run(card, rows, bounds, k, side=side)
    exact = twin.pair_rows(rows, bounds, k)
    several = np.maximum(np.repeat(sizes, sizes), 1)
    slack = tolerance2(rows)
    np.testing.assert_allclose(total, exact.total, rtol=2e-6, atol=1e-6)
    assert (np.abs(total2 - exact.total2) <= several * slack + 1e-6 * exact.total2).all()
    assert (np.abs(greatest2 - exact.greatest2) <= slack + 1e-6 * exact.greatest2).all()
    place, distance = tiles.pair_neighbours(near)
    assert np.array_equal(place < 0, exact.place < 0)
    gap2 = np.abs(distance.astype(np.float64) ** 2 - exact.distance**2)
    assert (gap2[place >= 0] <= np.broadcast_to(slack[:, None], gap2.shape)[place >= 0]).all()
    # what the list names is as near as it says, and equals come by their place
    told = np.full_like(exact.distance, np.nan)
    for start, stop in pairwise(bounds):
        apart = twin.distances(rows[start:stop].astype(np.float64))
        told[start:stop] = np.take_along_axis(apart, np.maximum(place[start:stop], 0), axis=1)
    assert (np.abs(told - exact.distance)[place >= 0] <= np.sqrt(slack).max()).all()
    assert (place[exact.distance == 0] == exact.place[exact.distance == 0]).all()


@both("dim", [1, 2, 31, 33, 128, 129, 1000], [1, 33, 130])
def test_a_signal_in_the_last_dimension_alone_is_seen(card: Card, dim: int) -> None:
    rows = np.zeros((5, dim), dtype=np.float32)
    rows[:, -1] = [0, 1, 3, 7, 8]
    for side in tiles.SIDES:
        total, _, greatest2, near = run(card, rows, np.array([0, 5]), 2, side=side)
        assert total.tolist() == [19, 16, 14, 18, 21]
        assert greatest2.tolist() == [64, 49, 25, 49, 64]
        assert tiles.pair_neighbours(near)[0].tolist() == [[1, 2], [0, 2], [1, 0], [4, 2], [3, 2]]


@both("dim", [3, 64, 768], [3, 40])
def test_copies_are_at_distance_0_and_go_by_their_number(card: Card, dim: int) -> None:
    """Also those that nobody named: the direct sum finds them."""
    rows = np.tile(np.random.default_rng(dim).standard_normal(dim).astype(np.float32), (40, 1))
    held = upload(card, rows, np.array([0, 40]))
    for named in (np.zeros(40, dtype=np.int64), np.arange(40)):
        found = tiles.pair_tile(card, held, card.upload(named), 3)
        assert not card.download(found.total).any()
        place, distance = tiles.pair_neighbours(card.download(found.near))
        assert not distance.any()
        assert place[[0, 1, 2, 39]].tolist() == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]


@both("dim", [3, 128, 768], [3, 40])
def test_any_grid_gives_the_same_bytes_and_any_tile_the_same_neighbours(
    card: Card, dim: int
) -> None:
    rows, bounds = cloud(dim, [40, 0, 70, 1, 33])
    first = run(card, rows, bounds, 5)
    for blocks in (1, 5):
        again = run(card, rows, bounds, 5, blocks=blocks)
        assert [part.tobytes() for part in again] == [part.tobytes() for part in first]
    for side in tiles.SIDES[1:]:
        assert run(card, rows, bounds, 5, side=side)[3].tobytes() == first[3].tobytes()


@both("side,count,k", [(32, 2000, 32), (64, 4097, 10), (128, 9000, 20)], [(32, 200, 32)])
def test_the_list_is_right_whatever_the_order_in_which_keys_come(
    card: Card, side: int, count: int, k: int
) -> None:
    """Falling distances offer every column: many new keys at a time, then few."""
    rows = np.zeros((count, 1), dtype=np.float32)
    rows[:, 0] = np.arange(count)[::-1]
    place, distance = tiles.pair_neighbours(run(card, rows, np.array([0, count]), k, side=side)[3])
    assert place[0].tolist() == list(range(1, k + 1))
    assert place[-1].tolist() == list(range(count - 2, count - 2 - k, -1))
    assert distance[0].tolist() == list(range(1, k + 1))


@both("dim", [1, 31, 128, 1025], [1, 33])
def test_rows_are_centred_and_those_of_weight_0_are_0_even_as_nan(card: Card, dim: int) -> None:
    rng = np.random.default_rng(dim)
    rows = (1000 + rng.standard_normal((9, dim))).astype(np.float32)
    weight = rng.uniform(0.5, 2, 9)
    rows[4], weight[4] = np.nan, 0.0
    place, bounds = np.array([8, 0, 4, 2, 1]), np.array([0, 0, 2, 5, 5])
    centre = 1000 + rng.standard_normal((4, dim))
    found = tiles.tile_rows(card, card.upload(rows), card.upload(weight), place, bounds, centre)
    expected = twin.centred(rows, weight, place, bounds, centre)
    out = card.download(found.rows)
    assert np.array_equal(out[:, :dim], expected)
    assert not out[:, dim:].any()
    assert not out[2].any()
    norm2 = (expected.astype(np.float64) ** 2).sum(axis=1)
    np.testing.assert_allclose(card.download(found.norm2), norm2, rtol=1e-7)


@both("dim,sizes", [(dim, [129, 257]) for dim in DIMS if dim > tiles.DIRECT_DIM] + [(130, [4097])],
      [(37, [129]), (128, [5])])  # fmt: skip
def test_matrix_units_find_what_multiply_adds_do(card: Card, dim: int, sizes: list[int]) -> None:
    """A factor is two TF32 numbers: 2^-22 of a product is lost, where one TF32 number would lose 2^-11. The last dimension is
    large: at 129 and 37 it is alone in its slab."""
    rows, bounds = cloud(dim, sizes)
    rows[:, -1] *= 8
    total, total2, greatest2, near = run(card, rows, bounds, 5, side=128, split=True)
    plain = run(card, rows, bounds, 5, side=128)
    slack = tolerance2(rows)
    np.testing.assert_allclose(total, plain[0], rtol=1e-6)
    np.testing.assert_allclose(total2, plain[1], rtol=1e-6)
    assert (np.abs(greatest2 - plain[2]) <= slack + 1e-6 * plain[2]).all()
    distance = [tiles.pair_neighbours(keys)[1].astype(np.float64) ** 2 for keys in (near, plain[3])]
    gap2 = np.nan_to_num(np.abs(distance[0] - distance[1]))
    assert (gap2 <= slack[:, None]).all()


def test_more_neighbours_than_a_warp_lists_are_refused_by_number(card: Card) -> None:
    with pytest.raises(UsageError, match="33 neighbours of a row; pair_tile lists 1 to 32"):
        run(card, *cloud(3, [4]), 33)
