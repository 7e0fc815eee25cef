"""Twin of the robust centre (P5): Weiszfeld's iteration with the fix of Vardi and Zhang 2000, a row at a time."""

from __future__ import annotations

import numpy as np

from fabric_pipelines.analytics.csr import F64


def geometric_median(rows: F64) -> tuple[F64, int]:
    """rows f64 [n, d], n >= 1 -> the median f64 [d] and the steps taken. Starts at the mean; ends with a step of
    at most 1e-6 rms radii or after 32; a row within 1e-9 of them is met."""
    here = rows.mean(axis=0)
    radius = np.sqrt(((rows - here) ** 2).sum(axis=1).mean())
    for step in range(1, 33):
        if radius == 0:
            return here, 0
        there = _step(rows, here, 1e-9 * radius)
        moved = np.sqrt(((there - here) ** 2).sum())
        here = there
        if moved <= 1e-6 * radius:
            return here, step
    return here, 32


def _step(rows: F64, here: F64, reach: float) -> F64:
    pulled, strength, met = np.zeros_like(here), 0.0, 0
    for row in rows:
        apart = np.sqrt(((row - here) ** 2).sum())
        if apart <= reach:
            met += 1
        else:
            pulled += row / apart
            strength += 1.0 / apart
    if strength == 0:
        return here
    force = np.sqrt(((pulled - strength * here) ** 2).sum())
    held = min(1.0, met / force) if force > 0 else float(met > 0)
    there: F64 = (1.0 - held) * pulled / strength + held * here
    return there
