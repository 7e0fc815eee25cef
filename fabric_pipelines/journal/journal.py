"""The journal's one owner: append to an open group, commit it durably, read it back, recycle what is over.

A group lies whole in one segment and is written in one go, so it is there or not there. Rolling to the next
segment makes that one durable before the old one is sealed, and the old one sealed before the new one is
used: a missing segment can always be told from one never written. Refuses to go on after the first failed
write or fsync: the kernel has then already forgotten which pages were lost.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fabric_pipelines.clock import SYSTEM_CLOCK, Clock
from fabric_pipelines.errors import CorruptionFound, HomeGone, StorageFailed, UsageError
from fabric_pipelines.journal.cold import ColdTier
from fabric_pipelines.journal.creation import create
from fabric_pipelines.journal.damage import Place
from fabric_pipelines.journal.faults import LOCK, close_all, journal_failed, take_lock
from fabric_pipelines.journal.files import FileOps, OsFileOps, write_all
from fabric_pipelines.journal.frame import (
    COMMIT,
    CONTROL_FRAME_BYTES,
    DATA_KIND_MAX,
    DURABLE,
    FILE_BYTES_MAX,
    FILE_UNIT,
    OPENED,
    SEAL,
    SEGMENT,
    Control,
    Frame,
    Payload,
    extend_chain,
    pack_control,
    pack_header,
    padded,
    payload_crc,
    salt_of,
)
from fabric_pipelines.journal.identity import Identity, read_identity
from fabric_pipelines.journal.index import index_of, write_index
from fabric_pipelines.journal.life import Life
from fabric_pipelines.journal.mending import Mended, mend
from fabric_pipelines.journal.pending import Pending
from fabric_pipelines.journal.recovery import Recovered, RecoveryReport, recover
from fabric_pipelines.journal.scrub import Scrubber, ScrubSlice, damage_at
from fabric_pipelines.journal.segment import (
    FIRST_FRAME_OFFSET,
    Holding,
    Segment,
    Source,
    extents_of,
    frame_at,
    frames_of_kind,
)
from fabric_pipelines.journal.shelf import Shelf
from fabric_pipelines.journal.store import ObjectStore
from fabric_pipelines.journal.stub import Stub
from fabric_pipelines.journal.watch import loss_of

FREE_KEPT = 2  # files kept at least for the next segments when others go cold
OS_FILE_OPS = OsFileOps()


class Journal:
    """Not thread-safe, but for `sync`, which one helper may run while the owner goes on appending."""

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        recovered: Recovered,
        *,
        fds: dict[Path, int],
        segment_bytes: int,
        clock: Clock,
        ops: FileOps,
        store: ObjectStore | None = None,
    ) -> None:
        self.folder = folder
        self.journal_id = identity.journal_id
        self.incarnation = identity.incarnation
        self.recovered: RecoveryReport = recovered.report
        self._uuid = identity.uuid_bytes
        self._format = identity.format
        self._salt = salt_of(identity.uuid_bytes)
        self.segment_bytes = segment_bytes
        self._clock, self._ops = clock, ops
        self._fds = fds
        self._segments = recovered.segments
        self._shelf = Shelf(ops, folder, segment_bytes, fds, recovered.free)
        self._chain = recovered.chain
        self._low_epoch = recovered.low_epoch
        report = recovered.report
        self.life = Life(report.opens + 1, clock.wall_us(), report.last_lsn)
        self._group: list[Pending] = []
        self._group_bytes = 0
        self._written_lsn = recovered.report.last_lsn
        self._durable_lsn = recovered.report.last_lsn
        self._recorded_lsn = recovered.report.recorded_durable_lsn
        self._watched_lsn = self._durable_lsn
        self.frame_max = segment_bytes // 8
        self._kept, self._half = FREE_KEPT, segment_bytes * 3 // 8 - CONTROL_FRAME_BYTES
        self._stopped = ""
        self._stopped_as: type[StorageFailed] | type[HomeGone] = StorageFailed
        self._syncing = threading.Lock()
        self._scrubber = Scrubber(ops, self._salt)
        self.cold = ColdTier(store, folder, identity.journal_id, self._salt, recovered.stubs, ops)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        segment_bytes: int,
        clock: Clock = SYSTEM_CLOCK,
        ops: FileOps = OS_FILE_OPS,
        lazy: bool = False,
        store: ObjectStore | None = None,
    ) -> Journal:
        """Create or recover the journal in `folder`, and hold it alone. With `lazy` a sealed segment whose index
        file fits is not read now: damage in it is found when a frame is first read, or by `scrub`. `store` is the
        cold tier; a journal that has segments there is refused without one (SettingsError).

        Raises AlreadyRunning if another process holds it, CorruptionFound if acknowledged bytes are
        damaged, VersionRefused for another format, StorageFailed for a folder that cannot be written.
        """
        if not 0 < segment_bytes <= FILE_BYTES_MAX or segment_bytes % FILE_UNIT:
            raise UsageError(
                f"segment_bytes is {segment_bytes}; it must be a multiple of {FILE_UNIT}, at most {FILE_BYTES_MAX}"
            )
        fds: dict[Path, int] = {}
        try:
            fds[folder / LOCK] = take_lock(ops, folder)
            identity = read_identity(ops, folder)
            if identity is None:
                identity = create(ops, folder, segment_bytes, clock)
            recovered = recover(ops, folder, identity, fds, lazy=lazy)
            journal = cls(
                folder,
                identity,
                recovered,
                fds=fds,
                segment_bytes=segment_bytes,
                clock=clock,
                ops=ops,
                store=store,
            )
            journal.cold.require_store()
            journal._start(recovered)
        except OSError as fault:
            close_all(ops, fds)
            raise journal_failed(folder, fault, "opening") from fault
        except BaseException:
            close_all(ops, fds)
            raise
        return journal

    @property
    def next_lsn(self) -> int:
        """LSN of the next append."""
        return self._written_lsn + len(self._group) + 1

    @property
    def durable_lsn(self) -> int:
        """Everything up to here survives a crash."""
        return self._durable_lsn

    @property
    def first_lsn(self) -> int:
        """The oldest frame still held; next_lsn if none."""
        return self._segments[0].first_lsn

    @property
    def holdings(self) -> list[Holding]:
        """Every segment held, oldest first; the last one is still written to."""
        return [segment.holding for segment in self._segments]

    def lsns_of(self, kind: int) -> list[int]:
        """The frames of one kind, in order, without reading them."""
        return frames_of_kind(self._segments, kind)

    def extents(self, lsns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Bytes of each frame, with the control frames behind it; 0 for those not held."""
        return extents_of(self._segments, lsns)

    @property
    def bytes_used(self) -> int:
        """Bytes of frames in live segments on this disk, written or in the open group."""
        return sum(s.end for s in self._segments if not s.cold) + self._group_bytes

    @property
    def bytes_allocated(self) -> int:
        """Disk space of the live segments and of the one in reserve; recycled files come on top."""
        spare = self.segment_bytes if self._shelf.spare else 0
        return sum(s.size for s in self._segments if not s.cold) + spare

    @property
    def held_bytes(self) -> int:
        """What goes into space that is allocated already: all but `frame_max` of each segment, which its end may lose."""
        active = self._segments[-1]
        rest = active.size - active.end - self._group_bytes - 2 * CONTROL_FRAME_BYTES
        return max(rest - self.frame_max, 0) + self.held_behind

    @property
    def held_behind(self) -> int:
        """`held_bytes` without this segment."""
        return self._shelf.count * self._whole_bytes

    @property
    def _whole_bytes(self) -> int:
        return max(self.segment_bytes - self.frame_max - 3 * CONTROL_FRAME_BYTES, 0)

    @property
    def room_bytes(self) -> int:
        """`held_bytes`, and as much as free space of the disk would add."""
        free = max(self._ops.free_bytes(self.folder), 0) // self.segment_bytes
        return self.held_bytes + free * self._whole_bytes

    def hold(self, size: int) -> int:
        """See to it that `held_bytes` is at least so much, out of free space, as far as that goes; how much it is."""
        self._kept = max(FREE_KEPT, -(-size // max(self._whole_bytes, 1)))
        while self.held_bytes < size and self._whole_bytes:
            self.watch()  # a new file could come to lie under the name of a missing one
            with self._failing_stops("preparing a segment"):
                full = self._ops.free_bytes(self.folder) < self.segment_bytes
                if full or not self._shelf.more():
                    break
        return self.held_bytes

    def release(self, size: int, most: int = 1 << 40) -> int:
        """Give back free files, at most so many, as long as `size` bytes stay held; how many went."""
        with self._failing_stops("giving back free files"):
            return self._shelf.less(min(self._over(size), most))

    def freeable(self, size: int) -> int:
        """Bytes that the disk has free, or would have if `release` gave back all that it can."""
        free = max(self._ops.free_bytes(self.folder), 0)
        return free + min(self._over(size), len(self._shelf.free)) * self.segment_bytes

    def _over(self, size: int) -> int:
        return max(self.held_bytes - size, 0) // max(self._whole_bytes, 1)

    def fits(self, frame_bytes: int) -> bool:
        """Whether such a frame goes into this segment."""
        return self._fits(self._group_bytes + frame_bytes + CONTROL_FRAME_BYTES)

    def append(
        self,
        kind: int,
        payload: Payload | list[Payload] | tuple[Payload, ...],
        *,
        rows: int,
        time_us: int,
        schema_id: int = 0,
        essential: bool = False,
        keep: int | None = None,
    ) -> int:
        """Put a frame into the open group and return its LSN; durable only once `commit` returned.

        The buffers are kept, not copied: leave them alone until then. Raises StorageFailed with nothing
        appended, and goes on working, when the disk has no room for it. Frames that are not `essential` leave
        `keep` bytes of `held_bytes` to those that are, or half a segment.
        """
        self._require_working()
        assert 0 < kind <= DATA_KIND_MAX, f"frame kind {kind} belongs to the journal itself"
        several = payload if isinstance(payload, list | tuple) else [payload]
        parts = tuple(memoryview(part).cast("B") for part in several)
        crc, length = payload_crc(parts)
        pending = Pending(kind, schema_id, rows, time_us, length, crc, parts)
        self._make_room(pending.frame_bytes, None if essential else keep or self._half)
        lsn = self.next_lsn
        self._group.append(pending)
        self._group_bytes += pending.frame_bytes
        return lsn

    def require_room(self, size: int, keep: int | None = None) -> None:
        """Raise what `append` would for frames that are not essential and take `size` bytes in all; the next
        appends of that size find their room."""
        self._require_working()
        self._make_room(size, keep or self._half)

    def commit(self) -> int:
        """Write the open group and return the durable LSN once `fdatasync` did. Any I/O error is
        StorageFailed and the end of this journal object."""
        self.write()
        return self.sync()

    def write(self) -> int:
        """First half of `commit`: close the group with a COMMIT frame and hand it to the kernel. Returns
        the last LSN written, which is not durable yet."""
        self._require_working()
        if self._group:
            if not self._fits(self._group_bytes + CONTROL_FRAME_BYTES):
                self._roll()
            with self._failing_stops("writing a group"):
                self._write_group()
        return self._written_lsn

    def sync(self) -> int:
        """Second half of `commit`: make durable what was written before this call. HomeGone, with nothing more called
        durable, if the file that it went into was deleted or cut short."""
        with self._syncing:
            self._require_working()
            target = self._written_lsn
            if target > self._durable_lsn:
                with self._failing_stops("fdatasync"):
                    self._ops.fdatasync(self._segments[-1].fd)
                self._require_there(self._segments[-1], by_name=False)
                self._durable_lsn = target
        return self._durable_lsn

    def watch(self) -> None:
        """HomeGone, and the end of this journal object, if the file of a live segment was deleted, moved, replaced or cut
        short: it can be written as ever, and no restart finds what is."""
        self._require_working()
        for segment in self._segments:
            self._require_there(segment, by_name=True)
        self._watched_lsn = self._durable_lsn

    def _require_there(self, segment: Segment, *, by_name: bool) -> None:
        with self._failing_stops("looking at its files"):
            seen = self._watched_lsn, self._durable_lsn
            gone = loss_of(self._ops, segment, seen, by_name=by_name)
        if gone is not None:
            self._stopped, self._stopped_as = str(gone), HomeGone
            raise gone

    def mark_durable(self) -> int:
        """When idle: record durably that the last group is durable, so that damage to it is told from a
        torn tail. Returns the LSN so recorded; does nothing while a group is open or nothing is new."""
        self._require_working()
        if not self._group and self._recorded_lsn < self.sync():
            try:
                self._mark(DURABLE)
            except StorageFailed:
                # a full disk refuses the new segment that this mark needs: it comes later
                self._require_working()
        return self._recorded_lsn

    def replay(self, from_lsn: int = 1) -> Iterator[Frame]:
        """Data frames in order, from `from_lsn` (or the first one held) to the last one written when the
        iteration begins."""
        self._require_working()
        last = self._written_lsn
        for segment in list(self._segments):
            if segment.last_lsn < from_lsn:
                continue
            with self._failing_stops("reading"):
                source = self._through(segment)
            start = max(from_lsn, segment.first_lsn)
            for lsn in range(start, min(segment.last_lsn, last) + 1):
                yield self._frame(segment, source, lsn)

    def read(self, lsn: int) -> Frame:
        """The frame `lsn`, by its place in the index. Raises UsageError if it is not held."""
        self._require_working()
        if not self.first_lsn <= lsn <= self._written_lsn:
            raise UsageError(
                f"LSN {lsn} is not in the journal, which holds {self.first_lsn}..{self._written_lsn}"
            )
        segment = self._segment_of(lsn)
        if segment.cold:
            return self._frame(segment, self.cold.source(segment, lsn), lsn)
        with self._failing_stops("reading"):
            source = segment.source(self._ops, segment.extent(lsn))
        return self._frame(segment, source, lsn)

    def _through(self, segment: Segment) -> Source:
        """To read all of it."""
        return self.cold.stream(segment) if segment.cold else segment.source(self._ops)

    def view(self, lsn: int) -> tuple[Frame, bool]:
        """The frame `lsn`, and whether it is a view of a sealed segment: then it is what was written now, and what the
        file has later on is for the reader to look after."""
        self._require_working()
        if not self.first_lsn <= lsn <= self._written_lsn:
            return self.read(lsn), False
        segment = self._segment_of(lsn)
        if segment.cold or not segment.sealed:
            return self.read(lsn), False
        if segment.mapped is None:
            with self._failing_stops("mapping a segment"):
                segment.source(self._ops)
        return self._frame(segment, segment.source(self._ops), lsn), True

    def is_sealed(self, lsn: int) -> bool:
        """Whether that frame lies in a segment that nothing is written to any more."""
        return self._segment_of(lsn).sealed

    def kind_of(self, lsn: int) -> int:
        """Of a frame that is held."""
        return (segment := self._segment_of(lsn)).kinds[lsn - segment.first_lsn]

    def recycle_below(self, lsn: int) -> int:
        """Give up the sealed segments that end below `lsn`; returns how many. The decision is durable
        before a file may be used again."""
        self._require_working()
        over = [segment for segment in self._segments[:-1] if segment.last_lsn < lsn]
        if not over:
            return 0
        if self._group:
            raise UsageError("a group is open: commit it before recycling")
        before = self._low_epoch
        self._low_epoch = self._segments[len(over)].epoch
        try:
            self.sync()
            self._mark(DURABLE)
        except StorageFailed:
            self._low_epoch = before
            raise
        del self._segments[: len(over)]
        self.cold.forget_below(over[-1].last_lsn + 1)
        with self._failing_stops("recycling"):
            for segment in over:
                if not segment.cold:
                    self._shelf.let_go(segment)
            self._shelf.take_back()
        return len(over)

    def sealed_segment(self, epoch: int) -> Segment | None:
        """For the cold tier: the live sealed segment of that epoch, here or there."""
        return next((s for s in self._segments[:-1] if s.epoch == epoch and s.sealed), None)

    def away(self, lsns: npt.NDArray[np.int64]) -> list[tuple[Segment, list[int]]]:
        """Those of the LSNs that lie in cold segments and were not fetched, by segment."""
        found = []
        for segment in self._segments:
            if segment.cold:
                mine = lsns[(lsns >= segment.first_lsn) & (lsns <= segment.last_lsn)]
                away = [lsn for lsn in mine.tolist() if not self.cold.holds(lsn)]
                if away:
                    found.append((segment, away))
        return found

    def went_cold(self, stub: Stub, fact_lsn: int) -> None:
        """The owner's fact at `fact_lsn` says that this segment is in the store: its file is given up."""
        self._require_working()
        assert fact_lsn <= self._durable_lsn, "a local file outlives the fact that it went cold"
        segment = self.sealed_segment(stub.epoch)
        assert segment is not None, f"epoch {stub.epoch} is not held"
        assert not segment.cold, f"epoch {stub.epoch} went cold before"
        with self._failing_stops("giving up a file that went cold"):
            self._shelf.let_go(segment, keep=self._kept)
            self._shelf.take_back()
        segment.path, segment.fd, segment.cold = self.folder / stub.file_name, -1, True

    def roll(self) -> None:
        """Seal the segment that is written to, full or not, so that it can be recycled. Raises StorageFailed,
        with nothing changed, when there is no room for another one."""
        self._require_working()
        assert not self._group, "a group is open: commit it before a roll"
        if self._segments[-1].offsets:
            self._prepare()
            self._roll()

    def scrub(self, budget_bytes: int) -> ScrubSlice:
        """Compare the next frames of sealed segments on this disk with their CRCs, from the device, for about so many bytes.
        Goes round: the slice that ends a round says so."""
        self._require_working()
        sealed = [segment for segment in self._segments if segment.sealed and not segment.cold]
        with self._failing_stops("scrubbing"):
            return self._scrubber.slice(sealed, budget_bytes)

    def mend(self) -> list[Mended]:
        """The files beside the segments that were not what was written, and are again. StorageFailed if one cannot be
        read or written."""
        self._require_working()
        identity = Identity(self.journal_id, self.incarnation, self._format)
        cold = [self.cold.stubs[segment.epoch] for segment in self._segments if segment.cold]
        with self._failing_stops("scrubbing"):
            return mend(self._ops, self.folder, identity, cold)

    def close(self) -> None:
        """Let go of files and lock. Idempotent. An uncommitted group is dropped: nobody was told it is kept."""
        self._group, self._group_bytes = [], 0
        try:
            if not self._stopped:
                self.watch()
                self.mark_durable()
        finally:
            self._stopped = self._stopped or f"the journal {self.folder} is closed"
            for segment in self._segments:
                segment.mapped = None
            close_all(self._ops, self._fds)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self, recovered: Recovered) -> None:
        """Finish what a crash interrupted, then write the OPENED frame at the cut: it changes the chain, so
        that no frame left behind the cut can ever fit again."""
        if recovered.unfinished_roll is not None:
            self._seal(recovered.unfinished_roll, recovered.chain)
        self._mark(OPENED)

    def _frame(self, segment: Segment, source: Source, lsn: int) -> Frame:
        offset = segment.offsets[lsn - segment.first_lsn]
        try:  # no context manager: a lease comes by here for each frame
            found = frame_at(source, offset, epoch=segment.epoch, salt=self._salt)
        except OSError as fault:
            raise self._stop(fault, "reading") from fault
        if found is None or not segment.is_own(lsn, found.header):
            if segment.cold:
                raise self.cold.lost(segment, lsn, source)
            extent, name = (offset, offset + segment.extent(lsn)), str(segment.path)
            at = lsn - segment.first_lsn
            end = damage_at(source, segment, at, extent, self._salt, name=name).end
            place = Place(offset, end, lsn, lsn)
            raise CorruptionFound(
                f"segment {segment.path} is damaged at offset {offset}: LSN {lsn} cannot be read; restore "
                "the file from a copy",
                [place.as_json(segment.path)],
            )
        segment.mark_read(lsn)
        header = found.header
        return Frame(
            header.lsn, header.kind, header.schema_id, header.rows, header.time_us, found.payload
        )

    def _segment_of(self, lsn: int) -> Segment:
        return self._segments[bisect_right(self._segments, lsn, key=lambda s: s.first_lsn) - 1]

    def _fits(self, size: int, segment: Segment | None = None) -> bool:
        """Whether `size` bytes fit the active segment with room left for its SEAL."""
        segment = segment or self._segments[-1]
        return segment.end + size + CONTROL_FRAME_BYTES <= segment.size

    def _make_room(self, frame_bytes: int, keep: int | None) -> None:
        """See to it that so many bytes fit, if need be in a segment that is prepared now, with `keep` held behind them."""
        size = self._group_bytes + frame_bytes + CONTROL_FRAME_BYTES
        most = self.segment_bytes - FIRST_FRAME_OFFSET - CONTROL_FRAME_BYTES
        if size > most:
            raise UsageError(
                f"a commit group of {size} bytes does not fit a segment, which takes {most}: commit more "
                "often or raise segment_bytes"
            )
        if keep is not None:
            self._require_kept(frame_bytes, keep)
        if not self._fits(size):
            if self._group and self.fits(0):
                self.write()  # what a segment loses at its end is less than one frame
            self._prepare()

    def _require_kept(self, frame_bytes: int, keep: int) -> None:
        wanted = keep + frame_bytes
        while (left := self.held_bytes if self.fits(frame_bytes) else self.held_behind) < wanted:
            before = self.held_bytes
            if self.hold(before + wanted - left) == before:
                raise journal_failed(self.folder, OSError(ENOSPC, ""), "keeping room for results")

    def _prepare(self) -> None:
        """See to it that the next segment has its file."""
        if self._shelf.spare is None:
            self.watch()  # a new file could come to lie under the name of a missing one
            with self._failing_stops("preparing a segment"):
                self._shelf.prepare()

    def _write_group(self) -> None:
        segment = self._segments[-1]
        first_lsn = self._written_lsn + 1
        buffers: list[bytes | memoryview] = []
        offset = segment.end
        offsets: list[int] = []
        crcs: list[int] = []
        for lsn, pending in enumerate(self._group, first_lsn):
            header = pack_header(
                kind=pending.kind,
                epoch=segment.epoch,
                lsn=lsn,
                time_us=pending.time_us,
                length=pending.length,
                payload_crc=pending.crc,
                salt=self._salt,
                schema_id=pending.schema_id,
                rows=pending.rows,
            )
            self._chain = extend_chain(self._chain, header, self._format)
            buffers.append(header)
            buffers.extend(pending.parts)
            buffers.append(bytes(padded(pending.length) - pending.length))
            offsets.append(offset)
            crcs.append(int.from_bytes(header[-4:], "little"))
            offset += pending.frame_bytes
        last_lsn = first_lsn + len(self._group) - 1
        durable = self._durable_lsn
        buffers += self._control(COMMIT, segment.epoch, last_lsn, durable, first_lsn=first_lsn)
        segment.end = write_all(self._ops, segment.fd, buffers, segment.end)
        segment.offsets.extend(offsets)
        segment.kinds.extend(pending.kind for pending in self._group)
        segment.crcs.extend(crcs)
        self._written_lsn = last_lsn
        self._recorded_lsn = max(self._recorded_lsn, durable)
        self._group, self._group_bytes = [], 0

    def _control(
        self,
        kind: int,
        epoch: int,
        last_lsn: int,
        durable_lsn: int,
        *,
        first_lsn: int | None = None,
    ) -> tuple[bytes, bytes]:
        """A control frame for the current chain, which it extends where its kind takes part."""
        control = Control(
            first_lsn=last_lsn if first_lsn is None else first_lsn,
            last_lsn=last_lsn,
            durable_lsn=durable_lsn,
            low_epoch=self._low_epoch,
            chain=self._chain,
            opens=self.life.opens,
            journal_id=self._uuid,
        )
        header, payload = pack_control(
            kind,
            control,
            epoch=epoch,
            time_us=self._clock.wall_us(),
            salt=self._salt,
            file_bytes=self.segment_bytes if kind == SEGMENT else 0,
        )
        if kind not in (SEGMENT, SEAL):
            self._chain = extend_chain(self._chain, header, self._format)
        return header, payload

    def _mark(self, kind: int) -> None:
        """Write and sync a DURABLE or OPENED frame; where it does not fit, a roll says the same."""
        if not self._fits(CONTROL_FRAME_BYTES):
            self._prepare()
            self._roll()
            if kind == DURABLE:
                return
        segment = self._segments[-1]
        with self._syncing, self._failing_stops("recording the durable mark"):
            buffers = self._control(kind, segment.epoch, self._written_lsn, self._durable_lsn)
            segment.end = write_all(self._ops, segment.fd, buffers, segment.end)
            self._ops.fdatasync(segment.fd)
            self._recorded_lsn = self._durable_lsn

    def _roll(self) -> None:
        """New segment durable, then the old one sealed, then the new one used."""
        assert self._shelf.spare is not None, "the room for a roll is made at append"
        self.sync()
        self.watch()
        spare = self._shelf.take_spare()
        old = self._segments[-1]
        new = Segment(
            path=spare.path,
            fd=spare.fd,
            size=self.segment_bytes,
            epoch=old.epoch + 1,
            first_lsn=self._written_lsn + 1,
            end=FIRST_FRAME_OFFSET,
        )
        with self._syncing:
            with self._failing_stops("starting a segment"):
                buffers = self._control(SEGMENT, new.epoch, self._written_lsn, self._durable_lsn)
                write_all(self._ops, new.fd, buffers, 0)
                self._ops.fdatasync(new.fd)
            self._seal(old, self._chain)
            self._segments.append(new)
            self._recorded_lsn = self._durable_lsn

    def _seal(self, segment: Segment, chain: int) -> None:
        assert chain == self._chain, "a segment is sealed before anything follows it"
        with self._failing_stops("sealing a segment"):
            buffers = self._control(SEAL, segment.epoch, segment.last_lsn, segment.last_lsn)
            segment.end = write_all(self._ops, segment.fd, buffers, segment.end)
            self._ops.fdatasync(segment.fd)
            segment.sealed = True
            write_index(self._ops, segment.path, index_of(segment, chain), self._uuid)

    def _require_working(self) -> None:
        if self._stopped:
            raise self._stopped_as(self._stopped)

    @contextmanager
    def _failing_stops(self, doing: str) -> Iterator[None]:
        """The first failed write or fsync is the last: no retry can tell what the device has."""
        try:
            yield
        except OSError as fault:
            raise self._stop(fault, doing) from fault

    def _stop(self, fault: OSError, doing: str) -> StorageFailed:
        stopped = journal_failed(self.folder, fault, doing)
        self._stopped = str(stopped)
        return stopped
