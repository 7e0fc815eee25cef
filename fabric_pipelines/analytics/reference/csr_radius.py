"""Twin of cuda/csr_radius.cu: squared distance of each row to the centroid of its cluster.

Always the direct sum of squared differences; the expansion |x|^2 - 2 x.m + |m|^2 loses every digit of a
tight cluster far from the origin.
"""

from __future__ import annotations

import numpy as np

from fabric_pipelines.analytics.csr import F32, F64, I64, LOOP_SEGMENT_ROWS
from fabric_pipelines.analytics.reference.csr_centroid import weighted


def csr_radius(rows: F32, weight: F64, indptr: I64, centroid: F64, into: F64 | None = None) -> F64:
    """rows f32 [n, d], weight f64 [n], indptr int64 [K+1], centroid f64 [K, d] -> f64 [n]. into f64 [n, d]: overwritten on
    the way.

    A row of weight 0 gets 0; callers leave it out by its weight.
    """
    apart = weighted(rows, weight, into)
    filled = np.flatnonzero(np.diff(indptr))
    if len(filled) * LOOP_SEGMENT_ROWS > len(rows):
        apart -= centroid[np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))]
    else:
        for segment in filled:
            apart[indptr[segment] : indptr[segment + 1]] -= centroid[segment]
    left_out = weight == 0
    if left_out.any():
        apart[left_out] = 0
    radius2: F64 = np.vecdot(apart, apart)
    return radius2
