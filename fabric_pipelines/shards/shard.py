"""An opened shard: one published generation, mapped read-only, that answers searches.

The generation is chosen once, at opening; a reader keeps it while newer ones are published, even after its
folder is gone. Opening reads the manifest and maps the files; it hashes no block (that is the scrub's
work), but refuses a folder whose manifest is not the one the database published.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.analytics.search import FlatScan, Floats, Queries, Ranked
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.errors import CorruptionFound, UsageError
from fabric_pipelines.shards.blocks import map_array, map_columns
from fabric_pipelines.shards.generation import Generation, published_folder
from fabric_pipelines.shards.manifest import FileEntry, read_manifest
from fabric_pipelines.shards.store import VectorStore, store_of

NPROBE_DEFAULT = 8


@dataclass(frozen=True, slots=True)
class MappedBlock:
    """Lists [first_list, first_list + lists) as rows: vectors float32 [n, d], ids int64 [n]."""

    first_list: int
    lists: int
    vectors: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]


def open_generation(
    db: Database | VectorStore, root: Path, name: str, number: int | None = None
) -> Generation:
    """The published generation `number` (default: the current one), checked against its row. UsageError when
    there is none, CorruptionFound when the folder is not what was published."""
    row = store_of(db).current_generation(name, number)
    if row is None:
        wanted = "generation" if number is None else f"generation {number}"
        raise UsageError(f"there is no {wanted} of shard {name!r}; build it first")
    folder = published_folder(root, row)
    manifest = read_manifest(folder, row.manifest_sha256)
    if (manifest.name, manifest.generation, manifest.token) != (name, row.generation, row.token):
        raise CorruptionFound(
            f"{folder} calls itself generation {manifest.generation} of {manifest.name!r} under token "
            f"{manifest.token}; the database says {row.generation}, {name!r}, {row.token}"
        )
    return Generation(folder, manifest, row.manifest_sha256)


def open_shard(
    db: Database | VectorStore, root: Path, name: str, number: int | None = None
) -> Shard:
    return Shard(open_generation(db, root, name, number))


class Shard:
    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.manifest = generation.manifest
        self.indptr: npt.NDArray[np.int64] = self.manifest.offsets()
        self._blocks: list[MappedBlock] | None = list(self._map_blocks())

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
        """Let go of the maps; arrays handed out before stay valid until they are dropped."""
        self._blocks = None

    @property
    def blocks(self) -> list[MappedBlock]:
        """The mapped files, in list order, without a copy."""
        if self._blocks is None:
            raise UsageError(f"shard {self.manifest.name!r} was closed; open it again")
        return self._blocks

    def vectors(self) -> npt.NDArray[np.float32]:
        """All rows [N, d] in list order: the map itself for one block, one copy for several."""
        parts = [block.vectors for block in self.blocks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def ids(self) -> npt.NDArray[np.int64]:
        parts = [block.ids for block in self.blocks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def columns(self) -> pa.Table:
        """The columns that travel with the rows, in the same order; without columns, a table of no columns."""
        entries = self.manifest.of_role("columns")
        if not entries:
            return pa.table({})
        return pa.concat_tables(
            [map_columns(self.generation.folder / entry.path) for entry in entries]
        )

    def centroids(self) -> npt.NDArray[np.float64]:
        """[lists, d], in the order of the lists."""
        entry = self.manifest.of_role("centroids")[0]
        return self._map(entry, "<f8", (self.manifest.lists, self.manifest.dim))

    def quarantined(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """ids and vectors of rows that were read and not admitted."""
        ids, vectors = (
            self.manifest.of_role(f"quarantine_{part}")[0] for part in ("ids", "vectors")
        )
        return (
            self._map(ids, "<i8", (ids.rows,)),
            self._map(vectors, self.manifest.dtype, (vectors.rows, self.manifest.dim)),
        )

    def search(
        self, xq: Floats, k: int, exact: bool = True, *, nprobe: int = NPROBE_DEFAULT
    ) -> Ranked:
        """The k nearest rows of each query [q, d]; unpacks as `D, I`. D grows with distance in both metrics.

        exact: every list is scanned. Otherwise only the `nprobe` lists whose centroids are nearest, each
        read once for all the queries that want it."""
        queries = Queries(xq, self._metric)
        scan = FlatScan(queries, k)
        if exact:
            for block in self.blocks:
                scan.add(block.vectors, block.ids)
            return scan.ranked()
        near = FlatScan(queries, min(nprobe, self.manifest.lists))
        near.add(self.centroids(), np.arange(self.manifest.lists))
        probes = near.ranked().I
        for number in np.unique(probes[probes >= 0]):
            vectors, ids = self.list_rows(int(number))
            scan.add(vectors, ids, queries=np.flatnonzero((probes == number).any(axis=1)))
        return scan.ranked()

    def list_rows(self, number: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """vectors and ids of one list, mapped."""
        block = self.blocks[number // self.manifest.lists_per_block]
        start = self.indptr[block.first_list]
        part = slice(self.indptr[number] - start, self.indptr[number + 1] - start)
        return block.vectors[part], block.ids[part]

    @property
    def _metric(self) -> Any:
        return self.manifest.metric

    def _map(self, entry: FileEntry, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return map_array(self.generation.folder / entry.path, dtype, shape)

    def _map_blocks(self) -> Iterator[MappedBlock]:
        vectors, ids = self.manifest.of_role("vectors"), self.manifest.of_role("ids")
        for left, right in zip(vectors, ids, strict=True):
            yield MappedBlock(
                left.first_list,
                left.lists,
                self._map(left, self.manifest.dtype, (left.rows, self.manifest.dim)),
                self._map(right, "<i8", (right.rows,)),
            )
