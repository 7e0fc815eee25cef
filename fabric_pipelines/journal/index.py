"""The index file beside a sealed segment: where its frames lie, so that an open need not read it through.

A cache, written once at the seal and never fsynced: one that is absent, torn, of an earlier use of the segment
file or not in agreement with the SEAL frame is ignored, and the segment is read as if it had none. It says
where frames are and which CRC each header ends in, never what they hold: each is still compared with its own CRCs
before it is believed, and with this one, since another whole frame may lie there.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.journal.faults import FULL
from fabric_pipelines.journal.files import FileOps, read_exactly, write_all
from fabric_pipelines.journal.frame import crc32c
from fabric_pipelines.journal.segment import Segment

SUFFIX = ".index"
MAGIC = b"FPI\x01"
VERSION = 2  # 1 had no CRCs of frames; such a file is none
HEADER = struct.Struct("<4sIQQQQI16s")
BYTES_A_FRAME = 14


@dataclass(frozen=True, slots=True)
class Index:
    """`end` is the offset behind the SEAL frame, `chain` the value that frame carries."""

    epoch: int
    first_lsn: int
    end: int
    chain: int
    offsets: array[int]
    kinds: array[int]
    crcs: array[int]

    @property
    def last_lsn(self) -> int:
        return self.first_lsn + len(self.offsets) - 1


def index_of(segment: Segment, chain: int) -> Index:
    """Of a segment that is sealed with this chain."""
    return Index(
        segment.epoch,
        segment.first_lsn,
        segment.end,
        chain,
        segment.offsets,
        segment.kinds,
        segment.crcs,
    )


def write_index(ops: FileOps, segment: Path, index: Index, journal_id: bytes) -> None:
    """Over whatever an earlier use of the segment file left there; the length in the header counts. On a full disk the
    segment has none, and is read through at the next open."""
    try:
        _write(ops, segment, index, journal_id)
    except OSError as fault:
        if fault.errno not in FULL:
            raise


def _write(ops: FileOps, segment: Path, index: Index, journal_id: bytes) -> None:
    path = segment.with_suffix(SUFFIX)
    head = HEADER.pack(
        MAGIC,
        VERSION,
        index.epoch,
        index.first_lsn,
        len(index.offsets),
        index.end,
        index.chain,
        journal_id,
    )
    body = head + index.offsets.tobytes() + index.kinds.tobytes() + index.crcs.tobytes()
    fd = ops.open(path, create=path.name not in ops.names(path.parent))
    try:
        write_all(ops, fd, [body + crc32c(body).to_bytes(4, "little")], 0)
    finally:
        ops.close(fd)


def read_index(ops: FileOps, segment: Path, journal_id: bytes) -> Index | None:
    """The index of whatever use of the file it was written for; None if there is no whole one."""
    path = segment.with_suffix(SUFFIX)
    if path.name not in ops.names(path.parent):
        return None
    fd = ops.open(path)
    try:
        size = ops.size(fd)
        raw = read_exactly(ops, fd, size, 0)
    finally:
        ops.close(fd)
    if len(raw) < HEADER.size + 4:
        return None
    magic, version, epoch, first_lsn, count, end, chain, owner = HEADER.unpack_from(raw)
    body = HEADER.size + count * BYTES_A_FRAME
    if (magic, version, owner) != (MAGIC, VERSION, journal_id) or body + 4 > len(raw):
        return None
    if crc32c(raw[:body]).to_bytes(4, "little") != bytes(raw[body : body + 4]):
        return None
    offsets, kinds, crcs = columns_of(raw[HEADER.size : body], count)
    return Index(epoch, first_lsn, end, chain, offsets, kinds, crcs)


def columns_of(raw: memoryview, count: int) -> tuple[array[int], array[int], array[int]]:
    """Offsets, kinds and CRCs of `count` frames, one column after the other; the last may be absent."""
    offsets, kinds, crcs = array("Q"), array("H"), array("I")
    offsets.frombytes(raw[: 8 * count])
    kinds.frombytes(raw[8 * count : 10 * count])
    crcs.frombytes(raw[10 * count :])
    return offsets, kinds, crcs
