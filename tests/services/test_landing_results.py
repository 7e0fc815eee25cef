"""Results come back as they were landed, as Arrow and as Parquet; the lake keeps bytes under their digest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fabric_pipelines.dataplane import lake, results
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.lake import Lake
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import DigestMismatch, StorageFailed, UsageError
from tests.support_completions import pulled_batch


def _land(database: Database, *batches: pa.RecordBatch) -> None:
    writer = Writer(database)
    for batch in batches:
        writer.land(batch)
    writer.close()


@pytest.mark.parametrize("function", ["generate", "embed", "hidden_states", "own"])
def test_rows_read_back_equal_those_that_were_pulled(database: Database, function: str) -> None:
    batch = pulled_batch(30, function=function)
    _land(database, batch, pulled_batch(5, function=function, first=50, submission_id="6" * 64))
    table = results.read(database, function=function, submission_id="5" * 64)
    assert table.num_rows == 30
    for name in {"task_id", "submission_id", "source_row", "output", "vector", "metadata"} & set(
        table.column_names
    ):
        assert table.column(name).to_pylist() == batch.column(name).to_pylist()
    assert results.read(database, function=function).num_rows == 35
    assert results.read(database, submission_id="6" * 64).num_rows == 5


def test_an_empty_function_has_a_schema_and_no_rows(database: Database) -> None:
    table = results.read(database, function="embed")
    assert table.num_rows == 0
    assert table.schema.field("vector").type == pa.list_(pa.float16())


def test_a_submission_that_is_nowhere_is_said_so(database: Database) -> None:
    with pytest.raises(UsageError, match="no landed rows"):
        results.read(database, submission_id="0" * 64)
    with pytest.raises(UsageError, match="whose results"):
        results.read(database)


def test_parquet_holds_what_read_returns(database: Database, tmp_path: Path) -> None:
    _land(database, pulled_batch(20, function="embed"))
    path = tmp_path / "x.parquet"
    assert results.to_parquet(database, path, function="embed") == 20
    assert pq.read_table(path).equals(results.read(database, function="embed"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.parquet"]
    with pytest.raises(StorageFailed, match="cannot be written"):
        results.to_parquet(database, tmp_path / "nowhere" / "x.parquet", function="embed")


def test_dead_letters_can_be_read_with_their_reasons(database: Database) -> None:
    _land(database, pulled_batch(3, function="generate", bad={1: ("refused", "oversized", "x")}))
    table = results.dead_letters(database, function="generate")
    assert table.column("reason").to_pylist() == ["x"]
    assert results.dead_letters(database, function="embed").num_rows == 0


def test_the_anti_join_finds_exactly_the_lost_task(database: Database) -> None:
    batch = pulled_batch(9, function="generate", bad={2: ("failed", None, None)})
    _land(database, batch)
    with database.session() as connection:
        lost = batch.column("task_id")[4].as_py()
        connection.execute("delete from fabric.generate where task_id = %s", (lost,))
    ids = batch.column("task_id").to_numpy()
    assert results.unaccounted(database, ids).tolist() == [lost]


@pytest.mark.parametrize("name", ["hidden/layers.parquet", "hidden/layers.arrow"])
def test_a_table_kept_twice_is_one_object_named_by_its_digest(tmp_path: Path, name: str) -> None:
    store = Lake(str(tmp_path / "lake"))
    table = pa.table({"a": np.arange(10)})
    first, again = store.put(name, table), store.put(name, table)
    assert first == again
    assert first.rows == 10
    assert first.sha256 in first.uri
    assert store.read_table(first).equals(table)
    files = [path for path in (tmp_path / "lake").rglob("*") if path.is_file()]
    assert [str(path) for path in files] == [first.uri]


def test_an_object_that_was_changed_is_not_handed_out(tmp_path: Path) -> None:
    store = Lake(str(tmp_path / "lake"))
    kept = store.put("x.bin", b"abc")
    Path(kept.uri).write_bytes(b"abd")
    with pytest.raises(DigestMismatch):
        store.read(kept)
    with pytest.raises(DigestMismatch):
        store.read(kept.uri)


def test_an_object_that_is_gone_and_a_name_that_leads_out_are_refused(tmp_path: Path) -> None:
    store = Lake(str(tmp_path / "lake"))
    with pytest.raises(StorageFailed, match="not in the lake"):
        store.read(str(tmp_path / "lake" / "nothing"))
    with pytest.raises(UsageError):
        store.put("../x.bin", b"")


def test_artifacts_are_recorded_once(database: Database, tmp_path: Path) -> None:
    kept = Lake(str(tmp_path)).put("x.bin", b"abc")
    lake.record(database, kept)
    lake.record(database, kept)
    assert lake.recorded(database, kept.uri) == kept
    assert lake.recorded(database, "elsewhere") is None


@pytest.mark.parametrize("with_lake", [True, False])
def test_a_vector_too_long_for_any_column_is_in_the_lake_or_among_the_dead(
    database: Database, tmp_path: Path, with_lake: bool
) -> None:
    small = pulled_batch(4, function="hidden_states")
    large = pulled_batch(1, function="hidden_states", first=4, dim=16_001)
    batch = pa.Table.from_batches([small, large]).combine_chunks().to_batches()[0]
    store = Lake(str(tmp_path)) if with_lake else None
    writer = Writer(database, lake=store)
    landed, again = writer.land(batch), writer.land(batch)
    writer.close()
    assert (landed.rows, again.rows) == ((5, 0) if store else (4, 0))
    last = results.read(database, function="hidden_states").to_pylist()[-1]
    if store is None:
        assert landed.dead_task_ids.tolist() == large.column("task_id").to_pylist()
        return
    assert last["vector"] is None
    kept = store.read_table(last["artifact_uri"])
    assert kept.column("task_id").to_pylist() == large.column("task_id").to_pylist()
    assert kept.column("vector").to_pylist() == large.column("vector").to_pylist()
    assert lake.recorded(database, last["artifact_uri"]).sha256 == last["artifact_sha256"]
