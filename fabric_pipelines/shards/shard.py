"""An opened shard: one published generation, mapped read-only, that answers searches.

The generation is chosen once, at opening; a reader keeps it while newer ones are published: it
is not pruned before the reader closes it. Opening reads the manifest and maps the files; it hashes no block (that is the scrub's
work), but refuses a folder whose manifest is not the one the database published.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.analytics.search import FlatScan, Floats, Queries, Ranked, probed_topk
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.errors import CorruptionFound, UsageError
from fabric_pipelines.shards.blocks import map_array, map_columns
from fabric_pipelines.shards.disk import opened_for_reading
from fabric_pipelines.shards.generation import Generation, published_folder
from fabric_pipelines.shards.manifest import FileEntry, read_manifest
from fabric_pipelines.shards.store import VectorStore, store_of

NPROBE_DEFAULT = 8


@dataclass(frozen=True, slots=True)
class MappedBlock:
    """Rows as they lie in one block or layer: vectors float32 [n, d], ids int64 [n]. Row r of it is stored
    row `start` + r; rows indptr[l]:indptr[l+1] of it belong to list `first_list` + l."""

    first_list: int
    start: int
    indptr: npt.NDArray[np.int64]
    vectors: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]
    columns: FileEntry | None

    @property
    def lists(self) -> int:
        return len(self.indptr) - 1


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Some rows of a shard: ids int64 [n], vectors float32 [n, d], the columns that travel with them."""

    ids: npt.NDArray[np.int64]
    vectors: npt.NDArray[np.float32]
    columns: pa.Table


def open_generation(
    db: Database | VectorStore, root: Path, name: str, number: int | None = None
) -> Generation:
    """The published generation `number` (default: the current one), checked against its row. UsageError when
    there is none, CorruptionFound when the folder is not what was published."""
    row = store_of(db).current_generation(name, number)
    if row is None:
        wanted = "generation" if number is None else f"generation {number}"
        raise UsageError(f"there is no {wanted} of shard {name!r}; build it first")
    try:
        folder = published_folder(root, row)
        manifest = read_manifest(folder, row.manifest_sha256)
    except CorruptionFound:
        now = store_of(db).current_generation(name, row.generation)
        if now is not None and now.pruned:  # between the two questions
            raise UsageError(f"{now.pruned}; open a newer one") from None
        raise
    if (manifest.name, manifest.generation, manifest.token) != (name, row.generation, row.token):
        raise CorruptionFound(
            f"{folder} calls itself generation {manifest.generation} of {manifest.name!r} under token "
            f"{manifest.token}; the database says {row.generation}, {name!r}, {row.token}"
        )
    return Generation(folder, manifest, row.manifest_sha256)


class Shard:
    """indptr int64 [lists + 1]: rows indptr[l]:indptr[l+1] of `vectors()`, `ids()` and `columns()` form list l.

    A generation made by an increment has layers beside its blocks and tombstones over both; every answer is
    over the rows that count, whatever they lie in."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.manifest = generation.manifest
        # some files are mapped only when they are asked for, so the folder must stay
        self._leave = weakref.finalize(self, os.close, opened_for_reading(generation.folder))
        self._blocks: list[MappedBlock] | None = list(self._map_blocks())
        self.stored = sum(len(block.ids) for block in self._blocks)
        self.alive = self._alive()
        sizes = np.bincount(self.list_of()[self.alive], minlength=self.manifest.lists)
        self.indptr: npt.NDArray[np.int64] = np.zeros(self.manifest.lists + 1, np.int64)
        np.cumsum(sizes, out=self.indptr[1:])

    def __enter__(self) -> Shard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the maps and of the folder; arrays handed out before stay valid until they are dropped."""
        self._blocks = None
        self._leave()

    @property
    def blocks(self) -> list[MappedBlock]:
        """The mapped files without a copy: blocks in list order, then layers, oldest first. Not all of their
        rows need count: `alive` says which."""
        if self._blocks is None:
            raise UsageError(f"shard {self.manifest.name!r} was closed; open it again")
        return self._blocks

    def vectors(self) -> npt.NDArray[np.float32]:
        """All rows [N, d] in list order: the map itself for one block, one copy for several."""
        if self.manifest.increment:
            return self.rows_at(self._order()).vectors
        parts = [block.vectors for block in self.blocks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def ids(self) -> npt.NDArray[np.int64]:
        ids = self.stored_ids()
        return ids[self._order()] if self.manifest.increment else ids

    def columns(self) -> pa.Table:
        """The columns that travel with the rows, in the same order; without columns, a table of no columns."""
        table = self._stored_columns()
        return (
            table.take(pa.array(self._order())) if self.manifest.increment and len(table) else table
        )

    def centroids(self) -> npt.NDArray[np.float64]:
        """[lists, d], in the order of the lists; NaN for one that was merged away."""
        entry = self.manifest.of_role("centroids")[0]
        return self._map(entry, "<f8", (self.manifest.lists, self.manifest.dim))

    def quarantined(self) -> StoredRows:
        """Rows that were read and not admitted. A generation of format 1 did not keep their columns."""
        ids, vectors = (
            self.manifest.of_role(f"quarantine_{part}")[0] for part in ("ids", "vectors")
        )
        columns = self.manifest.of_role("quarantine_columns")
        return StoredRows(
            self._map(ids, "<i8", (ids.rows,)),
            self._map(vectors, self.manifest.dtype, (vectors.rows, self.manifest.dim)),
            self.columns_of(columns[0]) if columns else pa.table({}),
        )

    def search(
        self, xq: Floats, k: int, exact: bool = True, *, nprobe: int = NPROBE_DEFAULT
    ) -> Ranked:
        """The k nearest rows of each query [q, d]; unpacks as `D, I`. D grows with distance in both metrics.

        exact: every list is scanned. Otherwise only the `nprobe` lists whose centroids are nearest, each
        read once for all the queries that want it."""
        queries = Queries(xq, self._metric)
        if exact:
            return self._exact(queries, k)
        return probed_topk(queries, k, self.centroids(), nprobe, self.list_rows)[0]

    def _exact(self, queries: Queries, k: int) -> Ranked:
        scan = FlatScan(queries, k)
        for block in self.blocks:
            scan.add(*self._counted(block, slice(0, len(block.ids))))
        return scan.ranked()

    def list_rows(self, number: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """vectors and ids of one list: mapped where it lies in one piece."""
        pieces = list(self._pieces(number))
        if len(pieces) == 1:
            return pieces[0]
        vectors, ids = zip(*pieces, strict=True) if pieces else ((), ())
        empty = np.empty((0, self.manifest.dim), np.float32)
        return np.concatenate([empty, *vectors]), np.concatenate([np.empty(0, np.int64), *ids])

    def stored_ids(self) -> npt.NDArray[np.int64]:
        """Ids of all stored rows, those under a tombstone included."""
        parts = [block.ids for block in self.blocks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def list_of(self) -> npt.NDArray[np.int64]:
        """List of each stored row."""
        return np.concatenate(
            [
                np.repeat(np.arange(b.first_list, b.first_list + b.lists), np.diff(b.indptr))
                for b in self.blocks
            ]
        )

    def rows_at(self, places: npt.NDArray[np.int64]) -> StoredRows:
        """Copies of the stored rows at `places`, in that order."""
        ids = np.empty(len(places), np.int64)
        vectors = np.empty((len(places), self.manifest.dim), np.float32)
        for block in self.blocks:
            inside = np.flatnonzero(
                (places >= block.start) & (places < block.start + len(block.ids))
            )
            at = places[inside] - block.start
            ids[inside], vectors[inside] = block.ids[at], block.vectors[at]
        columns = self._stored_columns()
        return StoredRows(ids, vectors, columns.take(pa.array(places)) if len(columns) else columns)

    def _pieces(
        self, number: int
    ) -> Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]]:
        for block in self.blocks:
            at = number - block.first_list
            if 0 <= at < block.lists:
                part = slice(int(block.indptr[at]), int(block.indptr[at + 1]))
                piece = self._counted(block, part)
                if len(piece[1]) or not self.manifest.increment:
                    yield piece

    def _counted(
        self, block: MappedBlock, part: slice
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        vectors, ids = block.vectors[part], block.ids[part]
        alive = self.alive[block.start + part.start : block.start + part.stop]
        return (vectors, ids) if alive.all() else (vectors[alive], ids[alive])

    def _order(self) -> npt.NDArray[np.int64]:
        """Places of the rows that count, by list and id."""
        places = np.flatnonzero(self.alive)
        by = np.lexsort((self.stored_ids()[places], self.list_of()[places]))
        return places[by]

    def _alive(self) -> npt.NDArray[np.bool_]:
        alive = np.ones(self.stored, np.bool_)
        for entry in self.manifest.of_role("tombstones"):
            dead = self._map(entry, "<i8", (entry.rows,))
            inside = (dead >= 0) & (dead < self.stored)
            alive[dead[inside]] = False
            if not inside.all() or self.stored - int(alive.sum()) != len(dead):
                raise CorruptionFound(
                    f"{self.generation.folder / entry.path} is damaged: its tombstones are not {len(dead)} different "
                    f"ones of {self.stored} stored rows; `fabric receipt refresh {self.manifest.name} --anew` builds "
                    "the shard from its source"
                )
        return alive

    def _stored_columns(self) -> pa.Table:
        entries = [block.columns for block in self.blocks if block.columns is not None]
        if not entries:
            return pa.table({})
        return pa.concat_tables([self.columns_of(entry) for entry in entries])

    def columns_of(self, entry: FileEntry) -> pa.Table:
        return map_columns(self.generation.folder / entry.path)

    @property
    def _metric(self) -> Any:
        return self.manifest.metric

    def _map(self, entry: FileEntry, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return map_array(self.generation.folder / entry.path, dtype, shape)

    def _map_blocks(self) -> Iterator[MappedBlock]:
        manifest = self.manifest
        offsets, start = manifest.offsets(), 0
        layers = (
            [np.asarray(layer) for layer in manifest.increment.layers] if manifest.increment else []
        )
        for prefix in ("", "layer_"):
            parts = [manifest.of_role(f"{prefix}{role}") for role in ("vectors", "ids", "columns")]
            columns = parts[2] or [None] * len(parts[0])  # type: ignore[list-item]
            for left, right, more in zip(parts[0], parts[1], columns, strict=True):
                if prefix:
                    first, indptr = 0, layers[left.first_list]
                else:
                    first = left.first_list
                    indptr = offsets[first : first + left.lists + 1] - offsets[first]
                yield MappedBlock(
                    first,
                    start,
                    indptr,
                    self._map(left, manifest.dtype, (left.rows, manifest.dim)),
                    self._map(right, "<i8", (right.rows,)),
                    more,
                )
                start += left.rows
