"""A shard is built again when its rows or its recipe moved, and only then; its recall is asked of the source."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from fabric_pipelines import shards
from fabric_pipelines.shards import building


def ensure(store, root, **changes):
    wanted = {"lists": 6, "seed": 7, "metric": "cosine", "recipe": {"engine": "e"}} | changes
    return shards.build_if_moved(store, root, "notes", **wanted)


def test_nothing_moved_is_the_same_generation(store, tmp_path):
    first, built = ensure(store, tmp_path)
    again, rebuilt = ensure(store, tmp_path)
    assert (built, rebuilt) == (True, False)
    assert again.manifest_sha256 == first.manifest_sha256
    assert store.last_generation("notes") == 1


@pytest.mark.parametrize("change", [{"seed": 8}, {"lists": 5}, {"recipe": {"engine": "f"}}])
def test_another_recipe_is_another_generation(store, tmp_path, change):
    ensure(store, tmp_path)
    generation, built = ensure(store, tmp_path, **change)
    assert built
    assert generation.number == 2


def test_a_moved_row_other_code_and_a_lost_folder_each_build_again(
    store, rows, tmp_path, monkeypatch
):
    first, _ = ensure(store, tmp_path)
    store.put(rows[0][:1], -rows[1][:1])
    second, built = ensure(store, tmp_path)
    assert built
    shutil.rmtree(second.folder)
    assert ensure(store, tmp_path)[1]
    monkeypatch.setattr(building, "code", lambda: {"version": "9"})
    assert ensure(store, tmp_path)[0].number == 4
    assert first.folder.is_dir()


def test_recall_is_one_for_the_rows_built_from_and_falls_when_the_source_moves(
    store, rows, tmp_path
):
    ensure(store, tmp_path)
    with shards.open_shard(store, tmp_path, "notes") as shard:
        found = shards.recall_of(store, shard, 10)
        assert (found.recall, found.queries, found.rows) == (1.0, 100, 400)
        store.put(rows[0] + 1000, np.roll(rows[1], 1, axis=0))
        assert shards.recall_of(store, shard, 10).recall < 0.9
