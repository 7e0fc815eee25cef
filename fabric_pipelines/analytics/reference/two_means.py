"""Twin of two-means (F12): Lloyd's iteration from the two sides of the first axis, a row at a time."""

from __future__ import annotations

import numpy as np

from fabric_pipelines.analytics.csr import F64, Bool


def two_means(rows: F64) -> tuple[Bool, float, F64]:
    """rows f64 [n, d], n >= 3, not all equal -> which half each row is in, sum of squares within the halves, and
    the rows' coordinates between the two means. At most 16 rounds."""
    rows = rows - rows.mean(axis=0)
    axis = np.linalg.svd(rows, full_matrices=False)[2][0]
    side: Bool = rows @ axis > 0
    for _ in range(16):
        under, over = rows[~side].mean(axis=0), rows[side].mean(axis=0)
        new = np.array([_squared(row - over) < _squared(row - under) for row in rows])
        if new.all() or not new.any() or (new == side).all():
            break
        side = new
    under, over = rows[~side].mean(axis=0), rows[side].mean(axis=0)
    within = _squared(rows[~side] - under) + _squared(rows[side] - over)
    return side, within, (rows @ (over - under)) / np.sqrt(_squared(over - under))


def _squared(apart: F64) -> float:
    return float((apart**2).sum())
