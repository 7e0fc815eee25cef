"""Refresh on a real Postgres: what SQL moved is what is built, whatever happens to log, lease or process."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fabric_pipelines import receipts, shards
from fabric_pipelines.dataplane import source as sources
from fabric_pipelines.dataplane import staleness, vectors
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import CheckFailed, FencingLost
from fabric_pipelines.ids import task_id
from fabric_pipelines.shards.disk import Disk
from tests.support import ON_EVERY_SERVER
from tests.support_completions import pulled_batch

ROWS, DIM = 400, 16
MOVE = "update fabric.embed set vector = (select vector from fabric.embed where source_row = 399) "


def land(database: Database, first: int = 0, rows: int = ROWS, **more: object) -> None:
    writer = Writer(database)
    try:
        writer.land(pulled_batch(rows, function="embed", first=first, dim=DIM, **more))  # type: ignore[arg-type]
    finally:
        writer.close()


def execute(database: Database, statement: str, *values: object) -> None:
    with database.session() as connection:
        connection.execute(statement.encode(), values or None)


@pytest.fixture
def built(database: Database, tmp_path: Path) -> Database:
    land(database)
    shards.build(
        database,
        tmp_path,
        "corpus",
        lists=6,
        seed=3,
        metric="cosine",
        recipe={"engine": "e"},
        lists_per_block=2,
    )
    receipts.issue(database, tmp_path, "corpus")
    return database


def refresh(database: Database, root: Path, **more: object) -> shards.Refreshed:
    return shards.refresh(database, root, "corpus", **more)  # type: ignore[arg-type]


def require_up_to_date(database: Database, root: Path) -> None:
    """The generation's hash is the database's own, and its rows are the database's rows."""
    with shards.open_shard(database, root, "corpus") as shard:
        source = shards.store.source_of(shard.manifest.source)
        read = sources.read_source(database, source)
        assert shard.manifest.source["content_hash"] == read.state.content.hex
        assert sorted(shard.ids().tolist()) == read.ids.tolist()
    (found,) = staleness.staleness(database, "corpus")
    assert (found.verdict, found.moved, found.log) == ("fresh", 0, "complete")


@ON_EVERY_SERVER
def test_what_moved_is_laid_over_and_its_receipt_is_replayed_to_the_byte(
    built: Database, tmp_path: Path
) -> None:
    execute(built, f"{MOVE} where source_row in (1, 2)")
    execute(built, "delete from fabric.embed where source_row = 3")
    execute(built, "update fabric.embed set source_row = 4000 where source_row = 4")
    land(built, first=ROWS, rows=5)
    done = refresh(built, tmp_path)
    assert (done.how, done.moved, done.generation.number) == ("increment", 9, 2)
    require_up_to_date(built, tmp_path)
    receipt = receipts.issue(built, tmp_path, "corpus")
    assert receipts.verify(built, tmp_path, receipt.receipt_id).differences == ()
    assert receipts.rebuild(built, tmp_path, receipt.receipt_id).verdict == "identical"
    assert refresh(built, tmp_path).how == "none"


def test_a_column_changed_by_sql_is_named_with_its_row(built: Database, tmp_path: Path) -> None:
    execute(built, "update fabric.embed set source_row = 4000 where source_row = 4")
    (row,) = vectors.find_receipts(built, shard="corpus")
    (found,) = receipts.verify(built, tmp_path, row.receipt_id).differences
    assert f"1 row changed in source_row (task_id {task_id(7, 4)})" in str(found)


def test_a_writer_that_commits_while_the_refresh_reads_belongs_to_the_next(
    built: Database, tmp_path: Path
) -> None:
    with built.session() as late, late.transaction():
        late.execute(f"{MOVE} where source_row = 5".encode())
        execute(built, f"{MOVE} where source_row = 6")
        assert refresh(built, tmp_path).moved == 1
    assert refresh(built, tmp_path).moved == 1
    require_up_to_date(built, tmp_path)


def test_moves_behind_switched_off_triggers_are_found_by_bucket_sums(
    built: Database, tmp_path: Path
) -> None:
    execute(built, "alter table fabric.embed disable trigger user")
    execute(built, f"{MOVE} where source_row in (7, 8)")
    execute(built, "delete from fabric.embed where source_row = 9")
    done = refresh(built, tmp_path)
    assert (done.how, done.moved) == ("increment", 3)
    require_up_to_date(built, tmp_path)


def test_an_audit_says_what_moved_and_the_log_counts_from_there(
    built: Database, tmp_path: Path
) -> None:
    execute(built, "alter table fabric.embed disable trigger user")
    execute(built, f"{MOVE} where source_row < 30")
    execute(built, "delete from fabric.embed where source_row = 30")
    found = shards.audit(built, tmp_path, "corpus")
    assert (found.inserted, found.updated, found.deleted) == (0, 30, 1)
    (stale,) = staleness.staleness(built, "corpus")
    assert (stale.verdict, stale.log, stale.updated) == ("changed", "complete", 30)
    execute(built, "delete from fabric.embed where source_row = 31")
    assert staleness.staleness(built, "corpus")[0].deleted == 2
    assert refresh(built, tmp_path).moved == 32
    require_up_to_date(built, tmp_path)


REWRITE = "alter table fabric.embed alter column vector type {} using {}"


@pytest.fixture
def vector_type(built: Database) -> str:
    with built.session() as connection:
        row = connection.execute(
            "select atttypid::regtype::text from pg_attribute "
            "where attrelid = 'fabric.embed'::regclass and attname = 'vector'"
        ).fetchone()
    assert row is not None
    return str(row[0])


def rewrite(built: Database, vector_type: str) -> None:
    """Other vectors in every row, by a new file for the table."""
    other = "vector + vector"
    if vector_type == "bytea":
        other = "set_byte(vector, 0, get_byte(vector, 0) # 1)"
    execute(built, REWRITE.format(vector_type, other))


def test_a_rewritten_table_asks_for_an_audit_which_finds_every_row(
    built: Database, tmp_path: Path, vector_type: str
) -> None:
    """No trigger fires, and the change log has nothing."""
    rewrite(built, vector_type)
    (stale,) = staleness.staleness(built, "corpus")
    assert (stale.verdict, stale.log, stale.moved) == ("audit", "rewritten", 0)
    assert shards.audit(built, tmp_path, "corpus").updated == ROWS
    (stale,) = staleness.staleness(built, "corpus")
    assert (stale.verdict, stale.log, stale.moved) == ("rebuild", "complete", ROWS)
    assert refresh(built, tmp_path).why == "100.0% of the rows moved"
    require_up_to_date(built, tmp_path)


def test_a_rewritten_table_is_refreshed_without_an_audit_before(
    built: Database, tmp_path: Path, vector_type: str
) -> None:
    rewrite(built, vector_type)
    assert refresh(built, tmp_path).why == "100.0% of the rows moved"
    require_up_to_date(built, tmp_path)


def test_a_rewrite_that_moved_nothing_is_settled_by_one_refresh(
    built: Database, tmp_path: Path
) -> None:
    execute(built, "cluster fabric.embed using embed_pkey")
    assert staleness.staleness(built, "corpus")[0].log == "rewritten"
    assert refresh(built, tmp_path).how == "none"
    require_up_to_date(built, tmp_path)
    execute(built, f"{MOVE} where source_row = 1")
    assert refresh(built, tmp_path).moved == 1
    require_up_to_date(built, tmp_path)


def test_a_child_that_is_attached_asks_for_an_audit(built: Database, tmp_path: Path) -> None:
    execute(built, "create table fabric.embed_more (like fabric.embed including all)")
    execute(built, "alter table fabric.embed_more inherit fabric.embed")
    (stale,) = staleness.staleness(built, "corpus")
    assert (stale.verdict, stale.log) == ("audit", "rewritten")


def test_rows_of_another_engine_are_refused_by_name(built: Database, tmp_path: Path) -> None:
    with built.session() as connection:
        row = connection.execute("select min(engine_fingerprint) from fabric.embed").fetchone()
    assert row is not None
    more = {"lists": 6, "seed": 3, "metric": "cosine", "recipe": {"engine_fingerprint": row[0]}}
    shards.build(built, tmp_path, "corpus", **more)  # type: ignore[arg-type]
    execute(built, "update fabric.embed set engine_fingerprint = 'other' where source_row = 2")
    execute(built, f"{MOVE} where source_row = 2")
    with pytest.raises(CheckFailed, match="rows made by other"):
        refresh(built, tmp_path)


def test_a_zombie_refresh_publishes_nothing(built: Database, tmp_path: Path) -> None:
    execute(built, f"{MOVE} where source_row = 1")

    class Overtaken(Disk):
        def rename(self, old: Path, new: Path) -> None:
            execute(built, "update fabric.shard_lease set expires = clock_timestamp()")
            vectors.acquire_shard(built, "corpus", "elsewhere", ttl_s=0.2)
            super().rename(old, new)

    with pytest.raises(FencingLost):
        refresh(built, tmp_path, disk=Overtaken())
    row = vectors.current_generation(built, "corpus")
    assert row is not None
    assert row.generation == 1


def _refresh_and_die(url: str, root: Path, step: int) -> None:
    class Killing(Disk):
        steps = 0

        def __getattribute__(self, name: str) -> object:
            if name in Disk.__dict__ and not name.startswith("_"):
                Killing.steps += 1
                if Killing.steps == step:
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().__getattribute__(name)

    refresh(Database(url), root, disk=Killing())


@pytest.mark.parametrize("step", [5, 30])
def test_kill_nine_while_refreshing_leaves_the_old_generation_and_loses_no_move(
    built: Database, tmp_path: Path, step: int
) -> None:
    execute(built, f"{MOVE} where source_row = 1")
    child = multiprocessing.get_context("spawn").Process(
        target=_refresh_and_die, args=(built.url, tmp_path, step)
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    child.close()
    assert shards.scrub(built, tmp_path, "corpus").generation == 1
    assert shards.scrub(built, tmp_path, "corpus").ok
    assert refresh(built, tmp_path).moved == 1
    require_up_to_date(built, tmp_path)


def _publish_and_die(url: str, root: Path, when: str, by: str) -> None:
    """Publish the next generation, and die before its receipt's row, or between that and the copy."""

    class Killing(Disk):
        def replace_file(self, path: Path, content: bytes) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    database = Database(url)
    refresh(database, root, anew=by == "a full build")
    if when == "before the receipt's row":
        os.kill(os.getpid(), signal.SIGKILL)
    receipts.issue(database, root, "corpus", disk=Killing())


@pytest.mark.parametrize("by", ["a full build", "an increment"])
@pytest.mark.parametrize("when", ["before the receipt's row", "before its copy"])
def test_kill_nine_after_the_row_costs_no_generation_its_receipt_and_no_increment_its_parent(
    built: Database, tmp_path: Path, when: str, by: str
) -> None:
    execute(built, f"{MOVE} where source_row = 1")
    child = multiprocessing.get_context("spawn").Process(
        target=_publish_and_die, args=(built.url, tmp_path, when, by)
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    child.close()
    kept = vectors.find_receipts(built, shard="corpus", generation=2)
    assert len(kept) == (when == "before its copy")
    assert not list(tmp_path.glob("corpus/g000002-*/receipt.json"))
    execute(built, f"{MOVE} where source_row = 2")
    assert refresh(built, tmp_path).how == "increment"
    third = receipts.issue(built, tmp_path, "corpus")
    (second,) = vectors.find_receipts(built, shard="corpus", generation=2)
    assert third.parents == (second.receipt_id,)
    assert receipts.verify(built, tmp_path, third.receipt_id).differences == ()
    # of the generation before only what moved since is said
    found = receipts.verify(built, tmp_path, second.receipt_id).differences
    assert {item.what for item in found} == {"source.rows.changed"}


def test_the_command_issues_a_missing_receipt_and_names_its_parents(
    built: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fabric_pipelines import settings
    from fabric_pipelines.cli import app

    monkeypatch.setenv("FABRIC_HOME", str(tmp_path))
    monkeypatch.setenv("FABRIC_PG_URL", built.url)
    root = _made(settings.load().shards_dir)
    (tmp_path / "corpus").rename(root / "corpus")
    (first,) = vectors.find_receipts(built)
    execute(built, f"{MOVE} where source_row = 1")
    refresh(built, root)
    done = CliRunner().invoke(app, ["receipt", "issue", "corpus", "--generation", "2", "--json"])
    answer = json.loads(done.stdout)
    assert (done.exit_code, answer["generation"], answer["parents"]) == (0, 2, [first.receipt_id])
    assert receipts.verify(built, root, answer["receipt_id"]).ok


def test_the_commands_say_what_moved_and_bring_it_up_to_date(
    built: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fabric_pipelines import settings
    from fabric_pipelines.cli import app

    monkeypatch.setenv("FABRIC_HOME", str(tmp_path))
    monkeypatch.setenv("FABRIC_PG_URL", built.url)
    shards_dir = settings.load().shards_dir
    (tmp_path / "corpus").rename(_made(shards_dir) / "corpus")

    def said(*words: str) -> tuple[int, dict[str, object]]:
        done = CliRunner().invoke(app, ["receipt", *words, "--json"])
        return done.exit_code, json.loads(done.stdout)

    (first,) = vectors.find_receipts(built)
    execute(built, f"{MOVE} where source_row < 21")
    code, answer = said("stale")
    assert (code, answer["shards"][0]["verdict"]) == (3, "changed")  # type: ignore[index]
    code, answer = said("refresh", "corpus")
    assert (code, answer["how"], answer["moved"]) == (0, "increment", 21)
    assert said("stale", "--wait", "0.05")[0] == 0
    assert said("audit", "corpus") == (
        0,
        {"shard": "corpus", "generation": 2, "inserted": 0, "updated": 0, "deleted": 0},
    )
    second = str(answer["receipt_id"])
    code, answer = said("diff", first.receipt_id, second)
    assert code == 3
    assert any("21 rows changed" in d["sentence"] for d in answer["differences"])  # type: ignore[attr-defined]
    assert said("diff", second, second)[0] == 0
    assert said("rebuild", second, "--least", "identical")[0] == 0
    shard = shards.open_generation(built, shards_dir, "corpus")
    damaged = shard.folder / shard.manifest.of_role("vectors")[0].path
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for least in ("identical", "equivalent"):
        code, answer = said("rebuild", second, "--least", least)
        assert (code, answer["ok"]) == (3, False)
        assert answer["damage"]
    damaged.write_bytes(whole)
    code, answer = said("rebuild", second, "--parameter", "iterations=1")
    assert code in (0, 3)
    assert any("recipe.index.iterations" in d["what"] for d in answer["differences"])  # type: ignore[attr-defined]
    code, answer = said("policy", "corpus", "--set", "max_changed_fraction=0.5")
    assert [row["max_changed_fraction"] for row in answer["policies"]] == [0.05, 0.5]  # type: ignore[attr-defined]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_vectors_of_an_increment_are_the_databases(built: Database, tmp_path: Path) -> None:
    execute(built, f"{MOVE} where source_row in (1, 2, 3)")
    refresh(built, tmp_path)
    with shards.open_shard(built, tmp_path, "corpus") as shard:
        read = sources.read_source(built, shards.store.source_of(shard.manifest.source))
        by_id = np.argsort(shard.ids())
        np.testing.assert_array_equal(shard.vectors()[by_id], read.vectors.astype(np.float32))
