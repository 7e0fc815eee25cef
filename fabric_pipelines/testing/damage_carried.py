"""What is damaged on its way: an object while it is put or read back, a batch on the wire.

An upload that the store spoils must leave the segment here, whole, and succeed once the store is faithful again. A
batch goes through the very function that the server or the client checks it with: it is refused, or it is equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from fabric_pipelines.broker import client, server
from fabric_pipelines.broker.facts import Computed, Kind, decode
from fabric_pipelines.broker.tiering import Water
from fabric_pipelines.broker.uploads import checked
from fabric_pipelines.dataplane.cold_store import FolderStore
from fabric_pipelines.errors import SchemaError
from fabric_pipelines.journal import ObjectStore
from fabric_pipelines.records.arrow import crc32c, read_ipc, to_ipc_pieces, whole
from fabric_pipelines.records.submission import Submission
from fabric_pipelines.records.task import column_checksums
from fabric_pipelines.testing.course import other_course
from fabric_pipelines.testing.crash_judge import LOST, require
from fabric_pipelines.testing.crash_life import COLD, Life, bench_on, lease_of
from fabric_pipelines.testing.damage import (
    Damage,
    Moment,
    damages_of,
    frames_of,
    moment_of,
    moments_of,
)
from fabric_pipelines.testing.damage_judge import SERVED, sight_of
from fabric_pipelines.testing.disk_bench import DiskBench
from fabric_pipelines.testing.sim_disk import Create, Note, SimDisk, all_kept

Spoil = Callable[[bytes], bytes]
Check = Callable[[bytes, bytes], pa.RecordBatch]
BATCHES = 2  # of each kind on the wire
AGAIN_S = 120.0


@dataclass(frozen=True, slots=True)
class SpoiltUpload:
    """At `moment` a segment goes cold; what the store keeps of it, or what it reads back, is `spoil` of it."""

    moment: Moment
    thing: str
    story: str
    spoil: Spoil
    good: bytes
    frames: dict[int, Any]

    def __str__(self) -> str:
        return f"{self.moment.name}: {self.thing} of an upload {self.story}"

    def refused(self) -> bool:
        disk = SimDisk(self.moment.image)
        folder = FolderStore(COLD, disk)
        store = _Spoiling(folder, self.thing, self.spoil)
        bench = bench_on(disk, store)
        try:
            name = freeze(bench)
            gone = bench.disk.holdings[0].cold
            kept = folder.read(name, 0, len(self.good) + 1) if gone else self.good
            require(
                kept == self.good,
                LOST,
                f"{name} in the store is not what was put, and the file is given up",
            )
            if gone:
                return False
            said = bench.tiering.last_fault
            require(
                "gave back" in said and name.split("/")[-1] in said, SERVED, f"it says {said!r}"
            )
            _require_all_here(bench, self.frames)
            store.spoil = None
            bench.time.seconds += AGAIN_S
            bench.settle()
            require(bench.disk.holdings[0].cold, LOST, "with a faithful store it still stays here")
            require(
                folder.read(name, 0, len(self.good) + 1) == self.good,
                SERVED,
                "another object was kept",
            )
            _require_all_here(bench, self.frames)
            return True
        finally:
            bench.close()


@dataclass
class _Spoiling:
    """An object store in front of another, which spoils what is put, or what is read."""

    store: ObjectStore
    thing: str
    spoil: Spoil | None

    @property
    def where(self) -> str:
        return self.store.where

    def put(self, name: str, pieces: Iterable[memoryview], size: int) -> None:
        content = b"".join(pieces)
        if self.spoil is not None and self.thing == "put":
            content = self.spoil(content)
        self.store.put(name, [memoryview(content)], len(content))

    def size(self, name: str) -> int | None:
        return self.store.size(name)

    def read(self, name: str, offset: int, length: int) -> bytes:
        if self.spoil is None or self.thing != "read-back":
            return self.store.read(name, offset, length)
        content = self.store.read(name, 0, self.store.size(name) or 0)
        return self.spoil(content)[offset : offset + length]

    def remove(self, name: str) -> None:
        self.store.remove(name)


def freeze(bench: DiskBench) -> str:
    """The oldest segment goes cold, if the store lets it; returns the name of its object."""
    bench.disk.roll()
    bench.checkpoint()
    bench.tiering.water = Water(0, 0)
    bench.checkpoint()
    return bench.disk.cold.object_name(bench.disk.holdings[0].epoch)


def _require_all_here(bench: DiskBench, frames: dict[int, Any]) -> None:
    sight = sight_of(bench, whole=True)
    require(not sight.refusals, LOST, "; ".join(sight.refusals))
    for lsn, frame in frames.items():
        require(
            sight.frames[lsn] == frame, SERVED, f"LSN {lsn} is {sight.frames[lsn]}, it was {frame}"
        )


def uploads_of(life: Life) -> Iterator[SpoiltUpload]:
    """Of the life's own first upload: a bit of each part of each kind of frame, a cut, and another course."""
    first = next(
        at
        for at, op in enumerate(life.disk.log)
        if isinstance(op, Create) and op.path.name.endswith(".cold.new")
    )
    last = max(at for at, op in enumerate(life.disk.log[:first], 1) if isinstance(op, Note))
    moment = moment_of(f"after {last} operations", all_kept(life.disk, last).image)
    disk = SimDisk(moment.image)
    bench = bench_on(disk)
    frames = sight_of(bench, whole=False).frames
    name = freeze(bench)
    assert bench.disk.holdings[0].cold, "the life's own upload succeeds here as well"
    bench.close()
    good = disk.read_bytes(COLD / name)
    epoch = int(name.split("/")[-1].split(".")[0])
    places = {f.header.kind: (offset, f) for offset, f in frames_of(good, epoch, moment.salt)}
    hits = sorted(
        at
        for offset, f in places.values()
        for at in (
            offset + 32,
            offset + 64 + f.header.length // 2,
            offset + f.header.frame_bytes - 1,
        )
    )
    other = other_course(good, epoch, moment.salt, moment.journal_id)
    assert other is not None
    for thing in ("put", "read-back"):
        for at in hits:
            yield SpoiltUpload(
                moment, thing, f"with a bit of byte {at} flipped", _flipping(at), good, frames
            )
        for size in (0, len(good) // 2, len(good) - 1):
            yield SpoiltUpload(moment, thing, f"cut to {size} bytes", _cutting(size), good, frames)
        swapped = _swapping(other.content)
        yield SpoiltUpload(
            moment, thing, "from another course of the journal", swapped, good, frames
        )


def _flipping(at: int) -> Spoil:
    return lambda content: content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]


def _cutting(size: int) -> Spoil:
    return lambda content: content[:size]


def _swapping(other: bytes) -> Spoil:
    return lambda content: other


# -- the wire


@dataclass(frozen=True, slots=True)
class OnTheWire:
    """`bad` arrives where `good` was sent; `check`: what the receiver makes of that."""

    thing: str
    story: str
    good: bytes
    bad: bytes
    check: Check

    def __str__(self) -> str:
        return f"{self.thing} on the wire {self.story}"

    def refused(self) -> bool:
        try:
            batch = self.check(self.good, self.bad)
        except SchemaError:
            return True
        require(batch.equals(read_ipc(self.good)), SERVED, "another batch was taken")
        return False


def wire_of(life: Life) -> Iterator[OnTheWire]:
    """A bit at both ends and in the middle of each buffer of each column of a few batches of each kind, and batches
    that arrive in place of each other."""
    found: dict[str, list[tuple[bytes, Check]]] = {}
    for header, batches in list(life.sent.values())[:BATCHES]:
        found.setdefault("upload", []).append((_ipc(batches[0]), _upload(header)))
    for thing, ipc in _given_out(life):
        found.setdefault(thing, []).append((ipc, _from_the_broker))
    found["completion"] = [(ipc, _computed) for ipc in _reported(life)]
    for thing, sent in found.items():
        assert len(sent) >= BATCHES, f"the life has too few batches: {thing}"
        for number, (good, check) in enumerate(sent[:BATCHES]):
            for at in _body_places(good):
                bad = _flipping(at)(good)
                yield OnTheWire(
                    thing, f"{number} with a bit of byte {at} flipped", good, bad, check
                )
            yield OnTheWire(thing, f"{number} cut in half", good, good[: len(good) // 2], check)
            like = sent[number - 1][0]
            yield OnTheWire(thing, f"{number} as another one", good, like, check)


def _ipc(batch: pa.RecordBatch) -> bytes:
    return bytes(whole(to_ipc_pieces(batch)))


def _given_out(life: Life) -> Iterator[tuple[str, bytes]]:
    """Leases and pulls of what there is at the moments of the life."""
    counts = {"lease": 0, "pull": 0}
    for moment in moments_of(life):
        bench = bench_on(SimDisk(moment.image))
        try:
            bench.attach("w")
            while (lease := lease_of(bench, "w", 3)) is not None and counts["lease"] < BATCHES:
                counts["lease"] += 1
                yield "lease", _ipc(lease.to_batch())
                bench.finish(lease)
            while (rows := bench.owner.pull("z", 2)) is not None and counts["pull"] < BATCHES:
                counts["pull"] += 1
                yield "pull", _ipc(rows)
        finally:
            bench.close()


def _reported(life: Life) -> Iterator[bytes]:
    """As workers sent them: the log keeps the bytes."""
    for moment in moments_of(life):
        bench = bench_on(SimDisk(moment.image))
        try:
            for lsn in bench.disk.lsns_of(Kind.COMPUTED)[:BATCHES]:
                frame = bench.disk.read(lsn)
                fact = decode(frame.kind, frame.payload, f"LSN {lsn}")
                assert isinstance(fact, Computed)
                yield bytes(whole(fact.ipc))
        finally:
            bench.close()


def _body_places(ipc: bytes) -> list[int]:
    """Bytes of the columns' buffers."""
    base = pa.py_buffer(ipc)
    places: set[int] = set()
    for column in read_ipc(base).columns:
        for buffer in column.buffers():
            if buffer is not None and buffer.size:
                begin = buffer.address - base.address
                assert 0 <= begin < len(ipc), "a buffer lies in the bytes it was read from"
                places |= {begin, begin + buffer.size // 2, begin + buffer.size - 1}
    return sorted(places)


def _upload(header: Submission) -> Check:
    def check(good: bytes, bad: bytes) -> pa.RecordBatch:
        note = {"first_row": 0, "crc32c": column_checksums(read_ipc(good))}
        chunk = (note, _arrived(bad))
        with ThreadPoolExecutor(1) as hasher:
            return next(checked(header, iter([chunk]), None, hasher)).batch

    return check


def _arrived(ipc: bytes) -> pa.RecordBatch:
    """As the transport hands it on; what it cannot read it refuses itself."""
    try:
        return read_ipc(ipc)
    except (pa.ArrowInvalid, StopIteration, OSError) as fault:
        raise SchemaError(f"the transport refused it: {fault}") from fault


def _from_the_broker(good: bytes, bad: bytes) -> pa.RecordBatch:
    return client._checked({"crc32c": crc32c(good)}, memoryview(bad))


@dataclass
class _Owner:
    taken: list[pa.RecordBatch] = field(default_factory=list)

    def computed(self, name: str, batch: pa.RecordBatch, ipc: Any) -> None:
        self.taken.append(batch)


def _computed(good: bytes, bad: bytes) -> pa.RecordBatch:
    owner = _Owner()
    desk = SimpleNamespace(_ask=lambda act, rank: act(owner))
    who = SimpleNamespace(session=lambda name: name)
    head = {"session": "w", "crc32c": crc32c(good)}
    server.BrokerServer._computed(desk, head, [memoryview(bad)], who)  # type: ignore[arg-type]
    (batch,) = owner.taken
    return batch


def damaged_states(life: Life, *, seed: int) -> Iterator[Damage | SpoiltUpload | OnTheWire]:
    """All that `DamageJudge` is asked of a life: on the wire, on its way to the store and back, and at rest."""
    yield from wire_of(life)
    yield from uploads_of(life)
    yield from damages_of(life, seed=seed)
