"""Old generations go, whole or not at all; what is current, pinned, open, on a card or needed by these stays."""

from __future__ import annotations

import copy
import os
import shutil
import time
from pathlib import Path

import pytest

from fabric_pipelines import receipts, shards
from fabric_pipelines.errors import AlreadyRunning, CorruptionFound, FencingLost, UsageError
from fabric_pipelines.shards.building import holding
from fabric_pipelines.shards.disk import reading
from fabric_pipelines.shards.generation import write_generation
from tests.support_power import PowerDisk
from tests.unit.shards.test_generation import RecordingDisk, WorldEnded, build, current
from tests.unit.shards.test_refresh import refreshed


def generations(store, rows, root, many):
    """Full builds, each of other rows than the one before."""
    for number in range(many):
        store.put(rows[0][number : number + 1], -rows[1][:1])
        build(store, root, keep_centroids=number > 0)
        receipts.issue(store, root, "notes")


def pruned(store, root, keep=1, **more):
    return shards.prune(store, root, "notes", keep=keep, **more)


def folders(root):
    return sorted(path.name for path in (root / "notes").iterdir() if path.name != ".lock")


def whole(store, root):
    """Numbers of the generations whose rows say that their bytes are there; each is, to the last byte."""
    there = [row.generation for row in store.published("notes") if not row.pruned]
    assert all(shards.scrub(store, root, "notes", number).ok for number in there)
    return there


def test_the_newest_stay_and_only_bytes_that_nobody_links_are_freed(store, rows, tmp_path):
    generations(store, rows, tmp_path, 5)
    before = sum(p.stat().st_size for p in {p.stat().st_ino: p for p in files(tmp_path)}.values())
    foreseen = pruned(store, tmp_path, keep=2, dry_run=True)
    assert whole(store, tmp_path) == [1, 2, 3, 4, 5]
    done = pruned(store, tmp_path, keep=2)
    assert whole(store, tmp_path) == [4, 5]
    assert folders(tmp_path) == ["g000004-t4", "g000005-t5"]
    after = sum(p.stat().st_size for p in {p.stat().st_ino: p for p in files(tmp_path)}.values())
    assert before - after == done.bytes_freed == foreseen.bytes_freed
    assert sum(each.bytes for each in done.pruned) > done.bytes_freed
    assert (foreseen.pruned, foreseen.kept) == (done.pruned, done.kept)
    assert [store.generations["notes", n].manifest == {} for n in range(1, 6)] == [True] * 3 + [
        False
    ] * 2
    assert pruned(store, tmp_path, keep=2).pruned == ()


def files(root):
    return [path for path in root.rglob("*") if path.is_file()]


def test_what_a_reader_has_open_stays_until_it_closes(store, rows, tmp_path):
    generations(store, rows, tmp_path, 3)
    reader = shards.open_shard(store, tmp_path, "notes", 1)
    done = pruned(store, tmp_path)
    assert [(kept.generation, kept.why) for kept in done.kept] == [
        (1, ("a reader has it open",)),
        (3, ("current",)),
    ]
    assert len(reader.columns()) == len(reader.ids()) == 400  # columns are mapped only now
    reader.close()
    assert [each.generation for each in pruned(store, tmp_path).pruned] == [1]
    with pytest.raises(UsageError, match=r"pruned by policy on 1970-01-01.*open a newer one"):
        shards.open_shard(store, tmp_path, "notes", 1)


def test_a_pin_keeps_a_generation_and_its_parent_and_a_pruned_one_cannot_be_pinned(
    store, rows, tmp_path
):
    build(store, tmp_path)
    receipts.issue(store, tmp_path, "notes")
    for number in range(4):
        store.put(rows[0][number : number + 1], -rows[1][:1])
        refreshed(store, tmp_path)
        receipts.issue(store, tmp_path, "notes")
    assert shards.pin(store, "notes", 3, "a paper cites it") == ()
    why = {each.generation: each.why for each in pruned(store, tmp_path).kept}
    assert whole(store, tmp_path) == [1, 2, 3, 4, 5]
    assert (why[3], why[2]) == (("pinned: a paper cites it",), ("3 was laid over it",))
    assert why[4] == ("5 was laid over it",)
    assert "the lists of 3 were cut in it" in why[1]
    shards.unpin(store, "notes", 3)
    assert [each.generation for each in pruned(store, tmp_path).pruned] == [2, 3]
    assert whole(store, tmp_path) == [1, 4, 5]
    with pytest.raises(UsageError, match="cannot be pinned"):
        shards.pin(store, "notes", 3, "late")
    with pytest.raises(UsageError, match="has no pin"):
        shards.unpin(store, "notes", 3)
    with pytest.raises(UsageError, match="there is no generation 9"):
        shards.pin(store, "notes", 9, "never")


def test_what_is_loaded_on_a_card_stays_though_another_machine_holds_it(store, rows, tmp_path):
    generations(store, rows, tmp_path, 2)
    lease = store.acquire_device("notes", "elsewhere:cuda:0", ttl_s=60)
    store.publish_device(lease, generation=1)
    assert pruned(store, tmp_path).kept[0].why == ("loaded on elsewhere:cuda:0",)
    store.release_device(lease)
    assert [each.generation for each in pruned(store, tmp_path).pruned] == [1]


def test_the_last_decisions_stay_for_the_generations_after_them(store, rows, tmp_path):
    generations(store, rows, tmp_path, 3)
    (tmp_path / "notes" / "g000002-t2" / "decisions.json").write_text("{}")
    assert pruned(store, tmp_path).kept[0].why == ("the last decisions are kept there",)
    assert whole(store, tmp_path) == [2, 3]


def test_what_a_killed_rebuild_left_goes_and_one_that_is_at_work_stays(store, rows, tmp_path):
    """Its links would keep bytes that were pruned."""
    generations(store, rows, tmp_path, 1)
    for name, age_s in (("dead", 3600), ("at-work", 3600), ("new", 0)):
        (tmp_path / f".rebuild-{name}" / "g000001-t1").mkdir(parents=True)
        then = time.time() - age_s
        os.utime(tmp_path / f".rebuild-{name}", (then, then))
    with reading(tmp_path / ".rebuild-at-work"):
        assert pruned(store, tmp_path).swept == (".rebuild-dead",)
    (receipt,) = store.find_receipts(shard="notes")
    assert receipts.rebuild(store, tmp_path, receipt.receipt_id).verdict == "identical"
    assert sorted(path.name for path in tmp_path.glob(".rebuild-*")) == [".rebuild-new"]


def test_a_folder_that_is_not_here_is_neither_pruned_nor_called_so(store, rows, tmp_path):
    generations(store, rows, tmp_path, 2)
    shutil.rmtree(tmp_path / "notes" / "g000001-t1")
    assert pruned(store, tmp_path).kept[0].why == ("its folder is not on this machine",)
    with pytest.raises(CorruptionFound, match="is missing"):
        shards.open_shard(store, tmp_path, "notes", 1)


def test_nobody_prunes_while_somebody_builds_and_a_zombie_prunes_nothing(store, rows, tmp_path):
    generations(store, rows, tmp_path, 2)
    with holding(store, tmp_path, "notes"), pytest.raises(AlreadyRunning):
        pruned(store, tmp_path)
    with pytest.raises(UsageError, match="build it first"):
        shards.prune(store, tmp_path, "nobody's", keep=1)
    assert not (tmp_path / "nobody's").exists()

    class Slow:
        """Its lease ran out before the row; another machine builds on."""

        def __getattr__(self, name):
            return getattr(store, name)

        def prune_generation(self, lease, *, generation):
            store.now_s += 10_000
            store.acquire_shard("notes", "another machine", ttl_s=60)
            return store.prune_generation(lease, generation=generation)

    with pytest.raises(FencingLost):
        pruned(Slow(), tmp_path)
    assert whole(store, tmp_path) == [1, 2]


class DyingStore:
    """Dies before or after the row says that a generation goes."""

    def __init__(self, store, crash_at):
        self.store, self.crash_at, self.calls = store, crash_at, 0

    def __getattr__(self, name):
        return getattr(self.store, name)

    def prune_generation(self, lease, *, generation):
        for act in (
            lambda: None,
            lambda: self.store.prune_generation(lease, generation=generation),
        ):
            if self.calls == self.crash_at:
                raise WorldEnded
            self.calls += 1
            done = act()
        return done


def assert_sound(store, root, answers):
    """What the rows call whole is whole, the current answers as before; the next build and prune leave nothing behind."""
    assert current(store, root) == answers
    assert {3, *whole(store, root)} <= {1, 2, 3}
    for row in store.find_receipts(shard="notes"):
        found = receipts.verify(store, root, row.receipt_id)
        assert [each for each in found.differences if not each.what.startswith("source")] == []
    build(store, root, keep_centroids=True)
    pruned(store, root)
    assert whole(store, root) == [4]
    assert folders(root) == [f"g000004-t{store.generations['notes', 4].token}"]


def worlds(store, rows, folder):
    generations(store, rows, folder / "whole", 3)
    answers = current(store, folder / "whole")
    while True:
        world, root = copy.deepcopy(store), folder / "at"
        shutil.copytree(folder / "whole", root, copy_function=_linked(folder))
        yield world, root, answers
        shutil.rmtree(root)


def _linked(folder):
    """Copies that keep which files are one."""
    known = {}

    def copied(source, target):
        at = known.setdefault(Path(source).stat().st_ino, target)
        if at == target:
            shutil.copy(source, target)
        else:
            os.link(at, target)

    return copied


def test_a_kill_between_any_two_steps_leaves_rows_that_tell_the_truth(store, rows, tmp_path):
    crashes = 0
    for world, root, answers in worlds(store, rows, tmp_path):
        disk = RecordingDisk(crash_at=crashes)
        try:
            pruned(world, root, disk=disk)
        except WorldEnded:
            crashes += 1
            assert_sound(world, root, answers)
            continue
        break
    assert [name for name, _ in disk.log] == ["rename"] * 2 + ["sync_folder"] + [
        "remove_folder"
    ] * 2
    assert crashes == 5


def test_a_kill_before_or_after_a_row_does_as_well(store, rows, tmp_path):
    rows_asked = 0
    for world, root, answers in worlds(store, rows, tmp_path):
        try:
            pruned(DyingStore(world, rows_asked), root)
        except WorldEnded:
            rows_asked += 1
            del world.leases["notes"]
            assert_sound(world, root, answers)
            continue
        break
    assert rows_asked == 4


def test_a_power_cut_at_any_step_does_as_well(store, rows, tmp_path):
    cuts = 0
    for world, root, answers in worlds(store, rows, tmp_path):
        with pytest.MonkeyPatch.context() as patch:
            disk = PowerDisk(root, patch, WorldEnded, cuts)
            try:
                pruned(world, root, disk=disk)
                done = True
            except WorldEnded:
                done = False
        disk.cut()
        assert_sound(world, root, answers)
        cuts += 1
        if done:
            break
    assert cuts == 6


def test_a_publication_that_links_a_block_keeps_it_whatever_goes_between(
    store, rows, tmp_path, monkeypatch
):
    """The block is linked from generation 1, which somebody wants to prune at that moment: the lease is in the way; were it
    not, the link alone would keep the bytes."""
    generations(store, rows, tmp_path, 1)
    refused = []
    real = write_generation

    def pruned_between(disk, folder, manifest, blocks, previous):
        made = real(disk, folder, manifest, blocks, previous)
        with pytest.raises(AlreadyRunning):
            pruned(store, tmp_path)
        refused.append(made[1])
        shutil.rmtree(previous)  # as if it had been let through
        return made

    monkeypatch.setattr("fabric_pipelines.shards.building.write_generation", pruned_between)
    build(store, tmp_path, keep_centroids=True)
    assert refused[0] > 5
    assert shards.scrub(store, tmp_path, "notes").ok


def test_the_receipt_of_a_pruned_generation_says_so_and_verifies_what_is_left(
    store, rows, tmp_path
):
    generations(store, rows, tmp_path, 1)
    (first,) = store.find_receipts(shard="notes")
    build(store, tmp_path, seed=8)
    pruned(store, tmp_path)
    found = receipts.verify(store, tmp_path, first.receipt_id)
    assert (found.ok, found.differences) == (True, ())
    assert "its bytes were pruned by policy on 1970-01-01" in found.pruned
    again = receipts.rebuild(store, tmp_path, first.receipt_id)
    assert (again.ok, again.verdict, again.damage) == (True, "identical", ())
    assert again.differences[0].sentence == found.pruned
    store.put(rows[0][9:10], -rows[1][:1])
    moved = receipts.verify(store, tmp_path, first.receipt_id)
    assert not moved.ok
    assert all(each.what.startswith("source") for each in moved.differences)
    del store.generations["notes", 1]
    gone = receipts.verify(store, tmp_path, first.receipt_id)
    assert gone.pruned is None
    assert "is not published" in gone.differences[0].sentence


def test_the_rebuild_of_an_increment_whose_parent_was_pruned_says_so(store, rows, tmp_path):
    build(store, tmp_path)
    receipts.issue(store, tmp_path, "notes")
    for number in range(3):
        store.put(rows[0][number : number + 1], -rows[1][:1])
        refreshed(store, tmp_path)
        receipts.issue(store, tmp_path, "notes")
    receipt = store.find_receipts(shard="notes", generation=3)[0].receipt_id
    pruned(store, tmp_path, keep=2)
    assert whole(store, tmp_path) == [1, 3, 4]
    done = receipts.rebuild(store, tmp_path, receipt)
    assert done.damage == ()
    assert any(
        "pruned by policy" in str(each) and each.what == "parent" for each in done.differences
    )
    assert shards.pin(store, "notes", 3, "late") == (
        f"{store.generations['notes', 2].pruned}: a rebuild builds in full",
    )
