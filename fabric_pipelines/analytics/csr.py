"""Rows grouped by cluster: the one input of all analytics, with reductions over its segments.

Cluster c owns rows indptr[c]:indptr[c+1]. Empty clusters are legal everywhere: a reduction gives them its
neutral element, and the caller's status says that there is nothing to report. All offsets are int64, since
row x dim passes 2^31 at one million rows of 4,096. Refuses input that is not in order; it never sorts by
itself, because the caller's row order is what ids mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import UsageError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]

# 4 MiB of float64 a block. At 8 MiB every array step leaves the cache; at 2 MiB threads wait for each other in Python between steps
# of 50 us: 20,000 x 768 in sweeps of 2, 4 and 8 MiB took 35, 24 and 32 ms.
BLOCK_VALUES = 1 << 19
LOOP_SEGMENT_ROWS = (
    16  # at or above this mean length a slice sum beats reduceat (10x at 1,000 rows)
)


@dataclass(frozen=True, slots=True)
class Csr:
    """rows: f32 [N, d] C-contiguous; indptr: int64 [K+1]; ids: int64 [N], the stable name of each row."""

    rows: F32
    indptr: I64
    ids: I64

    def __post_init__(self) -> None:
        rows, indptr, ids = self.rows, self.indptr, self.ids
        if rows.ndim != 2 or rows.dtype != np.float32 or not rows.flags.c_contiguous:
            raise UsageError(
                f"vectors must be a C-contiguous float32 array of two dimensions, "
                f"not {rows.dtype} of shape {rows.shape}"
            )
        if rows.shape[1] < 1:
            raise UsageError("vectors have dimension 0; they need at least one component")
        if indptr.ndim != 1 or indptr.dtype != np.int64 or len(indptr) < 1:
            raise UsageError(f"indptr must be int64 [clusters + 1], not {indptr.dtype}")
        if indptr[0] != 0 or indptr[-1] != len(rows) or bool((np.diff(indptr) < 0).any()):
            raise UsageError(
                f"indptr must rise from 0 to the number of rows {len(rows)}; "
                f"it goes from {indptr[0]} to {indptr[-1]}"
            )
        if ids.shape != (len(rows),) or ids.dtype != np.int64:
            raise UsageError(f"ids must be int64 [{len(rows)}], not {ids.dtype} {ids.shape}")

    @property
    def clusters(self) -> int:
        return len(self.indptr) - 1

    @property
    def dim(self) -> int:
        return int(self.rows.shape[1])

    @property
    def sizes(self) -> I64:
        return np.diff(self.indptr)

    def sizes_within(self, rows: slice) -> I64:
        """Rows of each cluster that lie in a range."""
        borders: I64 = np.clip(self.indptr, rows.start, rows.stop)
        return np.diff(borders)

    def owner(self) -> I64:
        """Cluster of each row."""
        return np.repeat(np.arange(self.clusters, dtype=np.int64), self.sizes)

    def blocks(self, width: int | None = None, values: int | None = None) -> Iterator[slice]:
        """Row ranges of `values` / width rows (default BLOCK_VALUES / dim). They ignore cluster borders."""
        step = max(1, (values or BLOCK_VALUES) // (width or self.dim))
        for start in range(0, len(self.rows), step):
            yield slice(start, min(start + step, len(self.rows)))


def group(rows: F32, labels: npt.NDArray[Any], ids: I64, clusters: int) -> tuple[Csr, I64]:
    """Sort rows by label (stable) into a Csr; also returns the permutation: csr.rows = rows[perm]."""
    if labels.shape != (len(rows),) or not np.issubdtype(labels.dtype, np.integer):
        raise UsageError(f"labels must be integers [{len(rows)}], not {labels.dtype}")
    if len(labels) and (labels.min() < 0 or labels.max() >= clusters):
        raise UsageError(f"labels must lie in 0..{clusters - 1}")
    perm = np.argsort(labels, kind="stable").astype(np.int64)
    counts = np.bincount(labels, minlength=clusters)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Csr(np.ascontiguousarray(rows[perm]), indptr, ids[perm]), perm


def _reduce(ufunc: np.ufunc, values: npt.NDArray[Any], indptr: I64, empty: Any) -> npt.NDArray[Any]:
    """ufunc over each segment of `values` [N]. reduceat itself answers x[start] for an empty segment, so only
    filled ones are asked; between two filled starts there are no other rows."""
    out = np.full(len(indptr) - 1, empty, dtype=values.dtype)
    filled = np.diff(indptr) > 0
    if filled.any():
        out[filled] = ufunc.reduceat(values, indptr[:-1][filled])
    return out


def ranges(first: I64, count: I64) -> I64:
    """first[i] to first[i] + count[i] - 1 of every i, one after another."""
    before = np.cumsum(count) - count
    at: I64 = np.repeat(first - before, count)
    at += np.arange(len(at))
    return at


def unknown(clusters: int) -> F64:
    """A value a cluster that no pass has found yet: NaN."""
    return np.full(clusters, np.nan)


def segment_sum(values: npt.NDArray[Any], indptr: I64) -> npt.NDArray[Any]:
    """Sum of each segment; unsigned integers wrap modulo 2^64."""
    return _reduce(np.add, values, indptr, 0)


def segment_min(values: F64, indptr: I64) -> F64:
    return _reduce(np.minimum, values, indptr, np.inf)


def segment_max(values: F64, indptr: I64) -> F64:
    return _reduce(np.maximum, values, indptr, -np.inf)


def segment_xor(values: U64, indptr: I64) -> U64:
    return _reduce(np.bitwise_xor, values, indptr, 0)


def segment_argmin(values: F64, ids: I64, indptr: I64) -> I64:
    """Id of the smallest value of each segment, ties to the lowest id; -1 where nothing is finite."""
    least = segment_min(values, indptr)
    tied = values == np.repeat(least, np.diff(indptr))
    top = np.iinfo(np.int64).max
    chosen = _reduce(np.minimum, np.where(tied & np.isfinite(values), ids, top), indptr, top)
    return np.where(chosen == top, np.int64(-1), chosen)


def segment_row_sums(block: F64, indptr: I64) -> F64:
    """Sum of the rows of each segment: [n, d] -> [segments, d]."""
    out = np.zeros((len(indptr) - 1, block.shape[1]))
    filled = np.flatnonzero(np.diff(indptr) > 0)
    if len(filled) == 0:
        return out
    if len(filled) * LOOP_SEGMENT_ROWS > len(block):
        out[filled] = np.add.reduceat(block, indptr[filled], axis=0)
    else:
        for segment in filled:
            out[segment] = block[indptr[segment] : indptr[segment + 1]].sum(axis=0)
    return out


def segment_quantiles(
    values: F64, kept: Bool, owner: I64, clusters: int, shares: Sequence[float]
) -> list[F64]:
    """Quantiles of the kept values of each segment by linear interpolation (numpy's default, Hyndman-Fan
    type 7), one array a share from one sort; NaN where a segment keeps none."""
    values, owner = values[kept], owner[kept]
    ordered = values[np.lexsort((values, owner))]
    counts = np.bincount(owner, minlength=clusters).astype(np.int64)
    filled = counts > 0
    first, last = (np.cumsum(counts) - counts)[filled], counts[filled] - 1
    out = []
    for share in shares:
        quantile = np.full(clusters, np.nan)
        place = share * last
        low = np.floor(place).astype(np.int64)
        below, above = ordered[first + low], ordered[first + np.minimum(low + 1, last)]
        quantile[filled] = below + (above - below) * (place - low)
        out.append(quantile)
    return out
