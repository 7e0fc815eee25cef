"""What a real kernel refuses becomes one sentence, and the generation before stays current."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines import shards
from fabric_pipelines.errors import StorageFailed
from fabric_pipelines.shards.disk import DISK, Disk
from fabric_pipelines.testing.vector_store import MemoryVectorStore

NOBODY = 65534


@pytest.fixture
def store() -> MemoryVectorStore:
    memory = MemoryVectorStore()
    memory.put(np.arange(200), np.random.default_rng(0).standard_normal((200, 64)))
    return memory


@pytest.fixture
def open_root() -> Iterator[Path]:
    """A folder that every user can walk through."""
    folder = Path(tempfile.mkdtemp(prefix="fabric-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def build(store: MemoryVectorStore, root: Path, disk: Disk = DISK) -> shards.Generation:
    return shards.build(store, root, "notes", lists=2, seed=0, metric="l2", recipe={}, disk=disk)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write anywhere: step down for the moment. Anybody else stays who they are."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(was)


def test_a_write_that_the_kernel_cuts_off_is_one_sentence_and_the_old_generation_stays(
    store: MemoryVectorStore, tmp_path: Path
) -> None:
    build(store, tmp_path)
    store.put(np.arange(200), np.random.default_rng(1).standard_normal((200, 64)))
    with (
        file_size_limit(20_000),
        pytest.raises(StorageFailed, match=r"cannot write .*vectors.*size limit of this process"),
    ):
        build(store, tmp_path)
    assert shards.scrub(store, tmp_path, "notes").generation == 1
    assert shards.scrub(store, tmp_path, "notes").ok
    assert build(store, tmp_path).number == 2


def test_a_folder_that_this_user_may_not_write_is_one_sentence(
    store: MemoryVectorStore, open_root: Path
) -> None:
    open_root.chmod(0o555)
    with as_nobody(), pytest.raises(StorageFailed, match=r"may not write there: check the folder"):
        build(store, open_root)
    open_root.chmod(0o755)
    build(store, open_root)
    (open_root / "notes").chmod(0o555)
    with as_nobody(), pytest.raises(StorageFailed, match=r"cannot (lock|create)"):
        build(store, open_root)
    with as_nobody():
        assert shards.scrub(store, open_root, "notes").ok


def test_a_refresh_that_finds_the_disk_full_leaves_it_as_it_was(
    store: MemoryVectorStore, tmp_path: Path
) -> None:
    """On a disk of its own in k2's story; here the kernel cuts off a write, with some files whole already."""
    build(store, tmp_path)
    folder = tmp_path / "notes"

    def there() -> dict[str, int]:
        return {
            str(path.relative_to(folder)): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    before = there()
    store.put(np.arange(200), np.random.default_rng(1).standard_normal((200, 64)))
    for attempt in (
        lambda: build(store, tmp_path),
        lambda: shards.refresh(store, tmp_path, "notes"),
    ):
        with file_size_limit(20_000), pytest.raises(StorageFailed, match="size limit"):
            attempt()
        assert there() == before
        assert [path.name for path in folder.iterdir() if path.is_dir()] == ["g000001-t1"]
    assert shards.refresh(store, tmp_path, "notes").generation.number == 2


def test_a_generation_whose_folder_cannot_be_made_durable_goes_again(
    store: MemoryVectorStore, tmp_path: Path
) -> None:
    class NoFsync(Disk):
        def sync_folder(self, path: Path) -> None:
            if (path / "g000001-t1").exists():
                raise StorageFailed("no fsync of the folder")
            super().sync_folder(path)

    with pytest.raises(StorageFailed, match="no fsync"):
        build(store, tmp_path, disk=NoFsync())
    assert [path.name for path in (tmp_path / "notes").iterdir() if path.is_dir()] == []
