"""What a running process waits for, told where others see it: one small file a process, beside the home's sockets.

The file is made, and its one block reserved, when the process starts: a full disk, which is among the things waited
for, must not keep it from being told. Its writer holds a lock on it for life, so what a killed process left is known for
that and is swept by the next one. A checksum tells a whole block from one that was read while it was written.
Files, because whoever asks must get an answer while broker or database are away. Keeps no history.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from fabric_pipelines.given import value_of

BLOCK_BYTES = 4096
REASON_CHARACTERS_MAX = 600  # six bytes each at worst, as JSON writes them
READS_MAX = 3
OPENS_MAX = 10


@dataclass(frozen=True, slots=True)
class Wait:
    """name: who waits; reason: for what, as it said itself; since_s: Unix time at which the wait began, through
    whatever reasons it had since."""

    name: str
    pid: int
    reason: str
    since_s: float


class Waits:
    """The file of one process, written by it alone. `with Waits(folder, "completion") as waits: waits.tell(...)`."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        say: Callable[[str], None] = lambda line: None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        file = re.sub(r"[^A-Za-z0-9@._-]", "_", name)
        self._path = folder / f"{file}.{os.getpid()}.wait"
        self._name, self._say, self._now_s = name, say, now_s
        self._fd: int | None = None
        self._told = ""
        self._since_s = 0.0
        self._failed = False

    def __enter__(self) -> Waits:
        try:
            self._path.parent.mkdir(
                exist_ok=True
            )  # not its parents: a home that is gone stays gone
            _sweep(self._path.parent)
            self._fd = _open_locked(self._path)
            self._write()
        except OSError as fault:
            self._cannot(fault)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):  # swept by the next process, if it stays
                self._path.unlink(missing_ok=True)
            os.close(fd)

    def tell(self, reason: str) -> None:
        """`reason`: what keeps this process from its work, "" while nothing does. Cheap when it is the same as before."""
        if reason == self._told:
            return
        if reason and not self._told:
            self._since_s = self._now_s()
        self._told = reason
        try:
            self._write()
        except OSError as fault:
            self._cannot(fault)

    def _write(self) -> None:
        if self._fd is None:
            return
        wait = Wait(self._name, os.getpid(), self._told[:REASON_CHARACTERS_MAX], self._since_s)
        # a path may hold what is no character: written as JSON escapes it
        text = json.dumps(asdict(wait), ensure_ascii=False).encode(errors="backslashreplace")
        block = b"%08x %s" % (zlib.crc32(text), text)
        assert len(block) <= BLOCK_BYTES
        os.pwrite(self._fd, block.ljust(BLOCK_BYTES), 0)

    def _cannot(self, fault: OSError) -> None:
        if not self._failed:
            self._say(f"{self._path} cannot be written ({fault.strerror}); the work goes on")
        self._failed = True


def read(folder: Path) -> list[Wait]:
    """Whoever waits at this moment, by name; of processes that live."""
    found = [wait for path in sorted(folder.glob("*.wait")) if (wait := _read(path)) is not None]
    return sorted((wait for wait in found if wait.reason), key=lambda wait: (wait.name, wait.pid))


def _read(path: Path) -> Wait | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # it ended since it was listed
    try:
        if _lock(fd, fcntl.LOCK_SH):
            return None  # nobody holds it: of a process that was killed
        for _ in range(READS_MAX):
            crc, _, text = os.pread(fd, BLOCK_BYTES, 0).rstrip(b"\0 ").partition(b" ")
            if crc == b"%08x" % zlib.crc32(text):
                return value_of(
                    Wait,
                    text,
                    str(path),
                    what="note of a wait",
                    remedy="start the process that wrote it again",
                )
        return None
    finally:
        os.close(fd)


def _open_locked(path: Path) -> int:
    """The file with its lock. Between the two a sweep may take it for a dead one's: then it is made once more."""
    for _ in range(OPENS_MAX):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if _lock(fd, fcntl.LOCK_EX) and _is(path, fd):
            return fd
        os.close(fd)
    raise OSError(None, "somebody else holds it", str(path))


def _sweep(folder: Path) -> None:
    for path in folder.glob("*.wait"):
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _lock(fd, fcntl.LOCK_EX):
                    path.unlink()
            finally:
                os.close(fd)


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
