"""Recovery: a state from the frames of a journal, and nothing else. `verify` is the same act, then a comparison.

A checkpoint saves replaying what it covers. It is a cache as long as the log still holds all of that; once
frames were dropped, the one named by the DROP fact is part of the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker import snapshot
from fabric_pipelines.broker.checkpoint import Checkpoints
from fabric_pipelines.broker.facts import CheckpointTaken, Dropped, Kind, decode
from fabric_pipelines.broker.room import Space
from fabric_pipelines.broker.state import State
from fabric_pipelines.errors import BalanceBroken, ColdLost, CorruptionFound, StoreUnreachable
from fabric_pipelines.journal import Frame, Life
from fabric_pipelines.journal.damage import Place


class Log(Space, Protocol):
    """What the broker asks of `journal.Journal`."""

    @property
    def journal_id(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def life(self) -> Life: ...
    @property
    def durable_lsn(self) -> int: ...
    @property
    def next_lsn(self) -> int: ...
    @property
    def first_lsn(self) -> int: ...
    @property
    def bytes_used(self) -> int: ...
    def fits(self, frame_bytes: int) -> bool: ...
    def append(
        self,
        kind: int,
        payload: list[bytes | bytearray | memoryview],
        *,
        rows: int,
        time_us: int,
        schema_id: int = 0,
        essential: bool = False,
        keep: int | None = None,
    ) -> int: ...
    def require_room(self, size: int, keep: int | None = None) -> None: ...
    def extents(self, lsns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...
    def commit(self) -> int: ...
    def write(self) -> int: ...
    def sync(self) -> int: ...
    def mark_durable(self) -> int: ...
    def replay(self, from_lsn: int = 1) -> Iterator[Frame]: ...
    def read(self, lsn: int) -> Frame: ...
    def view(self, lsn: int) -> tuple[Frame, bool]: ...
    def lsns_of(self, kind: int) -> list[int]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Restored:
    """from_lsn: first frame replayed; tail_bytes: how much that was; newest: the checkpoint that was loaded;
    older: the one before it; base: the fact that says which one stands for dropped frames; ignored: why newer ones were not used."""

    state: State
    from_lsn: int
    tail_bytes: int
    newest: CheckpointTaken | None
    older: CheckpointTaken | None
    base: Dropped | None
    ignored: list[str]


def restore(journal: Log, checkpoints: Checkpoints | None) -> Restored:
    """The newest checkpoint that is whole, and the facts behind it; without one, all the facts.

    A checkpoint counts only if the log holds its CHECKPOINT fact, so one from a moment that the log does not
    know is none. CorruptionFound if the log no longer begins at its beginning and what stands for the
    missing part is damaged.
    """
    taken = journal.lsns_of(Kind.CHECKPOINT) if checkpoints is not None else []
    base = base_of(journal)
    ignored: list[str] = []
    newest = older = None
    state, from_lsn = State(journal.incarnation), 1
    for at in reversed(taken):
        try:
            fact = _fact(journal, at, CheckpointTaken)
        except (StoreUnreachable, ColdLost):
            if newest is None:
                raise
            break  # only a spare one is missed
        if fact.lsn < journal.first_lsn - 1 or fact.lsn > journal.durable_lsn:
            continue
        if newest is not None:
            older = fact
            break
        assert checkpoints is not None
        found = checkpoints.load(fact)
        if not isinstance(found, str):
            state, from_lsn, newest = snapshot.restore(found), fact.lsn + 1, fact
        else:
            ignored.append(found)
    if from_lsn < journal.first_lsn:
        raise _without_a_base(journal, checkpoints, ignored, base)
    tail = _Counted(journal.replay(from_lsn))
    state = rebuild(journal.incarnation, tail, state)
    return Restored(state, from_lsn, tail.bytes, newest, older, base, ignored)


def _without_a_base(
    journal: Log, checkpoints: Checkpoints | None, ignored: list[str], base: Dropped | None
) -> CorruptionFound:
    """`losses` finds out what that costs."""
    places = []
    if base is not None and checkpoints is not None:
        path, last = checkpoints.path_of(base.base), journal.first_lsn - 1
        places.append(Place(0, 0, 1, last).as_json(path))
    return CorruptionFound(
        f"the journal begins at LSN {journal.first_lsn} and no checkpoint stands for what was before "
        f"({'; '.join(ignored) or 'the log names none'}): restore the checkpoint file from a copy",
        places,
    )


def base_of(journal: Log) -> Dropped | None:
    """Which checkpoint stands for frames that were given up, by the last DROP fact."""
    lsns = journal.lsns_of(Kind.DROP)
    return _fact(journal, lsns[-1], Dropped) if lsns else None


def rebuild_from_log(
    journal: Log, checkpoints: Checkpoints | None, base: Dropped | None
) -> State | str:
    """The state that the log alone gives: from its beginning or, once its front was dropped, from the base
    checkpoint that the log names by digest. A sentence if that one is not whole."""
    if base is None or checkpoints is None:
        return rebuild(journal.incarnation, journal.replay())
    found = checkpoints.load(CheckpointTaken(base.base, base.digest, 0))
    if isinstance(found, str):
        return f"the base of the log is lost: {found}"
    return rebuild(journal.incarnation, journal.replay(base.base + 1), snapshot.restore(found))


T = TypeVar("T", CheckpointTaken, Dropped)


def _fact(journal: Log, lsn: int, wanted: type[T]) -> T:
    frame = journal.read(lsn)
    fact = decode(frame.kind, frame.payload, f"LSN {lsn}")
    assert isinstance(fact, wanted)
    return fact


class _Counted:
    """Frames as they pass, and how many bytes they were."""

    def __init__(self, frames: Iterator[Frame]) -> None:
        self._frames = frames
        self.bytes = 0

    def __iter__(self) -> Iterator[Frame]:
        for frame in self._frames:
            self.bytes += len(frame.payload)
            yield frame


def rebuild(incarnation: int, frames: Iterable[Frame], state: State | None = None) -> State:
    """`state`, or an empty one, after all of `frames`. Raises CorruptionFound naming the LSN of a fact that
    cannot be read or cannot have happened."""
    state = state or State(incarnation)
    for frame in frames:
        fact = decode(frame.kind, frame.payload, f"LSN {frame.lsn}")
        try:
            state.apply(fact, frame.lsn)
        except (BalanceBroken, KeyError, IndexError) as fault:
            raise CorruptionFound(
                f"LSN {frame.lsn} cannot follow the facts before it ({fault}): keep the journal folder "
                "and report it"
            ) from fault
    return state
