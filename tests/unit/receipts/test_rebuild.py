"""Rebuilding from a receipt: the CPU build is identical, and whatever makes it less is named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fabric_pipelines import receipts, shards
from fabric_pipelines.errors import SchemaError, UsageError
from fabric_pipelines.receipts import rebuilding
from fabric_pipelines.shards import building, content


def test_a_rebuild_is_identical_and_leaves_nothing_behind(store, tmp_path, receipt):
    before = sorted(path.name for path in tmp_path.iterdir())
    done = receipts.rebuild(store, tmp_path, receipt.receipt_id)
    assert (done.verdict, done.differences) == ("identical", ())
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert store.last_generation("notes") == 1


def test_a_generation_with_kept_centroids_rebuilds_identical_too(store, tmp_path, receipt):
    base = 5 << 40
    store.put(np.array([base + 3]), np.ones((1, 16)))
    shards.build(
        store,
        tmp_path,
        "notes",
        lists=6,
        seed=7,
        metric="cosine",
        recipe={},
        lists_per_block=2,
        keep_centroids=True,
    )
    second = receipts.issue(store, tmp_path, "notes")
    assert second.parents == (receipt.receipt_id,)
    assert receipts.rebuild(store, tmp_path, second.receipt_id).verdict == "identical"


def test_a_changed_parameter_is_named_and_the_result_is_not_called_equal(store, tmp_path, receipt):
    done = receipts.rebuild(store, tmp_path, receipt.receipt_id, overrides={"lists": 5})
    sentences = [str(found) for found in done.differences]
    assert "recipe.index.lists: 6 in the receipt, 5 now" in sentences
    assert done.verdict == "different"
    assert any(s.startswith("centroids") and "other values" in s for s in sentences)


def test_a_moved_row_is_named_and_proves_nothing(store, tmp_path, receipt):
    base = 5 << 40
    store.put(np.array([base + 42]), store.rows[base + 42][None] * np.float16(1.01))
    done = receipts.rebuild(store, tmp_path, receipt.receipt_id)
    assert done.verdict == "different"
    assert f"1 row changed (task_id {base + 42})" in done.differences[0].sentence


def test_a_damaged_original_is_named_and_the_receipt_still_rebuilds(
    store, tmp_path, generation, receipt
):
    entry = generation.manifest.of_role("ids")[0]
    path = generation.folder / entry.path
    content_now = bytearray(path.read_bytes())
    content_now[-1] ^= 1
    path.write_bytes(content_now)
    done = receipts.rebuild(store, tmp_path, receipt.receipt_id)
    assert done.verdict == "identical"
    assert [found.what for found in done.differences] == [entry.path]


def test_another_library_version_is_named_though_the_files_are_identical(
    store, tmp_path, receipt, monkeypatch
):
    monkeypatch.setattr(
        building, "libraries", lambda: {**receipt.recipe["libraries"], "numpy": "9"}
    )
    done = receipts.rebuild(store, tmp_path, receipt.receipt_id)
    assert done.verdict == "identical"
    assert [found.what for found in done.differences] == ["recipe.libraries.numpy"]


def test_other_bytes_of_the_same_values_are_logical(store, tmp_path, receipt, monkeypatch):
    """Another Arrow version lays out the columns differently."""
    real = content.columns_block

    def padded(folder, table):
        block = real(folder, table)
        return dataclasses.replace(block, content=block.content + b"\0" * 8, sha256="e" * 64)

    monkeypatch.setattr(content, "columns_block", padded)
    monkeypatch.setattr(rebuilding, "damaged_files", lambda generation: iter(()))
    done = receipts.rebuild(store, tmp_path, receipt.receipt_id)
    assert done.verdict == "logical"
    assert all("other bytes, same values" in found.sentence for found in done.differences)
    assert len(done.differences) == 3


def test_centroids_within_a_millionth_are_logical_and_further_off_equivalent(
    store, tmp_path, receipt, monkeypatch
):
    real = content.cut

    def shifted(by):
        def cut(*args, **fields):
            lists = real(*args, **fields)
            return dataclasses.replace(lists, centroids=lists.centroids + by)

        return cut

    monkeypatch.setattr(content, "cut", shifted(1e-8))
    assert receipts.rebuild(store, tmp_path, receipt.receipt_id).verdict == "logical"
    monkeypatch.setattr(content, "cut", shifted(1e-4))
    done = receipts.rebuild(store, tmp_path, receipt.receipt_id)
    assert done.verdict == "equivalent"
    assert done.ok
    assert "100.00% of the rows lie in the same list" in done.differences[-1].sentence


def test_only_index_parameters_can_be_overridden(store, tmp_path, receipt):
    with pytest.raises(UsageError, match=r"\['colour'\] cannot be changed"):
        receipts.rebuild(store, tmp_path, receipt.receipt_id, overrides={"colour": 1})


def test_a_receipt_that_was_changed_is_not_rebuilt(store, tmp_path, receipt):
    row = store.receipts[receipt.receipt_id]
    statement = dict(row.statement)
    statement["predicate"] = {**statement["predicate"], "parents": ["x"]}
    store.receipts[receipt.receipt_id] = dataclasses.replace(row, statement=statement)
    with pytest.raises(SchemaError, match="changed after it was issued"):
        receipts.rebuild(store, tmp_path, receipt.receipt_id)
