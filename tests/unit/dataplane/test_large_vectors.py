"""Which rows die for their vector, and which go to the lake: what the column holds decides, and a neighbour never does."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.dataplane import spill as spilling
from fabric_pipelines.dataplane.encode import HALFVEC_DIM_MAX
from fabric_pipelines.dataplane.lake import Lake
from fabric_pipelines.dataplane.sinks import Landing, foresee, sink_of
from fabric_pipelines.records.completion import PULLED_SCHEMA
from tests.support_completions import pulled_batch

LARGE = HALFVEC_DIM_MAX + 1
HALFVEC = Landing("halfvec")


def batch_of(*vectors, function="hidden_states", **columns):
    """One row a vector; columns by name, each a list."""
    batch = pulled_batch(len(vectors), function=function)
    halves = [None if each is None else np.asarray(each, np.float16) for each in vectors]
    columns["vector"] = pa.array(halves, PULLED_SCHEMA.field("vector").type)
    arrays = [
        pa.array(columns[name], PULLED_SCHEMA.field(name).type)
        if name in columns
        else batch.column(name)
        for name in batch.schema.names
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=PULLED_SCHEMA)


def dead(batch):
    return {row: found.reason for row, found in foresee(batch, sink_of("embed"), HALFVEC).items()}


@pytest.fixture
def spilled(tmp_path, monkeypatch):
    """Runs `spill` into a folder; what it kept there."""
    monkeypatch.setattr(spilling, "record", lambda database, artifact: kept.append(artifact))
    kept, lake = [], Lake(str(tmp_path))

    def run(batch):
        kept.clear()
        after = spilling.spill(batch, lake, None)
        return after, [lake.read_table(each)["task_id"].to_pylist() for each in kept]

    return run


def test_a_row_without_a_vector_is_not_buried_for_its_neighbours_empty_one():
    assert dead(batch_of([], None, [1.0], [np.inf])) == {
        0: "the vector is empty",
        3: "the vector holds NaN or infinity",
    }
    assert dead(batch_of(None, [1.0])) == {}


def test_a_row_whose_vector_is_an_artifact_lands_beside_an_empty_one():
    batch = batch_of(None, [], artifact_uri=["s3://b/x", None], artifact_sha256=["0" * 64, None])
    assert list(dead(batch)) == [1]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_large_vector_with_nan_dies_like_a_small_one(spilled, poison):
    wrong = np.full(LARGE, poison)
    batch = batch_of(np.zeros(LARGE), wrong, [1.0], [poison])
    after, kept = spilled(batch)
    assert kept == [batch.column("task_id")[:1].to_pylist()]
    assert dead(after) == dict.fromkeys((1, 3), "the vector holds NaN or infinity")
    assert after.column("vector").is_null().to_pylist() == [True, False, False, False]


def test_only_what_lands_goes_to_the_lake(spilled):
    large = np.zeros(LARGE)
    batch = batch_of(large, large, status=["failed", "ok"], submission_id=["a", "a\0"])
    assert spilled(batch) == (batch, [])


def test_the_generic_table_keeps_large_vectors_in_its_own_column(spilled):
    batch = batch_of(np.zeros(LARGE), function="of your own")
    assert spilled(batch) == (batch, [])
    assert foresee(batch, sink_of("of your own"), HALFVEC) == {}


def test_a_landing_of_no_rows_passes_through(spilled):
    batch = batch_of(np.zeros(4)).slice(0, 0)
    assert spilled(batch) == (batch, [])
