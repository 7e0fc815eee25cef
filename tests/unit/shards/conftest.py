"""Rows in clusters and a store that holds them in memory."""

from __future__ import annotations

import numpy as np
import pytest

from fabric_pipelines.testing.vector_store import MemoryVectorStore

ROWS, DIM = 400, 24


@pytest.fixture
def rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    centres = rng.standard_normal((8, DIM)) * 3
    vectors = centres[rng.integers(0, 8, ROWS)] + 0.5 * rng.standard_normal((ROWS, DIM))
    return np.arange(ROWS, dtype=np.int64) + (5 << 40), vectors.astype(np.float16)


@pytest.fixture
def store(rows) -> MemoryVectorStore:
    memory = MemoryVectorStore()
    memory.put(*rows)
    return memory
