"""Rebuild only what moved: the next generation as layers and tombstones over the blocks of an older one. No I/O.

What moved is found by digest: of the rows that may have, those that are as before drop out. Gone and changed rows
get a tombstone; new and changed ones join the nearest list, in one layer of their own. A list that outgrew
twice its size is split in two, one that shrank below a quarter is dissolved; then only the rows at the new
border are placed again (SPFresh's LIRE conditions, arXiv 2410.14452). Small older layers are folded into the new one,
and a list of which half is written anyway is written whole (compaction.py). Everything else stays the file it is.
A pure function of the older generation and the rows, so that a receipt can be replayed to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.dataplane.content_hash import ContentHash, content_hash, row_lanes
from fabric_pipelines.dataplane.source import RowSet, SourceState
from fabric_pipelines.shards import compaction
from fabric_pipelines.shards.admission import admit
from fabric_pipelines.shards.blocks import Block, array_block, columns_block
from fabric_pipelines.shards.content import entry_of
from fabric_pipelines.shards.lists import nearest_list, train
from fabric_pipelines.shards.manifest import (
    BLOCK_ROLES,
    LAYER_ROLES,
    FileEntry,
    Increment,
    ShardManifest,
)
from fabric_pipelines.shards.shard import Shard, StoredRows

SPLIT_ABOVE = 2.0
MERGE_BELOW = 0.25
NEIGHBOURS = 8
SPLIT_STEPS = 20

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Change:
    """What really moved. gone: places of stored rows; gone_out: rows of the quarantine; come: the rows as they
    are now; content: the source's hash with them; rows: how many distinct ones."""

    gone: Ids
    gone_out: npt.NDArray[np.intp]
    come: RowSet
    content: ContentHash
    rows: int


@dataclass(frozen=True, slots=True)
class Grown:
    """The next generation but its number: `files` in manifest order, each a new block or an older one's entry."""

    files: Sequence[tuple[FileEntry, Block | None]]
    increment: Increment
    rows: int
    stored: int
    quarantined: Mapping[str, int]
    sizes: Ids
    split: int
    merged: int

    def blocks(self) -> dict[str, Block | FileEntry]:
        return {entry.path: block or entry for entry, block in self.files}

    def manifest(
        self,
        parent: ShardManifest,
        *,
        generation: int,
        token: int,
        source: Mapping[str, Any],
        recipe: Mapping[str, Any],
        parents: Sequence[str],
    ) -> ShardManifest:
        return replace(
            parent,
            generation=generation,
            token=token,
            rows=self.rows,
            quarantined=dict(self.quarantined),
            files=[entry for entry, _ in self.files],
            source=source,
            recipe=recipe,
            parents=list(parents),
            increment=self.increment,
        )


def change_of(parent: Shard, ids: Ids, now: RowSet, state: SourceState) -> Change:
    """Of the rows named `ids`, which differ between `parent` and `now` (the rows of them that are there)."""
    names = state.source.columns
    places = np.flatnonzero(np.isin(parent.stored_ids(), ids) & parent.alive)
    stored, out = parent.rows_at(places), parent.quarantined()
    outside = np.flatnonzero(np.isin(out.ids, ids))
    kept_out = StoredRows(out.ids[outside], out.vectors[outside], _taken(out.columns, outside))
    then_ids = np.concatenate([stored.ids, kept_out.ids])
    then = [_lanes(part, state, names) for part in (stored, kept_out)]
    now_lanes = row_lanes(now.ids, now.vectors, state.encoding, [now.columns[n] for n in names])
    same = _same(then_ids, np.concatenate(then), now.ids, now_lanes)
    left, come = ~np.isin(then_ids, same), ~np.isin(now.ids, same)
    gone_rows, gone_out = left[: len(places)], left[len(places) :]
    moved = RowSet(
        now.ids[come], now.vectors[come], {name: now.columns[name][come] for name in names}
    )
    before = ContentHash.from_json(parent.manifest.source)
    gone_hash = [
        _hash_of(part, mask, state, names)
        for part, mask in ((stored, gone_rows), (kept_out, gone_out))
    ]
    come_hash = content_hash(
        moved.ids, moved.vectors, state.encoding, [moved.columns[name] for name in names]
    )
    none = content_hash(np.zeros(0, np.int64), np.zeros((0, 1), np.float32), state.encoding, [])
    content = before.moved(gone=gone_hash[0], come=come_hash).moved(gone=gone_hash[1], come=none)
    rows = len(np.union1d(then_ids[left], moved.ids))
    return Change(places[gone_rows], outside[gone_out], moved, content, rows)


def grow(parent: Shard, change: Change, base_recall: str) -> Grown:
    """Lay `change` over `parent`."""
    manifest = parent.manifest
    metric: Any = manifest.metric
    vectors = np.asarray(change.come.vectors, np.float32).reshape(-1, manifest.dim)
    good = admit(vectors).admitted
    table = pa.table(dict(change.come.columns))
    layout = _Layout(parent, change.gone)
    layout.add(change.come.ids[good], vectors[good], _taken(table, np.flatnonzero(good)))
    before = manifest.increment
    reference = np.asarray(
        before.reference_rows if before else np.diff(manifest.offsets()), np.int64
    )
    merged = _merge(layout, reference)
    split = _split(layout, reference, metric)
    _compact(layout)
    reference = layout.reference(reference)
    layer = layout.layer()
    kept, still = _layers_that_count(parent, layout.alive)
    dead = np.flatnonzero(~layout.alive[still]).astype(np.int64)
    out = _quarantine(parent, change, vectors, table, ~good)
    layers = [list(before.layers[number]) for number in kept] if before else []
    if len(layer.rows.ids):
        layers.append(layer.indptr.tolist())
    increment = Increment(
        parent_generation=manifest.generation,
        base_generation=before.base_generation if before else manifest.generation,
        lists=len(layout.centroids),
        layers=layers,
        tombstones=len(dead),
        reference_rows=reference.tolist(),
        base_recall=base_recall,
    )
    files = _files(parent, layout, layer, dead, out, kept)
    sizes = np.bincount(layout.live_lists(), minlength=len(layout.centroids))
    return Grown(
        files,
        increment,
        int(sizes.sum()),
        len(still) + len(layer.rows.ids),
        admit(out.vectors).as_json(),
        sizes,
        split,
        merged,
    )


class _Layout:
    """Where each row that counts belongs, while it is being decided: stored rows that stay, and added ones."""

    def __init__(self, parent: Shard, gone: Ids) -> None:
        self.parent = parent
        self.metric: Any = parent.manifest.metric
        self.centroids = np.array(parent.centroids())
        self.alive = parent.alive.copy()
        self.alive[gone] = False
        self.stored_list = parent.list_of()
        self.ids = np.empty(0, np.int64)
        self.vectors = np.empty((0, parent.manifest.dim), np.float32)
        self.columns: list[pa.Table] = []
        self.lists = np.empty(0, np.int64)
        self.cut: dict[int, int] = {}

    def add(self, ids: Ids, vectors: Floats, columns: pa.Table, lists: Ids | None = None) -> None:
        """`lists`: where they belong; by default the nearest."""
        if not len(ids):
            return
        self.ids = np.concatenate([self.ids, ids])
        self.vectors = np.concatenate([self.vectors, vectors])
        self.columns.append(columns)
        nearest = self.nearest(vectors) if lists is None else lists
        self.lists = np.concatenate([self.lists, nearest])

    def nearest(self, vectors: Floats) -> Ids:
        return nearest_list(vectors, self.centroids, self.metric)

    def lift(self, places: Ids, *, stay: bool = False) -> None:
        """Take stored rows out of where they lie and place them anew; `stay`: into the list that they were in."""
        if len(places):
            rows = self.parent.rows_at(places)
            self.alive[places] = False
            lists = self.stored_list[places] if stay else None
            self.add(rows.ids, rows.vectors, rows.columns, lists)

    def places_of(self, number: int) -> Ids:
        return np.flatnonzero(self.alive & (self.stored_list == number)).astype(np.int64)

    def live_lists(self) -> Ids:
        return np.concatenate([self.stored_list[self.alive], self.lists])

    def sizes(self) -> Ids:
        return np.bincount(self.live_lists(), minlength=len(self.centroids))

    def place_added_of(self, number: int) -> None:
        mine = np.flatnonzero(self.lists == number)
        if len(mine):
            self.lists[mine] = self.nearest(self.vectors[mine])

    def reference(self, before: Ids) -> Ids:
        """Size of each list when it was last cut."""
        grown = np.zeros(len(self.centroids), np.int64)
        grown[: len(before)] = before
        for number, rows in self.cut.items():
            grown[number] = rows
        return grown

    def layer(self) -> _Layer:
        order = np.lexsort((self.ids, self.lists))
        indptr = np.zeros(len(self.centroids) + 1, np.int64)
        np.cumsum(np.bincount(self.lists, minlength=len(self.centroids)), out=indptr[1:])
        table = pa.concat_tables(self.columns) if self.columns else pa.table({})
        rows = StoredRows(self.ids[order], self.vectors[order], _taken(table, order))
        return _Layer(indptr, rows)


@dataclass(frozen=True, slots=True)
class _Layer:
    indptr: Ids
    rows: StoredRows


def _compact(layout: _Layout) -> None:
    """Write again what costs little and leaves a search less to read; rows stay in their lists."""
    left = compaction.budget(len(layout.live_lists()))
    starts = _layer_starts(layout.parent)
    counts = [int(layout.alive[a:b].sum()) for a, b in pairwise(starts)]
    for number in compaction.layers_to_fold(counts, len(layout.ids), left):
        a, b = starts[number], starts[number + 1]
        layout.lift(a + np.flatnonzero(layout.alive[a:b]), stay=True)
        left -= counts[number]
    lists = len(layout.centroids)
    added = np.bincount(layout.lists, minlength=lists)
    stored = np.bincount(layout.stored_list[layout.alive], minlength=lists)
    chosen = compaction.lists_to_rewrite(stored, added, left)
    layout.lift(np.flatnonzero(layout.alive & np.isin(layout.stored_list, chosen)), stay=True)


def _layer_starts(parent: Shard) -> list[int]:
    """Stored rows of layer i are those from the i-th place to the next."""
    before = parent.manifest.increment
    layers = parent.blocks[len(parent.blocks) - len(before.layers) :] if before else []
    return [*(block.start for block in layers), parent.stored]


def _layers_that_count(parent: Shard, alive: npt.NDArray[np.bool_]) -> tuple[list[int], Ids]:
    """Layers with a row that counts, and the places that are stored without the others."""
    starts = _layer_starts(parent)
    spans = [slice(a, b) for a, b in pairwise(starts)]
    kept = [number for number, span in enumerate(spans) if alive[span].any()]
    still = np.ones(parent.stored, np.bool_)
    for number, span in enumerate(spans):
        still[span] = number in kept
    return kept, np.flatnonzero(still)


def _merge(layout: _Layout, reference: Ids) -> int:
    """Dissolve lists below a quarter of their size when cut; their rows go to the nearest other list."""
    sizes = layout.sizes()
    small = np.flatnonzero((reference > 0) & (sizes < MERGE_BELOW * reference))
    merged = 0
    for number in small.tolist():
        kept = np.isfinite(layout.centroids[:, 0])
        if not kept[number] or kept.sum() < 2:
            continue
        layout.centroids[number] = np.nan
        layout.lift(layout.places_of(number))
        layout.place_added_of(number)
        layout.cut[number] = 0
        merged += 1
    return merged


def _split(layout: _Layout, reference: Ids, metric: Any) -> int:
    """Cut lists above twice their size when cut in two, then place the rows at the new border again."""
    sizes = layout.sizes()
    target = reference.sum() / max(1, (reference > 0).sum())
    bound = SPLIT_ABOVE * np.maximum(reference, target)
    large = np.flatnonzero(sizes[: len(reference)] > bound)
    for number in large.tolist():
        old = layout.centroids[number].copy()
        layout.lift(layout.places_of(number))
        mine = np.flatnonzero(layout.lists == number)
        pair, _ = train(
            layout.vectors[mine], layout.ids[mine], 2, seed=0, metric=metric, iterations=SPLIT_STEPS
        )
        layout.centroids[number] = pair[0]
        layout.centroids = np.concatenate([layout.centroids, pair[1:]])
        layout.lists[mine] = layout.nearest(layout.vectors[mine])
        _settle_border(layout, old, pair, number)
        after = layout.sizes()
        for half in (number, len(layout.centroids) - 1):
            layout.cut[half] = int(after[half])
    return len(large)


def _settle_border(
    layout: _Layout, old: npt.NDArray[np.float64], pair: npt.NDArray[np.float64], number: int
) -> None:
    """Rows of neighbouring lists that a new centroid is nearer to than their own."""
    others = layout.centroids.copy()
    others[[number, len(others) - 1]] = np.nan
    usable = np.flatnonzero(np.isfinite(others[:, 0]))
    gaps = np.square(others[usable] - old).sum(axis=1)
    for neighbour in usable[np.lexsort((usable, gaps))][:NEIGHBOURS].tolist():
        choice = np.concatenate([layout.centroids[[neighbour]], pair])
        places = layout.places_of(neighbour)
        if len(places):
            rows = layout.parent.rows_at(places).vectors
            layout.lift(places[nearest_list(rows, choice, layout.metric) > 0])
        added = np.flatnonzero(layout.lists == neighbour)
        if len(added):
            nearer = nearest_list(layout.vectors[added], choice, layout.metric) > 0
            layout.lists[added[nearer]] = layout.nearest(layout.vectors[added[nearer]])


def _quarantine(
    parent: Shard, change: Change, vectors: Floats, columns: pa.Table, bad: npt.NDArray[np.bool_]
) -> StoredRows:
    """Rows kept out, by id: the older ones that are still there, and those of the change."""
    out = parent.quarantined()
    stay = np.setdiff1d(np.arange(len(out.ids)), change.gone_out)
    ids = np.concatenate([out.ids[stay], change.come.ids[bad]])
    order = np.argsort(ids)
    parts = [
        table
        for table in (_taken(out.columns, stay), _taken(columns, np.flatnonzero(bad)))
        if len(table)
    ]
    table = pa.concat_tables(parts) if parts else pa.table({})
    return StoredRows(
        ids[order],
        np.concatenate([out.vectors[stay], vectors[bad]])[order],
        _taken(table, order),
    )


def _files(
    parent: Shard, layout: _Layout, layer: _Layer, dead: Ids, out: StoredRows, kept: Sequence[int]
) -> list[tuple[FileEntry, Block | None]]:
    """`kept`: layers that stay, which are numbered anew."""
    lists, now = len(layout.centroids), {before: at for at, before in enumerate(kept)}
    files: list[tuple[FileEntry, Block | None]] = []
    for entry in parent.manifest.files:
        if entry.role in (*BLOCK_ROLES, "marks"):
            files.append((entry, None))
        elif entry.role in LAYER_ROLES and entry.first_list in now:
            files.append((replace(entry, first_list=now[entry.first_list]), None))
    if len(layer.rows.ids):
        made = [
            ("layer_vectors", array_block("vectors", layer.rows.vectors)),
            ("layer_ids", array_block("ids", layer.rows.ids)),
        ]
        if len(layer.rows.columns.column_names):
            made.append(("layer_columns", columns_block("columns", layer.rows.columns)))
        files += [(entry_of(role, block, len(kept), lists), block) for role, block in made]
    whole = [
        ("tombstones", array_block("tombstones", dead)),
        ("centroids", array_block("centroids", layout.centroids)),
        ("quarantine_ids", array_block("quarantine", out.ids)),
        ("quarantine_vectors", array_block("quarantine", out.vectors)),
    ]
    if len(out.columns):
        whole.append(("quarantine_columns", columns_block("quarantine", out.columns)))
    return files + [(entry_of(role, block, 0, lists), block) for role, block in whole]


def _taken(table: pa.Table, rows: npt.NDArray[Any]) -> pa.Table:
    return table.take(pa.array(rows, pa.int64())) if len(table) else table


def _columns(table: pa.Table, names: Sequence[str]) -> list[Ids]:
    return [table.column(name).to_numpy() for name in names] if len(table) else []


def _lanes(rows: StoredRows, state: SourceState, names: Sequence[str]) -> npt.NDArray[np.uint64]:
    if not len(rows.ids):
        return np.empty((0, 2), np.uint64)
    return row_lanes(rows.ids, rows.vectors, state.encoding, _columns(rows.columns, names))


def _hash_of(
    rows: StoredRows, mask: npt.NDArray[np.bool_], state: SourceState, names: Sequence[str]
) -> ContentHash:
    columns = [column[mask] for column in _columns(rows.columns, names)]
    return content_hash(rows.ids[mask], rows.vectors[mask], state.encoding, columns)


def _same(
    then_ids: Ids, then: npt.NDArray[np.uint64], now_ids: Ids, now: npt.NDArray[np.uint64]
) -> Ids:
    """Ids whose row is on both sides with one digest."""
    both, left, right = np.intersect1d(then_ids, now_ids, return_indices=True)
    if not len(both):
        return both
    same: Ids = both[(then[left] == now[right]).all(axis=1)]
    return same
