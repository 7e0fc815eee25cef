"""Scrubbing: read sealed frames again from the device and compare them with their CRCs, a slice at a time.

The index says where each data frame begins, so a damaged one costs itself and the control frames behind it
and the scrub goes on with the next. A frame that is whole in itself is compared with the CRC that its segment knows it by, too.
Finds and names; what damage means is the owner's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fabric_pipelines.journal.files import FileOps
from fabric_pipelines.journal.frame import HEADER_BYTES, unpack_header
from fabric_pipelines.journal.segment import Segment, Source, Window, frame_at

STEP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes `offset`..`end` of `segment`, a path or the address of an object, are not what was written: a frame of
    `kind`, or 0 for a control frame whose header cannot be read. `lsn` is the data frame there or the one in front of
    it; where only control frames lie, the one that follows. `end`: that of the frame or, where its header cannot be
    read, where the next data frame begins."""

    segment: str
    offset: int
    end: int
    lsn: int
    kind: int


@dataclass(frozen=True, slots=True)
class ScrubSlice:
    """bytes and data frames looked at, which are `first_lsn` and those after it; round_ended: every sealed segment was
    seen since the last such slice."""

    bytes: int
    frames: int
    damaged: tuple[Damage, ...]
    first_lsn: int = 0
    round_ended: bool = False

    @property
    def last_lsn(self) -> int:
        return self.first_lsn + self.frames - 1


class Scrubber:
    """Goes round over the sealed segments on this disk."""

    def __init__(self, ops: FileOps, salt: int) -> None:
        self._ops, self._salt = ops, salt
        self._epoch = self._at = 0

    def slice(self, sealed: Sequence[Segment], budget_bytes: int) -> ScrubSlice:
        """The next frames, for about so many bytes. The slice that ends a round says so."""
        segment = next((s for s in sealed if s.epoch >= self._epoch), None)
        if segment is None:
            self._epoch = self._at = 0  # the rest of this round was recycled
            return ScrubSlice(0, 0, (), round_ended=True)
        if segment.epoch != self._epoch:
            self._epoch, self._at = segment.epoch, 0
        if not self._at:
            self._ops.forget_cache(segment.fd)
        size = min(segment.end, self._ops.size(segment.fd))
        window = Window(self._ops, segment.fd, size, STEP_BYTES)
        found, self._at = scrub_frames(
            window, segment, self._salt, self._at, budget_bytes, name=str(segment.path)
        )
        if self._at >= len(segment.offsets):
            self._epoch, self._at = segment.epoch + 1, 0
        ended = segment is sealed[-1] and self._at == 0
        if ended:
            self._epoch = 0
        return replace(found, round_ended=ended)


def scrub_frames(
    window: Source, segment: Segment, salt: int, at: int, budget_bytes: int, *, name: str
) -> tuple[ScrubSlice, int]:
    """Frames `at`, at + 1, ... of the segment, at least one; returns what was found and the next `at`. `name`: what
    people call the file or the object that `window` reads from."""
    damaged: list[Damage] = []
    first, seen, count = at, 0, len(segment.offsets)
    while at < count and (at == first or seen < budget_bytes):
        start = 0 if at == 0 else segment.offsets[at]
        end = segment.offsets[at + 1] if at + 1 < count else segment.end
        bad = _first_bad(window, segment, at, (start, end), salt)
        if bad is None:
            segment.mark_read(segment.first_lsn + at)
        else:
            damaged.append(damage_at(window, segment, at, (bad, end), salt, name=name))
        seen += end - start
        at += 1
    return ScrubSlice(seen, at - first, tuple(damaged), segment.first_lsn + first), at


def damage_at(
    source: Source, segment: Segment, at: int, extent: tuple[int, int], salt: int, *, name: str
) -> Damage:
    """What to say of the frame that begins `extent` and is not what was written: the data frame `at`, or a control frame
    next to it. Whoever finds it says the same."""
    bad, end = extent
    header = unpack_header(source.at(bad, HEADER_BYTES), salt)
    known = (header.kind, bad + header.frame_bytes) if header is not None else (0, end)
    kind = segment.kinds[at] if bad == segment.offsets[at] else known[0]
    return Damage(name, bad, min(known[1], end), segment.first_lsn + at, kind)


def _first_bad(
    window: Source, segment: Segment, at: int, extent: tuple[int, int], salt: int
) -> int | None:
    """Where in `extent`, which begins with a frame and holds the data frame `at`, the first one begins that is not
    whole, or not the one that was written."""
    offset, end = extent
    while offset < end:
        found = frame_at(window, offset, epoch=segment.epoch, salt=salt)
        if found is None:
            return offset
        mine = offset == segment.offsets[at]
        if mine and not segment.is_own(segment.first_lsn + at, found.header):
            return offset
        offset += found.header.frame_bytes
    return None
