"""The Arrow encoder writes what psycopg's own row writer writes, byte for byte."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import postgres as pg
from psycopg._copy_base import BinaryFormatter
from psycopg.adapt import Transformer
from psycopg.types.json import Jsonb

from fabric_pipelines.dataplane.encode import Column, encode_copy, packed
from fabric_pipelines.errors import SchemaError

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
OLDEST, NEWEST = datetime.fromisoformat("1900-01-01"), datetime.fromisoformat("2200-01-01")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "bool": (pa.bool_(), st.booleans()),
    "int2": (pa.int8(), st.integers(-(2**7), 2**7 - 1)),
    "int4": (pa.uint32(), st.integers(0, 2**31 - 1)),
    "int8": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float4": (pa.float32(), st.floats(width=32)),
    "float8": (pa.float64(), st.floats()),
    "timestamptz": (
        pa.timestamp("us", "UTC"),
        st.datetimes(OLDEST, NEWEST, timezones=st.just(UTC)),
    ),
    "text": (pa.string(), TEXT),
    "bytea": (pa.binary(), st.binary(max_size=12)),
    "jsonb": (pa.string(), st.sampled_from(["{}", '{"a": [1, null]}', '"x"'])),
}


class _Json(str):
    """Text that is JSON already."""


def _by_psycopg(kinds: list[str], rows: list[list[Any]]) -> bytes:
    transformer = Transformer()
    formatter = BinaryFormatter(transformer)
    transformer.set_dumper_types([pg.types[kind].oid for kind in kinds], psycopg.pq.Format.BINARY)
    written = b"".join(
        bytes(formatter.write_row([_as_psycopg(k, v) for k, v in zip(kinds, row, strict=True)]))
        for row in rows
    )
    return written + bytes(formatter.end())


def _as_psycopg(kind: str, value: Any) -> Any:
    return Jsonb(value, dumps=str) if kind == "jsonb" and value is not None else value


@st.composite
def _tables(draw: st.DrawFn) -> tuple[list[str], list[list[Any]], list[pa.ChunkedArray]]:
    kinds = draw(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=6))
    count = draw(st.integers(1, 12))
    columns = [
        draw(st.lists(_maybe(kind, draw(st.booleans())), min_size=count, max_size=count))
        for kind in kinds
    ]
    cut = draw(st.integers(0, count))
    arrays = []
    for kind, column in zip(kinds, columns, strict=True):
        kin = TYPES[kind][0]
        # slices of a longer parent, so that offsets are not zero
        padded = pa.array([None, *column, None], kin)
        whole = padded.slice(1, count)
        arrays.append(pa.chunked_array([whole.slice(0, cut), whole.slice(cut)], kin))
    return kinds, [list(row) for row in zip(*columns, strict=True)], arrays


def _maybe(kind: str, nulls: bool) -> st.SearchStrategy[Any]:
    return st.none() | TYPES[kind][1] if nulls else TYPES[kind][1]


def _encode(kinds: list[str], arrays: list[Any]) -> bytes:
    columns = [
        Column(f"c{n}", kind, array)
        for n, (kind, array) in enumerate(zip(kinds, arrays, strict=True))
    ]
    return b"".join(bytes(piece) for piece in encode_copy(columns))


@given(_tables())
def test_bytes_equal_those_of_write_row(table: tuple[Any, Any, Any]) -> None:
    kinds, rows, arrays = table
    assert _encode(kinds, arrays) == _by_psycopg(kinds, rows)


@given(st.lists(st.none() | st.lists(st.floats(width=16), max_size=4), min_size=1, max_size=9))
def test_halfvec_is_dimension_zero_word_and_big_endian_halves(rows: list[Any]) -> None:
    bodies = [
        None
        if row is None
        else len(row).to_bytes(2, "big") + b"\0\0" + np.array(row, ">f2").tobytes()
        for row in rows
    ]
    array = pa.array([[1.0], *rows], pa.list_(pa.float16())).slice(1)
    assert _encode(["halfvec"], [array]) == _by_psycopg(["bytea"], [[body] for body in bodies])


@given(st.lists(st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=5), max_size=9))
def test_packed_lists_are_little_endian_words(rows: list[Any]) -> None:
    array = pa.array([[7, 8], *rows], pa.list_(pa.uint32())).slice(1)
    expected = [None if row is None else np.array(row, "<u4").tobytes() for row in rows]
    assert packed(array).to_pylist() == expected


def test_bytes_that_a_null_slot_hides_do_not_reach_the_stream() -> None:
    secret = pa.Array.from_buffers(
        pa.binary(),
        2,
        [
            pa.py_buffer(b"\x02"),
            pa.py_buffer(np.array([0, 6, 8], np.int32)),
            pa.py_buffer(b"secretok"),
        ],
    )
    assert _encode(["bytea"], [secret]) == _by_psycopg(["bytea"], [[None], [b"ok"]])


def test_fixed_size_lists_dictionaries_and_views_are_taken_as_they_are() -> None:
    vectors = pa.array([[1.0, 2.0]], pa.list_(pa.float16(), 2))
    assert _encode(["halfvec"], [vectors]) == _encode(
        ["halfvec"], [vectors.cast(pa.list_(pa.float16()))]
    )
    words = pa.array(["a", "b", "a"])
    assert _encode(["text"], [words.dictionary_encode()]) == _encode(["text"], [words])
    assert _encode(["text"], [words.cast(pa.string_view())]) == _encode(["text"], [words])


def test_a_timestamp_before_1970_keeps_its_microseconds() -> None:
    moment = EPOCH - timedelta(microseconds=1)
    array = pa.array([moment], pa.timestamp("us", "UTC"))
    assert _encode(["timestamptz"], [array]) == _by_psycopg(["timestamptz"], [[moment]])


@pytest.mark.parametrize(
    ("kind", "array", "said"),
    [
        ("int4", pa.array([2**31], pa.uint32()), "int4"),
        ("halfvec", pa.array([[1.0, None]], pa.list_(pa.float16())), "null elements"),
        ("halfvec", pa.array([[0.0] * 16_001], pa.list_(pa.float16())), "16000"),
        ("halfvec", pa.array(["x"]), "expected a list"),
    ],
)
def test_what_does_not_fit_its_kind_is_refused_by_name(kind: str, array: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=f"'c0'.*{said}"):
        _encode([kind], [array])


def test_no_rows_make_an_empty_stream() -> None:
    empty = encode_copy([Column("a", "int8", pa.array([], pa.int64()))])
    assert b"".join(empty)[-2:] == b"\xff\xff"
