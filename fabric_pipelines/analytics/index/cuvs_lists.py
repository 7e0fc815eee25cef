"""cuVS as two kinds of index, on a card: CAGRA's or IVF-PQ's candidates, our rows, ids, tombstones and distances.

cuVS is given rows in working space, where its squared L2 orders them as either metric does, and answers with places; what it finds
is ranked from the stored rows like every other kind's. Which rows those are is cuVS's own, and its graph may reach few of them
and say nothing, so recall is measured against exact search on every build (quality.py). The newest rows, fewer than
WAITING_ROWS, are looked at one by one: cuVS takes them together, and an index of so few rows needs no graph.

What cuVS punishes with wrong memory is kept from it here: rows that its index only borrows are held as long as it; numbers
beyond the rows (its word for none) go no further; its saved bytes are read by the version that wrote them alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.index.cuvs_library import Library, library
from fabric_pipelines.analytics.index.space import Asked, Space
from fabric_pipelines.analytics.search import Floats, Ids
from fabric_pipelines.errors import DeviceRefused, UsageError, VersionRefused

SPARE = 8  # candidates beyond k: float32 sums may order near ties otherwise than float64
WAITING_ROWS = 1024
DEEP_MAX = 4096  # candidates a query of IVF-PQ when dead rows crowd out live ones, unless more are asked for


class Method(Protocol):
    """One of cuVS's indexes; `place` is a row's number in it. borrows: it reads the rows where they lay when it was built."""

    borrows: bool

    def build(self, rows: Any) -> Any: ...
    def extend(self, index: Any, rows: Any, first: int) -> Any: ...
    def scan(
        self, index: Any, asked: Any, alive: npt.NDArray[np.bool_], nprobe: int, wide: int, k: int
    ) -> Ids: ...
    def sizes(self, index: Any, rows: int) -> Ids: ...
    def row_bytes(self, index: Any, dim: int) -> float: ...
    def save(self, path: str, index: Any) -> None: ...
    def load(self, path: str) -> Any: ...


class Graph:
    """CAGRA. `wide` becomes itopk_size, the candidates that a search keeps; nprobe has no meaning here."""

    borrows = True

    def __init__(self, found: Library, degree: int) -> None:
        self._found, self._cagra, self._degree = found, found.cagra, degree

    def build(self, rows: Any) -> Any:
        how = self._cagra.IndexParams(
            metric="sqeuclidean",
            graph_degree=self._degree,
            intermediate_graph_degree=2 * self._degree,
        )
        return self._cagra.build(how, rows)

    def extend(self, index: Any, rows: Any, first: int) -> Any:
        return self._cagra.extend(self._cagra.ExtendParams(), index, rows)

    def scan(
        self, index: Any, asked: Any, alive: npt.NDArray[np.bool_], nprobe: int, wide: int, k: int
    ) -> Ids:
        many = min(k + SPARE, int(alive.sum()))
        chosen = None
        if not alive.all():
            bits = np.packbits(alive, bitorder="little")
            words = np.pad(bits, (0, -len(bits) % 4)).view(np.uint32)
            chosen = self._found.filters.from_bitset(self._found.cupy.asarray(words))
        how = self._cagra.SearchParams(itopk_size=max(wide, many))
        _, found = self._cagra.search(how, index, asked, many, filter=chosen)
        return _host(self._found, found)

    def sizes(self, index: Any, rows: int) -> Ids:
        return np.array([rows], np.int64)

    def row_bytes(self, index: Any, dim: int) -> float:
        return 4.0 * (dim + int(index.graph_degree))

    def save(self, path: str, index: Any) -> None:
        self._cagra.save(path, index, include_dataset=True)

    def load(self, path: str) -> Any:
        return self._cagra.load(path)


class Codes:
    """IVF-PQ. It takes no filter, so where rows have died it is asked for more candidates until enough of them live."""

    borrows = False

    def __init__(self, found: Library, lists: int, bits: int, parts: int) -> None:
        self._found, self._ivf_pq = found, found.ivf_pq
        self._lists, self._bits, self._parts = lists, bits, parts

    def build(self, rows: Any) -> Any:
        how = self._ivf_pq.IndexParams(
            n_lists=min(self._lists or max(1, round(len(rows) ** 0.5)), len(rows)),
            metric="sqeuclidean",
            pq_bits=self._bits,
            pq_dim=self._parts,
        )
        return self._ivf_pq.build(how, rows)

    def extend(self, index: Any, rows: Any, first: int) -> Any:
        places = np.arange(first, first + len(rows), dtype=np.int64)
        return self._ivf_pq.extend(index, rows, self._found.cupy.asarray(places))

    def scan(
        self, index: Any, asked: Any, alive: npt.NDArray[np.bool_], nprobe: int, wide: int, k: int
    ) -> Ids:
        live = int(alive.sum())
        wanted = min(wide, live)
        deep, most = min(len(alive), -(-wide * len(alive) // live)), max(wide, DEEP_MAX)
        how = self._ivf_pq.SearchParams(n_probes=min(nprobe, int(index.n_lists)))
        while True:
            places = _host(self._found, self._ivf_pq.search(how, index, asked, deep)[1])
            there = (places >= 0) & (places < len(alive))
            lives = there & alive[np.where(there, places, 0)]
            crowded = there.all(axis=1) & (lives.sum(axis=1) < wanted)
            if not crowded.any() or deep >= min(most, len(alive)):
                return places
            deep = min(2 * deep, most, len(alive))

    def sizes(self, index: Any, rows: int) -> Ids:
        sizes: Ids = index.list_sizes.copy_to_host().astype(np.int64)
        return sizes

    def row_bytes(self, index: Any, dim: int) -> float:
        return float(index.pq_dim) * float(index.pq_bits) / 8

    def save(self, path: str, index: Any) -> None:
        self._ivf_pq.save(path, index)

    def load(self, path: str) -> Any:
        return self._ivf_pq.load(path)


class CuvsLists:
    """One index of cuVS; `slots` [n] are those of its places, and then those of the rows that wait."""

    def __init__(self, space: Space, name: str, **how: int) -> None:
        self.space, self._name = space, name
        self._found = library(f"an index of kind {name!r}")
        self._method: Method = (
            Graph(self._found, **how) if name == "cagra" else Codes(self._found, **how)
        )
        self._index: Any = None
        self._borrowed: Any = None  # rows on the card that the index reads
        self._waiting = np.empty((0, space.dim), np.float32)
        self._slots: Ids = np.empty(0, np.int64)
        self._alive = np.empty(0, np.bool_)

    def __len__(self) -> int:
        return len(self.sizes())

    @property
    def version(self) -> str:
        return self._found.version

    @property
    def where(self) -> str:
        name: str = self._found.cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        return f"{name} (cuda:0)"

    @property
    def taken(self) -> int:
        """Rows that cuVS has; the others wait."""
        return len(self._slots) - len(self._waiting)

    def sizes(self) -> Ids:
        if self._index is None:
            return np.array([int(self._alive.sum())], np.int64)
        return self._method.sizes(self._index, self.taken)

    @property
    def bytes(self) -> int:
        known = self._index is not None
        width = self._method.row_bytes(self._index, self.space.dim) if known else 0
        return round(self.taken * width) + self._waiting.nbytes + self._slots.nbytes

    def append(self, labels: Ids, rows: Floats, reach: Any, slots: Ids) -> None:
        """Add rows in working space. labels and reach are the other kinds'."""
        if rows.dtype != np.float32:
            raise UsageError("rows are too long for cuVS, whose squares are float32: scale them")
        self._waiting = np.concatenate((self._waiting, rows))
        self._slots = np.concatenate((self._slots, slots))
        self._alive = np.concatenate((self._alive, np.ones(len(slots), np.bool_)))
        if len(self._waiting) >= WAITING_ROWS:
            self._take()

    def _take(self) -> None:
        try:
            there = self._found.cupy.asarray(np.ascontiguousarray(self._waiting))
            if not self.taken:
                self._index = self._method.build(there)
                self._borrowed = there if self._method.borrows else None
            else:
                self._index = self._method.extend(self._whole(), there, self.taken)
                self._borrowed = None  # what was extended has rows of its own
        except self._found.Fault as fault:
            self._index = self._borrowed = None  # half extended, it would read what is gone
            raise self._refused("take the rows", fault) from fault
        self._waiting = np.empty((0, self.space.dim), np.float32)  # a slice would hold on to them

    def _whole(self) -> Any:
        if self._index is None:
            raise DeviceRefused(
                f"cuVS lost the index of kind {self._name!r} when it failed before: train it anew, or load it again"
            )
        return self._index

    def drop(self, labels: Ids, dead: Ids) -> None:
        self._alive[self._alive & np.isin(self._slots, dead)] = False

    def renumber(self, moved: Ids) -> None:
        self._slots[self._alive] = moved[self._slots[self._alive]]

    def scan(self, asked: Asked, nprobe: int, wide: int, k: int) -> tuple[Ids, Ids]:
        """Query numbers (in asked.open) and slots of what cuVS finds, and of the nearest of the rows that wait."""
        xq = asked.working.astype(np.float32)
        query, place = self._nearest_waiting(xq, k)
        alive = self._alive[: self.taken]
        if alive.any():
            try:
                there = self._found.cupy.asarray(np.ascontiguousarray(xq))
                found = self._method.scan(self._whole(), there, alive, nprobe, wide, k)
            except self._found.Fault as fault:
                raise self._refused("search", fault) from fault
            known = (found >= 0) & (found < len(alive))
            known &= alive[np.where(known, found, 0)]
            by, at = np.nonzero(known)
            # A graph may give a row twice; ranked, it would take two places.
            pairs = np.unique(by * len(alive) + found[by, at])
            query = np.concatenate((query, pairs // len(alive)))
            place = np.concatenate((place, pairs % len(alive)))
        return query, self._slots[place]

    def _nearest_waiting(self, xq: Floats, k: int) -> tuple[Ids, Ids]:
        live = np.flatnonzero(self._alive[self.taken :])
        rows = self._waiting[live]
        many = min(k + SPARE, len(live))
        if not many:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        scores = (rows * rows).sum(axis=1) / 2 - xq @ rows.T
        near = np.argpartition(scores, many - 1, axis=1)[:, :many]
        return np.repeat(np.arange(len(xq)), many), self.taken + live[near.ravel()]

    def places(self, numbers: Ids) -> Ids:
        """Of the rows that cuVS has, by place: numbers[slot], or -1 where the row is dead."""
        slots, alive = self._slots[: self.taken], self._alive[: self.taken]
        return np.where(alive, numbers[np.where(alive, slots, 0)], -1)

    def save(self, path: Path) -> None:
        """cuVS's own bytes of its index, which must be there (`taken`)."""
        assert self._index is not None, "there is nothing of cuVS's to save"
        try:
            self._method.save(str(path), self._index)
        except self._found.Fault as fault:
            raise self._refused("save the index", fault) from fault

    def load(self, path: Path, places: Ids, version: str) -> None:
        """What `save` left, of rows at slots places [n] (-1: dead). VersionRefused for bytes of another cuVS."""
        if version != self.version:
            raise VersionRefused(
                f"{path} was written by cuVS {version}, and cuVS {self.version} is here, which may not read it: install "
                f"that release, or build the index anew"
            )
        try:
            self._index = self._method.load(str(path))
        except self._found.Fault as fault:
            raise self._refused(f"read {path}", fault) from fault
        self._slots, self._alive = np.maximum(places, 0), places >= 0

    def _refused(self, what: str, fault: Exception) -> DeviceRefused:
        said = next(
            (line for line in str(fault).splitlines() if line.strip()), type(fault).__name__
        )
        return DeviceRefused(
            f"cuVS {self.version} does not {what} for an index of kind {self._name!r}: {said}; use another kind"
        )


def _host(found: Library, places: Any) -> Ids:
    """Places on the host, cuVS's words for none (2**31 - 1, 2**32 - 1, 2**63 - 1) among them as they are."""
    host: Ids = found.cupy.asnumpy(found.cupy.asarray(places)).astype(np.int64)
    return host
