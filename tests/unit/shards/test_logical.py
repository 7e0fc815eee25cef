"""The logical digest follows meaning, never memory."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.errors import SchemaError
from fabric_pipelines.shards.logical import array_sha256, table_sha256

COLUMNS = {
    "int": pa.array([1, None, 3, 4], pa.int64()),
    "float16": pa.array(np.array([1, 2, 3, 4], np.float16)),
    "bool": pa.array([True, None, False, True]),
    "string": pa.array(["a", None, "", "äß"]),
    "large": pa.array([b"a", b"bc", None, b""], pa.large_binary()),
    "list": pa.array([[1, 2], None, [], [None]], pa.list_(pa.uint32())),
    "strings": pa.array([["x", None], None, [], ["yz"]], pa.large_list(pa.string())),
    "fixed": pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.int16(), 2)),
    "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "y"}, {"a": 2, "b": None}]),
    "time": pa.array([1, 2, None, 4], pa.timestamp("us")),
    "uuid": pa.array([b"ab", None, b"cd", b"ef"], pa.binary(2)),
    "null": pa.nulls(4),
    "word": pa.array(["a", "b", None, "a"]).dictionary_encode(),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_slice_of_a_longer_array_is_what_it_shows(name):
    whole = pa.concat_arrays([COLUMNS[name], COLUMNS[name]]) if name != "word" else COLUMNS[name]
    first = table_sha256(pa.table({"x": COLUMNS[name][1:3]}))
    assert table_sha256(pa.table({"x": whole[1:3]})) == first
    assert table_sha256(pa.table({"x": pa.concat_arrays([whole[1:2], whole[2:3]])})) == first


@pytest.mark.parametrize("name", COLUMNS)
def test_chunks_and_metadata_do_not_count(name):
    column = COLUMNS[name]
    whole = pa.table({"x": column})
    cut = pa.table({"x": pa.chunked_array([column[:1], column[1:3], column[3:]])})
    assert table_sha256(cut) == table_sha256(whole)
    assert table_sha256(whole.replace_schema_metadata({"note": "x"})) == table_sha256(whole)


@pytest.mark.parametrize("name", [n for n in COLUMNS if n != "null"])
def test_another_order_of_rows_is_another_digest(name):
    column = COLUMNS[name]
    turned = column.take(pa.array([3, 2, 1, 0]))
    assert table_sha256(pa.table({"x": turned})) != table_sha256(pa.table({"x": column}))


def test_bytes_under_nulls_are_ghosts():
    valid = pa.py_buffer(bytes([0b101]))
    tables = [
        pa.table(
            {"x": pa.Array.from_buffers(pa.int32(), 3, [valid, pa.py_buffer(values.tobytes())])}
        )
        for values in (np.array([1, 0, 3], np.int32), np.array([1, 77, 3], np.int32))
    ]
    assert tables[0].equals(tables[1])
    assert table_sha256(tables[0]) == table_sha256(tables[1])


def test_null_is_not_zero_and_names_and_types_count():
    digests = {
        table_sha256(pa.table({"x": pa.array([0, 1])})),
        table_sha256(pa.table({"x": pa.array([None, 1], pa.int64())})),
        table_sha256(pa.table({"y": pa.array([0, 1])})),
        table_sha256(pa.table({"x": pa.array([0, 1], pa.int32())})),
        table_sha256(pa.table({"x": pa.array(["", "1"])})),
        table_sha256(pa.table({"x": pa.array([None, "1"])})),
    }
    assert len(digests) == 6


def test_an_empty_table_has_a_digest():
    empty = pa.table({"x": pa.chunked_array([], pa.string())})
    assert table_sha256(empty) == table_sha256(pa.table({"x": pa.array([], pa.string())}))


def test_a_type_without_a_logical_form_is_refused_by_name():
    column = pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))
    with pytest.raises(SchemaError, match=r"column 'x' has type map"):
        table_sha256(pa.table({"x": column}))


def test_arrays_are_told_apart_by_type_shape_and_value():
    base = np.arange(6, dtype=np.float32)
    assert array_sha256(base) == array_sha256(base[::1].copy())
    assert array_sha256(base.reshape(2, 3)) != array_sha256(base.reshape(3, 2))
    assert array_sha256(base) != array_sha256(base.astype(np.float64))
    assert array_sha256(base.astype(">f4")) == array_sha256(base)
