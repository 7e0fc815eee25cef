"""A disk in memory that remembers every operation and can show what a crash after any of them may leave.

The model is what POSIX promises, no more. A write not yet synced may be on the disk in any subset of its
512-byte sectors, whatever later writes did; a name made, moved or removed may be lost until its folder is
synced, and with the name of a folder all that is below it; a failed fsync drops what it should have written and says nothing later. `kill -9` tests cannot show
any of this, since the page cache survives them. Refuses to model a sector that is itself half written, but
for the torn states, which cut the last write at each byte.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fabric_pipelines.journal.files import FileStatus

SECTOR_BYTES = 512
NEIGHBOURS = 6  # pending writes that are tried alone and left out, newest first


@dataclass(frozen=True, slots=True)
class Create:
    path: Path
    inode: int


@dataclass(frozen=True, slots=True)
class MakeFolder:
    path: Path


@dataclass(frozen=True, slots=True)
class Allocate:
    inode: int
    size: int


@dataclass(frozen=True, slots=True)
class Write:
    inode: int
    offset: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Sync:
    inode: int


@dataclass(frozen=True, slots=True)
class SyncFailed:
    inode: int


@dataclass(frozen=True, slots=True)
class SyncFolder:
    folder: Path


@dataclass(frozen=True, slots=True)
class Rename:
    """Of this file: never of an older one that had the name of `source` when the platter was last told."""

    source: Path
    target: Path
    inode: int


@dataclass(frozen=True, slots=True)
class Unlink:
    path: Path


@dataclass(frozen=True, slots=True)
class Note:
    """The workload's own word on where it stands, e.g. ("acked", lsn); costs nothing on the disk."""

    name: str
    value: int


EntryOp = MakeFolder | Create | Rename | Unlink
ContentOp = Allocate | Write


@dataclass(slots=True)
class Image:
    """What is on a platter: names of files and of folders, and contents. The root is always there."""

    entries: dict[Path, int] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=set)

    def has_folder(self, folder: Path) -> bool:
        return folder in self.folders or folder == folder.parent

    def drop_unreachable(self) -> None:
        """What no folder leads to is gone, whatever of it was synced."""
        self.folders = {
            path for path in self.folders if all(map(self.has_folder, (path, *path.parents)))
        }
        self.entries = {
            path: inode for path, inode in self.entries.items() if self.has_folder(path.parent)
        }

    def apply_entry(self, op: EntryOp) -> None:
        if isinstance(op, MakeFolder):
            self.folders.add(op.path)
        elif isinstance(op, Create):
            self.entries[op.path] = op.inode
        elif isinstance(op, Rename):
            if self.entries.get(op.source) == op.inode:
                self.entries[op.target] = self.entries.pop(op.source)
        else:
            self.entries.pop(op.path, None)

    def apply_content(self, op: ContentOp) -> None:
        old = self.contents.get(op.inode, b"")
        if isinstance(op, Allocate):
            self.contents[op.inode] = old.ljust(op.size, b"\0")
            return
        old = old.ljust(op.offset, b"\0")
        self.contents[op.inode] = old[: op.offset] + op.content + old[op.offset + len(op.content) :]

    def copy(self) -> Image:
        return Image(dict(self.entries), dict(self.contents), set(self.folders))


@dataclass(frozen=True, slots=True)
class PowerCut:
    """The machine went down, and this is what it comes up with: nothing is pending any more."""

    left: Image


Op = EntryOp | ContentOp | Sync | SyncFailed | SyncFolder | PowerCut | Note


class ProcessKilled(BaseException):
    """The process ended here, as by `kill -9`; what it wrote stays in the cache of the SimDisk."""


class SimDisk:
    """FileOps over an image. `lying` names calls that report success and do nothing (mutations); `failing`
    maps the number of a call (0, 1, ...) to the errno it raises; from call `killed_at` on the process is dead,
    until `restart`; `calls` counts them. fallocate fails with ENOSPC above `capacity` bytes in files."""

    def __init__(
        self,
        image: Image | None = None,
        *,
        lying: Iterable[str] = (),
        failing: Mapping[int, int] | None = None,
        killed_at: int | None = None,
        capacity: int = 1 << 50,
    ) -> None:
        self.start = (image or Image()).copy()
        self.capacity = capacity
        self.log: list[Op] = []
        self.calls = 0
        self.call_names: list[str] = []
        self._cache = self.start.copy()
        self._lying = frozenset(lying)
        self._failing = dict(failing or {})
        self._killed_at = killed_at
        self._syncs_left: dict[str, int] = {}
        self._inode = max(self.start.contents.keys() | self.start.entries.values(), default=0)
        self._open: dict[int, int] = {}
        self._descriptor = 100

    def note(self, name: str, value: int) -> None:
        self.log.append(Note(name, value))

    def kill_at_sync(self, count: int, call: str = "fdatasync") -> None:
        """The process dies before the sync of that kind that comes after `count` others from now on."""
        self._syncs_left = {call: count}

    def restart(self) -> None:
        self._killed_at = None
        self._syncs_left = {}
        self._open.clear()

    def cut_power(self, survives: Callable[[list[ContentOp]], list[ContentOp]]) -> None:
        """The machine goes down. Of the sectors and sizes that are pending, oldest first, `survives` gives those that
        reached the platter; of the names all did. Nothing that was open is open any more."""
        platter = _platter_after(self, len(self.log))
        sectors = [sector for op in platter.contents for sector in _sectors(op)]
        left = platter.image(survives(sectors), platter.entries)
        self.log.append(PowerCut(left))
        self._cache = left.copy()
        self._open.clear()

    @property
    def open_descriptors(self) -> int:
        return len(self._open)

    # FileOps

    def make_folder(self, folder: Path, mode: int = 0o777) -> bool:
        self._call("make_folder")
        if self._cache.has_folder(folder):
            return False
        self._require_folder(folder.parent)
        self._do_entry(MakeFolder(folder))
        return True

    def way_to(self, folder: Path) -> list[Path]:
        return list(folder.parents)

    def names(self, folder: Path) -> list[str]:
        self._call("names")
        self._require_folder(folder)
        return sorted(path.name for path in self._cache.entries if path.parent == folder)

    def read_bytes(self, path: Path) -> bytes:
        self._call("read_bytes")
        return self._cache.contents.get(self.inode_of(path), b"")

    def lock(self, path: Path) -> int:
        self._call("lock")
        return self._descriptor_for(-1)

    def open(self, path: Path, *, create: bool = False) -> int:
        self._call("open")
        if create:
            if path in self._cache.entries:
                raise OSError(errno.EEXIST, "exists")
            self._require_folder(path.parent)
            self._inode += 1
            self._do_entry(Create(path, self._inode))
        return self._descriptor_for(self.inode_of(path))

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)

    def size(self, fd: int) -> int:
        self._call("size")
        return len(self._cache.contents.get(self._open[fd], b""))

    def status(self, fd: int) -> FileStatus:
        return self._status(self._open[fd])

    def status_of(self, path: Path) -> FileStatus | None:
        inode = self._cache.entries.get(path)
        return None if inode is None else self._status(inode)

    def _status(self, inode: int) -> FileStatus:
        links = list(self._cache.entries.values()).count(inode)
        return FileStatus(0, inode, links, self.size_of(inode))

    def size_of(self, inode: int) -> int:
        return len(self._cache.contents.get(inode, b""))

    def free_bytes(self, folder: Path) -> int:
        """`capacity` less all files there are, wherever they lie."""
        used = sum(self.size_of(inode) for inode in set(self._cache.entries.values()))
        return self.capacity - used

    def fallocate(self, fd: int, size: int) -> None:
        self._call("fallocate")
        if size - self.size_of(self._open[fd]) > max(self.free_bytes(Path()), 0):
            raise OSError(errno.ENOSPC, "full")
        self._do_content(Allocate(self._open[fd], size))

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        content = b"".join(buffers)
        try:
            self._call("pwritev")
        except OSError:
            self._do_content(Write(self._open[fd], offset, content[: len(content) // 2]))
            raise
        self._do_content(Write(self._open[fd], offset, content))
        return len(content)

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._call("preadv")
        found = self._cache.contents.get(self._open[fd], b"")[offset : offset + len(buffer)]
        buffer[: len(found)] = found
        return len(found)

    def fdatasync(self, fd: int) -> None:
        self._sync("fdatasync", self._open[fd])

    def fsync(self, fd: int) -> None:
        self._sync("fsync", self._open[fd])

    def fsync_folder(self, folder: Path) -> None:
        self._call("fsync_folder")
        if "fsync_folder" not in self._lying:
            self.log.append(SyncFolder(folder))

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename")
        self._do_entry(Rename(source, target, self.inode_of(source)))

    def unlink(self, path: Path) -> None:
        self._call("unlink")
        self._do_entry(Unlink(path))

    def forget_cache(self, fd: int) -> None:
        self._call("forget_cache")

    def map(self, fd: int, size: int) -> memoryview:
        self._call("map")
        return memoryview(self._cache.contents[self._open[fd]][:size])

    def unmap(self, view: memoryview) -> memoryview | None:
        return None

    # how

    def _call(self, name: str) -> None:
        number, self.calls = self.calls, self.calls + 1
        self.call_names.append(name)
        if self._killed_at is not None and number >= self._killed_at:
            raise ProcessKilled(f"before call {number}, {name}")
        if number in self._failing:
            code = self._failing[number]
            raise OSError(code, errno.errorcode[code])
        if name in self._syncs_left:
            self._syncs_left[name] -= 1
            if self._syncs_left[name] < 0:
                self._killed_at = number
                raise ProcessKilled(f"before call {number}, {name}")

    def _sync(self, name: str, inode: int) -> None:
        try:
            self._call(name)
        except OSError:
            self.log.append(SyncFailed(inode))
            raise
        if name not in self._lying:
            self.log.append(Sync(inode))

    def _require_folder(self, folder: Path) -> None:
        if not self._cache.has_folder(folder):
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(folder))

    def inode_of(self, path: Path) -> int:
        if path not in self._cache.entries:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return self._cache.entries[path]

    def _descriptor_for(self, inode: int) -> int:
        self._descriptor += 1
        self._open[self._descriptor] = inode
        return self._descriptor

    def _do_entry(self, op: EntryOp) -> None:
        self.log.append(op)
        self._cache.apply_entry(op)

    def _do_content(self, op: ContentOp) -> None:
        self.log.append(op)
        self._cache.apply_content(op)


@dataclass(frozen=True, slots=True)
class CrashState:
    """One thing that may be on the platter after the first `after_ops` operations. `notes`: the latest value
    of each note by then; `story`: how this state came about, for the message of a failed test."""

    after_ops: int
    story: str
    notes: Mapping[str, int]
    image: Image


def folder_of(entry: EntryOp) -> Path:
    return (entry.target if isinstance(entry, Rename) else entry.path).parent


@dataclass(slots=True)
class _Platter:
    """What is certain, and what is still under way."""

    certain: Image
    contents: list[ContentOp] = field(default_factory=list)
    entries: list[EntryOp] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)

    def has_nothing_for(self, op: Op) -> bool:
        """A sync of a folder in which nothing is pending: the states are those of the operation before."""
        return isinstance(op, SyncFolder) and all(folder_of(e) != op.folder for e in self.entries)

    def advance(self, op: Op) -> None:
        if isinstance(op, Note):
            self.notes[op.name] = op.value
        elif isinstance(op, Allocate | Write):
            self.contents.append(op)
        elif isinstance(op, EntryOp):
            self.entries.append(op)
        elif isinstance(op, PowerCut):
            self.certain, self.contents, self.entries = op.left.copy(), [], []
        elif isinstance(op, SyncFolder):
            for entry in self.entries:
                if folder_of(entry) == op.folder:
                    self.certain.apply_entry(entry)
            self.entries = [entry for entry in self.entries if folder_of(entry) != op.folder]
        else:
            if isinstance(op, Sync):
                for content in self.contents:
                    if content.inode == op.inode:
                        self.certain.apply_content(content)
            self.contents = [content for content in self.contents if content.inode != op.inode]

    def image(self, contents: Iterable[ContentOp], entries: Iterable[EntryOp]) -> Image:
        image = self.certain.copy()
        for content in contents:
            image.apply_content(content)
        for entry in entries:
            image.apply_entry(entry)
        if any(isinstance(entry, MakeFolder) for entry in self.entries):
            image.drop_unreachable()
        return image


def crash_states(disk: SimDisk, *, seed: int, subsets: int, since: int = 0) -> Iterator[CrashState]:
    """After each operation from number `since` on: everything pending lost, everything kept, names lost, names kept but contents lost;
    each of the newest pending writes alone and each missing, since they reach the platter in any order; each file
    as it was synced last; each name missing; and `subsets` random choices of sectors and names."""
    chance = random.Random(seed)
    platter, idle = _Platter(disk.start.copy()), False
    for count in range(len(disk.log) + 1):
        if count:
            idle = platter.has_nothing_for(disk.log[count - 1])
            platter.advance(disk.log[count - 1])
        if count < since or (idle and count > since):
            continue
        notes = dict(platter.notes)
        for story, contents, entries in _choices(platter, chance, subsets):
            yield CrashState(count, story, notes, platter.image(contents, entries))


def _platter_after(disk: SimDisk, after_ops: int) -> _Platter:
    platter = _Platter(disk.start.copy())
    for op in disk.log[:after_ops]:
        platter.advance(op)
    return platter


def all_kept(disk: SimDisk, after_ops: int | None = None) -> CrashState:
    """Everything that was done, or the first `after_ops` of it, has reached the platter."""
    after_ops = len(disk.log) if after_ops is None else after_ops
    platter = _platter_after(disk, after_ops)
    image = platter.image(platter.contents, platter.entries)
    return CrashState(after_ops, "all kept", dict(platter.notes), image)


Choice = tuple[str, Sequence[ContentOp], Sequence[EntryOp]]


def _choices(platter: _Platter, chance: random.Random, subsets: int) -> Iterator[Choice]:
    """What of the pending operations may have reached the platter."""
    pending, names = platter.contents, platter.entries
    yield "all lost", [], []
    if pending or names:
        yield "all kept", pending, names
    if pending and names:
        yield "names lost", pending, []
        yield "contents lost", [], names
    for story, kept in _orders(pending):
        yield story, kept, names
    sectors = [sector for op in pending for sector in _sectors(op)]
    for _ in range(subsets if pending else 0):
        some = [sector for sector in sectors if chance.random() < 0.5]
        yield f"sectors {_places(some)}", some, names
    if len(names) > 1:
        for at in range(len(names))[-NEIGHBOURS:]:
            yield f"all names but that of {names[at]}", pending, names[:at] + names[at + 1 :]
        few = [name for name in names if chance.random() < 0.5]
        yield f"names {few}", pending, few


def _orders(pending: list[ContentOp]) -> Iterator[tuple[str, list[ContentOp]]]:
    """Whole writes out of order: one there before all others, one still missing, one file far behind."""
    if len(pending) > 1:
        for at in range(len(pending))[-NEIGHBOURS:]:
            yield f"only write {at} of the pending", [pending[at]]
            yield f"all but write {at} of the pending", pending[:at] + pending[at + 1 :]
    files = {op.inode for op in pending}
    if len(files) > 1:
        for inode in sorted(files):
            kept = [op for op in pending if op.inode != inode]
            yield f"file {inode} as it was synced last", kept


def torn_states(disk: SimDisk, *, after_ops: int) -> Iterator[CrashState]:
    """For the write that is operation `after_ops - 1`: everything before it kept, it cut at every byte, with
    either side of the cut on the platter."""
    platter = _platter_after(disk, after_ops - 1)
    write = disk.log[after_ops - 1]
    assert isinstance(write, Write), f"operation {after_ops - 1} is {write}"
    for cut in range(len(write.content) + 1):
        head = Write(write.inode, write.offset, write.content[:cut])
        tail = Write(write.inode, write.offset + cut, write.content[cut:])
        for side, kept in (("head", head), ("tail", tail)):
            yield CrashState(
                after_ops,
                f"{side} of the write cut at byte {cut}",
                dict(platter.notes),
                platter.image([*platter.contents, kept], platter.entries),
            )


def writes_of(disk: SimDisk) -> list[int]:
    """Values of `after_ops` for `torn_states`: one for each write in the log."""
    return [index + 1 for index, op in enumerate(disk.log) if isinstance(op, Write)]


def _sectors(op: ContentOp) -> list[ContentOp]:
    if isinstance(op, Allocate):
        return [op]
    pieces: list[ContentOp] = []
    at = 0
    while at < len(op.content):
        size = SECTOR_BYTES - (op.offset + at) % SECTOR_BYTES
        pieces.append(Write(op.inode, op.offset + at, op.content[at : at + size]))
        at += size
    return pieces


def _places(ops: Sequence[ContentOp]) -> list[str]:
    return [
        f"{op.inode}:{op.offset // SECTOR_BYTES}" if isinstance(op, Write) else f"{op.inode}:size"
        for op in ops
    ]
