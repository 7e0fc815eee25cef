"""A copy of a shard's generations in an object store, with a pointer of its own that only moves forward.

    <name>/blocks/<sha256><suffix>     files of all generations, each once, named by their digest
    <name>/g000042-t7.json             the manifest; its digest stands in the pointer
    <name>/CURRENT                     generation, token and manifest digest of the newest copy

Everything is there before the pointer says so, and the pointer is written under a condition: of many writers at one
moment one wins, and a writer with an older fencing token or generation never does. Fetching believes nothing
but digests. The row in Postgres stays the truth for this machine; the copy is for others, and for its loss.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.objects import Objects
from fabric_pipelines.errors import CorruptionFound, FencingLost, StorageFailed
from fabric_pipelines.shards.blocks import file_sha256
from fabric_pipelines.shards.disk import DISK, Disk
from fabric_pipelines.shards.generation import Generation, shard_folder
from fabric_pipelines.shards.manifest import FILE_NAME, FileEntry, ShardManifest, read_manifest
from fabric_pipelines.shards.shard import open_generation
from fabric_pipelines.shards.store import VectorStore

POINTER = "CURRENT"


@dataclass(frozen=True, slots=True)
class Pointer:
    """Ordered by (token, generation): tokens only grow, and generations do under one."""

    generation: int
    token: int
    manifest_sha256: str

    @property
    def rank(self) -> tuple[int, int]:
        return self.token, self.generation


@dataclass(frozen=True, slots=True)
class Copied:
    pointer: Pointer
    files: int
    bytes: int


def push(db: Database | VectorStore, root: Path, name: str, objects: Objects) -> Copied:
    """Copy the current generation of shard `name`; `files` and `bytes` count what was not there already. Raises
    FencingLost when a newer generation is there or another writer switched the pointer meanwhile, Refused by a
    store that ignores conditions."""
    generation = open_generation(db, root, name)
    pointer = Pointer(generation.number, generation.token, generation.manifest_sha256)
    before = _pointer(objects, name)
    if before is not None and before[0] == pointer:
        return Copied(pointer, 0, 0)
    _require_newer(name, pointer, before and before[0])
    if before is None:
        objects.require_conditions()
    files, size = 0, 0
    for entry in {item.path: item for item in generation.manifest.files}.values():
        path = generation.folder / entry.path
        if objects.size(_key(name, entry)) == entry.bytes:
            continue
        if file_sha256(path) != entry.sha256:
            raise CorruptionFound(
                f"{entry.label} of generation {generation.number} is damaged and is not copied: "
                "build the shard anew"
            )
        objects.put_file(_key(name, entry), path)
        if objects.size(_key(name, entry)) != entry.bytes:
            raise StorageFailed(f"{_key(name, entry)} is not whole in the object store")
        files, size = files + 1, size + entry.bytes
    manifest = (generation.folder / FILE_NAME).read_bytes()
    objects.create(_manifest_key(name, generation.manifest), manifest)
    switch(objects, name, pointer, before)
    return Copied(pointer, files, size)


def switch(
    objects: Objects, name: str, pointer: Pointer, before: tuple[Pointer, str] | None
) -> None:
    """Let CURRENT say `pointer`, if it still is what was read as `before`. FencingLost otherwise."""
    _require_newer(name, pointer, before and before[0])
    content = json.dumps(asdict(pointer), sort_keys=True).encode()
    key = f"{name}/{POINTER}"
    won = (
        objects.create(key, content) if before is None else objects.replace(key, content, before[1])
    )
    if not won:
        raise FencingLost(
            f"another writer switched the copy of shard {name!r} meanwhile; push again if yours is newer"
        )


def fetch(objects: Objects, root: Path, name: str, *, disk: Disk = DISK) -> Generation:
    """The newest copied generation as a folder below `root`, every file checked by its digest. What is there
    already, whole, is kept. StorageFailed when there is no copy, CorruptionFound when it is damaged."""
    found = _pointer(objects, name)
    if found is None:
        raise StorageFailed(f"there is no copy of shard {name!r} at s3://{objects.root}")
    pointer = found[0]
    folder = shard_folder(root, name)
    wanted = folder / f"g{pointer.generation:06d}-t{pointer.token}"
    if not wanted.is_dir():
        manifest = _manifest(objects, name, pointer)
        temp = folder / f".{wanted.name}.tmp"
        if temp.exists():
            disk.remove_folder(temp)
        disk.make_folder(temp)
        for entry in {item.path: item for item in manifest.files}.values():
            disk.make_folder((temp / entry.path).parent)
            objects.get_file(_key(name, entry), temp / entry.path)
            if file_sha256(temp / entry.path) != entry.sha256:
                raise CorruptionFound(f"the copy of {entry.label} of shard {name!r} is damaged")
            disk.sync_file(temp / entry.path)
        disk.write_file(temp / FILE_NAME, manifest.to_bytes())
        for inner in sorted({(temp / entry.path).parent for entry in manifest.files}):
            disk.sync_folder(inner)
        disk.sync_folder(temp)
        disk.rename(temp, wanted)
        disk.sync_folder(folder)
    return Generation(
        wanted, read_manifest(wanted, pointer.manifest_sha256), pointer.manifest_sha256
    )


def _manifest(objects: Objects, name: str, pointer: Pointer) -> ShardManifest:
    key = f"{name}/g{pointer.generation:06d}-t{pointer.token}.json"
    read = objects.read(key)
    if read is None or hashlib.sha256(read[0]).hexdigest() != pointer.manifest_sha256:
        raise CorruptionFound(f"{key} is not the manifest that {name}/{POINTER} names")
    return ShardManifest.from_json(json.loads(read[0]), key)


def _pointer(objects: Objects, name: str) -> tuple[Pointer, str] | None:
    read = objects.read(f"{name}/{POINTER}")
    if read is None:
        return None
    try:
        return Pointer(**json.loads(read[0])), read[1]
    except (ValueError, TypeError) as fault:
        raise CorruptionFound(f"{name}/{POINTER} is no pointer: {fault}") from fault


def _require_newer(name: str, pointer: Pointer, before: Pointer | None) -> None:
    if before is not None and before.rank >= pointer.rank:
        raise FencingLost(
            f"the copy of shard {name!r} is generation {before.generation} under token {before.token}; "
            f"generation {pointer.generation} under token {pointer.token} is older"
        )


def _key(name: str, entry: FileEntry) -> str:
    return f"{name}/blocks/{entry.path.rpartition('/')[2]}"


def _manifest_key(name: str, manifest: ShardManifest) -> str:
    return f"{name}/{manifest.folder_name}.json"
