"""Launches of the tile families of cuda/ (pair_tile, gauss_tile, centre_tile): all pairs of two sets of rows.

A cluster's row blocks are numbered through one prefix sum a size of tile, so a cluster of 10^7 rows and 10^6 clusters of
three are one launch. What is folded per row depends on neither grid nor run; `blocks` and `side` are set by hand only to
prove that. Nothing here holds n x n or N x K.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.csr import F32, F64, I64
from fabric_pipelines.device.card import Card, DeviceArray
from fabric_pipelines.device.gpu import BLOCKS_PER_MULTIPROCESSOR
from fabric_pipelines.errors import UsageError

WARP = 32
NEIGHBOURS_MAX = 32  # a lane of a warp holds one
DIRECT_DIM = 32  # up to here differences are squared and no digit is lost; beyond, products
SIDES = (32, 64, 128)  # rows of a block; the first has a warp a block, the others 256 threads
SIDE_ROWS = (96, 512)  # clusters up to these use the first and the second
SET_ROWS = 1 << 31  # numbers inside a set fit 32 bits
NO_KEY = np.uint64(2**64 - 1)


class Blocks(NamedTuple):
    """Row blocks of `side` rows: cluster i64 [m], and the number of each one's first block, i64 [m + 1]."""

    side: int
    cluster: I64
    first: I64


class TileRows(NamedTuple):
    """rows f32 [n, pitch] less a centre, zeros past the dimension; norm2 f32 [n]; indptr i64 [K + 1] on the card and here."""

    rows: DeviceArray
    norm2: DeviceArray
    indptr: DeviceArray
    bounds: I64
    dim: int


class PairSums(NamedTuple):
    """Per row, on the card: total and total2 f64 of distances and their squares, greatest2 f32, near u64 [n, k]."""

    total: DeviceArray
    total2: DeviceArray
    greatest2: DeviceArray
    near: DeviceArray


class GaussSums(NamedTuple):
    """Per row, on the card: least f32, squared distance to the nearest; weight, first and second f64: sums over the others
    of w = exp(-(d2 - least) / 2T), w (d2 - least), w (d2 - least)^2."""

    least: DeviceArray
    weight: DeviceArray
    first: DeviceArray
    second: DeviceArray


class CentrePoints(NamedTuple):
    """Per row, on the card: own2 f32, squared distance to its own centre; near u64, key of the nearest other one; a and b f64,
    mean squared distance to the rest of its cluster and to the nearest other cluster."""

    own2: DeviceArray
    near: DeviceArray
    a: DeviceArray
    b: DeviceArray


class CentrePartners(NamedTuple):
    """Per centre, on the card: key u64, greatest (S_c + S_j) / |c - j| and the complement of j (0: none); coincident i32."""

    key: DeviceArray
    coincident: DeviceArray


def pitch_of(dim: int) -> int:
    """Rows start on 16-byte borders."""
    return -(-dim // 4) * 4


def blocks_of(size: I64, *, least: int = 2, side: int | None = None) -> Iterator[Blocks]:
    """size int64 [K] -> the row blocks of clusters of `least` rows and more, by side of tile."""
    if (size >= SET_ROWS).any():
        raise UsageError(
            f"cluster {int(size.argmax())} has {int(size.max()):,} rows; a tile counts up to "
            f"{SET_ROWS - 1:,}: split it before it is measured"
        )
    chosen = (
        np.searchsorted(SIDE_ROWS, size) if side is None else np.full(len(size), SIDES.index(side))
    )
    for number, each in enumerate(SIDES):
        cluster = np.flatnonzero((chosen == number) & (size >= least))
        if len(cluster):
            first = np.zeros(len(cluster) + 1, dtype=np.int64)
            np.cumsum(-(-size[cluster] // each), out=first[1:])
            yield Blocks(each, cluster, first)


def tile_rows(
    gpu: Card,
    rows: DeviceArray,
    weight: DeviceArray,
    place: I64,
    bounds: I64,
    centre: F64,
    *,
    blocks: int | None = None,
) -> TileRows:
    """rows f32 [N, d] and weight f64 [N] on the card; place int64 [n]: rows to take, cluster after cluster; bounds int64
    [K + 1] over them; centre f64 [K, d]. Twin: reference.pair_tile.centred."""
    dim = rows.shape[1]
    pitch, count = pitch_of(dim), len(place)
    out, norm2 = gpu.empty((count, pitch), np.float32), gpu.empty(count, np.float32)
    tiles = TileRows(out, norm2, _send(gpu, bounds), bounds, dim)
    if count:
        tile_rows_into(
            gpu, rows, weight, _send(gpu, place), _send(gpu, centre), tiles, blocks=blocks
        )
    return tiles


def tile_rows_into(
    gpu: Card,
    rows: DeviceArray,
    weight: DeviceArray,
    place: DeviceArray,
    centre: DeviceArray,
    out: TileRows,
    *,
    blocks: int | None = None,
) -> None:
    """tile_rows into arrays that exist, from arrays on the card: the launch alone."""
    count, pitch = out.rows.shape
    gpu.launch(
        "pair_tile",
        "pair_tile_rows",
        blocks or gpu.blocks_for(count),
        (rows, weight, place, out.indptr, centre, count, len(out.bounds) - 1, out.dim, pitch,
         out.rows, out.norm2),
    )  # fmt: skip


def pair_tile(
    gpu: Card,
    tiles: TileRows,
    copy: DeviceArray,
    k: int,
    *,
    blocks: int | None = None,
    side: int | None = None,
    split: bool = False,
) -> PairSums:
    """split: products on matrix units, which only tiles of 128 rows beyond DIRECT_DIM dimensions have. copy i64 [n], equal for equal rows of a cluster; k from 1 to NEIGHBOURS_MAX. Rows of clusters of one are 0 and
    have no neighbour. Twin: reference.pair_tile.pair_rows."""
    if not 1 <= k <= NEIGHBOURS_MAX:
        raise UsageError(f"{k} neighbours of a row; pair_tile lists 1 to {NEIGHBOURS_MAX}")
    count = len(tiles.rows)
    out = PairSums(
        gpu.empty(count, np.float64),
        gpu.empty(count, np.float64),
        gpu.empty(count, np.float32),
        gpu.empty((count, k), np.uint64),
    )
    for part in blocks_of(np.diff(tiles.bounds), least=1, side=side):
        mode = "split_" if split and part.side == 128 and tiles.dim > DIRECT_DIM else None
        _launch(gpu, "pair_tile", tiles, part, (copy,), (k,), out, blocks, mode)
    return out


def gauss_tile(
    gpu: Card,
    tiles: TileRows,
    copy: DeviceArray,
    temperature: F64,
    *,
    blocks: int | None = None,
    side: int | None = None,
) -> GaussSums:
    """temperature f64 [K], above 0: clusters where it is not are left out, and what is there of their rows means nothing;
    so are clusters of one. Twin: reference.gauss_tile.gauss_rows."""
    count = len(tiles.rows)
    out = GaussSums(gpu.empty(count, np.float32), *(gpu.empty(count, np.float64) for _ in range(3)))
    size = np.where(temperature > 0, np.diff(tiles.bounds), 0)
    heat = _send(gpu, temperature)
    for part in blocks_of(size, side=side):
        _launch(gpu, "gauss_tile", tiles, part, (copy, heat), (), out, blocks)
    return out


def centre_points(
    gpu: Card,
    rows: TileRows,
    centres: TileRows,
    own: DeviceArray,
    spread: DeviceArray,
    size: DeviceArray,
    *,
    blocks: int | None = None,
    side: int | None = None,
) -> CentrePoints:
    """rows and centres less the same point; own i64 [n]: number of a row's centre; spread = W / n and size f64 [m]. Twin:
    reference.centre_tile.centre_points."""
    count = len(rows.rows)
    out = CentrePoints(
        gpu.empty(count, np.float32),
        gpu.empty(count, np.uint64),
        gpu.empty(count, np.float64),
        gpu.empty(count, np.float64),
    )
    if count:
        centre_points_into(gpu, rows, centres, own, spread, size, out, blocks=blocks, side=side)
    return out


def centre_points_into(
    gpu: Card,
    rows: TileRows,
    centres: TileRows,
    own: DeviceArray,
    spread: DeviceArray,
    size: DeviceArray,
    out: CentrePoints,
    *,
    blocks: int | None = None,
    side: int | None = None,
) -> None:
    """centre_points of one row or more into arrays that exist: the launch alone."""
    count, listed = len(rows.rows), len(centres.rows)
    chosen = side or _side_for(gpu, count)
    gpu.launch(
        "centre_tile",
        f"centre_tile_points_{_mode(rows.dim)}{chosen}",
        blocks or gpu.blocks_for(_warps(chosen, -(-count // chosen))),
        (rows.rows, rows.norm2, centres.rows, centres.norm2, own, spread, size, count, listed,
         rows.rows.shape[1], *out),
    )  # fmt: skip


def centre_partners(
    gpu: Card,
    centres: TileRows,
    radius: DeviceArray,
    same2: float,
    *,
    blocks: int | None = None,
    side: int | None = None,
) -> CentrePartners:
    """radius f32 [m] = S; centres up to same2 apart are at one place. Twin: reference.centre_tile.centre_partners."""
    listed = len(centres.rows)
    out = CentrePartners(gpu.empty(listed, np.uint64), gpu.empty(listed, np.int32))
    if listed:
        chosen = side or _side_for(gpu, listed)
        gpu.launch(
            "centre_tile",
            f"centre_tile_partners_{_mode(centres.dim)}{chosen}",
            blocks or gpu.blocks_for(_warps(chosen, -(-listed // chosen))),
            (
                centres.rows,
                centres.norm2,
                radius,
                float(same2),
                listed,
                centres.rows.shape[1],
                *out,
            ),
        )
    return out


def _side_for(gpu: Card, rows: int) -> int:
    """128 rows a block where that gives every multiprocessor its two blocks, 64 below."""
    if rows >= SET_ROWS:
        raise UsageError(f"{rows:,} rows at once; a tile counts up to {SET_ROWS - 1:,}")
    resident = gpu.blocks_for(SET_ROWS) // (BLOCKS_PER_MULTIPROCESSOR // 2)
    return 128 if rows > 128 * (resident - 1) else 64


def _launch(
    gpu: Card, family: str, tiles: TileRows, part: Blocks, given: tuple[DeviceArray, ...],
    numbers: tuple[int, ...], out: tuple[DeviceArray, ...], blocks: int | None,
    mode: str | None = None,
) -> None:  # fmt: skip
    cluster, first = _send(gpu, part.cluster), _send(gpu, part.first)
    items = int(part.first[-1])
    gpu.launch(
        family,
        f"{family}_{mode or _mode(tiles.dim)}{part.side}",
        blocks or gpu.blocks_for(_warps(part.side, items)),
        (tiles.rows, tiles.norm2, tiles.indptr, cluster, first, *given, len(part.cluster), items,
         tiles.rows.shape[1], *numbers, *out),
    )  # fmt: skip


def _send(gpu: Card, host: npt.NDArray[Any]) -> DeviceArray:
    there = gpu.empty(host.shape, host.dtype)
    gpu.store(there, host)
    return there


def _mode(dim: int) -> str:
    return "direct_" if dim <= DIRECT_DIM else ""


def _warps(side: int, items: int) -> int:
    return items if side == WARP else 8 * items


def pair_neighbours(near: npt.NDArray[np.uint64]) -> tuple[I64, F32]:
    """Keys u64 [n, k] -> places in the cluster int64 (-1: no such neighbour) and distances f32 (NaN there)."""
    none = near == NO_KEY
    place = np.where(none, -1, (near & np.uint64(2**32 - 1)).astype(np.int64))
    distance: F32 = np.sqrt(squares(near))
    return place, distance  # the bits of NO_KEY are a NaN


def nearest_centre(near: npt.NDArray[np.uint64]) -> tuple[I64, F32]:
    """Keys u64 [n] -> numbers of the nearest other centres int64 (-1: none) and squared distances f32 (NaN there)."""
    number = np.where(near == NO_KEY, -1, (near & np.uint64(2**32 - 1)).astype(np.int64))
    return number, squares(near)


def squares(near: npt.NDArray[np.uint64]) -> F32:
    """The squared distances of keys, f32 as `near`; NaN where there is no neighbour."""
    return (near >> np.uint64(32)).astype(np.uint32).view(np.float32)


def greatest_partner(key: npt.NDArray[np.uint64]) -> tuple[I64, F32]:
    """Keys u64 [m] -> partners int64 (-1: none) and ratios f32 (NaN there)."""
    none = key == 0
    partner = np.where(none, -1, (~key & np.uint64(2**32 - 1)).astype(np.int64))
    ratio = (key >> np.uint64(32)).astype(np.uint32).view(np.float32)
    return partner, np.where(none, np.float32(np.nan), ratio)
