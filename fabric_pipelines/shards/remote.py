"""A copy of a shard's generations in an object store, with a pointer of its own that only moves forward.

    <name>/blocks/<sha256><suffix>     files of all generations, each once, named by their digest
    <name>/g000042-t7.json             the manifest; its digest stands in the pointer
    <name>/CURRENT                     generation, token and manifest digest of the newest copy, and the database that
                                       counts them

Everything is there before the pointer says so, and the pointer is written under a condition: of many writers at one
moment one wins, and a writer with an older fencing token or generation never does. Tokens of two databases say nothing of each other: a copy
belongs to the one that made it, until it is taken over on purpose. A push looks at every object that
it relies on, whoever put it there, so it heals what was lost or overwritten; a fetch believes nothing but digests. The row in Postgres stays the truth for this machine; the copy is for others, and for its loss.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.objects import PART_BYTES, Kept, Objects
from fabric_pipelines.errors import (
    CorruptionFound,
    FencingLost,
    Refused,
    StorageFailed,
)
from fabric_pipelines.given import value_of
from fabric_pipelines.shards.blocks import file_sha256
from fabric_pipelines.shards.building import Beat, holding
from fabric_pipelines.shards.disk import DISK, Disk, reading
from fabric_pipelines.shards.generation import Generation, shard_folder, sweep_scratch
from fabric_pipelines.shards.manifest import (
    COUNT_MAX,
    FILE_NAME,
    FileEntry,
    ShardManifest,
    folder_name,
)
from fabric_pipelines.shards.scrub import damage_of
from fabric_pipelines.shards.shard import open_generation
from fabric_pipelines.shards.store import VectorStore, store_of

POINTER = "CURRENT"
FETCHED = ".fetch-"


@dataclass(frozen=True, slots=True)
class Pointer:
    """Ordered by (token, generation): tokens only grow, and generations do under one. prunes: how often old copies were
    removed; each time the pointer is written anew, so that a writer who looked before cannot switch any more. cluster,
    database: ids of the database that counts tokens and generations; empty in a pointer of older days."""

    generation: int
    token: int
    manifest_sha256: str
    prunes: int = field(default=0, compare=False)
    cluster: str = field(default="", compare=False)
    database: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        numbers = (self.generation, self.token, self.prunes)
        if not all(0 <= number <= COUNT_MAX for number in numbers):
            raise CorruptionFound("its numbers are none of a generation")

    @property
    def rank(self) -> tuple[int, int]:
        return self.token, self.generation

    @property
    def owner(self) -> tuple[str, str]:
        return self.cluster, self.database


@dataclass(frozen=True, slots=True)
class Copied:
    """adopted: one sentence where a copy that named no database, or another one, is this one's from now on."""

    pointer: Pointer
    files: int
    bytes: int
    adopted: str = ""


@dataclass(frozen=True, slots=True)
class PrunedCopy:
    """kept: generations whose copy stays whole. objects, bytes: what was removed, or with a dry run would be."""

    shard: str
    dry_run: bool
    kept: tuple[int, ...]
    objects: int
    bytes: int


def push(
    db: Database | VectorStore,
    root: Path,
    name: str,
    objects: Objects,
    *,
    verify: bool = False,
    take_over: bool = False,
) -> Copied:
    """Copy the current generation of shard `name`, or heal its copy: `files` and `bytes` count what was sent, since it was
    missing or other bytes. An object is right when it has the size and the ETag of the file's bytes; one that has another
    ETag, and with `verify` every one, is read back. take_over: put it in the place of a copy of another database, or of
    one that counts as newer. Raises CorruptionFound for a damaged file of the generation itself,
    FencingLost when a newer generation is there or another writer switched the pointer meanwhile, AlreadyRunning while
    another process works on this copy, Refused for a copy of another database and by a store that ignores conditions."""
    store = store_of(db)
    generation = open_generation(store, root, name)
    with (
        holding(store, root, name, copy=_url(objects)) as lease,
        reading(generation.folder),
    ):
        return _push(generation, objects, store.identity(), Beat(store, lease), verify, take_over)


def _push(
    generation: Generation,
    objects: Objects,
    owner: tuple[str, str],
    beat: Beat,
    verify: bool,
    take_over: bool,
) -> Copied:
    name = generation.name
    pointer = Pointer(generation.number, generation.token, generation.manifest_sha256, 0, *owner)
    before = _pointer(objects, name)
    adopted = _adopted(objects, name, owner, before and before[0], take_over)
    switched = before is not None and before[0] == pointer  # then the copy may still be damaged
    if not switched and not take_over:
        _require_newer(objects, name, pointer, before and before[0])
    if before is None:
        objects.require_conditions()
    there = objects.listed(f"{name}/blocks/")
    files, size = 0, 0
    for entry in {item.path: item for item in generation.manifest.files}.values():
        beat()
        key = _key(name, entry)
        sums = _Sums.of(generation.folder / entry.path)
        if sums.sha256 != entry.sha256:
            raise CorruptionFound(
                f"{entry.label} of generation {generation.number} is damaged and is not copied: "
                f"`fabric receipt refresh {name} --anew` builds the shard from its source"
            )
        if _is_copy(objects, key, there.get(key), entry, sums, verify):
            continue
        objects.put_file(key, generation.folder / entry.path)
        if not _is_copy(objects, key, objects.look(key), entry, sums, verify):
            raise StorageFailed(
                f"s3://{objects.root}/{key} does not keep what was just put there: look at the object store"
            )
        files, size = files + 1, size + entry.bytes
    sent = _put_manifest(objects, name, generation)
    if not switched or adopted:
        _point(objects, name, pointer, before, before[0].prunes if before else 0)
    if switched and sent:
        files, size = files + 1, size + sent
    return Copied(pointer, files, size, adopted)


def _adopted(
    objects: Objects, name: str, owner: tuple[str, str], before: Pointer | None, take_over: bool
) -> str:
    """What to say of a copy that names no database, or is taken from one; "" for one's own. Refused for another's."""
    if before is None or before.owner == owner:
        return ""
    url = _url(objects)
    other = before.owner if before.database else _maker(objects, name, before)
    theirs = f"database {other[1]} of cluster {other[0]}"
    if take_over and other[1]:
        return f"the copy of shard {name!r} at {url} was that of {theirs}; it is this database's from now on"
    if before.database or other[1] not in ("", owner[1]):
        raise Refused(
            f"the copy of shard {name!r} at {url} is that of {theirs}, and this is database {owner[1]} of cluster "
            f"{owner[0]}: give this one a prefix of its own, or, if the other is gone or was restored here, take the copy "
            f"over with `fabric receipt push {name} --to {url} --take-over`"
        )
    return f"the copy of shard {name!r} at {url} named no database; it is this one's from now on"


def _maker(objects: Objects, name: str, pointer: Pointer) -> tuple[str, str]:
    """What the manifest says of a copy whose pointer names no database."""
    try:
        source = _manifest(objects, name, pointer)[0].source
    except CorruptionFound:  # a push heals it
        return "", ""
    return str(source.get("cluster", "")), str(source.get("database", ""))


@dataclass(frozen=True, slots=True)
class _Sums:
    """sha256 and ETag (as a store makes it that makes it of MD5s) of one file's bytes, read once."""

    sha256: str
    etag: str

    @classmethod
    def of(cls, path: Path) -> _Sums:
        digest, parts = hashlib.sha256(), []
        try:
            with path.open("rb") as file:
                in_parts = os.fstat(file.fileno()).st_size >= 2 * PART_BYTES
                while part := file.read(PART_BYTES if in_parts else -1):
                    digest.update(part)
                    parts.append(hashlib.md5(part, usedforsecurity=False).digest())
        except OSError as fault:
            raise CorruptionFound(
                f"{path} cannot be read ({fault.strerror}) and is not copied: build the shard anew"
            ) from fault
        if in_parts:
            whole = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
            return cls(digest.hexdigest(), f"{whole}-{len(parts)}")
        return cls(digest.hexdigest(), parts[0].hex() if parts else "")


def _is_copy(
    objects: Objects, key: str, kept: Kept | None, entry: FileEntry, sums: _Sums, verify: bool
) -> bool:
    """An ETag that is not ours may be of other bytes, or of a store that makes it of something else: reading tells."""
    if kept is None or kept.size != entry.bytes:
        return False
    return (kept.etag == sums.etag and not verify) or objects.sha256(key) == entry.sha256


def _put_manifest(objects: Objects, name: str, generation: Generation) -> int:
    """Bytes that had to be sent. What lies under its name and is something else is damage, or of a push that was killed
    before its database was restored: no pointer speaks of it."""
    key = _manifest_key(name, generation.manifest)
    content = (generation.folder / FILE_NAME).read_bytes()
    if hashlib.sha256(content).hexdigest() != generation.manifest_sha256:
        raise CorruptionFound(f"{generation.folder / FILE_NAME} changed: build the shard anew")
    if objects.create(key, content):
        return len(content)
    found = objects.read(key)
    if found is not None and found[0] == content:
        return 0
    if found is None or not objects.replace(key, content, found[1]):
        raise FencingLost(f"another writer put {key} there meanwhile; push again if yours is newer")
    return len(content)


def switch(
    objects: Objects, name: str, pointer: Pointer, before: tuple[Pointer, str] | None
) -> None:
    """Let CURRENT say `pointer`, if it still is what was read as `before`. FencingLost otherwise."""
    _require_newer(objects, name, pointer, before and before[0])
    _point(objects, name, pointer, before, before[0].prunes if before else 0)


def _point(
    objects: Objects,
    name: str,
    pointer: Pointer,
    before: tuple[Pointer, str] | None,
    prunes: int,
) -> None:
    fields = asdict(replace(pointer, prunes=prunes))
    # what is not known is left out, as it was written before there were any
    content = json.dumps(
        {key: value for key, value in fields.items() if value}, sort_keys=True
    ).encode()
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
    Nothing goes where a kept manifest cannot be read (CorruptionFound). StorageFailed when there is no copy, Refused for
    one of another database."""
    store = store_of(db)
    owner = store.identity()
    foreseen = _old_objects(store, name, objects, keep)[0]
    if dry_run:
        return foreseen
    with holding(store, root, name, copy=_url(objects)) as lease:
        beat = Beat(store, lease)
        done, before, doomed = _old_objects(store, name, objects, keep)
        if doomed:
            mine = replace(before[0], cluster=owner[0], database=owner[1])
            _point(objects, name, mine, before, before[0].prunes + 1)
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
    _adopted(objects, name, store.identity(), current[0], take_over=False)
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
        listed |= {_key(name, entry) for entry in _manifest(objects, name, copied)[0].files}
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
    """The newest copied generation as a folder below `root`, every file checked by its digest, those that are there already
    as well: what is damaged or gone is brought again. Several at once do not meet: one puts the folder in its place, the
    others find it whole. StorageFailed when there is no copy or an object of it is gone, CorruptionFound when one is
    damaged; both name the object and the remedy."""
    found = _pointer(objects, name)
    if found is None:
        raise StorageFailed(f"there is no copy of shard {name!r} at {_url(objects)}")
    pointer = found[0]
    folder = shard_folder(root, name)
    manifest, content = _manifest(objects, name, pointer)
    sha256 = hashlib.sha256(content).hexdigest()
    wanted = Generation(folder / manifest.folder_name, manifest, sha256)
    with _own_folder(disk, folder, manifest.folder_name) as temp:
        if wanted.folder.is_dir() or not _placed(disk, objects, wanted, content, temp):
            _mend(disk, objects, wanted, content, temp)
    return wanted


def _placed(disk: Disk, objects: Objects, wanted: Generation, content: bytes, temp: Path) -> bool:
    """Bring everything and put it in its place; False when another fetch was there first."""
    entries = {entry.path: entry for entry in wanted.manifest.files}
    for entry in entries.values():
        _bring(disk, objects, wanted.name, entry, temp)
    disk.write_file(temp / FILE_NAME, content)
    for inner in sorted({(temp / path).parent for path in entries}):
        disk.sync_folder(inner)
    disk.sync_folder(temp)
    try:
        disk.rename(temp, wanted.folder)
    except StorageFailed:
        if not wanted.folder.is_dir():
            raise
        return False
    disk.sync_folder(wanted.folder.parent)
    return True


def _mend(disk: Disk, objects: Objects, there: Generation, content: bytes, temp: Path) -> None:
    """Bring again what is not whole of a folder that is there. A reader keeps the file that it mapped."""
    for entry in {item.path: item for item in there.manifest.files}.values():
        if damage_of(there, entry) is not None:
            path = there.folder / entry.path
            _bring(disk, objects, there.name, entry, temp)
            disk.make_folder(path.parent)
            disk.rename(temp / entry.path, path)
            disk.sync_folder(path.parent)
    path = there.folder / FILE_NAME
    if not path.is_file() or path.read_bytes() != content:
        disk.write_file(temp / FILE_NAME, content)
        disk.rename(temp / FILE_NAME, path)
        disk.sync_folder(there.folder)


def _bring(disk: Disk, objects: Objects, name: str, entry: FileEntry, temp: Path) -> None:
    key, path = _key(name, entry), temp / entry.path
    disk.make_folder(path.parent)
    try:
        objects.get_file(key, path)
    except StorageFailed as fault:
        raise StorageFailed(f"{fault}; {_sent_again(objects, name)}") from fault
    found = file_sha256(path)
    if found != entry.sha256:
        raise CorruptionFound(
            f"s3://{objects.root}/{key}, the copy of {entry.label} of shard {name!r}, is damaged: its bytes have sha256 "
            f"{found}; {_sent_again(objects, name)}"
        )
    disk.sync_file(path)


def _sent_again(objects: Objects, name: str) -> str:
    return (
        f"where the shard is, `fabric receipt push {name} --to {_url(objects)} --verify` reads every object "
        "back and sends again what is missing or damaged"
    )


@contextmanager
def _own_folder(disk: Disk, folder: Path, label: str) -> Iterator[Path]:
    """A folder of this fetch alone, gone afterwards; what killed ones left beside it goes first."""
    sweep_scratch(disk, folder, f".g*{FETCHED}*")
    temp = folder / f".{label}{FETCHED}{uuid.uuid4().hex[:12]}"
    disk.make_folder(temp)
    with reading(temp):  # so that nobody takes it for a killed one's
        try:
            yield temp
        finally:
            if temp.is_dir():
                disk.remove_folder(temp)


def _manifest(objects: Objects, name: str, pointer: Pointer) -> tuple[ShardManifest, bytes]:
    key = f"{name}/{folder_name(pointer.generation, pointer.token)}.json"
    read = objects.read(key)
    said = pointer.manifest_sha256  # empty where neither pointer nor database knows it
    if read is None or (said and hashlib.sha256(read[0]).hexdigest() != said):
        what = "is not there" if read is None else f"is not the manifest with sha256 {said[:12]}"
        raise CorruptionFound(
            f"s3://{objects.root}/{key} {what}; {_sent_again(objects, name)}; where that is refused, {POINTER} itself is not "
            "right: add --take-over"
        )
    where = f"s3://{objects.root}/{key}"
    manifest = ShardManifest.from_json(read[0], where, remedy=_sent_again(objects, name))
    if (manifest.name, manifest.generation, manifest.token) != (name, *reversed(pointer.rank)):
        raise CorruptionFound(
            f"{where} is the manifest of generation {manifest.generation} under token {manifest.token} of shard "
            f"{manifest.name!r}; {_sent_again(objects, name)}"
        )
    return manifest, read[0]


def _pointer(objects: Objects, name: str) -> tuple[Pointer, str] | None:
    key = f"{name}/{POINTER}"
    read = objects.read(key)
    if read is None:
        return None
    remedy = (
        f"remove the object, and `fabric receipt push {name} --to {_url(objects)}` writes it anew"
    )
    where = f"s3://{objects.root}/{key}"
    # fields of a newer program, left out, would be lost at the next push
    return value_of(Pointer, read[0], where, what="pointer", remedy=remedy), read[1]


def _require_newer(objects: Objects, name: str, pointer: Pointer, before: Pointer | None) -> None:
    if before is None or before.rank < pointer.rank:
        return
    there, here = (
        f"generation {item.generation} under token {item.token}" for item in (before, pointer)
    )
    if before.rank == pointer.rank:
        said = f"names manifest {before.manifest_sha256[:12]} as {there}, and here that is {pointer.manifest_sha256[:12]}"
    else:
        said = f"is {there}, and {here} is older"
    raise FencingLost(
        f"the copy of shard {name!r} at {_url(objects)} {said}: push from where the newest generation is; if this is it, since "
        "the database was restored or the pointer was overwritten, "
        f"`fabric receipt push {name} --to {_url(objects)} --take-over` puts it there"
    )


def _key(name: str, entry: FileEntry) -> str:
    return f"{name}/blocks/{entry.path.rpartition('/')[2]}"


def _manifest_key(name: str, manifest: ShardManifest) -> str:
    return f"{name}/{manifest.folder_name}.json"
