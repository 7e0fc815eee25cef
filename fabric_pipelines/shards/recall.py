"""Recall of a generation's search against the truth: brute force in float64 over the rows in the database.

The rows are read back from their source, so the comparison crosses everything in between: landing, building,
block files, search. Every pair is scored (analytics/truth.py), so queries are a sample, rows at even distance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fabric_pipelines.analytics.search import recall_at_k
from fabric_pipelines.analytics.truth import true_neighbours
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.shards.shard import Shard
from fabric_pipelines.shards.store import VectorStore, source_of, store_of

QUERIES_DEFAULT = 100


@dataclass(frozen=True, slots=True)
class Recall:
    """recall: share of the k true neighbours found, over `queries` rows of `rows`."""

    recall: float
    k: int
    queries: int
    rows: int


def recall_of(
    db: Database | VectorStore, shard: Shard, k: int, *, queries: int = QUERIES_DEFAULT
) -> Recall:
    """Recall@k of the shard's exact search against its source as it is now."""
    rows = store_of(db).read_source(source_of(shard.manifest.source))
    count = len(rows.ids)
    if not count:
        return Recall(1.0, k, 0, 0)
    asked = np.unique(np.linspace(0, count - 1, min(queries, count)).astype(np.int64))
    xq = rows.vectors[asked]
    truth = true_neighbours(xq, rows.vectors, rows.ids, k, metric=shard.manifest.metric)
    _, found = shard.search(xq, k)
    return Recall(recall_at_k(found, truth), k, len(asked), count)
