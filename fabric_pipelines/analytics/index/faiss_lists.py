"""faiss-cpu as a kind of index: its candidates, our rows, ids, tombstones and distances.

Any factory string that has a flat, IVF or HNSW index on top will do. faiss is given rows in working space, where its L2
orders them as either metric does, and answers with places; dead ones are masked by a selector, since HNSW cannot remove.
What it finds is ranked from the stored rows like every other kind's, but which rows those are is faiss's own: no
promise of the same bytes on any number of threads.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from fabric_pipelines.analytics.index.space import Asked, Space
from fabric_pipelines.analytics.search import Floats, Ids
from fabric_pipelines.errors import MissingDependency, UsageError

SPARE = 8  # candidates beyond k: float32 sums may order near ties otherwise than float64


class FaissLists:
    """One faiss index; `slots` [n] are those of its places."""

    def __init__(self, space: Space, factory: str) -> None:
        self._faiss = _library()
        try:
            self._index = self._faiss.index_factory(space.dim, factory)
        except RuntimeError as fault:
            raise UsageError(
                f"faiss makes no index {factory!r} of dimension {space.dim}: "
                f"{str(fault).splitlines()[-1]}"
            ) from fault
        self._ivf = isinstance(self._index, self._faiss.IndexIVF)
        self._slots: Ids = np.empty(0, np.int64)
        self._alive = np.empty(0, np.bool_)

    def __len__(self) -> int:
        return int(self._index.nlist) if self._ivf else 1

    def sizes(self) -> Ids:
        return np.array([int(self._alive.sum())], np.int64)

    @property
    def bytes(self) -> int:
        return len(self._faiss.serialize_index(self._index)) + self._slots.nbytes

    def append(self, labels: Ids, rows: Floats, reach: Any, slots: Ids) -> None:
        """Add rows in working space; the first ones train it. labels and reach are the other kinds'."""
        if not len(slots):
            return
        if rows.dtype != np.float32:
            raise UsageError("rows are too long for faiss, whose squares are float32: scale them")
        try:
            if not self._index.is_trained:
                self._index.train(np.ascontiguousarray(rows))
            self._index.add(np.ascontiguousarray(rows))
        except RuntimeError as fault:
            raise UsageError(
                f"faiss does not take the rows: {str(fault).splitlines()[-1]}"
            ) from fault
        self._slots = np.concatenate((self._slots, slots))
        self._alive = np.concatenate((self._alive, np.ones(len(slots), np.bool_)))

    def drop(self, labels: Ids, dead: Ids) -> None:
        self._alive[self._alive & np.isin(self._slots, dead)] = False

    def renumber(self, moved: Ids) -> None:
        self._slots[self._alive] = moved[self._slots[self._alive]]

    def scan(self, asked: Asked, nprobe: int, wide: int, k: int) -> tuple[Ids, Ids]:
        """Query numbers (in asked.open) and slots of what faiss finds. wide: candidates that HNSW keeps."""
        options: dict[str, Any] = {}
        if not self._alive.all():
            mask = np.packbits(self._alive, bitorder="little")
            options["sel"] = self._faiss.IDSelectorBitmap(mask)
        many = min(k + SPARE, len(self._slots))
        if self._ivf:
            how = self._faiss.SearchParametersIVF(nprobe=min(nprobe, len(self)), **options)
        elif isinstance(self._index, self._faiss.IndexHNSW):
            how = self._faiss.SearchParametersHNSW(efSearch=max(wide, many), **options)
        else:
            how = self._faiss.SearchParameters(**options)
        _, found = self._index.search(asked.working.astype(np.float32), max(many, 1), params=how)
        query, place = np.nonzero(found >= 0)
        return query, self._slots[found[query, place]]


def _library() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError as fault:
        raise MissingDependency("faiss-cpu", "faiss", "an index of kind 'faiss'") from fault
