"""The file operations a journal needs, as a seam: the real ones here, a simulated disk in `testing`.

Everything that can lose data goes through here, one method a system call, so that a simulation can record
them and enumerate what a crash may leave. Errors are OSError; what they mean is the caller's business.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from fabric_pipelines.folders import FolderOps, OsFolders

T = TypeVar("T")
IOV_MAX = 1024  # Linux UIO_MAXIOV; a longer vector is EINVAL


@dataclass(frozen=True, slots=True)
class FileStatus:
    """`links`: how many names the file has; 0 once it was deleted."""

    device: int
    inode: int
    links: int
    size: int


class FileOps(FolderOps, Protocol):
    def names(self, folder: Path) -> list[str]: ...
    def read_bytes(self, path: Path) -> bytes: ...
    def lock(self, path: Path) -> int:
        """Exclusive lock on `path`, created if absent; BlockingIOError if another holds it."""

    def open(self, path: Path, *, create: bool = False) -> int: ...
    def close(self, fd: int) -> None: ...
    def size(self, fd: int) -> int: ...
    def status(self, fd: int) -> FileStatus: ...
    def status_of(self, path: Path) -> FileStatus | None:
        """Of whatever has that name now; None if nothing has."""

    def fallocate(self, fd: int, size: int) -> None: ...
    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int: ...
    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int: ...
    def fdatasync(self, fd: int) -> None: ...
    def fsync(self, fd: int) -> None: ...
    def rename(self, source: Path, target: Path) -> None: ...
    def unlink(self, path: Path) -> None: ...
    def free_bytes(self, folder: Path) -> int:
        """What the file system of `folder` has for us."""

    def forget_cache(self, fd: int) -> None:
        """Drop clean cached pages, so that the next read comes from the device: after a failed fsync the
        cache may hold what the device never got (Rebello et al., ATC'20)."""

    def map(self, fd: int, size: int) -> memoryview:
        """Read-only mapping; the file may not shrink while it lives."""

    def unmap(self, view: memoryview) -> memoryview | None:
        """End a mapping; while anybody still looks at it, it stays, and comes back to be ended later."""


class _Reserve:
    """Descriptors held back for the journal: connections to a busy broker may use up all the others, and a segment that
    cannot be opened is the end of it. A descriptor above the process's soft limit is one that nobody else can take, so
    the limit is lifted to the hard one for as long as an open lasts; for want of a difference a few are kept open."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: list[int] = []
        self._lock = threading.Lock()

    def call(self, opening: Callable[[], T]) -> T:
        """`opening` needs a descriptor; it is tried again from above the limit, then with one of the reserve."""
        while True:
            try:
                opened = opening()
            except OSError as fault:
                if fault.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
            else:
                self._fill()
                return opened
            try:
                with self._lock, _limit_lifted():
                    return opening()
            except OSError as fault:
                if fault.errno not in (errno.EMFILE, errno.ENFILE) or not self._held:
                    raise
                os.close(self._held.pop())

    def _fill(self) -> None:
        try:
            while len(self._held) < self._size:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return  # none to be had now: at the next call


@contextmanager
def _limit_lifted() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


_reserve = _Reserve(8)


class OsFileOps(OsFolders):
    """Linux."""

    def names(self, folder: Path) -> list[str]:
        return _reserve.call(lambda: sorted(entry.name for entry in folder.iterdir()))

    def read_bytes(self, path: Path) -> bytes:
        return _reserve.call(path.read_bytes)

    def lock(self, path: Path) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            os.close(fd)
            raise
        return fd

    def open(self, path: Path, *, create: bool = False) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        return _reserve.call(lambda: os.open(path, flags, 0o600))

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def status(self, fd: int) -> FileStatus:
        found = os.fstat(fd)
        return FileStatus(found.st_dev, found.st_ino, found.st_nlink, found.st_size)

    def status_of(self, path: Path) -> FileStatus | None:
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return FileStatus(found.st_dev, found.st_ino, found.st_nlink, found.st_size)

    def fallocate(self, fd: int, size: int) -> None:
        os.posix_fallocate(fd, 0, size)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def _opened(self, folder: Path) -> int:
        opening = super()._opened
        return _reserve.call(lambda: opening(folder))

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def free_bytes(self, folder: Path) -> int:
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    def forget_cache(self, fd: int) -> None:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def map(self, fd: int, size: int) -> memoryview:
        kind = {"flags": mmap.MAP_SHARED, "prot": mmap.PROT_READ}
        return memoryview(_reserve.call(lambda: mmap.mmap(fd, size, **kind)))  # it duplicates `fd`

    def unmap(self, view: memoryview) -> memoryview | None:
        mapping = view.obj
        assert isinstance(mapping, mmap.mmap)
        view.release()
        try:
            mapping.close()
        except BufferError:  # a lease or a completion cut from it is still on its way out
            return memoryview(mapping)
        return None


def write_all(ops: FileOps, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
    """Write every buffer from `offset` on, in vectors of IOV_MAX, going on after short writes; returns the
    end offset."""
    pending = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    at = 0
    while at < len(pending):
        written = ops.pwritev(fd, pending[at : at + IOV_MAX], offset)
        if written <= 0:
            raise OSError(5, f"pwritev wrote {written} bytes")
        offset += written
        while at < len(pending) and written >= len(pending[at]):
            written -= len(pending[at])
            at += 1
        if written:
            pending[at] = pending[at][written:]
    return offset


def read_exactly(ops: FileOps, fd: int, length: int, offset: int) -> memoryview:
    """`length` bytes at `offset` in fresh memory aligned to 64 bytes, read-only; shorter only at end of file."""
    buffer = aligned_buffer(length)
    filled = 0
    while filled < length:
        count = ops.preadv(fd, buffer[filled:], offset + filled)
        if count == 0:
            break
        filled += count
    return buffer[:filled].toreadonly()


def aligned_buffer(length: int) -> memoryview:
    memory = np.empty(length + 63, np.uint8)
    start = -memory.ctypes.data % 64
    return memory.data[start : start + length]
