"""A frame that was appended and is not written yet: all of it but the header, which needs the segment."""

from __future__ import annotations

from dataclasses import dataclass

from fabric_pipelines.journal.frame import HEADER_BYTES, padded


@dataclass(frozen=True, slots=True)
class Pending:
    """One appended frame of the open group; its header is made when the group's segment is known."""

    kind: int
    schema_id: int
    rows: int
    time_us: int
    length: int
    crc: int
    parts: tuple[memoryview, ...]

    @property
    def frame_bytes(self) -> int:
        return HEADER_BYTES + padded(self.length)
