"""The twin's ranked list over all rows at the price of one float64 matrix product: what the fast search is judged by.

A product over blocks of rows, each value with a bound of its rounding error, says which rows can be among the k nearest
of a query; those rows alone go to the twin (reference/flat_topk.py), which scores every pair of them and sorts. The
error of a float64 dot product in any order is at most gamma_d |x| |y|, gamma_d = d u / (1 - d u), u = 2^-53 (Higham,
Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1); the bound takes 8 (d + 8) u, for product, norms,
quotient and the twin's own rounding. It shares no line with the search that it judges (search.py). Refuses nothing:
whatever cannot be bounded is given to the twin.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.reference.flat_topk import flat_topk

MIN_NORM = 1e-12
BLOCK_FLOATS = 1 << 22  # of rows as float64: 32 MiB
UNIT = 2.0**-53

Ids = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]


def true_neighbours(
    xq: npt.NDArray[np.floating[Any]],
    xb: npt.NDArray[np.floating[Any]],
    ids: Ids,
    k: int,
    *,
    metric: str,
) -> Ids:
    """I int64 [q, k] of `flat_topk` over all of `xb` [n, d], -1 where there is no neighbour."""
    rows = candidates(xq, xb, k, metric=metric)
    near, names = xb[rows], np.asarray(ids)[rows]
    _, found, _ = flat_topk(xq, near, names, k, metric=metric, min_norm=MIN_NORM)
    return found


def candidates(
    xq: npt.NDArray[np.floating[Any]],
    xb: npt.NDArray[np.floating[Any]],
    k: int,
    *,
    metric: str,
) -> Ids:
    """Places of all rows that can be among the k nearest of any query, ascending."""
    queries = np.asarray(xq, np.float64)
    lengths = _norms(queries)
    shortest = MIN_NORM if metric == "cosine" else 0.0
    asked = np.isfinite(lengths) & (lengths >= shortest)
    queries, lengths = queries[asked], lengths[asked]
    near = np.zeros((len(queries), 0))  # upper bounds of the k nearest so far
    kept: list[tuple[Ids, Float64s]] = []
    step = max(1, BLOCK_FLOATS // max(1, xb.shape[1]))
    for begin in range(0, len(xb) if len(queries) and k else 0, step):
        rows = np.asarray(xb[begin : begin + step], np.float64)
        norms = _norms(rows)
        places = np.flatnonzero(np.isfinite(norms) & (norms >= shortest))
        lower, upper = _bounds(queries, lengths, rows[places], norms[places], metric)
        near = _smallest(np.concatenate([near, upper], axis=1), k)
        open_ = ~(lower > _worst(near, k))
        here = np.flatnonzero(open_.any(axis=0))
        kept.append((begin + places[here], lower[:, here]))
    if not kept:
        return np.zeros(0, np.int64)
    worst = _worst(near, k)
    return np.concatenate([places[(~(lower > worst)).any(axis=0)] for places, lower in kept])


def _bounds(
    queries: Float64s, lengths: Float64s, rows: Float64s, norms: Float64s, metric: str
) -> tuple[Float64s, Float64s]:
    """Between which every distance lies, the twin's included; from minus to plus infinity where nothing is known."""
    with np.errstate(over="ignore", invalid="ignore"):
        products = queries @ rows.T
        if metric == "l2":
            scale = (lengths[:, None] + norms) ** 2
            values = (lengths**2)[:, None] + norms**2 - 2 * products
        else:
            scale = np.ones((1, 1))
            values = 1.0 - products / (lengths[:, None] * norms)
        error = 8 * (queries.shape[1] + 8) * UNIT * scale
        lower, upper = values - error, values + error
    unknown = ~(np.isfinite(lower) & np.isfinite(upper))
    lower[unknown], upper[unknown] = -np.inf, np.inf
    return lower, upper


def _smallest(values: Float64s, k: int) -> Float64s:
    return values if values.shape[1] <= k else np.partition(values, k - 1, axis=1)[:, :k]


def _worst(near: Float64s, k: int) -> Float64s:
    """[q, 1]: no row beyond it is among the k nearest; infinite while there are fewer than k."""
    if near.shape[1] < k:
        return np.full((len(near), 1), np.inf)
    worst: Float64s = near.max(axis=1, keepdims=True)
    return worst


def _norms(rows: Float64s) -> Float64s:
    with np.errstate(over="ignore", invalid="ignore"):
        norms: Float64s = np.sqrt(np.einsum("nd,nd->n", rows, rows))
    return norms
