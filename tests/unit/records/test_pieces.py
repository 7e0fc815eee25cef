"""IPC bytes in pieces: the same bytes as in one buffer, and large columns are not copied."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.errors import SchemaError
from fabric_pipelines.records.arrow import COPIED_BYTES, crc32c, from_ipc, to_ipc, to_ipc_pieces
from fabric_pipelines.records.task import task_batch
from tests.support_broker import completions


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


# ---- bytes from anybody


def stream_of(*batches: pa.RecordBatch, codec: str | None = None) -> bytes:
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_columns_are_refused_before_they_fill_memory(codec: str) -> None:
    """Megabytes of zeros fit into hundreds of bytes."""
    zeros = task_batch(
        pa.ListArray.from_arrays(
            pa.array([0, 16 << 20], pa.int32()), pa.array(np.zeros(16 << 20, np.uint32))
        )
    )
    sent = stream_of(zeros, codec=codec)
    assert len(sent) < 1 << 20
    before = pa.total_allocated_bytes()
    with pytest.raises(SchemaError, match="must not be compressed"):
        from_ipc(sent)
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_more_or_less_than_one_batch_is_refused() -> None:
    batch = batch_of(3, 4)
    assert from_ipc(stream_of(batch)).equals(batch)
    with pytest.raises(SchemaError, match="one batch, not more"):
        from_ipc(stream_of(batch, batch))
    with pytest.raises(SchemaError, match="Arrow IPC"):
        from_ipc(stream_of(batch)[:200])


def test_whatever_bit_is_wrong_the_error_is_typed() -> None:
    """Some make a schema that pyarrow does not know, which it says in errors of several kinds."""
    good = to_ipc(completions([1, 2]))
    typed = 0
    for at in range(0, len(good) * 8, 5):
        bad = bytearray(good)
        bad[at // 8] ^= 1 << at % 8
        try:
            from_ipc(bytes(bad))
        except SchemaError:
            typed += 1
    assert typed > 1000
