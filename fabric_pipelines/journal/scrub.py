"""Scrubbing: read sealed frames again from the device and compare them with their CRCs, a slice at a time.

The index says where each data frame begins, so a damaged one costs itself and the control frames behind it
and the scrub goes on with the next. Finds and names; what damage means is the owner's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fabric_pipelines.journal.files import FileOps
from fabric_pipelines.journal.segment import Segment, Window, frame_at

STEP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of `segment` from `offset` on are not what was written; `lsn` is the data frame there, or the one
    that follows where only control frames lie."""

    segment: str
    offset: int
    lsn: int


@dataclass(frozen=True, slots=True)
class ScrubSlice:
    """bytes and data frames looked at; round_ended: every sealed segment was seen since the last such slice."""

    bytes: int
    frames: int
    damaged: tuple[Damage, ...]
    round_ended: bool = False


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
        found, self._at = scrub_frames(window, segment, self._salt, self._at, budget_bytes)
        if self._at >= len(segment.offsets):
            self._epoch, self._at = segment.epoch + 1, 0
        ended = segment is sealed[-1] and self._at == 0
        if ended:
            self._epoch = 0
        return ScrubSlice(found.bytes, found.frames, found.damaged, round_ended=ended)


def scrub_frames(
    window: Window, segment: Segment, salt: int, at: int, budget_bytes: int
) -> tuple[ScrubSlice, int]:
    """Frames `at`, at + 1, ... of the segment, at least one; returns what was found and the next `at`."""
    damaged: list[Damage] = []
    first, seen, count = at, 0, len(segment.offsets)
    while at < count and (at == first or seen < budget_bytes):
        start = 0 if at == 0 else segment.offsets[at]
        end = segment.offsets[at + 1] if at + 1 < count else segment.end
        bad = _first_bad(window, start, end, segment.epoch, salt)
        if bad is not None:
            damaged.append(Damage(segment.path.name, bad, segment.first_lsn + at))
        else:
            segment.mark_read(segment.first_lsn + at)
        seen += end - start
        at += 1
    return ScrubSlice(seen, at - first, tuple(damaged)), at


def _first_bad(window: Window, offset: int, end: int, epoch: int, salt: int) -> int | None:
    """Where in [offset, end), which begins with a frame, the first one that is not whole begins."""
    while offset < end:
        found = frame_at(window, offset, epoch=epoch, salt=salt)
        if found is None:
            return offset
        offset += found.header.frame_bytes
    return None
