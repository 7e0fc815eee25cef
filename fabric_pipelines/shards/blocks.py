"""Block files: arrays and columns as content-addressed bytes that map straight into memory.

An array is a .npy file whose header is written here, 128 bytes whatever the numpy version, so the same values
give the same file for ever and the data starts 64-byte aligned (what a GPU registration and Arrow expect). A
file's name is the sha256 of its bytes; its logical digest says what the values are. Reading checks shape and
type against the manifest and refuses a file that says otherwise; it never copies.
"""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.shards.logical import array_sha256, table_sha256

HEADER_BYTES = 128
ALIGNMENT = 64
DIGEST_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of one file before it is written, and the two digests they have."""

    folder: str
    suffix: str
    rows: int
    content: bytes
    sha256: str
    logical_sha256: str

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.sha256}{self.suffix}"


def array_block(folder: str, array: npt.NDArray[Any]) -> Block:
    values = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    content = npy_header(values.dtype, values.shape) + values.tobytes()
    return Block(
        folder,
        ".npy",
        len(values),
        content,
        hashlib.sha256(content).hexdigest(),
        array_sha256(values),
    )


def columns_block(folder: str, table: pa.Table) -> Block:
    """An Arrow IPC file of one batch. The logical digest is the truth about it: another Arrow version may
    lay the same values out in other bytes."""
    compact = pa.Table.from_batches([_compacted(table)], table.schema.remove_metadata())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, compact.schema) as writer:
        writer.write_table(compact)
    content = bytes(sink.getvalue())
    return Block(
        folder,
        ".arrow",
        compact.num_rows,
        content,
        hashlib.sha256(content).hexdigest(),
        table_sha256(compact),
    )


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """NPY format 1.0, padded to HEADER_BYTES."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape}, }}"
    room = HEADER_BYTES - 10
    assert len(text) < room, text
    return b"\x93NUMPY\x01\x00" + room.to_bytes(2, "little") + text.ljust(room - 1).encode() + b"\n"


def map_array(path: Path, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """The file's values, read-only and unread: pages come from disk as they are touched."""
    expected = npy_header(np.dtype(dtype), shape)
    count = int(np.prod(shape))
    buffer = _map(path)
    size = HEADER_BYTES + count * np.dtype(dtype).itemsize
    if len(buffer) != size or buffer[:HEADER_BYTES] != expected:
        raise CorruptionFound(
            f"{path} is not the {dtype} array of shape {shape} that the manifest lists: "
            "verify its receipt to see what else is damaged, then build it anew"
        )
    if not count:
        return np.empty(shape, dtype)
    values = np.frombuffer(buffer, dtype, count, HEADER_BYTES).reshape(shape)
    assert values.ctypes.data % ALIGNMENT == 0
    return values


def map_columns(path: Path) -> pa.Table:
    try:
        with pa.ipc.open_file(pa.py_buffer(_map(path))) as reader:
            return reader.read_all()
    except (pa.ArrowInvalid, OSError) as fault:
        raise CorruptionFound(
            f"{path} is not an Arrow file: {fault}; verify its receipt to see what else is damaged, then build it anew"
        ) from fault


def file_sha256(path: Path) -> str:
    """Hex digest of the bytes on disk. CorruptionFound when the file is gone."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(DIGEST_CHUNK_BYTES):
                digest.update(chunk)
    except FileNotFoundError as fault:
        raise CorruptionFound(f"{path} is missing: rebuild the shard from its receipt") from fault
    return digest.hexdigest()


def _map(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as fault:
        raise CorruptionFound(f"{path} is missing: rebuild the shard from its receipt") from fault
    except ValueError:  # an empty file cannot be mapped; it is no block either
        return b""


def _compacted(table: pa.Table) -> pa.RecordBatch:
    """One batch without the parent's bytes: taking every row rebuilds each buffer at offset 0."""
    taken = table.combine_chunks().take(pa.array(np.arange(table.num_rows)))
    columns = [
        pa.concat_arrays(c.chunks) if c.num_chunks else pa.array([], c.type) for c in taken.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema.remove_metadata())
