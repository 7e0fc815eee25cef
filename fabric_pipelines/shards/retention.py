"""Which generations of a shard keep their bytes, and how the others go: the row first, then the folder.

    the lease                 publication and pruning of one shard take turns
    the row says pruned       under the lock that publishing takes; a pin, a card or a child that needs it refuses
    folder -> .gN-tT.pruned   while no reader has it; then its files

A kill between any two steps leaves either a generation that is whole and readable, or one whose row says what became of
it and whose rest the next holder sweeps away. Blocks are hard links: one that another generation has loses a name, not its
bytes. The policy is small: the newest, those that are pinned or loaded on a card, and what these need to be
rebuilt and judged. This module refuses to guess: what it cannot lock or read it keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.vectors import GenerationRow
from fabric_pipelines.errors import UsageError
from fabric_pipelines.shards.building import holding
from fabric_pipelines.shards.disk import DISK, Disk, unread
from fabric_pipelines.shards.generation import hide, shard_folder, sweep, sweep_scratch
from fabric_pipelines.shards.judging import DECISIONS_FILE
from fabric_pipelines.shards.manifest import folder_name
from fabric_pipelines.shards.store import VectorStore, store_of

OPEN = "a reader has it open"
ELSEWHERE = "its folder is not on this machine"
NEEDED = "it was pinned or loaded meanwhile"


@dataclass(frozen=True, slots=True)
class KeptGeneration:
    generation: int
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrunedGeneration:
    """bytes: of its files, those that other generations link included."""

    generation: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Pruned:
    """bytes_freed: of files that no kept generation links. swept: names of folders that earlier holders and killed rebuilds left."""

    shard: str
    dry_run: bool
    kept: tuple[KeptGeneration, ...]
    pruned: tuple[PrunedGeneration, ...]
    bytes_freed: int
    swept: tuple[str, ...] = ()


def prune(
    db: Database | VectorStore,
    root: Path,
    name: str,
    *,
    keep: int,
    dry_run: bool = False,
    disk: Disk = DISK,
) -> Pruned:
    """Remove the bytes of all but the `keep` newest generations of shard `name` and those that are pinned, on a card, open or
    needed by one of these. Raises UsageError for a shard that was never built, AlreadyRunning while somebody builds,
    FencingLost, StorageFailed."""
    assert keep >= 1
    store = store_of(db)
    work = _Pruning(store, root, name, keep)  # before a folder is made for a name that nobody knows
    if dry_run:
        return work.foreseen()
    with holding(store, root, name, disk) as lease:
        swept = sweep(disk, store, shard_folder(root, name), lease) + sweep_scratch(disk, root)
        work = _Pruning(store, root, name, keep)
        kept, found = dict(work.why()), {}
        hidden: list[Path] = []
        for row in work.rows:
            if row.pruned or row.generation in kept:
                continue
            folder = work.folder(row)
            if not folder.is_dir():
                kept[row.generation] = (ELSEWHERE,)
                continue
            with unread(folder) as free:
                if not free:
                    kept[row.generation] = (OPEN,)
                    continue
                if not store.prune_generation(lease, generation=row.generation):
                    kept[row.generation] = (NEEDED,)
                    continue
                found[row.generation] = _files(folder)
                hidden.append(hide(disk, folder))
        if hidden:
            disk.sync_folder(shard_folder(root, name))
        for folder in hidden:
            disk.remove_folder(folder)
        return work.report(False, kept, found, tuple(swept))


def pin(db: Database | VectorStore, name: str, generation: int, reason: str) -> tuple[str, ...]:
    """Keep `generation` of shard `name`, and its parent where it is an increment, until it is unpinned. Returns sentences on
    what a rebuild will lack. UsageError when there is no such generation, or no bytes of it any more."""
    store = store_of(db)
    if not store.pin_generation(name, generation, reason):
        row = store.current_generation(name, generation)
        gone = row.pruned if row else f"there is no generation {generation} of shard {name!r}"
        raise UsageError(f"{gone}; it cannot be pinned")
    row = store.current_generation(name, generation)
    assert row is not None
    parent = _parent(row)
    held = store.current_generation(name, parent) if parent is not None else None
    return (f"{held.pruned}: a rebuild builds in full",) if held and held.pruned else ()


def unpin(db: Database | VectorStore, name: str, generation: int) -> None:
    """UsageError when it has no pin."""
    if not store_of(db).unpin_generation(name, generation):
        raise UsageError(f"generation {generation} of shard {name!r} has no pin")


class _Pruning:
    """What is there of one shard, read once."""

    def __init__(self, store: VectorStore, root: Path, name: str, keep: int) -> None:
        self._store, self._root, self._name, self._keep = store, root, name, keep
        self.rows = store.published(name)
        if not self.rows:
            raise UsageError(f"there is no generation of shard {name!r}; build it first")

    def folder(self, row: GenerationRow) -> Path:
        return shard_folder(self._root, self._name) / folder_name(row.generation, row.token)

    def why(self) -> dict[int, tuple[str, ...]]:
        """The reasons to keep a generation, by its number."""
        reasons: dict[int, list[str]] = {}
        there = {row.generation: row for row in self.rows if not row.pruned}
        for number, reason in self._reasons(there):
            if number in there and reason not in reasons.setdefault(number, []):
                reasons[number].append(reason)
        for number in sorted(reasons):  # what those need to be compared with; a base has no base
            base = _increment(there[number]).get("base_generation")
            if base in there and base != number:
                reasons.setdefault(base, []).append(f"the lists of {number} were cut in it")
        return {number: tuple(found) for number, found in sorted(reasons.items())}

    def _reasons(self, there: Mapping[int, GenerationRow]) -> Iterator[tuple[int, str]]:
        current = max(there)
        for number in sorted(there)[-self._keep :]:
            yield number, "current" if number == current else "among the newest"
        for number, row in there.items():
            if row.pinned_at:
                yield number, f"pinned: {row.pin_reason}"
            if row.pinned_at or number == current:
                yield _parent(row) or -1, f"{number} was laid over it"
        for card in self._store.devices(self._name):
            yield card.generation or -1, f"loaded on {card.holder}"
        judged = (n for n, row in there.items() if (self.folder(row) / DECISIONS_FILE).is_file())
        yield max(judged, default=-1), "the last decisions are kept there"

    def foreseen(self) -> Pruned:
        """The answer of a dry run: readers are asked as well, rows are not."""
        kept, found = dict(self.why()), {}
        for row in self.rows:
            folder = self.folder(row)
            if row.pruned or row.generation in kept:
                continue
            if not folder.is_dir():
                kept[row.generation] = (ELSEWHERE,)
                continue
            with unread(folder) as free:
                if free:
                    found[row.generation] = _files(folder)
                else:
                    kept[row.generation] = (OPEN,)
        return self.report(True, kept, found, ())

    def report(
        self,
        dry_run: bool,
        kept: Mapping[int, tuple[str, ...]],
        found: Mapping[int, list[_File]],
        swept: tuple[str, ...],
    ) -> Pruned:
        return Pruned(
            self._name,
            dry_run,
            tuple(KeptGeneration(number, why) for number, why in sorted(kept.items())),
            tuple(
                PrunedGeneration(number, sum(file.bytes for file in files))
                for number, files in sorted(found.items())
            ),
            _freed([file for files in found.values() for file in files]),
            swept,
        )


@dataclass(frozen=True, slots=True)
class _File:
    inode: int
    links: int
    bytes: int


def _files(folder: Path) -> list[_File]:
    found = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return [_File(each.st_ino, each.st_nlink, each.st_size) for each in found]


def _freed(files: list[_File]) -> int:
    """Bytes of the files all of whose names are among `files`."""
    seen = Counter(file.inode for file in files)
    known = {file.inode: file for file in files}
    return sum(file.bytes for file in known.values() if seen[file.inode] == file.links)


def _increment(row: GenerationRow) -> Mapping[str, int]:
    return row.manifest.get("increment") or {}


def _parent(row: GenerationRow) -> int | None:
    return _increment(row).get("parent_generation")
