"""Squared distances between all rows of a cluster, a tile at a time; nothing of n x n is ever held.

One matrix product a tile on centred rows, then direct sums for the near pairs, whose digits the expansion loses.
A row block meets all column blocks of its cluster in turn, so sums and neighbour lists of a row have one owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fabric_pipelines.analytics.csr import F64, I64
from fabric_pipelines.analytics.robust import NEAR
from fabric_pipelines.analytics.stacks import STACK_VALUES, Stack

COLUMNS_MAX = 1 << 12  # of a tile; a column's number fits the 12 bits that neighbour keys give up
SIDE_VALUES = 1 << 22  # of the rows on either side of a tile, 32 MiB
SAME_PLACE = (
    1e-12  # rows closer than this share of their rms norm differ by rounding: their distance is 0
)


@dataclass(frozen=True, slots=True)
class Tile:
    """distance2 f64 [g, rows, columns], exact 0 on the diagonal and between copies; `rows` and `columns` are
    ranges of places. diagonal: places of a row that is also a column, counted from each range."""

    rows: slice
    columns: slice
    distance2: F64

    @property
    def diagonal(self) -> tuple[I64, I64]:
        both = np.arange(
            max(self.rows.start, self.columns.start), min(self.rows.stop, self.columns.stop)
        )
        return both - self.rows.start, both - self.columns.start


def tile_values(count: int, dim: int) -> int:
    """Of one cluster in a stack: its tile or its rows, whichever is larger."""
    return max(count * min(count, COLUMNS_MAX), count * dim)


def tiles(stack: Stack, radius2: F64, copy_of: I64) -> Iterator[Tile]:
    """radius2 f64 [N]: squared distance of each row to its mean; copy_of int64 [N]: equal for equal rows. Row
    blocks in order, and in each its column blocks in order."""
    at_once = max(1, SIDE_VALUES // stack.dim)
    columns = min(stack.count, COLUMNS_MAX, at_once)
    rows_max = min(at_once, max(1, STACK_VALUES // (len(stack.clusters) * columns)))
    norm2, copies = radius2[stack.places], copy_of[stack.places]
    floor2 = SAME_PLACE**2 * (norm2.mean(axis=1) + np.einsum("gd,gd->g", stack.mean, stack.mean))
    for rows, block in stack.blocks(rows_max):
        for part, others in stack.blocks(columns):
            distance2 = block @ others.swapaxes(1, 2)
            distance2 *= -2.0
            distance2 += norm2[:, rows, None]
            distance2 += norm2[:, None, part]
            tile = Tile(rows, part, distance2)
            here, there = tile.diagonal
            distance2[:, here, there] = np.inf
            _mend(tile, block, others, norm2, copies, floor2)
            distance2[:, here, there] = 0.0
            yield tile


def _mend(tile: Tile, block: F64, others: F64, norm2: F64, copies: I64, floor2: F64) -> None:
    """Direct sums where the expansion has lost digits. Rows without any such pair are passed over by their
    least distance; copies are 0 without a sum, since a cluster of copies is nothing but near pairs."""
    distance2 = tile.distance2
    row_norm2, column_norm2 = norm2[:, tile.rows], norm2[:, tile.columns]
    bound = NEAR * (row_norm2 + column_norm2.max(axis=1, keepdims=True))
    group, row = np.nonzero(distance2.min(axis=2) <= bound)
    if len(group) == 0:
        return
    scale = row_norm2[group, row, None] + column_norm2[group]
    asked, column = np.nonzero(distance2[group, row] <= NEAR * scale)
    group, row = group[asked], row[asked]
    same = copies[:, tile.rows][group, row] == copies[:, tile.columns][group, column]
    distance2[group[same], row[same], column[same]] = 0.0
    group, row, column = group[~same], row[~same], column[~same]
    step = max(1, STACK_VALUES // block.shape[2])
    for low in range(0, len(group), step):
        part = slice(low, low + step)
        apart = block[group[part], row[part]] - others[group[part], column[part]]
        length2 = np.einsum("pd,pd->p", apart, apart)
        length2[length2 <= floor2[group[part]]] = 0.0
        distance2[group[part], row[part], column[part]] = length2
