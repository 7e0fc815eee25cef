"""Generations: published whole or not at all, whatever moment the world ends at."""

from __future__ import annotations

import copy
import errno
import os
import shutil

import numpy as np
import pytest

from fabric_pipelines import shards
from fabric_pipelines.errors import AlreadyRunning, FencingLost, StorageFailed, UsageError
from fabric_pipelines.shards.building import holding
from fabric_pipelines.shards.disk import Disk
from fabric_pipelines.shards.residence import Residence
from fabric_pipelines.testing.standin_card import StandInCard

STEPS = ("make_folder", "write_file", "link_file", "rename", "sync_folder", "remove_folder")


class WorldEnded(BaseException):
    """The process is gone; no handler of ours may run on."""


class RecordingDisk(Disk):
    """Logs each step as (name, path) and ends the world before step `crash_at`."""

    def __init__(self, crash_at=None):
        self.log, self.crash_at = [], crash_at

    def __getattribute__(self, name):
        step = super().__getattribute__(name)
        if name not in STEPS:
            return step

        def logged(*paths):
            if len(self.log) == self.crash_at:
                raise WorldEnded
            self.log.append((name, paths[1] if name in ("link_file", "rename") else paths[0]))
            return step(*paths)

        return logged


class CrashingStore:
    """The store of a process that dies at publishing, before or after the row is there."""

    def __init__(self, store, after):
        self.store, self.after = store, after

    def __getattr__(self, name):
        return getattr(self.store, name)

    def publish_generation(self, *args, **fields):
        if self.after:
            self.store.publish_generation(*args, **fields)
        raise WorldEnded


def build(store, root, **changes):
    wanted = {
        "lists": 6,
        "seed": 7,
        "metric": "cosine",
        "recipe": {},
        "lists_per_block": 2,
    } | changes
    return shards.build(store, root, "notes", **wanted)


def current(store, root):
    with shards.open_shard(store, root, "notes") as shard:
        return shard.manifest.generation, shard.search(np.ones((2, 24)), 5).I.tolist()


def test_a_crash_before_any_step_leaves_the_old_generation_whole_and_the_next_build_clean(
    store, rows, tmp_path
):
    build(store, tmp_path)
    before = current(store, tmp_path)
    ids, vectors = rows
    store.put(ids[:5], -vectors[:5])
    crashes = 0
    for step in range(200):
        disk = RecordingDisk(crash_at=step)
        try:
            build(store, tmp_path, keep_centroids=True, disk=disk)
        except WorldEnded:
            crashes += 1
            assert current(store, tmp_path) == before
            assert shards.scrub(store, tmp_path, "notes").ok
            continue
        break
    assert crashes == len(disk.log) >= 15
    assert current(store, tmp_path)[0] == store.last_generation("notes")
    left = {path.name for path in (tmp_path / "notes").iterdir()}
    published = {f"g{n:06d}-t{row.token}" for (_, n), row in store.generations.items()}
    assert left - published == {".lock"}


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_publishing_is_either_not_yet_or_done(store, tmp_path, after):
    build(store, tmp_path)
    with pytest.raises(WorldEnded):
        build(CrashingStore(store, after), tmp_path)
    assert current(store, tmp_path)[0] == (2 if after else 1)
    removed = shards.janitor(store, tmp_path, "notes")
    assert len(removed) == (0 if after else 1)
    assert shards.scrub(store, tmp_path, "notes").ok


class DyingWorld:
    """A process that loads what it has published: it dies before step `crash_at` of card and device lease. Nothing of
    it does anything afterwards; its lease and its rows stay as they are, and the kernel drops its locks."""

    def __init__(self, store, crash_at):
        self.store, self.crash_at = store, crash_at
        self.log, self.ended, self.loading = [], False, False

    def step(self, name):
        self.ended = self.ended or (self.loading and len(self.log) == self.crash_at)
        if self.ended:
            raise WorldEnded
        self.log.append(name)

    def __getattr__(self, name):
        answer = getattr(self.store, name)

        def asked(*args, **fields):
            if "device" in name:
                self.step(name)
            elif self.ended:
                raise WorldEnded
            return answer(*args, **fields)

        return asked

    def switch(self, root):
        """Serves the generation of before from a card, builds the next one, loads it beside the old one: the steps
        of the last part count."""
        card = StandInCard(before=self.step)
        held = Residence(self, root, "notes", card, keep=False)
        try:
            old = held.open(1, readers=1)
            build(self, root, keep_centroids=True)
            self.log.clear()
            self.loading = True
            new = held.open(readers=1)
            assert new.generation.number == old.generation.number + 1 == 2
            self.ended = True
            return self.log
        finally:
            held._undo.close()


def test_a_crash_in_the_device_copy_leaves_both_generations_whole_and_says_only_what_was_loaded(
    store, rows, tmp_path
):
    """The fifth of {blocks, manifest, rename, row, device copy}: the row says 2, the card dies on the way to it."""
    build(store, tmp_path / "whole")
    before = current(store, tmp_path / "whole")[1]
    crashes, log = 0, None
    while log is None:
        world, root = DyingWorld(copy.deepcopy(store), crashes), tmp_path / "at"
        shutil.copytree(tmp_path / "whole", root)
        memory = world.store
        memory.put(rows[0][:5], -rows[1][:5])
        try:
            log = world.switch(root)
        except WorldEnded:
            crashes += 1
        assert all(shards.scrub(memory, root, "notes", number).ok for number in (1, 2))
        loaded = [row.generation for row in memory.devices("notes")]
        assert loaded == [1 if log is None else 2], "the row is the last step of all"
        with Residence(memory, root, "notes", StandInCard(), keep=False) as next_life:
            assert next_life.open(1).search(np.ones((2, 24)), 5).I.tolist() == before
            assert next_life.open().generation.number == 2
        shutil.rmtree(root)
    assert crashes == len(world.log) >= 60
    for name in ("empty", "send", "read_back", "wait", "launch", "download", "publish_device"):
        assert name in log


def test_everything_is_synced_before_the_rename_and_the_parent_after_it(store, tmp_path):
    disk = RecordingDisk()
    generation = build(store, tmp_path, disk=disk)
    names = [name for name, _ in disk.log]
    rename = names.index("rename")
    temp = tmp_path / "notes" / f".{generation.folder.name}.tmp"
    written = {path for name, path in disk.log if name == "write_file"}
    synced = {path for name, path in disk.log[:rename] if name == "sync_folder"}
    assert {path.parent for path in written} <= synced
    assert {name for name, _ in disk.log[rename + 1 :]} == {"sync_folder"}
    assert disk.log[rename + 1 :][0] == ("sync_folder", tmp_path / "notes")
    assert temp in synced
    assert {path.name for path in written} == {
        entry.path.rpartition("/")[2] for entry in generation.manifest.files
    } | {"manifest.json"}


def test_a_reader_keeps_the_generation_it_opened(store, rows, tmp_path):
    first = build(store, tmp_path)
    shard = shards.open_shard(store, tmp_path, "notes")
    before = shard.search(rows[1][:3], 5).I
    store.put(rows[0], -rows[1])
    build(store, tmp_path)
    for path in sorted(first.folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    np.testing.assert_array_equal(shard.search(rows[1][:3], 5).I, before)
    assert current(store, tmp_path)[0] == 2


def test_unchanged_blocks_are_the_same_file_and_changed_ones_are_not(store, rows, tmp_path):
    first = build(store, tmp_path)
    ids, vectors = rows
    store.put(ids[:1], vectors[:1] * np.float16(1.001))
    second = build(store, tmp_path, keep_centroids=True)
    vectors_then = {entry.path for entry in first.manifest.of_role("vectors")}
    vectors_now = {entry.path for entry in second.manifest.of_role("vectors")}
    assert len(vectors_then & vectors_now) == 2
    for path in vectors_then & vectors_now:
        assert (first.folder / path).samefile(second.folder / path)
    assert second.linked == len(
        {e.path for e in first.manifest.files} & {e.path for e in second.manifest.files}
    )


def test_rot_in_the_old_generation_is_not_inherited(store, tmp_path):
    first = build(store, tmp_path)
    entry = first.manifest.of_role("vectors")[0]
    content = bytearray((first.folder / entry.path).read_bytes())
    content[200] ^= 4
    (first.folder / entry.path).write_bytes(content)
    second = build(store, tmp_path)
    assert not shards.scrub(store, tmp_path, "notes", 1).ok
    assert shards.scrub(store, tmp_path, "notes").ok
    assert second.manifest.of_role("vectors")[0].path == entry.path


def test_a_lost_folder_is_built_anew_and_the_same_rows_give_the_same_files(store, tmp_path):
    one = build(store, tmp_path)
    shutil.rmtree(one.folder)
    two = build(store, tmp_path)
    assert two.linked == 0
    assert one.manifest.files == two.manifest.files


def test_a_zombie_with_an_older_token_publishes_nothing(store, tmp_path):
    """It slept through its lease, somebody else built; what it then writes never becomes current."""

    class Slow(Disk):
        def rename(self, old, new):
            store.now_s += 10_000
            lease = store.acquire_shard("notes", "another machine", ttl_s=60)
            assert lease.token == 2
            super().rename(old, new)

    with pytest.raises(FencingLost, match="no longer holds"):
        build(store, tmp_path, disk=Slow())
    assert store.last_generation("notes") == 0
    store.now_s += 10_000
    assert shards.janitor(store, tmp_path, "notes") == ["g000001-t1"]


def test_a_database_restored_from_an_older_state_builds_over_folders_that_it_has_forgotten(
    store, rows, tmp_path
):
    """Tokens and numbers come again; the folders of those that were forgotten are in nobody's way."""
    build(store, tmp_path)
    older = copy.deepcopy(store)
    for number in range(3):
        store.put(rows[0][number : number + 1], -rows[1][:1])
        build(store, tmp_path)
    for number in (2, 3, 4, 5):
        assert build(older, tmp_path).number == number
        assert shards.scrub(older, tmp_path, "notes").ok
    left = {path.name for path in (tmp_path / "notes").iterdir() if path.is_dir()}
    assert left == {f"g{number:06d}-t{number}" for number in (1, 2, 3, 4, 5)}


def test_a_lease_held_elsewhere_refuses_the_build_by_name(store, tmp_path):
    store.acquire_shard("notes", "another machine", ttl_s=60)
    with pytest.raises(AlreadyRunning, match="another machine"):
        build(store, tmp_path)


def test_two_builders_of_one_machine_do_not_meet_in_one_folder(store, tmp_path):
    with holding(store, tmp_path, "notes"), pytest.raises(AlreadyRunning, match="of this machine"):
        build(store, tmp_path)
    assert build(store, tmp_path).number == 1


def test_kept_centroids_need_a_generation_and_the_same_shape(store, tmp_path):
    with pytest.raises(UsageError, match="no generation whose centroids"):
        build(store, tmp_path, keep_centroids=True)
    build(store, tmp_path)
    with pytest.raises(UsageError, match="train new ones"):
        build(store, tmp_path, keep_centroids=True, lists=5)


def test_a_full_disk_is_one_sentence_and_leaves_the_old_generation(
    store, rows, tmp_path, monkeypatch
):
    build(store, tmp_path)
    store.put(rows[0], -rows[1])
    real = os.write

    def full(handle, data):
        if len(data) > 5000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(
        StorageFailed, match=r"cannot write .*vectors.*the disk is full: free space"
    ):
        build(store, tmp_path)
    monkeypatch.undo()
    assert current(store, tmp_path)[0] == 1
    assert build(store, tmp_path).number == 2


def test_a_short_write_is_continued_to_the_last_byte(store, tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:1000]))
    build(store, tmp_path)
    assert shards.scrub(store, tmp_path, "notes").ok


def test_a_folder_that_cannot_be_written_is_one_sentence(store, tmp_path):
    (tmp_path / "notes").write_text("a file")
    with pytest.raises(StorageFailed, match="cannot"):
        build(store, tmp_path)
