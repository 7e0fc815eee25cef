"""Launches of csr_syrk and spectrum: second moments of clusters, their eigenvalues, and the first axis.

Clusters go in waves whose matrices fit a window of memory. A matrix is X'X or, of fewer rows than dimensions, XX', and a
large cluster's sum is cut into chunks by its own size alone: results depend on neither grid, window nor run. `blocks` and
`units` are set by hand, to prove that and to choose matrix units.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.csr import F64, I64, Bool, Csr
from fabric_pipelines.device.card import Card, DeviceArray

WARP = 32
SIDE_ROWS = 96  # matrices up to these are tiled by 32, by a warp a tile; above, by 128
WARP_SIDE = 64  # up to here a warp works at a matrix; above, a block
CHUNK_ROWS = 4096  # least rows of a chunk
CHUNK_TILES = 512  # tiles of a large cluster that keep a card busy
SCRATCH = 19  # kScratch of spectrum.cu
REAL = 6  # kReal of spectrum.cu: trace, sum, greatest, entropy, squares, logs
WINDOW_BYTES = 4 << 30  # of matrices held at once, one at least
FIELDS = 5  # kFields of csr_syrk.cu


class Work(NamedTuple):
    """A wave of clusters: list i64 [g, 5] of csr_syrk.cu; side i64 [g] of each matrix; vector and bounds i64 [g + 1], prefix sums of
    sides and of rows; values, of the whole wave with all chunks."""

    list: I64
    side: I64
    vector: I64
    bounds: I64
    values: int
    dim: int

    @property
    def wide(self) -> Bool:
        """Matrices of fewer rows than dimensions."""
        return self.list[:, 2] < self.dim

    @property
    def clusters(self) -> I64:
        return self.list[:, 0]


class Store(NamedTuple):
    """On the card: rows f32 [N, d], weight f64 [N], place i64 [n]: rows that count, cluster after cluster; mean f64 [K, d]."""

    rows: DeviceArray
    weight: DeviceArray
    place: DeviceArray
    mean: DeviceArray


class Shaped(NamedTuple):
    """real f64 [g, 6] and status int32 [g] of the matrices of a wave."""

    real: F64
    status: npt.NDArray[np.int32]


class Shapes(NamedTuple):
    """On the card: value f64 of all eigenvalues; axis f64 (nothing where none was asked); real f64 [g, 6]; status i32 [g]."""

    value: DeviceArray
    axis: DeviceArray
    real: DeviceArray
    status: DeviceArray


def chunk_rows(size: I64, dim: int) -> I64:
    """Rows that one team sums: all, unless a cluster has many rows for its tiles."""
    side = np.minimum(size, dim)
    tiles = -(-side // np.where(side <= SIDE_ROWS, WARP, 128))
    pairs = np.maximum(tiles * (tiles + 1) // 2, 1)
    chunks = np.minimum(-(-size // CHUNK_ROWS), -(-CHUNK_TILES // pairs))
    step: I64 = -(-size // np.maximum(chunks, 1))
    return np.where(size < dim, size, step)


def held_values(size: I64, dim: int) -> I64:
    """Of a cluster's matrix with all its chunks."""
    side = np.minimum(size, dim)
    values: I64 = side * side * -(-size // np.maximum(chunk_rows(size, dim), 1))
    return values


def held_bytes(size: I64, dim: int) -> I64:
    """Of all that a wave holds of a cluster: matrix, vectors, lists and results."""
    held: I64 = 8 * (
        held_values(size, dim) + np.minimum(size, dim) * (SCRATCH + 3) + FIELDS + REAL + 10
    )
    return held


def bytes_needed(csr: Csr) -> int:
    """Most device memory held beyond the rows: a window of matrices or the largest one, weights, places, means and sides."""
    held = held_bytes(csr.sizes[csr.sizes > 0], csr.dim)
    at_once = min(max(WINDOW_BYTES, int(held.max(initial=0))), int(held.sum()))
    return 17 * len(csr.rows) + 8 * csr.clusters * csr.dim + at_once


def waves(first: I64, size: I64, dim: int, window_bytes: int | None = None) -> Iterator[Work]:
    """first int64 [K]: the first place of each cluster; size int64 [K] rows. Clusters without rows are left out; the largest
    matrices first, so that a wave has matrices of a size."""
    window = WINDOW_BYTES if window_bytes is None else window_bytes
    side = np.minimum(size, dim)
    order = np.argsort(-side, kind="stable")[: int((size > 0).sum())]
    total = np.concatenate([[0], np.cumsum(held_bytes(size[order], dim))])
    start = 0
    while start < len(order):
        stop = int(np.searchsorted(total, total[start] + window, side="right")) - 1
        stop = max(stop, start + 1)
        yield _work(order[start:stop], first, size, dim)
        start = stop


def _work(cluster: I64, first: I64, size: I64, dim: int) -> Work:
    own = size[cluster]
    side, values = np.minimum(own, dim), held_values(own, dim)
    at = np.cumsum(values) - values
    columns = (cluster, first[cluster], own, chunk_rows(own, dim), at)
    listed = np.stack(columns, axis=1).astype(np.int64)
    return Work(listed, side, _prefix(side), _prefix(own), int(values.sum()), dim)


def shapes(
    gpu: Card, store: Store, work: Work, growth: float, *, centred: bool, side: DeviceArray | None
) -> Shaped:
    """Moments of a wave and what is known of their eigenvalues; `side` u8 [N] gets the sides of the first axis of each. Nothing of a
    wave is held when this returns."""
    matrices = csr_syrk(gpu, store, work, centred=centred)
    found = spectrum(gpu, matrices, work, growth, axes=side is not None)
    if side is not None:
        csr_syrk_sides(gpu, store, work, found.axis, side)
    return Shaped(gpu.download(found.real), gpu.download(found.status))


def csr_syrk(
    gpu: Card,
    store: Store,
    work: Work,
    *,
    centred: bool,
    blocks: int | None = None,
    units: bool = False,
) -> DeviceArray:
    """f64 [values] on the card, matrix after matrix. units: f64 matrix units, which only tiles of 128 have. Twin: reference.csr_syrk.moment."""
    out = gpu.empty(work.values, np.float64)
    small = work.side <= SIDE_ROWS
    for shape, wide in ((32, False), (32, True), (128, False), (128, True)):
        own = np.flatnonzero((small == (shape == 32)) & (work.wide == wide))
        if len(own) == 0:
            continue
        tiles = -(-work.side[own] // shape)
        _, _, size, step, _ = work.list[own].T
        items = _prefix(tiles * (tiles + 1) // 2 * -(-size // step))
        mode = "units_" if units and shape == 128 else ""
        gpu.launch(
            "csr_syrk",
            f"csr_syrk_{mode}{'wide' if wide else 'tall'}_{shape}",
            blocks or gpu.blocks_for(int(items[-1]) * (1 if shape == 32 else 8)),
            (*store, _send(gpu, work.list[own]), _send(gpu, items), len(own),
             int(items[-1]), work.dim, int(centred), out),
        )  # fmt: skip
    if work.values:
        squares = _prefix(work.side**2)
        gpu.launch(
            "csr_syrk",
            "csr_syrk_fold",
            blocks or gpu.blocks_for(-(-int(squares[-1]) // WARP)),
            (_send(gpu, work.list), _send(gpu, squares), len(work.side), work.dim, out),
        )
    return out


def spectrum(
    gpu: Card,
    matrices: DeviceArray,
    work: Work,
    growth: float,
    *,
    axes: bool,
    blocks: int | None = None,
) -> Shapes:
    """matrices as csr_syrk leaves them; overwritten. Twin: reference.spectrum.moments."""
    count, numbers = len(work.side), int(work.vector[-1])
    out = Shapes(
        gpu.empty(numbers, np.float64),
        gpu.empty(numbers if axes else 0, np.float64),
        gpu.empty((count, REAL), np.float64),
        gpu.empty(count, np.int32),
    )
    scratch = gpu.empty(SCRATCH * numbers, np.float64)
    start = np.cos(np.arange(int(work.side.max(initial=0))) * 1.7)  # as the CPU's inverse iteration
    given = [_send(gpu, part) for part in (work.list[:, 4], work.side, work.vector)]
    start_there = _send(gpu, start if axes else start[:1])
    for team, own in ((WARP, work.side <= WARP_SIDE), (256, work.side > WARP_SIDE)):
        which = np.flatnonzero(own)
        if len(which):
            gpu.launch(
                "spectrum",
                f"spectrum_{team}",
                blocks or gpu.blocks_for(len(which) * team // WARP),
                (matrices, *given, _send(gpu, which), len(which), float(growth), int(axes),
                 start_there, scratch, *out),
            )  # fmt: skip
    return out


def csr_syrk_sides(
    gpu: Card,
    store: Store,
    work: Work,
    axis: DeviceArray,
    side: DeviceArray,
    *,
    blocks: int | None = None,
) -> None:
    """side u8 [N]: 1 for rows of the wave on the positive side of their cluster's axis, 0 for its others. Twin:
    reference.csr_syrk.sides."""
    given = [_send(gpu, part) for part in (work.list, work.bounds, work.vector)]
    gpu.launch(
        "csr_syrk",
        "csr_syrk_sides",
        blocks or gpu.blocks_for(int(work.bounds[-1])),
        (*store, *given, axis, len(work.side), work.dim, side),
    )


def _prefix(counts: I64) -> I64:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _send(gpu: Card, host: npt.NDArray[Any]) -> DeviceArray:
    there = gpu.empty(host.shape, host.dtype)
    gpu.store(there, np.ascontiguousarray(host))
    return there
