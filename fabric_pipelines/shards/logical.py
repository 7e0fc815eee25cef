"""Logical digest: one sha256 per Arrow value, whatever its bytes look like in memory or on disk.

Raw Arrow buffers lie about equality: bytes under nulls are arbitrary, a slice keeps its parent's buffers, and
chunking moves offsets. So a table is hashed as what it means: per column its name and type, then validity,
lengths and values, gathered into one chunk, rebased to offset 0, with null slots zeroed. Schema metadata does
not count. A type that has no such form here is refused by name rather than hashed by its buffers.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.errors import SchemaError


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...


def table_sha256(table: pa.Table) -> str:
    """Hex digest of the table's meaning; equal for equal values under any chunking, slicing or null filler."""
    out = hashlib.sha256(f"table {table.num_rows} {table.num_columns}\n".encode())
    for field, column in zip(table.schema, table.columns, strict=True):
        out.update(f"column {len(field.name.encode())} {field.name}\n".encode())
        _hash_array(column.combine_chunks(), field.name, out)
    return out.hexdigest()


def array_sha256(array: npt.NDArray[Any]) -> str:
    """Hex digest of a numpy array: dtype (little-endian), shape, values in row order."""
    flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    out = hashlib.sha256(f"array {flat.dtype.str} {flat.shape}\n".encode())
    out.update(flat.reshape(-1).view(np.uint8).data)
    return out.hexdigest()


def _hash_array(array: pa.Array, name: str, out: _Hash) -> None:
    if isinstance(array, pa.ChunkedArray):  # combine_chunks of a column without chunks
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    if isinstance(array, pa.ExtensionArray):
        out.update(f"extension {array.type}\n".encode())
        array = array.storage
    kind = array.type
    out.update(f"type {kind} {len(array)}\n".encode())
    valid = np.asarray(pc.is_valid(array).to_numpy(zero_copy_only=False), np.bool_)
    out.update(np.packbits(valid).data)
    if pa.types.is_null(kind):
        return
    if pa.types.is_boolean(kind):
        out.update(np.packbits(array.fill_null(False).to_numpy(zero_copy_only=False)).data)
    elif pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            # flatten() pushes the parent's nulls down, so that a child under a null parent is null too
            out.update(f"field {kind.field(index).name}\n".encode())
            _hash_array(array.flatten()[index], name, out)
    elif (
        pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    ):
        lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
        out.update(lengths.to_numpy().data)
        _hash_array(pc.list_flatten(array), name, out)
    elif _is_bytes(kind):
        _hash_bytes(array, out)
    elif pa.types.is_fixed_size_binary(kind) or _is_fixed_width(kind):
        out.update(_fixed_values(array, valid).data)
    else:
        raise SchemaError(f"column {name!r} has type {kind}, which has no logical digest")


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _is_fixed_width(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_temporal(kind)
        or pa.types.is_decimal(kind)
    )


def _hash_bytes(array: pa.Array, out: _Hash) -> None:
    lengths = pc.fill_null(pc.binary_length(array), 0).cast(pa.int64())
    out.update(lengths.to_numpy().data)
    # Joining drops whatever stands under null slots and what a slice's parent left in the buffer.
    values = array.cast(pa.large_binary()).fill_null(b"")
    everything = pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)
    out.update(pc.binary_join(everything, pa.scalar(b"", pa.large_binary()))[0].as_buffer())


def _fixed_values(array: pa.Array, valid: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """The values' bytes [n, width], null slots zeroed."""
    width = array.type.bit_width // 8
    data = array.buffers()[1]
    if not len(array) or data is None:
        return np.zeros((len(array), width), np.uint8)
    raw = np.frombuffer(data, np.uint8, len(array) * width, array.offset * width)
    rows = raw.reshape(len(array), width).copy()
    rows[~valid] = 0
    return rows
