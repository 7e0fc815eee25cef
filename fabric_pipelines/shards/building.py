"""Build a generation from rows in the database: lease, read, cut, write, publish. One order, one owner.

The lease (with its fencing token) decides who may publish; a lock on the shard's folder keeps two processes of
one machine apart and lets a restarted one take its lease back at once. A holder that was away too long
publishes nothing (FencingLost), whatever it has written.
"""

from __future__ import annotations

import hashlib
import importlib
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fabric_pipelines import __version__
from fabric_pipelines.analytics.search import Metric
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.source import Source, SourceState
from fabric_pipelines.dataplane.vectors import ShardLease
from fabric_pipelines.errors import (
    CheckFailed,
    CorruptionFound,
    TransientError,
    UsageError,
)
from fabric_pipelines.records.receipt import Receipt
from fabric_pipelines.shards.blocks import map_array
from fabric_pipelines.shards.content import (
    LISTS_PER_BLOCK_DEFAULT,
    IndexSpec,
    content_of,
)
from fabric_pipelines.shards.disk import DISK, Disk, locked
from fabric_pipelines.shards.generation import (
    Generation,
    published_folder,
    shard_folder,
    sweep,
    write_generation,
)
from fabric_pipelines.shards.issuing import receipt_for_child
from fabric_pipelines.shards.lists import ITERATIONS_DEFAULT
from fabric_pipelines.shards.manifest import folder_name, read_manifest
from fabric_pipelines.shards.scrub import damage_of
from fabric_pipelines.shards.store import VectorStore, store_of

LEASE_TTL_S = 600.0
# What decides the bytes of a generation; their digest is the `code` of a recipe.
BUILDER_MODULES = (
    "analytics.search",
    "ledger",
    "shards.admission",
    "shards.blocks",
    "shards.compaction",
    "shards.content",
    "shards.increment",
    "shards.lists",
    "shards.logical",
)


def build(
    db: Database | VectorStore,
    root: Path,
    name: str,
    *,
    relation: str = "fabric.embed",
    submission_id: str | None = None,
    filter: str | None = None,
    columns: Sequence[str] = ("source_row",),
    lists: int,
    seed: int,
    metric: Metric,
    recipe: Mapping[str, Any],
    iterations: int = ITERATIONS_DEFAULT,
    lists_per_block: int = LISTS_PER_BLOCK_DEFAULT,
    keep_centroids: bool = False,
    disk: Disk = DISK,
) -> Generation:
    """Publish the next generation of shard `name` from the rows of `relation` that the filter keeps.

    recipe: what made the vectors (engine, engine_fingerprint, weights_sha256, ...); index, code and libraries
    are added here. columns: integer columns that travel beside the vectors. keep_centroids: cut along the
    current generation's centroids, so that untouched blocks stay the files they are. Raises AlreadyRunning
    while another holder builds, FencingLost when it lost the lease meanwhile, StorageFailed, UsageError, SchemaError for
    what cannot be read and for a filter that does not depend on the row alone."""
    spec = IndexSpec(lists, seed, metric, iterations, lists_per_block)
    source = Source(
        relation=relation,
        submission_id=submission_id,
        filter=filter,
        columns=tuple(sorted(set(columns))),
    )
    store = store_of(db)
    store.require_fixed_filter(source)
    with holding(store, root, name, disk) as lease:
        folder = shard_folder(root, name)
        sweep(disk, store, folder, lease)
        return build_next(store, root, lease, source, spec, recipe, keep_centroids, disk)


def janitor(db: Database | VectorStore, root: Path, name: str, *, disk: Disk = DISK) -> list[str]:
    """Remove orphans of shard `name`: temp folders and generations never published. Returns their names."""
    store = store_of(db)
    with holding(store, root, name, disk) as lease:
        return sweep(disk, store, shard_folder(root, name), lease)


@contextmanager
def holding(
    store: VectorStore, root: Path, name: str, disk: Disk = DISK, *, copy: str = ""
) -> Iterator[ShardLease]:
    """The shard's folder lock and its lease in the database, both given back at the end; or those of its copy at the
    URL `copy`."""
    folder = shard_folder(root, name)
    if not folder.is_dir():
        disk.make_folder(folder)
        disk.sync_folder(folder.parent)
    busy = f"another process of this machine builds in {folder}; wait until it is done"
    if copy:
        busy = f"another process of this machine works on the copy of {name!r} at {copy}; wait until it is done"
    mark = hashlib.sha256(copy.encode()).hexdigest()[:12]
    with locked(folder / (f".copy-{mark}.lock" if copy else ".lock"), busy):
        holder = f"{socket.gethostname()}:{folder.resolve()}"
        lease = store.acquire_shard(f"{name}@{copy}" if copy else name, holder, ttl_s=LEASE_TTL_S)
        try:
            yield lease
        finally:
            # A lease that cannot be given back runs out by itself; what was done under it stands.
            with suppress(TransientError):
                store.release_shard(lease)


def full_recipe(recipe: Mapping[str, Any], spec: IndexSpec) -> dict[str, Any]:
    """The caller's recipe with index, code and libraries added. UsageError for a key that is ours,
    SchemaError for a float."""
    own = {"index": spec.as_json(), "code": code(), "libraries": libraries()}
    taken = sorted(set(own) & set(recipe))
    if taken:
        raise UsageError(f"recipe keys {taken} are written by the build; leave them out")
    whole = {**recipe, **own}
    Receipt({}, whole, {})  # refuses floats now, not after an hour of work
    return whole


def code() -> dict[str, str]:
    """Version, and the sha256 over the sources that decide the bytes."""
    digest = hashlib.sha256()
    for module in BUILDER_MODULES:
        path = importlib.import_module(f"fabric_pipelines.{module}").__file__
        assert path is not None
        digest.update(Path(path).read_bytes())
    return {"version": __version__, "builder_sha256": digest.hexdigest()}


def libraries() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pyarrow": pa.__version__,
        "machine": platform.machine(),
    }


def build_next(
    store: VectorStore,
    root: Path,
    lease: ShardLease,
    source: Source,
    spec: IndexSpec,
    recipe: Mapping[str, Any],
    keep_centroids: bool,
    disk: Disk,
) -> Generation:
    """The next generation under a lease that the caller holds; arguments as of build."""
    row = store.current_generation(lease.name)
    # The folder may be gone; then nothing is linked, and a new build is the remedy for it.
    previous = (
        shard_folder(root, row.name) / folder_name(row.generation, row.token) if row else None
    )
    parents: list[str] = []
    if keep_centroids:
        if row is None:
            raise UsageError(
                f"shard {lease.name!r} has no generation whose centroids could be kept"
            )
        spec = replace(spec, centroids=_centroids(published_folder(root, row), row.manifest_sha256))
        # Of a damaged generation nothing is inherited but its centroids, which were just checked.
        with suppress(CorruptionFound):
            parents = receipt_for_child(store, root, row, disk)
    whole = full_recipe(recipe, spec)
    store.watch(source)
    rows = store.read_source(source)
    require_made_by(rows.state, whole)
    content = content_of(rows, spec, Beat(store, lease))
    manifest = content.manifest(
        name=lease.name,
        generation=store.last_generation(lease.name) + 1,
        token=lease.token,
        spec=spec,
        source=rows.state.as_json(),
        recipe=whole,
        parents=parents,
    )
    assert manifest.rows + sum(manifest.quarantined.values()) == manifest.source["rows"]
    store.renew_shard(lease, ttl_s=LEASE_TTL_S)
    blocks = {block.path: block for _, block in content.blocks}
    folder, linked = write_generation(
        disk, shard_folder(root, lease.name), manifest, blocks, previous
    )
    sha256 = hashlib.sha256(manifest.to_bytes()).hexdigest()
    store.publish_generation(
        lease,
        generation=manifest.generation,
        manifest_sha256=sha256,
        manifest=manifest.as_json(),
    )
    with suppress(TransientError):  # what is not forgotten now is forgotten after the next build
        store.prune_changes()
    return Generation(folder, manifest, sha256, linked)


def require_made_by(state: SourceState, recipe: Mapping[str, Any]) -> None:
    """CheckFailed when rows were made by another engine than the recipe says: a shard of two engines'
    vectors compares what cannot be compared, and its receipt would not say so."""
    said = recipe.get("engine_fingerprint")
    others = sorted(set(state.engine_fingerprints) - {said})
    if said is not None and others:
        raise CheckFailed(
            f"the recipe says engine fingerprint {said}, and {state.source.relation} holds rows made by "
            f"{', '.join(others)}: build from the rows of one engine (a submission, or a filter)"
        )


def _centroids(folder: Path, manifest_sha256: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    manifest = read_manifest(folder, manifest_sha256)
    entry = manifest.of_role("centroids")[0]
    damage = damage_of(Generation(folder, manifest, manifest_sha256), entry)
    if damage is not None:  # lists cut along them would look right for ever
        raise CorruptionFound(
            f"the centroids that should be kept are damaged: {damage}; build without them, or "
            f"`fabric receipt refresh {manifest.name} --anew`"
        )
    return map_array(folder / entry.path, "<f8", (manifest.lists, manifest.dim))


class Beat:
    """Renews the lease once a third of it has gone."""

    def __init__(self, store: VectorStore, lease: ShardLease) -> None:
        self._store, self._lease, self._seen_s = store, lease, time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._seen_s > LEASE_TTL_S / 3:
            self._store.renew_shard(self._lease, ttl_s=LEASE_TTL_S)
            self._seen_s = now
