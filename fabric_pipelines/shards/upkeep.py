"""Build a shard only when something moved: its rows, or the recipe that makes a generation of them.

The change log says what moved since the current generation was read; nothing moved means that nothing is built
and every reader and receipt keeps its generation. Moved rows are laid over it (renewal.py), another recipe
or another source is a build of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fabric_pipelines.analytics.search import Metric
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.source import Source
from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.shards.building import build, full_recipe
from fabric_pipelines.shards.content import IndexSpec
from fabric_pipelines.shards.disk import DISK
from fabric_pipelines.shards.generation import Generation
from fabric_pipelines.shards.manifest import ShardManifest
from fabric_pipelines.shards.renewal import refresh
from fabric_pipelines.shards.shard import open_generation
from fabric_pipelines.shards.store import VectorStore, source_of, store_of


def build_if_moved(
    db: Database | VectorStore,
    root: Path,
    name: str,
    *,
    relation: str = "fabric.embed",
    submission_id: str | None = None,
    columns: Sequence[str] = ("source_row",),
    lists: int,
    seed: int,
    metric: Metric,
    recipe: Mapping[str, Any],
) -> tuple[Generation, bool]:
    """The current generation of shard `name` and whether it had to be built now; arguments as of build."""
    store = store_of(db)
    if store.current_generation(name) is not None:
        try:
            current = open_generation(store, root, name)
        except CorruptionFound:
            # the folder is gone or damaged: the next generation is how it comes back
            current = None
        source = Source(relation=relation, submission_id=submission_id, columns=tuple(columns))
        whole = full_recipe(recipe, IndexSpec(lists, seed, metric))
        if current and _same(current.manifest, source, whole):
            done = refresh(store, root, name, disk=DISK)
            return done.generation, done.how != "none"
    built = build(
        db,
        root,
        name,
        relation=relation,
        submission_id=submission_id,
        columns=columns,
        lists=lists,
        seed=seed,
        metric=metric,
        recipe=recipe,
    )
    return built, True


def _same(current: ShardManifest, source: Source, recipe: Mapping[str, Any]) -> bool:
    """Made from the same relation by the same recipe; whether rows moved is asked later."""
    return source_of(current.source) == source and dict(current.recipe) == dict(recipe)
