"""Twin of exact search: every pair in float64, then a plain sort by (distance, id).

The plainest loop that could be right. It keeps no block, no bound and no state, and is quadratic in time on
purpose: the fast search must return this ranked list, id by id.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def flat_topk(
    xq: npt.NDArray[np.floating[Any]],
    xb: npt.NDArray[np.floating[Any]],
    ids: npt.NDArray[np.int64],
    k: int,
    *,
    metric: str,
    min_norm: float = 1e-12,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """D float64 [q, k] (NaN where nothing was found), I int64 [q, k] (-1 there), found int64 [q]."""
    queries, rows = np.asarray(xq, np.float64), np.asarray(xb, np.float64)
    out_d = np.full((len(queries), k), np.nan)
    out_i = np.full((len(queries), k), -1, np.int64)
    found = np.zeros(len(queries), np.int64)
    shortest = min_norm if metric == "cosine" else 0.0
    norms = np.array([np.sqrt((row * row).sum()) for row in rows])
    usable = [j for j in range(len(rows)) if np.isfinite(norms[j]) and norms[j] >= shortest]
    for number, query in enumerate(queries):
        length = np.sqrt((query * query).sum())
        if not np.isfinite(length) or length < shortest:
            continue
        ranked = sorted(
            (float(_distance(query, length, rows[j], norms[j], metric)), int(ids[j]))
            for j in usable
        )[:k]
        found[number] = len(ranked)
        for place, (distance, name) in enumerate(ranked):
            out_d[number, place], out_i[number, place] = distance, name
    return out_d, out_i, found


def _distance(
    query: npt.NDArray[np.float64],
    query_norm: np.float64,
    row: npt.NDArray[np.float64],
    row_norm: np.float64,
    metric: str,
) -> np.float64:
    if metric == "l2":
        return np.float64(((query - row) ** 2).sum())
    assert metric == "cosine", metric
    return np.float64(1.0 - (query * row).sum() / (query_norm * row_norm))
