"""A shard is built when its rows or its recipe moved, and only then; recall is measured against the database."""

from __future__ import annotations

import shutil
from pathlib import Path

from fabric_pipelines import shards
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.writer import Writer
from tests.support_completions import pulled_batch

ROWS, DIM = 120, 8


def land(database: Database, first: int = 0, rows: int = ROWS) -> None:
    writer = Writer(database)
    try:
        writer.land(pulled_batch(rows, function="embed", first=first, dim=DIM))
    finally:
        writer.close()


def ensured(database: Database, root: Path, **changes: object) -> tuple[int, bool]:
    wanted = {"lists": 4, "seed": 3, "metric": "cosine", "recipe": {"engine": "e"}} | changes
    generation, built = shards.build_if_moved(database, root, "corpus", **wanted)  # type: ignore[arg-type]
    return generation.number, built


def test_what_did_not_move_is_not_built_again(database: Database, tmp_path: Path) -> None:
    land(database)
    assert ensured(database, tmp_path) == (1, True)
    assert ensured(database, tmp_path) == (1, False)


def test_moved_rows_and_another_recipe_each_make_a_generation(
    database: Database, tmp_path: Path
) -> None:
    land(database)
    ensured(database, tmp_path)
    land(database, first=ROWS, rows=5)
    assert ensured(database, tmp_path) == (2, True)
    assert ensured(database, tmp_path, recipe={"engine": "other"}) == (3, True)
    assert ensured(database, tmp_path, recipe={"engine": "other"}, seed=4) == (4, True)


def test_a_lost_folder_comes_back_as_the_next_generation(
    database: Database, tmp_path: Path
) -> None:
    land(database)
    ensured(database, tmp_path)
    shutil.rmtree(tmp_path / "corpus")
    assert ensured(database, tmp_path) == (2, True)


def test_recall_is_one_for_the_rows_built_from_and_falls_when_the_rows_grew(
    database: Database, tmp_path: Path
) -> None:
    land(database)
    ensured(database, tmp_path)
    with shards.open_shard(database, tmp_path, "corpus") as shard:
        found = shards.recall_of(database, shard, 10, queries=20)
        assert (found.recall, found.queries, found.rows) == (1.0, 20, ROWS)
        land(database, first=ROWS, rows=ROWS)
        assert shards.recall_of(database, shard, 10, queries=20).recall < 0.9
