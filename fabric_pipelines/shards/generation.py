"""Write one generation as an immutable folder, and remove what never became one.

    .g000042-t7.tmp/  files written and fsynced, folders fsynced  ->  renamed to g000042-t7/, parent fsynced
    then the row in Postgres, under the fencing token, says that it is current.

A crash between any two steps leaves the older generation whole and current, and an orphan that the sweep of
the next holder removes. A block whose bytes the previous generation already has is hard-linked, after its
old file was hashed: rot is not inherited. This module refuses to change or delete what is published.
"""

from __future__ import annotations

import re
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.dataplane.vectors import GenerationRow, ShardLease
from fabric_pipelines.errors import CorruptionFound, StorageFailed, UsageError
from fabric_pipelines.shards.blocks import Block, file_sha256
from fabric_pipelines.shards.disk import Disk, unread
from fabric_pipelines.shards.manifest import (
    FILE_NAME,
    NAME_PATTERN,
    FileEntry,
    ShardManifest,
    folder_name,
)
from fabric_pipelines.shards.store import VectorStore

SCRATCH = ".rebuild-"
SCRATCH_GRACE_S = 60.0
_FOLDER_PATTERN = re.compile(r"g(\d{6,})-t(\d+)")
_TEMP_PATTERN = re.compile(r"\.g\d{6,}-t\d+\.(?:tmp|pruned)")


@dataclass(frozen=True, slots=True)
class Generation:
    """A published generation: `folder` holds what `manifest` lists. `linked` files came from the one before."""

    folder: Path
    manifest: ShardManifest
    manifest_sha256: str
    linked: int = 0

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def number(self) -> int:
        return self.manifest.generation

    @property
    def token(self) -> int:
        return self.manifest.token


def shard_folder(root: Path, name: str) -> Path:
    """Raises UsageError for a name that is not one plain folder name."""
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"shard name {name!r} cannot be a folder name; use letters, digits, '.', '_' and '-'"
        )
    return root / name


def write_generation(
    disk: Disk,
    folder: Path,
    manifest: ShardManifest,
    blocks: Mapping[str, Block | FileEntry],
    previous: Path | None,
    hashed: Container[str] = (),
) -> tuple[Path, int]:
    """Write everything `manifest` lists below the shard's `folder`; returns the generation's folder and how
    many files were linked. `blocks` is by path; one that is only an entry must be in `previous`, unharmed
    (CorruptionFound). hashed: paths in `previous` that the caller found unharmed just now. Nothing is current until
    the caller publishes it; of an attempt that fails nothing is left, so that a full disk is no fuller."""
    final = folder / manifest.folder_name
    temp = folder / f".{manifest.folder_name}.tmp"
    linked = 0
    with _gone_on_failure(disk, temp, final):
        disk.make_folder(temp)
        for path, block in blocks.items():
            disk.make_folder((temp / path).parent)
            old = previous / path if previous else None
            if old and _is_block(old, block, path in hashed):
                disk.link_file(old, temp / path)
                linked += 1
            elif isinstance(block, FileEntry):
                raise CorruptionFound(
                    f"{block.label} of the generation before is gone or damaged: build the shard anew"
                )
            else:
                disk.write_file(temp / path, block.content)
        disk.write_file(temp / FILE_NAME, manifest.to_bytes())
        for inner in sorted({(temp / path).parent for path in blocks}):
            disk.sync_folder(inner)
        disk.sync_folder(temp)
        disk.rename(temp, final)
        disk.sync_folder(folder)
    return final, linked


@contextmanager
def _gone_on_failure(disk: Disk, *folders: Path) -> Iterator[None]:
    """Of `folders`, which carry our own token, so that nobody else writes or reads there."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        for folder in folders:
            with suppress(StorageFailed):  # the next holder of the lease sweeps it
                if folder.is_dir():
                    disk.remove_folder(folder)
        raise


def sweep(disk: Disk, store: VectorStore, folder: Path, lease: ShardLease) -> list[str]:
    """Remove temp folders, generations that were never published and those that were pruned and that nobody reads;
    returns their names.

    Only the holder of the newest token may: whoever wrote them holds an older one and can no longer publish."""
    removed = []
    for path in sorted(folder.iterdir()):
        named = _FOLDER_PATTERN.fullmatch(path.name)
        if named:
            number, token = int(named[1]), int(named[2])
            row = store.current_generation(lease.name, number)
            if row is not None and row.token == token:
                if not row.pruned:
                    continue
                with unread(path) as free:
                    hidden = hide(disk, path) if free else None
                if hidden is not None:
                    disk.remove_folder(hidden)
                    removed.append(path.name)
                continue
            # of our own token is what a database restored from an older state has forgotten: we wrote nothing yet
            if token > lease.token:
                continue
        elif not _TEMP_PATTERN.fullmatch(path.name):
            continue
        disk.remove_folder(path)
        removed.append(path.name)
    return removed


def sweep_scratch(disk: Disk, root: Path, pattern: str = f"{SCRATCH}*") -> list[str]:
    """Remove what killed rebuilds (or fetches, of another pattern) left in `root`; returns the names. One that is at work
    holds a lock on its folder, and is not yet looked at in its first minute, before it has it."""
    removed = []
    for path in sorted(root.glob(pattern)):
        with unread(path) as free:
            try:
                age_s = time.time() - path.stat().st_mtime
            except FileNotFoundError:  # whoever made it has just removed it
                continue
            if free and age_s >= SCRATCH_GRACE_S:
                disk.remove_folder(path)
                removed.append(path.name)
    return removed


def hide(disk: Disk, folder: Path) -> Path:
    """Put a pruned generation, which the caller has locked, out of the readers' way; returns what is to be removed."""
    hidden = folder.with_name(f".{folder.name}.pruned")
    disk.rename(folder, hidden)
    return hidden


def published_folder(root: Path, row: GenerationRow) -> Path:
    """Where the generation that `row` speaks of must lie. CorruptionFound when it does not, UsageError when it was
    pruned."""
    if row.pruned:
        raise UsageError(f"{row.pruned}; open a newer one")
    folder = shard_folder(root, row.name) / folder_name(row.generation, row.token)
    if not folder.is_dir():
        raise CorruptionFound(
            f"{folder} is missing, though the database says generation {row.generation} of shard "
            f"{row.name!r} is published: bring the folder back, or build the shard anew"
        )
    return folder


def _is_block(path: Path, block: Block | FileEntry, hashed: bool) -> bool:
    size = block.bytes if isinstance(block, FileEntry) else len(block.content)
    try:
        same_size = path.stat().st_size == size
    except FileNotFoundError:
        return False
    return same_size and (hashed or file_sha256(path) == block.sha256)
