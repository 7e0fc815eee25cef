"""Completion batch: the outcome of each task, as the worker reports it and as completion pulls it.

A worker sends COMPLETION_SCHEMA. The broker journals it, and hands it on as PULLED_SCHEMA, which adds what
only the broker knows for certain (function, submission, how often it was requeued from the dead letters, the session that held it last). `status` is one of STATUSES; `finish_reason` is
the engine's own word, never guessed from lengths. `attempts` is that of the lease: it tells a failure that is
reported again from the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.records.arrow import require_schema

STATUSES = ("ok", "refused", "failed")
FINISH_REASONS = ("stop", "length", "single_pass", "oversized", "timeout", "cancelled", "error")
ERROR_TEXT_BYTES_MAX = 256
VECTOR_ELEMENT_BYTES = 2

COMPLETION_SCHEMA = pa.schema(
    [
        pa.field("task_id", pa.int64(), nullable=False),
        pa.field("source_row", pa.int64(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("output", pa.list_(pa.uint32())),
        pa.field("vector", pa.list_(pa.float16())),
        pa.field("artifact_uri", pa.string()),
        pa.field("artifact_sha256", pa.string()),
        pa.field("prompt_tokens", pa.uint32(), nullable=False),
        pa.field("padded_tokens", pa.uint32(), nullable=False),
        pa.field("error_code", pa.string()),
        pa.field("error_text", pa.string()),
        pa.field("attempts", pa.uint8(), nullable=False),
        pa.field("engine", pa.string(), nullable=False),
        pa.field("engine_fingerprint", pa.string(), nullable=False),
        pa.field("t_start_us", pa.int64(), nullable=False),
        pa.field("t_end_us", pa.int64(), nullable=False),
        pa.field("metadata", pa.binary(), nullable=False),
    ]
)
PULLED_SCHEMA = pa.schema(
    [
        pa.field("function", pa.string(), nullable=False),
        pa.field("submission_id", pa.string(), nullable=False),
        pa.field("requeues", pa.uint8(), nullable=False),
        pa.field("consumer", pa.string(), nullable=False),
        *COMPLETION_SCHEMA,
    ]
)


def completion_batch(columns: Mapping[str, Sequence[Any] | pa.Array]) -> pa.RecordBatch:
    """A checked completion batch; columns left out are null (only where the schema allows it)."""
    count = len(columns["task_id"])
    arrays = []
    for field in COMPLETION_SCHEMA:
        given = columns.get(field.name)
        if given is None:
            assert field.nullable, f"completion column {field.name} may not be left out"
            arrays.append(pa.nulls(count, field.type))
        else:
            arrays.append(given if isinstance(given, pa.Array) else pa.array(given, field.type))
    batch = pa.RecordBatch.from_arrays(arrays, schema=COMPLETION_SCHEMA)
    require_schema(batch, COMPLETION_SCHEMA, "completion batch")
    return batch


def largest_vector(batch: pa.RecordBatch) -> int:
    """Bytes of the largest vector in a completion batch, 0 without any."""
    vectors = batch.column("vector")
    if vectors.null_count == batch.num_rows:
        return 0
    return VECTOR_ELEMENT_BYTES * int(pc.max(pc.list_value_length(vectors)).as_py())


def clip_error_text(text: str) -> str:
    """At most ERROR_TEXT_BYTES_MAX bytes of UTF-8, cut at a character."""
    return text.encode()[:ERROR_TEXT_BYTES_MAX].decode(errors="ignore")
