"""Vectors that no vector column can hold go to the lake; their rows land with the object's name instead.

One Parquet object a landing with (task_id, vector), recorded before the rows commit, so that a committed row
never names an object that is not there. Refuses nothing: small vectors pass through untouched.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.encode import HALFVEC_DIM_MAX
from fabric_pipelines.dataplane.lake import Lake, record


def spill(batch: pa.RecordBatch, lake: Lake, database: Database) -> pa.RecordBatch:
    """`batch` with each vector above HALFVEC_DIM_MAX elements replaced by artifact_uri and artifact_sha256."""
    counts = pc.list_value_length(batch.column("vector")).fill_null(0)
    large = pc.greater(counts, HALFVEC_DIM_MAX)
    if not pc.any(large).as_py():
        return batch
    function = batch.column("function")[0].as_py()
    rows = pa.table([batch.column(name) for name in ("task_id", "vector")], ["task_id", "vector"])
    artifact = lake.put(f"{_folder(function)}/vectors.parquet", rows.filter(large))
    record(database, artifact)
    nothing = pa.nulls(batch.num_rows, batch.schema.field("vector").type)
    replaced = {
        "vector": _where(large, nothing, batch.column("vector")),
        "artifact_uri": pc.if_else(large, artifact.uri, batch.column("artifact_uri")),
        "artifact_sha256": pc.if_else(large, artifact.sha256, batch.column("artifact_sha256")),
    }
    columns = [replaced.get(field.name, batch.column(field.name)) for field in batch.schema]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _where(mask: pa.Array, yes: pa.Array, no: pa.Array) -> pa.Array:
    """if_else for lists, which Arrow's own does not take for every element type: pick rows by position."""
    flags = mask.to_numpy(zero_copy_only=False)
    at = np.where(flags, len(no), np.arange(len(no)))
    return pa.concat_arrays([no, yes.slice(0, 1)]).take(pa.array(at))


def _folder(function: str) -> str:
    """A function's name as one plain folder name."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in function)
