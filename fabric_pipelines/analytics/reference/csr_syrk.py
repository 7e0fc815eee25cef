"""Twin of cuda/csr_syrk.cu (F6): the second moment of one cluster at a time, a plain product of float64 rows."""

from __future__ import annotations

import numpy as np

from fabric_pipelines.analytics.csr import F32, F64, I64, Bool


def values(rows: F32, weight: F64, place: I64, centre: F64 | None) -> F64:
    """f64 [len(place), d] of weight x row - centre; a row of weight 0 is 0, NaN or not."""
    kept = weight[place] != 0
    wide = np.where(kept[:, None], rows[place], 0).astype(np.float64) * weight[place][:, None]
    if centre is not None:
        wide -= centre
    wide[~kept] = 0
    return wide


def moment(wide: F64) -> F64:
    """X'X / n [d, d], or XX' / n [n, n] of fewer rows than dimensions."""
    count, dim = wide.shape
    product: F64 = wide @ wide.T if count < dim else wide.T @ wide
    product /= count
    return product


def sides(wide: F64, axis: F64) -> Bool:
    """Which rows have a value above 0 along an eigenvector of `moment`."""
    return axis > 0 if len(wide) < wide.shape[1] else wide @ axis > 0
