"""What an error of the disk means for a journal: one sentence that names the folder and the remedy."""

from __future__ import annotations

import errno
from pathlib import Path

from fabric_pipelines.errors import AlreadyRunning, StorageFailed
from fabric_pipelines.folders import make_folders
from fabric_pipelines.journal.files import FileOps

LOCK = "lock"
FULL = (errno.ENOSPC, errno.EDQUOT)
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def take_lock(ops: FileOps, folder: Path) -> int:
    """The lock of a journal's folder, which is made if need be. AlreadyRunning if another process has it."""
    make_folders(folder, ops)
    try:
        return ops.lock(folder / LOCK)
    except BlockingIOError:
        holder = ops.read_bytes(folder / LOCK).decode(errors="replace").strip() or "unknown"
        raise AlreadyRunning(
            f"a broker already runs on journal {folder} (pid {holder}): stop it with `fabric down`, or set "
            "FABRIC_HOME to another folder"
        ) from None


def journal_failed(folder: Path, fault: OSError, doing: str) -> StorageFailed:
    if fault.errno in FULL:
        return StorageFailed(
            f"the disk of journal {folder} is full ({doing}): free some space and try again"
        )
    if fault.errno in READ_ONLY:
        return StorageFailed(
            f"journal {folder} cannot be written ({fault.strerror}): make the folder writable, or set "
            "FABRIC_HOME to another one"
        )
    return StorageFailed(
        f"journal {folder} stopped while {doing} ({fault.strerror or fault}): check the disk, then start the "
        "broker again"
    )


def close_all(ops: FileOps, fds: dict[Path, int]) -> None:
    while fds:
        _, fd = fds.popitem()
        ops.close(fd)
