"""What the record modules share about Arrow: schema check, IPC bytes, CRC32C.

Refuses to repair: a batch that is not exactly its schema is a SchemaError that names the column.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa

from fabric_pipelines.errors import SchemaError

COPIED_BYTES = 16 << 10  # smaller pieces are put together
STREAM_BYTES = 64  # marks, padding and the end of a stream, around its two messages


def require_schema(batch: pa.RecordBatch | pa.Table, schema: pa.Schema, what: str) -> None:
    """Raise SchemaError unless `batch` has exactly the names and types of `schema` (metadata aside)."""
    if batch.schema.equals(schema, check_metadata=False):
        return
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            raise SchemaError(f"{what} lacks the column {field.name!r} ({field.type})")
        found = batch.schema.field(index).type
        if found != field.type:
            raise SchemaError(f"{what} has {field.name!r} as {found}; it must be {field.type}")
    extra = sorted(set(batch.schema.names) - set(schema.names))
    raise SchemaError(
        f"{what} has columns that do not belong there: {extra}"
        if extra
        else f"{what} must have its columns in the order {schema.names}"
    )


def to_ipc(batch: pa.RecordBatch) -> bytes:
    """One self-contained Arrow IPC stream (schema, then the batch). A slice is compacted first, so that no
    bytes of its parent travel along."""
    return bytes(to_ipc_part(batch))


def to_ipc_part(batch: pa.RecordBatch) -> memoryview:
    """As `to_ipc`, for bytes that are only passed on: written once, into room of the right size. A stream that
    grows, and bytes made of it, would each be one more copy of megabytes."""
    room = pa.ipc.get_record_batch_size(batch) + batch.schema.serialize().size + STREAM_BYTES
    buffer = pa.allocate_buffer(room)
    with pa.FixedSizeBufferWriter(buffer) as sink:
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        size = sink.tell()
    return memoryview(buffer)[:size].toreadonly()


class Pieces:
    """Bytes that lie in several buffers, to be written one after the other; `len` is that of all. Whoever holds it
    keeps the buffers as they are."""

    __slots__ = ("_buffers", "_size")

    def __init__(self, buffers: list[Any]) -> None:
        self._buffers = [memoryview(buffer).cast("B") for buffer in buffers]
        self._size = sum(map(len, self._buffers))

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._buffers)

    def joined(self) -> bytes:
        return b"".join(self._buffers)

    def crc32c(self) -> int:
        crc = 0
        for buffer in self._buffers:
            crc = int(google_crc32c.extend(crc, np.frombuffer(buffer, np.uint8)))
        return crc


def whole(data: Any) -> Any:
    """The same bytes in one buffer."""
    return data.joined() if isinstance(data, Pieces) else data


class _Gatherer:
    """A file that keeps what is written to it where it lies, if it is large."""

    closed = False

    def __init__(self) -> None:
        self.buffers: list[Any] = []
        self._small = bytearray()

    def write(self, data: Any) -> int:
        size = len(data)
        if size < COPIED_BYTES:
            self._small += data
        else:
            self.flush()
            self.buffers.append(data)
        return size

    def flush(self) -> None:
        if self._small:
            self.buffers.append(self._small)
            self._small = bytearray()

    def close(self) -> None:
        self.flush()

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def to_ipc_pieces(batch: pa.RecordBatch) -> Pieces:
    """As `to_ipc_part`, for bytes that are only passed on, without copying them: large columns stay where the batch
    has them. The first touch of fresh memory costs a virtual machine milliseconds a megabyte."""
    sink = _Gatherer()
    with (
        pa.PythonFile(sink, mode="w") as file,
        pa.ipc.new_stream(file, batch.schema) as writer,
    ):
        writer.write_batch(batch)
    sink.flush()
    return Pieces(sink.buffers)


def read_ipc(data: Any) -> pa.RecordBatch:
    """The batch inside bytes that were checked when they were written; zero-copy and not validated again."""
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return reader.read_next_batch()


def from_ipc(data: Any, *, validate: bool = True) -> pa.RecordBatch:
    """The one batch inside `data`, whoever sent it; zero-copy when `data` is a buffer. The content is validated in
    full, since offsets from outside must never reach a gather unchecked; without `validate` the caller does that.
    SchemaError for anything else, compressed columns among it: how large they are shows only once they fill memory."""
    try:
        messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(data))
        schema = pa.ipc.read_schema(messages.read_next_message())
        found = messages.read_next_message()
        if found.type != "record batch":
            raise SchemaError(f"an Arrow IPC stream must hold one plain batch, not a {found.type}")
        if _is_compressed(found.metadata):
            raise SchemaError("the columns of a batch must not be compressed: send it as it is")
        batch = pa.ipc.read_record_batch(found, schema)
        if next(iter(messages), None) is not None:
            raise SchemaError("an Arrow IPC stream must hold one batch, not more")
        if validate:
            batch.validate(full=True)
    except _UNREADABLE as fault:
        said = str(fault) or "it ends before its batch"
        raise SchemaError(f"not a valid Arrow IPC stream: {said}") from fault
    return batch


# what pyarrow raises of bytes that anybody may have sent; some of its own are of other kinds as well
_UNREADABLE = (
    pa.ArrowException,
    StopIteration,
    EOFError,
    OSError,
    ValueError,
    TypeError,
    struct.error,
)


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Whether the flatbuffer of a record batch message names a codec: `Message.header.compression` of Arrow's
    Message.fbs, which pyarrow does not tell."""
    view = memoryview(metadata)
    (root,) = struct.unpack_from("<I", view, 0)
    header = _table_field(view, root, 2)
    if header is None:
        raise ValueError("a message without a header")
    (forward,) = struct.unpack_from("<I", view, header)
    return _table_field(view, header + forward, 3) is not None


def _table_field(view: memoryview, table: int, slot: int) -> int | None:
    """Where a flatbuffer's table has that field; None if it has not."""
    (back,) = struct.unpack_from("<i", view, table)
    vtable = table - back
    (size,) = struct.unpack_from("<H", view, vtable)
    if (place := 4 + 2 * slot) >= size:
        return None
    (offset,) = struct.unpack_from("<H", view, vtable + place)
    return table + offset if offset else None


def crc32c(data: Any) -> int:
    """CRC32C (Castagnoli, RFC 3720) of a bytes-like object."""
    if isinstance(data, bytes):
        return int(google_crc32c.value(data))
    view = np.frombuffer(data, np.uint8) if len(data) else b""  # the C function takes no memoryview
    return int(google_crc32c.value(view))
