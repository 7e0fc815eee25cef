"""Ask a shard for the neighbours of its own rows, and count the lists that its searches looked at in vain."""

from __future__ import annotations

from typing import cast

import numpy as np

from fabric_pipelines.analytics.probes import Probes, of_own_rows, questions
from fabric_pipelines.analytics.search import Ids, Metric
from fabric_pipelines.shards.shard import Shard


def own_probes(shard: Shard) -> Probes:
    """Two lists a question, with the centroids that its searches use: in an increment those of the full build."""
    live = np.flatnonzero(shard.alive)
    ids, lists = shard.stored_ids()[live], shard.list_of()[live]
    order = np.argsort(ids)
    named = ids[order]

    def list_of(names: Ids) -> Ids:
        found: Ids = lists[order[np.searchsorted(named, names)]]
        return found

    asked = questions(ids, shard.manifest.lists)
    xq = shard.rows_at(live[asked]).vectors
    metric = cast(Metric, shard.manifest.metric)
    return of_own_rows(xq, ids[asked], shard.centroids(), shard.list_rows, list_of, metric)
