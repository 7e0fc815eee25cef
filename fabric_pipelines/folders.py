"""Folders that outlive a power cut, together with the way that leads to them.

A folder's name is an entry in its parent, durable only once that parent was synced; a journal whose every byte is
synced is gone with the entry of any folder above it. Who made the levels cannot be asked afterwards: a process killed
between mkdir and fsync leaves them as one that finished would. So every level up to the root of the file system is
synced each time, made now or found.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

BUILDING = ".building-"  # work in progress, and what it replaces for the moment between two renames


class FolderOps(Protocol):
    def make_folder(self, folder: Path, mode: int = 0o777) -> bool:
        """This one level, not yet durable; False if it was there. FileNotFoundError without its parent."""

    def way_to(self, folder: Path) -> list[Path]:
        """The folders whose entries lead to this one, the nearest first, links resolved. Ends at the root of its file
        system: what leads there is a mount, which no sync of an entry keeps or loses."""

    def fsync_folder(self, folder: Path) -> None: ...


class OsFolders:
    """Linux."""

    def make_folder(self, folder: Path, mode: int = 0o777) -> bool:
        try:
            folder.mkdir(mode)
        except FileNotFoundError:
            raise
        except OSError:
            if not folder.is_dir():
                raise
            return False
        return True

    def way_to(self, folder: Path) -> list[Path]:
        way, level = [], folder.resolve()
        while not os.path.ismount(level):
            level = level.parent
            way.append(level)
        return way

    def fsync_folder(self, folder: Path) -> None:
        fd = self._opened(folder)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _opened(self, folder: Path) -> int:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


OS_FOLDERS = OsFolders()


def make_folders(folder: Path, ops: FolderOps = OS_FOLDERS, *, mode: int = 0o777) -> None:
    """Make `folder`, with that mode, and its parents, as far as they are missing, and every level durable. OSError.

    A folder above that we may not open is passed over, unless this call made an entry in it: whoever may write there
    made what is in it, and syncing it is not in our hands.
    """
    made_in = _make(folder, ops, mode)
    for above in ops.way_to(folder):
        try:
            ops.fsync_folder(above)
        except PermissionError:
            if above in made_in:
                raise


def _make(folder: Path, ops: FolderOps, mode: int) -> set[Path]:
    """The folders that got an entry, links resolved."""
    made_in: set[Path] = set()
    try:
        made = ops.make_folder(folder, mode)
    except FileNotFoundError:
        if folder == folder.parent:
            raise
        made_in = _make(folder.parent, ops, 0o777)
        made = ops.make_folder(folder, mode)
    return made_in | set(ops.way_to(folder)[:1]) if made else made_in


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """A new folder beside `target` that takes its place at the end, or vanishes and leaves it. What was there stays until
    then, and whoever has it open keeps its bytes. OSError as the system says it."""
    folder = Path(tempfile.mkdtemp(prefix=BUILDING, dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)
        _take_place(folder, target)
        OS_FOLDERS.fsync_folder(target.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _take_place(folder: Path, target: Path) -> None:
    """By two renames and not by deleting first: half a gigabyte takes a while to go, and a kill meanwhile left nothing."""
    if not target.exists():
        folder.rename(target)
        return
    old = folder.with_name(f"{folder.name}-old")
    target.rename(old)
    try:
        folder.rename(target)
    except OSError:
        old.rename(target)
        raise
    if old.is_symlink() or not old.is_dir():
        old.unlink()
    else:
        shutil.rmtree(old, ignore_errors=True)  # what cannot go now is cleared as any dead build is
