"""The rows of an index by slot: stable ids, upserts, tombstones.

A row gets the next free slot and keeps it; an upsert writes a new slot and leaves a tombstone on the old one, so
that nothing which was handed out moves. Rows that cannot be scored (search.scorable) are kept and counted, and
never offered to a scan. Scans keep their own copies; this is where the exact distances of an answer come from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.search import NO_ID, Floats, Ids, Metric, have_distance, norms_of
from fabric_pipelines.errors import UsageError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
ROWS_AT_ONCE = 1 << 14


class Rows:
    """vectors float32 [slots, d], ids int64 [slots], alive bool [slots]; `count` slots are in use."""

    def __init__(self, dim: int, metric: Metric) -> None:
        self.dim, self.metric, self.count = dim, metric, 0
        self.vectors: F32 = np.empty((0, dim), np.float32)
        self.norms: F64 = np.empty(0)
        self.ids: Ids = np.empty(0, np.int64)
        self.alive: Bools = np.empty(0, np.bool_)
        self.scorable: Bools = np.empty(0, np.bool_)
        self._names: Ids = np.empty(0, np.int64)  # ids of live rows, sorted,
        self._slots: Ids = np.empty(0, np.int64)  # and where they lie

    def __len__(self) -> int:
        return len(self._names)

    @property
    def tombstones(self) -> int:
        return self.count - len(self)

    def checked(self, vectors: Floats, ids: npt.NDArray[Any]) -> tuple[F32, Ids]:
        """As they are stored; of an id that comes more than once only the last row. UsageError for other shapes."""
        ids = np.asarray(ids)
        if ids.ndim != 1 or not (np.issubdtype(ids.dtype, np.integer) or not len(ids)):
            raise UsageError(f"ids are {ids.dtype} {ids.shape}; they must be one int64 a row")
        if vectors.ndim != 2 or vectors.shape != (len(ids), self.dim):
            raise UsageError(
                f"rows of shape {vectors.shape} do not fit {len(ids)} ids and an index of dimension {self.dim}"
            )
        if len(ids) and (int(ids.max()) > np.iinfo(np.int64).max or (ids == NO_ID).any()):
            raise UsageError(
                f"an id is {NO_ID} or beyond int64: {NO_ID} says that nothing was found"
            )
        names = ids.astype(np.int64)
        _, last = np.unique(names[::-1], return_index=True)
        kept = np.sort(len(names) - 1 - last)
        with np.errstate(over="ignore"):  # beyond float32 is infinite, which cannot be scored
            narrow = np.asarray(vectors, np.float32)
        return (narrow, names) if len(kept) == len(names) else (narrow[kept], names[kept])

    def upsert(self, vectors: F32, ids: Ids) -> tuple[Ids, Ids]:
        """New slots [n], and the older slots of the same ids, dead from now on. Input as `checked` left it."""
        dead = self.remove(ids)
        slots = np.arange(self.count, self.count + len(ids))
        self._room(self.count + len(ids))
        for start in range(0, len(ids), ROWS_AT_ONCE):
            part = slice(start, min(start + ROWS_AT_ONCE, len(ids)))
            with np.errstate(over="ignore", invalid="ignore"):
                norms = norms_of(vectors[part].astype(np.float64))
            self.norms[slots[part]] = norms
            self.scorable[slots[part]] = have_distance(norms, self.metric)
        if len(ids):
            self.vectors[slots], self.ids[slots], self.alive[slots] = vectors, ids, True
            self.count += len(ids)
            order = np.argsort(ids, kind="stable")
            at = np.searchsorted(self._names, ids[order])
            self._names = np.insert(self._names, at, ids[order])
            self._slots = np.insert(self._slots, at, slots[order])
        return slots, dead

    def remove(self, ids: Ids) -> Ids:
        """Slots that died; an id that is not there is no error."""
        slots, found = self.find(ids)
        dead = np.unique(slots[found])
        if len(dead):
            self.alive[dead] = False
            kept = self.alive[self._slots]
            self._names, self._slots = self._names[kept], self._slots[kept]
        return dead

    def find(self, ids: Ids) -> tuple[Ids, Bools]:
        """Slot of each id, and whether it is there."""
        at = np.searchsorted(self._names, ids)
        inside = at < len(self._names)
        at[~inside] = 0
        if not len(self._names):
            return at.astype(np.int64), np.zeros(len(ids), np.bool_)
        return self._slots[at], inside & (self._names[at] == ids)

    def live(self) -> Ids:
        """Slots of the live rows, by id."""
        return self._slots

    def compact(self) -> Ids:
        """Drop the dead; returns the new slot of each old one (-1: gone)."""
        kept = np.flatnonzero(self.alive[: self.count])
        moved = np.full(self.count, -1, np.int64)
        moved[kept] = np.arange(len(kept))
        self.vectors, self.norms = self.vectors[kept], self.norms[kept]
        self.ids, self.alive, self.scorable = self.ids[kept], self.alive[kept], self.scorable[kept]
        self._slots, self.count = moved[self._slots], len(kept)
        return moved

    def _room(self, wanted: int) -> None:
        """Columns for `wanted` slots: grown by half, so that many small adds copy each row twice or so."""
        if wanted <= len(self.ids):
            return
        size = wanted if not self.count else max(wanted, self.count + self.count // 2)
        for name in ("vectors", "norms", "ids", "alive", "scorable"):
            old = getattr(self, name)
            grown = np.zeros((size, *old.shape[1:]), old.dtype)
            grown[: self.count] = old[: self.count]
            setattr(self, name, grown)
