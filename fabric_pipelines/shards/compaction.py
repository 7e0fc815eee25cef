"""What an increment writes again although it did not move, so that layers do not pile up. Counts only, no I/O.

Two rules under one budget. A layer of at most as many counting rows as the new one holds so far is folded into it:
each folding at least doubles what a row lies in, so a row is written a logarithmic number of times, and a layer whose
rows are all gone elsewhere is not carried on. A list of which at least half is written anyway is written whole: moves
that stay in a few lists leave those lists in one piece. The budget is what keeps an increment an increment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

REWRITTEN_FRACTION_MAX = 0.015  # with 1 % moved, 2.5 % of the rows are written at most


def budget(rows: int) -> int:
    """Rows that may be written though they did not move."""
    return int(REWRITTEN_FRACTION_MAX * rows)


def layers_to_fold(counting: Sequence[int], written: int, left: int) -> list[int]:
    """counting: rows that count in each layer, oldest first; written: rows of the new layer so far. Newest first."""
    fold = []
    for number in reversed(range(len(counting))):
        rows = counting[number]
        if 0 < rows <= min(written, left):
            fold.append(number)
            written, left = written + rows, left - rows
    return fold


def lists_to_rewrite(
    stored: npt.NDArray[np.int64], written: npt.NDArray[np.int64], left: int
) -> npt.NDArray[np.int64]:
    """stored [lists]: rows of each list that lie in older files and count; written: those that the new layer has.
    Cheapest first while the budget lasts."""
    half = np.flatnonzero((stored > 0) & (written >= stored))
    cheapest = half[np.argsort(stored[half], kind="stable")]
    chosen: npt.NDArray[np.int64] = cheapest[np.cumsum(stored[cheapest]) <= left]
    return chosen
