"""What a shard takes for ids: whole numbers, one a row, and nothing that would have to be cast to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines import shards
from fabric_pipelines.dataplane import source as sources
from fabric_pipelines.dataplane import staleness
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.errors import SchemaError
from tests.support import ON_EVERY_SERVER

ROWS = 60
PLAIN: dict[str, Any] = {
    "relation": "docs",
    "lists": 2,
    "seed": 3,
    "metric": "cosine",
    "recipe": {},
}


def run(database: Database, *statements: str) -> list[tuple[Any, ...]]:
    with database.session() as connection:
        for statement in statements[:-1]:
            connection.execute(statement.encode())
        done = connection.execute(statements[-1].encode())
        return done.fetchall() if done.description else []


def docs(database: Database, kind: str, ids: str = "i", *, key: str = "primary key") -> None:
    """Vectors of eight bytes, whatever the server has for vectors."""
    vector = "int8send(i + (1::bigint << 58))"
    run(
        database,
        f"create table docs (task_id {kind} {key}, vector bytea, source_row int)",
        f"insert into docs select {ids}, {vector}, i from generate_series(1, {ROWS}) as i",
    )


@ON_EVERY_SERVER
@pytest.mark.parametrize("kind", ["smallint", "integer", "narrow"])
def test_narrower_integers_and_domains_over_them_are_ids(
    database: Database, tmp_path: Path, kind: str
) -> None:
    run(
        database,
        "create domain wide as bigint check (value > 0)",
        "create domain narrow as wide check (value < 1000)",
    )
    docs(database, kind)
    shards.build(database, tmp_path, "corpus", **PLAIN)
    run(
        database,
        "update docs set vector = int8send(9) where task_id = 3",
        "delete from docs where task_id = 4",
    )
    [said] = staleness.staleness(database, "corpus")
    assert (said.log, said.moved) == ("complete", 2)
    assert shards.audit(database, tmp_path, "corpus").moved == 2
    done = shards.refresh(database, tmp_path, "corpus")
    assert (done.how, done.generation.manifest.rows) == ("increment", ROWS - 1)


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("text", "i"),
        ("numeric", "i"),
        ("float8", "i + 0.5"),
        ("uuid", "gen_random_uuid()"),
        ("amount", "i"),
    ],
)
def test_any_other_type_is_refused_by_name_before_anything_is_put_on_the_table(
    database: Database, tmp_path: Path, kind: str, ids: str
) -> None:
    run(database, "create domain amount as numeric(9, 2)")
    docs(database, kind, ids)
    known = {"float8": "double precision", "amount": r"amount \(over numeric\)"}.get(kind, kind)
    said = f"id column 'task_id' of docs is {known}; .*bigint generated always as identity"
    with pytest.raises(SchemaError, match=said):
        shards.build(database, tmp_path, "corpus", **PLAIN)
    assert run(database, "select from pg_trigger where tgrelid = 'docs'::regclass") == []
    with pytest.raises(SchemaError, match=said):
        sources.source_state(database, sources.Source("docs"))


@pytest.mark.parametrize("kind", ["numeric", "text"])
def test_a_shard_of_older_days_says_the_same_at_refresh_and_audit(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    docs(database, kind)
    with monkeypatch.context() as older:
        older.setattr(sources, "_require_integers", lambda *given: None)
        shards.build(database, tmp_path, "corpus", **PLAIN)
    run(database, "update docs set vector = int8send(9) where source_row = 3")
    said = f"id column 'task_id' of docs is {kind}; a shard knows its rows by smallint"
    for ask in (
        lambda: shards.refresh(database, tmp_path, "corpus"),
        lambda: shards.refresh(database, tmp_path, "corpus", anew=True),
        lambda: shards.audit(database, tmp_path, "corpus"),
    ):
        with pytest.raises(SchemaError, match=said):
            ask()


@pytest.mark.parametrize("first", [True, False], ids=["every id", "some"])
def test_rows_without_an_id_are_refused_with_their_number(
    database: Database, tmp_path: Path, first: bool
) -> None:
    docs(database, "bigint", "i", key="")
    shards.build(database, tmp_path, "corpus", **PLAIN)
    without = ROWS if first else 2
    run(database, f"update docs set task_id = null where task_id <= {without}")
    said = f"'task_id' is null in {without} rows of docs: a row is known by its id"
    for ask in (
        lambda: sources.read_source(database, sources.Source("docs")),
        lambda: sources.source_state(database, sources.Source("docs")),
        lambda: shards.audit(database, tmp_path, "corpus"),
        lambda: shards.build(database, tmp_path, "other", **PLAIN),
        lambda: shards.refresh(database, tmp_path, "corpus"),
    ):
        with pytest.raises(SchemaError, match=said):
            ask()
    if not first:
        kept = shards.build(database, tmp_path, "rest", **PLAIN, filter="task_id is not null")
        assert kept.manifest.rows == ROWS - without


def test_a_row_without_an_id_that_comes_later_is_told_by_the_next_refresh(
    database: Database, tmp_path: Path
) -> None:
    docs(database, "bigint", key="")
    shards.build(database, tmp_path, "corpus", **PLAIN)
    run(database, "insert into docs values (null, int8send(5), 1)")
    with pytest.raises(SchemaError, match="'task_id' is null in 1 row of docs"):
        shards.refresh(database, tmp_path, "corpus")


def test_two_rows_of_one_id_are_counted_and_named(database: Database, tmp_path: Path) -> None:
    docs(database, "bigint", "i % 58", key="")
    with pytest.raises(SchemaError, match=r"2 ids of docs are those of more than one row \(1, 2\)"):
        shards.build(database, tmp_path, "corpus", **PLAIN)
