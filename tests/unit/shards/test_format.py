"""The format on disk is pinned: these digests are of bytes that are out there (FORMAT.md)."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.dataplane.source import Source
from fabric_pipelines.shards.blocks import HEADER_BYTES, array_block
from fabric_pipelines.shards.content import IndexSpec, content_of
from fabric_pipelines.shards.logical import array_sha256, table_sha256
from fabric_pipelines.testing.vector_store import MemoryVectorStore

ARRAYS = {
    "float32": np.arange(12, dtype=np.float32).reshape(4, 3) / 2,
    "int64": np.array([1, -2, 1 << 40], np.int64),
    "empty": np.empty((0, 384), np.float32),
}
TABLE = pa.table(
    {
        "n": pa.array([1, None, 3], pa.int64()),
        "s": ["a", None, "äß"],
        "l": pa.array([[1], None, []], pa.list_(pa.int32())),
    }
)
PINNED = {
    "float32": ("809cc427664edcd0", "23c451734a33c84d"),
    "int64": ("92795bfbcbf422b8", "15319ff107182c86"),
    "empty": ("9f62ffa6d4de0518", "e7b40d0c8f3c6caf"),
    "table": "240ebc205ef83198",
    "cosine": "15a7703ead5f4427",
    "l2": "b0a20450f41c7afb",
    "manifest": "3c903c376921c6c7",
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_file_keeps_its_bytes(name):
    block = array_block("x", ARRAYS[name])
    assert len(block.content) == HEADER_BYTES + ARRAYS[name].nbytes
    assert (block.sha256[:16], block.logical_sha256[:16]) == PINNED[name]
    assert block.logical_sha256 == array_sha256(ARRAYS[name])


def test_a_table_keeps_its_logical_digest():
    assert table_sha256(TABLE)[:16] == PINNED["table"]


def test_the_same_rows_are_still_cut_into_the_same_files():
    store = MemoryVectorStore()
    grid = np.array([[x, y, 1] for x in range(8) for y in range(8)], np.float16)
    store.put(np.arange(64), grid)
    for metric in ("cosine", "l2"):
        content = content_of(store.read_source(Source()), IndexSpec(5, 3, metric))
        names = "".join(f"{entry.role} {entry.sha256}\n" for entry, _ in content.blocks)
        assert hashlib.sha256(names.encode()).hexdigest()[:16] == PINNED[metric]


def test_a_manifest_keeps_its_bytes():
    store = MemoryVectorStore()
    store.put(np.arange(4), np.eye(4))
    spec = IndexSpec(2, 3, "l2", iterations=2)
    content = content_of(store.read_source(Source()), spec)
    manifest = content.manifest(
        name="x", generation=1, token=2, spec=spec, source={"rows": 4}, recipe={}, parents=[]
    )
    assert hashlib.sha256(manifest.to_bytes()).hexdigest()[:16] == PINNED["manifest"]
