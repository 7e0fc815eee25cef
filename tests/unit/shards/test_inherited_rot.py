"""A bit that flipped in a file of one generation never goes over into the next: what is read to be written again is
hashed first, the damage is named, and the shard is built from its source."""

from __future__ import annotations

import copy
import errno
import importlib
import os
import shutil
from collections import Counter

import numpy as np
import pytest

from fabric_pipelines import receipts, shards
from fabric_pipelines.analytics.rules import shipped
from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.shards import compaction, generation
from fabric_pipelines.shards.blocks import file_sha256
from fabric_pipelines.shards.residence import Residence
from fabric_pipelines.testing.standin_card import StandInCard
from fabric_pipelines.testing.vector_store import MemoryVectorStore
from tests.unit.shards.test_refresh import build, names, refreshed

scrub = importlib.import_module(
    "fabric_pipelines.shards.scrub"
)  # the package has a function of that name
ROLES = [
    *("tombstones", "centroids", "marks", "vectors", "ids", "columns"),
    *("layer_vectors", "layer_ids", "layer_columns"),
    *("quarantine_ids", "quarantine_vectors", "quarantine_columns"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Generation 2: a layer that the next refresh folds, tombstones, a quarantine; with its receipt."""
    store, root = MemoryVectorStore(), tmp_path_factory.mktemp("whole")
    rows = np.random.default_rng(1).standard_normal((300, 8))
    rows[[6, 7]] = 0
    store.put(names(*range(300)), rows)
    build(store, root)
    store.put(names(1, 2, 3), -rows[[1, 2, 3]])
    store.remove(names(20, 21))
    assert refreshed(store, root).how == "increment"
    receipts.issue(store, root, "notes")
    return store, root


@pytest.fixture
def laid(whole, tmp_path, monkeypatch):
    """A copy of it, to be damaged."""
    monkeypatch.setattr(compaction, "REWRITTEN_FRACTION_MAX", 0.5)
    shutil.copytree(whole[1] / "notes", tmp_path / "notes")
    return copy.deepcopy(whole[0])


def file_of(store, root, role, number=None):
    found = shards.open_generation(store, root, "notes", number)
    return found.folder / found.manifest.of_role(role)[0].path


def flip(path, at=-3, bit=4):
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


def move(store):
    ids = names(*range(100, 110))
    store.put(ids, -np.stack([store.rows[name] for name in ids.tolist()]))


def assert_the_rows_of_the_source(store, root):
    with shards.open_shard(store, root, "notes") as shard:
        found = dict(zip(shard.ids().tolist(), shard.vectors(), strict=True))
        out = shard.quarantined()
        found |= dict(zip(out.ids.tolist(), out.vectors, strict=True))
        columns = dict(
            zip(shard.ids().tolist(), shard.columns()["source_row"].to_pylist(), strict=True)
        )
    assert found.keys() == store.rows.keys()
    for name, vector in store.rows.items():
        np.testing.assert_array_equal(found[name], vector.astype(np.float32))
    assert all(value == name % 1000 for name, value in columns.items())


@pytest.mark.parametrize("role", ROLES)
def test_a_flipped_bit_is_named_and_built_over_from_the_source(laid, tmp_path, role):
    # the low byte of a tombstone: another stored row dies, and a dead one lives again
    path = file_of(laid, tmp_path, role)
    flip(path, *((-8, 64) if role == "tombstones" else (-3, 4)))
    move(laid)
    done = refreshed(laid, tmp_path)
    assert done.how == "full"
    for said in ("gone or damaged", role, path.name):
        assert said in done.why
    assert_the_rows_of_the_source(laid, tmp_path)
    assert shards.scrub(laid, tmp_path, "notes").ok


@pytest.mark.parametrize("role", ["tombstones", "quarantine_vectors", "layer_ids"])
def test_a_file_that_is_gone_is_built_over_from_the_source(laid, tmp_path, role):
    file_of(laid, tmp_path, role).unlink()
    move(laid)
    assert refreshed(laid, tmp_path).how == "full"
    assert_the_rows_of_the_source(laid, tmp_path)


def test_where_the_log_does_not_reach_the_files_are_hashed_before_rows_are_compared(laid, tmp_path):
    laid.pruned = 10_000
    flip(file_of(laid, tmp_path, "quarantine_ids"))
    assert "quarantine_ids" in refreshed(laid, tmp_path).why
    assert_the_rows_of_the_source(laid, tmp_path)


def test_every_file_of_the_parent_is_hashed_and_none_twice(laid, tmp_path, monkeypatch):
    parent = shards.open_generation(laid, tmp_path, "notes")
    seen = Counter()

    def counted(path):
        seen[path] += 1
        return file_sha256(path)

    for module in (scrub, generation):
        monkeypatch.setattr(module, "file_sha256", counted)
    move(laid)
    done = refreshed(laid, tmp_path)
    assert (done.how, done.generation.linked > 8) == ("increment", True)
    assert seen == dict.fromkeys({parent.folder / e.path for e in parent.manifest.files}, 1)


@pytest.mark.parametrize(("at", "bit"), [(-1, 1), (-1, 128), (-8, 1)], ids=str)
def test_tombstones_that_name_no_row_or_one_twice_are_refused_by_file(laid, tmp_path, at, bit):
    path = file_of(laid, tmp_path, "tombstones")
    dead = np.frombuffer(path.read_bytes()[128:], "<i8")
    if at == -8:
        path.write_bytes(path.read_bytes()[:-8] + dead[:1].tobytes())
    else:
        flip(path, at, bit)
    with pytest.raises(CorruptionFound, match=path.name):
        shards.open_shard(laid, tmp_path, "notes")
    laid.remove(names(30))
    assert refreshed(laid, tmp_path).how == "full"
    assert_the_rows_of_the_source(laid, tmp_path)


def test_damaged_centroids_are_not_kept(laid, tmp_path):
    flip(file_of(laid, tmp_path, "centroids"))
    with pytest.raises(CorruptionFound, match=r"centroids.* is damaged .*--anew"):
        build(laid, tmp_path, keep_centroids=True)
    assert laid.last_generation("notes") == 2
    build(laid, tmp_path)
    assert shards.scrub(laid, tmp_path, "notes").ok


def test_an_audit_takes_rot_for_no_move(laid, tmp_path):
    flip(file_of(laid, tmp_path, "layer_vectors"))
    with pytest.raises(CorruptionFound, match=r"layer_vectors of layer 0 .* --anew"):
        shards.audit(laid, tmp_path, "notes")
    assert laid.audits == {}


def test_lists_are_not_judged_by_a_damaged_full_build(laid, tmp_path):
    flip(file_of(laid, tmp_path, "quarantine_vectors", 1))
    with (
        shards.open_shard(laid, tmp_path, "notes") as shard,
        pytest.raises(CorruptionFound, match="quarantine_vectors"),
    ):
        shards.judge(laid, tmp_path, shard, shipped())


def test_a_card_serves_nothing_over_damaged_centroids(laid, tmp_path):
    """They are not copied, but every probe begins with them."""
    flip(file_of(laid, tmp_path, "centroids"))
    with (
        Residence(laid, tmp_path, "notes", StandInCard(), keep=False) as held,
        pytest.raises(CorruptionFound, match=r"centroids .* is damaged"),
    ):
        held.open(readers=1)


def test_a_sector_that_cannot_be_read_is_damage_like_any_other(laid, tmp_path, monkeypatch):
    broken = file_of(laid, tmp_path, "layer_ids")

    def read(path):
        if path == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return file_sha256(path)

    monkeypatch.setattr(scrub, "file_sha256", read)
    (found,) = shards.scrub(laid, tmp_path, "notes").differences
    assert (found.found, "layer_ids" in str(found)) == ("unreadable", True)
    move(laid)
    assert "cannot be read" in refreshed(laid, tmp_path).why
    assert_the_rows_of_the_source(laid, tmp_path)
