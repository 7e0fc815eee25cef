"""Twin of cuda/flat_select.cu: bounds of a tile, their k-th smallest, the rows that stay possible, a gather.

A score is a float32 distance at most `margin` away from the true one. The least upper bound of each of 1,024 slots
of rows is kept; k slots whose bound is no higher than `limit` prove that k rows are that near, so that a
row whose lower bound is higher can be left out. Everything is written as one array expression a kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

SLOTS = 1024
UNSEEN = float(np.frombuffer(b"\x7f" * 4, "<f4")[0])  # every byte 0x7f: above any score

F32s = npt.NDArray[np.float32]
I64s = npt.NDArray[np.int64]


def scored(
    products: F32s, length: F32s, reach: F32s, slack: F32s, gamma: float, tiny: float, *, l2: bool
) -> tuple[F32s, F32s]:
    """Score and margin [q, n]; NaN for rows whose length is NaN."""
    wide, lost = length[None, :], slack[:, None]
    if l2:
        far = reach[:, None]
        total = wide + far
        return (
            wide * wide + far * far - np.float32(2) * products,
            np.float32(gamma) * total * total + np.float32(2) * lost * wide + np.float32(tiny),
        )
    score = np.float32(1) - products / wide
    return score, np.broadcast_to(np.float32(gamma) + lost, score.shape)


def slots(score: F32s, margin: F32s, bound: F32s) -> None:
    """Lower bound [q, SLOTS] to the least upper bound of the rows of each slot: row r is of slot r mod SLOTS."""
    upper = score + margin
    for start in range(0, upper.shape[1], SLOTS):
        part = upper[:, start : start + SLOTS]
        into = bound[:, : part.shape[1]]
        np.fmin(into, part, out=into)


def limit(bound: F32s, k: int) -> F32s:
    ordered: F32s = np.sort(bound, axis=1)[:, k - 1]
    return ordered


def take(
    score: F32s, margin: F32s, highest: F32s, first: int, count: npt.NDArray[np.int32],
    taken: I64s, lower: F32s,
) -> None:  # fmt: skip
    """Append to taken and lower [capacity, q] the rows whose lower bound is at most `highest` [q]."""
    least = score - margin
    for query, row in zip(*np.nonzero(least <= highest[:, None]), strict=True):
        if count[query] < len(taken):
            taken[count[query], query] = first + row
            lower[count[query], query] = least[query, row]
        count[query] += 1


def words(source: npt.NDArray[Any], rows: I64s) -> npt.NDArray[Any]:
    gathered: npt.NDArray[Any] = source[rows]
    return gathered
