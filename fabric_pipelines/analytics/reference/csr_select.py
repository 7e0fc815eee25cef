"""Twin of cuda/csr_select.cu: quantiles of one number a row, and the first of all equal rows, a cluster at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.csr import F64, I64, U64


def csr_quantiles(value: F64, flag: npt.NDArray[np.uint8], indptr: I64, share: F64) -> F64:
    """Quantiles of the rows whose flag is 0 by linear interpolation (numpy's default, Hyndman-Fan type 7), f64 [K, T];
    NaN where there is no such row."""
    out = np.full((len(indptr) - 1, len(share)), np.nan)
    for cluster in range(len(out)):
        own = slice(indptr[cluster], indptr[cluster + 1])
        ordered = np.sort(value[own][flag[own] == 0])
        if len(ordered):
            place = share * (len(ordered) - 1)
            low = np.floor(place).astype(np.int64)
            below, above = ordered[low], ordered[np.minimum(low + 1, len(ordered) - 1)]
            out[cluster] = below + (above - below) * (place - low)
    return out


def csr_copies(row_hash: U64, indptr: I64) -> tuple[I64, I64]:
    """row_hash u64 [n, 2] -> the lowest row of the same cluster with the same hash, int64 [n]; distinct rows, int64 [K]."""
    copy_of = np.empty(len(row_hash), dtype=np.int64)
    distinct = np.zeros(len(indptr) - 1, dtype=np.int64)
    for cluster in range(len(distinct)):
        first: dict[tuple[int, ...], int] = {}
        for row in range(indptr[cluster], indptr[cluster + 1]):
            copy_of[row] = first.setdefault(tuple(row_hash[row].tolist()), row)
        distinct[cluster] = len(first)
    return copy_of, distinct
