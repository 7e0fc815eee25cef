"""Re-hash every file of a generation against its manifest and say what rotted: file, block and list.

Bytes first: a file whose sha256 is right is right. For one that is wrong the marks (eight digest bytes a
list) tell which lists are hit; a damaged marks file is named itself and then localises nothing. The scrub
repairs nothing: a generation is immutable, the remedy is a rebuild.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.shards.blocks import HEADER_BYTES, file_sha256, map_array
from fabric_pipelines.shards.content import mark_part
from fabric_pipelines.shards.difference import Difference
from fabric_pipelines.shards.disk import reading
from fabric_pipelines.shards.generation import Generation
from fabric_pipelines.shards.manifest import FileEntry
from fabric_pipelines.shards.shard import open_generation
from fabric_pipelines.shards.store import VectorStore


@dataclass(frozen=True, slots=True)
class ScrubReport:
    generation: int
    files: int
    bytes: int
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return not self.differences


def scrub(
    db: Database | VectorStore, root: Path, name: str, number: int | None = None
) -> ScrubReport:
    """Check one published generation (default: the current one) to the last byte."""
    generation = open_generation(db, root, name, number)
    with reading(generation.folder):
        return ScrubReport(
            generation.number,
            len(generation.manifest.files),
            sum(entry.bytes for entry in generation.manifest.files),
            tuple(damaged_files(generation)),
        )


def damaged_files(generation: Generation) -> Iterator[Difference]:
    """One difference a damaged file."""
    for entry in generation.manifest.files:
        found = damage_of(generation, entry)
        if found is not None:
            yield found


def damage_of(generation: Generation, entry: FileEntry) -> Difference | None:
    """What is wrong with one file, which is hashed now; None where nothing is."""
    path = generation.folder / entry.path
    if not path.is_file():
        return Difference(entry.path, entry.sha256, "missing", f"{entry.label} is missing")
    try:
        found = file_sha256(path)
        if found == entry.sha256:
            return None
        where = _where(generation, entry, path)
    except OSError as fault:  # a sector that the disk cannot read any more
        said = f"{entry.label} of generation {generation.number} cannot be read: {fault.strerror}"
        return Difference(entry.path, entry.sha256, "unreadable", said)
    return Difference(
        entry.path,
        entry.sha256,
        found,
        f"{entry.label} of generation {generation.number} is damaged {where}: its bytes have "
        f"sha256 {found}",
    )


def require_whole(
    generation: Generation, beat: Callable[[], None] = lambda: None
) -> frozenset[str]:
    """Paths of the files of `generation`, each hashed once, now: for whoever makes something of what they say.
    CorruptionFound names the first that is gone or damaged. `beat` is called between files."""
    entries = {entry.path: entry for entry in generation.manifest.files}
    for entry in entries.values():
        beat()
        damage = damage_of(generation, entry)
        if damage is not None:
            raise CorruptionFound(
                f"a file is gone or damaged: {damage}; "
                f"`fabric receipt refresh {generation.name} --anew` builds the shard from its source"
            )
    return frozenset(entries)


def _where(generation: Generation, entry: FileEntry, path: Path) -> str:
    size = path.stat().st_size
    if size != entry.bytes:
        return f"(it has {size} bytes, not {entry.bytes})"
    if entry.role not in ("vectors", "ids"):
        return "somewhere"
    lists = _damaged_lists(generation, entry, path)
    if lists is None:
        return "somewhere (the marks that would tell the list are damaged too)"
    if not lists:
        return "in its header"
    return f"in list{'s' if len(lists) > 1 else ''} {', '.join(map(str, lists))}"


def _damaged_lists(generation: Generation, entry: FileEntry, path: Path) -> list[int] | None:
    marks = _marks(generation)
    if marks is None:
        return None
    manifest = generation.manifest
    dtype, shape = ("<i8", (-1,)) if entry.role == "ids" else (manifest.dtype, (-1, manifest.dim))
    rows = np.frombuffer(path.read_bytes(), dtype, offset=HEADER_BYTES).reshape(shape)
    side = ("vectors", "ids").index(entry.role)
    offsets = manifest.offsets()
    start = offsets[entry.first_list]
    return [
        number
        for number in range(entry.first_list, entry.first_list + entry.lists)
        if mark_part(rows[offsets[number] - start : offsets[number + 1] - start])
        != int(marks[number, side])
    ]


def _marks(generation: Generation) -> npt.NDArray[np.uint64] | None:
    entry = generation.manifest.of_role("marks")[0]
    path = generation.folder / entry.path
    try:
        if file_sha256(path) != entry.sha256:
            return None
        return map_array(path, "<u8", (entry.lists, 2))
    except CorruptionFound:
        return None
