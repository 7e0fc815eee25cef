"""The law of damage: refused by the name of what is damaged, or without any effect; never believed.

What an open, a read of every frame and a whole verify make of a damaged state is held to what they make of the
same state undamaged: the same frames at the same places of the index and the same state, byte for byte. Whatever is
refused must be back once the one thing that was named is restored, so that a refusal has done no harm of its own.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fabric_pipelines.broker import snapshot
from fabric_pipelines.broker.facts import Kind, Started, decode
from fabric_pipelines.broker.snapshot import Snapshot
from fabric_pipelines.broker.state import State
from fabric_pipelines.dataplane.cold_store import FolderStore
from fabric_pipelines.errors import FabricError
from fabric_pipelines.testing.crash_judge import LOST, Broken, digest_of, require
from fabric_pipelines.testing.crash_life import COLD, bench_on
from fabric_pipelines.testing.damage import Damage, Moment
from fabric_pipelines.testing.disk_bench import DiskBench
from fabric_pipelines.testing.sim_disk import Image, SimDisk, Sync, SyncFolder, all_kept

SERVED = "served"
REFUSED, HARMLESS = "refused", "harmless"
OUTCOMES = (REFUSED, HARMLESS, SERVED)
ALL = "all"
GIVEN_UP = ("stub", "segment")  # a start may let go of one on the strength of the other


class Carried(Protocol):
    """Damage of something on its way, which knows its own law."""

    @property
    def thing(self) -> str: ...

    def refused(self) -> bool:
        """Whether it was; Broken if it was believed."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a broker makes of a state: each frame by LSN, or why it cannot be had; `faults`: what else it says;
    `last_lsn`: as it was found, since each start adds a frame that says so."""

    frames: dict[int, Any]
    state: Snapshot
    faults: tuple[str, ...]
    last_lsn: int

    @property
    def refusals(self) -> list[str]:
        return [*self.faults, *(found for found in self.frames.values() if isinstance(found, str))]


@dataclass
class DamageJudge:
    """found: by thing and outcome, of all that were judged."""

    found: Counter[tuple[str, str]] = field(default_factory=Counter)
    _truths: dict[str, tuple[Sight, Sight]] = field(default_factory=dict)
    _again: dict[bytes, Sight] = field(default_factory=dict)  # by what was restored

    def judge_all(self, damages: Iterable[Damage | Carried]) -> None:
        """Raises Broken at the first one that was believed, or cost more than itself."""
        for damage in damages:
            self.judge(damage)

    def count(self, damages: Iterable[Damage | Carried]) -> list[str]:
        """Judges all of them and returns a sentence for each that was believed."""
        broken = []
        for damage in damages:
            try:
                self.judge(damage)
            except Broken as fault:
                broken.append(str(fault))
        return broken

    def table(self) -> dict[str, dict[str, int]]:
        """By thing, then in all: how many states there were, and what came of them."""
        rows: dict[str, dict[str, int]] = {}
        for (thing, outcome), count in sorted(self.found.items()):
            for name in (thing, ALL):
                row = rows.setdefault(name, dict.fromkeys(("states", *OUTCOMES), 0))
                row["states"] += count
                row[outcome] += count
        return {name: rows[name] for name in sorted(rows, key=lambda name: (name == ALL, name))}

    def judge(self, damage: Damage | Carried) -> None:
        try:
            refused = self._refused(damage) if isinstance(damage, Damage) else damage.refused()
        except Broken as broken:
            self.found[damage.thing, SERVED] += 1
            raise Broken(broken.kind, f"{damage}: {broken}") from broken
        except FabricError as fault:
            self.found[damage.thing, SERVED] += 1
            raise Broken(LOST, f"{damage}: taken or restored, then refused: {fault}") from fault
        except (
            AssertionError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            OSError,
        ) as fault:
            self.found[damage.thing, SERVED] += 1
            raise Broken(SERVED, f"{damage}: it ended in {fault!r}") from fault
        self.found[damage.thing, REFUSED if refused else HARMLESS] += 1

    def _refused(self, damage: Damage) -> bool:
        truths, disk = self._truth(damage.moment), SimDisk(damage.image)
        try:
            sight = _sight(disk, damage, whole=damage.thing == "checkpoint")
        except FabricError as fault:
            refusals = [str(fault)]
        else:
            refusals = sight.refusals
            _require_same(sight, truths)
        if not refusals:
            if damage.thing in GIVEN_UP:
                later = _sight(disk, whole=False)
                require(not later.refusals, LOST, f"taken, then refused: {later.refusals}")
                _require_same(later, truths)
            return False
        named = any(name in said for said in refusals for name in damage.names)
        require(named, SERVED, f"something else is named: {refusals[0]}")
        if any(not isinstance(op, Sync | SyncFolder) for op in disk.log):
            again = self._restored(damage, disk)
            require(not again.refusals, LOST, f"restored, it is still refused: {again.refusals}")
            _require_same(again, truths)
        return True

    def _truth(self, moment: Moment) -> tuple[Sight, Sight]:
        """Of the moment, and of one more start."""
        if moment.name not in self._truths:
            disk = SimDisk(moment.image)
            both = _sight(disk, whole=True), _sight(disk, whole=True)
            assert not any(sight.refusals for sight in both), both
            self._truths[moment.name] = both
        return self._truths[moment.name]

    def _restored(self, damage: Damage, disk: SimDisk) -> Sight:
        image = _restored(damage, all_kept(disk).image)
        mark = digest_of(image)
        if mark not in self._again:
            self._again[mark] = _sight(SimDisk(image), whole=False)
        return self._again[mark]


def _require_same(sight: Sight, truths: tuple[Sight, Sight]) -> None:
    """All that is not refused is the truth."""
    started = sight.last_lsn - truths[0].last_lsn
    require(started in (0, 1), LOST, f"the log ends at LSN {sight.last_lsn}")
    truth = truths[started]
    parts = truth.state.differences(sight.state)
    require(not parts, SERVED, f"the state differs in {', '.join(parts)}")
    require(sight.frames.keys() == truth.frames.keys(), LOST, "there are more frames, or fewer")
    for lsn, found in sight.frames.items():
        good = isinstance(found, str) or found == truth.frames[lsn]
        require(good, SERVED, f"LSN {lsn} is {found}, it was {truth.frames[lsn]}")


def _restored(damage: Damage, image: Image) -> Image:
    """What is damaged is put back; what was written behind it since stays."""
    good = damage.moment.content(damage.path)
    inode = damage.moment.image.entries[damage.path]
    restored = image.copy()
    if damage.carried:
        return restored
    if damage.at is None:
        restored.entries[damage.path] = inode
        restored.contents[inode] = good
    else:
        now = restored.contents[inode]
        restored.contents[inode] = (
            now[: damage.at] + good[damage.at : damage.at + 1] + now[damage.at + 1 :]
        )
    return restored


class _Fetching(FolderStore):
    """What is read of one object is not what it holds."""

    def __init__(self, disk: SimDisk, damage: Damage) -> None:
        super().__init__(COLD, disk)
        self._name, self._content = str(damage.path.relative_to(COLD)), damage.content or b""

    def read(self, name: str, offset: int, length: int) -> bytes:
        if name != self._name:
            return super().read(name, offset, length)
        return self._content[offset : offset + length]


def _sight(disk: SimDisk, damage: Damage | None = None, *, whole: bool) -> Sight:
    carried = damage is not None and damage.carried
    bench = bench_on(disk, _Fetching(disk, damage) if damage and carried else None)
    try:
        sight = sight_of(bench, whole=whole)
        if damage is not None and damage.thing in GIVEN_UP and not sight.refusals:
            bench.disk.roll()  # over a file that was let go
        return sight
    finally:
        bench.close()


def sight_of(bench: DiskBench, *, whole: bool) -> Sight:
    """The state as it was opened, then every frame, then what a scrub says. `whole`: a verify, which reads the
    checkpoint that stands for a dropped front as well and has nothing to add where all frames are the same."""
    journal, state = bench.disk, _counted(bench.owner.core.state)
    last_lsn = journal.durable_lsn
    kinds = {lsn: kind for kind in Kind for lsn in journal.lsns_of(kind)}
    frames = {
        lsn: _frame(bench, lsn, kinds.get(lsn)) for lsn in range(journal.first_lsn, last_lsn + 1)
    }
    try:
        faults = tuple(bench.owner.verify().differences if whole else _scrubbed(bench))
    except FabricError as fault:
        faults = (str(fault),)
    return Sight(frames, state, faults, last_lsn)


def _counted(state: State) -> Snapshot:
    """With lives numbered as they come: a start that was refused has a number too, and leaves no fact."""
    lives = state.lives
    state.lives = [replace(life, opens=at) for at, life in enumerate(lives)]
    try:
        return snapshot.take(state)
    finally:
        state.lives = lives


def _scrubbed(bench: DiskBench) -> list[str]:
    owner = bench.owner
    assert owner.scrubbing is not None
    owner.scrubbing.whole()
    owner.cold_scrubbed([call() for call in owner.cold_scrub()])
    return [frame.sentence for frame in owner.scrub_report().damaged]


def _frame(bench: DiskBench, lsn: int, kind: int | None) -> Any:
    """As a reader gets it, or the sentence that refuses it."""
    try:
        frame = bench.disk.read(lsn)
    except FabricError as fault:
        return str(fault)
    payload = bytes(frame.payload)
    fact = decode(frame.kind, payload, "") if frame.kind == Kind.STARTED else None
    if isinstance(fact, Started):
        payload = b"".join(replace(fact, opens=1).encode())  # as `_counted`
    digest = hashlib.blake2b(payload, digest_size=16).hexdigest()
    return frame.lsn, kind, frame.kind, frame.schema_id, frame.rows, frame.time_us, digest
