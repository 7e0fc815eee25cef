"""Mending: the small files beside the segments, compared with what the open journal has known since they were whole.

`identity.json` and the stubs are read at the start and never again, so a bit that flips in one of them later would only
refuse the next start. A journal that is open knows every byte of them: it says which is not what it was, and writes that
one again. Touches no segment: bytes of the log are never made up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.errors import FabricError
from fabric_pipelines.journal.files import FileOps, read_exactly
from fabric_pipelines.journal.identity import NAME, Identity, read_identity, write_identity
from fabric_pipelines.journal.stub import Stub, write_stub


@dataclass(frozen=True, slots=True)
class Mended:
    """A file of `size` bytes that was missing (size 0) or not what was written, and is again."""

    path: Path
    size: int


def mend(ops: FileOps, folder: Path, identity: Identity, stubs: Iterable[Stub]) -> list[Mended]:
    """Each is durable on return. Raises OSError; a file is then as it was."""
    mended: list[Mended] = []
    if not _is_read(ops, folder, identity):
        mended.append(Mended(folder / NAME, len(_bytes_of(ops, folder, NAME) or b"")))
        write_identity(ops, folder, identity)
    for stub in stubs:
        found = _bytes_of(ops, folder, stub.file_name)
        if found != stub.pack(identity.uuid_bytes):
            mended.append(Mended(folder / stub.file_name, len(found or b"")))
            write_stub(ops, folder, stub, identity.uuid_bytes)
    return mended


def _is_read(ops: FileOps, folder: Path, identity: Identity) -> bool:
    """Whether the next start finds it. Not compared byte by byte: one of an earlier version has no CRC32C."""
    try:
        return read_identity(ops, folder) == identity
    except FabricError:
        return False


def _bytes_of(ops: FileOps, folder: Path, name: str) -> bytes | None:
    if name not in ops.names(folder):
        return None
    fd = ops.open(folder / name)
    try:
        ops.forget_cache(fd)
        return bytes(read_exactly(ops, fd, ops.size(fd), 0))
    finally:
        ops.close(fd)
