"""Rebuilding from a receipt: the CPU build is identical, and whatever makes it less is named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fabric_pipelines import receipts, shards
from fabric_pipelines.errors import SchemaError, UsageError
from fabric_pipelines.receipts import rebuilding
from fabric_pipelines.shards import building, compaction, content


def test_a_rebuild_is_identical_and_leaves_nothing_behind(store, tmp_path, receipt):
    before = sorted(path.name for path in tmp_path.iterdir())
    done = receipts.rebuild(store, tmp_path, receipt.receipt_id)
    assert (done.verdict, done.differences) == ("identical", ())
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert store.last_generation("notes") == 1


def test_a_generation_with_kept_centroids_rebuilds_identical_too(
    store, tmp_path, receipt, build_along
):
    base = 5 << 40
    store.put(np.array([base + 3]), np.ones((1, 16)))
    build_along()
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
    assert done.damage == done.differences
    assert not done.ok


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
    assert len(done.differences) == 4


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


@pytest.mark.parametrize("name", ["seed", "lists", "iterations", "lists_per_block"])
@pytest.mark.parametrize("value", [1 << 70, -99999999999999999999])
def test_a_parameter_that_no_column_holds_is_refused_in_words(
    store, tmp_path, receipt, name, value
):
    with pytest.raises(UsageError, match=name):
        receipts.rebuild(store, tmp_path, receipt.receipt_id, overrides={name: value})


def test_a_receipt_that_was_changed_is_not_rebuilt(store, tmp_path, receipt):
    row = store.receipts[receipt.receipt_id]
    statement = dict(row.statement)
    statement["predicate"] = {**statement["predicate"], "parents": ["x"]}
    store.receipts[receipt.receipt_id] = dataclasses.replace(row, statement=statement)
    with pytest.raises(SchemaError, match="changed after it was issued"):
        receipts.rebuild(store, tmp_path, receipt.receipt_id)


@pytest.mark.parametrize(
    "told",
    [
        {"token": "1/../../../escaped"},
        {"generation": "1"},
        {"shard": "../escaped"},
        {"token": -1},
        {"increment": []},
        {"increment": {"parent_generation": "../x"}},
    ],
)
def test_a_receipt_names_no_folder_but_one_of_a_generation(store, tmp_path, receipt, told):
    other = dataclasses.replace(receipt, outputs={**receipt.outputs, **told})
    row = dataclasses.replace(
        store.receipts[receipt.receipt_id],
        receipt_id=other.receipt_id,
        statement=other.to_statement(),
    )
    store.receipts[other.receipt_id] = row
    root = tmp_path / "shards" / "below"
    root.mkdir(parents=True)
    with pytest.raises(SchemaError, match=r"is no receipt of outputs: .* issue the receipt again"):
        receipts.rebuild(store, root, other.receipt_id)
    assert [path for path in tmp_path.rglob("*") if "escaped" in path.name] == []


def refreshed(store, tmp_path):
    base = 5 << 40
    store.put(np.array([base + 3]), np.ones((1, 16)))
    store.remove(np.array([base + 4]))
    assert shards.refresh(store, tmp_path, "notes").how == "increment"
    return receipts.issue(store, tmp_path, "notes")


def test_an_increment_is_replayed_over_its_parent_and_identical(store, tmp_path, receipt):
    second = refreshed(store, tmp_path)
    assert second.parents == (receipt.receipt_id,)
    assert second.outputs["increment"]["parent_generation"] == 1
    assert receipts.verify(store, tmp_path, second.receipt_id).differences == ()
    done = receipts.rebuild(store, tmp_path, second.receipt_id)
    assert (done.verdict, done.differences) == ("identical", ())


def test_increments_that_fold_layers_and_rewrite_lists_are_replayed_to_the_byte_too(
    store, tmp_path, receipt, monkeypatch
):
    monkeypatch.setattr(compaction, "REWRITTEN_FRACTION_MAX", 0.1)
    with shards.open_shard(store, tmp_path, "notes") as shard:
        vectors, ids = shard.list_rows(2)
    assert len(ids) > 20
    most, layers = len(ids) * 3 // 4, []
    for turn, (moved, to) in enumerate(
        [(ids[:3], vectors[:3] * 2), (ids[:most], vectors[:most] * 3), (ids[:2], vectors[:2] * 4)]
    ):
        store.put(moved, to)
        store.remove(np.array([(5 << 40) + 30 + turn]))
        refreshed_now = shards.refresh(store, tmp_path, "notes")
        assert refreshed_now.how == "increment"
        increment = refreshed_now.generation.manifest.increment
        layers.append([layer[-1] for layer in increment.layers])
        issued = receipts.issue(store, tmp_path, "notes")
        assert receipts.verify(store, tmp_path, issued.receipt_id).differences == ()
        done = receipts.rebuild(store, tmp_path, issued.receipt_id)
        assert (done.verdict, done.differences) == ("identical", ())
    assert layers == [[3], [len(ids)], [len(ids), 2]]  # added, folded with its list, added


def test_an_increment_whose_parent_is_gone_is_measured_against_a_full_build_and_says_so(
    store, tmp_path, generation, receipt
):
    second = refreshed(store, tmp_path)
    generation.folder.rename(tmp_path / "away")
    done = receipts.rebuild(store, tmp_path, second.receipt_id)
    assert done.differences[0].what == "parent"
    assert done.verdict in ("equivalent", "different")


def test_a_flipped_bit_a_changed_row_and_a_parameter_are_each_named(store, tmp_path, receipt):
    second = refreshed(store, tmp_path)
    base = 5 << 40
    current = shards.open_generation(store, tmp_path, "notes")
    entry = current.manifest.of_role("layer_vectors")[0]
    content_now = bytearray((current.folder / entry.path).read_bytes())
    content_now[130] ^= 1
    (current.folder / entry.path).write_bytes(content_now)
    store.put(np.array([base + 42]), np.ones((1, 16)))
    done = receipts.rebuild(store, tmp_path, second.receipt_id, overrides={"iterations": 3})
    said = "\n".join(map(str, done.differences))
    assert done.verdict == "different"
    assert "layer_vectors of layer 0" in said
    assert "1 row changed" in said or "of 1024 buckets" in said
    assert "recipe.index.iterations: 20 in the receipt, 3 now" in said


def test_two_receipts_differ_in_what_is_named(store, tmp_path, receipt):
    second = refreshed(store, tmp_path)
    found = receipts.diff(store, tmp_path, receipt.receipt_id, second.receipt_id)
    whats = [item.what for item in found.differences]
    assert not found.same
    assert {"source.rows.added", "source.rows.removed"} & set(whats)
    assert "source.content_hash" in whats
    assert "outputs.generation" in whats
    assert not any("bucket_sums[" in what for what in whats)
    assert receipts.diff(store, tmp_path, receipt.receipt_id, receipt.receipt_id).same
