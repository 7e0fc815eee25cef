"""The bytes of a generation depend on rows and recipe: not on threads, not on the processor's vector units."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from numpy._core import _multiarray_umath as numpy_core

BUILD = """
import hashlib, sys
import numpy as np
from fabric_pipelines.dataplane.source import Source
from fabric_pipelines.shards.content import IndexSpec, content_of
from fabric_pipelines.testing.vector_store import MemoryVectorStore

rng = np.random.default_rng(4)
rows = rng.standard_normal((1500, 96)) + 3
rows[700:900] = rows[0] + 1e-3 * rng.standard_normal((200, 96))  # near ties
store = MemoryVectorStore()
store.put(np.arange(1500), rows)
for metric in ("cosine", "l2"):
    content = content_of(store.read_source(Source()), IndexSpec(24, 5, metric))
    sys.stdout.write("".join(entry.sha256 for entry, _ in content.blocks))
"""
VECTOR_UNITS = [
    name for name in numpy_core.__cpu_dispatch__ if numpy_core.__cpu_features__.get(name)
]


def built(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BUILD],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def as_usual() -> str:
    return built()


@pytest.mark.parametrize(
    "environment",
    [
        {"OPENBLAS_NUM_THREADS": "1"},
        {"OPENBLAS_NUM_THREADS": "7"},
        {"OPENBLAS_CORETYPE": "Nehalem"},
        {"NPY_DISABLE_CPU_FEATURES": " ".join(VECTOR_UNITS)},
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_threads_and_vector_units_do_not_change_a_byte(as_usual, environment):
    assert len(as_usual) >= 64 * 10
    assert built(**environment) == as_usual
