"""A journal in memory with the interface of `journal.Journal`, which crashes and fills up on command.

What was committed survives `crash`; what was only appended does not. Payload bytes are copied at append, so a
test sees a fact that was changed after it was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import StorageFailed, UsageError
from fabric_pipelines.journal import Frame, Life

FIRST = Life(1, 0, 0)
Piece = bytes | bytearray | memoryview


@dataclass(slots=True)
class MemoryJournal:
    """`full`: appends that are not essential find no space. `broken`: the next commit fails, and so does all
    that follows it. `room`: what may be promised beyond the floor, None for no end of it."""

    incarnation: int = 7
    journal_id: str = "00" * 16
    full: bool = False
    broken: bool = False
    room: int | None = None
    segment_bytes: int = 1 << 16
    frame_max: int = 1 << 40
    commits: int = 0
    life: Life = FIRST
    _durable: list[Frame] = field(default_factory=list)
    _written: list[Frame] = field(default_factory=list)
    _group: list[Frame] = field(default_factory=list)
    _stopped: bool = False

    @property
    def next_lsn(self) -> int:
        return len(self._durable) + len(self._written) + len(self._group) + 1

    @property
    def first_lsn(self) -> int:
        return 1

    def lsns_of(self, kind: int) -> list[int]:
        return [frame.lsn for frame in self._durable if frame.kind == kind]

    @property
    def durable_lsn(self) -> int:
        return len(self._durable)

    @property
    def held_bytes(self) -> int | None:
        return None if self.room is None else self.room + self.segment_bytes * 3 // 2

    @property
    def room_bytes(self) -> int | None:
        return self.held_bytes

    def fits(self, frame_bytes: int) -> bool:
        return True

    def hold(self, size: int) -> int | None:
        return self.held_bytes

    @property
    def bytes_used(self) -> int:
        held = (*self._durable, *self._written, *self._group)
        return sum(len(frame.payload) for frame in held)

    def append(
        self,
        kind: int,
        payload: Piece | list[Piece] | tuple[Piece, ...],
        *,
        rows: int,
        time_us: int,
        schema_id: int = 0,
        essential: bool = False,
        keep: int | None = None,
    ) -> int:
        self._require_working()
        if self.full and not essential:
            raise StorageFailed("the disk of the memory journal is full")
        pieces = payload if isinstance(payload, list | tuple) else [payload]
        lsn = self.next_lsn
        whole = memoryview(b"".join(bytes(piece) for piece in pieces))
        self._group.append(Frame(lsn, kind, schema_id, rows, time_us, whole))
        return lsn

    def extents(self, lsns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        held = {frame.lsn: len(frame.payload) for frame in (*self._durable, *self._written)}
        return np.array([held.get(lsn, 0) for lsn in lsns.tolist()], np.int64)

    def require_room(self, size: int, keep: int | None = None) -> None:
        self._require_working()
        if self.full:
            raise StorageFailed("the disk of the memory journal is full")

    def commit(self) -> int:
        self.write()
        return self.sync()

    def write(self) -> int:
        self._require_working()
        self._written += self._group
        self._group = []
        return self.durable_lsn + len(self._written)

    def sync(self) -> int:
        self._require_working()
        if self.broken:
            self._stopped = True
            raise StorageFailed("the memory journal failed its fsync")
        self._durable += self._written
        self._written = []
        self.commits += 1
        return self.durable_lsn

    def mark_durable(self) -> int:
        self._require_working()
        return self.durable_lsn

    def replay(self, from_lsn: int = 1) -> Iterator[Frame]:
        self._require_working()
        yield from self._durable[from_lsn - 1 :]

    def read(self, lsn: int) -> Frame:
        self._require_working()
        held = [*self._durable, *self._written] if self._written else self._durable
        if not 1 <= lsn <= len(held):
            raise UsageError(f"LSN {lsn} is not in the journal")
        return held[lsn - 1]

    def view(self, lsn: int) -> tuple[Frame, bool]:
        return self.read(lsn), False

    def close(self) -> None:
        self._stopped = True

    def crash(self) -> MemoryJournal:
        """The journal as the next process finds it."""
        self._stopped = True
        return MemoryJournal(
            self.incarnation,
            self.journal_id,
            life=Life(self.life.opens + 1, 0, self.durable_lsn),
            _durable=list(self._durable),
        )

    def _require_working(self) -> None:
        if self._stopped:
            raise StorageFailed("the memory journal has stopped")
