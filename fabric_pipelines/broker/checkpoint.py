"""Checkpoint files: one snapshot each, compressed column by column, every byte of it under a CRC (FORMAT.md).

Written into a file that lies ready, fsynced, renamed, folder fsynced. A file counts only if the log holds a
CHECKPOINT fact with its digest: one from a moment that the log does not know, or with a flipped bit anywhere,
is not there. Refuses to repair or to guess.
"""

from __future__ import annotations

import errno
import hashlib
import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fabric_pipelines.broker.facts import CheckpointTaken
from fabric_pipelines.broker.snapshot import Column, Snapshot
from fabric_pipelines.errors import StorageFailed
from fabric_pipelines.ids import canonical_json
from fabric_pipelines.journal.files import FileOps, read_exactly, write_all
from fabric_pipelines.journal.frame import crc32c, padded

MAGIC = b"FPC\x01"
VERSION = 1
PREAMBLE = struct.Struct("<4sIQI44x")
ALIGNMENT = 64
PREFIX = "checkpoint-"
READY = "checkpoint.new"
RESERVE_STEP = 1 << 16
FULL = (errno.ENOSPC, errno.EDQUOT)
assert PREAMBLE.size == ALIGNMENT

Codec = Any  # pyarrow ships no types


class Checkpoints:
    """The checkpoint files in a journal's folder, and their one owner: nobody else makes or removes any. From `claim`
    to `release` the one under way is out of everybody's reach but that of `write`, which alone may run in a helper's
    thread: its file has its name long before a fact tells of it."""

    def __init__(self, folder: Path, journal_id: str, ops: FileOps) -> None:
        self._folder, self._journal_id, self._ops = folder, journal_id, ops
        self._reserved = 0
        self._claimed: int | None = None
        self.refused_bytes = 0  # of the last one that `write` had no room for

    def claim(self, lsn: int) -> None:
        """A checkpoint over everything up to `lsn` is under way."""
        assert self._claimed is None, f"the checkpoint of LSN {self._claimed} is under way"
        self._claimed = lsn

    def release(self) -> None:
        """A fact tells of it now, or it came to nothing."""
        assert self._claimed is not None, "no checkpoint is under way"
        self._claimed = None

    def write(self, snapshot: Snapshot, lsn: int) -> CheckpointTaken | None:
        """Durable and read back on return; the columns of `snapshot` are let go one by one. None if the disk has no room for it: a checkpoint can wait. Any other
        error is StorageFailed, as for the journal itself."""
        assert lsn == self._claimed, f"the checkpoint of LSN {lsn} is not the one under way"
        pieces, digest = encode(snapshot.head, snapshot.drained(), lsn, self._journal_id)
        size = sum(map(len, pieces))
        path = self._folder / f"{PREFIX}{lsn:016d}"
        ready = self._folder / READY
        try:
            fd = self._ops.open(ready, create=READY not in self._ops.names(self._folder))
            try:
                write_all(self._ops, fd, pieces, 0)
                self._ops.fsync(fd)
            finally:
                self._ops.close(fd)
            self._ops.rename(ready, path)
            self._ops.fsync_folder(self._folder)
        except OSError as fault:
            if fault.errno in FULL:
                self.refused_bytes = size
                return None
            raise _failed(path, "written", fault) from fault
        self._reserved = 0
        fact = CheckpointTaken(lsn, digest, size)
        if isinstance(found := self.load(fact), str):
            raise StorageFailed(f"{found}, just after it was written: check the disk")
        return fact

    def reserve(self, size: int) -> bool:
        """Have so many bytes ready for the next one, so that a full disk can still be emptied. Whether they are."""
        assert self._claimed is None, "what lies ready is the one under way's"
        if size <= self._reserved:
            return True
        wanted = _stepped(size)
        ready = self._folder / READY
        try:
            fd = self._ops.open(ready, create=READY not in self._ops.names(self._folder))
            try:
                self._ops.fallocate(fd, wanted)
            finally:
                self._ops.close(fd)
            self._reserved = wanted
        except OSError as fault:
            if fault.errno not in FULL:
                raise _failed(ready, "prepared", fault) from fault
        return size <= self._reserved

    def lacks(self, size: int) -> int:
        """Bytes that the disk must have free for `reserve` to say yes."""
        ready = self._folder / READY
        try:
            if READY not in self._ops.names(self._folder):
                return _stepped(size)
            fd = self._ops.open(ready)
            try:
                return max(_stepped(size) - self._ops.size(fd), 0)
            finally:
                self._ops.close(fd)
        except OSError as fault:
            raise _failed(ready, "looked at", fault) from fault

    @property
    def is_claimed(self) -> bool:
        """One is under way."""
        return self._claimed is not None

    def load(self, fact: CheckpointTaken) -> Snapshot | str:
        """The snapshot that the fact speaks of, or why there is none."""
        path = self._folder / f"{PREFIX}{fact.lsn:016d}"
        try:
            if path.name not in self._ops.names(self._folder):
                return f"{path.name} is missing"
            raw = self._read(path)
        except OSError as fault:
            raise _failed(path, "read", fault) from fault
        found = decode(raw, fact.lsn, self._journal_id, fact.digest)
        return f"{path.name} {found}" if isinstance(found, str) else found

    def path_of(self, lsn: int) -> Path:
        return self._folder / f"{PREFIX}{lsn:016d}"

    def remains(self, path: Path) -> Snapshot | None:
        """What is whole of a file that `load` refuses, for telling what is gone: its head and those columns whose CRC
        fits. None if not even the head is. Never a state again. Raises OSError."""
        if path.name not in self._ops.names(self._folder):
            return None
        raw = self._read(path)
        text = _told_head(raw)
        stored = {} if text is None else _parts(raw, text)[0]
        return _snapshot_of(stored) if "head" in stored else None

    def holds(self, fact: CheckpointTaken) -> bool:
        """Whether there is a file for that fact, whole or not."""
        path = self.path_of(fact.lsn)
        try:
            return path.name in self._ops.names(self._folder)
        except OSError as fault:
            raise _failed(path, "looked for", fault) from fault

    def require(self, fact: CheckpointTaken) -> None:
        """StorageFailed unless the file that the fact speaks of is here. Its head is compared, which covers the CRCs of its
        columns; these were read back, and the file was durable, before there was a fact."""
        path = self._folder / f"{PREFIX}{fact.lsn:016d}"
        try:
            found = self._digest(path, fact.size)
        except OSError as fault:
            raise _failed(path, "read", fault) from fault
        if found != fact.digest:
            how = "is missing" if found is None else "is not what was written, or cut short"
            raise StorageFailed(
                f"{path} {how}, so nothing that it stands for was dropped from the log: start the broker again, which "
                "reads the log itself; see to it that nothing else touches that folder"
            )

    def _digest(self, path: Path, size: int) -> str | None:
        """Of the head of a file; None if there is none, "" if it has fewer bytes."""
        if path.name not in self._ops.names(self._folder):
            return None
        fd = self._ops.open(path)
        try:
            if self._ops.size(fd) < size:
                return ""
            length = PREAMBLE.unpack(read_exactly(self._ops, fd, PREAMBLE.size, 0))[2]
            whole = min(padded(PREAMBLE.size + length), size)
            return hashlib.sha256(read_exactly(self._ops, fd, whole, 0)).hexdigest()
        finally:
            self._ops.close(fd)

    def _read(self, path: Path) -> memoryview:
        fd = self._ops.open(path)
        try:
            self._ops.forget_cache(fd)
            return read_exactly(self._ops, fd, self._ops.size(fd), 0)
        finally:
            self._ops.close(fd)

    def keep(self, lsns: Collection[int]) -> None:
        """Remove the files of all other checkpoints, but for the one under way. The first of them is what the next one is
        written into: on a full disk its space might be gone by then."""
        kept = {*lsns, self._claimed}
        try:
            names = self._ops.names(self._folder)
            has_next = READY in names or self._claimed is not None
            for name in names:
                number = name.removeprefix(PREFIX)
                if number != name and number.isdigit() and int(number) not in kept:
                    if has_next:
                        self._ops.unlink(self._folder / name)
                    else:
                        self._ops.rename(self._folder / name, self._folder / READY)
                        has_next = True
        except OSError as fault:
            raise _failed(self._folder, "rid of old checkpoints", fault) from fault


def _stepped(size: int) -> int:
    return (size // RESERVE_STEP + 1) * RESERVE_STEP


def _failed(path: Path, doing: str, fault: OSError) -> StorageFailed:
    return StorageFailed(
        f"{path} could not be {doing} ({fault.strerror or fault}): check the disk, then start the broker again"
    )


def encode(
    head: bytes, columns: Iterable[tuple[str, Column]], lsn: int, journal_id: str
) -> tuple[list[bytes | memoryview], str]:
    """The pieces of the file, one after the other, and the digest of its head, which covers them all. Nothing is
    copied on the way: a column of ten million keys is 80 MB, packed or not."""
    codec: Codec = pa.Codec("zstd", 1)
    sections, offset = [], 0
    bodies: list[bytes | memoryview] = []
    for name, column in chain([("head", np.frombuffer(head, np.uint8))], columns):
        plain = np.ascontiguousarray(column)
        body = _packed(codec, plain)
        sections.append(
            {
                "name": name,
                "dtype": plain.dtype.str,
                "shape": list(plain.shape),
                "offset": offset,
                "stored": len(body),
                "crc32c": crc32c(body),
            }
        )
        bodies += [body, bytes(padded(len(body)) - len(body))]
        offset += padded(len(body))
    text = canonical_json({"journal_id": journal_id, "lsn": lsn, "sections": sections})
    preamble = PREAMBLE.pack(MAGIC, VERSION, len(text), crc32c(text))
    whole = (preamble + text).ljust(padded(PREAMBLE.size + len(text)), b"\0")
    return [whole, *bodies], hashlib.sha256(whole).hexdigest()


def _packed(codec: Codec, plain: Column) -> memoryview:
    if not plain.nbytes:
        return memoryview(b"")
    packed = codec.compress(pa.py_buffer(plain))
    # a resized Arrow buffer still tells memoryview the length it once had; a slice of it does not
    return memoryview(packed.slice(0, packed.size))


def decode(raw: memoryview, lsn: int, journal_id: str, digest: str) -> Snapshot | str:
    """The snapshot in the bytes of a file, or what is wrong with them."""
    if len(raw) < PREAMBLE.size:
        return "is cut short"
    magic, version, length, _ = PREAMBLE.unpack_from(raw)
    start = padded(PREAMBLE.size + length)
    if magic != MAGIC or version != VERSION or start > len(raw):
        return "is damaged, or of another version"
    text = bytes(raw[PREAMBLE.size : PREAMBLE.size + length])
    if hashlib.sha256(raw[:start]).hexdigest() != digest:  # which covers the head's CRC, too
        return "is not the one that the log speaks of"
    head = json.loads(text)
    if (head["journal_id"], head["lsn"]) != (journal_id, lsn):
        return "is of another journal or moment"
    stored, damaged = _parts(raw, text)
    return f"is damaged in its column {damaged[0]}" if damaged else _snapshot_of(stored)


def _told_head(raw: memoryview) -> bytes | None:
    """The head of a file of which no fact's digest is at hand, if it fits its own CRC."""
    if len(raw) < PREAMBLE.size:
        return None
    magic, version, length, crc = PREAMBLE.unpack_from(raw)
    text = bytes(raw[PREAMBLE.size : PREAMBLE.size + length])
    known = (magic, version, len(text)) == (MAGIC, VERSION, length)
    return None if not known or crc32c(text) != crc else text


def _parts(
    raw: memoryview, text: bytes
) -> tuple[dict[str, tuple[dict[str, Any], memoryview]], list[str]]:
    """The columns that are whole by their CRCs, and the names of the others. `text`: of the head."""
    start = padded(PREAMBLE.size + len(text))
    stored: dict[str, tuple[dict[str, Any], memoryview]] = {}
    damaged: list[str] = []
    for section in json.loads(text)["sections"]:
        begin = start + section["offset"]
        body = raw[begin : begin + section["stored"]]
        if len(body) != section["stored"] or crc32c(body) != section["crc32c"]:
            damaged.append(section["name"])
        else:
            stored[section["name"]] = section, body
    return stored, damaged


def _snapshot_of(stored: dict[str, tuple[dict[str, Any], memoryview]]) -> Snapshot:
    first = _Packed({"head": stored.pop("head")})
    return Snapshot(first["head"].tobytes(), _Packed(stored))


class _Packed(Mapping[str, Column]):
    """Columns as they lie in the file, whole by their CRCs; each is unpacked when somebody asks for it, so that all of
    them are never in memory at once."""

    def __init__(self, stored: dict[str, tuple[dict[str, Any], memoryview]]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Column:
        section, body = self._stored[name]
        codec: Codec = pa.Codec("zstd")
        dtype, shape = np.dtype(section["dtype"]), tuple(section["shape"])
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        plain = codec.decompress(pa.py_buffer(body), size) if size else b""
        return np.frombuffer(plain, dtype).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)
