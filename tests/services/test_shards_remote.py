"""A shard's copy on a real S3 server (SeaweedFS): whole before the pointer says so, and one winner of many."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from typer.testing import CliRunner

from fabric_pipelines import settings, shards
from fabric_pipelines.cli import app
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.objects import Kept, Objects
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import (
    AlreadyRunning,
    CorruptionFound,
    FencingLost,
    Refused,
    StorageFailed,
    StoreUnreachable,
    UsageError,
    VersionRefused,
)
from fabric_pipelines.shards import remote
from fabric_pipelines.shards.disk import Disk
from fabric_pipelines.shards.scrub import damaged_files
from fabric_pipelines.testing.vector_store import MemoryVectorStore
from tests.support_completions import pulled_batch
from tests.support_s3 import environment_of, free_ports, make_bucket, seaweed


class WorldEnded(BaseException):
    """The process is gone."""


BUCKET = "shards"
ROWS, DIM = 200, 16


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as url:
        yield url


def _use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(endpoint).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def objects(
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Objects:
    _use(endpoint, monkeypatch)
    made = Objects(f"s3://{BUCKET}/{request.node.name.replace('[', '-').rstrip(']')}")
    make_bucket(made._files, BUCKET)
    return made


@pytest.fixture
def store() -> MemoryVectorStore:
    memory = MemoryVectorStore()
    memory.put(np.arange(ROWS), np.random.default_rng(0).standard_normal((ROWS, DIM)))
    return memory


@pytest.fixture
def built(store: MemoryVectorStore, tmp_path: Path) -> MemoryVectorStore:
    shards.build(store, tmp_path, "notes", lists=4, seed=0, metric="l2", recipe={})
    return store


def move(store: MemoryVectorStore, root: Path, row: int) -> None:
    store.put(np.array([row]), np.random.default_rng(row).standard_normal((1, DIM)))
    shards.refresh(store, root, "notes")


def test_a_copy_comes_back_on_another_machine_and_answers_the_same(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    first = remote.push(built, tmp_path, "notes", objects)
    assert (first.pointer.generation, first.files > 5) == (1, True)
    fetched = remote.fetch(objects, tmp_path / "elsewhere", "notes")
    xq = np.ones((3, DIM))
    with shards.Shard(fetched) as there, shards.open_shard(built, tmp_path, "notes") as here:
        np.testing.assert_array_equal(there.search(xq, 9).I, here.search(xq, 9).I)
    assert remote.push(built, tmp_path, "notes", objects).files == 0


def test_only_what_moved_is_copied(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    whole = remote.push(built, tmp_path, "notes", objects)
    move(built, tmp_path, 3)
    again = remote.push(built, tmp_path, "notes", objects)
    assert again.pointer.generation == 2
    assert again.bytes < whole.bytes / 3
    assert remote.fetch(objects, tmp_path / "elsewhere", "notes").number == 2


def test_of_sixteen_writers_one_wins(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    remote.push(built, tmp_path, "notes", objects)
    before = remote._pointer(objects, "notes")
    assert before is not None

    def attempt(number: int) -> bool:
        pointer = remote.Pointer(2, 100 + number, f"{number:064d}")
        try:
            remote.switch(objects, "notes", pointer, before)
        except FencingLost:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(attempt, range(16)))
    assert won.count(True) == 1
    found = remote._pointer(objects, "notes")
    assert found is not None
    assert found[0].token == 100 + won.index(True)


def test_of_sixteen_first_writers_one_wins(objects: Objects) -> None:
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda n: objects.create("first", str(n).encode()), range(16)))
    assert won.count(True) == 1
    assert objects.read("first")[0] == str(won.index(True)).encode()  # type: ignore[index]


def test_an_older_generation_never_goes_over_a_newer_copy(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    newer = remote.Pointer(9, 9, "0" * 64)
    remote.switch(objects, "notes", newer, None)
    with pytest.raises(FencingLost, match="is older"):
        remote.push(built, tmp_path, "notes", objects)


@pytest.fixture
def elsewhere(tmp_path: Path) -> tuple[MemoryVectorStore, Path]:
    """A shard of the same name in another database, three generations on."""
    other, root = MemoryVectorStore(), tmp_path / "other"
    root.mkdir()
    other.database = ("2", "somebody's")
    other.put(np.arange(ROWS), np.random.default_rng(5).standard_normal((ROWS, DIM)))
    shards.build(other, root, "notes", lists=4, seed=0, metric="l2", recipe={})
    for row in (1, 2):
        move(other, root, row)
    return other, root


def raw(objects: Objects) -> dict[str, Any]:
    read = objects.read("notes/CURRENT")
    assert read is not None
    found: dict[str, Any] = json.loads(read[0])
    return found


def point(objects: Objects, **fields: object) -> None:
    objects._files.pipe_file(f"{objects.root}/notes/CURRENT", json.dumps(fields).encode())


def without_names(objects: Objects) -> None:
    """The pointer as it was written before it named a database."""
    kept = raw(objects)
    point(objects, **{name: kept[name] for name in ("generation", "token", "manifest_sha256")})


@pytest.mark.parametrize("named", [True, False], ids=["named", "of older days"])
def test_a_copy_of_another_database_is_taken_over_on_purpose_only(
    built: MemoryVectorStore,
    objects: Objects,
    tmp_path: Path,
    elsewhere: tuple[MemoryVectorStore, Path],
    named: bool,
) -> None:
    """Tokens of two databases say nothing of each other: the third generation of one is no newer than the first of another."""
    first = remote.push(built, tmp_path, "notes", objects)
    if not named:
        without_names(objects)
    before = keys(objects), raw(objects)
    says = (
        r"is that of database memory of cluster 1, and this is database somebody's of cluster 2: .*"
        r"a prefix of its own.*--take-over"
    )
    with pytest.raises(Refused, match=says):
        remote.push(*elsewhere, "notes", objects)
    for dry_run in (True, False):
        with pytest.raises(Refused, match=says):
            remote.prune(*elsewhere, "notes", objects, keep=1, dry_run=dry_run)
    assert (keys(objects), raw(objects)) == before
    taken = remote.push(*elsewhere, "notes", objects, take_over=True)
    assert "was that of database memory of cluster 1; it is this database's" in taken.adopted
    assert (raw(objects)["cluster"], raw(objects)["database"]) == ("2", "somebody's")
    fetched = remote.fetch(objects, tmp_path / "fetched", "notes")
    assert (fetched.number, list(damaged_files(fetched))) == (3, [])
    move(built, tmp_path, 3)
    with pytest.raises(Refused, match="is that of database somebody's"):
        remote.push(built, tmp_path, "notes", objects)
    back = remote.push(built, tmp_path, "notes", objects, take_over=True)
    assert (back.pointer.generation, first.adopted) == (2, "")
    assert list(damaged_files(remote.fetch(objects, tmp_path / "back", "notes"))) == []


@pytest.mark.parametrize("moved", [True, False], ids=["a newer one", "the same"])
def test_a_pointer_of_older_days_is_adopted_once_and_says_so(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path, moved: bool
) -> None:
    remote.push(built, tmp_path, "notes", objects)
    without_names(objects)
    if moved:
        move(built, tmp_path, 3)
    adopted = remote.push(built, tmp_path, "notes", objects)
    assert "named no database; it is this one's from now on" in adopted.adopted
    assert (raw(objects)["cluster"], raw(objects)["database"]) == ("1", "memory")
    assert remote.push(built, tmp_path, "notes", objects).adopted == ""


def test_a_pointer_that_no_push_replaces_says_what_does(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    remote.push(built, tmp_path, "notes", objects)
    for generation, says in (
        (1, "names manifest 000000000000 as generation 1 under token 1, and here that is "),
        (900, "is generation 900 under token 900, and generation 1 under token 1 is older"),
    ):
        point(objects, generation=generation, token=generation, manifest_sha256="0" * 64)
        with pytest.raises(
            CorruptionFound, match=r"--verify` .* where that is refused.* add --take-over"
        ):
            remote.fetch(objects, tmp_path / "fetched", "notes")
        with pytest.raises(
            FencingLost, match=f"{says}.*push notes --to s3://.* --take-over` puts it there"
        ):
            remote.push(built, tmp_path, "notes", objects, verify=True)
        remote.push(built, tmp_path, "notes", objects, take_over=True)
        assert remote.fetch(objects, tmp_path / "fetched", "notes").number == 1


def test_a_crash_before_the_pointer_leaves_the_old_copy_current(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.push(built, tmp_path, "notes", objects)
    move(built, tmp_path, 3)

    def ended(*_: object) -> None:
        raise WorldEnded

    for step in ("put_file", "create", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(objects, step, ended)
            with pytest.raises(WorldEnded):
                remote.push(built, tmp_path, "notes", objects)
        assert remote.fetch(objects, tmp_path / step, "notes").number == 1
    assert remote.push(built, tmp_path, "notes", objects).pointer.generation == 2


def copies(store: MemoryVectorStore, root: Path, objects: Objects, many: int) -> None:
    for row in range(many):
        if row:
            move(store, root, row)
        remote.push(store, root, "notes", objects)


def replaced(store: MemoryVectorStore, root: Path, objects: Objects) -> None:
    """One more generation, of other rows, and its copy: nothing of the one before is in it."""
    store.put(np.arange(ROWS), np.random.default_rng(7).standard_normal((ROWS, DIM)))
    shards.refresh(store, root, "notes", anew=True)
    remote.push(store, root, "notes", objects)


def keys(objects: Objects) -> list[str]:
    return sorted(objects.sizes("notes/"))


def pruned(store: MemoryVectorStore, root: Path, objects: Objects, **more: Any) -> Any:
    return remote.prune(store, root, "notes", objects, keep=1, **more)


def test_old_copies_go_and_no_block_that_a_kept_one_lists(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    copies(built, tmp_path, objects, 3)
    assert shards.pin(built, "notes", 1, "cited") == ()
    before = keys(objects)
    sizes = objects.sizes("notes/")
    foreseen = pruned(built, tmp_path, objects, dry_run=True)
    assert keys(objects) == before
    done = pruned(built, tmp_path, objects)
    assert (done.kept, done.objects, done.bytes) == ((1, 3), foreseen.objects, foreseen.bytes)
    gone = sorted(set(before) - set(keys(objects)))
    assert (len(gone), sum(sizes[key] for key in gone)) == (done.objects, done.bytes)
    assert [key for key in gone if key.endswith(".json")] == ["notes/g000002-t2.json"]
    assert remote.fetch(objects, tmp_path / "elsewhere", "notes").number == 3
    shards.unpin(built, "notes", 1)
    assert pruned(built, tmp_path, objects).kept == (3,)
    assert remote.fetch(objects, tmp_path / "again", "notes").number == 3
    assert pruned(built, tmp_path, objects).objects == 0
    move(built, tmp_path, 9)  # the pointer that was written anew is gone over as any other
    assert remote.push(built, tmp_path, "notes", objects).pointer.generation == 4


def test_who_looked_before_a_prune_does_not_switch_and_who_pushes_meanwhile_is_refused(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks that it found there may be gone by now."""
    copies(built, tmp_path, objects, 1)
    replaced(built, tmp_path, objects)
    looked = remote._pointer(objects, "notes")
    refused: list[str] = []
    real = objects.remove

    def meanwhile(key: str) -> None:
        with pytest.raises(AlreadyRunning, match="works on the copy"):
            remote.push(built, tmp_path, "notes", objects)
        refused.append(key)
        real(key)

    with monkeypatch.context() as patch:
        patch.setattr(objects, "remove", meanwhile)
        assert pruned(built, tmp_path, objects).objects == len(refused) > 1
    with pytest.raises(FencingLost, match="switched the copy"):
        remote.switch(objects, "notes", remote.Pointer(9, 9, "0" * 64), looked)
    now = remote._pointer(objects, "notes")
    assert now is not None
    assert (now[0].generation, now[0].prunes) == (2, 1)


def test_a_pruner_that_lost_its_lease_removes_nothing_more(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies(built, tmp_path, objects, 2)
    before = keys(objects)
    monkeypatch.setattr("fabric_pipelines.shards.building.LEASE_TTL_S", -1.0)  # each beat renews
    with pytest.raises(FencingLost):
        pruned(built, tmp_path, objects)
    assert keys(objects) == before


def test_a_kill_before_any_object_leaves_a_copy_that_is_whole(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies(built, tmp_path, objects, 1)
    replaced(built, tmp_path, objects)
    doomed = pruned(built, tmp_path, objects, dry_run=True).objects
    real, left = objects.remove, [0]

    def dying(key: str) -> None:
        if not left[0]:
            raise WorldEnded
        left[0] -= 1
        real(key)

    with monkeypatch.context() as patch:
        patch.setattr(objects, "remove", dying)
        for removed in (0, 1, doomed - 2):
            left[0] = removed
            with pytest.raises(WorldEnded):
                pruned(built, tmp_path, objects)
            found = remote.fetch(objects, tmp_path / f"at {removed}", "notes")
            assert found.number == 2
            doomed -= removed
    assert pruned(built, tmp_path, objects).objects == doomed
    assert pruned(built, tmp_path, objects).objects == 0


def test_a_kept_manifest_that_is_damaged_keeps_everything(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    copies(built, tmp_path, objects, 3)
    objects._files.pipe_file(f"{objects.root}/notes/g000002-t2.json", b"{}")
    before = keys(objects)
    with pytest.raises(CorruptionFound, match="g000002-t2"):
        remote.prune(built, tmp_path, "notes", objects, keep=2)
    assert keys(objects) == before


def test_a_damaged_copy_and_a_damaged_original_are_not_handed_on(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    current = shards.open_generation(built, tmp_path, "notes")
    entry = current.manifest.of_role("vectors")[0]
    path = current.folder / entry.path
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptionFound, match="is not copied"):
        remote.push(built, tmp_path, "notes", objects)
    path.write_bytes(content)
    remote.push(built, tmp_path, "notes", objects)
    objects._files.pipe_file(
        f"{objects.root}/{remote._key('notes', entry)}", content[:-1] + bytes([content[-1] ^ 1])
    )
    with pytest.raises(CorruptionFound, match="is damaged"):
        remote.fetch(objects, tmp_path / "elsewhere", "notes")


# A copy that was damaged


def a_block(store: MemoryVectorStore, root: Path, objects: Objects, role: str = "vectors") -> str:
    manifest = shards.open_generation(store, root, "notes").manifest
    return remote._key("notes", manifest.of_role(role)[0])


def overwrite(objects: Objects, key: str) -> None:
    """The same size, other bytes, as whoever may write there can."""
    found = objects.read(key)
    assert found is not None
    objects._files.pipe_file(f"{objects.root}/{key}", found[0][:-1] + bytes([found[0][-1] ^ 1]))


def refused(objects: Objects, root: Path) -> str:
    with pytest.raises((CorruptionFound, StorageFailed)) as fault:
        remote.fetch(objects, root, "notes")
    assert not [path for path in (root / "notes").glob(".*")]
    return str(fault.value)


@pytest.mark.parametrize("deed", [overwrite, Objects.remove], ids=["other bytes", "gone"])
def test_a_push_heals_what_a_fetch_refuses_by_name_also_when_the_pointer_is_its_own(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path, deed: Any
) -> None:
    remote.push(built, tmp_path, "notes", objects)
    for key in (a_block(built, tmp_path, objects), "notes/g000001-t1.json"):
        deed(objects, key)
        said = refused(objects, tmp_path / "elsewhere")
        assert f"s3://{objects.root}/{key}" in said
        assert f"`fabric receipt push notes --to s3://{objects.root} --verify`" in said
        healed = remote.push(built, tmp_path, "notes", objects)
        assert (healed.files, healed.bytes) == (1, objects.sizes("notes/")[key])
        assert remote.fetch(objects, tmp_path / key, "notes").number == 1
    assert remote.push(built, tmp_path, "notes", objects, verify=True).files == 0


def test_a_generation_built_anew_is_not_copied_over_damaged_objects(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    """It has the same files, and what is there of the same size is not for that the same."""
    remote.push(built, tmp_path, "notes", objects)
    overwrite(objects, a_block(built, tmp_path, objects))
    objects.remove(a_block(built, tmp_path, objects, "ids"))
    shards.refresh(built, tmp_path, "notes", anew=True)
    assert remote.push(built, tmp_path, "notes", objects).files == 2
    assert remote.fetch(objects, tmp_path / "elsewhere", "notes").number == 2


def test_rot_that_the_store_does_not_tell_is_found_by_reading_back(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.push(built, tmp_path, "notes", objects)
    as_it_was = objects.listed("notes/blocks/")
    overwrite(objects, a_block(built, tmp_path, objects))
    monkeypatch.setattr(objects, "listed", lambda prefix: as_it_was)
    assert remote.push(built, tmp_path, "notes", objects).files == 0
    assert remote.push(built, tmp_path, "notes", objects, verify=True).files == 1
    assert remote.fetch(objects, tmp_path / "elsewhere", "notes").number == 1


def test_an_etag_that_is_no_digest_is_no_damage(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.push(built, tmp_path, "notes", objects)
    odd = {key: replace(kept, etag="of a key") for key, kept in objects.listed("notes/").items()}
    read: list[str] = []
    real = objects.sha256
    monkeypatch.setattr(objects, "listed", lambda prefix: odd)
    monkeypatch.setattr(objects, "sha256", lambda key: read.append(key) or real(key))
    assert remote.push(built, tmp_path, "notes", objects).files == 0
    assert set(read) == {key for key in odd if "/blocks/" in key}


def test_a_file_that_goes_up_in_parts_has_the_etag_of_its_parts(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("dataplane.objects", "shards.remote"):
        monkeypatch.setattr(f"fabric_pipelines.{module}.PART_BYTES", 5 << 20)
    path = tmp_path / "large"
    for size in (11 << 20, 1 << 20):
        path.write_bytes(np.random.default_rng(size).bytes(size))
        objects.put_file("large", path)
        sums = remote._Sums.of(path)
        assert objects.look("large") == Kept(size, sums.etag)
        assert ("-" in sums.etag) == (size > 10 << 20)
        assert objects.sha256("large") == sums.sha256


@pytest.mark.parametrize(
    "content",
    [
        b'{"generation": "x", "token": null, "manifest_sha256": 3}',
        b'{"generation": 1, "token": 2, "manifest_sha256": 3}',
        b'{"generation": true, "token": 2, "manifest_sha256": "00"}',
        b"[1, 2]",
    ],
)
def test_a_pointer_of_other_types_is_refused_with_its_remedy(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path, content: bytes
) -> None:
    remote.push(built, tmp_path, "notes", objects)
    objects._files.pipe_file(f"{objects.root}/notes/CURRENT", content)
    with pytest.raises(CorruptionFound, match=r"is no pointer: .* remove the object"):
        remote.fetch(objects, tmp_path / "elsewhere", "notes")
    with pytest.raises(CorruptionFound, match="is no pointer"):
        remote.push(built, tmp_path, "notes", objects)
    objects.remove("notes/CURRENT")
    remote.push(built, tmp_path, "notes", objects)
    assert remote.fetch(objects, tmp_path / "elsewhere", "notes").number == 1


def test_a_pointer_that_says_more_than_this_program_knows_is_left_to_a_newer_one(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    remote.push(built, tmp_path, "notes", objects)
    read = objects.read("notes/CURRENT")
    assert read is not None
    newer = json.dumps({**json.loads(read[0]), "fence": 3}).encode()
    objects._files.pipe_file(f"{objects.root}/notes/CURRENT", newer)
    for act in (
        lambda: remote.fetch(objects, tmp_path / "elsewhere", "notes"),
        lambda: remote.push(built, tmp_path, "notes", objects),
    ):
        with pytest.raises(
            VersionRefused, match=r"by a newer program .it also says fence.: upgrade this one"
        ):
            act()
    assert objects._files.cat_file(f"{objects.root}/notes/CURRENT") == newer


def test_a_fetch_brings_again_what_is_damaged_or_gone_in_the_folder(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path
) -> None:
    remote.push(built, tmp_path, "notes", objects)
    there = remote.fetch(objects, tmp_path / "elsewhere", "notes")
    paths = [there.folder / there.manifest.of_role(role)[0].path for role in ("vectors", "ids")]
    paths.append(there.folder / "manifest.json")
    whole = [path.read_bytes() for path in paths]
    with shards.Shard(there) as reader:
        before = reader.search(np.ones((3, DIM)), 9).I
        for path in paths:
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert remote.fetch(objects, tmp_path / "elsewhere", "notes").folder == there.folder
        assert [path.read_bytes() for path in paths] == whole
        np.testing.assert_array_equal(reader.search(np.ones((3, DIM)), 9).I, before)
    shutil.rmtree(paths[0].parent)
    paths[2].unlink()
    remote.fetch(objects, tmp_path / "elsewhere", "notes")
    assert [path.read_bytes() for path in paths] == whole
    assert list(damaged_files(there)) == []
    assert [path.name for path in there.folder.parent.iterdir()] == ["g000001-t1"]


def test_of_four_fetches_at_once_each_sees_a_whole_folder_and_nothing_else_is_left(
    built: MemoryVectorStore, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.push(built, tmp_path, "notes", objects)
    folder = tmp_path / "elsewhere" / "notes"
    killed, young = folder / ".g000001-t1.fetch-0", folder / ".g000001-t1.fetch-1"
    for left in (killed, young):
        left.mkdir(parents=True)
    os.utime(killed, (0, 0))
    at_once, real = Barrier(4), Disk.rename

    def together(disk: Disk, old: Path, new: Path) -> None:
        at_once.wait(60)  # all have everything, and none has put it in its place
        real(disk, old, new)

    monkeypatch.setattr(Disk, "rename", together)
    with ThreadPoolExecutor(4) as pool:
        fetching = [
            pool.submit(remote.fetch, objects, tmp_path / "elsewhere", "notes") for _ in "1234"
        ]
        found = [each.result() for each in fetching]
    assert {each.folder for each in found} == {folder / "g000001-t1"}
    assert list(damaged_files(found[0])) == []
    assert {path.name for path in folder.iterdir()} == {"g000001-t1", young.name}


def test_a_store_that_ignores_conditions_is_refused(
    built: MemoryVectorStore,
    objects: Objects,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects.require_conditions()
    monkeypatch.setattr(objects, "create", objects._put)  # as a store would that overwrites
    with pytest.raises(Refused, match="ignores If-None-Match"):
        remote.push(built, tmp_path, "notes", objects)
    assert objects.read("notes/CURRENT") is None


def test_what_is_no_store_is_said_in_one_sentence(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no s3:// URL"):
        Objects(str(tmp_path))
    with pytest.raises(StorageFailed, match="there is no copy"):
        remote.fetch(objects, tmp_path, "notes")
    _use(f"http://127.0.0.1:{free_ports(1)[0]}", monkeypatch)
    with pytest.raises(StoreUnreachable):
        Objects(f"s3://{BUCKET}/x").read("y")


def test_the_commands_push_and_fetch(
    database: Database, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(database)
    writer.land(pulled_batch(ROWS, function="embed", dim=DIM))
    writer.close()
    monkeypatch.setenv("FABRIC_HOME", str(tmp_path))
    monkeypatch.setenv("FABRIC_PG_URL", database.url)
    root = settings.load().shards_dir
    root.mkdir(parents=True)
    shards.build(database, root, "verses", lists=4, seed=0, metric="cosine", recipe={})
    url, out = f"s3://{objects.root}", str(tmp_path / "elsewhere")

    def said(*words: str) -> dict[str, object]:
        done = CliRunner().invoke(app, ["receipt", *words, "--json"])
        assert done.exit_code == 0, done.stderr
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    def shown(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["shard", *words, "--json"])
        assert done.exit_code == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def listed(*words: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = shown(*words)["shards"]
        return found

    sent = said("push", "verses", "--to", url)
    assert (sent["generation"], int(str(sent["files_sent"])) > 5) == (1, True)
    assert said("push", "verses", "--to", url)["bytes_sent"] == 0
    objects._files.pipe_file(
        f"{objects.root}/verses/CURRENT", b'{"generation": 9, "token": 9, "manifest_sha256": "0"}'
    )
    assert "adopted" in said("push", "verses", "--to", url, "--take-over")
    assert said("fetch", "verses", "--from", url, "--out", out)["rows"] == ROWS
    shards.build(database, root, "verses", lists=3, seed=1, metric="cosine", recipe={})
    said("push", "verses", "--to", url)
    (there,) = listed("prune", "verses", "--keep", "1", "--copy", url, "--dry-run")
    assert (there["kept"], there["dry_run"], there["objects"] > 3) == ([2], True, True)
    assert listed("prune", "--keep", "1", "--copy", url)[0]["objects"] == there["objects"]
    first = said("issue", "verses", "--generation", "1")["receipt_id"]
    (foreseen,) = listed("prune", "--keep", "1", "--dry-run")
    (done,) = listed("prune", "--keep", "1")
    assert done["pruned"] == foreseen["pruned"] == [{"generation": 1, "bytes": ANY}]
    assert done["bytes_freed"] == foreseen["bytes_freed"] > 0
    checked = said("verify", str(first))
    assert (checked["ok"], "pruned by policy on 20" in str(checked["pruned"])) == (True, True)
    again = shown("pin", "verses", "--generation", "2", "--reason", "cited")
    assert (again["pinned"], again["lacking"]) == (True, [])
    assert listed("prune")[0]["kept"][0]["why"] == ["current", "pinned: cited"]
    words = CliRunner().invoke(app, ["shard", "prune"]).stdout
    assert "stays" in words
    assert "current; pinned: cited" in words
    assert shown("unpin", "verses", "--generation", "2")["pinned"] is False
