"""Damage in a segment that recovery refuses, narrowed to the frames that are not whole.

One changed byte breaks the chain for all that follows, but it lies in one frame: where that is, what it was and how
much of the log went with it is what somebody needs who has a copy, or has to decide without one. Reads and tells only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.journal.frame import (
    ALIGNMENT,
    COMMIT,
    CONTROL_KINDS,
    DURABLE,
    HEADER_BYTES,
    MAGIC,
    OPENED,
    SEAL,
    SEGMENT,
    unpack_header,
)
from fabric_pipelines.journal.segment import WINDOW_BYTES, Found, Source, Window, frame_at

CONTROL_NAMES = {
    SEGMENT: "SEGMENT",
    COMMIT: "COMMIT",
    DURABLE: "DURABLE",
    SEAL: "SEAL",
    OPENED: "OPENED",
}


TO_THE_END = 1 << 62


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes offset..end are no whole frame. LSN first..last were there, none if last < first: then only control frames.
    kind: of the first frame, where its header can still be read; else 0."""

    offset: int
    end: int
    first_lsn: int
    last_lsn: int
    kind: int = 0

    def as_json(self, segment: object) -> dict[str, Any]:
        """As `CorruptionFound.places` has them; the last LSN is below the first where no data frame lies."""
        return {
            "segment": str(segment),
            "offset": self.offset,
            "end": self.end,
            "lsn": self.first_lsn,
            "last_lsn": None if self.last_lsn == TO_THE_END else self.last_lsn,
        }

    def __str__(self) -> str:
        if self.last_lsn < self.first_lsn:
            name = CONTROL_NAMES.get(self.kind, "control")
            what = f"the {name} frame behind LSN {self.last_lsn}"
        elif self.last_lsn == self.first_lsn:
            kind = f" of kind {self.kind}" if self.kind and self.kind not in CONTROL_KINDS else ""
            what = f"the frame{kind} with LSN {self.first_lsn}"
        else:
            what = f"the frames of LSN {self.first_lsn}..{self.last_lsn}"
        return f"bytes {self.offset}..{self.end}, {what}"


def places(
    window: Window, offset: int, *, epoch: int, salt: int, first_lsn: int, last_lsn: int
) -> Iterator[Place]:
    """From the frame at `offset` on, where `first_lsn` should be next, to the one that records `last_lsn` as durable."""
    lsn = first_lsn
    while offset < window.size:
        found = frame_at(window, offset, epoch=epoch, salt=salt)
        if found is not None:
            if found.control is not None and found.control.durable_lsn >= last_lsn:
                return
            lsn, offset = found.header.lsn + 1, offset + found.header.frame_bytes
            continue
        header = unpack_header(window.at(offset, HEADER_BYTES), salt)
        kind = header.kind if header is not None and header.epoch == epoch else 0
        end, found = _resumed(window, offset + ALIGNMENT, epoch, salt)
        after = last_lsn + 1 if found is None else _first_lsn(found)
        yield Place(offset, end, lsn, after - 1, kind)
        lsn, offset = after, end


def told(path: object, found: list[Place]) -> CorruptionFound:
    """One sentence about places that were durable."""
    more = f" and {len(found) - 1} places more" if len(found) > 1 else ""
    return CorruptionFound(
        f"segment {path} is damaged at offset {found[0].offset}: {found[0]}{more} were acknowledged and cannot be "
        "read; restore the file from a copy",
        [place.as_json(path) for place in found],
    )


def next_magic(source: Source, offset: int) -> int:
    """First slot at or after `offset` that begins with the magic, or a number past the end."""
    magic = int.from_bytes(MAGIC, "little")
    while True:
        span = source.at(offset, WINDOW_BYTES)
        usable = len(span) // ALIGNMENT * ALIGNMENT
        if not usable:
            return offset + ALIGNMENT
        slots = np.frombuffer(span[:usable], "<u4")[:: ALIGNMENT // 4]
        hits = np.flatnonzero(slots == magic)
        if len(hits):
            return offset + int(hits[0]) * ALIGNMENT
        offset += usable


def _resumed(window: Window, offset: int, epoch: int, salt: int) -> tuple[int, Found | None]:
    """The next whole frame and where it begins; the end of the file without one."""
    while (offset := next_magic(window, offset)) < window.size:
        found = frame_at(window, offset, epoch=epoch, salt=salt)
        if found is not None:
            return offset, found
        offset += ALIGNMENT
    return window.size, None


def _first_lsn(found: Found) -> int:
    """The LSN that comes first at or behind this frame: a control frame names the one before it."""
    return found.header.lsn + (found.control is not None)
