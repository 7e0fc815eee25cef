"""Shards on a real Postgres: landed rows in, published generations out, whatever happens to the process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines import shards
from fabric_pipelines.analytics.reference.flat_topk import flat_topk
from fabric_pipelines.dataplane import source, vectors
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import AlreadyRunning, FencingLost, SchemaError, UsageError
from fabric_pipelines.shards.disk import Disk
from tests.support_completions import pulled_batch

ROWS, DIM = 300, 16


def land(database: Database, first: int = 0, rows: int = ROWS, **more: object) -> None:
    writer = Writer(database)
    try:
        writer.land(pulled_batch(rows, function="embed", first=first, dim=DIM, **more))
    finally:
        writer.close()


def build(database: Database, root: Path, **changes: object) -> shards.Generation:
    wanted = {
        "lists": 6,
        "seed": 3,
        "metric": "cosine",
        "recipe": {"engine": "e"},
        "lists_per_block": 2,
    } | changes
    return shards.build(database, root, "corpus", **wanted)


def test_landed_rows_become_a_shard_that_searches_like_brute_force(
    database: Database, tmp_path: Path
) -> None:
    land(database)
    generation = build(database, tmp_path, submission_id="5" * 64)
    rows = source.read_source(database, source.Source())
    with shards.open_shard(database, tmp_path, "corpus") as shard:
        _, found = shard.search(rows.vectors[:12], 10)
        _, truth, _ = flat_topk(rows.vectors[:12], rows.vectors, rows.ids, 10, metric="cosine")
        np.testing.assert_array_equal(found, truth)
        # task ids and source rows were landed in step
        assert shard.columns()["source_row"].to_pylist() == (shard.ids() & 0xFFFF).tolist()
    assert generation.manifest.source["rows"] == ROWS
    assert generation.manifest.source["cluster"] == database.cluster_id
    assert generation.manifest.source["submission_id"] == "5" * 64


def test_more_rows_make_the_next_generation_and_a_reader_keeps_its_own(
    database: Database, tmp_path: Path
) -> None:
    land(database)
    build(database, tmp_path)
    with shards.open_shard(database, tmp_path, "corpus") as old:
        land(database, first=ROWS, rows=50)
        assert build(database, tmp_path, keep_centroids=True).number == 2
        assert old.search(np.ones((1, DIM)), ROWS + 50).found.tolist() == [ROWS]
    with shards.open_shard(database, tmp_path, "corpus") as new:
        assert new.search(np.ones((1, DIM)), ROWS + 50).found.tolist() == [ROWS + 50]
    with shards.open_shard(database, tmp_path, "corpus", 1) as first:
        assert first.manifest.rows == ROWS


def test_a_column_that_cannot_travel_is_refused_by_name(database: Database, tmp_path: Path) -> None:
    land(database)
    with pytest.raises(SchemaError, match=r"column 'engine' of fabric\.embed is text"):
        build(database, tmp_path, columns=["engine"])
    with pytest.raises(SchemaError, match="no column 'colour'"):
        build(database, tmp_path, columns=["colour"])
    with database.session() as connection:
        connection.execute("alter table fabric.embed add shade int")
    with pytest.raises(SchemaError, match=r"'shade' is null in .* row.* of"):
        build(database, tmp_path, columns=["shade"])


def test_a_zombie_holder_publishes_nothing(database: Database, tmp_path: Path) -> None:
    """Its lease ends while it writes; another holder takes over with a newer token."""
    land(database)

    class Overtaken(Disk):
        def rename(self, old: Path, new: Path) -> None:
            with database.session() as connection:
                connection.execute("update fabric.shard_lease set expires = clock_timestamp()")
            assert vectors.acquire_shard(database, "corpus", "elsewhere", ttl_s=60).token == 2
            super().rename(old, new)

    with pytest.raises(FencingLost, match="no longer holds"):
        build(database, tmp_path, disk=Overtaken())
    assert vectors.current_generation(database, "corpus") is None
    with pytest.raises(AlreadyRunning, match="leased to elsewhere"):
        build(database, tmp_path)


class Killing(Disk):
    """Kills its process before the `step`th call."""

    def __init__(self, step: int) -> None:
        self._left = step

    def __getattribute__(self, name: str) -> object:
        if name in Disk.__dict__ and not name.startswith("_"):
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getattribute__(name)


def _build_and_die(url: str, root: Path, step: int) -> None:
    build(Database(url), root, disk=Killing(step))


def _prune_and_die(url: str, root: Path, step: int) -> None:
    shards.prune(Database(url), root, "corpus", keep=1, disk=Killing(step))


def killed(work: Callable[[str, Path, int], None], *given: object) -> None:
    child = multiprocessing.get_context("spawn").Process(target=work, args=given)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    child.close()


@pytest.mark.parametrize("step", [3, 9, 24])
def test_kill_nine_while_building_leaves_the_old_generation_and_the_next_build_takes_the_lease_back(
    database: Database, tmp_path: Path, step: int
) -> None:
    land(database)
    build(database, tmp_path)
    land(database, first=ROWS, rows=20)
    killed(_build_and_die, database.url, tmp_path, step)
    assert shards.scrub(database, tmp_path, "corpus").ok
    with shards.open_shard(database, tmp_path, "corpus") as shard:
        assert shard.manifest.rows == ROWS
    second = build(database, tmp_path)
    assert (second.number, second.manifest.rows) == (2, ROWS + 20)
    left = {path.name for path in (tmp_path / "corpus").iterdir()}
    assert left == {".lock", "g000001-t1", "g000002-t3"}


@pytest.mark.parametrize("step", [1, 3, 5])
def test_kill_nine_while_pruning_leaves_rows_that_tell_the_truth_and_the_next_prune_ends_it(
    database: Database, tmp_path: Path, step: int
) -> None:
    """Two generations go: before a rename, before the folder is synced, before the last files."""
    land(database)
    for lists in (6, 5, 4):
        build(database, tmp_path, lists=lists)
    killed(_prune_and_die, database.url, tmp_path, step)
    for number in (1, 2, 3):
        row = vectors.current_generation(database, "corpus", number)
        assert row is not None
        if row.pruned is None:
            with shards.open_shard(database, tmp_path, "corpus", number) as shard:
                assert shard.manifest.rows == ROWS
        else:
            with pytest.raises(UsageError, match="pruned by policy"):
                shards.open_shard(database, tmp_path, "corpus", number)
    assert shards.scrub(database, tmp_path, "corpus").ok
    done = shards.prune(database, tmp_path, "corpus", keep=1)
    assert [kept.generation for kept in done.kept] == [3]
    assert {path.name for path in (tmp_path / "corpus").iterdir()} == {".lock", "g000003-t3"}
