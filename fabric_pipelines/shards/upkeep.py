"""Build a shard only when something moved: its rows, or the recipe that makes a generation of them.

The database is asked for the content hash as it is now (no row is read); the current generation says under
which hash and recipe it was made. Equal means that a build would give the same lists again, so none is made
and every reader and receipt keeps its generation.
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
from fabric_pipelines.shards.generation import Generation
from fabric_pipelines.shards.shard import open_generation
from fabric_pipelines.shards.store import VectorStore, store_of

MOVES_WITHOUT_CONTENT = ("pg_snapshot", "lsn", "timeline")


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
        if current and _same(current, store.source_state(source).as_json(), whole):
            return current, False
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


def _same(current: Generation, source: Mapping[str, Any], recipe: Mapping[str, Any]) -> bool:
    manifest = current.manifest
    now = {key: value for key, value in source.items() if key not in MOVES_WITHOUT_CONTENT}
    then = {key: value for key, value in manifest.source.items() if key in now}
    return now == then and dict(manifest.recipe) == dict(recipe)
