"""What no trigger sees is never called fresh: tables that were away and came back, triggers that were off and on again, and
filters whose answer changes while no row does. And arming a watch never stops a reader."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from fabric_pipelines import shards
from fabric_pipelines.dataplane import database as database_module
from fabric_pipelines.dataplane import sql, staleness, table_locks
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.source import Source, source_state
from fabric_pipelines.errors import DatabaseUnavailable, SchemaError, SettingsError
from tests.services.test_watches import (
    FUNCTIONS,
    ROWS,
    TRIGGERS,
    build,
    count,
    docs,
    execute,
    said,
    table,
)
from tests.support import ON_EVERY_SERVER

__all__ = ["docs"]

OFF = {
    "partition": "alter table docs detach partition part",
    "child": "alter table part no inherit docs",
}
ON = {
    "partition": "alter table docs attach partition part for values from (0) to (1000)",
    "child": "alter table part inherit docs",
}
CHANGE = "update part set vector = other where task_id = 7"
SOURCE = Source("docs", "task_id", "vector", columns=("source_row",))


def tree(database: Database, root: Path, kind: str) -> None:
    table(database, "part")
    execute(
        database,
        f"create table docs (like part) {'partition by range (task_id)' * (kind == 'partition')}",
        ON[kind],
    )
    build(database, root)
    assert said(database) == ("fresh", "complete")


@ON_EVERY_SERVER
@pytest.mark.parametrize("kind", ["partition", "child"])
def test_a_child_that_was_changed_while_it_was_away_is_audited(
    database: Database, tmp_path: Path, kind: str
) -> None:
    tree(database, tmp_path, kind)
    execute(database, OFF[kind], CHANGE, ON[kind])
    assert said(database) == ("audit", "rewritten")
    assert shards.audit(database, tmp_path, "corpus").moved == 1
    assert said(database) == ("fresh", "complete")
    execute(database, f"begin; savepoint a; {OFF[kind]}; {CHANGE}; {ON[kind]}; commit")
    assert said(database) == ("audit", "rewritten")
    shards.refresh(database, tmp_path, "corpus")
    assert said(database) == ("fresh", "complete")


def test_a_partition_that_is_being_detached_concurrently_is_noticed(
    database: Database, tmp_path: Path
) -> None:
    tree(database, tmp_path, "partition")
    execute(database, f"{OFF['partition']} concurrently", CHANGE, ON["partition"])
    assert said(database) == ("audit", "rewritten")


def test_a_grandchild_counts_as_well(database: Database, tmp_path: Path) -> None:
    tree(database, tmp_path, "child")
    execute(database, "create table grandchild () inherits (part)")
    shards.refresh(database, tmp_path, "corpus")
    execute(
        database,
        "alter table grandchild no inherit part",
        "insert into grandchild select task_id + 500, other, other, 1 from part limit 1",
        "alter table grandchild inherit part",
    )
    assert said(database) == ("audit", "rewritten")


def test_housekeeping_leaves_a_tree_of_tables_fresh(database: Database, tmp_path: Path) -> None:
    tree(database, tmp_path, "partition")
    execute(
        database,
        "analyze docs",
        "vacuum docs",
        "vacuum (freeze, analyze) part",
        "vacuum freeze pg_inherits",
        "vacuum full pg_inherits",
        "vacuum full pg_attribute",
        "vacuum full pg_trigger",
        "create index on docs (source_row)",
        "alter table docs add column more int default 3",
        "alter table docs alter source_row set default 5",
        "comment on table docs is 'x'",
        "reindex table docs",
    )
    assert said(database) == ("fresh", "complete")


def test_a_generation_of_an_older_program_is_asked_by_its_snapshot(
    database: Database, tmp_path: Path
) -> None:
    tree(database, tmp_path, "partition")
    execute(
        database,
        "update fabric.shard_generation set manifest = jsonb_set(manifest, '{source,relation_files}', to_jsonb("
        "regexp_replace(manifest #>> '{source,relation_files}', ' / [^/]*$', '')))",
    )
    assert said(database) == ("fresh", "complete")
    execute(
        database, f"begin; savepoint a; {OFF['partition']}; {CHANGE}; {ON['partition']}; commit"
    )
    assert said(database) == ("audit", "rewritten")


def test_a_table_that_is_written_through_its_parent_is_audited(
    docs: Database, tmp_path: Path
) -> None:
    execute(docs, "create table whole (like docs) partition by range (task_id)")
    on = "alter table whole attach partition docs for values from (0) to (1000)"
    execute(docs, on, "update whole set vector = other where task_id = 7")
    assert said(docs) == ("audit", "inherited")
    assert shards.audit(docs, tmp_path, "corpus").moved == 1
    assert said(docs) == ("audit", "inherited")
    execute(docs, "alter table whole detach partition docs")
    assert said(docs) == ("audit", "rewritten")  # nobody knows what came through it meanwhile


def test_a_partition_on_another_server_is_not_believed(database: Database, tmp_path: Path) -> None:
    tree(database, tmp_path, "partition")
    execute(
        database,
        "create foreign data wrapper far",
        "create server far foreign data wrapper far",
        "create foreign table far partition of docs for values from (1000) to (2000) server far",
    )
    assert said(database) == ("audit", "unlogged")
    (found,) = staleness.staleness(database, "corpus")
    assert "its parts local" in found.why
    execute(database, "drop foreign table far")
    assert said(database) == ("fresh", "complete")


def test_triggers_that_were_off_and_are_on_again_are_not_believed(
    docs: Database, tmp_path: Path
) -> None:
    execute(
        docs,
        "alter table docs disable trigger user",
        "update docs set vector = other where task_id = 7",
        *(
            f"alter table docs enable always trigger fabric_watch_1_{event}"
            for event in ("insert", "update", "delete", "truncate")
        ),
    )
    assert said(docs) == ("audit", "disarmed")
    assert shards.refresh(docs, tmp_path, "corpus").moved == 1
    assert said(docs) == ("fresh", "complete")


DEEDS = (
    "alter table docs disable trigger user",
    "drop trigger fabric_watch_1_insert on docs",
    "alter trigger fabric_watch_1_update on docs rename to zz",
    "create or replace trigger fabric_watch_1_delete after delete on docs for each row "
    "execute function fabric.note_change_1()",
    "alter table docs alter source_row type bigint using source_row + 1",
)


@ON_EVERY_SERVER
def test_a_watch_is_armed_anew_beside_readers_who_may_write_next(
    docs: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_locks, "ATTEMPTS", 1)
    armed = "select count(*) from fabric.watched where fabric.watch_armed(watch_id)"
    for number, deed in enumerate(DEEDS):
        execute(docs, deed)
        with docs.session() as owner, owner.transaction():
            owner.execute("select count(*) from docs")
            staleness.watch(docs, Source("docs", "task_id", "vector", columns=("source_row",)))
            staleness.watch(docs, Source("docs", "task_id", "vector", filter="source_row > 3"))
            owner.execute("update docs set vector = other where task_id = 7 returning 1")
            owner.execute(f"update docs set other = vector, source_row = -{number}")
        assert count(docs, armed) == 1
        assert count(docs, "select count(*) from fabric.source_change where op = 'update'") > number


def test_a_writer_that_does_not_end_is_named_and_nobody_waits_meanwhile(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_locks, "ATTEMPTS", 2)
    monkeypatch.setattr(table_locks, "LOCK_MS", 20)
    monkeypatch.setattr(table_locks, "PAUSE_S", 0)
    table(database, "docs")
    with Database(database.url, application="report").session() as owner:
        with owner.transaction():
            owner.execute("update docs set source_row = 1 where task_id = 1")
            with pytest.raises(DatabaseUnavailable) as refused:
                staleness.watch(database, SOURCE)
            said = str(refused.value)
            assert (
                f"docs was held by others at each of 2 attempts to lock it: pid {owner.info.backend_pid} (report"
                in said
            )
            assert " since 20" in said
        staleness.watch(database, SOURCE)
        with owner.transaction():
            owner.execute("select count(*) from docs")
            with pytest.raises(DatabaseUnavailable, match=r"pid \d+ \(report"):
                staleness.unwatch(database, "docs")
    assert count(database, TRIGGERS) == 4
    assert staleness.unwatch(database, "docs").watches == 1


def test_one_wait_is_shorter_than_the_owners_search_for_a_deadlock(database: Database) -> None:
    found = count(database, "select setting from pg_settings where name = 'deadlock_timeout'")
    assert found - table_locks.LOCK_MS >= 200


def test_unwatch_finds_triggers_by_what_they_call(docs: Database, tmp_path: Path) -> None:
    execute(docs, "alter trigger fabric_watch_1_update on docs rename to zz")
    assert said(docs) == ("audit", "disarmed")
    shards.refresh(docs, tmp_path, "corpus")
    assert count(docs, "select count(*) from pg_trigger where tgname = 'zz'") == 1
    assert said(docs) == ("fresh", "complete")
    assert staleness.unwatch(docs, "docs").watches == 1
    assert count(docs, "select count(*) from pg_trigger where not tgisinternal") == 0
    assert count(docs, FUNCTIONS) == 0


def test_a_column_of_any_name_travels(database: Database, tmp_path: Path) -> None:
    table(database, "docs")
    names = ("cost$note$", "a$make$b$body$", "it's\\", 'a%s.x"y')
    for number, name in enumerate(names):
        quoted = '"' + name.replace('"', '""') + '"'
        execute(database, f"alter table docs add {quoted} int default {number}")
        build(database, tmp_path, columns=(name,))
        execute(database, f"update docs set {quoted} = -1 where task_id = 4")
        (found,) = staleness.staleness(database, "corpus")
        assert (found.moved, found.log) == (1, "complete"), name


# ---- filters

MOVING = {
    "at > now()": "now()",
    "at > now() - interval '3 seconds'": "now()",
    "at::date = current_date": "current_date",
    "random() < 2": "random()",
    "who = current_user": "current_user",
    "at::text < '2'": "an expression that is not immutable",
    "to_char(at, 'YYYY') = '2026'": "to_char",
    "at::date > '2026-01-01'": "date(timestamp with time zone)",
    "current_setting('my.setting', true) is null": "current_setting",
    "asks(n)": "asks(integer)",
    "n in (select n from other)": "a table by a sub-select",
    "n = (select max(n) from docs as d)": "a table by a sub-select",
    "exists (select from other as o where o.n = docs.n)": "a table by a sub-select",
    "at > 'now'": "the clock by a literal",
    "at > 'today'": "the clock by a literal",
    "day = 'tomorrow'": "the clock by a literal",
    "local < 'yesterday'": "the clock by a literal",
    "day in ('2026-01-01', 'today')": "the clock by a literal",
    "docs.at > docs.at - interval '1 day' and public.docs.at < now()": "now()",
}
FIXED = (
    "n > 3",
    "true",
    "n % 2 = 0 and who like 'a%'",
    "at > '2026-01-01'",
    "at > '2026-01-01 10:00+02' and at < 'infinity'",
    "at > timestamptz '2026-01-01 10:00:00.25'",
    "day between '2026-01-01' and '2026-12-31'",
    "local > '2026-01-01 10:00'",
    "at at time zone 'UTC' > '2026-01-01'",
    "(at at time zone 'UTC')::date in ('2026-01-01', '2026-01-02')",
    "who in ('now', 'today', 'current_date', 'now()', 'select')",
    "who = 'now' and at > '2026-01-01'",
    "length(lower(who)) < 9 or who ~ '^x'",
    "coalesce(n, 0) = any ('{1,2}'::int[])",
    "docs.n > 3 and public.docs.n < 90",
    "tableoid = 'docs'::regclass",
    "settled(n)",
    "case when n > 3 then who is not null else false end",
    "(doc ->> 'a') = 'b' or doc @> '{\"a\": 1}'",
)


def timed(database: Database) -> None:
    table(database, "docs")
    execute(
        database,
        "alter table docs add n int default 5, add at timestamptz default '2026-06-01', add day date default '2026-06-01', "
        "add local timestamp default '2026-06-01', add who text default 'a', add doc jsonb default '{}'",
        "create table other (n int)",
        "create function asks(n int) returns boolean language plpgsql stable as 'begin return true; end'",
        "create function settled(n int) returns boolean language plpgsql immutable as 'begin return true; end'",
    )


@ON_EVERY_SERVER
def test_a_filter_whose_answer_changes_by_itself_is_refused_and_named(
    database: Database, tmp_path: Path
) -> None:
    timed(database)
    for condition, named in MOVING.items():
        with pytest.raises(SchemaError) as refused:
            build(database, tmp_path, filter=condition)
        assert f"the filter {condition!r} reads {named}" in str(refused.value)
        assert "compare columns with fixed values" in str(refused.value)
    assert count(database, "select count(*) from fabric.shard_generation") == 0


@ON_EVERY_SERVER
def test_a_filter_of_the_row_alone_is_taken(database: Database, tmp_path: Path) -> None:
    timed(database)
    for condition in FIXED:
        staleness.require_fixed_filter(
            database, Source("docs", "task_id", "vector", filter=condition)
        )
    build(database, tmp_path, filter=FIXED[4])
    assert said(database) == ("fresh", "complete")
    assert count(database, "select count(*) from pg_class where relname like 'fabric_filter%'") == 0
    for condition in ("n >", "nothing = 1", "n"):  # who reads the rows says what is wrong
        with pytest.raises(SchemaError, match="is no condition"):
            build(database, tmp_path, filter=condition)


def test_a_shard_that_has_such_a_filter_is_audited_always_and_still_refreshed(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(database)
    monkeypatch.setattr(staleness, "require_fixed_filter", lambda *_: None)  # an older program
    build(database, tmp_path, filter="at < now()")
    assert said(database) == ("audit", "moving filter")
    (found,) = staleness.staleness(database, "corpus")
    assert "the filter reads more than the row" in found.why
    assert shards.audit(database, tmp_path, "corpus").moved == 0
    execute(database, "update docs set at = now() + interval '1 day' where task_id <= 2")
    assert shards.refresh(database, tmp_path, "corpus").generation.manifest.rows == ROWS - 2
    assert said(database) == ("audit", "moving filter")


def test_the_migration_judges_the_filters_that_are_there(
    empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = sql.migrations()
    monkeypatch.setattr(database_module, "migrations", lambda: every[:14])
    empty_database.migrate()
    timed(empty_database)
    for number, condition in enumerate(("at < now()", "n > 3", "no condition", None)):
        with empty_database.session() as connection:
            connection.execute(
                "insert into fabric.shard_generation (name, generation, token, manifest_sha256, manifest) "
                "values (%s, 1, 1, 'x', jsonb_build_object('source', jsonb_build_object("
                "'relation', 'docs', 'filter', %s::text)))",
                (f"shard {number}", condition),
            )
    execute(empty_database, "select fabric.watch('docs', 'task_id', 'vector', '{source_row}')")
    monkeypatch.undo()
    empty_database.migrate()
    with empty_database.session() as connection:
        judged = connection.execute("select filter, fault from fabric.moving_filter").fetchall()
    assert judged == [("at < now()", "now()")]
    assert (
        count(
            empty_database, "select count(*) from fabric.watched where fabric.watch_armed(watch_id)"
        )
        == 1
    )


def test_a_role_without_temporary_tables_is_served_or_told_what_to_grant(
    database: Database, tmp_path: Path
) -> None:
    timed(database)
    name = database.identity.database
    execute(
        database,
        "create role plain login",
        f'revoke temporary on database "{name}" from public',
        "grant usage on schema fabric to plain",
        "grant select on all tables in schema fabric to plain",
        "grant select on docs to plain",
    )
    try:
        plain = Database(database.url.replace("postgres@", "plain@"))
        moving = Source("docs", "task_id", "vector", filter="at > now()")
        with pytest.raises(
            SettingsError, match=rf'grant temporary on database "{name}" to "plain"'
        ):
            staleness.require_fixed_filter(plain, moving)
        assert source_state(plain, moving).content.rows == 0  # reading needs no trial
        execute(database, "grant create on schema fabric to plain")
        with pytest.raises(SchemaError, match=r"reads now\(\)"):
            staleness.require_fixed_filter(plain, moving)
        for condition in ("n > 3", "docs.n > 3", "public.docs.n > 3", "at > '2026-01-01'"):
            staleness.require_fixed_filter(
                plain, Source("docs", "task_id", "vector", filter=condition)
            )
    finally:
        execute(database, "drop owned by plain", "drop role plain")


TWICE = "true); select setval('sq', 77); create view pg_temp.zz as select 1 as one from docs where (true"


@ON_EVERY_SERVER
@pytest.mark.parametrize("filter_text", [TWICE, "generate_series(1, 2) = 1"], ids=["two", "a set"])
def test_a_filter_that_is_no_one_condition_runs_nothing_and_is_refused(
    docs: Database, tmp_path: Path, filter_text: str
) -> None:
    execute(docs, "create sequence sq")
    with pytest.raises(SchemaError, match="is no condition on a row of docs"):
        build(docs, tmp_path, filter=filter_text)
    staleness.watch(docs, replace(SOURCE, filter=filter_text))
    with docs.session() as connection:
        for block in ("judge_filter", "filter_fault"):
            with pytest.raises(psycopg.Error), connection.transaction():
                connection.execute(sql.query(block), {"relation": "docs", "filter": filter_text})
    assert count(docs, "select last_value from sq") == 1


def test_a_migration_never_lets_writers_wait_behind_it(
    docs: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_locks, "ATTEMPTS", 2)
    monkeypatch.setattr(table_locks, "PAUSE_S", 0.0)
    build(docs, tmp_path)
    locked = "lock table fabric.watched in access exclusive mode"
    monkeypatch.setattr(
        database_module, "_apply_migrations", lambda connection: connection.execute(locked)
    )
    with docs.session() as writer, writer.transaction():
        writer.execute("update docs set vector = other where task_id = 7")
        with pytest.raises(
            DatabaseUnavailable, match=r"at each of 2 attempts to migrate: pid \d+ "
        ):
            docs.migrate()
    docs.migrate()


def test_a_role_that_keeps_no_verdicts_still_watches(docs: Database, tmp_path: Path) -> None:
    """As one with rights on older tables of the fabric alone."""
    build(docs, tmp_path, filter="source_row >= 0")
    name = str(docs.identity.database)
    execute(
        docs,
        "create role older login",
        f'revoke temporary on database "{name}" from public',
        "grant usage on schema fabric to older",
        "grant select on docs to older",
        "grant select on all tables in schema fabric to older",
    )
    try:
        older = Database(docs.url.replace("postgres@", "older@"))
        staleness.watch(older, replace(SOURCE, filter="source_row >= 0"))
        assert said(docs) == ("fresh", "complete")
    finally:
        execute(docs, "drop owned by older", "drop role older")
