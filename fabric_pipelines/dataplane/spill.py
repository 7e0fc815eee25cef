"""Vectors that their own column cannot hold go to the lake; their rows land with the object's name instead.

The column decides: halfvec ends at HALFVEC_DIM_MAX elements, the bytea of the generic table takes what a row can be, and
small vectors pass through untouched. One Parquet object a landing with (task_id, vector), recorded before the rows
commit, so that a committed row never names an object that is not there. Refuses to keep what does not land: a row that
the table would reject for another reason, such as NaN in its vector, stays whole and becomes a dead letter.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.encode import HALFVEC_DIM_MAX
from fabric_pipelines.dataplane.lake import Lake, record
from fabric_pipelines.dataplane.sinks import TOO_LARGE, Landing, Sink, foresee, sink_of


def spill(batch: pa.RecordBatch, lake: Lake, database: Database) -> pa.RecordBatch:
    """`batch` of one function, on a database with halfvec: each good row's vector above HALFVEC_DIM_MAX elements replaced
    by artifact_uri and artifact_sha256."""
    counts = pc.list_value_length(batch.column("vector")).fill_null(0)
    large = pc.and_(pc.greater(counts, HALFVEC_DIM_MAX), pc.equal(batch.column("status"), "ok"))
    if not pc.any(large).as_py():
        return batch
    function = batch.column("function")[0].as_py()
    sink = sink_of(function)
    if any((column.name, column.kind) == ("vector", "bytea") for column in sink.columns):
        return batch
    large = pc.and_(large, _would_land(batch, sink))
    if not pc.any(large).as_py():
        return batch
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


def _would_land(batch: pa.RecordBatch, sink: Sink) -> pa.Array:
    """Rows with which nothing is wrong but the size."""
    lands = np.ones(batch.num_rows, np.bool_)
    for row, found in foresee(batch, sink, Landing("halfvec")).items():
        lands[row] = found.code == TOO_LARGE
    return pa.array(lands)


def _where(mask: pa.Array, yes: pa.Array, no: pa.Array) -> pa.Array:
    """if_else for lists, which Arrow's own does not take for every element type: pick rows by position."""
    flags = mask.to_numpy(zero_copy_only=False)
    at = np.where(flags, len(no), np.arange(len(no)))
    return pa.concat_arrays([no, yes.slice(0, 1)]).take(pa.array(at))


def _folder(function: str) -> str:
    """A function's name as one plain folder name."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in function)
