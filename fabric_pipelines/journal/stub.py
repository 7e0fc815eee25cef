"""The stub of a cold segment: what stays on this disk when its bytes are in the store (FORMAT.md, "Stub file").

It says which object, how large and with which CRC32C, where each frame lies in it and which CRC its header ends in,
and what the chain was at both ends, so that an open needs nothing from the store and the first frame that is read of
another object under that name is refused. Durable before the object is put: whatever may be in the store
has a stub here, so that nothing there is ever forgotten.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.journal.files import FileOps, read_exactly, write_all
from fabric_pipelines.journal.frame import crc32c
from fabric_pipelines.journal.index import columns_of

SUFFIX = ".cold"
MAGIC = b"FPT\x01"
VERSION = 2
READABLE = {1: 10, VERSION: 14}  # bytes a frame; of version 1 the frames' CRCs are not known
HEADER = struct.Struct("<4sIQQQQQQIIIII16s")


@dataclass(frozen=True, slots=True)
class Stub:
    """`size` and `crc`: of the whole object. `start_chain`: as its SEGMENT frame has it; `chain`, `durable_lsn`,
    `low_epoch`, `opens`: as the SEAL frame does. `where`: the store it went to, for people. `crcs`: of the header of
    each data frame; empty in one of version 1."""

    epoch: int
    first_lsn: int
    size: int
    crc: int
    durable_lsn: int
    low_epoch: int
    start_chain: int
    chain: int
    opens: int
    where: str
    offsets: array[int]
    kinds: array[int]
    crcs: array[int]

    @property
    def last_lsn(self) -> int:
        return self.first_lsn + len(self.offsets) - 1

    @property
    def file_name(self) -> str:
        return f"epoch-{self.epoch:08d}{SUFFIX}"

    def pack(self, journal_id: bytes) -> bytes:
        where = self.where.encode()
        head = HEADER.pack(
            MAGIC,
            VERSION if len(self.crcs) == len(self.offsets) else 1,
            self.epoch,
            self.first_lsn,
            len(self.offsets),
            self.size,
            self.durable_lsn,
            self.low_epoch,
            self.start_chain,
            self.chain,
            self.opens,
            self.crc,
            len(where),
            journal_id,
        )
        columns = self.offsets.tobytes() + self.kinds.tobytes() + self.crcs.tobytes()
        body = head + where + columns
        return body + crc32c(body).to_bytes(4, "little")


def unpack_stub(raw: memoryview, journal_id: bytes) -> Stub | None:
    """None for anything but a whole stub of this journal."""
    if len(raw) < HEADER.size + 4:
        return None
    (
        magic,
        version,
        epoch,
        first_lsn,
        count,
        size,
        durable_lsn,
        low_epoch,
        start_chain,
        chain,
        opens,
        crc,
        where_bytes,
        owner,
    ) = HEADER.unpack_from(raw)
    at = HEADER.size + where_bytes
    if (magic, owner) != (MAGIC, journal_id) or version not in READABLE:
        return None
    end = at + count * READABLE[version]
    if end + 4 != len(raw):
        return None
    if crc32c(raw[:end]).to_bytes(4, "little") != bytes(raw[end:]):
        return None
    offsets, kinds, crcs = columns_of(raw[at:end], count)
    return Stub(
        epoch=epoch,
        first_lsn=first_lsn,
        size=size,
        crc=crc,
        durable_lsn=durable_lsn,
        low_epoch=low_epoch,
        start_chain=start_chain,
        chain=chain,
        opens=opens,
        where=bytes(raw[HEADER.size : at]).decode(),
        offsets=offsets,
        kinds=kinds,
        crcs=crcs,
    )


def write_stub(ops: FileOps, folder: Path, stub: Stub, journal_id: bytes) -> None:
    """Beside, fsync, rename, fsync of the folder."""
    beside = folder / f"{stub.file_name}.new"
    if beside.name in ops.names(folder):
        ops.unlink(beside)
    fd = ops.open(beside, create=True)
    try:
        write_all(ops, fd, [stub.pack(journal_id)], 0)
        ops.fsync(fd)
    finally:
        ops.close(fd)
    ops.rename(beside, folder / stub.file_name)
    ops.fsync_folder(folder)


def read_stubs(
    ops: FileOps, folder: Path, journal_id: bytes
) -> tuple[dict[int, Stub], dict[int, Path]]:
    """(whole stubs, files that are none) by epoch. CorruptionFound for one that says it is of another epoch than
    its name."""
    stubs: dict[int, Stub] = {}
    damaged: dict[int, Path] = {}
    for name in ops.names(folder):
        number = name.removeprefix("epoch-").removesuffix(SUFFIX)
        if name != f"epoch-{number}{SUFFIX}" or not number.isdigit():
            continue
        path = folder / name
        fd = ops.open(path)
        try:
            ops.forget_cache(fd)  # it was durable before it had this name
            stub = unpack_stub(read_exactly(ops, fd, ops.size(fd), 0), journal_id)
        finally:
            ops.close(fd)
        if stub is None:
            damaged[int(number)] = path
        elif stub.file_name != name:
            raise CorruptionFound(
                f"{path} is the stub of epoch {stub.epoch} under another name: move the copy away"
            )
        else:
            stubs[stub.epoch] = stub
    return stubs, damaged
