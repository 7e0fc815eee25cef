"""P9, pairs: every distance inside each cluster, its sums, and the nearest neighbours of every row.

A neighbour key is a squared distance whose last 12 bits are the column: one partition of integers then selects
by distance and, among equals, by id. 2^-40 of a squared distance is given up for it, which lies between rounding
(equal distances stay equal) and anything that two different rows show.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.csr import (
    F64,
    I64,
    Csr,
    segment_max,
    segment_sum,
    unknown,
)
from fabric_pipelines.analytics.pair_tiles import COLUMNS_MAX, tile_values, tiles
from fabric_pipelines.analytics.stacks import Members, Stack
from fabric_pipelines.analytics.sweeps import Sweeps, beside_tiles
from fabric_pipelines.analytics.threads import over_rows
from fabric_pipelines.analytics.tiles import PairRows, Tiles

NEIGHBOURS = 10  # k of the k-NN graph, of hubness and of the kernel temperature
LOF_NEIGHBOURS = 20
KEY_COLUMN = np.int64(COLUMNS_MAX - 1)
# Columns of one partition: up to here it takes 2 ns a key, beyond 9 (numpy 2.4, AVX-512).
SELECT_COLUMNS = 256
LAST_KEY = np.iinfo(np.int64).max

Rows = npt.NDArray[Any]  # int32 where the row numbers fit, else int64


@dataclass(frozen=True, slots=True)
class Neighbours:
    """P9. Per cluster, NaN below two rows: sum of distances over ordered pairs, greatest distance; imbalance, the
    greatest relative error over rows of sum_j |x_i - x_j|^2 = n r_i^2 + W; mean and deviation of the distance to the nearest; its TwoNN dimension, NaN without one; median
    distance to the neighbour min(10, n - 1). Per row, over min(20, n - 1) nearest others by (distance, id): row
    numbers [N, k] (-1 beyond the end) and distances f64 [N, k] (NaN there)."""

    distance_sum: F64
    imbalance: F64
    diameter: F64
    nearest_mean: F64
    nearest_deviation: F64
    dimension: F64
    bandwidth: F64
    row: Rows
    distance: F64
    rounding: float  # relative, of the squared distances; 0: float64


def neighbours(
    csr: Csr, sweeps: Sweeps, members: Members, radius2: F64, copy_of: I64
) -> Neighbours:
    """radius2 f64 [N] as P3 left it; copy_of int64 [N] as P4 left it."""
    tiles = sweeps.tiles
    width = int(min(LOF_NEIGHBOURS, max(0, members.size.max(initial=0) - 1)))
    kind = np.int32 if len(csr.rows) <= np.iinfo(np.int32).max else np.int64
    out = Neighbours(
        distance_sum=unknown(csr.clusters),
        imbalance=unknown(csr.clusters),
        diameter=unknown(csr.clusters),
        nearest_mean=unknown(csr.clusters),
        nearest_deviation=unknown(csr.clusters),
        dimension=unknown(csr.clusters),
        bandwidth=unknown(csr.clusters),
        row=np.full((len(csr.rows), width), -1, dtype=kind),
        distance=np.full((len(csr.rows), width), np.nan),
        rounding=0.0 if tiles is None else tiles.rounding,
    )
    if tiles is None:
        members.sweep(
            2,
            lambda count: tile_values(count, csr.dim),
            lambda stack: _search(stack, radius2, copy_of, out),
        )
    elif width:
        _by_tiles(csr, members, radius2, copy_of, tiles, out)
    if width:
        _summarise(csr, beside_tiles(sweeps, csr), members.size, out)
    return out


def flop(size: F64, dim: int) -> float:
    return float(((2 * dim + 10) * size**2).sum())


def _by_tiles(
    csr: Csr, members: Members, radius2: F64, copy_of: I64, tiles: Tiles, out: Neighbours
) -> None:
    owner, several = csr.owner(), members.size > 1
    total, total2, greatest2 = np.zeros((3, len(members.places)))
    for part, found in tiles.pairs(members, radius2, copy_of, out.row.shape[1]):
        total[part], total2[part], greatest2[part] = found.total, found.total2, found.greatest2
        listing = partial(_list, members, owner, members.places[part], found, out)
        over_rows(listing, len(found.place), out.row.shape[1])
    bounds = np.append(members.first, len(members.places))
    within2 = radius2[members.places]
    sizes = np.repeat(members.size, members.size)
    known = sizes * within2 + np.repeat(segment_sum(within2, bounds), members.size)
    error = np.abs(total2 - known)
    relative = np.divide(error, known, out=np.zeros_like(error), where=known > 0)
    out.distance_sum[several] = segment_sum(total, bounds)[several]
    out.imbalance[several] = segment_max(relative, bounds)[several]
    out.diameter[several] = np.sqrt(segment_max(greatest2, bounds)[several])


def _list(
    members: Members, owner: I64, at: I64, found: PairRows, out: Neighbours, rows: slice
) -> None:
    """Places in clusters become rows of the store: of a range of the rows `at`."""
    here, place = at[rows], found.place[rows]
    there = members.first[owner[here]][:, None] + np.maximum(place, 0)
    out.row[here] = np.where(place >= 0, members.places[there], -1)
    out.distance[here] = found.distance[rows]


def _search(stack: Stack, radius2: F64, copy_of: I64, out: Neighbours) -> None:
    groups, count = len(stack.clusters), stack.count
    k = min(LOF_NEIGHBOURS, count - 1)
    total, greatest2 = np.zeros((2, groups))
    row_sum = np.zeros((groups, count))
    best = _Nearest(groups, 0, k)
    for tile in tiles(stack, radius2, copy_of):
        rows = tile.rows
        if tile.columns.start == 0:
            best = _Nearest(groups, rows.stop - rows.start, k)
        distance2 = tile.distance2
        row_sum[:, rows] += distance2.sum(axis=2)
        total += np.sqrt(distance2).sum(axis=(1, 2))
        np.maximum(greatest2, distance2.max(axis=(1, 2)), out=greatest2)
        here, there = tile.diagonal
        distance2[:, here, there] = np.inf
        best.offer(distance2, tile.columns.start)
        if tile.columns.stop == count:
            place, distance = best.ranked()
            at = stack.places[:, rows]
            out.row[at, :k] = np.take_along_axis(
                stack.places, place.reshape(groups, -1), axis=1
            ).reshape(place.shape)
            out.distance[at, :k] = distance
    out.distance_sum[stack.clusters] = total
    out.imbalance[stack.clusters] = _imbalance(row_sum, radius2[stack.places])
    out.diameter[stack.clusters] = np.sqrt(greatest2)


def _imbalance(row_sum: F64, norm2: F64) -> F64:
    """Of centred rows [g, n]: each row's squared distances have a known sum, whatever the products did."""
    known = norm2.shape[1] * norm2 + norm2.sum(axis=1, keepdims=True)
    error = np.abs(row_sum - known)
    relative = np.divide(error, known, out=np.zeros_like(error), where=known > 0)
    worst: F64 = relative.max(axis=1)
    return worst


def _summarise(csr: Csr, sweeps: Sweeps, size: I64, out: Neighbours) -> None:
    owner, listed = csr.owner(), out.row[:, 0] >= 0
    several = size > 1
    count = np.where(several, size, np.nan)

    def total(values: F64) -> F64:
        return segment_sum(np.where(listed, values, 0.0), csr.indptr)

    nearest = out.distance[:, 0]
    out.nearest_mean[:] = total(nearest) / count
    apart = nearest - out.nearest_mean[owner]
    out.nearest_deviation[:] = np.sqrt(total(apart**2) / count)
    if out.row.shape[1] > 1:
        out.dimension[:] = _two_nn(csr, nearest, out.distance[:, 1])
    last = np.clip(size[owner] - 2, 0, NEIGHBOURS - 1)
    furthest = out.distance[np.arange(len(owner)), last]
    out.bandwidth[:] = sweeps.quantiles(furthest, listed, (0.5,))[0]


def _two_nn(csr: Csr, first: F64, second: F64) -> F64:
    """Maximum likelihood of the ratio's exponent, unbiased: (rows - 1) / sum ln(r2 / r1) over rows with r1 > 0."""
    told = first > 0  # not so where it is NaN
    ratio = np.divide(second, first, out=np.ones_like(first), where=told & (second > 0))
    spread = segment_sum(np.log(ratio), csr.indptr)
    rows = segment_sum(told.astype(np.float64), csr.indptr)
    known = (rows > 1) & (spread > 0)
    found: F64 = np.divide(rows - 1, spread, out=np.full(len(spread), np.nan), where=known)
    return found


class _Nearest:
    """The k least of the squared distances offered to each row [g, rows], by (distance, place)."""

    def __init__(self, groups: int, rows: int, k: int) -> None:
        self._k = k
        self._bits = np.full((groups, rows, 0), LAST_KEY)
        self._place = np.zeros((groups, rows, 0), dtype=np.int64)

    def offer(self, distance2: F64, first: int) -> None:
        """Columns are the places from `first` on. Overwrites `distance2`."""
        keys = distance2.view(np.int64)
        keys += (KEY_COLUMN + 1) // 2  # to the nearest: round numbers lie far from where this cuts
        keys &= ~KEY_COLUMN
        keys |= np.arange(keys.shape[2])
        keys = _least(keys, self._k)
        bits = np.concatenate([self._bits, keys & ~KEY_COLUMN], axis=2)
        place = np.concatenate([self._place, (keys & KEY_COLUMN) + first], axis=2)
        if first:
            order = np.lexsort((place, bits), axis=2)[:, :, : self._k]
            bits = np.take_along_axis(bits, order, axis=2)
            place = np.take_along_axis(place, order, axis=2)
        self._bits, self._place = bits, place

    def ranked(self) -> tuple[I64, F64]:
        return self._place, np.sqrt(self._bits.view(np.float64))


def _least(keys: I64, k: int) -> I64:
    """The k least keys of each row, rising; fewer where there are fewer."""
    while keys.shape[2] > SELECT_COLUMNS:
        kept = []
        for low in range(0, keys.shape[2], SELECT_COLUMNS):
            part = keys[:, :, low : low + SELECT_COLUMNS]
            kept.append(np.partition(part, k, axis=2)[:, :, :k] if part.shape[2] > k else part)
        keys = np.concatenate(kept, axis=2)
    return np.sort(keys, axis=2)[:, :, :k]
