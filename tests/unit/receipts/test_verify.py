"""A receipt verifies while everything it says is so; otherwise each thing that is not is named."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json

import numpy as np
import pytest

from fabric_pipelines import receipts, shards
from fabric_pipelines.dataplane.source import Source
from fabric_pipelines.errors import UsageError, VersionRefused
from fabric_pipelines.records.receipt import PREDICATE_TYPE, Receipt
from fabric_pipelines.shards import building
from fabric_pipelines.shards.manifest import ShardManifest


def names(verification):
    return [found.what for found in verification.differences]


def edited(store, receipt, change):
    """Change the receipt's row as somebody with SQL could."""
    row = store.receipts[receipt.receipt_id]
    statement = copy.deepcopy(dict(row.statement))
    change(statement["predicate"])
    store.receipts[receipt.receipt_id] = dataclasses.replace(row, statement=statement)


def test_a_fresh_receipt_verifies(store, tmp_path, receipt):
    verification = receipts.verify(store, tmp_path, receipt.receipt_id)
    assert verification.differences == ()
    assert verification.as_json()["ok"] is True
    assert receipts.verify(store, tmp_path, receipt.receipt_id[:8]).ok


def test_a_receipt_holds_what_is_needed_to_rebuild(store, generation, receipt):
    assert receipt.source["rows"] == 300
    assert receipt.source["pg_snapshot"]
    assert len(receipt.source["bucket_sums"]) == 1024
    assert receipt.recipe["engine_fingerprint"] == "ab" * 32
    assert receipt.recipe["index"]["seed"] == 7
    assert set(receipt.recipe["libraries"]) >= {"numpy", "pyarrow", "python"}
    assert receipt.outputs["rows"] == 299
    assert receipt.outputs["quarantined"] == {"nan": 0, "zero": 1}
    assert receipt.outputs["token"] == generation.token
    assert {entry["role"] for entry in receipt.outputs["files"]} >= {"vectors", "ids", "columns"}
    assert receipt.quality["recall_at_10"] == 1.0


def test_the_copy_beside_the_shard_is_an_in_toto_statement_of_the_same_receipt(generation, receipt):
    statement = json.loads((generation.folder / "receipt.json").read_bytes())
    assert statement["predicateType"] == PREDICATE_TYPE
    assert Receipt.from_statement(statement) == receipt
    assert {item["name"] for item in statement["subject"]} == {
        entry.path for entry in generation.manifest.files
    }


def test_issuing_twice_is_once_and_measuring_again_makes_no_other_receipt(store, tmp_path, receipt):
    again = receipts.issue(store, tmp_path, "notes", quality={"recall_at_10": 0.5})
    assert again.receipt_id == receipt.receipt_id
    assert len(store.receipts) == 1


def test_a_flipped_bit_is_named_by_block_list_and_file(store, tmp_path, generation, receipt):
    entry = generation.manifest.of_role("vectors")[1]
    path = generation.folder / entry.path
    content = bytearray(path.read_bytes())
    content[128] ^= 1
    path.write_bytes(content)
    (found,) = receipts.verify(store, tmp_path, receipt.receipt_id).differences
    assert found.what == entry.path
    assert "vectors block of lists 2..3" in found.sentence
    assert "in list 2:" in found.sentence


def test_a_changed_an_added_and_a_removed_row_are_named(store, tmp_path, receipt):
    base = 5 << 40
    store.put(np.array([base + 11]), store.rows[base + 11][None] * np.float16(1.01))
    store.put(np.array([base + 900]), np.ones((1, 16)))
    del store.rows[base + 20]
    found = receipts.verify(store, tmp_path, receipt.receipt_id).differences
    assert [item.what for item in found] == [
        "source.rows.added", "source.rows.removed", "source.rows.changed",
    ]  # fmt: skip
    for item, row in zip(found, (900, 20, 11), strict=True):
        assert f"(task_id {base + row})" in item.sentence


def test_a_change_of_a_quarantined_row_is_named_too(store, tmp_path, receipt):
    base = 5 << 40
    store.put(np.array([base + 7]), np.full((1, 16), np.nan))
    (found,) = receipts.verify(store, tmp_path, receipt.receipt_id).differences
    assert f"1 row changed (task_id {base + 7})" in found.sentence


def test_a_changed_parameter_is_named(store, tmp_path, receipt):
    edited(store, receipt, lambda predicate: predicate["recipe"]["index"].update(seed=8))
    found = receipts.verify(store, tmp_path, receipt.receipt_id).differences
    assert found[0].what == "receipt_id"
    assert "was changed after it was issued" in found[0].sentence
    assert any(
        str(item) == "recipe.index.seed: 8 in the receipt, 7 in the manifest" for item in found
    )
    assert any(item.what == "receipt.json.predicate.recipe.index.seed" for item in found)


def test_a_changed_bucket_sum_is_named_though_no_row_moved(store, tmp_path, receipt):
    edited(store, receipt, lambda p: p["source"]["bucket_sums"].__setitem__(3, "f" * 16))
    assert "source.bucket_sums[3]" in names(receipts.verify(store, tmp_path, receipt.receipt_id))


def test_an_edited_quality_changes_the_copy_and_not_the_identity(store, tmp_path, receipt):
    edited(store, receipt, lambda predicate: predicate["quality"].update(recall_at_10=0.1))
    assert names(receipts.verify(store, tmp_path, receipt.receipt_id)) == [
        "receipt.json.predicate.quality.recall_at_10"
    ]


def test_an_edited_manifest_is_named(store, tmp_path, generation, receipt):
    path = generation.folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"seed":7', b'"seed":9'))
    assert names(receipts.verify(store, tmp_path, receipt.receipt_id)) == ["manifest.json"]


def test_a_republished_generation_row_is_named(store, tmp_path, receipt):
    row = store.generations["notes", 1]
    store.generations["notes", 1] = dataclasses.replace(row, manifest_sha256="0" * 64)
    assert names(receipts.verify(store, tmp_path, receipt.receipt_id)) == [
        "outputs.manifest_sha256",
        "manifest.json",
    ]
    del store.generations["notes", 1]
    assert names(receipts.verify(store, tmp_path, receipt.receipt_id)) == ["generation"]


def test_a_missing_copy_and_a_missing_folder_are_named(store, tmp_path, generation, receipt):
    (generation.folder / "receipt.json").unlink()
    assert names(receipts.verify(store, tmp_path, receipt.receipt_id)) == ["receipt.json"]
    generation.folder.rename(tmp_path / "away")
    (found,) = receipts.verify(store, tmp_path, receipt.receipt_id).differences
    assert "bring the folder back" in found.sentence


def test_a_moved_source_without_a_readable_generation_is_named_by_bucket(
    store, tmp_path, generation, receipt
):
    generation.folder.rename(tmp_path / "away")
    store.put(np.array([(5 << 40) + 11]), np.ones((1, 16)))
    found = receipts.verify(store, tmp_path, receipt.receipt_id).differences
    assert "moved in 1 of 1024 buckets (11)" in found[1].sentence


def test_the_receipt_of_an_older_generation_still_verifies(store, tmp_path, receipt):
    shards.build(store, tmp_path, "notes", lists=3, seed=1, metric="l2", recipe={})
    newer = receipts.issue(store, tmp_path, "notes")
    assert receipts.verify(store, tmp_path, receipt.receipt_id).generation == 1
    assert receipts.verify(store, tmp_path, receipt.receipt_id).ok
    assert receipts.verify(store, tmp_path, newer.receipt_id).ok


def test_an_unknown_receipt_is_a_usage_error(store, tmp_path, receipt):
    with pytest.raises(UsageError, match="there is no receipt 'ffff'"):
        receipts.verify(store, tmp_path, "ffff")


def test_a_receipt_of_the_older_hash_still_verifies_and_its_shard_is_built_anew_at_a_refresh(
    store, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(building, "Source", functools.partial(Source, hash_version=1))
        shards.build(store, tmp_path, "old", lists=4, seed=1, metric="cosine", recipe={})
    old = receipts.issue(store, tmp_path, "old")
    assert "hash_version" not in old.source
    assert "engine_fingerprints" not in old.source
    assert receipts.verify(store, tmp_path, old.receipt_id).differences == ()
    assert receipts.rebuild(store, tmp_path, old.receipt_id).verdict == "identical"
    store.set_column("source_row", (5 << 40) + 1, 77)
    assert receipts.verify(
        store, tmp_path, old.receipt_id
    ).ok  # which is why there is a second version
    done = shards.refresh(store, tmp_path, "old")
    assert (done.how, done.why) == ("full", "its content hash is of an older version")
    new = receipts.issue(store, tmp_path, "old")
    assert new.source["hash_version"] == 2
    store.set_column("source_row", (5 << 40) + 1, 78)
    (found,) = receipts.verify(store, tmp_path, new.receipt_id).differences
    assert f"1 row changed in source_row (task_id {(5 << 40) + 1})" in found.sentence


def test_rows_of_another_engine_than_before_are_named(store, tmp_path, receipt):
    store.fingerprints = ("another",)
    (found,) = receipts.verify(store, tmp_path, receipt.receipt_id).differences
    assert found.what == "source.engine_fingerprints"


def test_a_canary_that_answers_otherwise_is_named_though_every_file_is_whole(
    store, tmp_path, receipt
):
    def other(predicate):
        predicate["quality"]["canaries"]["answers"][2]["distances"][0] = "0x1.0p+0"

    edited(store, receipt, other)
    found = names(receipts.verify(store, tmp_path, receipt.receipt_id))
    assert "canary[2].distances" in found


def test_a_manifest_of_format_1_is_still_read(generation):
    fields = generation.manifest.as_json()
    del fields["increment"]
    read = ShardManifest.from_json(fields | {"format": "fabric-shard-1"}, "an old one")
    assert read == generation.manifest
    with pytest.raises(VersionRefused, match="fabric-shard-9"):
        ShardManifest.from_json(fields | {"format": "fabric-shard-9"}, "a new one")
