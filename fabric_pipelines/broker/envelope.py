"""A head of named values and a row of byte strings in one buffer: the form of every fact and every message.

    u32 length of head | u32 magic | head as canonical JSON | padding | part | padding | part ...

Everything starts at a multiple of 64 bytes, so an Arrow part inside a mapped journal is read without a copy.
Refuses any length that does not fit the buffer it came in.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import SchemaError
from fabric_pipelines.ids import canonical_json
from fabric_pipelines.records.arrow import Pieces

ALIGNMENT = 64
MAGIC = 0x46504631  # "FPF1"
_LENGTHS = struct.Struct("<II")
_LENGTHS_KEY = "#"

Part = bytes | bytearray | memoryview | Pieces
Piece = bytes | bytearray | memoryview


def as_part(values: npt.NDArray[Any]) -> memoryview:
    """The bytes of an array, without a copy where it is contiguous."""
    return np.ascontiguousarray(values).data.cast("B")


def pack(head: Mapping[str, Any], parts: Sequence[Part] = ()) -> list[Piece]:
    """Pieces to be written one after the other; `head` must be JSON."""
    sizes = [len(part) for part in parts]
    text = canonical_json({**head, _LENGTHS_KEY: sizes} if sizes else dict(head))
    pieces: list[Piece] = [_LENGTHS.pack(len(text), MAGIC) + text]
    written = len(pieces[0])
    for part in parts:
        if gap := -written % ALIGNMENT:
            pieces.append(bytes(gap))
        if isinstance(part, Pieces):
            pieces.extend(part)
        else:
            pieces.append(part)
        written = len(part)  # every part starts aligned, so only its own length counts from here
    return pieces


def unpack(buffer: Any) -> tuple[dict[str, Any], list[memoryview]]:
    """(head, parts); parts are views into `buffer`. Raises SchemaError for anything that does not add up."""
    view = memoryview(buffer).cast("B")
    if len(view) < _LENGTHS.size:
        raise SchemaError(f"a message of {len(view)} bytes is too short to be one")
    length, magic = _LENGTHS.unpack_from(view)
    end = _LENGTHS.size + length
    if magic != MAGIC or end > len(view):
        raise SchemaError("a message does not start with its own length")
    try:
        head = json.loads(bytes(view[_LENGTHS.size : end]))
        sizes = head.pop(_LENGTHS_KEY, [])
        if not isinstance(head, dict) or not isinstance(sizes, list):
            raise ValueError("it is of another kind")
    except (ValueError, AttributeError, TypeError, RecursionError) as fault:
        raise SchemaError(f"the head of a message is not a JSON object: {fault}") from fault
    parts = []
    for size in sizes:
        start = end + -end % ALIGNMENT
        if not isinstance(size, int) or size < 0 or start + size > len(view):
            raise SchemaError(f"a message of {len(view)} bytes declares a part that ends past it")
        end = start + size
        parts.append(view[start:end])
    return head, parts
