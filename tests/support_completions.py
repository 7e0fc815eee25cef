"""Pulled batches with believable content, for whoever lands, reads or indexes results."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from fabric_pipelines.ids import task_id
from fabric_pipelines.records.completion import PULLED_SCHEMA

ENGINES = {
    "generate": "smollm2-135m-instruct@ctranslate2-int8",
    "embed": "all-minilm-l6-v2@onnxruntime-fp32",
}


def pulled_batch(
    rows: int,
    *,
    function: str,
    first: int = 0,
    incarnation: int = 7,
    dim: int = 8,
    submission_id: str = "5" * 64,
    requeues: int = 0,
    bad: Mapping[int, tuple[str, str | None, str | None]] | None = None,
    poison: Mapping[int, float] | None = None,
    seed: int = 0,
) -> pa.RecordBatch:
    """`bad`: row -> (status, error code, error text); `poison`: row -> value put into its vector."""
    rng = np.random.default_rng(seed + first)
    single_pass = function in ("embed", "hidden_states")
    vectors = rng.normal(size=(rows, dim)).astype(np.float16)
    for row, value in (poison or {}).items():
        vectors[row, 0] = value
    lengths = rng.integers(1, 12, rows)
    outputs = [rng.integers(0, 49_152, count).tolist() for count in lengths]
    said = [(bad or {}).get(row, ("ok", None, None)) for row in range(rows)]
    good = [status == "ok" for status, _, _ in said]
    columns = {
        "function": [function] * rows,
        "submission_id": [submission_id] * rows,
        "requeues": [requeues] * rows,
        "consumer": ["worker-1"] * rows,
        "task_id": [task_id(incarnation, first + row) for row in range(rows)],
        "source_row": list(range(first, first + rows)),
        "status": [status for status, _, _ in said],
        "finish_reason": ["single_pass" if single_pass else "stop"] * rows,
        "output": [
            None if single_pass or not ok else ids for ids, ok in zip(outputs, good, strict=True)
        ],
        "vector": [
            list(row) if single_pass and ok else None for row, ok in zip(vectors, good, strict=True)
        ],
        "artifact_uri": [None] * rows,
        "artifact_sha256": [None] * rows,
        "prompt_tokens": rng.integers(1, 500, rows).tolist(),
        "padded_tokens": [0] * rows,
        "error_code": [code for _, code, _ in said],
        "error_text": [text for _, _, text in said],
        "attempts": [1] * rows,
        "engine": [ENGINES.get(function, ENGINES["generate"])] * rows,
        "engine_fingerprint": ["f" * 64] * rows,
        "t_start_us": [1_700_000_000_000_000] * rows,
        "t_end_us": [1_700_000_000_500_000] * rows,
        "metadata": [b"m"] * rows,
    }
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[field.name], field.type) for field in PULLED_SCHEMA], schema=PULLED_SCHEMA
    )
