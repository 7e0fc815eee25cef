"""Batches as completion pulls them, alike for every way that is measured; made before any clock runs.

Vectors of 384 halves or outputs of 64 tokens, ids that go on from batch to batch. Pure numpy and Arrow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.ids import SEQUENCE_BITS
from fabric_pipelines.records.completion import PULLED_SCHEMA

DIM = 384
OUTPUT_TOKENS = 64
INCARNATION = 7
FUNCTIONS = ("embed", "generate")


def batch(function: str, rows: int, first: int, seed: int = 0) -> pa.RecordBatch:
    """`rows` pulled completions of `function`, sequence numbers from `first`."""
    rng = np.random.default_rng((seed, first))
    vectors = outputs = None
    if function == "embed":
        values = rng.standard_normal(rows * DIM, np.float32).astype(np.float16)
        vectors = _lists(values, DIM)
    else:
        outputs = _lists(
            rng.integers(0, 50_000, rows * OUTPUT_TOKENS).astype(np.uint32), OUTPUT_TOKENS
        )
    ids = (INCARNATION << SEQUENCE_BITS) + np.arange(first, first + rows, dtype=np.int64)
    given = {
        "task_id": pa.array(ids),
        "source_row": pa.array(np.arange(first, first + rows, dtype=np.int64)),
        "function": _same(function, rows),
        "submission_id": _same("5" * 64, rows),
        "status": _same("ok", rows),
        "finish_reason": _same("single_pass" if vectors is not None else "length", rows),
        "vector": vectors,
        "output": outputs,
        "prompt_tokens": pa.array(rng.integers(1, 500, rows).astype(np.uint32)),
        "engine": _same("all-minilm-l6-v2@onnxruntime-fp32", rows),
        "engine_fingerprint": _same("f" * 64, rows),
        "metadata": _same(b"", rows),
        "requeues": _same(0, rows),
    }
    columns = []
    for field in PULLED_SCHEMA:
        column = given.get(field.name)
        if column is None:
            column = pa.nulls(rows, field.type) if field.nullable else _same(1, rows)
        columns.append(column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=PULLED_SCHEMA)


def _lists(values: npt.NDArray[Any], size: int) -> pa.ListArray:
    offsets = np.arange(0, len(values) + 1, size, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _same(value: object, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value), rows)
