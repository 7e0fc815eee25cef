"""What a generation is worth, measured: recall against the float64 twin's list, balance of its lists.

Rides on a receipt outside its identity. Queries are rows of the shard, spread evenly, so that two
generations of the same rows are asked the same questions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.search import recall_at_k
from fabric_pipelines.analytics.truth import true_neighbours
from fabric_pipelines.shards.probing import as_base, probed
from fabric_pipelines.shards.shard import NPROBE_DEFAULT, Shard

QUERIES = 64
K = 10
BASE_RECALL = "base_recall"


def measure(shard: Shard) -> dict[str, Any]:
    """recall_at_10 of exact and probed search, imbalance (largest list over mean), empty lists, rows; of a full build
    also base_recall, which refreshes are compared with, so that none of them has to measure it."""
    vectors, ids = shard.vectors(), shard.ids()
    xq = sample(vectors, ids)
    truth = true_neighbours(xq, vectors, ids, K, metric=shard.manifest.metric)
    sizes = np.diff(shard.indptr)
    base = {} if shard.manifest.increment else {BASE_RECALL: as_base(probed(shard))}
    return {
        **base,
        "queries": len(xq),
        "recall_at_10": recall_at_k(shard.search(xq, K).I, truth),
        "recall_at_10_probed": recall_at_k(shard.search(xq, K, exact=False).I, truth),
        "nprobe": min(NPROBE_DEFAULT, shard.manifest.lists),
        "imbalance": float(sizes.max() / sizes.mean()),
        "empty_lists": int((sizes == 0).sum()),
        "rows": shard.manifest.rows,
        "quarantined": sum(shard.manifest.quarantined.values()),
    }


def sample(vectors: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """QUERIES rows (or all), evenly spread over the ids, so that the order of lists does not matter."""
    by_id = np.argsort(ids)
    places = np.linspace(0, len(ids) - 1, min(QUERIES, len(ids))).astype(np.int64)
    return vectors[by_id[places]]
