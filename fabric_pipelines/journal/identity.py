"""Who a journal is: its uuid, its incarnation and its format, in one file written once, durably.

The rename of `identity.json` is the moment at which a journal exists; its first segment is durable before.
An identity without segments, or segments with content and no identity, is therefore a loss, never a start.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.errors import CorruptionFound, VersionRefused
from fabric_pipelines.ids import INCARNATION_BITS, draw_incarnation
from fabric_pipelines.journal.files import FileOps, write_all
from fabric_pipelines.journal.frame import crc32c

FORMAT = 2
READABLE = (1, FORMAT)  # 1: with the chain that only counts frames; such a journal stays as it is
NAME = "identity.json"


@dataclass(frozen=True, slots=True)
class Identity:
    journal_id: str
    incarnation: int
    format: int = FORMAT

    @classmethod
    def draw(cls) -> Identity:
        return cls(uuid.uuid4().hex, draw_incarnation())

    @property
    def uuid_bytes(self) -> bytes:
        return bytes.fromhex(self.journal_id)


def write_identity(ops: FileOps, folder: Path, identity: Identity) -> None:
    """Beside, fsync, rename, fsync of the folder."""
    content = {
        "format": identity.format,
        "journal_id": identity.journal_id,
        "incarnation": identity.incarnation,
        "crc32c": _crc_of(identity),
    }
    beside = folder / f"{NAME}.new"
    if beside.name in ops.names(folder):
        ops.unlink(beside)
    fd = ops.open(beside, create=True)
    try:
        write_all(ops, fd, [json.dumps(content).encode() + b"\n"], 0)
        ops.fsync(fd)
    finally:
        ops.close(fd)
    ops.rename(beside, folder / NAME)
    ops.fsync_folder(folder)


def _crc_of(identity: Identity) -> int:
    said = f"{identity.format} {identity.journal_id} {identity.incarnation}"
    return crc32c(said.encode())


def read_identity(ops: FileOps, folder: Path) -> Identity | None:
    """None if the journal was never created. Raises CorruptionFound if the file is unreadable as JSON or does not match
    its CRC32C, which files from before have none of, and VersionRefused for another format."""
    if NAME not in ops.names(folder):
        return None
    path = folder / NAME
    try:
        content = json.loads(ops.read_bytes(path))
        found = int(content["format"])
        identity = Identity(str(content["journal_id"]), int(content["incarnation"]), found)
        whole = len(identity.uuid_bytes) == 16 and 0 < identity.incarnation < 1 << INCARNATION_BITS
    except (ValueError, KeyError, TypeError) as fault:
        raise CorruptionFound(
            f"{path} is not readable ({fault}): restore this file from a copy; its journal_id also stands "
            "in every segment and in the database"
        ) from fault
    if found not in READABLE:
        raise VersionRefused(
            f"{path} has journal format {found}, this version reads formats up to {FORMAT}: use the version that "
            "wrote it"
        )
    if "crc32c" in content and content["crc32c"] != _crc_of(identity):
        raise CorruptionFound(
            f"{path} does not match its CRC32C: restore this file from a copy; its journal_id also stands in every "
            "segment and in the database"
        )
    if not whole:
        raise CorruptionFound(f"{path} holds an impossible identity: restore this file from a copy")
    return identity
