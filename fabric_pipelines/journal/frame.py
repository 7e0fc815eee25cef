"""The frame codec: a 64-byte header in front of a payload padded to 64 bytes (FORMAT.md, "Frame").

Every byte of a frame is under one of its two CRCs, padding and reserved bytes included, so one flipped bit
anywhere is seen. The header CRC starts from the journal's own salt and the header names the segment's epoch:
a frame of another journal, or of an earlier life of a recycled file, is not a frame.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

MAGIC = b"FPJ\x01"
VERSION = 1
ALIGNMENT = 64
HEADER_BYTES = 64
FILE_UNIT = 4096  # the size of a segment's file is a multiple, and its SEGMENT frame counts in it
FILE_BYTES_MAX = FILE_UNIT * (1 << 32) - FILE_UNIT
HEADER = struct.Struct("<4sHHIIQQqQQII")
CONTROL = struct.Struct("<QQQQII16s")
CONTROL_FRAME_BYTES = 128
assert HEADER.size == HEADER_BYTES
assert CONTROL.size <= ALIGNMENT

DATA_KIND_MAX = 0xFEFF
SEGMENT = 0xFF01
COMMIT = 0xFF02
DURABLE = 0xFF03
SEAL = 0xFF04
OPENED = 0xFF05
CONTROL_KINDS = frozenset({SEGMENT, COMMIT, DURABLE, SEAL, OPENED})

Payload = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Frame:
    """One data frame as read. `payload` is a read-only view, 64-byte aligned in memory. A view into a sealed
    segment is the file itself: let go of it before its segment is recycled."""

    lsn: int
    kind: int
    schema_id: int
    rows: int
    time_us: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Header:
    kind: int
    schema_id: int
    rows: int
    epoch: int
    lsn: int
    time_us: int
    length: int
    payload_crc: int
    crc: int

    @property
    def frame_bytes(self) -> int:
        return HEADER_BYTES + padded(self.length)

    @property
    def file_bytes(self) -> int:
        """Of a SEGMENT frame: size that its file durably had when it was written; 0 if the frame is of a time when
        none said so."""
        return self.rows * FILE_UNIT


@dataclass(frozen=True, slots=True)
class Control:
    """Payload of the control frames. first_lsn..last_lsn: the group (COMMIT), or last_lsn alone; durable_lsn:
    known durable when this was written; low_epoch: first epoch still needed; chain: see `extend_chain`;
    opens: how often the journal was opened; journal_id: its uuid."""

    first_lsn: int
    last_lsn: int
    durable_lsn: int
    low_epoch: int
    chain: int
    opens: int
    journal_id: bytes

    def pack(self) -> bytes:
        return CONTROL.pack(
            self.first_lsn,
            self.last_lsn,
            self.durable_lsn,
            self.low_epoch,
            self.chain,
            self.opens,
            self.journal_id,
        )

    @classmethod
    def unpack(cls, payload: Payload) -> Control:
        return cls(*CONTROL.unpack(payload))


def padded(length: int) -> int:
    return (length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def crc32c(data: Any, seed: int = 0) -> int:
    """CRC32C of a contiguous buffer continued from `seed`, without a copy: the C function refuses writable
    memoryviews but takes a numpy array over the same memory."""
    view = data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)
    return int(google_crc32c.extend(seed, view))


def salt_of(journal_id: bytes) -> int:
    return crc32c(journal_id)


def seed_of(kind: int, salt: int) -> int:
    """A SEGMENT frame is readable before the journal's identity is known; every other one is salted."""
    return 0 if kind == SEGMENT else salt


def extend_chain(chain: int, header: bytes, journal_format: int) -> int:
    """The chain runs over the headers (which carry the payload CRCs) of all frames but SEGMENT and SEAL, each
    without its own CRC: a CRC that runs over bytes and then over their own CRC does not depend on the bytes, so
    that the chain of format 1 does no more than count frames."""
    return crc32c(header if journal_format == 1 else header[:-4], chain)


def payload_crc(parts: Sequence[Payload]) -> tuple[int, int]:
    """CRC over the parts and their zero padding, and the unpadded length."""
    crc = length = 0
    for part in parts:
        crc = crc32c(part, crc)
        length += len(part)
    return crc32c(bytes(padded(length) - length), crc), length


def pack_header(
    *,
    kind: int,
    epoch: int,
    lsn: int,
    time_us: int,
    length: int,
    payload_crc: int,
    salt: int,
    schema_id: int = 0,
    rows: int = 0,
) -> bytes:
    head = HEADER.pack(
        MAGIC, VERSION, kind, schema_id, rows, epoch, lsn, time_us, length, 0, payload_crc, 0
    )[:-4]
    return head + crc32c(head, seed_of(kind, salt)).to_bytes(4, "little")


def pack_control(
    kind: int, control: Control, *, epoch: int, time_us: int, salt: int, file_bytes: int = 0
) -> tuple[bytes, bytes]:
    """(header, padded payload) of a control frame; its LSN is that of the last data frame before it. `file_bytes`
    is said by SEGMENT frames alone."""
    assert file_bytes % FILE_UNIT == 0
    payload = control.pack()
    crc, length = payload_crc([payload])
    header = pack_header(
        kind=kind,
        epoch=epoch,
        lsn=control.last_lsn,
        time_us=time_us,
        length=length,
        payload_crc=crc,
        salt=salt,
        rows=file_bytes // FILE_UNIT,
    )
    return header, payload.ljust(padded(length), b"\0")


def unpack_header(data: Payload, salt: int) -> Header | None:
    """The header in the first 64 bytes of `data`, or None if they are not one of this journal."""
    if len(data) < HEADER_BYTES or data[:4] != MAGIC:
        return None
    raw = bytes(data[:HEADER_BYTES])
    _, version, kind, schema_id, rows, epoch, lsn, time_us, length, zero, body, crc = HEADER.unpack(
        raw
    )
    if crc32c(raw[:-4], seed_of(kind, salt)) != crc or version != VERSION or zero:
        return None
    return Header(kind, schema_id, rows, epoch, lsn, time_us, length, body, crc)
