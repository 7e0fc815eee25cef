"""Receipts on a real Postgres: what SQL changed is named, and the same rows rebuild to the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg.types.json import Jsonb

from fabric_pipelines import receipts, shards
from fabric_pipelines.dataplane import vectors
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import UsageError
from fabric_pipelines.ids import task_id
from tests.support_completions import pulled_batch

ROWS, DIM = 200, 16


@pytest.fixture
def receipt_id(database: Database, tmp_path: Path) -> str:
    writer = Writer(database)
    try:
        writer.land(pulled_batch(ROWS, function="embed", dim=DIM))
    finally:
        writer.close()
    shards.build(
        database,
        tmp_path,
        "corpus",
        submission_id="5" * 64,
        lists=4,
        seed=3,
        metric="cosine",
        recipe={"engine": "e"},
        lists_per_block=2,
    )
    return receipts.issue(database, tmp_path, "corpus").receipt_id


def execute(database: Database, statement: str, *values: object) -> None:
    with database.session() as connection:
        connection.execute(statement.encode(), values)


def named(database: Database, root: Path, receipt_id: str) -> list[str]:
    return [str(found) for found in receipts.verify(database, root, receipt_id).differences]


def test_a_receipt_of_landed_rows_verifies_and_rebuilds_identical(
    database: Database, tmp_path: Path, receipt_id: str
) -> None:
    assert named(database, tmp_path, receipt_id) == []
    rebuilt = receipts.rebuild(database, tmp_path, receipt_id[:10])
    assert (rebuilt.verdict, rebuilt.differences) == ("identical", ())


def test_one_row_changed_by_sql_is_named_by_its_task_id(
    database: Database, tmp_path: Path, receipt_id: str
) -> None:
    changed = task_id(7, 30)
    execute(
        database,
        "update fabric.embed set vector = (select vector from fabric.embed where task_id = %s) "
        "where task_id = %s",
        task_id(7, 31),
        changed,
    )
    (found,) = named(database, tmp_path, receipt_id)
    assert f"1 row changed (task_id {changed})" in found
    assert receipts.rebuild(database, tmp_path, receipt_id).verdict == "different"


def test_a_deleted_and_a_late_row_are_named_and_rows_of_other_submissions_do_not_count(
    database: Database, tmp_path: Path, receipt_id: str
) -> None:
    writer = Writer(database)
    try:
        other = {"function": "embed", "dim": DIM}
        writer.land(pulled_batch(5, first=500, submission_id="6" * 64, **other))
        assert named(database, tmp_path, receipt_id) == []
        writer.land(pulled_batch(1, first=600, **other))
    finally:
        writer.close()
    execute(database, "delete from fabric.embed where task_id = %s", task_id(7, 9))
    added, removed = named(database, tmp_path, receipt_id)
    assert f"1 row added (task_id {task_id(7, 600)})" in added
    assert f"1 row removed (task_id {task_id(7, 9)})" in removed


def test_a_parameter_changed_in_the_row_is_named(
    database: Database, tmp_path: Path, receipt_id: str
) -> None:
    row = vectors.find_receipt(database, receipt_id)
    assert row is not None
    statement = dict(row.statement)
    statement["predicate"]["recipe"]["index"]["seed"] = 4
    execute(database, "update fabric.receipt set statement = %s", Jsonb(statement))
    assert "recipe.index.seed: 4 in the receipt, 3 in the manifest" in named(
        database, tmp_path, receipt_id
    )


def test_a_dropped_relation_is_a_difference_and_not_a_crash(
    database: Database, tmp_path: Path, receipt_id: str
) -> None:
    execute(database, "alter table fabric.embed rename to embed_away")
    (found,) = named(database, tmp_path, receipt_id)
    assert "there is no relation 'fabric.embed'" in found


def test_another_database_does_not_know_the_receipt(
    database: Database, tmp_path: Path, receipt_id: str
) -> None:
    execute(database, "delete from fabric.receipt")
    with pytest.raises(UsageError, match="there is no receipt"):
        receipts.verify(database, tmp_path, receipt_id)
    assert receipts.issue(database, tmp_path, "corpus").receipt_id == receipt_id
    assert named(database, tmp_path, receipt_id) == []
