"""The cold tier of a journal: sealed segments that went to an object store, and their frames that came back.

A copy is put, read back whole and compared by size and CRC32C before anybody is told of it; a frame that comes
back is compared with its own CRCs, epoch and LSN and with the CRC that the stub has of it before it is believed. What
an old stub does not know of its frames is taken from the object at the first use, all of which must be what was put. What is fetched is kept in memory up to
FETCHED_BYTES, newest use last. Decides nothing: which segments go, and when a local file may, is the owner's business.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fabric_pipelines.errors import ColdLost, CorruptionFound, SettingsError, StoreUnreachable
from fabric_pipelines.journal.damage import Place
from fabric_pipelines.journal.files import FileOps, aligned_buffer, read_exactly
from fabric_pipelines.journal.frame import CONTROL_FRAME_BYTES, Control, crc32c
from fabric_pipelines.journal.scrub import ScrubSlice, damage_at, scrub_frames
from fabric_pipelines.journal.segment import (
    Segment,
    Source,
    Window,
    frame_at,
)
from fabric_pipelines.journal.store import ObjectStore
from fabric_pipelines.journal.stub import Stub, write_stub

STEP_BYTES = 8 << 20
GAP_BYTES = 256 << 10  # frames closer than this are fetched by one request
FETCHED_BYTES = 256 << 20
RESTORE = "restore that object from a copy"


class ColdTier:
    """`stubs` by epoch: of everything that may be in the store. `copy_out`, `fetch`, `scrub` and `remove` may run in
    a helper's thread while the owner goes on; the rest is the owner's."""

    def __init__(
        self,
        store: ObjectStore | None,
        folder: Path,
        journal_id: str,
        salt: int,
        stubs: dict[int, Stub],
        ops: FileOps,
    ) -> None:
        self.store, self.stubs = store, stubs
        self.stopping = False  # what is under way ends soon, as if the store were away
        self._folder, self._journal_id, self._salt, self._ops = folder, journal_id, salt, ops
        self._fetched: OrderedDict[int, memoryview] = OrderedDict()
        self.fetched_bytes = 0

    def object_name(self, epoch: int) -> str:
        return f"{self._journal_id}/{epoch:08d}.segment"

    def address(self, epoch: int) -> str:
        """Where a person finds that object: a path, or a URL."""
        return f"{self._require_store().where.rstrip('/')}/{self.object_name(epoch)}"

    # -- out

    def copy_out(self, segment: Segment) -> Stub:
        """Put a sealed segment into the store and read it back: on return it is there whole, and so is its stub
        here. CorruptionFound if it is damaged here, ColdLost if the store gave back something else; the rest is
        as with FileOps and ObjectStore."""
        store = self._require_store()
        assert segment.sealed, "only a sealed segment goes cold"
        assert not segment.cold, "a segment goes cold once"
        self._ops.forget_cache(segment.fd)
        stub = self._stub_of(segment)
        write_stub(self._ops, self._folder, stub, bytes.fromhex(self._journal_id))
        self.stubs[segment.epoch] = stub
        store.put(self.object_name(segment.epoch), self._pieces(segment), segment.end)
        self._require_back(segment, stub)
        return stub

    def _stub_of(self, segment: Segment) -> Stub:
        window = Window(self._ops, segment.fd, segment.end, STEP_BYTES)
        crc = self._whole_crc(segment, window)
        start = self._control(window, segment, 0)
        seal = self._control(window, segment, segment.end - CONTROL_FRAME_BYTES)
        return Stub(
            epoch=segment.epoch,
            first_lsn=segment.first_lsn,
            size=segment.end,
            crc=crc,
            durable_lsn=seal.durable_lsn,
            low_epoch=seal.low_epoch,
            start_chain=start.chain,
            chain=seal.chain,
            opens=seal.opens,
            where=self._require_store().where,
            offsets=segment.offsets,
            kinds=segment.kinds,
            crcs=segment.crcs,
        )

    def _control(self, window: Window, segment: Segment, offset: int) -> Control:
        found = frame_at(window, offset, epoch=segment.epoch, salt=self._salt)
        assert found is not None, "it was read just now"
        assert found.control is not None, "a segment begins with SEGMENT and ends with SEAL"
        return found.control

    def _whole_crc(self, segment: Segment, window: Window) -> int:
        """Of the local file, after each of its frames was found whole."""
        found, _ = scrub_frames(window, segment, self._salt, 0, segment.end, name=str(segment.path))
        if found.damaged:
            raise CorruptionFound(
                f"segment {segment.path} is damaged at offset {found.damaged[0].offset}: it does not go to the "
                "cold tier; restore the file from a copy"
            )
        crc = 0
        for piece in self._pieces(segment):
            crc = crc32c(piece, crc)
        return crc

    def _pieces(self, segment: Segment) -> Iterator[memoryview]:
        for offset in range(0, segment.end, STEP_BYTES):
            self._require_going()
            length = min(STEP_BYTES, segment.end - offset)
            yield read_exactly(self._ops, segment.fd, length, offset)

    def _require_back(self, segment: Segment, stub: Stub) -> None:
        store, name = self._require_store(), self.object_name(stub.epoch)
        size, crc = store.size(name), 0
        for offset in range(0, stub.size, STEP_BYTES):
            self._require_going()
            crc = crc32c(store.read(name, offset, min(STEP_BYTES, stub.size - offset)), crc)
        if size != stub.size or crc != stub.crc:
            raise ColdLost(
                f"{store.where} gave back {size} bytes with CRC32C {crc:08x} for segment {segment.path.name} of "
                f"{stub.size} bytes with {stub.crc:08x}: the segment stays here"
            )

    # -- back

    def holds(self, lsn: int) -> bool:
        """Whether that frame of a cold segment was fetched and is still in memory."""
        return lsn in self._fetched

    def fetch(self, segment: Segment, lsns: Sequence[int]) -> dict[int, memoryview]:
        """The frames, each as it was written. ColdLost if one is missing or something else."""
        found, damaged = self.fetch_each(segment, lsns)
        for fault in damaged.values():
            raise fault
        return found

    def fetch_each(
        self, segment: Segment, lsns: Sequence[int]
    ) -> tuple[dict[int, memoryview], dict[int, ColdLost]]:
        """(the frames that are what was written, what to say of each that is not): one damaged frame costs itself, not
        its neighbours. ColdLost if the object is missing or of another size, so that nothing in it can be relied on."""
        self._require_known(segment)
        found: dict[int, memoryview] = {}
        damaged: dict[int, ColdLost] = {}
        for first, last in _close_runs(segment, sorted(lsns)):
            begin = segment.offsets[first - segment.first_lsn]
            end = segment.offsets[last - segment.first_lsn] + segment.extent(last)
            part = self._read(segment, begin, end - begin)
            for lsn in lsns:
                if first <= lsn <= last:
                    offset = segment.offsets[lsn - segment.first_lsn]
                    frame = part[offset - begin : offset - begin + segment.extent(lsn)]
                    source = _Part(frame, offset)
                    if self._is_own(segment, lsn, source):
                        found[lsn] = frame
                    else:
                        if not damaged:
                            self._require_size(segment)
                        damaged[lsn] = self._changed(segment, lsn, source)
        return found, damaged

    def _read(self, segment: Segment, offset: int, length: int) -> memoryview:
        """Aligned as in the file."""
        raw = self._require_store().read(self.object_name(segment.epoch), offset, length)
        buffer = aligned_buffer(length)
        buffer[: len(raw)] = raw
        return buffer[: len(raw)].toreadonly()

    def _is_own(self, segment: Segment, lsn: int, source: Source) -> bool:
        offset = segment.offsets[lsn - segment.first_lsn]
        found = frame_at(source, offset, epoch=segment.epoch, salt=self._salt)
        return found is not None and segment.is_own(lsn, found.header)

    def _require_known(self, segment: Segment) -> None:
        """Its stub is of a time when those said nothing of single frames: one whole read of the object, compared with
        the CRC of all of it, says the rest for as long as the journal is open."""
        if segment.knows_frames:
            return
        window, crcs = _StoreWindow(self, segment, STEP_BYTES), array("I")
        window.at(
            0, CONTROL_FRAME_BYTES
        )  # from the first byte on, so that the CRC of all comes along
        for at, offset in enumerate(segment.offsets):
            found = frame_at(window, offset, epoch=segment.epoch, salt=self._salt)
            if found is None or found.header.lsn != segment.first_lsn + at:
                raise self._foreign(segment)
            crcs.append(found.header.crc)
        self._require_put(segment, window)
        segment.crcs = crcs

    def _require_put(self, segment: Segment, window: _StoreWindow) -> None:
        stub = self.stubs.get(segment.epoch)
        if stub is None:  # dropped meanwhile, and removed: the object went before its stub did
            raise self._missing(segment) or self._foreign(segment)
        if window.crc_of_all() != stub.crc:
            raise self._foreign(segment)

    def _foreign(self, segment: Segment) -> ColdLost:
        self._require_size(segment)
        return self._lost(segment, f"is not what was put: {_span(segment)} cannot be relied on")

    def lost(self, segment: Segment, lsn: int, source: Source) -> ColdLost:
        """What to say of a frame that was read from `source` and is not what was written, looking once whether the object
        is there at all."""
        return self._missing(segment) or self._changed(segment, lsn, source)

    def _missing(self, segment: Segment) -> ColdLost | None:
        store, name = self._require_store(), self.object_name(segment.epoch)
        size, wanted, whole = store.size(name), segment.end, _span(segment)
        if size is None:
            return self._lost(segment, f"is missing: {whole} cannot be read")
        if size != wanted:
            what = f"has {size} bytes, {wanted} were put: {whole} cannot be relied on"
            return self._lost(segment, what)
        return None

    def _changed(self, segment: Segment, lsn: int, source: Source) -> ColdLost:
        at, address = lsn - segment.first_lsn, self.address(segment.epoch)
        begin = segment.offsets[at]
        extent = begin, begin + segment.extent(lsn)
        end = damage_at(source, segment, at, extent, self._salt, name=address).end
        what = f"was changed at offset {begin} (bytes {begin}..{end}): LSN {lsn} cannot be read"
        return self._lost(segment, what, Place(begin, end, lsn, lsn, segment.kinds[at]))

    def _lost(self, segment: Segment, what: str, place: Place | None = None) -> ColdLost:
        """`place`: all of the object, if it is not told."""
        address = self.address(segment.epoch)
        place = place or Place(0, segment.end, segment.first_lsn, segment.last_lsn)
        sentence = f"object {address} of the cold tier {what}; {RESTORE}"
        return ColdLost(sentence, [place.as_json(address)])

    def keep(self, frames: Mapping[int, memoryview]) -> None:
        """Fetched frames, for as long as there is room."""
        for lsn, part in frames.items():
            self.fetched_bytes += len(part) - len(self._fetched.get(lsn, b""))
            self._fetched[lsn] = part
            self._fetched.move_to_end(lsn)
        while self.fetched_bytes > FETCHED_BYTES and len(self._fetched) > len(frames):
            _, dropped = self._fetched.popitem(last=False)
            self.fetched_bytes -= len(dropped)

    def forget_below(self, lsn: int) -> None:
        for old in [at for at in self._fetched if at < lsn]:
            self.fetched_bytes -= len(self._fetched.pop(old))

    def source(self, segment: Segment, lsn: int) -> Source:
        """To read the one frame `lsn` from: memory, else the store while the caller waits."""
        if lsn not in self._fetched:
            self.keep(self.fetch(segment, [lsn]))
        self._fetched.move_to_end(lsn)
        return _Part(self._fetched[lsn], segment.offsets[lsn - segment.first_lsn])

    def stream(self, segment: Segment) -> Window:
        """To read the whole segment through; nothing of it is kept."""
        self._require_known(segment)
        return _StoreWindow(self, segment, STEP_BYTES)

    def scrub(self, segment: Segment) -> ScrubSlice:
        """Every frame of the object compared with its CRCs, and all of it with the CRC that its stub kept: ColdLost if it
        is missing, of another size, or nothing of what was put."""
        self._require_size(segment)
        window = _StoreWindow(self, segment, STEP_BYTES)
        found = self._scrub(segment, window, 0, segment.end)
        if len(found.damaged) == found.frames > 1:
            raise self._foreign(segment)
        if not found.damaged:
            self._require_put(segment, window)
        return found

    def look_again(self, segment: Segment, lsns: Sequence[int]) -> list[ScrubSlice]:
        """The same for those frames alone: what was damaged may have been restored."""
        self._require_size(segment)
        return [self._look_at(segment, lsn) for lsn in lsns]

    def _look_at(self, segment: Segment, lsn: int) -> ScrubSlice:
        window = _StoreWindow(self, segment, segment.extent(lsn))
        return self._scrub(segment, window, lsn - segment.first_lsn, 1)

    def _require_size(self, segment: Segment) -> None:
        if (missing := self._missing(segment)) is not None:
            raise missing

    def _scrub(self, segment: Segment, window: Window, at: int, budget_bytes: int) -> ScrubSlice:
        name = self.address(segment.epoch)
        return scrub_frames(window, segment, self._salt, at, budget_bytes, name=name)[0]

    # -- over

    def remove(self, stub: Stub) -> None:
        """A segment below the low epoch is given up: the object first, so that a stub is left if that fails."""
        self._require_store().remove(self.object_name(stub.epoch))
        self._ops.unlink(self._folder / stub.file_name)
        del self.stubs[stub.epoch]

    def require_there(self, epochs: Sequence[int]) -> None:
        """StoreUnreachable unless the store holds one of these segments, which are cold: a folder that is not mounted
        is an empty place that takes everything, and what goes there is missed when the right one is back."""
        store = self._require_store()
        if epochs and all(store.size(self.object_name(epoch)) is None for epoch in epochs):
            raise StoreUnreachable(
                f"the cold tier {store.where} holds none of the segments that went there, {self.object_name(epochs[0])} "
                "for one: mount it, or set FABRIC_BROKER_COLD to where they are; nothing goes there until then"
            )

    def _require_going(self) -> None:
        if self.stopping:
            raise StoreUnreachable("the broker is stopping")

    def _require_store(self) -> ObjectStore:
        if self.store is None:
            raise SettingsError(
                f"journal {self._folder} has segments in the cold tier {self._known()}: set FABRIC_BROKER_COLD "
                "to where they are"
            )
        return self.store

    def require_store(self) -> None:
        """SettingsError if something is in a store and none was named."""
        if self.stubs:
            self._require_store()

    def _known(self) -> str:
        return ", ".join(sorted({stub.where for stub in self.stubs.values()}))


class _Part:
    """A piece of a segment that begins at `start`."""

    def __init__(self, part: memoryview, start: int) -> None:
        self._part, self._start = part, start

    def at(self, offset: int, length: int) -> memoryview:
        return self._part[offset - self._start : offset - self._start + length]


class _StoreWindow(Window):
    """Reads forward, and keeps the CRC32C of all bytes from the first on."""

    def __init__(self, tier: ColdTier, segment: Segment, step: int) -> None:
        super().__init__(tier._ops, segment.fd, segment.end, step)
        self._tier, self._segment = tier, segment
        self._crc = self._summed = 0

    def _read(self, span: int, offset: int) -> memoryview:
        part = self._tier._read(self._segment, offset, span)
        if offset <= self._summed < offset + len(part):
            self._crc = crc32c(part[self._summed - offset :], self._crc)
            self._summed = offset + len(part)
        return part

    def crc_of_all(self) -> int:
        """Of the whole object; what no frame asked for is read now."""
        while self._summed < self._segment.end:
            self._read(min(STEP_BYTES, self._segment.end - self._summed), self._summed)
        return self._crc


def _span(segment: Segment) -> str:
    return f"LSN {segment.first_lsn}..{segment.last_lsn}"


def _close_runs(segment: Segment, lsns: Sequence[int]) -> Iterable[tuple[int, int]]:
    """(first, last) of ascending LSNs whose frames lie close together."""
    runs: list[list[int]] = []
    for lsn in lsns:
        begin = segment.offsets[lsn - segment.first_lsn]
        if runs:
            last = runs[-1][1]
            end = segment.offsets[last - segment.first_lsn] + segment.extent(last)
            first = segment.offsets[runs[-1][0] - segment.first_lsn]
            if begin - end <= GAP_BYTES and begin + segment.extent(lsn) - first <= 4 * STEP_BYTES:
                runs[-1][1] = lsn
                continue
        runs.append([lsn, lsn])
    return [(first, last) for first, last in runs]
