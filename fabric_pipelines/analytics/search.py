"""Exact nearest neighbours: the ranked list of a float64 brute force at the price of float32 products.

A float32 matrix product with a proven error bound says which rows can possibly belong to the answer; only
those are scored again in float64, each pair on its own and in one fixed order, so that threads, block sizes
and the BLAS at hand cannot change the list. Ties go to the lower id. D is a distance in both metrics: smaller
is nearer ("cosine" is 1 - cos, "l2" is squared). Rows and queries that cannot be scored (NaN or infinite; under
cosine also those shorter than MIN_NORM, which have no direction) never are: such a query finds nothing, and
says so in `found`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
CROWD = 4  # times k: so many pairs of a tile are scored again rather than the tile partitioned for fewer
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
    scan = FlatScan(Queries(xq, metric), k)
    scan.add(xb, ids)
    return scan.ranked()


def pair_distance(xq: Floats, xb: Floats, metric: Metric) -> Float64s:
    """The distance of row i of xq to row i of xb, in float64 and in numpy's one order of summation."""
    q, x = np.asarray(xq, np.float64), np.asarray(xb, np.float64)
    return paired(q, x, norms_of(q) * norms_of(x), metric)


def scorable(rows: Floats, metric: Metric) -> npt.NDArray[np.bool_]:
    """Which rows have a distance to anything: finite, and under cosine not shorter than MIN_NORM."""
    with np.errstate(over="ignore", invalid="ignore"):
        norms = norms_of(np.asarray(rows, np.float64))
    return have_distance(norms, metric)


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


class Queries:
    """Queries [q, d] made ready once, for any number of scans: checked, in float64, and in the float32 form
    that is multiplied (directions under cosine; under l2 relative to `centre`, which moves no distance but keeps
    a common offset from eating the digits)."""

    def __init__(self, xq: Floats, metric: Metric) -> None:
        if metric not in METRICS:
            raise UsageError(f"metric {metric!r} is unknown; use one of {', '.join(METRICS)}")
        self.metric = metric
        self.wide = np.ascontiguousarray(np.atleast_2d(xq), dtype=np.float64)
        if self.wide.ndim != 2:
            raise UsageError(f"queries have {self.wide.ndim} axes; they must be rows [q, d]")
        with np.errstate(over="ignore", invalid="ignore"):
            self.norms = norms_of(self.wide)
        self.open = np.flatnonzero(have_distance(self.norms, metric))
        kept = self.wide[self.open]
        self.centre = kept.mean(axis=0) if len(kept) else np.zeros(self.wide.shape[1])
        self._side = _Side.of(self.wide, self.norms, self.centre, metric)

    @property
    def dim(self) -> int:
        return int(self.wide.shape[1])

    def __len__(self) -> int:
        return len(self.wide)

    def side(self, asked: Ids) -> _Side:
        return self._side if len(asked) == len(self) else self._side.at(asked)


def probed_topk(
    queries: Queries,
    k: int,
    centroids: Floats,
    nprobe: int,
    list_rows: Callable[[int], tuple[Floats, Ids]],
) -> tuple[Ranked, Ids]:
    """The k nearest rows in the `nprobe` lists whose centroids [lists, d] are nearest, and those lists [q, nprobe] (NO_ID:
    none). A list (rows and ids, by its number) is read once for all the queries that want it."""
    scan = FlatScan(queries, k)
    near = FlatScan(queries, min(nprobe, len(centroids)))
    near.add(centroids, np.arange(len(centroids)))
    probes = near.ranked().I
    for number in np.unique(probes[probes >= 0]):
        asked = np.flatnonzero((probes == number).any(axis=1))
        # in one call: a scan of some rows costs more to begin than to copy them (five times for ten pieces)
        scan.add(*list_rows(int(number)), queries=asked)
    return scan.ranked(), probes


class FlatScan:
    """A running top-k over blocks of rows: `add` each block once, in any order, then read `ranked`."""

    def __init__(self, queries: Queries, k: int) -> None:
        if k < 1:
            raise UsageError(f"k is {k}; ask for at least one neighbour")
        self._queries, self._k = queries, k
        self._best_d = np.full((len(queries), k), np.inf)
        self._best_i = np.full((len(queries), k), _NO_CANDIDATE, np.int64)

    def add(self, xb: Floats, ids: Ids, *, queries: npt.NDArray[np.int64] | None = None) -> None:
        """Offer the rows of xb to every query, or only to the query numbers in `queries`."""
        if xb.ndim != 2 or xb.shape[1] != self._queries.dim:
            raise UsageError(
                f"rows of shape {xb.shape} do not fit queries of dimension {self._queries.dim}"
            )
        asked = self._queries.open
        if queries is not None:
            asked = np.intersect1d(queries, asked)
        rows_step = min(max(1, len(xb)), 8192)
        query_step = max(1, TILE_PAIRS // rows_step)
        for start in range(0, len(xb), rows_step):
            part = slice(start, start + rows_step)
            tile = _Tile.of(xb[part], ids[part], self._queries)
            if len(tile.names):
                for first in range(0, len(asked), query_step):
                    self._offer(asked[first : first + query_step], tile)

    def ranked(self) -> Ranked:
        hit = self._best_i != _NO_CANDIDATE
        return Ranked(
            np.where(hit, self._best_d, np.nan),
            np.where(hit, self._best_i, NO_ID),
            hit.sum(axis=1).astype(np.int64),
        )

    def _offer(self, asked: Ids, tile: _Tile) -> None:
        queries, metric = self._queries, self._queries.metric
        scores, margin = _bounded_scores(queries.side(asked), tile.side, metric)
        limit = self._best_d[asked, -1]
        hits = _within(scores, margin, limit)
        if len(tile.names) >= self._k and np.count_nonzero(hits) > CROWD * self._k * len(asked):
            # what is known so far lets too many through, as at the start and in a list near a query
            limit = np.minimum(limit, _kth_upper(scores, margin, self._k))
            hits = _within(scores, margin, limit)
        which, row = np.nonzero(hits)
        distances = np.empty(len(which))
        step = max(1, RESCORE_FLOATS // queries.dim)
        for first in range(0, len(which), step):
            part = slice(first, first + step)
            q, x = asked[which[part]], row[part]
            distances[part] = paired(
                queries.wide[q], tile.wide[x], queries.norms[q] * tile.norms[x], metric
            )
        self._merge(asked, which, distances, tile.names[row])

    def _merge(self, asked: Ids, which: Ids, distances: Float64s, names: Ids) -> None:
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


@dataclass(frozen=True, slots=True)
class _Side:
    """One factor of the product: `narrow` float32 [n, d], and under l2 the lengths [n] of the centred rows.
    Where squares would overflow float32, `narrow` is float64."""

    narrow: Floats
    reach: Float64s

    @classmethod
    def of(cls, wide: Float64s, norms: Float64s, centre: Float64s, metric: Metric) -> _Side:
        with np.errstate(all="ignore"):  # rows without a distance come along and are never asked
            if metric == "cosine":
                return cls((wide / norms[:, None]).astype(np.float32), norms)
            centred = wide - centre
            reach = norms_of(centred)
            top = float(np.max(reach, initial=0.0, where=np.isfinite(reach)))
            fits = 4 * top * top < FLOAT32_SQUARE_MAX
            return cls(centred.astype(np.float32) if fits else centred, reach)

    def at(self, rows: Ids) -> _Side:
        return _Side(self.narrow[rows], self.reach[rows])


@dataclass(frozen=True, slots=True)
class _Tile:
    """The rows of one piece of a block that have a distance."""

    wide: Float64s
    norms: Float64s
    names: Ids
    side: _Side

    @classmethod
    def of(cls, xb: Floats, names: Ids, queries: Queries) -> _Tile:
        wide = np.ascontiguousarray(xb, dtype=np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            norms = norms_of(wide)
        good = have_distance(norms, queries.metric)
        if not good.all():
            wide, norms, names = wide[good], norms[good], names[good]
        return cls(wide, norms, names, _Side.of(wide, norms, queries.centre, queries.metric))


def norms_of(wide: Float64s) -> Float64s:
    norms: Float64s = np.sqrt((wide * wide).sum(axis=1))
    return norms


def have_distance(norms: Float64s, metric: Metric) -> npt.NDArray[np.bool_]:
    return np.isfinite(norms) & ((norms >= MIN_NORM) | (metric == "l2"))


def paired(q: Float64s, x: Float64s, lengths: Float64s, metric: Metric) -> Float64s:
    """`lengths` is |q| * |x|."""
    distances: Float64s
    if metric == "l2":
        distances = np.square(q - x).sum(axis=1)
    else:
        distances = 1.0 - (q * x).sum(axis=1) / lengths
    return distances


def _bounded_scores(left: _Side, right: _Side, metric: Metric) -> tuple[Floats, Floats]:
    """Distances [q, n] in float32, and a bound on how far each may be from the float64 value.

    A dot product of length d in any order is off by at most gamma_d * |x| * |q|, gamma_d = d*u / (1 - d*u)
    (Higham, Accuracy and Stability, 3.5). Sums of three terms, rounding to float32 and the float64 side's own
    error are a few u more, for which d + 32 stands. The last term covers products that underflow.
    """
    dim = left.narrow.shape[1]
    products = left.narrow @ right.narrow.T  # float64 as soon as one side is
    kind = products.dtype.type
    gamma = dot_error(dim, float(np.finfo(kind).eps) / 2)
    if metric == "cosine":
        np.subtract(1, products, out=products)
        return products, np.asarray(gamma, kind)
    products *= -2
    products += np.square(right.reach).astype(kind)[None, :]
    products += np.square(left.reach).astype(kind)[:, None]
    margin = left.reach.astype(kind)[:, None] + right.reach.astype(kind)[None, :]
    np.square(margin, out=margin)
    margin *= kind(gamma)
    margin += kind(dim * float(np.finfo(kind).tiny))
    return products, margin


def _within(scores: Floats, margin: Floats, limit: Float64s) -> npt.NDArray[np.bool_]:
    """[q, n]: the pairs whose distance may be at most `limit` [q]."""
    # Rounded up to the scores' own type: a float64 comparison would widen the whole tile.
    bound = np.nextafter(limit.astype(scores.dtype), scores.dtype.type(np.inf))[:, None]
    hits: npt.NDArray[np.bool_] = (
        scores <= bound + margin if margin.ndim == 0 else scores - margin <= bound
    )
    return hits


def _kth_upper(scores: Floats, margin: Floats, k: int) -> Float64s:
    """The k-th smallest upper bound of each query: no row beyond it can be among the k nearest."""
    upper = scores if margin.ndim == 0 else scores + margin
    kth = upper.min(axis=1) if k == 1 else np.partition(upper, k - 1, axis=1)[:, k - 1]
    return kth.astype(np.float64) + (float(margin) if margin.ndim == 0 else 0.0)


def dot_error(dim: int, u: float) -> float:
    return (dim + 32) * u / (1 - (dim + 32) * u)
