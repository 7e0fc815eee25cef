"""Twin of two-means (F12): Lloyd's iteration from the two sides of the first axis, a row at a time."""

from __future__ import annotations

import numpy as np

from fabric_pipelines.analytics.csr import F64, Bool

ROUNDS_MAX = 16


def two_means(rows: F64) -> tuple[Bool, float, F64]:
    """rows f64 [n, d], n >= 3, not all equal -> which half each row is in, sum of squares within the halves, and
    the rows' coordinates between the two means. At most 16 rounds."""
    rows = rows - rows.mean(axis=0)
    axis = np.linalg.svd(rows, full_matrices=False)[2][0]
    side, within, place = from_sides(rows, rows @ axis > 0)
    return side, float(within.sum()), place


def from_sides(rows: F64, side: Bool) -> tuple[Bool, F64, F64]:
    """rows f64 [n, d] whose sum is 0, side bool [n] -> side, squared distance to the mean of its side, coordinate along the
    line through both means, per row. What starts on one side stays there, with coordinates 0."""
    if side.all() or not side.any():
        return side, (rows**2).sum(axis=1), np.zeros(len(rows))
    for _ in range(ROUNDS_MAX):
        under, over = rows[~side].mean(axis=0), rows[side].mean(axis=0)
        new = np.array([_squared(row - over) < _squared(row - under) for row in rows])
        if new.all() or not new.any() or (new == side).all():
            break
        side = new
    under, over = rows[~side].mean(axis=0), rows[side].mean(axis=0)
    within = ((rows - np.where(side[:, None], over, under)) ** 2).sum(axis=1)
    length = np.sqrt(_squared(over - under))
    return side, within, (rows @ (over - under)) / length if length > 0 else np.zeros(len(rows))


def _squared(apart: F64) -> float:
    return float((apart**2).sum())
