"""Every column of every sink, as its table has it: the stream equals that of psycopg's row writer, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import postgres as pg
from psycopg._copy_base import BinaryFormatter
from psycopg.adapt import Transformer

from fabric_pipelines.dataplane.encode import Column, encode_copy
from fabric_pipelines.dataplane.sinks import (
    GENERIC,
    SINKS,
    Landing,
    Rejection,
    Sink,
    dead_letter_columns,
)
from fabric_pipelines.records.completion import PULLED_SCHEMA

# Drawn by a seeded generator and not by hypothesis: twenty columns of lists are slow to draw, and there is
# little to shrink. The edges of each type come up in every few rows.
LETTERS = ["", "a", "plain", "\n\t\\", "\u00e4\u20ac\U0001f600", "x" * 300]
HALVES = [0.0, -0.0, 1.5, -65504.0, 6e-8, float("inf"), float("-inf"), float("nan")]


def _integers(low: int, high: int) -> Callable[[Random], int]:
    return lambda draw: draw.choice([low, high, draw.randint(low, high)])


VALUES: dict[pa.DataType, Callable[[Random], Any]] = {
    pa.string(): lambda draw: draw.choice(LETTERS),
    pa.binary(): lambda draw: draw.randbytes(draw.choice([0, 1, 9, 300])),
    pa.int64(): _integers(-(2**63), 2**63 - 1),
    pa.list_(pa.uint32()): lambda draw: [
        _integers(0, 2**32 - 1)(draw) for _ in range(draw.choice([0, 1, 4]))
    ],
    pa.list_(pa.float16()): lambda draw: [
        draw.choice(HALVES) for _ in range(draw.choice([0, 1, 4]))
    ],
    pa.uint32(): _integers(0, 2**31 - 1),  # what an int4 column takes; more is foreseen
    pa.uint16(): _integers(0, 2**15 - 1),
    pa.uint8(): _integers(0, 2**8 - 1),
    pa.int16(): _integers(-(2**15), 2**15 - 1),
    pa.int32(): _integers(-(2**31), 2**31 - 1),
}


@st.composite
def _pulled(draw: st.DrawFn) -> pa.RecordBatch:
    """A slice out of the middle of a longer batch, so that no buffer begins where the rows do."""
    rows, nulls = draw(st.integers(1, 7)), draw(st.sampled_from([0.0, 0.3, 1.0]))
    random = Random(draw(st.integers(0, 2**32)))
    columns = []
    for field in PULLED_SCHEMA:
        values = [
            None if field.nullable and random.random() < nulls else VALUES[field.type](random)
            for _ in range(rows + 3)
        ]
        columns.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=PULLED_SCHEMA).slice(2, rows)


def _python(kind: str, values: pa.Array) -> list[Any]:
    """What psycopg must be given so that it writes the same column; a halfvec as its wire bytes."""
    if kind != "halfvec":
        return values.to_pylist()
    return [
        None
        if row is None
        else len(row).to_bytes(2, "big") + b"\0\0" + np.array(row, ">f2").tobytes()
        for row in values.to_pylist()
    ]


def _by_psycopg(columns: list[Column]) -> bytes:
    transformer = Transformer()
    formatter = BinaryFormatter(transformer)
    kinds = ["bytea" if column.kind == "halfvec" else column.kind for column in columns]
    transformer.set_dumper_types([pg.types[kind].oid for kind in kinds], 1)
    rows = zip(*(_python(column.kind, column.values) for column in columns), strict=True)
    written = b"".join(bytes(formatter.write_row(row)) for row in rows)
    return written + bytes(formatter.end())


def _encoded(columns: list[Column]) -> bytes:
    return b"".join(bytes(piece) for piece in encode_copy(columns))


@pytest.mark.parametrize("vector_type", ["halfvec", "bytea"])
@pytest.mark.parametrize("sink", [*SINKS.values(), GENERIC], ids=lambda sink: sink.function)
@given(batch=_pulled())
def test_a_sinks_stream_equals_that_of_write_row(
    sink: Sink, vector_type: str, batch: pa.RecordBatch
) -> None:
    columns = sink.encode(batch, Landing(vector_type))
    assert _encoded(columns) == _by_psycopg(columns)


@given(batch=_pulled())
def test_dead_letters_are_written_as_write_row_would(batch: pa.RecordBatch) -> None:
    rejections = [Rejection(row, "22000", "why\x00") for row in range(batch.num_rows)]
    columns = dead_letter_columns(batch, rejections, [b"raw"] * batch.num_rows)
    assert _encoded(columns) == _by_psycopg(columns)


@given(batch=_pulled(), cut=st.integers(0, 7))
def test_several_chunks_are_written_as_one(batch: pa.RecordBatch, cut: int) -> None:
    whole = SINKS["generate"].encode(batch, Landing("halfvec"))
    pieces = [
        Column(
            item.name,
            item.kind,
            pa.chunked_array([item.values.slice(0, cut), item.values.slice(cut)], item.values.type),
        )
        for item in whole
    ]
    assert _encoded(pieces) == _encoded(whole)


@given(
    st.lists(st.none() | st.lists(st.floats(width=16), min_size=3, max_size=3), max_size=6),
    st.integers(0, 6),
)
def test_fixed_size_lists_with_nulls_and_slices_are_written_as_lists(
    rows: list[Any], first: int
) -> None:
    fixed = pa.array(rows, pa.list_(pa.float16(), 3)).slice(first)
    plain = pa.array(rows[first:], pa.list_(pa.float16()))
    assert _encoded([Column("v", "halfvec", fixed)]) == _encoded([Column("v", "halfvec", plain)])


@pytest.mark.parametrize(
    ("kind", "small", "large"),
    [
        ("text", pa.string(), pa.large_string()),
        ("bytea", pa.binary(), pa.large_binary()),
        ("bytea", pa.binary(), pa.binary_view()),
    ],
)
def test_large_and_view_types_are_written_as_the_plain_ones(
    kind: str, small: pa.DataType, large: pa.DataType
) -> None:
    values: list[Any] = ["a", None, "", "bcd"] if kind == "text" else [b"a", None, b"", b"bcd"]
    of = [
        _encoded([Column("c", kind, pa.array(values, type_).slice(1))]) for type_ in (small, large)
    ]
    assert of[0] == of[1]


def test_large_lists_are_written_as_lists() -> None:
    rows = [[1.0, 2.0], None, [], [3.0]]
    large = pa.array(rows, pa.large_list(pa.float16()))
    plain = pa.array(rows, pa.list_(pa.float16()))
    assert _encoded([Column("v", "halfvec", large)]) == _encoded([Column("v", "halfvec", plain)])


def test_every_kind_that_a_sink_uses_is_tested_here() -> None:
    used = {column.kind for sink in [*SINKS.values(), GENERIC] for column in sink.columns}
    assert used == {"int8", "int4", "int2", "text", "bytea", "vector"}
