"""Bring a shard up to date with its source: by an increment where that is enough, by a full build where a rule says so.

The rules are few and each is a number with a reason (docs/receipts.md). An increment costs what moved; a full
build is always right, so whatever cannot be proven sound (a damaged block, a log that does not reach, another
recipe) falls back to it, and says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fabric_pipelines.dataplane.content_hash import BUCKETS, HASH_VERSION, ContentHash
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.source import Source
from fabric_pipelines.dataplane.staleness import Moved, Staleness
from fabric_pipelines.dataplane.vectors import GenerationRow, ShardLease
from fabric_pipelines.errors import CorruptionFound, TransientError, UsageError
from fabric_pipelines.shards.building import (
    LEASE_TTL_S,
    Beat,
    build_next,
    full_recipe,
    holding,
    require_made_by,
)
from fabric_pipelines.shards.content import IndexSpec
from fabric_pipelines.shards.disk import DISK, Disk
from fabric_pipelines.shards.generation import Generation, shard_folder, sweep, write_generation
from fabric_pipelines.shards.increment import Change, Grown, change_of, grow
from fabric_pipelines.shards.issuing import receipt_for_child
from fabric_pipelines.shards.manifest import ShardManifest
from fabric_pipelines.shards.probing import K, as_base, probed
from fabric_pipelines.shards.quality import BASE_RECALL
from fabric_pipelines.shards.scrub import require_whole
from fabric_pipelines.shards.shard import Shard, open_generation
from fabric_pipelines.shards.store import VectorStore, source_of, store_of

MOVED_FRACTION_MAX = 0.30
TOMBSTONE_FRACTION_MAX = 0.20
IMBALANCE_MAX = 4.0
EMPTY_FRACTION_MAX = 0.10
LAYERS_MAX = 16  # each is one more piece of every list that a probe reads
WORSE_THAN_BUILT = 1.1  # a corpus that was lopsided when it was built is not lopsided by what moved
PARAMETERS = ("lists", "seed", "metric", "iterations", "lists_per_block")


@dataclass(frozen=True, slots=True)
class Refreshed:
    """how: "none" (nothing moved), "increment" or "full"; why: the rule that asked for a full build, else
    empty. moved: rows that differ. written: bytes of files that are not those of the generation before."""

    generation: Generation
    how: str
    why: str
    moved: int
    written: int


def refresh(
    db: Database | VectorStore,
    root: Path,
    name: str,
    *,
    recipe: Mapping[str, Any] | None = None,
    anew: bool = False,
    disk: Disk = DISK,
) -> Refreshed:
    """Publish the next generation of shard `name` from its own source, unless nothing moved. recipe: the
    caller's part of a new recipe (default: the current one's). anew: a full build whatever moved, the remedy
    for damaged files. Raises UsageError for a shard that was
    never built, and what build raises."""
    store = store_of(db)
    with holding(store, root, name, disk) as lease:
        sweep(disk, store, shard_folder(root, name), lease)
        row = store.current_generation(name)
        if row is None:
            raise UsageError(f"there is no generation of shard {name!r}; build it first")
        current = ShardManifest.from_json(row.manifest, f"generation {row.generation} of {name!r}")
        source = source_of({**current.source, "hash_version": HASH_VERSION})
        whole = full_recipe(_given(current.recipe) if recipe is None else recipe, spec_of(current))
        store.watch(source)
        work = _Refresh(store, root, lease, row, current, source, whole, disk)
        return work.full("it was asked for") if anew else work.run()


@dataclass(frozen=True, slots=True)
class Audit:
    """Rows that differ between a generation and its source, counted by comparing them."""

    shard: str
    generation: int
    inserted: int
    updated: int
    deleted: int

    @property
    def moved(self) -> int:
        return self.inserted + self.updated + self.deleted


def audit(db: Database | VectorStore, root: Path, name: str) -> Audit:
    """Compare the current generation of shard `name` with its source by bucket sums and digests, and keep what
    was found beside the change log, which counts again from here on. Raises CorruptionFound when a file of the
    generation is gone or damaged, UsageError for one whose hash is of an older version."""
    store = store_of(db)
    generation = open_generation(store, root, name)
    manifest = generation.manifest
    if manifest.source.get("hash_version", 1) != HASH_VERSION:
        raise UsageError(
            f"generation {generation.number} of {name!r} has a content hash of an older version; "
            f"`fabric receipt refresh {name}` builds it anew"
        )
    source = source_of(manifest.source)
    store.watch(source)
    with Shard(generation) as shard:
        require_whole(generation)  # what differs because it rotted did not move
        moved = moved_by_buckets(store, source, shard)
        change = change_of(shard, moved.ids, moved.rows, moved.state)
        gone = np.concatenate(
            [shard.stored_ids()[change.gone], shard.quarantined().ids[change.gone_out]]
        )
    updated = np.intersect1d(gone, change.come.ids)
    inserted = np.setdiff1d(change.come.ids, gone)
    deleted = np.setdiff1d(gone, change.come.ids)
    store.record_audit(
        name,
        generation.number,
        moved.state.snapshot,
        relation_files=moved.state.relation_files,
        inserted=inserted,
        updated=updated,
        deleted=deleted,
    )
    return Audit(name, generation.number, len(inserted), len(updated), len(deleted))


def moved_by_buckets(store: VectorStore, source: Source, shard: Shard) -> Moved:
    """Candidates where no log is at hand: every row, here or there, of a bucket whose sum differs."""
    then = ContentHash.from_json(shard.manifest.source)
    found = store.read_buckets(source, then)
    buckets = then.moved_buckets(found.state.content)
    known = np.concatenate([shard.stored_ids()[shard.alive], shard.quarantined().ids])
    known = known[np.isin(known & (BUCKETS - 1), buckets)]
    return Moved(found.state, np.union1d(found.ids, known), found.rows, True)


def spec_of(manifest: ShardManifest) -> IndexSpec:
    """The parameters that the generation was cut by; new centroids are trained."""
    index = manifest.recipe["index"]
    return IndexSpec(**{name: index[name] for name in PARAMETERS})


@dataclass(frozen=True, slots=True)
class _Refresh:
    """One refresh under its lease."""

    store: VectorStore
    root: Path
    lease: ShardLease
    row: GenerationRow
    current: ShardManifest
    source: Source
    recipe: dict[str, Any]
    disk: Disk

    def run(self) -> Refreshed:
        stale = self.store.staleness(self.lease.name)
        assert stale is not None
        why = self._why_full(stale)
        if why:
            return self.full(why)
        try:
            generation = open_generation(self.store, self.root, self.lease.name)
            with Shard(generation) as parent:
                moved = self._moved_by_log(stale)
                if moved is not None and not len(moved.ids):
                    return self._unmoved(generation, moved, stale)
                # Every byte of the parent that something is made of from here on, and each once: a bit that
                # flipped would go over into a file whose digest is right.
                hashed = require_whole(generation, Beat(self.store, self.lease))
                if moved is None:
                    moved = moved_by_buckets(self.store, self.source, parent)
                change = change_of(parent, moved.ids, moved.rows, moved.state)
                if not change.rows:
                    return self._unmoved(generation, moved, stale)
                return self._incremented(parent, change, moved, hashed)
        except CorruptionFound as fault:
            return self.full(f"the generation before cannot be read: {fault}")

    def _why_full(self, stale: Staleness) -> str:
        """What can be known before a row is read."""
        if self.current.source.get("hash_version", 1) != HASH_VERSION:
            return "its content hash is of an older version"
        if dict(self.current.recipe) != self.recipe:
            return "the recipe changed"
        if stale.log == "elsewhere":
            return "the source is another relation or another database now"
        if stale.truncated:
            return "the source was truncated"
        if stale.verdict in ("age", "quality"):
            return f"the policy asks for new lists ({stale.verdict})"
        if stale.moved_fraction > MOVED_FRACTION_MAX:
            return f"{stale.moved_fraction:.1%} of the rows moved"
        return ""

    def _moved_by_log(self, stale: Staleness) -> Moved | None:
        """None where the log does not reach."""
        if stale.log != "complete":
            return None
        moved = self.store.read_moved(self.lease.name, self.row.generation, self.source)
        return moved if moved.complete else None

    def _unmoved(self, generation: Generation, moved: Moved, stale: Staleness) -> Refreshed:
        """Rows are as they were: say so, so that the log counts from here on."""
        if stale.log != "complete" or stale.moved:
            none = np.zeros(0, np.int64)
            self.store.record_audit(
                self.lease.name,
                self.row.generation,
                moved.state.snapshot,
                relation_files=moved.state.relation_files,
                inserted=none,
                updated=none,
                deleted=none,
            )
        return Refreshed(generation, "none", "", 0, 0)

    def _incremented(
        self, parent: Shard, change: Change, moved: Moved, hashed: frozenset[str]
    ) -> Refreshed:
        fraction = change.rows / max(self.current.rows, 1)
        if fraction > MOVED_FRACTION_MAX:
            return self.full(f"{fraction:.1%} of the rows moved")
        if len(change.come.ids) and change.come.vectors.shape[1] != self.current.dim:
            return self.full("the vectors have another dimension")
        require_made_by(moved.state, self.recipe)
        parents = receipt_for_child(self.store, self.root, self.row, self.disk)
        grown = grow(parent, change, self._base_recall(parent))
        why = _why_unsound(parent, grown)
        if why:
            return self.full(why)
        state = moved.state.with_content(change.content)
        manifest = grown.manifest(
            self.current,
            generation=self.store.last_generation(self.lease.name) + 1,
            token=self.lease.token,
            source=state.as_json(),
            recipe=self.recipe,
            parents=parents,
        )
        assert manifest.rows + sum(manifest.quarantined.values()) == manifest.source["rows"]
        return self._published(parent, manifest, grown, change, hashed)

    def _base_recall(self, parent: Shard) -> str:
        """Of the full build that `parent` is or was laid over; measured now where no receipt has kept it."""
        if self.current.increment:
            return self.current.increment.base_recall
        for row in self.store.find_receipts(
            shard=self.lease.name, generation=self.row.generation, limit=1
        ):
            kept: str | None = row.statement["predicate"]["quality"].get(BASE_RECALL)
            if kept:
                return kept
        return as_base(probed(parent))

    def _published(
        self,
        parent: Shard,
        manifest: ShardManifest,
        grown: Grown,
        change: Change,
        hashed: frozenset[str],
    ) -> Refreshed:
        self.store.renew_shard(self.lease, ttl_s=LEASE_TTL_S)
        folder, linked = write_generation(
            self.disk,
            shard_folder(self.root, self.lease.name),
            manifest,
            grown.blocks(),
            parent.generation.folder,
            hashed,
        )
        sha256 = hashlib.sha256(manifest.to_bytes()).hexdigest()
        generation = Generation(folder, manifest, sha256, linked)
        assert manifest.increment is not None
        with Shard(generation) as made:
            drop = probed(made).fell(float(manifest.increment.base_recall))
        if drop:
            self.disk.remove_folder(folder)
            return self.full(f"recall@{K} of probed search fell by {drop:.3f}")
        self.store.publish_generation(
            self.lease,
            generation=manifest.generation,
            manifest_sha256=sha256,
            manifest=manifest.as_json(),
        )
        with suppress(TransientError):  # what is not forgotten now is forgotten after the next one
            self.store.prune_changes()
        return Refreshed(generation, "increment", "", change.rows, _written(manifest, self.current))

    def full(self, why: str) -> Refreshed:
        generation = build_next(
            self.store,
            self.root,
            self.lease,
            self.source,
            spec_of(self.current),
            _given(self.recipe),
            keep_centroids=False,
            disk=self.disk,
        )
        manifest = generation.manifest
        return Refreshed(generation, "full", why, manifest.rows, _written(manifest, self.current))


def _why_unsound(parent: Shard, grown: Grown) -> str:
    """What an increment would leave behind that a full build would not."""
    built = np.diff(parent.manifest.offsets())
    layers = len(grown.increment.layers)
    if layers > LAYERS_MAX:
        return f"there would be {layers} layers"
    share = grown.increment.tombstones / grown.stored
    if share > TOMBSTONE_FRACTION_MAX:
        return f"{share:.1%} of the stored rows are under a tombstone"
    imbalance, then = (float(sizes.max() / sizes.mean()) for sizes in (grown.sizes, built))
    if imbalance > max(IMBALANCE_MAX, WORSE_THAN_BUILT * then):
        return f"the largest list has {imbalance:.1f} times the mean"
    empty, then = (float((sizes == 0).mean()) for sizes in (grown.sizes, built))
    if empty > max(EMPTY_FRACTION_MAX, WORSE_THAN_BUILT * then):
        return f"{empty:.1%} of the lists are empty"
    return ""


def _written(manifest: ShardManifest, before: ShardManifest) -> int:
    known = {entry.path for entry in before.files}
    return sum({e.path: e.bytes for e in manifest.files if e.path not in known}.values())


def _given(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in recipe.items() if key not in ("index", "code", "libraries")
    }
