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


def build(store: MemoryVectorStore, root: Path) -> shards.Generation:
    return shards.build(store, root, "notes", lists=2, seed=0, metric="l2", recipe={})


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
