"""One segment file: where its frames lie and how they are read.

Frames are read through a source: a window of preads over the segment still written to, a read-only mapping
over a sealed one. A mapping of a file that is still written would turn a disk error into SIGBUS.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.journal.files import FileOps, read_exactly
from fabric_pipelines.journal.frame import (
    CONTROL,
    CONTROL_FRAME_BYTES,
    CONTROL_KINDS,
    HEADER_BYTES,
    Control,
    Header,
    crc32c,
    unpack_header,
)

WINDOW_BYTES = 4 << 20
SUFFIX = ".segment"


class Source(Protocol):
    def at(self, offset: int, length: int) -> memoryview:
        """Up to `length` bytes at `offset`; fewer only at the end."""


class Window:
    """Preads `step` bytes at a time into fresh aligned memory, so that views outlive the window."""

    def __init__(self, ops: FileOps, fd: int, size: int, step: int = WINDOW_BYTES) -> None:
        self._ops, self._fd, self.size, self._step = ops, fd, size, step
        self._start = 0
        self._bytes = memoryview(b"")

    def at(self, offset: int, length: int) -> memoryview:
        length = max(0, min(length, self.size - offset))
        inside = offset - self._start
        if inside < 0 or inside + length > len(self._bytes):
            span = min(max(length, self._step), self.size - offset)
            self._bytes = self._read(span, offset)
            self._start, inside = offset, 0
        return self._bytes[inside : inside + length]

    def _read(self, span: int, offset: int) -> memoryview:
        return read_exactly(self._ops, self._fd, span, offset)


class Mapped:
    def __init__(self, view: memoryview) -> None:
        self.view = view

    def at(self, offset: int, length: int) -> memoryview:
        return self.view[offset : offset + length]


@dataclass(frozen=True, slots=True)
class Holding:
    """One segment as it stands: its file or, once `cold`, its stub; the frames in it, the bytes they take."""

    name: str
    first_lsn: int
    last_lsn: int
    bytes: int
    sealed: bool
    epoch: int = 0
    cold: bool = False


@dataclass(slots=True)
class Segment:
    """`offsets[i]` is where data frame `first_lsn + i` begins, `kinds[i]` its kind and `crcs[i]` the CRC that its
    header ends in; `end` is where the next frame goes. `cold`: its bytes are in the object store, `path` is that of its
    stub and `fd` is none; `crcs` is empty while nobody knows them, which an old stub does not. `unread[i]` is 1 while
    nobody has compared that frame with its CRCs since the journal was opened; None when all were read."""

    path: Path
    fd: int
    size: int
    epoch: int
    first_lsn: int
    end: int
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    kinds: array[int] = field(default_factory=lambda: array("H"))
    crcs: array[int] = field(default_factory=lambda: array("I"))
    sealed: bool = False
    mapped: Mapped | None = None
    unread: bytearray | None = None
    cold: bool = False

    @property
    def last_lsn(self) -> int:
        return self.first_lsn + len(self.offsets) - 1

    @property
    def holding(self) -> Holding:
        return Holding(
            self.path.name,
            self.first_lsn,
            self.last_lsn,
            self.end,
            self.sealed,
            self.epoch,
            self.cold,
        )

    def extent(self, lsn: int) -> int:
        """Bytes from the frame `lsn` to the next data frame."""
        at = lsn - self.first_lsn
        following = self.offsets[at + 1] if at + 1 < len(self.offsets) else self.end
        return following - self.offsets[at]

    @property
    def knows_frames(self) -> bool:
        """Whether what was written can be told from another whole frame in its place."""
        return len(self.crcs) == len(self.offsets)

    def is_own(self, lsn: int, header: Header) -> bool:
        """Whether the frame with this header, whole in itself, is the one that was written as `lsn`: one of an older
        copy, or of another course of the journal, can be whole, in that place and of that LSN, too. The CRC of a
        header covers that of the payload."""
        if header.lsn != lsn:
            return False
        return not self.knows_frames or header.crc == self.crcs[lsn - self.first_lsn]

    def mark_read(self, lsn: int) -> None:
        if self.unread is not None:
            self.unread[lsn - self.first_lsn] = 0

    def source(self, ops: FileOps, step: int = WINDOW_BYTES) -> Source:
        assert not self.cold, "a cold segment is read through the cold tier"
        if not self.sealed:
            return Window(ops, self.fd, self.end, step)
        if self.mapped is None:
            if ops.size(self.fd) < self.end:
                raise CorruptionFound(
                    f"segment {self.path.name} was cut to {ops.size(self.fd)} bytes, its frames end at "
                    f"{self.end}: LSN {self.first_lsn}..{self.last_lsn} are damaged; restore the file"
                )
            self.mapped = Mapped(ops.map(self.fd, self.end))
        return self.mapped


def frames_of_kind(segments: Iterable[Segment], kind: int) -> list[int]:
    """LSNs, in order, without reading any frame."""
    found: list[int] = []
    for segment in segments:
        hits = np.flatnonzero(np.frombuffer(segment.kinds, np.uint16) == kind)
        found += (hits + segment.first_lsn).tolist()
    return found


def extents_of(segments: Iterable[Segment], lsns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes of each frame, with the control frames behind it; 0 for those of no segment."""
    sizes = np.zeros(len(lsns), np.int64)
    for segment in segments:
        mine = np.flatnonzero((lsns >= segment.first_lsn) & (lsns <= segment.last_lsn))
        if len(mine):
            ends = np.append(np.frombuffer(segment.offsets, np.uint64), segment.end)
            spans = np.diff(ends.astype(np.int64))
            sizes[mine] = spans[lsns[mine] - segment.first_lsn]
    return sizes


@dataclass(frozen=True, slots=True)
class Found:
    """A whole frame: both CRCs hold and the epoch is the one asked for."""

    header: Header
    raw_header: bytes
    payload: memoryview
    control: Control | None


def frame_at(source: Source, offset: int, *, epoch: int | None, salt: int) -> Found | None:
    """The whole frame of `epoch` (None: any) at `offset`, or None."""
    raw = source.at(offset, HEADER_BYTES)
    header = unpack_header(raw, salt)
    if header is None or (epoch is not None and header.epoch != epoch):
        return None
    body_bytes = header.frame_bytes - HEADER_BYTES
    whole = source.at(offset, header.frame_bytes)
    body = whole[HEADER_BYTES:]
    if len(body) != body_bytes:
        return None
    if crc32c(body) != header.payload_crc:
        return None
    payload = body[: header.length]
    control = None
    if header.kind in CONTROL_KINDS:
        if header.length != CONTROL.size:
            return None
        control = Control.unpack(payload)
    return Found(header, bytes(raw), payload, control)


FIRST_FRAME_OFFSET = CONTROL_FRAME_BYTES
