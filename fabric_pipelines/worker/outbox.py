"""Finished work that the broker has not confirmed yet; nothing leaves here before it has.

Bounded: `share` feeds the backpressure ladder, which stops pulling long before the bound. A batch that was
sent and not answered stays and is sent again; the broker counts the second copy as duplicates.
"""

from __future__ import annotations

from collections import deque

import pyarrow as pa

SEND_ROWS_MAX = 4096


class Outbox:
    """`tasks_max`, `bytes_max`: the bound, whichever fills first."""

    def __init__(self, *, tasks_max: int = 65_536, bytes_max: int = 256 << 20) -> None:
        self._tasks_max = tasks_max
        self._bytes_max = bytes_max
        self._batches: deque[pa.RecordBatch] = deque()
        self.tasks = 0
        self.size = 0
        self.oldest_s: float | None = None

    @property
    def share(self) -> float:
        return max(self.tasks / self._tasks_max, self.size / self._bytes_max)

    def put(self, batch: pa.RecordBatch, now_s: float) -> None:
        if batch.num_rows == 0:
            return
        self._batches.append(batch)
        self.tasks += batch.num_rows
        self.size += batch.nbytes
        if self.oldest_s is None:
            self.oldest_s = now_s

    def head(self) -> tuple[pa.RecordBatch, int]:
        """One batch to send (up to SEND_ROWS_MAX rows, at least one batch) and how many batches it spans."""
        rows = spans = 0
        for batch in self._batches:
            if spans and rows + batch.num_rows > SEND_ROWS_MAX:
                break
            rows += batch.num_rows
            spans += 1
        parts = [self._batches[index] for index in range(spans)]
        whole = parts[0] if spans == 1 else pa.concat_batches(parts)
        return whole, spans

    def confirm(self, spans: int, now_s: float) -> None:
        """The broker has what `head` gave: forget it."""
        for _ in range(spans):
            batch = self._batches.popleft()
            self.tasks -= batch.num_rows
            self.size -= batch.nbytes
        self.oldest_s = now_s if self._batches else None

    def clear(self) -> None:
        self.confirm(len(self._batches), 0.0)

    def task_ids(self) -> list[int]:
        return [int(task) for batch in self._batches for task in batch.column("task_id").to_numpy()]
