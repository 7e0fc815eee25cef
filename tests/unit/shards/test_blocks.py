"""Block files: the same values are the same file, and a file is what the manifest says or refused."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.shards.blocks import array_block, columns_block, map_array, map_columns


def written(folder, block):
    path = folder / block.path.replace("/", "-")
    path.write_bytes(block.content)
    return path


@pytest.mark.parametrize("shape", [(3, 384), (1, 1), (0, 7), (5,), (2**20, 1)])
def test_an_array_maps_back_aligned_and_numpy_reads_the_same_file(tmp_path, shape):
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    path = written(tmp_path, array_block("vectors", values))
    mapped = map_array(path, "<f4", shape)
    np.testing.assert_array_equal(mapped, values)
    np.testing.assert_array_equal(np.load(io.BytesIO(path.read_bytes())), values)
    assert mapped.ctypes.data % 64 == 0 or not mapped.size


def test_equal_values_have_one_name_whatever_their_memory():
    values = np.arange(12, dtype=np.int64)
    assert array_block("ids", values).path == array_block("ids", np.stack([values, values])[1]).path
    assert array_block("ids", values).path != array_block("ids", values[:11]).path


def test_a_file_that_is_not_what_the_manifest_lists_is_refused(tmp_path):
    path = written(tmp_path, array_block("ids", np.arange(4)))
    with pytest.raises(CorruptionFound, match="not the <i8 array of shape"):
        map_array(path, "<i8", (5,))
    path.write_bytes(b"")
    with pytest.raises(CorruptionFound, match="verify its receipt"):
        map_array(path, "<i8", (4,))
    with pytest.raises(CorruptionFound, match="is missing"):
        map_array(tmp_path / "gone.npy", "<i8", (4,))


def test_columns_keep_no_bytes_of_the_table_they_were_cut_from(tmp_path):
    table = pa.table({"word": ["secret", "a", "b"], "n": [1, None, 3]})
    block = columns_block("columns", table.slice(1, 2))
    assert b"secret" not in block.content
    assert (
        block.path == columns_block("columns", pa.table({"word": ["a", "b"], "n": [None, 3]})).path
    )
    assert map_columns(written(tmp_path, block)).equals(table.slice(1, 2))


def test_an_arrow_file_cut_short_is_refused(tmp_path):
    path = written(tmp_path, columns_block("columns", pa.table({"n": [1, 2]})))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptionFound, match="not an Arrow file"):
        map_columns(path)
