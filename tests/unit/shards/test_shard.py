"""A built shard holds every row once, answers exactly, and names what rots."""

from __future__ import annotations

import numpy as np
import pytest

from fabric_pipelines import shards
from fabric_pipelines.analytics.reference.flat_topk import flat_topk
from fabric_pipelines.analytics.search import recall_at_k
from fabric_pipelines.errors import CorruptionFound, SchemaError, UsageError, VersionRefused
from fabric_pipelines.shards.manifest import ShardManifest

RECIPE = {"engine": "e@test", "engine_fingerprint": "ab" * 32, "weights_sha256": "cd" * 32}


def build(store, root, **changes):
    wanted = {
        "lists": 8,
        "seed": 7,
        "metric": "cosine",
        "recipe": RECIPE,
        "lists_per_block": 3,
    } | changes
    return shards.build(store, root, "notes", **wanted)


def test_every_row_is_in_the_shard_once_with_its_vector_and_columns(store, rows, tmp_path):
    build(store, tmp_path)
    with shards.open_shard(store, tmp_path, "notes") as shard:
        ids, vectors = rows
        order = np.argsort(shard.ids())
        np.testing.assert_array_equal(shard.ids()[order], ids)
        np.testing.assert_array_equal(shard.vectors()[order], vectors.astype(np.float32))
        assert shard.columns()["source_row"].to_pylist() == (shard.ids() % 1000).tolist()
        assert shard.indptr[-1] == len(ids) == shard.manifest.rows
        assert len(shard.blocks) == 3


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_exact_search_over_blocks_equals_the_brute_force_over_all_rows(
    store, rows, tmp_path, metric
):
    build(store, tmp_path, metric=metric)
    ids, vectors = rows
    with shards.open_shard(store, tmp_path, "notes") as shard:
        D, found = shard.search(vectors[:20], 10)
        true_d, true_i, _ = flat_topk(vectors[:20], vectors, ids, 10, metric=metric)
        np.testing.assert_array_equal(found, true_i)
        np.testing.assert_array_equal(D, true_d)
        assert (found[:, 0] == ids[:20]).all()


def test_probing_all_lists_is_exact_and_probing_few_finds_most(store, rows, tmp_path):
    build(store, tmp_path)
    with shards.open_shard(store, tmp_path, "notes") as shard:
        xq = rows[1][:50]
        exact = shard.search(xq, 10)
        np.testing.assert_array_equal(shard.search(xq, 10, exact=False, nprobe=99).I, exact.I)
        assert recall_at_k(shard.search(xq, 10, exact=False, nprobe=3).I, exact.I) > 0.9


def test_rows_without_direction_are_quarantined_and_counted(store, rows, tmp_path):
    ids, vectors = rows
    store.put(ids[:3], np.stack([np.full(24, np.nan), np.zeros(24), np.full(24, np.inf)]))
    generation = build(store, tmp_path)
    assert generation.manifest.quarantined == {"nan": 2, "zero": 1}
    assert generation.manifest.rows == len(ids) - 3
    with shards.open_shard(store, tmp_path, "notes") as shard:
        assert not np.isin(ids[:3], shard.search(vectors[:9], 400).I).any()
        assert shard.quarantined().ids.tolist() == ids[:3].tolist()
        assert np.isnan(shard.quarantined().vectors[0]).all()


def test_lists_without_rows_are_blocks_without_rows(store, rows, tmp_path):
    store.put(rows[0], np.ones_like(rows[1]))
    build(store, tmp_path, lists=5, lists_per_block=1)
    with shards.open_shard(store, tmp_path, "notes") as shard:
        assert [len(block.ids) for block in shard.blocks] == [400, 0, 0, 0, 0]
        assert shard.search(rows[1][:1], 3).I.tolist() == [rows[0][:3].tolist()]
        assert shard.search(rows[1][:1], 3, exact=False).found.tolist() == [3]
        assert shard.columns().num_rows == 400
    assert shards.scrub(store, tmp_path, "notes").ok


def test_a_source_of_quarantined_rows_only_is_refused(store, rows, tmp_path):
    store.put(rows[0], np.zeros_like(rows[1]))
    with pytest.raises(UsageError, match="400 read, all quarantined"):
        build(store, tmp_path)


def test_mapped_rows_are_aligned_and_cannot_be_written(store, tmp_path):
    build(store, tmp_path)
    with shards.open_shard(store, tmp_path, "notes") as shard:
        for block in shard.blocks:
            assert block.vectors.ctypes.data % 64 == 0
            assert not block.vectors.flags.writeable


def test_a_closed_shard_says_so(store, tmp_path):
    build(store, tmp_path)
    shard = shards.open_shard(store, tmp_path, "notes")
    kept = shard.blocks[0].vectors
    shard.close()
    assert np.isfinite(kept).all()
    with pytest.raises(UsageError, match="was closed"):
        shard.search(np.ones((1, 24)), 1)


def test_opening_what_was_never_built_is_a_usage_error(store, tmp_path):
    with pytest.raises(UsageError, match="there is no generation of shard 'notes'; build it first"):
        shards.open_shard(store, tmp_path, "notes")
    with pytest.raises(UsageError, match="cannot be a folder name"):
        shards.build(store, tmp_path, "../x", lists=1, seed=0, metric="l2", recipe={})


def test_recipes_refuse_floats_and_keys_of_the_build(store, tmp_path):
    with pytest.raises(SchemaError, match=r"recipe\.rate is a float"):
        build(store, tmp_path, recipe={"rate": 0.5})
    with pytest.raises(UsageError, match=r"\['index'\] are written by the build"):
        build(store, tmp_path, recipe={"index": {}})


def test_a_clean_shard_scrubs_clean(store, tmp_path):
    generation = build(store, tmp_path)
    report = shards.scrub(store, tmp_path, "notes")
    assert report.ok
    assert report.files == len(generation.manifest.files) == 3 * 3 + 4


@pytest.mark.parametrize("role", ["vectors", "ids"])
def test_one_flipped_bit_is_named_by_block_list_and_file(store, tmp_path, role):
    generation = build(store, tmp_path)
    entry = generation.manifest.of_role(role)[1]  # lists 3..5
    row = generation.manifest.indptr[4] - generation.manifest.indptr[3]  # the first row of list 4
    width = 8 if role == "ids" else 24 * 4
    flip(generation.folder / entry.path, 128 + row * width + 5)
    (damage,) = shards.scrub(store, tmp_path, "notes").differences
    assert damage.what == entry.path
    assert f"{role} block of lists 3..5" in damage.sentence
    assert "in list 4:" in damage.sentence


@pytest.mark.parametrize("role", ["columns", "centroids", "marks", "quarantine_ids"])
def test_damage_in_any_other_file_is_named_by_file(store, rows, tmp_path, role):
    store.put(rows[0][:1], np.zeros((1, 24)))
    generation = build(store, tmp_path)
    entry = generation.manifest.of_role(role)[0]
    flip(generation.folder / entry.path, -3)
    (damage,) = shards.scrub(store, tmp_path, "notes").differences
    assert role in damage.sentence
    assert entry.path in damage.sentence


def test_a_missing_and_a_shortened_file_are_named(store, tmp_path):
    generation = build(store, tmp_path)
    first, second = generation.manifest.of_role("vectors")[:2]
    (generation.folder / first.path).unlink()
    path = generation.folder / second.path
    path.write_bytes(path.read_bytes()[:-1])
    sentences = [str(found) for found in shards.scrub(store, tmp_path, "notes").differences]
    assert sentences[0].endswith("is missing")
    assert f"not {second.bytes}" in sentences[1]
    with pytest.raises(CorruptionFound, match="is missing"):
        shards.open_shard(store, tmp_path, "notes")


def test_a_manifest_that_was_not_published_is_refused(store, tmp_path):
    generation = build(store, tmp_path)
    path = generation.folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"seed":7', b'"seed":8'))
    with pytest.raises(CorruptionFound, match="the database published"):
        shards.open_shard(store, tmp_path, "notes")
    path.unlink()
    with pytest.raises(CorruptionFound, match="cannot be read"):
        shards.open_shard(store, tmp_path, "notes")


def test_a_manifest_of_another_format_is_refused(store, tmp_path):
    fields = build(store, tmp_path).manifest.as_json()
    with pytest.raises(VersionRefused, match="fabric-shard-1"):
        ShardManifest.from_json(fields | {"format": "fabric-shard-9"}, "x")
    with pytest.raises(VersionRefused, match=r"newer program .* colour"):
        ShardManifest.from_json(fields | {"colour": 1}, "x")


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
