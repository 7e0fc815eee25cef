"""Twin of E8 codes: every point of the box near a block is tried, the nearest one taken.

Coordinates are k - (2^(b+1) - 1) / 4 + coset / 2, k in 0 .. 2^b - 1, with an even sum of k. The nearest point differs
from plain rounding by at most one step a coordinate, so 3^8 points a coset are all that can be it.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def nearest(block: F64, bits: int) -> tuple[list[int], int, float]:
    """k [8], coset and squared distance of the point nearest to block [8]; ties to coset 0."""
    best: tuple[list[int], int, float] | None = None
    last, shift = 2**bits - 1, (2 ** (bits + 1) - 1) / 4
    steps = np.array(list(itertools.product((0, -1, 1), repeat=8)))
    for coset in (0, 1):
        rounded = np.clip(np.rint(block - (coset / 2 - shift)), 0, last)
        points = rounded + steps
        allowed = points[
            (points >= 0).all(axis=1) & (points <= last).all(axis=1) & (points.sum(axis=1) % 2 == 0)
        ]
        apart = ((block - (allowed - shift + coset / 2)) ** 2).sum(axis=1)
        first = int(np.argmin(apart))
        if best is None or apart[first] < best[2]:
            best = [int(value) for value in allowed[first]], coset, float(apart[first])
    assert best is not None, "the box is empty"
    return best


def values(k: list[int], coset: int, bits: int) -> list[int]:
    """Four times the coordinates."""
    return [4 * one - (2 ** (bits + 1) - 1) + 2 * coset for one in k]
