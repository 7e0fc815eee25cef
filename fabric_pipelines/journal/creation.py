"""Making a journal where none is: first segment durable, then the identity, whose rename is the moment it exists.

What an unfinished creation left is removed; anything that holds frames without an identity is a loss, and refused.
"""

from __future__ import annotations

from pathlib import Path

from fabric_pipelines.clock import Clock
from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.journal.files import FileOps, write_all
from fabric_pipelines.journal.frame import SEGMENT, Control, pack_control, salt_of
from fabric_pipelines.journal.identity import Identity, write_identity
from fabric_pipelines.journal.recovery import holds_frames
from fabric_pipelines.journal.segment import SUFFIX


def create(ops: FileOps, folder: Path, segment_bytes: int, clock: Clock) -> Identity:
    """First segment durable, then the identity: its rename is the moment the journal exists."""
    for name in ops.names(folder):
        if name.endswith(SUFFIX):
            _remove_stillborn(ops, folder / name)
    identity = Identity.draw()
    fd = ops.open(folder / f"{1:08d}{SUFFIX}", create=True)
    try:
        ops.fallocate(fd, segment_bytes)
        control = Control(0, 0, 0, 1, 0, 0, identity.uuid_bytes)
        salt = salt_of(identity.uuid_bytes)
        first = pack_control(
            SEGMENT,
            control,
            epoch=1,
            time_us=clock.wall_us(),
            salt=salt,
            file_bytes=segment_bytes,
        )
        write_all(ops, fd, first, 0)
        ops.fsync(fd)
    finally:
        ops.close(fd)
    ops.fsync_folder(folder)
    write_identity(ops, folder, identity)
    return identity


def _remove_stillborn(ops: FileOps, path: Path) -> None:
    """A crash during creation leaves a segment without content. One with content means a lost identity."""
    fd = ops.open(path)
    try:
        if holds_frames(ops, fd):
            raise CorruptionFound(
                f"{path} holds frames but the journal's identity.json is missing: restore that file from a "
                "copy, or move the segments away to start anew"
            )
    finally:
        ops.close(fd)
    ops.unlink(path)
