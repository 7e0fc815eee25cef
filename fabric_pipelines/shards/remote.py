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
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.objects import Objects
from fabric_pipelines.errors import CorruptionFound, FencingLost, StorageFailed
from fabric_pipelines.shards.blocks import file_sha256
from fabric_pipelines.shards.building import Beat, holding
from fabric_pipelines.shards.disk import DISK, Disk, reading
from fabric_pipelines.shards.generation import Generation, shard_folder
from fabric_pipelines.shards.manifest import FILE_NAME, FileEntry, ShardManifest, read_manifest
from fabric_pipelines.shards.shard import open_generation
from fabric_pipelines.shards.store import VectorStore, store_of

POINTER = "CURRENT"


@dataclass(frozen=True, slots=True)
class Pointer:
    """Ordered by (token, generation): tokens only grow, and generations do under one. prunes: how often old copies were
    removed; each time the pointer is written anew, so that a writer who looked before cannot switch any more."""

    generation: int
    token: int
    manifest_sha256: str
    prunes: int = field(default=0, compare=False)

    @property
    def rank(self) -> tuple[int, int]:
        return self.token, self.generation


@dataclass(frozen=True, slots=True)
class Copied:
    pointer: Pointer
    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PrunedCopy:
    """kept: generations whose copy stays whole. objects, bytes: what was removed, or with a dry run would be."""

    shard: str
    dry_run: bool
    kept: tuple[int, ...]
    objects: int
    bytes: int


def push(db: Database | VectorStore, root: Path, name: str, objects: Objects) -> Copied:
    """Copy the current generation of shard `name`; `files` and `bytes` count what was not there already. Raises
    FencingLost when a newer generation is there or another writer switched the pointer meanwhile, AlreadyRunning while
    another process works on this copy, Refused by a store that ignores conditions."""
    store = store_of(db)
    generation = open_generation(store, root, name)
    with (
        holding(store, root, name, copy=_url(objects)) as lease,
        reading(generation.folder),
    ):
        return _push(generation, name, objects, Beat(store, lease))


def _push(generation: Generation, name: str, objects: Objects, beat: Beat) -> Copied:
    pointer = Pointer(generation.number, generation.token, generation.manifest_sha256)
    before = _pointer(objects, name)
    if before is not None and before[0] == pointer:
        return Copied(pointer, 0, 0)
    _require_newer(name, pointer, before and before[0])
    if before is None:
        objects.require_conditions()
    files, size = 0, 0
    for entry in {item.path: item for item in generation.manifest.files}.values():
        beat()
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
    _point(objects, name, pointer, before, before[0].prunes if before else 0)


def _point(
    objects: Objects,
    name: str,
    pointer: Pointer,
    before: tuple[Pointer, str] | None,
    prunes: int,
) -> None:
    fields = asdict(replace(pointer, prunes=prunes))
    if not prunes:
        del fields["prunes"]  # as it was written before there were any
    content = json.dumps(fields, sort_keys=True).encode()
    key = f"{name}/{POINTER}"
    won = (
        objects.create(key, content) if before is None else objects.replace(key, content, before[1])
    )
    if not won:
        raise FencingLost(
            f"another writer switched the copy of shard {name!r} meanwhile; push again if yours is newer"
        )


def prune(
    db: Database | VectorStore,
    root: Path,
    name: str,
    objects: Objects,
    *,
    keep: int,
    dry_run: bool = False,
) -> PrunedCopy:
    """Remove copies of all but the `keep` newest generations of shard `name` and those that are pinned: their manifests,
    then blocks that no kept manifest lists. Whoever pushes meanwhile is refused, and who looked before loses the pointer.
    Nothing goes where a kept manifest cannot be read (CorruptionFound). StorageFailed when there is no copy."""
    store = store_of(db)
    foreseen = _old_objects(store, name, objects, keep)[0]
    if dry_run:
        return foreseen
    with holding(store, root, name, copy=_url(objects)) as lease:
        beat = Beat(store, lease)
        done, before, doomed = _old_objects(store, name, objects, keep)
        if doomed:
            _point(objects, name, before[0], before, before[0].prunes + 1)
        for key in doomed:
            beat()
            objects.remove(key)
        return replace(done, dry_run=False)


def _old_objects(
    store: VectorStore, name: str, objects: Objects, keep: int
) -> tuple[PrunedCopy, tuple[Pointer, str], list[str]]:
    """What goes, manifests first: blocks without one are swept the next time, a manifest without blocks would be kept."""
    current = _pointer(objects, name)
    if current is None:
        raise StorageFailed(f"there is no copy of shard {name!r} at {_url(objects)}")
    sizes = objects.sizes(f"{name}/")
    ranks = {key: rank for key in sizes if (rank := _rank(name, key))}
    older = sorted(rank for rank in ranks.values() if rank <= current[0].rank)
    pinned = {(row.token, row.generation) for row in store.published(name) if row.pinned_at}
    # one above the pointer is of a push that was killed, or is made now
    kept = {rank for rank in ranks.values() if rank > current[0].rank or rank in pinned}
    kept |= {current[0].rank, *older[-keep:]}
    digests = {(row.token, row.generation): row.manifest_sha256 for row in store.published(name)}
    digests[current[0].rank] = current[0].manifest_sha256
    listed: set[str] = set()
    for token, number in kept:
        copied = Pointer(number, token, digests.get((token, number), ""))
        listed |= {_key(name, entry) for entry in _manifest(objects, name, copied).files}
    manifests = [key for key, rank in ranks.items() if rank not in kept]
    blocks = [key for key in sizes if key.startswith(f"{name}/blocks/") and key not in listed]
    doomed = sorted(manifests) + sorted(blocks)
    size = sum(sizes[key] for key in doomed)
    numbers = tuple(sorted(number for _, number in kept))
    return PrunedCopy(name, True, numbers, len(doomed), size), current, doomed


def _rank(name: str, key: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"g(\d{6,})-t(\d+)\.json", key.removeprefix(f"{name}/"))
    return (int(found[2]), int(found[1])) if found else None


def _url(objects: Objects) -> str:
    return f"s3://{objects.root}"


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
    said = pointer.manifest_sha256  # empty where neither pointer nor database knows it
    if read is None or (said and hashlib.sha256(read[0]).hexdigest() != said):
        raise CorruptionFound(f"{key} is not the manifest that was published with {said[:12]}")
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
