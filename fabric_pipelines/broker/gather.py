"""Rows of many task frames put together into one batch, by joining slices of their memory.

A lease in prefix order takes a row each of hundreds of frames. Slicing Arrow batches and concatenating them costs
6 us a row, `take` 100 us a frame; a slice of a memoryview costs 0.2 us, and one join copies them all.

A mapped frame was compared with its CRC when it was decoded; that may be days ago, and pages that the kernel let go of are
read from the disk again. To compare megabytes for one row each would cost more than the lease, so a sum of each row is
kept from that moment: no single bit of it can change, and hardly a sector, without the sum of what was copied telling.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.records.task import TASK_SCHEMA


def is_plain(batch: pa.RecordBatch) -> bool:
    """Whether no column of this task batch is a slice of something larger."""
    tokens, new, source, meta = batch.columns
    return not any(column.offset for column in (tokens, tokens.values, new, source, meta))


class TaskMemory:
    """The buffers of one task batch, as memory with its offsets: `tokens_at` in bytes. `meta_at` is None where no
    row has metadata. Of a `mapped` one all that is small is copied, and the rest has sums by row."""

    __slots__ = ("batch", "meta", "meta_at", "new", "source", "sums", "tokens", "tokens_at")

    def __init__(self, batch: pa.RecordBatch, *, mapped: bool = False) -> None:
        """`batch` has TASK_SCHEMA and is plain; `mapped`: it was compared with its CRC just now."""
        assert is_plain(batch)
        tokens, new, source, meta = batch.columns
        self.batch = batch  # keeps the memory
        offsets = np.frombuffer(tokens.buffers()[1], np.int32)[: batch.num_rows + 1]
        # a list: its items are found in a third of the time of a memoryview's
        self.tokens_at: list[int] = (offsets.astype(np.int64) * 4).tolist()
        self.tokens = _view(tokens.values.buffers()[1], "B")
        _, meta_at, blob = meta.buffers()
        held = bytes if mapped else memoryview
        self.new = _view(held(new.buffers()[1]), "I")
        self.source = _view(held(source.buffers()[1]), "q")
        ends = _view(held(meta_at), "i")
        self.meta_at = ends if ends[batch.num_rows] else None
        self.meta = _view(blob or b"", "B")
        self.sums: array[int] | None = None
        if mapped:
            of_tokens = row_sums(np.frombuffer(self.tokens, np.uint32), offsets)
            bytes_at = np.frombuffer(ends, np.int32)[: batch.num_rows + 1]
            of_meta = row_sums(np.frombuffer(self.meta, np.uint8), bytes_at)
            self.sums = array("Q", (of_tokens + of_meta).tobytes())


def _view(buffer: Any, kind: Literal["B", "I", "i", "q"]) -> memoryview:
    return memoryview(buffer).cast("B").cast(kind)


def row_sums(values: npt.NDArray[Any], offsets: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """Of the values of each row, which are those from offsets[i] to offsets[i + 1]."""
    sums = np.zeros(len(offsets) - 1, np.uint64)
    some = np.flatnonzero(offsets[1:] > offsets[:-1])
    if len(some):
        used = values[: offsets[-1]]
        sums[some] = np.add.reduceat(used, offsets[some], dtype=np.uint64)
    return sums


class RowChanged(Exception):
    """What was copied of run `args[0]` is not what it was when its frame was compared with its CRC."""


Run = tuple[TaskMemory, int, int]


def gathered(runs: Sequence[Run], lengths: npt.NDArray[Any]) -> pa.RecordBatch:
    """Rows [begin, end) of each memory in turn, as TASK_SCHEMA; `lengths` are the prompt lengths of all of them. Raises
    RowChanged."""
    rows = len(lengths)
    parts = [held.tokens[held.tokens_at[a] : held.tokens_at[b]] for held, a, b in runs]
    if len(runs) == rows:
        new = [held.new[a] for held, a, _ in runs]
        source = [held.source[a] for held, a, _ in runs]
    else:
        new = [value for held, a, b in runs for value in held.new[a:b]]
        source = [value for held, a, b in runs for value in held.source[a:b]]
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    joined = b"".join(parts)
    metadata = _metadata(runs, rows)
    _require_unchanged(runs, joined, offsets, metadata)
    values = pa.py_buffer(joined)
    return pa.RecordBatch.from_arrays(
        [
            pa.ListArray.from_arrays(
                pa.array(offsets),
                pa.Array.from_buffers(pa.uint32(), int(offsets[-1]), [None, values]),
            ),
            pa.array(np.array(new, np.uint32)),
            pa.array(np.array(source, np.int64)),
            metadata,
        ],
        schema=TASK_SCHEMA,
    )


def _require_unchanged(
    runs: Sequence[Run], tokens: bytes, offsets: npt.NDArray[np.int32], metadata: pa.Array
) -> None:
    """Of the copies, not of what they were made from."""
    if all(held.sums is None for held, _, _ in runs):
        return
    found = row_sums(np.frombuffer(tokens, np.uint32), offsets)
    _, meta_at, blob = metadata.buffers()
    if blob.size:
        found += row_sums(np.frombuffer(blob, np.uint8), np.frombuffer(meta_at, np.int32))
    if len(runs) == len(found):
        mine = found.tolist()
        for run, (held, a, _) in enumerate(runs):
            if held.sums is not None and held.sums[a] != mine[run]:
                raise RowChanged(run)
        return
    row = 0
    for run, (held, a, b) in enumerate(runs):
        upto = row + b - a
        if held.sums is not None and held.sums[a:b].tobytes() != found[row:upto].tobytes():
            raise RowChanged(run)
        row = upto


def _metadata(runs: Sequence[Run], rows: int) -> pa.Array:
    offsets = np.zeros(rows + 1, np.int32)
    parts: list[memoryview] = []
    if any(memory.meta_at is not None for memory in {memory for memory, _, _ in runs}):
        row = 0
        for memory, begin, end in runs:
            at, upto = memory.meta_at, row + end - begin
            if at is not None:
                parts.append(memory.meta[at[begin] : at[end]])
                offsets[row + 1 : upto + 1] = np.diff(at[begin : end + 1])
            row = upto
        np.cumsum(offsets, out=offsets)
    blob = pa.py_buffer(b"".join(parts))
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), blob])
