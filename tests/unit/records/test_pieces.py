"""IPC bytes in pieces: the same bytes as in one buffer, and large columns are not copied."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.records.arrow import COPIED_BYTES, crc32c, to_ipc, to_ipc_pieces
from fabric_pipelines.records.task import task_batch


def batch_of(rows: int, tokens: int) -> pa.RecordBatch:
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * tokens)
    values = pa.array(np.arange(rows * tokens, dtype=np.uint32))
    metadata = [b"m" * (n % 5) for n in range(rows)]
    return task_batch(pa.ListArray.from_arrays(offsets, values), metadata=metadata)


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("tokens", [1, 16, 257])
@pytest.mark.parametrize("skipped", [0, 1])
def test_pieces_are_the_bytes_of_the_whole(rows: int, tokens: int, skipped: int) -> None:
    batch = batch_of(rows + skipped, tokens).slice(skipped)
    pieces, whole = to_ipc_pieces(batch), to_ipc(batch)
    assert pieces.joined() == whole
    assert len(pieces) == len(whole)
    assert pieces.crc32c() == crc32c(whole)


def test_a_large_column_stays_where_it_is() -> None:
    batch = batch_of(300, 64)
    tokens = batch.column("tokens").values.buffers()[1]
    assert tokens.size >= COPIED_BYTES
    addresses = {pa.py_buffer(piece).address for piece in to_ipc_pieces(batch)}
    assert tokens.address in addresses
