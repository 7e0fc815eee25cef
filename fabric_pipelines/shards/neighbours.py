"""Neighbours of rows of a shard by their ids: what a person asks, who has no vectors at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fabric_pipelines.errors import UsageError
from fabric_pipelines.shards.shard import Shard


@dataclass(frozen=True, slots=True)
class Neighbour:
    """distance grows with distance in both metrics; 0 or next to it for the row itself."""

    id: int
    distance: float


def neighbours(shard: Shard, ids: Sequence[int], k: int) -> dict[int, list[Neighbour]]:
    """The k nearest rows of each row, nearest first. UsageError naming an id that the shard does not have."""
    stored = shard.stored_ids()
    places = []
    for name in ids:
        found = np.flatnonzero((stored == name) & shard.alive)
        if not len(found):
            raise UsageError(
                f"shard {shard.manifest.name!r} has no row {name} in generation {shard.generation.number}"
            )
        places.append(int(found[-1]))
    rows = shard.rows_at(np.array(places, np.int64)).vectors
    ranked = shard.search(rows, k)
    return {
        name: [
            Neighbour(int(near), float(distance))
            for near, distance in zip(row_ids[:count], row_distances[:count], strict=True)
        ]
        for name, row_ids, row_distances, count in zip(
            ids, ranked.I, ranked.D, ranked.found.tolist(), strict=True
        )
    }
