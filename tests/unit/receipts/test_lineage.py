"""The parent of an increment is the receipt of the generation that it lies over: issued where it is missing, named where it is not there."""

from __future__ import annotations

import errno
import os
import tempfile

import numpy as np
import pytest

from fabric_pipelines import receipts, shards
from fabric_pipelines.errors import CorruptionFound, SchemaError, StorageFailed
from fabric_pipelines.shards import renewal
from fabric_pipelines.shards.disk import Disk

BASE = 5 << 40


def moved(store, row):
    store.put(np.array([BASE + row]), np.full((1, 16), row + 1.0))


def increment(store, root):
    done = shards.refresh(store, root, "notes")
    assert done.how == "increment"
    return done.generation


def lineage(store, root, receipt):
    """What verify says of the parents."""
    found = receipts.verify(store, root, receipt.receipt_id).differences
    return [str(item) for item in found if item.what == "parents"]


def orphan(store, root, monkeypatch):
    """The receipt of an increment that was laid when nobody asked for its parent's."""
    moved(store, 3)
    with monkeypatch.context() as patch:
        patch.setattr(renewal, "receipt_for_child", lambda *_: [])
        increment(store, root)
    return receipts.issue(store, root, "notes")


def test_an_increment_over_a_generation_without_a_receipt_issues_it_first(
    store, tmp_path, generation
):
    moved(store, 3)
    second = increment(store, tmp_path)
    (first,) = store.find_receipts(shard="notes")
    assert (first.generation, list(second.manifest.parents)) == (1, [first.receipt_id])
    assert (generation.folder / "receipt.json").is_file()
    receipt = receipts.issue(store, tmp_path, "notes")
    assert receipts.verify(store, tmp_path, receipt.receipt_id).differences == ()


def test_so_does_a_build_that_keeps_the_centroids(store, generation, build_along):
    second = build_along()
    (first,) = store.find_receipts(shard="notes")
    assert (first.generation, list(second.manifest.parents)) == (1, [first.receipt_id])


def test_a_receipt_whose_copy_is_missing_gets_it(store, tmp_path, generation, receipt):
    (generation.folder / "receipt.json").unlink()
    moved(store, 3)
    assert list(increment(store, tmp_path).manifest.parents) == [receipt.receipt_id]
    assert (generation.folder / "receipt.json").is_file()


def test_no_receipt_is_issued_over_rot_and_the_shard_is_built_anew(store, tmp_path, generation):
    path = generation.folder / generation.manifest.of_role("vectors")[0].path
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    with pytest.raises(CorruptionFound, match="over damaged files: vectors block of lists 0"):
        receipts.issue_late(store, tmp_path, "notes")
    moved(store, 3)
    done = shards.refresh(store, tmp_path, "notes")
    assert done.how == "full"
    assert "gone or damaged: vectors block of lists 0" in done.why
    assert not done.generation.manifest.parents
    assert store.find_receipts() == []


def test_an_increment_without_its_parent_is_named_until_both_are_issued_again(
    store, tmp_path, generation, monkeypatch
):
    receipt = orphan(store, tmp_path, monkeypatch)
    assert receipt.parents == ()
    (said,) = lineage(store, tmp_path, receipt)
    assert "generation 2 was laid over generation 1, and no parent is a receipt of that" in said
    assert "`fabric receipt issue notes --generation 1`, then the same with 2" in said
    first = receipts.issue_late(store, tmp_path, "notes", number=1)
    again = receipts.issue_late(store, tmp_path, "notes", number=2)
    assert again.parents == (first.receipt_id,)
    assert receipts.verify(store, tmp_path, again.receipt_id).differences == ()
    assert lineage(store, tmp_path, receipt) == [said]


def test_a_parent_that_is_not_in_the_database_is_named_and_comes_back_under_its_id(
    store, tmp_path, receipt
):
    moved(store, 3)
    increment(store, tmp_path)
    second = receipts.issue(store, tmp_path, "notes")
    del store.receipts[receipt.receipt_id]
    missing, unproven = lineage(store, tmp_path, second)
    assert f"parent receipt {receipt.receipt_id[:12]} is not in this database" in missing
    assert "no parent is a receipt of that" in unproven
    assert receipts.issue_late(store, tmp_path, "notes", number=1).receipt_id == receipt.receipt_id
    assert receipts.verify(store, tmp_path, second.receipt_id).ok


def test_a_parent_of_another_shard_or_generation_does_not_count(
    store, tmp_path, receipt, monkeypatch
):
    shards.build(store, tmp_path, "other", lists=6, seed=7, metric="cosine", recipe={})
    other = receipts.issue(store, tmp_path, "other")
    orphan(store, tmp_path, monkeypatch)
    second = receipts.issue(store, tmp_path, "notes", parents=[other.receipt_id])
    assert receipt.receipt_id in second.parents  # found by itself, since the build recorded none
    moved(store, 4)
    with monkeypatch.context() as patch:
        patch.setattr(renewal, "receipt_for_child", lambda *_: [receipt.receipt_id])
        increment(store, tmp_path)
    third = receipts.issue(store, tmp_path, "notes", parents=[other.receipt_id])
    (said,) = lineage(store, tmp_path, third)
    assert "generation 3 was laid over generation 2, and no parent is a receipt of that" in said


def test_the_copy_is_a_copy_of_the_row_though_it_is_issued_again_with_other_numbers(
    store, tmp_path, receipt
):
    again = receipts.issue(store, tmp_path, "notes", quality={"recall_at_10": 0.5})
    assert again == receipt
    assert receipts.verify(store, tmp_path, receipt.receipt_id).differences == ()


def test_a_row_that_was_changed_is_not_copied_over_a_good_copy(
    store, tmp_path, generation, receipt
):
    copy = (generation.folder / "receipt.json").read_bytes()
    store.receipts[receipt.receipt_id].statement["predicate"]["recipe"]["engine"] = "another"
    with pytest.raises(SchemaError):
        receipts.issue(store, tmp_path, "notes")
    assert (generation.folder / "receipt.json").read_bytes() == copy


class ReadOnly(Disk):
    def replace_file(self, path, content):
        raise StorageFailed(f"cannot write {path}: Read-only file system")


def test_on_a_read_only_folder_issue_and_rebuild_say_what_is_done_and_what_remains(
    store, tmp_path, generation, monkeypatch
):
    def refused(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.raises(
        StorageFailed, match=r"is in the database, .* `fabric receipt issue notes --generation 1`"
    ):
        receipts.issue(store, tmp_path, "notes", disk=ReadOnly())
    (row,) = store.find_receipts(shard="notes")
    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    with pytest.raises(StorageFailed, match=r"scratch folder .* point FABRIC_HOME at a writable"):
        receipts.rebuild(store, tmp_path, row.receipt_id)
    assert receipts.issue(store, tmp_path, "notes").receipt_id == row.receipt_id
    assert (generation.folder / "receipt.json").is_file()
