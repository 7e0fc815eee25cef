"""Scrubbing: read sealed frames again from the device and compare them with their CRCs, a slice at a time.

The index says where each data frame begins, so a damaged one costs itself and the control frames behind it
and the scrub goes on with the next. Finds and names; what damage means is the owner's business.
"""

from __future__ import annotations

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


def scrub_frames(
    ops: FileOps, segment: Segment, salt: int, at: int, budget_bytes: int
) -> tuple[ScrubSlice, int]:
    """Frames `at`, at + 1, ... of the segment, at least one; returns what was found and the next `at`."""
    window = Window(ops, segment.fd, min(segment.end, ops.size(segment.fd)), STEP_BYTES)
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
