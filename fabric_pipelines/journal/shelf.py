"""The shelf: files of segments that are none now, from the moment one is given up to the next one's first use.

A file on it is ready (allocated, fsynced, its name durable), free (to be written again), or lent: given up, but still
mapped by a reader, who would see the next segment's bytes. Which segments there are and what is in them is the
journal's business. Raises the operating system's errors as they are, but for a full disk, which leaves nothing behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.errors import StorageFailed
from fabric_pipelines.journal.faults import FULL, journal_failed
from fabric_pipelines.journal.files import FileOps
from fabric_pipelines.journal.segment import SUFFIX, Segment


@dataclass(frozen=True, slots=True)
class Spare:
    """A segment file that is allocated, fsynced and in a fsynced folder, ready for first use."""

    path: Path
    fd: int


class Shelf:
    """`fds`: the open file of each path, those of live segments included; `free`: what may be written again."""

    def __init__(
        self,
        ops: FileOps,
        folder: Path,
        segment_bytes: int,
        fds: dict[Path, int],
        free: list[Path],
    ) -> None:
        self._ops, self._folder, self._segment_bytes = ops, folder, segment_bytes
        self._fds = fds
        whole = [path for path in free if path in fds and ops.size(fds[path]) >= segment_bytes]
        self.free = whole
        self._short = [path for path in free if path not in whole]  # they need new space to be one
        self.spare: Spare | None = None
        self._lent: list[tuple[Path, int, memoryview]] = []

    @property
    def count(self) -> int:
        """Segments that need no new space."""
        return len(self.free) + (self.spare is not None)

    def prepare(self) -> None:
        """Have a spare: contents, size and name durable before first use. StorageFailed, with nothing changed, when the
        disk is full."""
        if self.spare is not None:
            return
        self.take_back()
        path = self.free.pop(0) if self.free else self._new()
        self.spare = Spare(path, self._allocated(path))

    def more(self) -> bool:
        """Have one more that is free, out of new space; False, with nothing changed, when the disk is full."""
        path = self._new()
        try:
            self._allocated(path)
        except StorageFailed:
            return False
        self.free.append(path)
        return True

    def less(self, most: int) -> int:
        """Of those that are free so many go, or all; how many went."""
        count = min(len(self.free), most)
        for _ in range(count):
            path = self.free.pop()
            if path in self._fds:
                self._ops.close(self._fds.pop(path))
            self._ops.unlink(path)
        return count

    def _new(self) -> Path:
        if self._short:
            return self._short.pop(0)
        path = self._folder / f"{self._next_number():08d}{SUFFIX}"
        self._fds[path] = self._ops.open(path, create=True)
        return path

    def _allocated(self, path: Path) -> int:
        fd = self._fds[path] if path in self._fds else self._ops.open(path)
        self._fds[path] = fd
        self._allocate(path, fd)
        return fd

    def _allocate(self, path: Path, fd: int) -> None:
        try:
            self._ops.fallocate(fd, self._segment_bytes)
        except OSError as fault:
            if fault.errno not in FULL:
                raise
            self._ops.close(self._fds.pop(path))
            self._ops.unlink(path)
            raise journal_failed(self._folder, fault, "preparing a segment") from fault
        self._ops.fsync(fd)
        self._ops.fsync_folder(self._folder)

    def _next_number(self) -> int:
        names = self._ops.names(self._folder)
        return 1 + max((int(Path(name).stem) for name in names if name.endswith(SUFFIX)), default=0)

    def take_spare(self) -> Spare:
        assert self.spare is not None, "the room for a roll is made at append"
        spare, self.spare = self.spare, None
        return spare

    def let_go(self, segment: Segment, *, keep: int | None = None) -> None:
        """Its file may be written again, or goes when `keep` such files are there, once nobody reads it any more."""
        self._ops.close(self._fds.pop(segment.path))
        size = segment.size if keep is None or len(self.free) < keep else 0
        if segment.mapped is None:
            self._give_up(segment.path, size)
        else:
            self._lent.append((segment.path, size, segment.mapped.view))
            segment.mapped = None

    def take_back(self) -> None:
        """Files of segments that nobody reads any more may be written again."""
        lent, self._lent = self._lent, []
        for path, size, view in lent:
            still = self._ops.unmap(view)
            if still is None:
                self._give_up(path, size)
            else:
                self._lent.append((path, size, still))

    def _give_up(self, path: Path, size: int) -> None:
        if size == self._segment_bytes:
            self.free.insert(0, path)  # pages that were written once take less the second time
        else:
            self._ops.unlink(path)
