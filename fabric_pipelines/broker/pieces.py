"""Pieces: a submission's batches as an upload sends them, kept until the broker has them.

A stream that broke off, or was refused for want of room, goes on in the next one at the row that the broker names.
The caller's batches may come from a generator that nobody can start again, so what was sent and is not answered is
kept here, a few pieces at a time; what was answered is let go of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import pyarrow as pa

UPLOAD_BYTES = 4 << 20

Piece = tuple[int, pa.RecordBatch]


class Pieces:
    def __init__(self, batches: Iterable[pa.RecordBatch], bytes_max: int = UPLOAD_BYTES) -> None:
        self._source = _cut(batches, bytes_max)
        self._kept: deque[Piece] = deque()

    def from_row(self, row: int) -> Iterator[Piece]:
        """(first row, batch) of all that lies at or after `row`, in order, about `bytes_max` each at most."""
        self.forget_below(row)
        for first, batch in list(self._kept):
            yield _after(first, batch, row)
        for first, batch in self._source:
            if first + batch.num_rows > row:
                piece = _after(first, batch, row)
                self._kept.append(piece)
                yield piece

    def forget_below(self, row: int) -> None:
        """The broker has every row before that one."""
        while self._kept and self._kept[0][0] + self._kept[0][1].num_rows <= row:
            self._kept.popleft()


def _after(first: int, batch: pa.RecordBatch, row: int) -> Piece:
    skip = max(row - first, 0)
    return first + skip, batch.slice(skip) if skip else batch


def _cut(batches: Iterable[pa.RecordBatch], bytes_max: int) -> Iterator[Piece]:
    first = 0
    for batch in batches:
        rows = max(1, batch.num_rows * bytes_max // max(batch.nbytes, 1))
        for start in range(0, batch.num_rows, rows):
            yield first + start, batch.slice(start, rows)
        first += batch.num_rows
