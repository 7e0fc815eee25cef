"""The database decides: what moved since a snapshot is exact, and the policy turns it into a verdict."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import psycopg
import pytest

from fabric_pipelines import shards
from fabric_pipelines.dataplane import dump, staleness, vectors
from fabric_pipelines.dataplane import source as sources
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import FabricError, UsageError
from fabric_pipelines.ids import task_id
from tests.support import ON_EVERY_SERVER
from tests.support_completions import pulled_batch

ROWS, DIM = 1000, 8


def land(database: Database, first: int = 0, rows: int = ROWS, **more: object) -> None:
    writer = Writer(database)
    try:
        writer.land(pulled_batch(rows, function="embed", first=first, dim=DIM, **more))  # type: ignore[arg-type]
    finally:
        writer.close()


def build(database: Database, root: Path, name: str = "corpus", **changes: object) -> None:
    wanted = {"lists": 4, "seed": 3, "metric": "cosine", "recipe": {}} | changes
    shards.build(database, root, name, **wanted)  # type: ignore[arg-type]


def execute(database: Database, statement: str, *values: object) -> None:
    with database.session() as connection:
        connection.execute(statement.encode(), values or None)


def verdict(database: Database, name: str = "corpus") -> staleness.Staleness:
    (found,) = staleness.staleness(database, name)
    return found


def moved_ids(database: Database, name: str = "corpus") -> list[int]:
    row = vectors.current_generation(database, name)
    assert row is not None
    source = shards.store.source_of(row.manifest["source"])
    return staleness.read_moved(database, name, row.generation, source).ids.tolist()


def of(*rows: int) -> list[int]:
    return [task_id(7, row) for row in rows]


MOVE = "update fabric.embed set vector = (select vector from fabric.embed where source_row = 999) "


@pytest.fixture
def built(database: Database, tmp_path: Path) -> Database:
    land(database)
    build(database, tmp_path)
    return database


@ON_EVERY_SERVER
def test_a_writer_that_began_before_the_build_and_commits_after_it_is_in_the_moved_set(
    database: Database, tmp_path: Path
) -> None:
    """The watermark trap: a counter read by the build is already past the late writer's number."""
    land(database)
    staleness.watch(database, sources.Source(columns=("source_row",)))
    with database.session() as late, late.transaction():
        late.execute("select pg_current_xact_id()")
        late.execute(f"{MOVE} where source_row = 5".encode())
        land(database, first=ROWS, rows=3)  # a later change is committed first, and read
        build(database, tmp_path)
        assert moved_ids(database) == []
    assert moved_ids(database) == of(5)
    assert verdict(database).updated == 1


@ON_EVERY_SERVER
def test_each_kind_of_statement_is_one_change_row_with_the_ids_that_moved(built: Database) -> None:
    before = changes(built)
    land(built, first=ROWS, rows=40)
    execute(built, f"{MOVE} where source_row in (1, 2)")
    execute(built, "delete from fabric.embed where source_row between 10 and 12")
    assert [(op, rows) for op, rows in changes(built)[len(before) :]] == [
        ("insert", 40), ("update", 2), ("delete", 3),
    ]  # fmt: skip
    found = verdict(built)
    assert (found.inserted, found.updated, found.deleted, found.moved) == (40, 2, 3, 45)
    assert moved_ids(built)[:5] == of(1, 2, 10, 11, 12)
    assert found.verdict == "fresh"


def test_metadata_and_no_op_updates_leave_the_shard_fresh(built: Database) -> None:
    before = changes(built)
    execute(built, "update fabric.embed set metadata = 'x', attempts = attempts + 1")
    execute(built, "update fabric.embed set vector = vector")
    execute(built, "update fabric.embed set vector = null where vector is null")
    assert changes(built) == before
    assert verdict(built).moved == 0


def test_a_column_that_travels_moves_its_row(built: Database) -> None:
    execute(built, "update fabric.embed set source_row = 5000 where source_row = 7")
    assert moved_ids(built) == of(7)


def test_a_zero_that_changes_its_sign_moved_because_a_hash_is_over_bytes(built: Database) -> None:
    zero = "('[' || repeat('0,', 7) || '%s0]')::halfvec"
    execute(built, f"update fabric.embed set vector = {zero % ''} where source_row = 3")
    build_count = len(changes(built))
    execute(built, f"update fabric.embed set vector = {zero % '-'} where source_row = 3")
    assert len(changes(built)) == build_count + 1


def test_truncate_is_noticed_and_asks_for_a_rebuild(built: Database) -> None:
    execute(built, "truncate fabric.embed")
    found = verdict(built)
    assert (found.truncated, found.verdict) == (True, "rebuild")


@ON_EVERY_SERVER
def test_a_session_in_the_replica_role_is_noticed(built: Database) -> None:
    with built.session() as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute("delete from fabric.embed where source_row = 4")
    assert moved_ids(built) == of(4)


def test_an_aborted_writer_leaves_no_trace(built: Database) -> None:
    with built.session() as connection:
        connection.execute("begin")
        connection.execute("delete from fabric.embed")
        connection.execute("rollback")
    assert verdict(built).moved == 0


def test_a_shard_of_one_submission_is_moved_by_its_own_rows_only(
    database: Database, tmp_path: Path
) -> None:
    land(database)
    build(database, tmp_path, submission_id="5" * 64)
    land(database, first=5000, rows=900, submission_id="6" * 64)
    assert verdict(database).moved == 0
    execute(
        database,
        "update fabric.embed set submission_id = %s where source_row = 5000",
        "5" * 64,
    )
    assert moved_ids(database) == of(5000)


def test_a_filter_may_read_any_column_so_every_change_of_a_row_counts(
    database: Database, tmp_path: Path
) -> None:
    land(database)
    build(database, tmp_path, filter="attempts = 1")
    execute(database, "update fabric.embed set attempts = 2 where source_row in (3, 4)")
    assert moved_ids(database) == of(3, 4)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (f"{MOVE} where source_row < 50", "fresh"),
        (f"{MOVE} where source_row < 51", "changed"),
        ("delete from fabric.embed where source_row < 20", "fresh"),
        ("delete from fabric.embed where source_row < 21", "deleted"),
        (f"{MOVE} where source_row < 299", "changed"),
        (f"{MOVE} where source_row < 300", "rebuild"),
    ],
)
def test_the_policy_draws_the_line(built: Database, statement: str, said: str) -> None:
    execute(built, statement)
    assert verdict(built).verdict == said


def test_the_same_row_moved_often_counts_once(built: Database) -> None:
    for row in range(60):
        execute(built, f"{MOVE} where source_row = 1")
        execute(
            built, "update fabric.embed set vector = %s where source_row = 1", f"[{row}{',1' * 7}]"
        )
    assert verdict(built).moved == 1
    assert verdict(built).verdict == "fresh"


def test_age_and_quality_are_bounds_of_one_shard_or_of_all(built: Database, tmp_path: Path) -> None:
    assert verdict(built).verdict == "fresh"
    execute(
        built, "update fabric.shard_generation set published_at = published_at - interval '2 hours'"
    )
    staleness.set_policy(built, "*", {"max_age_s": 3600})
    assert verdict(built).verdict == "age"
    staleness.set_policy(built, "corpus", {"max_age_s": 10_800})
    assert verdict(built).verdict == "fresh"
    statement = {"predicate": {"quality": {"recall_at_10": 1, "recall_at_10_probed": 0.8}}}
    vectors.insert_receipt(
        built, receipt_id="r" * 64, shard="corpus", generation=1, statement=statement
    )
    staleness.set_policy(built, "corpus", {"min_recall": 0.9})
    found = verdict(built)
    assert (found.verdict, found.recall, found.receipt_id) == ("quality", 0.8, "r" * 64)


def test_a_policy_out_of_range_is_refused_by_name(built: Database) -> None:
    with pytest.raises(UsageError, match="max_changed_fraction is 2"):
        staleness.set_policy(built, "corpus", {"max_changed_fraction": 2})
    with pytest.raises(UsageError, match="is no bound"):
        staleness.set_policy(built, "corpus", {"colour": 1})
    with pytest.raises(UsageError, match="defaults need a number"):
        staleness.set_policy(built, "*", {"rebuild_fraction": None})
    assert staleness.policies(built) == [staleness.Policy("*", 0.05, 0.02, 0.3, None, None, 0.0)]


def test_what_moves_without_rest_is_due_only_after_its_quiet_period(built: Database) -> None:
    staleness.set_policy(built, "corpus", {"quiet_period_s": 60})
    execute(built, f"{MOVE} where source_row < 100")
    assert (verdict(built).verdict, verdict(built).due) == ("changed", False)
    execute(built, "update fabric.source_change set at = at - interval '61 seconds'")
    assert verdict(built).due


def test_pruning_forgets_only_what_every_current_generation_has_seen(
    built: Database, tmp_path: Path
) -> None:
    execute(built, f"{MOVE} where source_row < 100")
    build(built, tmp_path, "other")  # saw the change; "corpus" did not
    assert staleness.prune_changes(built) == 0
    assert verdict(built).moved == 100
    build(built, tmp_path)
    assert changes(built) == []
    assert verdict(built).verdict == verdict(built, "other").verdict == "fresh"
    assert verdict(built).log == "complete"


@pytest.mark.parametrize(
    ("deed", "why"),
    [
        ("alter table fabric.embed disable trigger user", "disarmed"),
        ("update fabric.watched set pruned_below = pg_current_xact_id()", "pruned"),
        ("update fabric.watched_column set xid = pg_current_xact_id()", "begun later"),
        ("delete from fabric.watched", "unwatched"),
    ],
)
def test_a_log_that_does_not_reach_says_so(built: Database, deed: str, why: str) -> None:
    execute(built, deed)
    found = verdict(built)
    assert (found.verdict, found.log, found.due) == ("audit", why, True)


def test_a_relation_made_anew_under_its_name_asks_for_a_rebuild(built: Database) -> None:
    execute(built, "alter table fabric.embed rename to embed_old")
    execute(built, "create table fabric.embed (like fabric.embed_old including all)")
    assert (verdict(built).verdict, verdict(built).log) == ("rebuild", "elsewhere")


def test_a_watch_of_another_cluster_is_begun_anew_though_its_relation_has_the_same_number(
    built: Database, tmp_path: Path
) -> None:
    """Restored into a new cluster, whose transactions are counted from the beginning."""
    execute(built, f"{MOVE} where source_row = 1")
    execute(built, "update fabric.watched set cluster = '1', pruned_below = '9000000'")
    execute(built, "update fabric.source_change set xid = '8000000'")
    execute(built, "update fabric.watched_column set xid = '7000000'")
    build(built, tmp_path)
    assert (verdict(built).log, verdict(built).moved) == ("complete", 0)
    execute(built, f"{MOVE} where source_row = 2")
    assert moved_ids(built) == of(2)
    assert changes(built) == [("update", 1)]


def test_a_restored_dump_notes_each_change_once(
    built: Database, empty_database: Database, tmp_path: Path
) -> None:
    made = dump.write(built, tmp_path / "made.dump")
    restore = [str(made.program.with_name("pg_restore")), "--no-owner"]
    subprocess.run([*restore, f"--dbname={empty_database.url}", str(made.path)], check=True)
    assert verdict(empty_database).log == "elsewhere"
    build(empty_database, tmp_path)
    execute(empty_database, f"{MOVE} where source_row = 2")
    assert (verdict(empty_database).log, moved_ids(empty_database)) == ("complete", of(2))
    assert changes(empty_database) == [("update", 1)]


@ON_EVERY_SERVER
def test_triggers_that_were_switched_off_are_put_back_and_the_time_between_is_not_trusted(
    built: Database, tmp_path: Path
) -> None:
    execute(built, "alter table fabric.embed disable trigger user")
    execute(built, f"{MOVE} where source_row = 1")
    staleness.watch(built, sources.Source(columns=("source_row",)))
    assert verdict(built).log == "begun later"
    execute(built, f"{MOVE} where source_row = 2")
    build(built, tmp_path)
    assert verdict(built).log == "complete"


def test_watching_twice_takes_no_lock_that_a_writer_could_feel(built: Database) -> None:
    with built.session() as connection, connection.transaction():
        connection.execute(MOVE.encode())
        staleness.watch(built, sources.Source(columns=("source_row",)))  # would wait for the writer
        locks = connection.execute(
            "select count(*) from pg_locks where mode = 'ShareRowExclusiveLock'"
        ).fetchone()
    assert locks == (0,)


def test_a_landing_rings_once_for_its_batch_and_only_where_somebody_watches(
    database: Database, tmp_path: Path
) -> None:
    with staleness.Doorbell(database) as bell:
        land(database)
        assert bell.wait(0.05) == []
        build(database, tmp_path)
        land(database, first=ROWS, rows=500)
        assert bell.wait(10) == ["fabric.embed"]
        assert bell.wait(0.05) == []


def test_identical_rings_of_one_transaction_are_one_and_a_rollback_rings_nothing(
    built: Database,
) -> None:
    with staleness.Doorbell(built) as bell, built.session() as connection:
        with connection.transaction():
            for _ in range(1000):
                staleness.ring(connection, "fabric.embed")
        connection.execute("begin")
        staleness.ring(connection, "fabric.embed")
        connection.execute("rollback")
        assert bell.wait(10) == ["fabric.embed"]
        assert bell.wait(0.05) == []


def test_a_lost_doorbell_is_an_error_and_not_a_silence(built: Database) -> None:
    with staleness.Doorbell(built) as bell:
        execute(
            built,
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()",
        )
        with pytest.raises(FabricError):
            bell.wait(10)


def test_a_writer_without_rights_on_the_log_still_writes_and_is_logged(built: Database) -> None:
    execute(built, "create role stranger")
    try:
        execute(built, "grant usage on schema fabric to stranger")
        execute(built, "grant select, delete on fabric.embed to stranger")
        with built.session() as connection:
            connection.execute("set role stranger")
            connection.execute("delete from fabric.embed where source_row = 8")
        assert moved_ids(built) == of(8)
    finally:
        execute(built, "drop owned by stranger")
        execute(built, "drop role stranger")


def changes(database: Database) -> list[tuple[str, int]]:
    with database.session() as connection:
        return connection.execute(
            "select op, rows from fabric.source_change order by change_id"
        ).fetchall()


@ON_EVERY_SERVER
def test_every_server_gives_the_same_answers(database: Database, tmp_path: Path) -> None:
    land(database)
    build(database, tmp_path)
    execute(database, "update fabric.embed set metadata = 'x'")
    assert verdict(database).verdict == "fresh"
    execute(database, f"{MOVE} where source_row < 60")
    land(database, first=ROWS, rows=2)
    found = verdict(database)
    assert (found.verdict, found.updated, found.inserted) == ("changed", 60, 2)
    assert moved_ids(database) == of(*range(60), ROWS, ROWS + 1)
    row = vectors.current_generation(database, "corpus")
    assert row is not None
    source = shards.store.source_of(row.manifest["source"])
    read = sources.read_source(database, source)
    assert sources.source_state(database, source).content == read.state.content
    build(database, tmp_path)
    assert verdict(database).verdict == "fresh"
    execute(database, "truncate fabric.embed")
    assert verdict(database).verdict == "rebuild"


@ON_EVERY_SERVER
def test_the_moved_rows_and_the_log_are_of_one_snapshot(built: Database) -> None:
    """A row that moves while they are read belongs to the next generation."""
    row = vectors.current_generation(built, "corpus")
    assert row is not None
    source = shards.store.source_of(row.manifest["source"])
    execute(built, f"{MOVE} where source_row = 1")
    first = staleness.read_moved(built, "corpus", 1, source)
    execute(built, f"{MOVE} where source_row = 2")
    again = staleness.read_moved(built, "corpus", 1, source)
    assert first.rows.ids.tolist() == of(1)
    assert again.rows.ids.tolist() == of(1, 2)
    np.testing.assert_array_equal(again.rows.vectors[0], first.rows.vectors[0])
    with psycopg.connect(built.url) as connection:
        seen = connection.execute(
            "select pg_visible_in_snapshot(xid, %s::pg_snapshot) from fabric.source_change "
            "order by change_id desc limit 2",
            (first.state.snapshot,),
        ).fetchall()
    assert seen == [(False,), (True,)]


def test_a_relation_of_another_owner_is_left_unwatched_and_its_shard_is_audited(
    built: Database,
) -> None:
    execute(built, "create role reader login")
    try:
        execute(built, "create table public.theirs (id bigint, v halfvec)")
        for what in (
            "select on public.theirs", "usage on schema fabric", "select on all tables in schema fabric",
        ):  # fmt: skip
            execute(built, f"grant {what} to reader")
        as_reader = Database(built.url.replace("postgres@", "reader@"))
        staleness.watch(as_reader, sources.Source("public.theirs", "id", "v"))
        with built.session() as connection:
            watched = connection.execute("select count(*) from fabric.watched").fetchone()
        assert watched == (1,)  # fabric.embed alone
    finally:
        execute(built, "drop owned by reader")
        execute(built, "drop role reader")
