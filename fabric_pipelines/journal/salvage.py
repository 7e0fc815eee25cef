"""Salvage: what is left of a journal that recovery refuses, for telling what is gone. Never a journal again.

Every frame that is whole by itself, in order, of whatever part of the log; in between, those that are not and still
look like one of their segment. Nothing here is fit to be replayed: frames behind a torn tail are among them, and the chain is not
looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.journal.damage import next_magic
from fabric_pipelines.journal.files import FileOps
from fabric_pipelines.journal.frame import (
    ALIGNMENT,
    CONTROL_KINDS,
    DATA_KIND_MAX,
    HEADER,
    HEADER_BYTES,
    SEGMENT,
    salt_of,
)
from fabric_pipelines.journal.segment import SUFFIX, Window, frame_at


@dataclass(frozen=True, slots=True)
class Salvaged:
    """A data frame by its own header. `whole`: header and payload are what was written; else any of it may not be."""

    lsn: int
    kind: int
    rows: int
    whole: bool
    payload: memoryview


def salvage(ops: FileOps, folder: Path, journal_id: bytes) -> Iterator[Salvaged]:
    """In the order of epochs, then of places; raises OSError."""
    paths = [folder / name for name in ops.names(folder) if name.endswith(SUFFIX)]
    fds: dict[Path, int] = {}
    try:
        epochs: dict[int, Window] = {}
        for path in paths:
            fds[path] = ops.open(path)
            window = Window(ops, fds[path], ops.size(fds[path]))
            found = frame_at(window, 0, epoch=None, salt=0)
            if found is None or found.control is None or found.header.kind != SEGMENT:
                continue
            if found.control.journal_id == journal_id:
                epochs[found.header.epoch] = window
        for epoch, window in sorted(epochs.items()):
            yield from _frames(window, epoch, salt_of(journal_id))
    finally:
        for fd in fds.values():
            ops.close(fd)


def _frames(window: Window, epoch: int, salt: int) -> Iterator[Salvaged]:
    offset = 0
    while (offset := next_magic(window, offset)) < window.size:
        found = frame_at(window, offset, epoch=epoch, salt=salt)
        if found is not None:
            header = found.header
            if header.kind not in CONTROL_KINDS:
                yield Salvaged(header.lsn, header.kind, header.rows, True, found.payload)
            offset += header.frame_bytes
            continue
        raw = window.at(offset, HEADER_BYTES)
        if len(raw) == HEADER_BYTES:
            _, _, kind, _, rows, of, lsn, _, length, _, _, _ = HEADER.unpack(raw)
            if of == epoch and kind <= DATA_KIND_MAX and length < window.size - offset:
                payload = window.at(offset + HEADER_BYTES, length)
                yield Salvaged(lsn, kind, rows, False, payload)
        offset += ALIGNMENT
