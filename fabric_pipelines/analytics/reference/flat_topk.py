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
    norms = np.sqrt((rows * rows).sum(axis=1))
    usable = np.isfinite(norms) & (norms >= shortest)
    rows, norms, names = rows[usable], norms[usable], np.asarray(ids)[usable]
    for number, query in enumerate(queries):
        length = np.sqrt((query * query).sum())
        if not np.isfinite(length) or length < shortest:
            continue
        distances = _distances(query, length, rows, norms, metric)
        first = np.lexsort((names, distances))[:k]
        found[number] = len(first)
        out_d[number, : len(first)], out_i[number, : len(first)] = distances[first], names[first]
    return out_d, out_i, found


def _distances(
    query: npt.NDArray[np.float64],
    length: np.float64,
    rows: npt.NDArray[np.float64],
    norms: npt.NDArray[np.float64],
    metric: str,
) -> npt.NDArray[np.float64]:
    """From the query to each row. Rows are taken a few thousand at a time only to bound memory."""
    out = np.empty(len(rows))
    for start in range(0, len(rows), 4096):
        part = slice(start, start + 4096)
        if metric == "l2":
            out[part] = ((query - rows[part]) ** 2).sum(axis=1)
        else:
            assert metric == "cosine", metric
            out[part] = 1.0 - (query * rows[part]).sum(axis=1) / (length * norms[part])
    return out
