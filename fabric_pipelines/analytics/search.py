"""Exact nearest neighbours: the ranked list of a float64 brute force at the price of float32 products.

A float32 matrix product with a proven error bound says which rows can possibly belong to the answer; only
those are scored again in float64, each pair on its own and in one fixed order, so that threads, block sizes
and the BLAS at hand cannot change the list. Ties go to the lower id. D is a distance in both metrics: smaller
is nearer ("cosine" is 1 - cos, "l2" is squared). Rows and queries that cannot be scored (NaN or infinite; under
cosine also those shorter than MIN_NORM, which have no direction) never are: such a query finds nothing, and
says so in `found`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import UsageError

Metric = Literal["cosine", "l2"]
METRICS: tuple[Metric, ...] = ("cosine", "l2")
MIN_NORM = 1e-12
NO_ID = -1
TILE_PAIRS = (
    1 << 21
)  # 8 MiB of float32 scores a tile: stays in the last-level cache of small machines
RESCORE_FLOATS = 1 << 22  # 32 MiB of float64 a gather
FLOAT32_SQUARE_MAX = 1e37  # a squared distance above it overflows float32: the tile runs in float64
_NO_CANDIDATE = np.iinfo(np.int64).max

Floats = npt.NDArray[np.floating[Any]]
Float64s = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ranked:
    """D float64 [q, k] ascending (NaN where nothing was found), I int64 [q, k] (NO_ID there), found [q].

    Unpacks as `D, I = ranked`."""

    D: Float64s
    I: Ids  # noqa: E741 (the field's word)
    found: npt.NDArray[np.int64]

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return iter((self.D, self.I))


def exact_topk(xq: Floats, xb: Floats, ids: Ids, k: int, *, metric: Metric) -> Ranked:
    """The k nearest rows of xb [n, d] for each row of xq [q, d]; `ids` [n] names the rows and breaks ties."""
    scan = FlatScan(xq, k, metric=metric)
    scan.add(xb, ids)
    return scan.ranked()


def pair_distance(xq: Floats, xb: Floats, metric: Metric) -> Float64s:
    """The distance of row i of xq to row i of xb, in float64 and in numpy's one order of summation."""
    q, x = np.asarray(xq, np.float64), np.asarray(xb, np.float64)
    distances: Float64s
    if metric == "l2":
        distances = np.square(q - x).sum(axis=1)
    else:
        distances = 1.0 - (q * x).sum(axis=1) / (_norms(q) * _norms(x))
    return distances


def scorable(rows: Floats, metric: Metric) -> npt.NDArray[np.bool_]:
    """Which rows have a distance to anything: finite, and under cosine not shorter than MIN_NORM."""
    with np.errstate(over="ignore", invalid="ignore"):
        norms = _norms(rows)
    return np.isfinite(norms) & ((norms >= MIN_NORM) | (metric == "l2"))


def recall_at_k(found_ids: Ids, true_ids: Ids) -> float:
    """Share of the true neighbours [q, k] that were found; NO_ID entries of the truth do not count."""
    if found_ids.shape[0] != true_ids.shape[0]:
        raise UsageError(
            f"recall compares {found_ids.shape[0]} answers with {true_ids.shape[0]} true lists"
        )
    wanted = int((true_ids != NO_ID).sum())
    pairs = zip(found_ids, true_ids, strict=True)
    hits = sum(len(np.intersect1d(a, b[b != NO_ID])) for a, b in pairs)
    return hits / wanted if wanted else 1.0


class FlatScan:
    """A running top-k over blocks of rows: `add` each block once, in any order, then read `ranked`."""

    def __init__(self, xq: Floats, k: int, *, metric: Metric) -> None:
        if metric not in METRICS:
            raise UsageError(f"metric {metric!r} is unknown; use one of {', '.join(METRICS)}")
        if k < 1:
            raise UsageError(f"k is {k}; ask for at least one neighbour")
        self._xq = np.ascontiguousarray(np.atleast_2d(xq), dtype=np.float64)
        if self._xq.ndim != 2:
            raise UsageError(f"queries have {self._xq.ndim} axes; they must be rows [q, d]")
        self._k, self._metric = k, metric
        self._open = np.flatnonzero(scorable(self._xq, metric))
        self._best_d = np.full((len(self._xq), k), np.inf)
        self._best_i = np.full((len(self._xq), k), _NO_CANDIDATE, np.int64)

    def add(self, xb: Floats, ids: Ids, *, queries: npt.NDArray[np.int64] | None = None) -> None:
        """Offer the rows of xb to every query, or only to the query numbers in `queries`."""
        if xb.ndim != 2 or xb.shape[1] != self._xq.shape[1]:
            raise UsageError(
                f"rows of shape {xb.shape} do not fit queries of dimension {self._xq.shape[1]}"
            )
        asked = self._open if queries is None else np.intersect1d(queries, self._open)
        rows_step = min(max(1, len(xb)), 8192)
        query_step = max(1, TILE_PAIRS // rows_step)
        for start in range(0, len(xb), rows_step):
            rows, names = xb[start : start + rows_step], ids[start : start + rows_step]
            good = scorable(rows, self._metric)
            if not good.all():
                rows, names = rows[good], names[good]
            if len(rows):
                tile = np.ascontiguousarray(rows, dtype=np.float64)
                for first in range(0, len(asked), query_step):
                    self._offer(asked[first : first + query_step], tile, names)

    def ranked(self) -> Ranked:
        hit = self._best_i != _NO_CANDIDATE
        return Ranked(
            np.where(hit, self._best_d, np.nan),
            np.where(hit, self._best_i, NO_ID),
            hit.sum(axis=1).astype(np.int64),
        )

    def _offer(self, asked: npt.NDArray[np.int64], rows: Float64s, names: Ids) -> None:
        scores, margin = _bounded_scores(self._xq[asked], rows, self._metric)
        limit = self._best_d[asked, -1]
        if len(rows) >= self._k:
            upper = scores + margin
            kth = np.partition(upper, self._k - 1, axis=1)[:, self._k - 1]
            limit = np.minimum(limit, kth)
        which, row = np.nonzero(scores - margin <= limit[:, None])
        step = max(1, RESCORE_FLOATS // rows.shape[1])
        distances = np.empty(len(which))
        for first in range(0, len(which), step):
            part = slice(first, first + step)
            distances[part] = pair_distance(
                self._xq[asked[which[part]]], rows[row[part]], self._metric
            )
        self._merge(asked, which, distances, names[row])

    def _merge(
        self, asked: npt.NDArray[np.int64], which: Ids, distances: Float64s, names: Ids
    ) -> None:
        """Fold candidates (query number `asked[which]`) into the running lists, ordered by (D, id)."""
        count, k = len(asked), self._k
        owner = np.concatenate([np.repeat(np.arange(count), k), which])
        d = np.concatenate([self._best_d[asked].ravel(), distances])
        i = np.concatenate([self._best_i[asked].ravel(), names])
        order = np.lexsort((i, d, owner))
        owner = owner[order]
        place = np.arange(len(owner)) - np.searchsorted(owner, np.arange(count))[owner]
        order = order[place < k]  # k of each query, for the old list alone holds k
        self._best_d[asked] = d[order].reshape(count, k)
        self._best_i[asked] = i[order].reshape(count, k)


def _norms(rows: Floats) -> Float64s:
    wide = np.asarray(rows, np.float64)
    norms: Float64s = np.sqrt((wide * wide).sum(axis=1))
    return norms


def _bounded_scores(xq: Float64s, xb: Float64s, metric: Metric) -> tuple[Floats, Floats]:
    """Distances [q, n] in float32, and a bound on how far each may be from the float64 value.

    A dot product of length d in any order is off by at most gamma_d * |x| * |q|, gamma_d = d*u / (1 - d*u)
    (Higham, Accuracy and Stability, 3.5). Rows are centred first: distances do not change by it, and a common
    offset no longer eats the digits. Sums of three terms, rounding to float32 and the float64 side's own error
    are a few u more, for which d + 32 stands. The last term covers products that underflow.
    """
    dim = xq.shape[1]
    if metric == "cosine":
        u = float(np.finfo(np.float32).eps) / 2
        left = (xq / _norms(xq)[:, None]).astype(np.float32)
        right = (xb / _norms(xb)[:, None]).astype(np.float32)
        return np.float32(1) - left @ right.T, np.asarray(_gamma(dim, u), np.float32)
    centre = xb.mean(axis=0)
    xq, xb = xq - centre, xb - centre
    nq, nb = _norms(xq), _norms(xb)
    wide = float(nq.max() + nb.max()) ** 2 > FLOAT32_SQUARE_MAX
    kind: type[np.floating[Any]] = np.float64 if wide else np.float32
    u = float(np.finfo(kind).eps) / 2
    reach = nq.astype(kind)[:, None] + nb.astype(kind)[None, :]
    scores = xq.astype(kind) @ xb.astype(kind).T
    scores *= -2
    scores += np.square(nb).astype(kind)[None, :]
    scores += np.square(nq).astype(kind)[:, None]
    np.square(reach, out=reach)
    reach *= kind(_gamma(dim, u))
    reach += kind(dim * float(np.finfo(kind).tiny))
    return scores, reach


def _gamma(dim: int, u: float) -> float:
    return (dim + 32) * u / (1 - (dim + 32) * u)
