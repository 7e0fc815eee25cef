"""Only what moved is built again, and the answers are those of a full build."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabric_pipelines import receipts, shards
from fabric_pipelines.analytics.search import exact_topk
from fabric_pipelines.dataplane.source import Source
from fabric_pipelines.errors import UsageError
from fabric_pipelines.shards import compaction, probing, renewal
from fabric_pipelines.testing.vector_store import MemoryVectorStore
from tests.unit.shards.test_generation import CrashingStore, RecordingDisk, WorldEnded

BASE, DIM = 5 << 40, 24
LARGE = 5  # a list of 49 rows


def build(store, root, **changes):
    wanted = {"lists": 8, "seed": 7, "metric": "cosine", "recipe": {}, "lists_per_block": 2}
    return shards.build(store, root, "notes", **(wanted | changes))


def refreshed(store, root, **more):
    return shards.refresh(store, root, "notes", **more)


def names(*rows):
    return np.array(rows, np.int64) + BASE


def assert_like_brute_force(store, root, metric="cosine"):
    """Exact search over blocks, layers and tombstones is a brute force over the rows as they are."""
    ids = np.array(sorted(store.rows), np.int64)
    vectors = np.stack([store.rows[name] for name in ids.tolist()]).astype(np.float32)
    xq = vectors[::17]
    with shards.open_shard(store, root, "notes") as shard:
        truth = exact_topk(xq, vectors, ids, 7, metric=metric)
        found = shard.search(xq, 7)
        np.testing.assert_array_equal(found.I, truth.I)
        np.testing.assert_array_equal(found.D, truth.D)
        everywhere = shard.search(xq, 7, exact=False, nprobe=shard.manifest.lists)
        np.testing.assert_array_equal(everywhere.I, truth.I)
        kept = shard.ids()
        at = np.searchsorted(ids, kept)
        np.testing.assert_array_equal(shard.vectors(), vectors[at])
        assert shard.columns()["source_row"].to_pylist() == [
            store.columns.get(("source_row", n), n % 1000) for n in kept.tolist()
        ]
        pieces = [shard.list_rows(number)[1] for number in range(shard.manifest.lists)]
        assert sorted(np.concatenate(pieces).tolist()) == sorted(kept.tolist())
        assert [len(piece) for piece in pieces] == np.diff(shard.indptr).tolist()


def assert_hash_is_that_of_a_full_read(store, generation):
    source = generation.manifest.source
    read = store.read_source(Source(columns=("source_row",))).state
    assert source["content_hash"] == read.content.hex
    assert source["bucket_sums"] == read.content.as_json()["bucket_sums"]


@pytest.fixture
def built(store, tmp_path):
    build(store, tmp_path)
    return store


def test_nothing_moved_builds_nothing(built, tmp_path):
    done = refreshed(built, tmp_path)
    assert (done.how, done.generation.number, built.last_generation("notes")) == ("none", 1, 1)


def test_moved_rows_become_a_layer_and_tombstones_and_every_block_is_linked(built, rows, tmp_path):
    first = shards.open_generation(built, tmp_path, "notes")
    built.put(names(3, 5, 900), np.concatenate([-rows[1][[3, 5]], rows[1][[9]]]))
    built.remove(names(20))
    done = refreshed(built, tmp_path)
    assert (done.how, done.moved, done.generation.number) == ("increment", 4, 2)
    assert done.generation.manifest.increment.tombstones == 3
    for entry in first.manifest.files:
        if entry.role in ("vectors", "ids", "columns", "marks"):
            assert (first.folder / entry.path).samefile(done.generation.folder / entry.path)
    assert_like_brute_force(built, tmp_path)
    assert_hash_is_that_of_a_full_read(built, done.generation)
    assert shards.scrub(built, tmp_path, "notes").ok


def test_an_update_that_gives_back_the_old_row_is_no_move(built, rows, tmp_path):
    built.put(names(3), -rows[1][[3]])
    built.put(names(3), rows[1][[3]])
    assert refreshed(built, tmp_path).how == "none"
    assert built.staleness("notes").moved == 0  # and it is not asked about again


def test_a_changed_column_moves_its_row(built, tmp_path):
    built.set_column("source_row", BASE + 11, 77)
    done = refreshed(built, tmp_path)
    assert (done.how, done.moved) == ("increment", 1)
    assert_like_brute_force(built, tmp_path)
    assert_hash_is_that_of_a_full_read(built, done.generation)


def test_rows_that_cannot_be_indexed_come_and_go_through_quarantine(built, rows, tmp_path):
    built.put(names(1, 2), np.array([[np.nan] * DIM, [0] * DIM]))
    done = refreshed(built, tmp_path)
    assert done.generation.manifest.quarantined == {"nan": 1, "zero": 1}
    built.put(names(1), rows[1][[1]])
    done = refreshed(built, tmp_path)
    assert done.generation.manifest.quarantined == {"nan": 0, "zero": 1}
    assert_hash_is_that_of_a_full_read(built, done.generation)
    with shards.open_shard(built, tmp_path, "notes") as shard:
        assert shard.quarantined().columns["source_row"].to_pylist() == [(BASE + 2) % 1000]


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(st.sets(st.integers(0, 450), max_size=12), st.booleans()), max_size=4),
    st.sampled_from([0.0, 0.015, 0.5]),
)
def test_any_sequence_of_moves_answers_like_a_brute_force(
    rows, tmp_path_factory, deeds, written_again
):
    store, root = MemoryVectorStore(), tmp_path_factory.mktemp("shards")
    store.put(*rows)
    build(store, root, metric="l2")
    rng = np.random.default_rng(0)
    for moved, remove in deeds:
        ids = names(*sorted(moved))
        if remove:
            store.remove(ids[np.isin(ids, list(store.rows))])
        elif len(ids):
            store.put(ids, rng.standard_normal((len(ids), DIM)) * 3)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(compaction, "REWRITTEN_FRACTION_MAX", written_again)
            done = refreshed(store, root)
        assert_hash_is_that_of_a_full_read(store, done.generation)
    assert_like_brute_force(store, root, "l2")
    assert shards.scrub(store, root, "notes").ok


def test_a_list_that_outgrew_itself_is_split_and_a_shrunken_one_dissolved(tmp_path):
    rng = np.random.default_rng(2)
    centres = np.eye(12, DIM) * 10
    label = np.repeat(np.arange(12), 60)
    store = MemoryVectorStore()
    store.put(names(*range(720)), centres[label] + 0.3 * rng.standard_normal((720, DIM)))
    build(store, tmp_path, metric="l2", lists=12)
    fresh = centres[0] + np.eye(1, DIM, 20) * 3 + 0.3 * rng.standard_normal((70, DIM))
    store.put(names(*range(1000, 1070)), fresh)
    store.remove(names(*range(60, 108)))  # all but 12 of the second centre
    done = refreshed(store, tmp_path)
    assert done.how == "increment", done.why
    increment = done.generation.manifest.increment
    assert increment.lists == 13
    with shards.open_shard(store, tmp_path, "notes") as shard:
        assert np.isnan(shard.centroids()[:, 0]).sum() == 1
        sizes = np.diff(shard.indptr)
        halves = [set(shard.list_rows(number)[1].tolist()) for number in range(13)]
    assert (sizes == 0).sum() == 1
    assert not any(BASE in half and BASE + 1000 in half for half in halves)
    assert_like_brute_force(store, tmp_path, "l2")
    assert probing.probed(shards.open_shard(store, tmp_path, "notes")).recall > 0.99


# What is written again


def pieces(store, root):
    """How many stretches of stored rows each list lies in."""
    with shards.open_shard(store, root, "notes") as shard:
        return [
            sum(len(ids) > 0 for _, ids in shard._pieces(number))
            for number in range(shard.manifest.lists)
        ]


def rows_of_list(store, root, number):
    with shards.open_shard(store, root, "notes") as shard:
        return shard.list_rows(number)[::-1]


def test_moves_in_one_list_rewrite_that_list_in_one_piece_and_nothing_else(
    built, tmp_path, monkeypatch
):
    monkeypatch.setattr(compaction, "REWRITTEN_FRACTION_MAX", 0.05)
    before = shards.open_generation(built, tmp_path, "notes")
    ids, vectors = rows_of_list(built, tmp_path, LARGE)
    most = len(ids) * 3 // 4
    built.put(ids[:most], vectors[:most] * 1.01)
    done = refreshed(built, tmp_path)
    assert (done.how, done.moved) == ("increment", most)
    manifest = done.generation.manifest
    (layer,) = manifest.increment.layers
    written = np.diff(layer)
    assert written.tolist() == [len(ids) if number == LARGE else 0 for number in range(8)]
    assert len(ids) > 40
    assert manifest.increment.tombstones == len(ids)
    assert pieces(built, tmp_path) == [1] * 8
    blocks = {e.path for e in before.manifest.files if e.role in ("vectors", "ids", "columns")}
    assert blocks <= {entry.path for entry in manifest.files}
    assert_like_brute_force(built, tmp_path)


def test_a_list_that_moves_again_and_again_leaves_one_layer_and_no_more_dead(
    built, tmp_path, monkeypatch
):
    monkeypatch.setattr(compaction, "REWRITTEN_FRACTION_MAX", 0.05)
    ids, vectors = rows_of_list(built, tmp_path, LARGE)
    most = len(ids) * 3 // 4
    for turn in range(20):
        built.put(ids[:most], vectors[:most] * (1.01 + turn / 100))
        done = refreshed(built, tmp_path)
        increment = done.generation.manifest.increment
        assert (done.how, len(increment.layers), increment.tombstones) == ("increment", 1, len(ids))
    assert pieces(built, tmp_path) == [1] * 8
    assert_like_brute_force(built, tmp_path)
    assert_hash_is_that_of_a_full_read(built, done.generation)
    assert shards.scrub(built, tmp_path, "notes").ok


def test_an_older_layer_that_is_dropped_leaves_the_newer_ones_as_they_are(built, rows, tmp_path):
    """Newer layers get other numbers and the places behind them move up."""
    for first, factor in ((0, 1), (100, 1), (0, 2)):
        built.put(names(*range(first, first + 20)), -rows[1][first : first + 20] * factor)
        done = refreshed(built, tmp_path)
        assert done.how == "increment", done.why
    layers = [e for e in done.generation.manifest.files if e.role == "layer_ids"]
    assert [entry.first_list for entry in layers] == [0, 1]
    assert [entry.rows for entry in layers] == [20, 20]
    with shards.open_shard(built, tmp_path, "notes") as shard:
        kept, new = (set(block.ids.tolist()) for block in shard.blocks[-2:])
    assert kept == set(names(*range(100, 120)).tolist())
    assert new == set(names(*range(20)).tolist())
    assert_like_brute_force(built, tmp_path)
    assert shards.scrub(built, tmp_path, "notes").ok


def test_small_refreshes_pile_up_no_more_layers_than_the_logarithm_of_their_number(
    built, rows, tmp_path, monkeypatch
):
    monkeypatch.setattr(compaction, "REWRITTEN_FRACTION_MAX", 0.2)
    for turn in range(40):
        built.put(names(turn), -rows[1][[turn]])
        done = refreshed(built, tmp_path)
        assert done.how == "increment", done.why
        layers = [layer[-1] for layer in done.generation.manifest.increment.layers]
        assert sum(layers) >= turn + 1
        assert len(layers) <= np.log2(turn + 1) + 1
    assert_like_brute_force(built, tmp_path)


def test_a_refresh_that_only_deletes_adds_no_layer(built, tmp_path):
    built.remove(names(3, 4))
    done = refreshed(built, tmp_path)
    assert (done.how, done.generation.manifest.increment.layers) == ("increment", [])
    assert_like_brute_force(built, tmp_path)
    assert shards.scrub(built, tmp_path, "notes").ok


def test_what_is_written_again_stays_in_the_budget(built, rows, tmp_path):
    for turn in range(12):
        moved = names(*range(turn * 4, turn * 4 + 4))
        built.put(moved, -rows[1][turn * 4 : turn * 4 + 4])
        done = refreshed(built, tmp_path)
        assert done.how == "increment", done.why
        newest = done.generation.manifest.increment.layers[-1][-1]
        assert 4 <= newest <= 4 + compaction.budget(400)


def test_folding_and_rewriting_share_one_budget(built, tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "REWRITTEN_FRACTION_MAX", 0.05)
    for number in (0, 1, 2, 7):
        others, vectors = rows_of_list(built, tmp_path, number)
        built.put(others[:5], vectors[:5] * 1.01)
    refreshed(built, tmp_path)
    ids, vectors = rows_of_list(built, tmp_path, LARGE)
    most = len(ids) * 3 // 4  # the rest would fit the budget of 20 rows, had the layer not taken it
    built.put(ids[:most], vectors[:most] * 1.01)
    (layer,) = refreshed(built, tmp_path).generation.manifest.increment.layers
    assert layer[-1] == most + 20
    assert len(ids) - most < 20


def test_an_increment_is_equal_to_a_full_build_in_rows_answers_and_recall(built, rows, tmp_path):
    rng = np.random.default_rng(5)
    built.put(names(*range(0, 40, 2)), rows[1][:20] + 0.1 * rng.standard_normal((20, DIM)))
    built.remove(names(41, 43))
    refreshed(built, tmp_path)
    with shards.open_shard(built, tmp_path, "notes") as part:
        build(built, tmp_path)
        with shards.open_shard(built, tmp_path, "notes") as full:
            xq = full.vectors()[::9]
            one, two = part.search(xq, 10), full.search(xq, 10)
            np.testing.assert_array_equal(one.I, two.I)
            np.testing.assert_array_equal(one.D, two.D)
            drop = probing.probed(full).recall - probing.probed(part).recall
    assert abs(drop) <= 0.005


# Rules for a full build


def why_full(store, root, **more):
    done = refreshed(store, root, **more)
    assert done.how == "full"
    assert done.generation.manifest.increment is None
    assert_like_brute_force(store, root)
    return done.why


def test_many_moved_rows_are_a_full_build(built, rows, tmp_path):
    built.put(names(*range(121)), -rows[1][:121])
    assert why_full(built, tmp_path) == "30.2% of the rows moved"


def test_another_recipe_is_a_full_build(built, rows, tmp_path):
    built.put(names(1), rows[1][[2]])
    assert why_full(built, tmp_path, recipe={"engine": "other"}) == "the recipe changed"


def test_a_truncated_source_is_a_full_build(built, rows, tmp_path):
    built.truncate()
    built.put(*rows)
    assert why_full(built, tmp_path) == "the source was truncated"


def test_many_tombstones_are_a_full_build(built, rows, tmp_path):
    """A row that was written again counts among the dead where it lay before."""
    for turn in range(3):
        built.put(names(*range(turn * 40, turn * 40 + 40)), -rows[1][turn * 40 : turn * 40 + 40])
        done = refreshed(built, tmp_path)
    assert (done.how, done.why) == ("full", "23.4% of the stored rows are under a tombstone")


def test_a_lopsided_increment_is_a_full_build(built, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(renewal, "IMBALANCE_MAX", 0.1)
    monkeypatch.setattr(renewal, "WORSE_THAN_BUILT", 0.1)
    built.put(names(1), rows[1][[2]])
    assert "times the mean" in why_full(built, tmp_path)


def test_many_empty_lists_are_a_full_build(built, tmp_path):
    """One of eight is dissolved: 12.5 %."""
    with shards.open_shard(built, tmp_path, "notes") as shard:
        smallest = int(np.argmin(np.diff(shard.indptr)))
        ids = shard.list_rows(smallest)[1]
    built.remove(ids[: int(len(ids) * 0.8) + 1])
    assert why_full(built, tmp_path) == "12.5% of the lists are empty"


def test_a_fall_of_recall_is_a_full_build_and_the_increment_is_thrown_away(
    built, rows, tmp_path, monkeypatch
):
    monkeypatch.setattr(probing.Probed, "fell", lambda self, base: 0.02)
    built.put(names(1), rows[1][[2]])
    assert "recall@10 of probed search fell" in why_full(built, tmp_path)
    assert {path.name for path in (tmp_path / "notes").iterdir()} == {
        ".lock", "g000001-t1", "g000002-t2",
    }  # fmt: skip


def test_too_many_layers_are_a_full_build(built, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(renewal, "LAYERS_MAX", 2)
    monkeypatch.setattr(compaction, "REWRITTEN_FRACTION_MAX", 0.0)
    for row in range(3):
        built.put(names(row), -rows[1][[row]])
        done = refreshed(built, tmp_path)
    assert (done.how, done.why) == ("full", "there would be 3 layers")


def test_a_damaged_block_is_not_inherited(built, rows, tmp_path):
    receipts.issue(built, tmp_path, "notes")
    first = shards.open_generation(built, tmp_path, "notes")
    entry = first.manifest.of_role("vectors")[1]
    content = bytearray((first.folder / entry.path).read_bytes())
    content[300] ^= 1
    (first.folder / entry.path).write_bytes(content)
    built.put(names(1), rows[1][[2]])
    assert "gone or damaged" in why_full(built, tmp_path)
    assert shards.scrub(built, tmp_path, "notes").ok


def test_damage_without_a_move_is_healed_by_building_anew(built, tmp_path):
    first = shards.open_generation(built, tmp_path, "notes")
    entry = first.manifest.of_role("ids")[0]
    content = bytearray((first.folder / entry.path).read_bytes())
    content[-1] ^= 1
    (first.folder / entry.path).write_bytes(content)
    assert refreshed(built, tmp_path).how == "none"
    assert why_full(built, tmp_path, anew=True) == "it was asked for"
    assert shards.scrub(built, tmp_path, "notes").ok


def test_moves_that_no_trigger_saw_are_found_by_bucket_sums(built, rows, tmp_path):
    built.pruned = 10_000
    del built.rows[BASE + 30]
    built.rows[BASE + 31] = -built.rows[BASE + 31]
    built.rows[BASE + 999] = built.rows[BASE + 2]
    done = refreshed(built, tmp_path)
    assert (done.how, done.moved) == ("increment", 3)
    assert_like_brute_force(built, tmp_path)
    assert_hash_is_that_of_a_full_read(built, done.generation)


def test_a_shard_that_was_never_built_is_refused(store, tmp_path):
    with pytest.raises(UsageError, match="build it first"):
        refreshed(store, tmp_path)


def test_rows_of_another_engine_are_refused_by_name(store, tmp_path):
    from fabric_pipelines.errors import CheckFailed

    store.fingerprints = ("aa", "bb")
    with pytest.raises(CheckFailed, match="holds rows made by bb"):
        build(store, tmp_path, recipe={"engine_fingerprint": "aa"})
    store.fingerprints = ("aa",)
    assert build(store, tmp_path, recipe={"engine_fingerprint": "aa"}).number == 1


def test_a_crash_before_any_step_of_a_refresh_leaves_the_old_generation_and_loses_no_move(
    built, rows, tmp_path
):
    built.put(names(*range(5)), -rows[1][:5])
    with shards.open_shard(built, tmp_path, "notes") as shard:
        before = shard.search(rows[1][:3], 5).I.tolist()
    crashes = 0
    for step in range(200):
        disk = RecordingDisk(crash_at=step)
        try:
            done = refreshed(built, tmp_path, disk=disk)
        except WorldEnded:
            crashes += 1
            with shards.open_shard(built, tmp_path, "notes") as shard:
                assert shard.manifest.generation == 1
                assert shard.search(rows[1][:3], 5).I.tolist() == before
            assert shards.scrub(built, tmp_path, "notes").ok
            continue
        break
    assert crashes == len(disk.log) >= 15
    assert (done.how, done.moved) == ("increment", 5)
    assert_like_brute_force(built, tmp_path)
    left = {path.name for path in (tmp_path / "notes").iterdir()}
    assert left == {".lock", "g000001-t1", done.generation.folder.name}


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_around_the_row_is_either_not_yet_or_done(built, rows, tmp_path, after):
    built.put(names(1), rows[1][[2]])
    with pytest.raises(WorldEnded):
        refreshed(CrashingStore(built, after), tmp_path)
    done = refreshed(built, tmp_path)
    assert (done.how, done.generation.number) == ("none" if after else "increment", 2)
    assert_like_brute_force(built, tmp_path)


def test_the_recall_of_a_full_build_is_measured_with_its_receipt_and_not_by_each_refresh(
    built, rows, tmp_path, monkeypatch
):
    receipt = receipts.issue(built, tmp_path, "notes")
    with shards.open_shard(built, tmp_path, "notes") as shard:
        known = probing.as_base(probing.probed(shard))
    assert receipt.quality["base_recall"] == known
    asked = []

    def counted(shard):
        asked.append(shard.generation.number)
        return probing.probed(shard)

    monkeypatch.setattr(renewal, "probed", counted)
    built.put(names(3), -rows[1][[3]])
    done = refreshed(built, tmp_path)
    assert (done.how, asked) == ("increment", [2])
    assert done.generation.manifest.increment.base_recall == known
    assert "base_recall" not in receipts.issue(built, tmp_path, "notes").quality
