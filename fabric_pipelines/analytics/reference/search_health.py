"""Twin of what a search counts on its way (index/traffic.py): one query at a time, one probed list at a time, float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.search import Metric, pair_distance

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
BINS = 64


def search_health(
    xq: F64,
    rows: F32,
    ids: I64,
    list_of: I64,
    probes: I64,
    k: int,
    *,
    metric: Metric,
    lists: int,
    first: Callable[[int, int, I64], I64] = lambda query, number, members: members,
) -> tuple[I64, I64, I64, I64]:
    """probe, hit, wasted [lists] and margin [64] of queries [q, d] that have a distance, over rows [n, d] that have
    one, in lists list_of [n]; probes [q, p]. first: which of a list's members the nearest is sought among."""
    probe, hit, wasted = (np.zeros(lists, np.int64) for _ in range(3))
    margin = np.zeros(BINS, np.int64)
    for query, own in enumerate(probes):
        seen = np.flatnonzero(np.isin(list_of, own))
        asked = np.broadcast_to(xq[query], (len(seen), xq.shape[1]))
        distance = pair_distance(asked, rows[seen], metric)
        order = np.lexsort((ids[seen], distance))[:k]
        kept = seen[order]
        for number in own:
            members = np.flatnonzero(list_of == number)
            hits = int(np.isin(members, kept).sum())
            probe[number] += 1
            hit[number] += hits
            wasted[number] += hits == 0
            if len(members) and len(kept):
                near = np.isin(seen, first(query, int(number), members))
                margin[_bin(float(distance[near].min()), float(distance[order[-1]]))] += 1
    return probe, hit, wasted, margin


def _bin(nearest: float, last: float) -> int:
    size = abs(nearest) + abs(last)
    share = (nearest - last) / size if size > 0 else 0.0
    return min(max(int(32 * (1 + share)), 0), BINS - 1)
