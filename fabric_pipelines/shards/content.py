"""Turn source rows into the files of a generation: admit, cut into lists, pack into blocks. No I/O.

A pure function of rows and specification: the same two give the same bytes, which is what `receipt rebuild`
relies on. Lists are grouped `lists_per_block` at a time by number, never by size, so that a list that grows
does not push its neighbours into other files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.analytics.search import METRICS, Metric
from fabric_pipelines.dataplane.source import SourceRows
from fabric_pipelines.errors import UsageError
from fabric_pipelines.shards.admission import Admission, admit
from fabric_pipelines.shards.blocks import Block, array_block, columns_block
from fabric_pipelines.shards.lists import ITERATIONS_DEFAULT, Lists, cut, cut_along
from fabric_pipelines.shards.manifest import VECTOR_DTYPE, FileEntry, ShardManifest

LISTS_PER_BLOCK_DEFAULT = 16
INT8 = np.iinfo(np.int64)


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """How rows become lists. `centroids` given: they are kept and nothing is trained."""

    lists: int
    seed: int
    metric: Metric
    iterations: int = ITERATIONS_DEFAULT
    lists_per_block: int = LISTS_PER_BLOCK_DEFAULT
    centroids: npt.NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise UsageError(f"metric {self.metric!r} is unknown; use one of {', '.join(METRICS)}")
        for name in ("lists", "lists_per_block"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.iterations < 0:
            raise UsageError(f"iterations is {self.iterations}; it must not be negative")
        for name in ("lists", "seed", "iterations", "lists_per_block"):
            if not INT8.min <= getattr(self, name) <= INT8.max:
                raise UsageError(f"{name} must lie between {INT8.min} and {INT8.max}")

    def as_json(self) -> dict[str, Any]:
        """The `index` part of a recipe."""
        return {
            "kind": "lists",
            "lists": self.lists,
            "seed": self.seed,
            "metric": self.metric,
            "iterations": self.iterations,
            "lists_per_block": self.lists_per_block,
            "training": "none" if self.centroids is not None else "kmeans",
            "dtype": VECTOR_DTYPE,
        }


@dataclass(frozen=True, slots=True)
class Content:
    """Everything of a generation but its number: blocks with the entry each will have in the manifest."""

    dim: int
    rows: int
    admission: Admission
    lists: Lists
    blocks: Sequence[tuple[FileEntry, Block]]

    def manifest(
        self,
        *,
        name: str,
        generation: int,
        token: int,
        spec: IndexSpec,
        source: Mapping[str, Any],
        recipe: Mapping[str, Any],
        parents: Sequence[str],
    ) -> ShardManifest:
        return ShardManifest(
            name=name,
            generation=generation,
            token=token,
            dim=self.dim,
            dtype=VECTOR_DTYPE,
            metric=spec.metric,
            rows=self.rows,
            quarantined=self.admission.as_json(),
            lists_per_block=spec.lists_per_block,
            indptr=self.lists.indptr.tolist(),
            files=[entry for entry, _ in self.blocks],
            source=source,
            recipe=recipe,
            parents=list(parents),
        )


def content_of(
    rows: SourceRows, spec: IndexSpec, beat: Callable[[], None] = lambda: None
) -> Content:
    """`beat` is called between steps of training, for a lease that must be renewed meanwhile."""
    vectors = np.asarray(rows.vectors, np.float32)
    admission = admit(vectors)
    good = admission.admitted
    if not good.any():
        raise UsageError(
            f"{rows.state.source.relation} has no row that can be indexed "
            f"({len(rows.ids)} read, all quarantined): check the submission and the filter"
        )
    xb, ids, columns = vectors, rows.ids, _columns(rows)
    if not good.all():
        xb, ids = vectors[good], rows.ids[good]
        columns = None if columns is None else columns.filter(pa.array(good))
    lists = _cut(xb, ids, spec, beat)
    beat()
    xb, ids = xb[lists.order], ids[lists.order]
    blocks = _blocks(xb, ids, columns, lists, spec.lists_per_block)
    whole = [
        ("centroids", array_block("centroids", lists.centroids)),
        ("marks", array_block("marks", _marks(xb, ids, lists.indptr))),
        ("quarantine_ids", array_block("quarantine", rows.ids[~good])),
        ("quarantine_vectors", array_block("quarantine", vectors[~good])),
    ]
    if len(rows.columns) and not good.all():
        kept_out = columns_block("quarantine", pa.table(dict(rows.columns)).filter(pa.array(~good)))
        whole.append(("quarantine_columns", kept_out))
    blocks += [(entry_of(role, block, 0, spec.lists), block) for role, block in whole]
    return Content(vectors.shape[1], int(good.sum()), admission, lists, blocks)


def mark_part(rows: npt.NDArray[Any]) -> int:
    """Eight digest bytes of one list's vectors or ids, so that damage can be named by list."""
    return int.from_bytes(hashlib.sha256(np.ascontiguousarray(rows).data).digest()[:8], "little")


def _cut(
    xb: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int64],
    spec: IndexSpec,
    beat: Callable[[], None],
) -> Lists:
    if spec.centroids is None:
        return cut(
            xb,
            ids,
            spec.lists,
            seed=spec.seed,
            metric=spec.metric,
            iterations=spec.iterations,
            beat=beat,
        )
    if spec.centroids.shape != (spec.lists, xb.shape[1]):
        raise UsageError(
            f"centroids of shape {spec.centroids.shape} do not fit {spec.lists} lists of "
            f"dimension {xb.shape[1]}: train new ones"
        )
    return cut_along(xb, ids, spec.centroids, metric=spec.metric)


def _columns(rows: SourceRows) -> pa.Table | None:
    return pa.table(dict(rows.columns)) if rows.columns else None


def _blocks(
    xb: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int64],
    columns: pa.Table | None,
    lists: Lists,
    per_block: int,
) -> list[tuple[FileEntry, Block]]:
    """Blocks in list order; `xb` and `ids` are sorted by list already, `columns` are not."""
    out = []
    for first in range(0, len(lists.centroids), per_block):
        count = min(per_block, len(lists.centroids) - first)
        rows = slice(int(lists.indptr[first]), int(lists.indptr[first + count]))
        parts = [
            ("vectors", array_block("vectors", xb[rows].astype(VECTOR_DTYPE))),
            ("ids", array_block("ids", ids[rows])),
        ]
        if columns is not None:
            part = columns.take(pa.array(lists.order[rows]))
            parts.append(("columns", columns_block("columns", part)))
        out += [(entry_of(role, block, first, count), block) for role, block in parts]
    return out


def entry_of(role: str, block: Block, first_list: int, lists: int) -> FileEntry:
    return FileEntry(
        role=role,
        path=block.path,
        bytes=len(block.content),
        rows=block.rows,
        first_list=first_list,
        lists=lists,
        sha256=block.sha256,
        logical_sha256=block.logical_sha256,
    )


def _marks(
    xb: npt.NDArray[np.float32], ids: npt.NDArray[np.int64], indptr: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    return np.array(
        [(mark_part(xb[a:b]), mark_part(ids[a:b])) for a, b in pairwise(indptr.tolist())],
        np.uint64,
    ).reshape(-1, 2)
