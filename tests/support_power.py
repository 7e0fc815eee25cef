"""A disk whose power can be cut: what no fsync has covered is gone afterwards, as the worst file system has it.

A name is there after the cut only if its folder was synced since; a file's bytes only if the file was. `cut` leaves
the real folder as the disk would be found.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.shards.disk import Disk

Names = dict[str, int]


class PowerDisk(Disk):
    """Of everything below `root`, all of it durable at first. Ends the world, by `ended`, before step `crash_at`."""

    STEPS = ("make_folder", "write_file", "link_file", "rename", "sync_folder", "remove_folder")

    def __init__(
        self, root: Path, patch: pytest.MonkeyPatch, ended: type[BaseException], crash_at: int = -1
    ) -> None:
        self.root, self.steps = root, 0
        self._ended, self._crash_at = ended, crash_at
        self._names: dict[int, Names] = {}  # of a folder, by its inode
        self._bytes: dict[int, bytes] = {}
        self._folders: set[int] = set()
        for folder, _, files in os.walk(root):
            self._keep_names(Path(folder))
            for name in files:
                self._keep_bytes(Path(folder, name))
        sync = os.fsync

        def fsync(handle: int) -> None:
            sync(handle)
            path = Path(f"/proc/self/fd/{handle}").readlink()
            if path.is_relative_to(root):
                self._keep_names(path) if path.is_dir() else self._keep_bytes(path)

        patch.setattr(os, "fsync", fsync)

    def __getattribute__(self, name: str) -> Any:
        step = super().__getattribute__(name)
        if name not in PowerDisk.STEPS:
            return step

        def counted(*paths: Any) -> Any:
            if self.steps == self._crash_at:
                raise self._ended
            self.steps += 1
            return step(*paths)

        return counted

    def cut(self) -> None:
        """The machine loses power now, and comes back."""
        top = self.root.stat().st_ino
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._restore(self.root, top)

    def _restore(self, folder: Path, inode: int) -> None:
        folder.mkdir(exist_ok=True)
        for name, child in self._names.get(inode, {}).items():
            if child in self._folders:
                self._restore(folder / name, child)
            else:
                (folder / name).write_bytes(self._bytes.get(child, b""))

    def _keep_names(self, folder: Path) -> None:
        entries = list(os.scandir(folder))
        self._names[folder.stat().st_ino] = {entry.name: entry.inode() for entry in entries}
        self._folders |= {entry.inode() for entry in entries if entry.is_dir()}

    def _keep_bytes(self, path: Path) -> None:
        self._bytes[path.stat().st_ino] = path.read_bytes()
