"""A published shard of clustered rows with its receipt, in memory and a temp folder."""

from __future__ import annotations

import numpy as np
import pytest

from fabric_pipelines import receipts, shards
from fabric_pipelines.testing.vector_store import MemoryVectorStore

ROWS, DIM = 300, 16


@pytest.fixture
def store() -> MemoryVectorStore:
    rng = np.random.default_rng(2)
    centres = rng.standard_normal((6, DIM)) * 3
    vectors = centres[rng.integers(0, 6, ROWS)] + 0.5 * rng.standard_normal((ROWS, DIM))
    vectors[7] = 0  # quarantined
    memory = MemoryVectorStore()
    memory.put(np.arange(ROWS, dtype=np.int64) + (5 << 40), vectors)
    return memory


SHAPE = {"lists": 6, "seed": 7, "metric": "cosine", "lists_per_block": 2}


@pytest.fixture
def generation(store, tmp_path):
    recipe = {"engine_fingerprint": "ab" * 32, "weights_sha256": "cd" * 32}
    return shards.build(store, tmp_path, "notes", recipe=recipe, **SHAPE)


@pytest.fixture
def build_along(store, tmp_path):
    """Call it: a full build along the centroids of the published generation."""
    return lambda: shards.build(store, tmp_path, "notes", recipe={}, keep_centroids=True, **SHAPE)


@pytest.fixture
def receipt(store, tmp_path, generation):
    return receipts.issue(store, tmp_path, "notes")
