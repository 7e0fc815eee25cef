"""Twin of cuda/csr_reduce.cu: moments, extremes and digests of one number a row, a cluster at a time.

A row counts where its flag is 0. m2 is the sum of squared deviations from the mean; the id is the lowest among the rows that
have the least value. Of nothing: count 0, sums 0, least inf, most -inf, id -1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.csr import F64, I64, U64


class Reduced(NamedTuple):
    """real f64 [K, 4]: sum, m2, least, most; whole int64 [K, 2]: count, id."""

    real: F64
    whole: I64


def csr_reduce(value: F64, flag: npt.NDArray[np.uint8], ids: I64, indptr: I64) -> Reduced:
    """value f64 [n], flag u8 [n], ids int64 [n], indptr int64 [K+1]."""
    clusters = len(indptr) - 1
    real = np.tile([0.0, 0.0, np.inf, -np.inf], (clusters, 1))
    whole = np.tile(np.array([0, -1]), (clusters, 1))
    for cluster in range(clusters):
        own = np.arange(indptr[cluster], indptr[cluster + 1])
        own = own[flag[own] == 0]
        x = value[own]
        if len(x):
            apart = x - x.mean()
            real[cluster] = x.sum(), (apart * apart).sum(), x.min(), x.max()
            whole[cluster] = len(x), ids[own][x == x.min()].min()
    return Reduced(real, whole)


def csr_words(word: U64, indptr: I64) -> U64:
    """word u64 [n] -> sum modulo 2^64 and xor of each cluster, u64 [K, 2]."""
    out = np.zeros((len(indptr) - 1, 2), dtype=np.uint64)
    for cluster in range(len(out)):
        own = word[indptr[cluster] : indptr[cluster + 1]]
        out[cluster] = own.sum(dtype=np.uint64), np.bitwise_xor.reduce(own)
    return out
