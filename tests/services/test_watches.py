"""A watch is bound to one relation and its columns: a name given to another one is never taken for what was watched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines import shards
from fabric_pipelines.dataplane import staleness, vectors
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.source import Source, read_source
from fabric_pipelines.dataplane.sql import relation
from fabric_pipelines.errors import SchemaError, UsageError
from tests.support import ON_EVERY_SERVER

ROWS = 60


def execute(database: Database, *statements: str) -> None:
    with database.session() as connection:
        for statement in statements:
            connection.execute(statement.encode())


def count(database: Database, statement: str) -> int:
    with database.session() as connection:
        row = connection.execute(statement.encode()).fetchone()
    assert row is not None
    return int(row[0])


def table(database: Database, name: str) -> None:
    """Rows with two vectors each, of the type that the server has."""
    made = [
        "array[task_id, sin(task_id), 1]::float4[]::halfvec(3)",
        "array[1, task_id, 2]::float4[]::halfvec(3)",
    ]
    if database.vector_type == "bytea":
        made = [
            "int8send(task_id + (1::bigint << 58))",
            "int8send(3 * task_id + (1::bigint << 58))",
        ]
    execute(
        database,
        f"create table {name} as select task_id, {made[0]} as vector, {made[1]} as other, task_id as source_row "
        f"from generate_series(1::bigint, {ROWS}) as task_id",
    )


def build(database: Database, root: Path, **changes: object) -> None:
    wanted = {
        "relation": "docs", "lists": 2, "seed": 3, "metric": "cosine", "recipe": {},
    }  # fmt: skip
    shards.build(database, root, "corpus", **wanted | changes)  # type: ignore[arg-type]


def said(database: Database) -> tuple[str, str]:
    (found,) = staleness.staleness(database, "corpus")
    return found.verdict, found.log


@pytest.fixture
def docs(database: Database, tmp_path: Path) -> Database:
    table(database, "docs")
    build(database, tmp_path)
    assert said(database) == ("fresh", "complete")
    return database


SWAP = ("alter table docs rename vector to v_old", "alter table docs rename other to vector")
BACK = ("alter table docs rename vector to other", "alter table docs rename v_old to vector")


@ON_EVERY_SERVER
def test_a_vector_column_that_is_swapped_by_rename_is_audited_and_a_refresh_reads_the_new_one(
    docs: Database, tmp_path: Path
) -> None:
    execute(docs, *SWAP)
    assert said(docs) == ("audit", "other columns")
    assert shards.audit(docs, tmp_path, "corpus").moved == ROWS
    assert said(docs)[0] == "rebuild"
    shards.refresh(docs, tmp_path, "corpus")
    assert said(docs) == ("fresh", "complete")
    execute(docs, *BACK, "update docs set other = null")  # passes, though nothing can be compared
    assert said(docs) == ("audit", "other columns")


def test_a_column_that_was_written_to_under_another_name_is_not_trusted_when_it_is_back(
    docs: Database,
) -> None:
    execute(docs, *SWAP, "update docs set v_old = vector where task_id = 7", *BACK)
    assert said(docs) == ("audit", "not compared")


def test_a_column_that_a_filter_reads_is_bound_as_well(database: Database, tmp_path: Path) -> None:
    table(database, "docs")
    execute(database, "alter table docs add wanted int default 1, add spare int default 0")
    build(database, tmp_path, filter="wanted = 1")
    assert said(database) == ("fresh", "complete")
    execute(
        database,
        "alter table docs rename wanted to was",
        "alter table docs rename spare to wanted",
    )
    assert said(database) == ("audit", "other columns")


def test_the_owner_writes_on_whatever_became_of_a_watched_column(
    database: Database, tmp_path: Path
) -> None:
    deeds = ("rename vector to emb", "rename task_id to key", "drop source_row")
    for docs, deed in zip(("one", "two", "three", "four"), (*deeds, None), strict=True):
        table(database, docs)
        build(database, tmp_path, relation=docs)
        execute(
            database,
            f"alter table {docs} {deed}" if deed else "delete from fabric.watched",
            f"insert into {docs} select * from {docs} limit 1",
            f"update {docs} set other = null where ctid in (select ctid from {docs} limit 2)",
            f"delete from {docs} where ctid in (select ctid from {docs} limit 1)",
            f"truncate {docs}",
        )
        assert (count(database, f"select count(*) from {docs}"), said(database)[0] != "fresh") == (
            0,
            True,
        )


def test_a_refresh_names_the_column_that_is_gone(docs: Database, tmp_path: Path) -> None:
    execute(docs, "alter table docs rename vector to emb")
    with pytest.raises(SchemaError, match=r"no column 'vector'.*name back"):
        shards.refresh(docs, tmp_path, "corpus")


def test_a_statement_that_cannot_be_compared_passes_and_asks_for_an_audit(
    docs: Database, tmp_path: Path
) -> None:
    """An id that leaves no range: the comparison itself fails."""
    execute(docs, "insert into docs values (9223372036854775807, null, null, 1)")
    execute(
        docs,
        "update docs set vector = (select vector from docs where task_id = 1) where task_id > 100",
    )
    assert said(docs) == ("audit", "not compared")
    execute(docs, "delete from docs where task_id > 100")
    assert shards.audit(docs, tmp_path, "corpus").moved == 0
    assert said(docs) == ("fresh", "complete")


def test_watches_from_before_this_program_are_bound_by_the_migration(docs: Database) -> None:
    execute(docs, "update fabric.watched set bound = null")
    assert said(docs) == ("audit", "other columns")
    execute(docs, "select fabric.bind_watch(watch_id) from fabric.watched")
    assert said(docs) == ("fresh", "complete")


TRIGGERS = "select count(*) from pg_trigger where tgname like 'fabric_watch%'"
FUNCTIONS = "select count(*) from pg_proc where proname like 'note_change%'"


def test_unwatch_takes_triggers_and_functions_away_and_keeps_them_off(
    docs: Database, tmp_path: Path
) -> None:
    for name in ("corpus", "docs", "public.docs"):
        done = staleness.unwatch(docs, name)
        assert (done.watches, done.shards) == (1, ("corpus",))
        assert (count(docs, TRIGGERS), count(docs, FUNCTIONS)) == (0, 0)
        assert staleness.unwatch(docs, name).watches == 0
        shards.refresh(docs, tmp_path, "corpus")
        assert (count(docs, TRIGGERS), said(docs)) == (0, ("audit", "unwatched"))
        assert staleness.allow_watch(docs, name) == ("corpus",)
        shards.refresh(docs, tmp_path, "corpus")
        assert (count(docs, TRIGGERS), said(docs)) == (4, ("fresh", "complete"))


def test_unwatch_of_nothing_is_refused_by_name(docs: Database) -> None:
    assert said(docs)[0] == "fresh"
    for name in ("nothing", "a.b.c.d", "Docs"):
        with pytest.raises(UsageError, match="neither a shard nor a relation"):
            staleness.unwatch(docs, name)


def test_a_shard_counts_for_the_relation_of_its_newest_generation_alone(database: Database) -> None:
    lease = vectors.acquire_shard(database, "corpus", "me")
    other = vectors.acquire_shard(database, "other", "me")
    for each, number, name in (
        (lease, 1, "first"),
        (lease, 2, "second"),
        (other, 1, "third"),
    ):
        execute(database, f"create table {name} (task_id bigint)")
        oid = count(database, f"select '{name}'::regclass::oid::bigint")
        source = {"relation": name, "relation_oid": oid}
        vectors.publish_generation(
            database,
            each,
            generation=number,
            manifest_sha256=name,
            manifest={"source": source},
        )
    found = {
        name: staleness.unwatch(database, name)
        for name in ("first", "second", "third", "corpus", "other")
    }
    assert {name: done.shards for name, done in found.items()} == {
        "first": (),
        "second": ("corpus",),
        "third": ("other",),
        "corpus": ("corpus",),
        "other": ("other",),
    }
    assert (found["corpus"].relation, found["other"].relation) == ("second", "third")


def test_capitals_in_a_name_lead_to_one_table_for_reading_and_watching(
    database: Database, tmp_path: Path
) -> None:
    table(database, 'public."MyDocs"')
    execute(database, 'create table public.mydocs (like public."MyDocs")')
    build(database, tmp_path, relation="public.MyDocs")
    assert said(database) == ("fresh", "complete")
    execute(database, 'update public."MyDocs" set vector = other where task_id = 1')
    assert shards.refresh(database, tmp_path, "corpus").moved == 1
    execute(database, 'drop table public."MyDocs"')
    assert said(database) == ("rebuild", "elsewhere")


def test_every_table_has_a_name_that_reads_and_watches_it(
    database: Database, tmp_path: Path
) -> None:
    names = ('public."MyDocs"', 'public."a.b"', '"say ""x"" it"', '"select"')
    for made, asked in zip(names, (*names[:3], "select"), strict=True):
        table(database, made)
        build(database, tmp_path, relation=asked)
        execute(database, f"delete from {made} where task_id = 1")
        (found,) = staleness.staleness(database, "corpus")
        assert (found.deleted, found.log) == (1, "complete")


def test_what_is_no_name_is_refused_in_a_sentence(database: Database) -> None:
    for name in ("a.b.c.d", "a.b.c", "", "a.", 'a"b', "a\0b", '""'):
        with pytest.raises(SchemaError, match="names no relation: write table or schema"):
            relation(name)
        with pytest.raises(SchemaError, match="names no relation"):
            staleness.watch(database, Source(name, "task_id", "vector"))
    assert (
        count(
            database,
            "select count(fabric.relation_oid(name)) from unnest(array['a.b.c.d', '', 'a\"b']) as name",
        )
        == 0
    )


def test_a_filter_that_is_no_condition_is_refused_with_the_reason(docs: Database) -> None:
    for condition in ("nonsense = 1", "task_id =", "task_id = 'x'", "task_id", "true\0"):
        source = Source("docs", "task_id", "vector", filter=condition)
        with pytest.raises(SchemaError, match="is no condition on a row of docs"):
            read_source(docs, source)
    assert (
        len(read_source(docs, Source("docs", "task_id", "vector", filter="task_id > 50")).ids) == 10
    )


def test_an_unlogged_table_is_audited_because_a_crash_empties_it(
    database: Database, tmp_path: Path
) -> None:
    table(database, "docs")
    execute(database, "alter table docs set unlogged")
    build(database, tmp_path)
    assert said(database) == ("audit", "unlogged")
    (found,) = staleness.staleness(database, "corpus")
    assert "make it LOGGED" in found.why


def test_ids_that_two_rows_have_are_refused_by_name_at_build_and_at_refresh(
    docs: Database, tmp_path: Path
) -> None:
    execute(docs, "insert into docs select * from docs where task_id in (3, 5)")
    with pytest.raises(SchemaError, match=r"2 ids of docs .* \(3, 5\)"):
        shards.refresh(docs, tmp_path, "corpus")
    with pytest.raises(SchemaError, match=r"2 ids of docs .* \(3, 5\)"):
        build(docs, tmp_path)
    execute(
        docs,
        "delete from docs where ctid in (select max(ctid) from docs where task_id in (3, 5) group by task_id)",
    )
    assert shards.refresh(docs, tmp_path, "corpus").moved == 0
    assert said(docs)[0] == "fresh"


def test_every_log_of_an_audit_has_a_sentence_that_says_what_to_do(docs: Database) -> None:
    (found,) = staleness.staleness(docs, "corpus")
    assert found.why == ""
    said = [text.format(shard="s", relation="r") for text in staleness.WHY_AUDIT.values()]
    assert all("`fabric receipt audit s`" in text for text in said)
    assert np.unique(said).size == len(said)


def test_an_age_that_no_interval_holds_is_refused() -> None:
    nowhere = Database("postgresql://nowhere")
    for bound, value in (("max_age_s", 0), ("max_age_s", 1e300), ("quiet_period_s", 1e300)):
        with pytest.raises(UsageError) as refused:
            staleness.set_policy(nowhere, "corpus", {bound: value})
        assert f"{bound} is" in str(refused.value)


def test_a_shard_that_was_never_published_is_refused_by_name(docs: Database) -> None:
    staleness.require_shard(docs, "corpus")
    assert said(docs)[0] == "fresh"
    for name in ("corpsu", "a\0b", "\udcff"):
        with pytest.raises(UsageError):
            staleness.require_shard(docs, name)
