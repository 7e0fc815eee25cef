"""Durable file steps of a generation: each one is finished on disk, or raises one sentence.

A rim of single steps, so that a test can end the world between any two of them. Block files are created,
never overwritten; what is written is fsynced before the call returns, and folders are fsynced by name. An OSError
becomes a StorageFailed that names the path and what to do; nothing is retried, since after a failed
fsync the page cache may pretend.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fabric_pipelines.errors import AlreadyRunning, CorruptionFound, StorageFailed

REMEDIES = {
    errno.ENOSPC: "the disk is full: free space, then build again",
    errno.EDQUOT: "the disk quota is used up: free space, then build again",
    errno.EFBIG: "the file would pass the size limit of this process (ulimit -f)",
    errno.EROFS: "the file system is read-only: point FABRIC_HOME at a writable one",
    errno.EACCES: "this user may not write there: check the folder's owner and mode",
    errno.EPERM: "this user may not write there: check the folder's owner and mode",
    errno.EXDEV: "the shard folder spans two file systems: keep it on one",
    errno.ENOTDIR: "a file stands where a folder is needed: move it away",
}


class Disk:
    def make_folder(self, path: Path) -> None:
        with _reported("create folder", path):
            path.mkdir(parents=True, exist_ok=True)

    def write_file(self, path: Path, content: bytes | memoryview) -> None:
        """Create `path` with exactly `content`, durable on return; nothing of it stays where that fails."""
        with _reported("write", path):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                rest = memoryview(content).cast("B")
                while rest:
                    rest = rest[os.write(handle, rest) :]
                os.fsync(handle)
                written = os.fstat(handle).st_size
            except OSError:
                with suppress(OSError):
                    path.unlink()
                raise
            finally:
                os.close(handle)
            assert written == memoryview(content).nbytes, f"{path} has {written} bytes"

    def replace_file(self, path: Path, content: bytes) -> None:
        """`path` holds `content`, durable on return; a reader sees the old or the new bytes, never a mix."""
        temp = path.with_name(f".{path.name}.tmp")
        with _reported("remove", temp):
            temp.unlink(missing_ok=True)
        self.write_file(temp, content)
        self.rename(temp, path)
        self.sync_folder(path.parent)

    def link_file(self, old: Path, new: Path) -> None:
        """The same bytes under a second name; both are immutable."""
        with _reported("link", new):
            os.link(old, new)

    def rename(self, old: Path, new: Path) -> None:
        with _reported("rename to", new):
            old.replace(new)

    def sync_file(self, path: Path) -> None:
        """What another writer put there is durable on return."""
        with _reported("fsync", path):
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def sync_folder(self, path: Path) -> None:
        with _reported("fsync folder", path):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def remove_folder(self, path: Path) -> None:
        with _reported("remove folder", path):
            shutil.rmtree(path)


@contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """The lock file `path`, for the life of the block or of this process. AlreadyRunning with the sentence `busy` while
    another one has it."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as fault:
        raise StorageFailed(
            f"cannot lock {path}: {fault.strerror}; shards need a folder that this user may write"
        ) from fault
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as fault:
            raise AlreadyRunning(busy) from fault
        yield
    finally:
        os.close(handle)


def opened_for_reading(folder: Path) -> int:
    """A handle that keeps `folder` from being pruned until it is closed, or this process ends. CorruptionFound when the
    folder is not there (any more)."""
    gone = (
        f"{folder} is not there, or is being pruned at this moment: open the current generation; if this is it, "
        "bring the folder back or build the shard anew"
    )
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as fault:
        raise CorruptionFound(gone) from fault
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        there = folder.exists() and os.path.samestat(folder.stat(), os.fstat(handle))
    except BlockingIOError:
        there = False
    except OSError:
        there = True  # no locks on this file system: then nothing is pruned on it either
    if not there:
        os.close(handle)
        raise CorruptionFound(gone)
    return handle


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """`folder` is not pruned for the life of the block."""
    handle = opened_for_reading(folder)
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def unread(folder: Path) -> Iterator[bool]:
    """Whether `folder` is there and nobody reads in it; if so, nobody begins to for the life of the block. Raises
    StorageFailed."""
    with _reported("lock", folder):
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            handle = -1
    if handle < 0:
        yield False
        return
    try:
        with _reported("lock", folder):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free = True
            except BlockingIOError:
                free = False
        yield free
    finally:
        os.close(handle)


@contextmanager
def _reported(step: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        remedy = REMEDIES.get(fault.errno or 0, "look at the disk before building again")
        raise StorageFailed(f"cannot {step} {path}: {fault.strerror or fault}; {remedy}") from fault


DISK = Disk()
