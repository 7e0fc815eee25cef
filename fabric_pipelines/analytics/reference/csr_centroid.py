"""Twin of cuda/csr_centroid.cu: weighted sum of the rows of each cluster.

Weight 0 leaves a row out, also when it holds NaN: 0 x NaN must not reach a sum.
"""

from __future__ import annotations

import numpy as np

from fabric_pipelines.analytics.csr import F32, F64, I64, LOOP_SEGMENT_ROWS, segment_row_sums


def weighted(rows: F32, weight: F64, into: F64 | None = None) -> F64:
    """rows x weight in float64, with zeros for rows of weight 0."""
    wide = widened(rows, weight, into)
    wide *= weight[:, None]
    return wide


def widened(rows: F32, weight: F64, into: F64 | None = None) -> F64:
    """rows in float64, written to `into` f64 [n, d] where there is one, with zeros for rows of weight 0."""
    wide = np.empty(rows.shape) if into is None else into
    np.copyto(wide, rows)
    left_out = weight == 0
    if left_out.any():
        wide[left_out] = 0
    return wide


def csr_centroid(rows: F32, weight: F64, indptr: I64, into: F64 | None = None) -> F64:
    """rows f32 [n, d], weight f64 [n], indptr int64 [K+1] -> f64 [K, d]. into f64 [n, d]: overwritten on the way."""
    filled = np.flatnonzero(np.diff(indptr))
    if len(filled) * LOOP_SEGMENT_ROWS > len(rows):
        return segment_row_sums(weighted(rows, weight, into), indptr)
    # a product of the weights with each segment: one sweep where weighing first takes three
    wide, out = widened(rows, weight, into), np.zeros((len(indptr) - 1, rows.shape[1]))
    for segment in filled:
        own = slice(indptr[segment], indptr[segment + 1])
        out[segment] = weight[own] @ wide[own]
    return out
