"""Watch: whether an open file of the journal is still the one that its name leads to, in its full size.

A descriptor outlives its name: writes and fsyncs go on succeeding in a file that no restart finds. Nothing here
tells what a segment holds; bytes that were changed in place are the scrub's.
"""

from __future__ import annotations

from fabric_pipelines.errors import HomeGone
from fabric_pipelines.journal.files import FileOps
from fabric_pipelines.journal.segment import Segment


def loss_of(
    ops: FileOps, segment: Segment, seen: tuple[int, int], *, by_name: bool
) -> HomeGone | None:
    """Why nothing more may be acknowledged; None as long as all is well. Without `by_name` only the descriptor is asked,
    which costs a microsecond and does not see that the file was moved away. Of a cold segment the stub must be there.
    `seen`: the durable LSN when all files were last seen whole, and now."""
    how = _loss(ops, segment, by_name=by_name)
    if not how:
        return None
    since, last = seen[0] + 1, seen[1]
    if segment.first_lsn <= last:
        held = f"LSN {segment.first_lsn}..{min(segment.last_lsn, last)}, which are acknowledged, lie in it"
    else:
        held = "nothing in it is acknowledged"
    told = f"LSN {since}..{last} were" if since <= last else "nothing was"
    return HomeGone(
        f"{segment.path} was {how} while the broker ran, so it stopped: {held}, and {told} acknowledged since all files "
        "were last seen whole; put the file back or restore it from a copy, then start the broker again"
    )


def _loss(ops: FileOps, segment: Segment, *, by_name: bool) -> str:
    if segment.cold:
        return "" if ops.status_of(segment.path) is not None else "moved or deleted"
    mine = ops.status(segment.fd)
    if not mine.links:
        there = ops.status_of(segment.path)
        return "deleted" if there is None else "replaced by another"
    if mine.size < segment.size:
        return f"cut short to {mine.size} of its {segment.size} bytes"
    if by_name:
        there = ops.status_of(segment.path)
        if there is None:
            return "moved or deleted"
        if (there.device, there.inode) != (mine.device, mine.inode):
            return "replaced by another"
    return ""
