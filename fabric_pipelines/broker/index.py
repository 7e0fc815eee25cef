"""The index: one row of plain columns per task, found by subtraction, since sequence numbers are dense.

34 bytes a task and no Python object per task. Columns that mostly hold small numbers begin narrow and are
widened, whole, when the first larger one comes. `base` and `frames` say in which
ENQUEUE frame a task's tokens lie, `done` and `done_row` in which COMPUTED frame its outcome lies.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

COLUMNS: dict[str, Any] = {
    "state": np.uint8,
    "attempts": np.uint8,
    "verdict": np.uint8,
    "queued": np.bool_,  # is in the order of its lane; derived, not a fact
    "lane": np.uint16,
    "submission": np.uint16,
    "prompt": np.uint16,
    "new": np.uint16,
    "key": np.uint64,
    "lease": np.int32,
    "holder": np.int16,
    "done": np.int32,
    "done_row": np.uint16,
    "output": np.uint16,
}
WIDER: dict[str, Any] = {"lease": np.int64, "done": np.int64} | dict.fromkeys(
    ("lane", "submission", "prompt", "new", "holder", "done_row", "output"), np.int32
)
GROWTH = 4  # of room, whenever it is used up: what is not written yet costs nothing
MAPPED_BYTES = 1 << 20
LARGEST = {
    np.dtype(kind): int(np.iinfo(kind).max)
    for kind in (np.uint8, np.uint16, np.int16, np.int32, np.int64, np.uint64)
}
FACTS = tuple(name for name in COLUMNS if name != "queued")


def _zeros(rows: int, dtype: Any) -> npt.NDArray[Any]:
    """Zeros whose pages cost nothing until they are written. Mapped by themselves: large arrays that grow and go
    inside malloc's heap leave 8 bytes a task of holes behind, by `fabric bench supply --scale`."""
    size = rows * np.dtype(dtype).itemsize
    if size < MAPPED_BYTES:
        return np.zeros(rows, dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # as numpy does: rows of a lease lie anywhere
    return np.frombuffer(pages, dtype)


class Growing:
    """An array that grows by doubling; `view` is its live part."""

    __slots__ = ("_array", "count")

    def __init__(self, dtype: Any) -> None:
        self._array = np.zeros(64, dtype)
        self.count = 0

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Growing:
        made = cls(values.dtype)
        made._array = np.concatenate([values, np.zeros(64, values.dtype)])
        made.count = len(values)
        return made

    @property
    def view(self) -> npt.NDArray[Any]:
        return self._array[: self.count]

    def append(self, value: int) -> None:
        if self.count == len(self._array):
            self._array = np.concatenate([self._array, np.zeros_like(self._array)])
        self._array[self.count] = value
        self.count += 1


class TaskIndex:
    """Columns by name as attributes, each valid in [0, count). Those of WIDER are read only: `put` writes them."""

    state: npt.NDArray[np.uint8]
    attempts: npt.NDArray[np.uint8]
    verdict: npt.NDArray[np.uint8]
    queued: npt.NDArray[np.bool_]
    lane: npt.NDArray[Any]
    submission: npt.NDArray[Any]
    prompt: npt.NDArray[Any]
    new: npt.NDArray[Any]
    key: npt.NDArray[np.uint64]
    lease: npt.NDArray[Any]
    holder: npt.NDArray[Any]
    done: npt.NDArray[Any]
    done_row: npt.NDArray[Any]
    output: npt.NDArray[Any]

    def __init__(self) -> None:
        self.count = 0
        self._capacity = 1024
        self._columns: dict[str, npt.NDArray[Any]] = {}
        for name, dtype in COLUMNS.items():
            self._hold(name, _zeros(self._capacity, dtype))
        self.base = Growing(np.int64)  # first sequence number of each ENQUEUE frame
        self.frames = Growing(np.int64)  # its lsn
        self.done_frames = Growing(np.int64)  # lsn of each COMPUTED frame
        self.moved: dict[int, npt.NDArray[np.int64]] = {}  # tasks of each MOVE frame, ascending

    def reserve(self, rows: int) -> None:
        """Room for so many rows in all; columns handed out before stay as they are."""
        if rows <= self._capacity:
            return
        grown = max(self._capacity * GROWTH, rows)
        for name in COLUMNS:
            column = self._columns[name]
            longer, live = _zeros(grown, column.dtype), column[: self.count]
            if live.any():
                longer[: self.count] = live
            self._hold(name, longer)
        self._capacity = grown

    def _hold(self, name: str, column: npt.NDArray[Any]) -> None:
        shown = column.view()
        shown.flags.writeable = name not in WIDER
        self._columns[name] = column
        setattr(self, name, shown)

    def put(self, name: str, at: Any, values: Any) -> None:
        """Column `name` at the places `at` becomes `values`, -1 or more (one number, or an array); the column is
        widened if need be."""
        column = self._columns[name]
        top = values if isinstance(values, int) else int(values.max(initial=0))
        if top > LARGEST[column.dtype]:
            column = column.astype(WIDER[name])
            self._hold(name, column)
        assert top <= LARGEST[column.dtype], f"{top} does not fit the column {name} of the index"
        column[at] = values

    def load(self, name: str, values: npt.NDArray[Any]) -> None:
        """The live part of a column as a snapshot has it, of whatever width."""
        if name in WIDER:
            self.put(name, slice(0, self.count), values)
        else:
            self._columns[name][: self.count] = values

    def extend(self, rows: int, lsn: int) -> slice:
        """Room for `rows` new tasks of the ENQUEUE frame `lsn`."""
        first = self.count
        self.reserve(first + rows)
        self.count += rows
        self.base.append(first)
        self.frames.append(lsn)
        new = slice(first, self.count)
        for name in ("lease", "holder", "done"):
            self.put(name, new, -1)
        return new

    def keys_of(self, tasks: Any) -> Any:
        """Prefix keys of tasks, uint64; or of one."""
        return self.key[tasks]

    def locate(
        self, tasks: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(lsn of the ENQUEUE or MOVE frame, row in it) of each task."""
        at = np.searchsorted(self.base.view, tasks, side="right") - 1
        lsns, rows = self.frames.view[at], tasks - self.base.view[at]
        if self.moved:
            for lsn in np.unique(lsns).tolist():
                held = self.moved.get(lsn)
                if held is not None:
                    mine = lsns == lsn
                    rows[mine] = np.searchsorted(held, tasks[mine])
        return lsns, rows

    def move(self, batches: npt.NDArray[np.int64], tasks: npt.NDArray[np.int64], lsn: int) -> None:
        """What lives of these batches lies in the MOVE frame `lsn` now."""
        before = np.unique(self.frames.view[batches])
        self.frames.view[batches] = lsn
        self.moved[lsn] = tasks
        for old in before.tolist():
            if old in self.moved and not (self.frames.view == old).any():
                del self.moved[old]

    def rows_of(self, batch: int) -> npt.NDArray[np.int64]:
        """All sequence numbers of one ENQUEUE batch."""
        bases = self.base.view
        end = int(bases[batch + 1]) if batch + 1 < len(bases) else self.count
        return np.arange(bases[batch], end, dtype=np.int64)

    def present(self, tasks: npt.NDArray[np.int64], first_lsn: int) -> npt.NDArray[np.bool_]:
        """Whether the row of each task can still be read from a log that begins there."""
        lsns = self.frames.view[np.searchsorted(self.base.view, tasks, side="right") - 1]
        found = lsns >= first_lsn
        for lsn in np.unique(lsns).tolist() if self.moved else ():
            held = self.moved.get(lsn)
            if held is not None:
                mine = lsns == lsn
                found[mine] &= np.isin(tasks[mine], held)
        return found

    def holds_whole(self, batches: list[int], first_lsn: int) -> bool:
        """Whether every row of these batches, live or not, can still be read from a log that begins there."""
        for batch in batches:
            lsn = int(self.frames.view[batch])
            rows = self.rows_of(batch)
            held = self.moved.get(lsn)
            if lsn < first_lsn or (held is not None and not np.isin(rows, held).all()):
                return False
        return True

    def differences(self, other: TaskIndex) -> list[str]:
        """Every column in which the two differ, with the first task at fault."""
        if self.count != other.count:
            return [f"the index has {self.count} tasks, the log gives {other.count}"]
        found = []
        for name in FACTS:
            mine, theirs = getattr(self, name)[: self.count], getattr(other, name)[: self.count]
            unequal = np.flatnonzero(mine != theirs)
            if len(unequal):
                at = int(unequal[0])
                found.append(
                    f"{len(unequal)} tasks differ in {name}, first sequence {at}: "
                    f"{mine[at]}, the log gives {theirs[at]}"
                )
        return found
