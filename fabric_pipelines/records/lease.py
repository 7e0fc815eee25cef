"""Lease: tasks of one lane, handed to one session for a time.

LEASE_SCHEMA is what a worker receives. The schema's metadata carries the lease itself (see `Lease.from_batch`),
so one Arrow batch is the whole answer. Rows are in prefix order; `leader` flags the first row of each
group that shares a prefix, which the runtime starts first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from fabric_pipelines.errors import SchemaError
from fabric_pipelines.given import value_of
from fabric_pipelines.records.arrow import require_schema

LEASE_SCHEMA = pa.schema(
    [
        pa.field("task_id", pa.int64(), nullable=False),
        pa.field("tokens", pa.list_(pa.uint32()), nullable=False),
        pa.field("max_new_tokens", pa.uint32(), nullable=False),
        pa.field("source_row", pa.int64(), nullable=False),
        pa.field("metadata", pa.binary(), nullable=False),
        pa.field("attempts", pa.uint8(), nullable=False),
        pa.field("leader", pa.bool_(), nullable=False),
    ]
)
METADATA_KEY = b"fabric.lease"


@dataclass(frozen=True, slots=True)
class Lease:
    """lease_id: dense number of this broker incarnation; lane: printable key; deadline_us: wall time in us at
    which the broker may expire it unless renewed; sampling: see records/shape.py; tasks: LEASE_SCHEMA."""

    lease_id: int
    lane: str
    engine: str
    sampling: Mapping[str, Any]
    aligned_length: int
    deadline_us: int
    tasks: pa.RecordBatch

    def to_batch(self) -> pa.RecordBatch:
        head = {name: getattr(self, name) for name in HEAD_FIELDS}
        head["sampling"] = dict(self.sampling)
        return self.tasks.replace_schema_metadata({METADATA_KEY: json.dumps(head).encode()})

    @classmethod
    def from_batch(cls, batch: pa.RecordBatch) -> Lease:
        require_schema(batch, LEASE_SCHEMA, "lease")
        head = (batch.schema.metadata or {}).get(METADATA_KEY)
        if head is None:
            raise SchemaError("lease batch carries no lease header in its schema metadata")
        try:
            told = {**json.loads(head), "tasks": batch}
        except (ValueError, TypeError) as fault:
            raise SchemaError(f"lease batch has an unreadable header ({fault}): {SAME}") from fault
        return value_of(
            cls, told, "the lease batch", what="lease", remedy=SAME, newer=SAME, error=SchemaError
        )


SAME = "install the same fabric-pipelines on both sides"
HEAD_FIELDS = ("lease_id", "lane", "engine", "sampling", "aligned_length", "deadline_us")
