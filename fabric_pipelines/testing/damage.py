"""Every kind of damage that what a recorded life keeps may take without any crash: a bit that rots, a copy of another
course of the journal, a file cut short or gone, a whole frame or object that is not the one that was written.

One `Damage` is one thing of one moment of the life that is not what was written. Which bytes are hit follows from
the formats alone, so that each field of each kind of frame, each column and each object is met; `seed` says only
which bit of a byte. What the law is, `damage_judge` knows; what is damaged on its way, `damage_carried`.
"""

from __future__ import annotations

import json
import random
import re
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fabric_pipelines.broker import checkpoint
from fabric_pipelines.broker.facts import Kind
from fabric_pipelines.clock import Clock
from fabric_pipelines.dataplane.cold_store import FolderStore
from fabric_pipelines.journal import Journal, index, stub
from fabric_pipelines.journal.frame import DURABLE, HEADER, HEADER_BYTES, SEAL, padded
from fabric_pipelines.journal.identity import NAME
from fabric_pipelines.journal.segment import Found, Mapped, frame_at
from fabric_pipelines.testing.course import (
    another_id,
    of_another_journal,
    other_course,
    other_frame,
    other_payload,
)
from fabric_pipelines.testing.crash_life import COLD, FOLDER, SEGMENT_BYTES, Life
from fabric_pipelines.testing.sim_disk import Image, Note, SimDisk, all_kept

STILL = Clock(lambda: 0.0, lambda: 0)
ANOTHER = "from another course of the journal"
OF_ANOTHER_JOURNAL = "of another journal"
ONE_FRAME = "with one frame from another course of the journal"
FIELDS = tuple(
    struct.calcsize(HEADER.format[: part.start()])
    for part in re.finditer(r"\d*[a-zA-Z]", HEADER.format)
)


@dataclass(frozen=True, slots=True)
class Moment:
    """The platter at one moment of the life, all that was done being there. `recorded`: the durable LSN that the log
    itself knows of; `segments`: content of each live one here, by its path; `salt`, `journal_id`: of the journal."""

    name: str
    image: Image
    recorded: int
    segments: dict[Path, int]
    sealed: frozenset[int]
    cold: frozenset[int]
    salt: int
    journal_id: str
    kinds: frozenset[int]

    def content(self, path: Path) -> bytes:
        return self.image.contents.get(self.image.entries[path], b"")


@dataclass(frozen=True, slots=True)
class Damage:
    """At `moment` the file `path` is `content`, or gone; `at`: where a bit was flipped, if that is all. `carried`: the
    object is whole, and only what is read of it is not. A refusal must say one of `names`."""

    moment: Moment
    thing: str
    story: str
    path: Path
    content: bytes | None
    names: tuple[str, ...]
    at: int | None = None
    carried: bool = False

    @property
    def image(self) -> Image:
        image = self.moment.image.copy()
        if self.carried:
            return image
        if self.content is None:
            del image.entries[self.path]
        else:
            image.contents[image.entries[self.path]] = self.content
        return image

    def __str__(self) -> str:
        return f"{self.moment.name}: {self.thing} {self.path.name} {self.story}"


# -- moments


def moments_of(life: Life) -> list[Moment]:
    """The fewest that show every kind of thing the life keeps, the latest last: the last one with a segment that went cold and is still
    here, the last one where it is in the store alone, the end, and the last one of each kind of fact not seen by then."""
    marks = [
        at
        for at, op in enumerate(life.disk.log, 1)
        if isinstance(op, Note) and op.name in ("acked", "recorded")
    ]
    both = alone = None
    found: list[Moment] = [moment_of("at the end", all_kept(life.disk).image)]
    seen = set(found[0].kinds)
    for at in reversed(marks):
        image = all_kept(life.disk, at).image
        stubs = {p for p in image.entries if p.suffix == stub.SUFFIX}
        if not stubs and seen >= life.kinds:
            continue
        moment = moment_of(f"after {at} operations", image)
        first = not moment.kinds <= seen
        if moment.cold and alone is None:
            alone, first = moment, True
        if stubs and not moment.cold and both is None and _objects(image):
            both, first = moment, True
        if first:
            found.append(moment)
            seen |= moment.kinds
    assert alone is not None, "nothing of the life is in the store alone"
    assert both is not None, "at no time is a segment both here and in the store"
    assert seen >= life.kinds, "not every kind of fact is in some live segment"
    return found[::-1]


def _objects(image: Image) -> list[Path]:
    return [path for path in image.entries if COLD in path.parents and path.suffix == ".segment"]


def moment_of(name: str, image: Image) -> Moment:
    disk = SimDisk(image)
    with Journal.open(
        FOLDER,
        segment_bytes=SEGMENT_BYTES,
        ops=disk,
        lazy=True,
        store=FolderStore(COLD, disk),
        clock=STILL,
    ) as journal:
        segments = journal._segments
        return Moment(
            name,
            image,
            journal.recovered.recorded_durable_lsn,
            {s.path: s.epoch for s in segments if not s.cold},
            frozenset(s.epoch for s in segments if s.sealed and not s.cold),
            frozenset(s.epoch for s in segments if s.cold),
            journal._salt,
            journal.journal_id,
            frozenset(kind for s in segments for kind in s.kinds),
        )


# -- damages


def damages_of(life: Life, *, seed: int) -> Iterator[Damage]:
    """Each thing once, however many moments show it, but for what means something else at each."""
    at_rest = _AtRest(random.Random(seed))
    moments = moments_of(life)
    yield from at_rest.of_small(moments[0], FOLDER / NAME, "identity", 3)
    for moment in moments:
        yield from at_rest.of_stubs(moment)
        yield from at_rest.of_segments(moment)
        yield from at_rest.of_checkpoints(moment)


@dataclass
class _AtRest:
    chance: random.Random
    seen: set[object] = field(default_factory=set)
    turn: int = 0

    def of_segments(self, moment: Moment) -> Iterator[Damage]:
        """Files here and objects in the store, frame by frame; then another course of the whole of it."""
        kept = [(path, epoch, "segment") for path, epoch in moment.segments.items()]
        kept += [(path, int(path.stem), "object") for path in _objects(moment.image)]
        for path, epoch, thing in kept:
            content, sealed = moment.content(path), thing == "segment" and epoch in moment.sealed
            name = path.name if thing == "segment" else f"{moment.journal_id}/{path.name}"
            names = name, f"epoch {epoch}"
            frames = list(frames_of(content, epoch, moment.salt))
            end = frames[-1][0] + frames[-1][1].header.frame_bytes
            hits = list(self._of_frames(moment, path, thing, names, frames))
            yield from hits
            if thing == "object" and epoch in moment.cold:
                cut = replace(hits[0], story="cut in half", content=content[: end // 2], at=None)
                for hit in (*hits, cut):
                    yield replace(hit, thing="fetch", carried=True)
                if self._is_new("foreign", path):
                    yield from _foreign_objects(moment, path, epoch, names)
            if not self._is_new(path.parent, content[:end]):
                continue
            if sealed or thing == "object":
                yield from _whole(moment, thing, path, names, end)
            else:
                for size in (end // 2, end):
                    story = f"cut to {size} bytes while it was written to"
                    yield Damage(moment, thing, story, path, content[:size], names)
            if sealed:
                yield from self._of_another_course(moment, path, epoch, content, end)
                if _stub_path(epoch) not in moment.image.entries:  # else the object is read
                    yield from _foreign_segments(moment, path, epoch, end)

    def _of_frames(
        self,
        moment: Moment,
        path: Path,
        thing: str,
        names: tuple[str, ...],
        frames: list[tuple[int, Found]],
    ) -> Iterator[Damage]:
        """The last of each kind at or below the recorded durable LSN: behind that nothing was promised for good. Not the
        mark that alone records it while more lies behind: without it that is a torn tail."""
        sealed = frames[-1][1].header.kind == SEAL
        open_end = not sealed and frames[-1][1].header.lsn > moment.recorded
        known = {
            f.header.kind: (offset, f)
            for offset, f in frames
            if f.header.lsn <= moment.recorded
            and not (open_end and f.header.kind == DURABLE and f.header.lsn == moment.recorded)
        }
        for offset, found in sorted(known.values(), key=lambda place: place[0]):
            if self._is_new(thing, sealed, found.header.kind, thing == "object" and moment.name):
                for at, where in self._places(offset, found):
                    yield self._flip(moment, thing, path, at, names, where)

    def _of_another_course(
        self, moment: Moment, path: Path, epoch: int, content: bytes, end: int
    ) -> Iterator[Damage]:
        beside = path.with_suffix(index.SUFFIX)
        yield from self.of_small(moment, beside, "index", 5 if self._is_new("index") else 60)
        other = other_course(content[:end], epoch, moment.salt, moment.journal_id)
        if other is None:
            return
        names = path.name, f"epoch {epoch}"
        yield Damage(moment, "segment", ANOTHER, path, other.content + content[end:], names)
        disk = SimDisk(moment.image)
        index.write_index(disk, path, other.index, bytes.fromhex(moment.journal_id))
        yield Damage(moment, "index", ANOTHER, beside, disk.read_bytes(beside), (beside.name,))

    def of_stubs(self, moment: Moment) -> Iterator[Damage]:
        owner = bytes.fromhex(moment.journal_id)
        for path in [path for path in moment.image.entries if path.suffix == stub.SUFFIX]:
            good = stub.unpack_stub(memoryview(moment.content(path)), owner)
            assert good is not None
            if not self._is_new(path, good.epoch in moment.cold):
                continue
            names = path.name, f"epoch {good.epoch}"
            yield from self.of_small(moment, path, "stub", 7, names)
            content = moment.content(COLD / moment.journal_id / f"{good.epoch:08d}.segment")
            other = other_course(content, good.epoch, moment.salt, moment.journal_id)
            assert other is not None, "only one group went cold"
            swapped = replace(
                good,
                crc=other.crc,
                chain=other.index.chain,
                offsets=other.index.offsets,
                kinds=other.index.kinds,
                crcs=other.index.crcs,
            )
            yield Damage(moment, "stub", ANOTHER, path, swapped.pack(owner), names)
            yield from _foreign_stubs(moment, good, names)

    def of_checkpoints(self, moment: Moment) -> Iterator[Damage]:
        """Each column of one that stands alone, and may be the base of the log; some of those that are a cache."""
        paths = [
            p for p in moment.image.entries if re.fullmatch(checkpoint.PREFIX + r"\d+", p.name)
        ]
        for path in paths:
            content, alone = moment.content(path), len(paths) == 1
            if not self._is_new(path, alone):
                continue
            start, sections = sections_of(content)
            names = (path.name,)
            for at in range(0, start, 160):
                yield self._flip(moment, "checkpoint", path, at, names, "head")
            for section in sections[:: 1 if alone else 4]:
                if section["stored"]:
                    at = start + section["offset"] + section["stored"] // 2
                    yield self._flip(moment, "checkpoint", path, at, names, section["name"])
            yield from _whole(moment, "checkpoint", path, names, len(content))
            for like in paths:
                if like != path:
                    story = f"which is {like.name}"
                    yield Damage(moment, "checkpoint", story, path, moment.content(like), names)

    def of_small(
        self, moment: Moment, path: Path, thing: str, step: int, names: tuple[str, ...] = ()
    ) -> Iterator[Damage]:
        names, size = names or (path.name,), len(moment.content(path))
        for at in sorted({*range(0, size, step), size - 1}):
            yield self._flip(moment, thing, path, at, names)
        yield from _whole(moment, thing, path, names, size)

    def _places(self, offset: int, found: Found) -> Iterator[tuple[int, str]]:
        """Bytes of three fields of the header, others with each frame, of the payload and of what pads it."""
        kind = found.header.kind
        name = Kind(kind).name if kind in Kind._value2member_map_ else f"{kind:#x}"
        for _ in range(3):
            yield offset + FIELDS[self.turn % len(FIELDS)], f"{name} header"
            self.turn += 1
        body, length = offset + HEADER_BYTES, found.header.length
        for at in sorted({body, body + length // 2, body + length - 1} if length else ()):
            yield at, f"{name} payload"
        if padded(length) > length:
            yield body + padded(length) - 1, f"{name} padding"

    def _flip(
        self,
        moment: Moment,
        thing: str,
        path: Path,
        at: int,
        names: tuple[str, ...],
        where: str = "",
    ) -> Damage:
        content, bit = moment.content(path), self.chance.randrange(8)
        flipped = content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
        story = f"with bit {bit} of byte {at} flipped{where and f' ({where})'}"
        return Damage(moment, thing, story, path, flipped, names, at)

    def _is_new(self, *what: object) -> bool:
        new = what not in self.seen
        self.seen.add(what)
        return new


def _foreign_segments(moment: Moment, path: Path, epoch: int, end: int) -> Iterator[Damage]:
    """Of a sealed segment here and of its index file."""
    content, how = moment.content(path), (epoch, moment.salt, moment.journal_id)
    found = {
        ONE_FRAME: other_frame(content[:end], *how),
        OF_ANOTHER_JOURNAL: of_another_journal(content[:end], *how),
    }
    for story, foreign in found.items():
        whole = foreign + content[end:]
        yield Damage(moment, "foreign", story, path, whole, (path.name, f"epoch {epoch}"))
    like = next((p for p, e in moment.segments.items() if e in moment.sealed and p != path), None)
    if like is None:
        return
    twice = moment.content(like)
    yield Damage(moment, "foreign", f"which is {like.name}", path, twice, (path.name,))
    beside, twin = path.with_suffix(index.SUFFIX), like.with_suffix(index.SUFFIX)
    if {beside, twin} <= moment.image.entries.keys():
        story, foreign = f"which is {twin.name}", moment.content(twin)
        yield Damage(moment, "index", story, beside, foreign, (beside.name,))


def _foreign_stubs(moment: Moment, good: stub.Stub, names: tuple[str, ...]) -> Iterator[Damage]:
    path, other = _stub_path(good.epoch), another_id(moment.journal_id)
    yield Damage(moment, "stub", OF_ANOTHER_JOURNAL, path, good.pack(other), names)
    raised = replace(good, epoch=good.epoch + 1).pack(bytes.fromhex(moment.journal_id))
    yield Damage(moment, "stub", "of another epoch", path, raised, names)


def _foreign_objects(
    moment: Moment, path: Path, epoch: int, names: tuple[str, ...]
) -> Iterator[Damage]:
    """Whole in itself, and not what was put: with the stub of today, which knows each frame, and with one of version 1,
    which knows only all of them together."""
    content, how = moment.content(path), (epoch, moment.salt, moment.journal_id)
    found = {
        ONE_FRAME: other_frame(content, *how),
        "with another payload": other_payload(content, *how).content,
        OF_ANOTHER_JOURNAL: of_another_journal(content, *how),
    }
    if (other := other_course(content, *how)) is not None:
        found[ANOTHER] = other.content
    for like in _objects(moment.image):
        if like != path:
            found[f"which is {like.name}"] = moment.content(like)
    for at in (moment, _with_old_stub(moment, epoch)):
        for story, foreign in found.items():
            yield Damage(at, "foreign", story, path, foreign, names)


def _with_old_stub(moment: Moment, epoch: int) -> Moment:
    """The same with that segment's stub as it was before stubs had CRCs of frames."""
    owner, image = bytes.fromhex(moment.journal_id), moment.image.copy()
    path = _stub_path(epoch)
    good = stub.unpack_stub(memoryview(moment.content(path)), owner)
    assert good is not None
    image.contents[image.entries[path]] = replace(good, crcs=array("I")).pack(owner)
    return replace(moment, name=f"{moment.name}, stub {epoch} of version 1", image=image)


def _stub_path(epoch: int) -> Path:
    return FOLDER / f"epoch-{epoch:08d}{stub.SUFFIX}"


def _whole(
    moment: Moment, thing: str, path: Path, names: tuple[str, ...], kept: int
) -> Iterator[Damage]:
    """Cut short, emptied, gone."""
    content = moment.content(path)
    for size in sorted({0, kept // 2, kept - 1}):
        yield Damage(moment, thing, f"cut to {size} bytes", path, content[:size], names)
    yield Damage(moment, thing, "gone", path, None, names)


def sections_of(content: bytes) -> tuple[int, list[dict[str, Any]]]:
    """Where the columns of a checkpoint begin, and each of them."""
    length = checkpoint.PREAMBLE.unpack_from(content)[2]
    begin = checkpoint.PREAMBLE.size
    sections: list[dict[str, Any]] = json.loads(content[begin : begin + length])["sections"]
    return padded(begin + length), sections


# -- frames


def frames_of(content: bytes, epoch: int, salt: int) -> Iterator[tuple[int, Found]]:
    """(offset, frame) of each that is whole, from the first on."""
    source, offset = Mapped(memoryview(content)), 0
    while (found := frame_at(source, offset, epoch=epoch, salt=salt)) is not None:
        yield offset, found
        offset += found.header.frame_bytes
