"""Launches of row_admit, csr_centroid, csr_radius, csr_reduce and csr_select's quantiles: what is told of the rows of a cluster.

Each comes twice: with arrays of its own, and `_into` arrays that exist, which queues and does nothing else.
"""

from __future__ import annotations

import numpy as np

from fabric_pipelines.analytics.card_plan import REDUCE_ROWS, RUN_ROWS, SLAB, window_width
from fabric_pipelines.device.card import Card, DeviceArray
from fabric_pipelines.device.gpu import THREADS

WARP = 32
SHARES_MAX = 4  # kShares of csr_select.cu


def lanes_for(dim: int) -> int:
    """Lanes that share a row: four loads of 16 bytes a lane, up to the 8 lanes that fill a 128-byte line;
    the whole warp when rows are long."""
    for lanes in (1, 2, 4):
        if dim <= 16 * lanes:
            return lanes
    return 8 if dim <= 1024 else WARP


def variant(gpu: Card, rows: DeviceArray) -> str:
    """16-byte loads need every row to start on a 16-byte border."""
    aligned = rows.shape[1] % 4 == 0 and gpu.offset_of(rows) % 16 == 0
    return "wide" if aligned else "any"


def row_admit(
    gpu: Card, rows: DeviceArray, min_norm: float, *, blocks: int | None = None
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """rows f32 [N, d] -> norm2 f64 [N], flag u8 [N], hash u64 [N, 2]. Twin: reference.row_admit."""
    count = len(rows)
    norm2, flag = gpu.empty(count, np.float64), gpu.empty(count, np.uint8)
    row_hash = gpu.empty((count, 2), np.uint64)
    if count:
        row_admit_into(gpu, rows, min_norm, (norm2, flag, row_hash), blocks=blocks)
    return norm2, flag, row_hash


def row_admit_into(
    gpu: Card,
    rows: DeviceArray,
    min_norm: float,
    out: tuple[DeviceArray, DeviceArray, DeviceArray],
    *,
    blocks: int | None = None,
) -> None:
    """row_admit into arrays that exist: the launch alone."""
    count, dim = rows.shape
    lanes = lanes_for(dim)
    gpu.launch(
        "row_admit",
        f"row_admit_{variant(gpu, rows)}_{lanes}",
        blocks or gpu.blocks_for(-(-count * lanes // WARP)),
        (rows, count, dim, float(min_norm * min_norm), *out),
    )


def csr_centroid(
    gpu: Card,
    rows: DeviceArray,
    weight: DeviceArray,
    indptr: DeviceArray,
    *,
    blocks: int | None = None,
    window_bytes: int | None = None,
) -> DeviceArray:
    """rows f32 [N, d], weight f64 [N], indptr i64 [K+1] -> sums f64 [K, d]. Twin: reference.csr_centroid.

    Partial sums are held for a window of dimensions at a time, so that they never outgrow `window_bytes`
    unless 128 dimensions alone do.
    """
    (count, dim), clusters = rows.shape, len(indptr) - 1
    total = gpu.empty((clusters, dim), np.float64)
    if clusters == 0:
        return total
    slots = centroid_slots(count, clusters)
    width = window_width(slots, dim, window_bytes)
    csr_centroid_into(
        gpu, rows, weight, indptr, gpu.empty(slots * width, np.float64), total, blocks=blocks
    )
    return total


def centroid_slots(count: int, clusters: int) -> int:
    """Partial sums of one dimension."""
    return -(-count // RUN_ROWS) + clusters


def csr_centroid_into(
    gpu: Card,
    rows: DeviceArray,
    weight: DeviceArray,
    indptr: DeviceArray,
    partial: DeviceArray,
    total: DeviceArray,
    *,
    blocks: int | None = None,
) -> None:
    """csr_centroid into arrays that exist; partial f64 [slots * width] says how many dimensions are summed at once."""
    (count, dim), clusters = rows.shape, len(indptr) - 1
    runs = -(-count // RUN_ROWS)
    width = len(partial) // centroid_slots(count, clusters)
    for low in range(0, dim, width):
        wide = min(width, dim - low)
        if count:
            gpu.launch(
                "csr_centroid",
                f"csr_centroid_{variant(gpu, rows)}",
                blocks or gpu.blocks_for(runs * -(-wide // SLAB)),
                (rows, weight, indptr, count, dim, clusters, low, wide, partial),
            )
        gpu.launch(
            "csr_centroid",
            "csr_centroid_fold",
            blocks or gpu.blocks_for(-(-clusters * wide // WARP)),
            (partial, indptr, dim, clusters, low, wide, total),
        )


def csr_radius(
    gpu: Card,
    rows: DeviceArray,
    weight: DeviceArray,
    indptr: DeviceArray,
    centroid: DeviceArray,
    *,
    blocks: int | None = None,
) -> DeviceArray:
    """rows f32 [N, d], weight f64 [N], indptr i64 [K+1], centroid f64 [K, d] -> squared radius f64 [N].
    Twin: reference.csr_radius."""
    radius2 = gpu.empty(len(rows), np.float64)
    csr_radius_into(gpu, rows, weight, indptr, centroid, radius2, blocks=blocks)
    return radius2


def csr_radius_into(
    gpu: Card,
    rows: DeviceArray,
    weight: DeviceArray,
    indptr: DeviceArray,
    centroid: DeviceArray,
    radius2: DeviceArray,
    *,
    blocks: int | None = None,
) -> None:
    """csr_radius into an array that exists."""
    (count, dim), clusters = rows.shape, len(indptr) - 1
    if count:
        gpu.launch(
            "csr_radius",
            f"csr_radius_{variant(gpu, rows)}_{lanes_for(dim)}",
            blocks or gpu.blocks_for(-(-count // 64)),
            (rows, weight, indptr, centroid, count, dim, clusters, radius2),
        )


def csr_reduce(
    gpu: Card,
    value: DeviceArray,
    flag: DeviceArray,
    ids: DeviceArray,
    indptr: DeviceArray,
    *,
    blocks: int | None = None,
) -> tuple[DeviceArray, DeviceArray]:
    """value f64 [N], flag u8 [N] (0 counts), ids i64 [N], indptr i64 [K+1] -> real f64 [K, 4]: sum, m2, least, most;
    whole i64 [K, 2]: count, id of the least. Twin: reference.csr_reduce."""
    clusters = len(indptr) - 1
    slots = reduce_slots(len(value), clusters)
    out = gpu.empty((clusters, 4), np.float64), gpu.empty((clusters, 2), np.int64)
    if clusters:
        partial = gpu.empty((slots, 4), np.float64), gpu.empty((slots, 2), np.int64)
        csr_reduce_into(gpu, value, flag, ids, indptr, partial, out, blocks=blocks)
    return out


def reduce_slots(count: int, clusters: int) -> int:
    """Partials of csr_reduce."""
    return -(-count // REDUCE_ROWS) + clusters


def csr_reduce_into(
    gpu: Card,
    value: DeviceArray,
    flag: DeviceArray,
    ids: DeviceArray,
    indptr: DeviceArray,
    partial: tuple[DeviceArray, DeviceArray],
    out: tuple[DeviceArray, DeviceArray],
    *,
    blocks: int | None = None,
) -> None:
    """csr_reduce into arrays that exist; partial f64 [slots, 4] and i64 [slots, 2]."""
    count, clusters = len(value), len(indptr) - 1
    runs = -(-count // REDUCE_ROWS)
    if count:
        gpu.launch(
            "csr_reduce",
            "csr_reduce_moments",
            blocks or gpu.blocks_for(runs),
            (value, flag, ids, indptr, count, clusters, *partial),
        )
    gpu.launch(
        "csr_reduce",
        "csr_reduce_fold",
        blocks or gpu.blocks_for(clusters),
        (*partial, indptr, clusters, *out),
    )


def csr_words(
    gpu: Card, word: DeviceArray, indptr: DeviceArray, *, blocks: int | None = None
) -> DeviceArray:
    """word u64 [N], indptr i64 [K+1] -> u64 [K, 2]: sum modulo 2^64, xor. Twin: reference.csr_reduce.csr_words."""
    clusters = len(indptr) - 1
    total = gpu.empty((clusters, 2), np.uint64)
    if clusters:
        partial = gpu.empty((reduce_slots(len(word), clusters), 2), np.uint64)
        csr_words_into(gpu, word, indptr, partial, total, blocks=blocks)
    return total


def csr_words_into(
    gpu: Card,
    word: DeviceArray,
    indptr: DeviceArray,
    partial: DeviceArray,
    total: DeviceArray,
    *,
    blocks: int | None = None,
) -> None:
    """csr_words into arrays that exist; partial u64 [slots, 2]."""
    count, clusters = len(word), len(indptr) - 1
    runs = -(-count // REDUCE_ROWS)
    if count:
        gpu.launch(
            "csr_reduce",
            "csr_reduce_words",
            blocks or gpu.blocks_for(runs),
            (word, indptr, count, clusters, partial),
        )
    gpu.launch(
        "csr_reduce",
        "csr_reduce_words_fold",
        blocks or gpu.blocks_for(clusters),
        (partial, indptr, clusters, total),
    )


def csr_quantiles(
    gpu: Card,
    value: DeviceArray,
    flag: DeviceArray,
    indptr: DeviceArray,
    share: DeviceArray,
    *,
    blocks: int | None = None,
) -> DeviceArray:
    """value f64 [N], flag u8 [N] (0 counts), indptr i64 [K+1], share f64 [T], T <= 4 -> type-7 quantiles f64 [K, T].
    Twin: reference.csr_select.csr_quantiles."""
    quantile = gpu.empty((len(indptr) - 1, len(share)), np.float64)
    csr_quantiles_into(gpu, value, flag, indptr, share, quantile, blocks=blocks)
    return quantile


def csr_quantiles_into(
    gpu: Card,
    value: DeviceArray,
    flag: DeviceArray,
    indptr: DeviceArray,
    share: DeviceArray,
    quantile: DeviceArray,
    *,
    blocks: int | None = None,
) -> None:
    """csr_quantiles into an array that exists."""
    clusters, shares = len(indptr) - 1, len(share)
    assert 1 <= shares <= SHARES_MAX
    for size, warps in (("small", clusters), ("large", clusters * THREADS // WARP)):
        if clusters:
            gpu.launch(
                "csr_select",
                f"csr_select_{size}",
                blocks or gpu.blocks_for(warps),
                (value, flag, indptr, clusters, share, shares, quantile),
            )
