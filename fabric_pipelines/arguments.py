"""Arguments: what a caller hands to the Python door, judged whole before anything is sent.

Each reader takes one argument and gives it back as the fabric keeps it, or raises UsageError with the argument, the
row, what was found there and what may stand there. Rows are judged by Arrow in bulk; only what it does not take is
walked in Python, to find the row at fault. Nothing is rounded, cut or spelled out for the caller: Arrow by itself
would make 1 of 1.5 and two token ids of b"ab".
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.errors import UsageError
from fabric_pipelines.ids import canonical_json
from fabric_pipelines.worker.engines.sampling import REAL, WHOLE, wanted_number

NAME_MAX = 200  # characters of a name; broker/fields.py holds the broker to the same
LABELS_BYTES_MAX = 1 << 18  # with the sampling, well below what the broker takes of a header
SHOWN_MAX = 60  # characters of a wrong value in a sentence
UINT32_MAX = (1 << 32) - 1
INT64 = (-(1 << 63), (1 << 63) - 1)
UNREADABLE = (pa.ArrowException, TypeError, ValueError, OverflowError)
SINGLE = (str, bytes, bytearray, memoryview, Mapping, Set)


def shown(value: object) -> str:
    """A wrong value as a person can find it again: itself when it is small, else what it is."""
    if value is None or isinstance(value, str | bytes | bool | Integral | Real):
        text = repr(value.item() if isinstance(value, np.generic) else value)
        return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def wrong(name: str, value: object, wanted: str) -> UsageError:
    return UsageError(f"{name} is {shown(value)}; it must be {wanted}")


# ---- one value


def name(argument: str, value: object) -> str:
    """A name that travels in headers and lies in the database: no control characters, which Postgres refuses."""
    if not isinstance(value, str) or not 0 < len(value) <= NAME_MAX or not _is_printable(value):
        raise wrong(argument, value, f"text of 1 to {NAME_MAX} printable characters")
    return value


def free_text(argument: str, value: object) -> str:
    if not isinstance(value, str) or not is_utf8(value):
        raise wrong(argument, value, "text without lone surrogates")
    return value


def flag(argument: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise wrong(argument, value, "True or False")
    return value


def seconds(argument: str, value: Any) -> float | None:
    """None for no limit."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise wrong(argument, value, "a number of seconds from 0, or None for no limit")
    return float(value)


def callback(argument: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise wrong(argument, value, "something to call, or None")
    return value


def path(argument: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise wrong(argument, value, "a path")
    if "\0" in (text := str(os.fspath(value))) or not text:
        raise wrong(argument, text, "a path without a null character, not empty")
    return Path(text)


def labels(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong("labels", value, "a mapping of text to text")
    for key, item in value.items():
        if not isinstance(key, str) or not is_utf8(key):
            raise wrong("a key of labels", key, "text without lone surrogates")
        if not isinstance(item, str) or not is_utf8(item):
            raise wrong(f"labels[{shown(key)}]", item, "text without lone surrogates")
    if (size := len(canonical_json(dict(value)))) > LABELS_BYTES_MAX:
        raise UsageError(
            f"labels take {size} bytes as JSON, and at most {LABELS_BYTES_MAX} may be: what belongs to a task goes "
            "into its metadata"
        )
    return dict(value)


def sampling(value: object) -> dict[str, Any]:
    """Plain JSON whose numbers an engine can take; which fields there are is its engine's to say."""
    if not isinstance(value, Mapping):
        raise wrong("sampling", value, 'a mapping, for example {"kind": "generate"}')
    for key in value:
        if not isinstance(key, str):
            raise wrong("a key of sampling", key, "text")
    try:
        size = len(canonical_json(dict(value)))
    except (TypeError, ValueError, RecursionError) as fault:
        raise UsageError(
            f"sampling is not JSON ({type(fault).__name__}: {str(fault)[:160]})"
        ) from fault
    if size > LABELS_BYTES_MAX:
        raise UsageError(f"sampling takes {size} bytes as JSON; at most {LABELS_BYTES_MAX} may be")
    for key in (*WHOLE, *REAL):
        if key in value and (wanted := wanted_number(key, value[key])):
            raise wrong(f"sampling[{key!r}]", value[key], wanted)
    return dict(value)


def whole(argument: str, value: object, least: int, most: int) -> int:
    if not _is_whole(value, least, most):
        raise wrong(argument, value, _range_of(least, most))
    return int(value)  # type: ignore[call-overload, no-any-return]


# ---- a row a task


def column(argument: str, value: Any, of: str) -> Any:
    """A sequence that has a length and can be cut: a list, a tuple, a range, a numpy or an Arrow array."""
    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    if isinstance(value, str):
        raise UsageError(f"{argument} is one string; give a list of {of}, one a task")
    if isinstance(value, SINGLE) or not _has_rows(value):
        raise UsageError(f"{argument} is {shown(value)}; give a list of {of}, one a task")
    return value if isinstance(value, pa.Array | range) else list(value)


def texts(argument: str, value: Any) -> list[str]:
    rows = column(argument, value, "strings")
    if isinstance(rows, pa.Array):
        rows = rows.to_pylist()
    for row, text in enumerate(rows):
        if not isinstance(text, str) or not is_utf8(text):
            raise wrong(f"{argument}[{row}]", text, "text without lone surrogates")
        if not text:
            raise UsageError(f"{argument}[{row}] is empty; an empty prompt cannot be run")
    return list(rows)


def token_rows(argument: str, rows: Any, first: int, vocab_size: int) -> pa.Array:
    """list<uint32> of rows that begin at row `first` of the argument; each has ids below `vocab_size`."""
    try:
        found = rows if isinstance(rows, pa.Array) else pa.array(_ordered(rows))
        if _is_list(found.type) and pa.types.is_integer(found.type.value_type):
            lengths, ids = pc.list_value_length(found), found.flatten()
            holes = found.null_count or ids.null_count or not pc.min(lengths).as_py()
            if not holes and _all_within(ids, 0, vocab_size - 1):
                return found.cast(pa.list_(pa.uint32()))
    except UNREADABLE:
        pass  # the walk finds the row, or takes what Arrow alone does not, a `range` for example
    return pa.array(
        [
            _token_row(f"{argument}[{row}]", ids, vocab_size)
            for row, ids in enumerate(_listed(rows), first)
        ],
        pa.list_(pa.uint32()),
    )


def whole_rows(
    argument: str, rows: Any, first: int, bounds: tuple[int, int], kind: pa.DataType
) -> pa.Array:
    """Whole numbers within the bounds, as `kind`."""
    try:
        found = rows if isinstance(rows, pa.Array) else pa.array(rows)
        if pa.types.is_integer(found.type) and not found.null_count and _all_within(found, *bounds):
            return found.cast(kind)
    except UNREADABLE:
        pass
    numbers = [
        whole(f"{argument}[{row}]", item, *bounds) for row, item in enumerate(_listed(rows), first)
    ]
    return pa.array(numbers, kind)


def bytes_rows(argument: str, rows: Any, first: int) -> pa.Array:
    listed = _listed(rows)
    for row, item in enumerate(listed, first):
        if not isinstance(item, bytes | bytearray | memoryview):
            raise wrong(f"{argument}[{row}]", item, "bytes")
    return pa.array([bytes(item) for item in listed], pa.binary())


def require_sizes(tokens: pa.Array, metadata: pa.Array | None, first: int, most: int) -> None:
    """UsageError for a task that no journal frame holds."""
    sizes = 4 * pc.list_value_length(tokens).to_numpy(zero_copy_only=False).astype(np.int64)
    if metadata is not None:
        sizes += pc.binary_length(metadata).to_numpy(zero_copy_only=False)
    at = int(np.argmax(sizes))
    if sizes[at] > most:
        raise UsageError(
            f"task {first + at} takes {sizes[at]} bytes with its metadata, and at most {most} may be: cut it in parts"
        )


def is_utf8(text: str) -> bool:
    """Whether it can be written at all: a str may hold halves of UTF-16 pairs, which are no characters."""
    return text.isascii() or not any(0xD800 <= ord(sign) <= 0xDFFF for sign in text)


def _is_printable(text: str) -> bool:
    return is_utf8(text) and not any(ord(sign) < 0x20 or ord(sign) == 0x7F for sign in text)


def _is_whole(value: Any, least: int, most: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return least <= int(value) <= most


def _range_of(least: int, most: int) -> str:
    return f"a whole number from {least} to {most}"


def _has_rows(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return all(hasattr(value, part) for part in ("__len__", "__getitem__", "__iter__"))


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _all_within(values: pa.Array, least: int, most: int) -> bool:
    ends = pc.min_max(values).as_py()
    return ends["min"] is not None and least <= ends["min"] and ends["max"] <= most


def _ordered(rows: Sequence[Any]) -> Sequence[Any]:
    """TypeError for rows without an order, which Arrow takes in whatever order they have."""
    if any(isinstance(row, Set) for row in rows):
        raise TypeError("a set has no order")
    return rows


def _listed(rows: Any) -> Sequence[Any]:
    listed: Sequence[Any] = rows.to_pylist() if isinstance(rows, pa.Array) else rows
    return listed


def _token_row(argument: str, ids: Any, vocab_size: int) -> list[int]:
    if isinstance(ids, pa.Array):
        ids = ids.to_pylist()
    if isinstance(ids, SINGLE) or not _has_rows(ids):
        raise wrong(argument, ids, "a list of token ids")
    if len(ids) == 0:
        raise UsageError(f"{argument} is empty; an empty prompt cannot be run")
    most = vocab_size - 1
    at, item = next(
        ((at, item) for at, item in enumerate(ids) if not _is_whole(item, 0, most)), (-1, None)
    )
    if at >= 0:
        raise wrong(f"{argument}[{at}]", item, f"a token id of this engine, {_range_of(0, most)}")
    return [int(item) for item in ids]
