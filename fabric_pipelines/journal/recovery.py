"""Reading a journal back after any crash: what is whole, what may be cut, what is corrupt.

One rule decides. Scanning in order stops at the first bytes that are not the next whole commit group. If
anything readable behind that point records a durable LSN above the last whole group, acknowledged work
is unreadable: CorruptionFound. If nothing does, no acknowledgement can have been recorded for it: cut, however
valid some later frames may be, since unsynced pages reach the disk in any order. Repairs nothing.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.journal.damage import TO_THE_END, Place, next_magic, places, told
from fabric_pipelines.journal.files import FileOps
from fabric_pipelines.journal.frame import (
    ALIGNMENT,
    COMMIT,
    CONTROL_FRAME_BYTES,
    CONTROL_KINDS,
    DURABLE,
    OPENED,
    SEAL,
    SEGMENT,
    Control,
    Header,
    extend_chain,
    salt_of,
)
from fabric_pipelines.journal.identity import Identity
from fabric_pipelines.journal.index import read_index
from fabric_pipelines.journal.segment import (
    FIRST_FRAME_OFFSET,
    SUFFIX,
    Found,
    Segment,
    Window,
    frame_at,
)
from fabric_pipelines.journal.stub import Stub, read_stubs


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """segments, frames: live ones read; last_lsn: last one kept; recorded_durable_lsn: the highest durable
    LSN that the journal itself recorded; cut_frames: readable frames behind the last whole group, dropped;
    opens: how often the journal was opened before."""

    segments: int
    frames: int
    last_lsn: int
    recorded_durable_lsn: int
    cut_frames: int
    opens: int


@dataclass(slots=True)
class Recovered:
    segments: list[Segment]
    free: list[Path]
    chain: int
    low_epoch: int
    unfinished_roll: Segment | None
    stubs: dict[int, Stub]
    report: RecoveryReport


@dataclass(slots=True)
class Scan:
    """What one segment holds up to its last whole commit group. `end` is the offset behind it."""

    last_lsn: int
    chain: int
    durable_lsn: int
    low_epoch: int
    opens: int
    end: int = FIRST_FRAME_OFFSET
    sealed: bool = False
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    kinds: array[int] = field(default_factory=lambda: array("H"))
    crcs: array[int] = field(default_factory=lambda: array("I"))
    unread: bool = False


@dataclass(frozen=True, slots=True)
class Beyond:
    """Readable frames of this epoch behind `Scan.end`. opens: the latest life of which more than its OPENED frame is
    among them."""

    frames: int
    last_lsn: int
    durable_lsn: int
    opens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A segment file or, with `stub`, what stands here for one in the cold tier. `least`: bytes that the file has had
    since before its SEGMENT frame, 0 if that does not say."""

    path: Path
    fd: int
    size: int
    epoch: int
    start: Control
    least: int = 0
    stub: Stub | None = None


def recover(
    ops: FileOps, folder: Path, identity: Identity, fds: dict[Path, int], *, lazy: bool = False
) -> Recovered:
    """Read every segment of `folder`; with `lazy` not those sealed ones whose index file and SEAL frame agree.
    Opened descriptors are left in `fds`, whatever happens."""
    candidates, unreadable = _candidates(ops, folder, identity, fds)
    if not candidates:
        raise CorruptionFound(
            f"journal {folder} has an identity but no readable segment{_suspects(unreadable)}: everything it held is "
            "missing; restore the folder from a copy"
        )
    newest = candidates[max(candidates)]
    _refuse_shortened(newest)
    salt = salt_of(identity.uuid_bytes)
    tail = _scan(ops, newest, salt, identity.format)
    beyond = _beyond(Window(ops, newest.fd, newest.size), tail.end, newest.epoch, salt)
    if beyond.durable_lsn > tail.last_lsn:
        raise _damaged(ops, newest, tail, beyond.durable_lsn, salt)
    if beyond.opens > tail.opens:
        raise CorruptionFound(
            f"segment {newest.path} is damaged at offset {tail.end}: the OPENED frame of start {beyond.opens} was durable "
            "before what follows it and cannot be read; restore the file from a copy"
        )
    _refuse_sealed_tail(newest, tail, unreadable)
    free = [*unreadable]
    free += [candidates[epoch].path for epoch in sorted(candidates) if epoch < tail.low_epoch]
    stubs, damaged = read_stubs(ops, folder, identity.uuid_bytes)
    cold = {epoch: _of_stub(folder, stub, identity) for epoch, stub in stubs.items()}
    live = _live(folder, cold | candidates, tail.low_epoch, max(candidates), damaged, unreadable)
    for candidate, following in pairwise(live):
        _refuse_shortened(candidate, following.start.last_lsn)

    scans = [_scan_of(ops, candidate, identity, salt, lazy) for candidate in live[:-1]]
    scans.append(tail)
    untouched = tail.end == FIRST_FRAME_OFFSET and beyond.frames == 0
    unfinished = _require_joined(ops, live, scans, untouched, salt)
    segments = [
        Segment(
            path=candidate.path,
            fd=candidate.fd,
            size=candidate.size,
            epoch=candidate.epoch,
            first_lsn=candidate.start.last_lsn + 1,
            end=scan.end,
            offsets=scan.offsets,
            kinds=scan.kinds,
            crcs=scan.crcs,
            sealed=scan.sealed,
            unread=bytearray(b"\1") * len(scan.offsets) if scan.unread else None,
            cold=candidate.stub is not None,
        )
        for candidate, scan in zip(live, scans, strict=True)
    ]
    report = RecoveryReport(
        segments=len(segments),
        frames=sum(len(segment.offsets) for segment in segments),
        last_lsn=tail.last_lsn,
        recorded_durable_lsn=tail.durable_lsn,
        cut_frames=beyond.frames,
        opens=tail.opens,
    )
    return Recovered(
        segments=segments,
        free=free,
        chain=tail.chain,
        low_epoch=tail.low_epoch,
        unfinished_roll=segments[-2] if unfinished else None,
        stubs=stubs,
        report=report,
    )


def _of_stub(folder: Path, stub: Stub, identity: Identity) -> Candidate:
    before = stub.first_lsn - 1
    start = Control(
        before, before, before, stub.low_epoch, stub.start_chain, stub.opens, identity.uuid_bytes
    )
    return Candidate(folder / stub.file_name, -1, stub.size, stub.epoch, start, stub=stub)


def _scan_of(ops: FileOps, candidate: Candidate, identity: Identity, salt: int, lazy: bool) -> Scan:
    stub = candidate.stub
    if stub is None:
        summary = _summary(ops, candidate, identity, salt) if lazy else None
        return summary or _scan(ops, candidate, salt, identity.format)
    return Scan(
        last_lsn=stub.last_lsn,
        chain=stub.chain,
        durable_lsn=stub.durable_lsn,
        low_epoch=stub.low_epoch,
        opens=stub.opens,
        end=stub.size,
        sealed=True,
        offsets=stub.offsets,
        kinds=stub.kinds,
        crcs=stub.crcs,
        unread=True,
    )


def _summary(ops: FileOps, candidate: Candidate, identity: Identity, salt: int) -> Scan | None:
    """What `_scan` would find, from the index file and the SEAL frame alone; None unless both fit this very
    use of the segment file. The SEAL frame's chain covers every frame header, payload CRCs included."""
    index = read_index(ops, candidate.path, identity.uuid_bytes)
    if index is None or (index.epoch, index.first_lsn) != (
        candidate.epoch,
        candidate.start.last_lsn + 1,
    ):
        return None
    if index.end > candidate.size:
        return None  # the file was cut short: its frames say which are gone
    offset = index.end - CONTROL_FRAME_BYTES
    window = Window(ops, candidate.fd, candidate.size, step=CONTROL_FRAME_BYTES)
    seal = frame_at(window, offset, epoch=candidate.epoch, salt=salt)
    if seal is None or seal.control is None or seal.header.kind != SEAL:
        return None
    control = seal.control
    if (control.last_lsn, control.chain) != (index.last_lsn, index.chain):
        return None
    return Scan(
        last_lsn=control.last_lsn,
        chain=control.chain,
        durable_lsn=control.durable_lsn,
        low_epoch=control.low_epoch,
        opens=control.opens,
        end=index.end,
        sealed=True,
        offsets=index.offsets,
        kinds=index.kinds,
        crcs=index.crcs,
        unread=True,
    )


def holds_frames(ops: FileOps, fd: int) -> bool:
    """Whether a segment of unknown identity holds anything behind its SEGMENT frame."""
    window = Window(ops, fd, ops.size(fd))
    start = frame_at(window, 0, epoch=None, salt=0)
    if start is None or start.control is None or start.header.kind != SEGMENT:
        return False
    salt = salt_of(start.control.journal_id)
    return _beyond(window, FIRST_FRAME_OFFSET, start.header.epoch, salt).frames > 0


def _candidates(
    ops: FileOps, folder: Path, identity: Identity, fds: dict[Path, int]
) -> tuple[dict[int, Candidate], dict[Path, int]]:
    """The segment files that begin with a SEGMENT frame, by epoch, and the sizes of those that do not."""
    candidates: dict[int, Candidate] = {}
    unreadable: dict[Path, int] = {}
    for name in ops.names(folder):
        if not name.endswith(SUFFIX):
            continue
        path = folder / name
        fd = fds[path] = ops.open(path)
        # What a killed process left in the page cache must be durable before it is believed, and what a
        # failed fsync left there must not be seen at all.
        ops.fdatasync(fd)
        ops.forget_cache(fd)
        size = ops.size(fd)
        first = Window(ops, fd, size, step=CONTROL_FRAME_BYTES)
        found = frame_at(first, 0, epoch=None, salt=0)
        if found is None or found.control is None or found.header.kind != SEGMENT:
            unreadable[path] = size
            continue
        if found.control.journal_id != identity.uuid_bytes:
            raise CorruptionFound(
                f"segment {path} belongs to journal {found.control.journal_id.hex()}, this one is "
                f"{identity.journal_id}: move the file away"
            )
        epoch = found.header.epoch
        if epoch in candidates:
            raise CorruptionFound(
                f"segments {candidates[epoch].path.name} and {name} in {folder} both claim epoch {epoch}: "
                "move the copy away"
            )
        candidates[epoch] = Candidate(path, fd, size, epoch, found.control, found.header.file_bytes)
    return candidates, unreadable


def _scan(ops: FileOps, candidate: Candidate, salt: int, journal_format: int) -> Scan:
    """Follow the frames of one segment, group by group, to the last whole one."""
    window = Window(ops, candidate.fd, candidate.size)
    start = candidate.start
    scan = Scan(
        last_lsn=start.last_lsn,
        chain=start.chain,
        durable_lsn=start.durable_lsn,
        low_epoch=start.low_epoch,
        opens=start.opens,
    )
    offset, chain = scan.end, scan.chain
    group: list[tuple[int, Header]] = []
    while not scan.sealed:
        found = frame_at(window, offset, epoch=candidate.epoch, salt=salt)
        if found is None:
            break
        if found.control is None:
            if found.header.lsn != scan.last_lsn + len(group) + 1:
                break
            group.append((offset, found.header))
        elif not _closes(found, scan, chain, len(group)):
            break
        offset += found.header.frame_bytes
        if found.header.kind != SEAL:
            chain = extend_chain(chain, found.raw_header, journal_format)
        if found.control is not None:
            _accept(scan, found, found.control, chain, offset, group)
            group = []
    return scan


def _closes(found: Found, scan: Scan, chain: int, group_frames: int) -> bool:
    """Whether this control frame fits exactly here: chain, LSNs, and a group only in front of a COMMIT."""
    control = found.control
    assert control is not None
    last_lsn = scan.last_lsn + group_frames
    if control.chain != chain or control.last_lsn != last_lsn or found.header.lsn != last_lsn:
        return False
    if found.header.kind == COMMIT:
        return group_frames > 0 and control.first_lsn == scan.last_lsn + 1
    alone = group_frames == 0 and control.first_lsn == last_lsn
    return alone and found.header.kind in (DURABLE, SEAL, OPENED)


def _accept(
    scan: Scan,
    found: Found,
    control: Control,
    chain: int,
    end: int,
    group: list[tuple[int, Header]],
) -> None:
    scan.offsets.extend(offset for offset, _ in group)
    scan.kinds.extend(header.kind for _, header in group)
    scan.crcs.extend(header.crc for _, header in group)
    scan.last_lsn += len(group)
    scan.chain, scan.end = chain, end
    scan.durable_lsn = max(scan.durable_lsn, control.durable_lsn)
    scan.low_epoch = max(scan.low_epoch, control.low_epoch)
    scan.opens = max(scan.opens, control.opens)
    scan.sealed = found.header.kind == SEAL


def _beyond(window: Window, start: int, epoch: int, salt: int) -> Beyond:
    """Look at every 64-byte slot from `start` on for whole frames of `epoch`."""
    frames = last_lsn = durable_lsn = opens = 0
    offset = start
    while (offset := next_magic(window, offset)) < window.size:
        found = frame_at(window, offset, epoch=epoch, salt=salt)
        if found is None:
            offset += ALIGNMENT
            continue
        frames += 1
        last_lsn = max(last_lsn, found.header.lsn)
        if found.header.kind in CONTROL_KINDS and found.control is not None:
            durable_lsn = max(durable_lsn, found.control.durable_lsn)
            if found.header.kind != OPENED:
                opens = max(opens, found.control.opens)
        offset += found.header.frame_bytes
    return Beyond(frames, last_lsn, durable_lsn, opens)


def _refuse_shortened(candidate: Candidate, last_lsn: int = TO_THE_END) -> None:
    """`last_lsn`: where the next segment says that this one ends. No crash shortens a file: its size was durable before the frame that says so was written. What is missing would
    else pass for a torn tail, acknowledged or not."""
    if candidate.size < candidate.least:
        first = candidate.start.last_lsn + 1
        end = "on" if last_lsn == TO_THE_END else f"to LSN {last_lsn}"
        raise CorruptionFound(
            f"segment {candidate.path} was cut short to {candidate.size} bytes, its size is {candidate.least}: what "
            f"was acknowledged from LSN {first} {end} may be gone; restore the file from a copy",
            [_rest(candidate, 0, first, last_lsn)],
        )


def _rest(candidate: Candidate, offset: int, first_lsn: int, last_lsn: int) -> dict[str, Any]:
    """Everything in that file from `offset` on."""
    return Place(offset, candidate.size, first_lsn, last_lsn).as_json(candidate.path)


def _suspects(unreadable: dict[Path, int]) -> str:
    """Which files may be what is missed, cut down to nothing or overwritten."""
    named = ", ".join(f"{path.name} of {size} bytes" for path, size in unreadable.items())
    return f" (no first frame can be read in {named})" if named else ""


def _refuse_sealed_tail(newest: Candidate, tail: Scan, unreadable: dict[Path, int]) -> None:
    if tail.sealed:
        raise CorruptionFound(
            f"segment {newest.path} is sealed but the one after it (epoch {newest.epoch + 1}, from LSN "
            f"{tail.last_lsn + 1}) is missing or its first bytes are damaged{_suspects(unreadable)}; restore that file "
            "from a copy",
            [Place(0, 0, tail.last_lsn + 1, TO_THE_END).as_json("")],
        )


def _damaged(
    ops: FileOps, candidate: Candidate, scan: Scan, last_lsn: int, salt: int
) -> CorruptionFound:
    """What is wrong behind the last whole group, frame by frame; all of it where each frame is whole by itself."""
    window, first = Window(ops, candidate.fd, candidate.size), scan.last_lsn + 1
    how = {"epoch": candidate.epoch, "salt": salt, "first_lsn": first, "last_lsn": last_lsn}
    if found := list(places(window, scan.end, **how)):
        return told(candidate.path, found)
    return CorruptionFound(
        f"segment {candidate.path} is damaged at offset {scan.end}: LSN {first}..{last_lsn} were acknowledged and "
        "cannot be read; restore the file from a copy",
        [_rest(candidate, scan.end, first, last_lsn)],
    )


def _live(
    folder: Path,
    candidates: dict[int, Candidate],
    low_epoch: int,
    newest: int,
    damaged: dict[int, Path],
    unreadable: dict[Path, int],
) -> list[Candidate]:
    """Segments low_epoch..newest without a gap, here or in the cold tier."""
    live: list[Candidate] = []
    for epoch in range(low_epoch, max(candidates) + 1):
        if epoch not in candidates or epoch > newest:
            after = min(later for later in candidates if later >= epoch)
            first = live[-1].start.last_lsn + 1 if live else 1
            gone = Place(0, 0, first, candidates[after].start.last_lsn)
            if epoch not in candidates and epoch in damaged:
                raise CorruptionFound(
                    f"{damaged[epoch]} is damaged, and the segment of epoch {epoch} is nowhere else in {folder}: LSN "
                    f"between {first} and {gone.last_lsn} cannot be read; restore that file from a copy",
                    [gone.as_json(damaged[epoch])],
                )
            raise CorruptionFound(
                f"the segment of epoch {epoch} in {folder} is missing or its first bytes are damaged: LSN "
                f"between {first} and {gone.last_lsn} cannot be read{_suspects(unreadable)}; restore "
                "that file from a copy",
                [gone.as_json("")],
            )
        live.append(candidates[epoch])
    return live


def _require_joined(
    ops: FileOps, live: list[Candidate], scans: list[Scan], newest_untouched: bool, salt: int
) -> bool:
    """Each segment must end where the next begins. Returns whether the last roll was cut short before its
    SEAL, which only an untouched newest segment allows."""
    for index, (candidate, scan) in enumerate(zip(live[:-1], scans[:-1], strict=True)):
        following = live[index + 1].start
        if scan.last_lsn == following.last_lsn and scan.chain != following.chain:
            raise CorruptionFound(
                f"segment {candidate.path} (epoch {candidate.epoch}) is whole and not the one that this journal goes on "
                f"from: LSN {candidate.start.last_lsn + 1}..{scan.last_lsn} in it were never acknowledged; restore "
                "the file from a copy",
                [_rest(candidate, 0, candidate.start.last_lsn + 1, scan.last_lsn)],
            )
        if scan.last_lsn != following.last_lsn:
            raise _damaged(ops, candidate, scan, following.last_lsn, salt)
        if not scan.sealed and not (index == len(live) - 2 and newest_untouched):
            raise CorruptionFound(
                f"segment {candidate.path} lost its SEAL frame at offset {scan.end} (LSN {scan.last_lsn}); "
                "restore the file from a copy"
            )
    return len(live) > 1 and not scans[-2].sealed
