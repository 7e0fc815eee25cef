"""A file that a user named: there whole or not at all, and in nobody's place unless that was asked for.

Written beside under a name of its own, synced, and then linked to the name that was given, which fails where meanwhile
a file has come to be; a rename would replace it without a word. Whoever writes holds a lock on the file beside, so that what
a killed process left is known for that, and the next one that writes into that folder removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fabric_pipelines.errors import StorageFailed, UsageError
from fabric_pipelines.folders import OS_FOLDERS

BESIDE = ".fabric-{}.new"
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
CREATES_MAX = 10


@contextmanager
def beside(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """An empty file to be filled in place; it becomes `path`, durably, when the block ends without an error, and is gone
    when it ends with one. UsageError when `path` is there and is not to be replaced, at the start or at the end;
    StorageFailed when the folder takes no file."""
    require_free(path, replace=replace)
    with _reported(path):
        _sweep(path.parent)
        made, held = _create(path.parent)
    try:
        yield made
        with _reported(path):
            assert made.stat().st_ino == os.fstat(held).st_ino, f"{made} is another file by now"
            os.fsync(held)
            _publish(made, path, replace=replace)
    finally:
        with suppress(OSError):
            made.unlink(missing_ok=True)
        os.close(held)


def require_free(path: Path, *, replace: bool = False) -> None:
    """UsageError when `path` is there and is not to be replaced. Ask before long work."""
    if not replace and os.path.lexists(path):
        raise _taken(path)


def _taken(path: Path) -> UsageError:
    return UsageError(
        f"{path} is there already: name another file, or say that it is to be replaced (--replace; in Python "
        "replace=True)"
    )


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise StorageFailed(f"{path} cannot be written: {fault.strerror or fault}") from fault


def _create(folder: Path) -> tuple[Path, int]:
    """(the file, a descriptor that holds its lock). A sweep may take it before it is locked."""
    for _ in range(CREATES_MAX):
        made = folder / BESIDE.format(secrets.token_hex(8))
        held = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if _locked(held) is not False and made.exists():
            return made, held
        os.close(held)
        made.unlink(missing_ok=True)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def _locked(held: int) -> bool | None:
    """Whether the lock is ours; None on a file system without locks, where nothing is ever swept."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _sweep(folder: Path) -> None:
    for left in folder.glob(BESIDE.format("*")):
        with suppress(OSError):  # another user's, or another one swept it
            held = os.open(left, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _locked(held):
                    left.unlink(missing_ok=True)
            finally:
                os.close(held)


def _publish(made: Path, path: Path, *, replace: bool) -> None:
    try:
        if replace:
            made.replace(path)
        else:
            _link(made, path)
    except FileExistsError as fault:
        raise _taken(path) from fault
    with suppress(PermissionError):  # a folder to write into that we may not read
        OS_FOLDERS.fsync_folder(path.parent)


def _link(made: Path, path: Path) -> None:
    try:
        os.link(made, path)
    except OSError as fault:
        if fault.errno not in NO_LINKS:
            raise
        # then the name is taken by an empty file first, which only this process replaces
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        made.replace(path)
