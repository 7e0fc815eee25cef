"""The passes: sweeps over rows or tiles that leave a few numbers a row or a cluster for the metrics to read.

Order is a DAG: P1 admit > P2 centroid > P3 radius > {P4 order, P7 centroid pairs, P8 point to centroid}.
Everything is float64. Bad rows (NaN, Inf, shorter than min_norm) are counted by P1 and weigh 0 in every
later pass; in a cosine store a row counts as its direction. No pass knows a metric's policy for small n.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.csr import (
    F64,
    I64,
    LOOP_SEGMENT_ROWS,
    U64,
    Bool,
    Csr,
    segment_max,
    segment_sum,
)
from fabric_pipelines.analytics.reference.csr_centroid import widened
from fabric_pipelines.analytics.reference.row_admit import INF, NAN, ZERO, mix64
from fabric_pipelines.analytics.sweeps import Sweeps, beside_tiles
from fabric_pipelines.analytics.threads import ONE_THREAD, Scratch, over_rows, run_side_by_side
from fabric_pipelines.analytics.tiles import NearCentres, Tiles

# Centroids closer than this share of the longest one are one point: rounding decides.
COINCIDENT = 1e-12
# Squared distances below this share of the norms lose digits in the expansion and are summed directly.
NEAR = 1e-6
# Tiles round rows and centroids to float32 in one scale: a centroid nearer than this share of it (squared) is sought again in
# float64. Margins and silhouettes are off by 4e-6 at the share itself (2^-24 * |mean| / distance), and by more beyond.
TOLD = 1e-5
# The same share in float64, of (|row| + |mean of all|) * the longest centroid: beyond it products of the rows as they are cost a
# distance no more than 4 sqrt(dim) 2^-53 / share of itself, 1e-10 at 768 dimensions.
TOLD_WIDE = 1e-4
# float64 values of one distance tile, 8 MiB: 1 MiB tiles lost 3x to thread barriers of the BLAS.
TILE_VALUES = 1 << 20
MARGIN_BINS = 50  # of the histogram
MARGIN_NARROW = 0.05  # a row whose margin is below this sits on a border (metric 22)


@dataclass(frozen=True, slots=True)
class Admission:
    """P1. Per row: good, norm, flag, hash. Per cluster: size_raw, size (good rows), sub-counts of bad rows,
    sum and sum of squares of the norms, order-free digest of (id, row hash)."""

    good: Bool
    norm: F64
    hash: U64
    size_raw: I64
    size: I64
    bad: I64
    nan: I64
    inf: I64
    zero: I64
    norm_sum: F64
    norm2_sum: F64
    digest_sum: U64
    digest_xor: U64


@dataclass(frozen=True, slots=True)
class Centroids:
    """P2. weight f64 [N] (0 = left out), mean [K, d] of the rows as stored, resultant = |mean direction|, length2 = |mean|^2."""

    weight: F64
    mean: F64
    resultant: F64
    length2: F64


@dataclass(frozen=True, slots=True)
class Radii:
    """P3. radius2 [N]; per cluster: within = sum of radius2 (W), mean radius (S), smallest radius, medoid id."""

    radius2: F64
    within: F64
    mean_radius: F64
    least_radius: F64
    medoid: I64


@dataclass(frozen=True, slots=True)
class Order:
    """P4. Distinct rows (bytes compared) and quantiles of the radii; per row copy_of, equal for equal rows of a
    cluster."""

    distinct: I64
    copy_of: I64
    median: F64
    p95: F64
    p99: F64


@dataclass(frozen=True, slots=True)
class Pairs:
    """P7. Davies-Bouldin term with its partner (-1: none) and whether some centroids coincide; B_c."""

    ratio: F64
    partner: I64
    coincident: Bool
    between: F64


@dataclass(frozen=True, slots=True)
class Points:
    """P8. Per cluster sums over rows: silhouette, negative silhouettes, narrow and negative margins; q10; own_error: greatest
    difference of a row's distance to its centroid from P3's, in units of what rounding explains (0: it is P3's).
    margins int64 [MARGIN_BINS]: good rows of the whole store by their margin, from -1 to 1."""

    silhouette_sum: F64
    negative: I64
    narrow: I64
    misassigned: I64
    margin_p10: F64
    own_error: F64
    margins: I64


def admit(csr: Csr, sweeps: Sweeps, *, min_norm: float, hashed: bool = True) -> Admission:
    """Without `hashed`, hashes and digests mean nothing and may not be read."""
    norm2, flag, row_hash = sweeps.admit(min_norm, hashed=hashed)
    good = flag == 0
    norm = np.sqrt(np.where(good, norm2, 0.0))
    digest_sum, digest_xor = np.zeros((2, csr.clusters), dtype=np.uint64)
    if hashed:
        with np.errstate(over="ignore"):
            mark = mix64(csr.ids.astype(np.uint64) ^ mix64(row_hash[:, 0] ^ mix64(row_hash[:, 1])))
        digest_sum, digest_xor = sweeps.digests(mark)

    def count(marked: npt.NDArray[np.bool_]) -> I64:
        return segment_sum(marked.astype(np.int64), csr.indptr)

    return Admission(
        good=good,
        norm=norm,
        hash=row_hash,
        size_raw=csr.sizes,
        size=count(good),
        bad=count(~good),
        nan=count((flag & NAN) != 0),
        inf=count((flag & INF) != 0),
        zero=count((flag & ZERO) != 0),
        norm_sum=sweeps.totals(norm),
        norm2_sum=sweeps.totals(norm * norm),
        digest_sum=digest_sum,
        digest_xor=digest_xor,
    )


def _per_row(total: F64, size: I64) -> F64:
    """total / size, 0 where size is 0: metrics answer U_SIZE there."""
    divisor = np.maximum(size, 1).astype(np.float64)
    result: F64 = total / (divisor[:, None] if total.ndim == 2 else divisor)
    return result


def centroid(csr: Csr, sweeps: Sweeps, admitted: Admission, *, cosine: bool) -> Centroids:
    inverse = np.divide(1.0, admitted.norm, out=np.zeros(len(csr.rows)), where=admitted.good)
    direction = _per_row(sweeps.centroid(inverse), admitted.size)
    resultant = np.sqrt(np.einsum("kd,kd->k", direction, direction))
    if cosine:
        return Centroids(inverse, direction, resultant, _length2(direction))
    weight = admitted.good.astype(np.float64)
    mean = _per_row(sweeps.centroid(weight), admitted.size)
    return Centroids(weight, mean, resultant, _length2(mean))


def _length2(rows: F64) -> F64:
    length2: F64 = np.einsum("kd,kd->k", rows, rows)
    return length2


def radius(csr: Csr, sweeps: Sweeps, admitted: Admission, centroids: Centroids) -> Radii:
    radius2 = sweeps.radius2(centroids.weight, centroids.mean)
    nearest = sweeps.nearest(np.sqrt(radius2), admitted.good)
    return Radii(
        radius2=radius2,
        within=sweeps.totals(radius2),
        mean_radius=_per_row(nearest.total, admitted.size),
        least_radius=nearest.least,
        medoid=nearest.least_id,
    )


def order(csr: Csr, sweeps: Sweeps, admitted: Admission, radii: Radii) -> Order:
    owner, length = csr.owner(), np.sqrt(radii.radius2)
    median, p95, p99 = sweeps.quantiles(length, admitted.good, (0.5, 0.95, 0.99))
    first = sweeps.equal_hashes(admitted.hash)
    hashes = admitted.hash
    copy_of = _copies(csr, hashes, owner) if first is None else _compared(csr, first, owner)
    by_copy = np.lexsort((copy_of, owner))
    fresh = np.ones(len(owner), dtype=np.bool_)
    fresh[1:] = (np.diff(owner[by_copy]) != 0) | (np.diff(copy_of[by_copy]) != 0)
    distinct = np.bincount(owner[by_copy[fresh]], minlength=csr.clusters)
    return Order(distinct, copy_of, median, p95, p99)


def _copies(csr: Csr, row_hash: U64, owner: I64) -> I64:
    """A number a row, equal for equal rows of a cluster. Rows are sorted by half of their hash; equal neighbours
    are compared byte by byte, and clusters where the hash lied (never seen) are numbered by their bytes."""
    copy_of = np.zeros(len(owner), dtype=np.int64)
    if len(owner) == 0:
        return copy_of
    ranked = np.lexsort((row_hash[:, 0], owner))
    same = (owner[ranked][1:] == owner[ranked][:-1]) & (
        row_hash[ranked[1:], 0] == row_hash[ranked[:-1], 0]
    )
    hit = np.flatnonzero(same)
    words = csr.rows.view(np.uint32)
    equal = np.empty(len(hit), dtype=np.bool_)
    for part in csr.blocks():
        at = hit[part]
        equal[part] = (words[ranked[at]] == words[ranked[at + 1]]).all(axis=1)
    first = np.ones(len(owner), dtype=np.bool_)
    first[hit[equal] + 1] = False
    copy_of[ranked] = np.cumsum(first)
    return _by_bytes(csr, copy_of, np.unique(owner[ranked[hit[~equal]]]))


def _compared(csr: Csr, first: I64, owner: I64) -> I64:
    """The same from the lowest row with the same hash [N]: its bytes are compared with the row's."""
    hit = np.flatnonzero(first != np.arange(len(first)))
    words = csr.rows.view(np.uint32)
    equal = np.empty(len(hit), dtype=np.bool_)
    for part in csr.blocks():
        at = hit[part]
        equal[part] = (words[at] == words[first[at]]).all(axis=1)
    return _by_bytes(csr, first, np.unique(owner[hit[~equal]]))


def _by_bytes(csr: Csr, copy_of: I64, clusters: I64) -> I64:
    words = csr.rows.view(np.uint32)
    for cluster in clusters:
        own = slice(csr.indptr[cluster], csr.indptr[cluster + 1])
        copy_of[own] = np.unique(words[own], axis=0, return_inverse=True)[1].reshape(-1)
    return copy_of


def pairs(centroids: Centroids, radii: Radii, size: I64, tiles: Tiles | None = None) -> Pairs:
    """K x K in tiles over the filled clusters. `tiles` finds the partners, whose ratios are worked out here; centroids that it
    cannot tell apart go the way of all where there is none."""
    filled = np.flatnonzero(size > 0)
    count = len(size)
    out = Pairs(
        ratio=np.full(count, np.nan),
        partner=np.full(count, -1, dtype=np.int64),
        coincident=np.zeros(count, dtype=np.bool_),
        between=np.zeros(count),
    )
    if len(filled) == 0:
        return out
    mean, spread = centroids.mean[filled], radii.mean_radius[filled]
    total = np.average(mean, axis=0, weights=size[filled])
    apart = mean - total
    out.between[filled] = size[filled] * np.einsum("kd,kd->k", apart, apart)
    same2 = COINCIDENT**2 * np.einsum("kd,kd->k", mean, mean).max()
    asked = np.arange(len(filled))
    if tiles is not None:
        partner, close = tiles.partners(apart, spread)
        asked = np.flatnonzero(close)
        told = np.flatnonzero(~close & (partner >= 0))
        between = np.linalg.norm(apart[told] - apart[partner[told]], axis=1)
        out.ratio[filled[told]] = (spread[told] + spread[partner[told]]) / between
        out.partner[filled[told]] = filled[partner[told]]
    for own, distance2 in _tiles(apart, asked):
        here = np.arange(len(own))
        distance2[here, own] = np.inf
        out.coincident[filled[own]] = (distance2 <= same2).any(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = (spread[own, None] + spread[None, :]) / np.sqrt(distance2)
        ratio[distance2 <= same2] = -np.inf
        ratio[here, own] = -np.inf
        best = ratio.argmax(axis=1)
        found = np.isfinite(ratio[here, best])
        out.ratio[filled[own][found]] = ratio[here, best][found]
        out.partner[filled[own][found]] = filled[best[found]]
    return out


def _tiles(means: F64, asked: I64) -> Iterator[tuple[I64, F64]]:
    """Squared distances of a block of the centred means `asked` to all of them: one matrix product, then direct sums for
    the near pairs, whose digits the expansion loses. 6 to 19 times faster than direct sums for all pairs at
    K = 2,000, d = 128 on two cores."""
    norm2 = np.einsum("kd,kd->k", means, means)
    step = max(1, TILE_VALUES // len(means))
    for start in range(0, len(asked), step):
        rows = asked[start : start + step]
        yield rows, _apart2(means, norm2, rows, slice(0, len(means)))


def _apart2(means: F64, norm2: F64, rows: I64, columns: slice) -> F64:
    """Squared distances of the means `rows` to those of a range, f64 [rows, columns]."""
    others, dim = means[columns], means.shape[1]
    scale = norm2[rows, None] + norm2[columns]
    distance2: F64 = scale - 2.0 * (means[rows] @ others.T)
    near_row, near_column = np.nonzero(distance2 <= NEAR * scale)
    pairs_at_once = max(1, TILE_VALUES // dim)
    for low in range(0, len(near_row), pairs_at_once):
        part = slice(low, low + pairs_at_once)
        apart = means[rows[near_row[part]]] - others[near_column[part]]
        distance2[near_row[part], near_column[part]] = np.einsum("pd,pd->p", apart, apart)
    return distance2


def points(
    csr: Csr, sweeps: Sweeps, admitted: Admission, centroids: Centroids, radii: Radii
) -> Points:
    """N x K in tiles, exact silhouette by moments.

    Mean over a cluster of |x - y|^2 is |x - m|^2 + W / n, so no pair of rows is ever visited: O(N K d) and no
    N x N matrix. In a cosine store this is twice the cosine distance, and the factor cancels. O(rows) memory:
    only the two smallest values a row are kept.
    """
    owner, size, tiles = csr.owner(), admitted.size, sweeps.tiles
    error = np.zeros(csr.clusters)
    other_mean, near2 = np.empty((2, len(csr.rows)))
    if tiles is not None:
        found, error = _by_tiles(csr, centroids, radii, size, owner, tiles)
        other_mean, near2 = found.mean2, found.near2
        asked = admitted.good & (near2 < TOLD * found.reach2)
    else:
        asked = _by_products(csr, admitted, centroids, radii, owner, other_mean, near2)
    if asked.any():
        _nearest_other(csr, centroids, radii, size, owner, asked, other_mean, near2)
    score, margin = np.zeros((2, len(csr.rows)))

    def judge(rows: slice) -> None:
        here, radius2, other = owner[rows], radii.radius2[rows], other_mean[rows]
        own_mean = (size[here] * radius2 + radii.within[here]) / np.maximum(size[here] - 1, 1)
        larger = np.maximum(own_mean, other)
        # a = b, also when both are 0, and singletons score 0 (Rousseeuw 1987)
        np.divide(other - own_mean, larger, out=score[rows], where=larger > 0)
        score[rows][(size[here] < 2) | ~admitted.good[rows]] = 0.0
        own, near = np.sqrt(radius2), np.sqrt(near2[rows])
        both = own + near
        # on top of two centroids at once nothing tells them apart: margin 0
        np.divide(near - own, both, out=margin[rows], where=both > 0)

    over_rows(judge, len(csr.rows))

    def count(marked: Bool) -> I64:
        return segment_sum((marked & admitted.good).astype(np.int64), csr.indptr)

    return Points(
        silhouette_sum=segment_sum(score, csr.indptr),
        negative=count(score < 0),
        narrow=count(margin < MARGIN_NARROW),
        misassigned=count(margin < 0),
        margin_p10=beside_tiles(sweeps, csr).quantiles(margin, admitted.good, (0.10,))[0],
        own_error=error,
        margins=_binned(margin[admitted.good]),
    )


def _binned(margin: F64) -> I64:
    """[MARGIN_BINS] of margins from -1 to 1, both ends in."""
    bin_of: I64 = np.floor((margin + 1) * (MARGIN_BINS / 2)).astype(np.int64)
    bin_of[bin_of == MARGIN_BINS] -= 1
    counted: I64 = np.bincount(bin_of, minlength=MARGIN_BINS).astype(np.int64)
    return counted


def _by_tiles(
    csr: Csr, centroids: Centroids, radii: Radii, size: I64, owner: I64, tiles: Tiles
) -> tuple[NearCentres, F64]:
    """What was found, and how far own distances are from those of P3, relative to the rounding that `tiles` owns up to."""
    filled = np.flatnonzero(size > 0)
    column = np.zeros(csr.clusters, dtype=np.int64)
    column[filled] = np.arange(len(filled))
    mean = centroids.mean[filled]
    origin = np.average(mean, axis=0, weights=size[filled])
    found = tiles.nearest_other(
        centroids.weight, mean, origin, column[owner],
        size[filled].astype(np.float64), radii.within[filled],
    )  # fmt: skip
    apart = np.empty(len(csr.rows))

    def compare(rows: slice) -> None:
        radius2 = radii.radius2[rows]
        apart[rows] = np.abs(found.own2[rows] - radius2)
        apart[rows] /= tiles.rounding * np.maximum(radius2 + found.reach2, np.finfo(float).tiny)
        apart[rows][centroids.weight[rows] == 0] = 0.0

    over_rows(compare, len(apart))
    return found, np.maximum(segment_max(apart, csr.indptr), 0.0)


def _by_products(
    csr: Csr,
    admitted: Admission,
    centroids: Centroids,
    radii: Radii,
    owner: I64,
    mean_least: F64,
    near_least: F64,
) -> Bool:
    """As _nearest_other for all rows, by products of the rows as they are stored; tells which of them it has left to that one.

    |x - m|^2 = |x - p|^2 + (|m|^2 - 2 x m) - (|p|^2 - 2 x p), p the row's own mean and m less the mean of all: a row is neither
    weighed nor moved before the product, only its K numbers are.
    """
    size = admitted.size
    filled, spread = np.flatnonzero(size > 0), _per_row(radii.within, size)
    origin = np.average(centroids.mean[filled], axis=0, weights=size[filled])
    centred = centroids.mean[filled] - origin
    base = np.einsum("kd,kd->k", centred, centred) + 2.0 * (centred @ origin)
    longest = np.sqrt(np.einsum("kd,kd->k", centred, centred).max())
    column = np.zeros(csr.clusters, dtype=np.int64)  # of one without good rows: nobody asks
    column[filled] = np.arange(len(filled))
    place: I64 = column[owner]
    width = min(len(filled), 1024)
    left = np.zeros(len(csr.rows), dtype=np.bool_)
    told = TOLD_WIDE * longest
    away = float(np.linalg.norm(origin))

    scratch, tiles = Scratch(), Scratch()

    def measure(rows: slice) -> None:
        block = csr.rows[rows]
        with scratch.taken(*block.shape) as wide, tiles.taken(len(block), width) as tile:
            near, mean = sought(rows, widened(block, centroids.weight[rows], wide), tile)
        # all that is left of a row here is its norm: weighed it is the norm or 1
        left[rows] = near < told * (admitted.norm[rows] * centroids.weight[rows] + away)
        near_least[rows], mean_least[rows] = np.maximum(near, 0.0), np.maximum(mean, 0.0)

    def sought(rows: slice, block: F64, whole: F64) -> tuple[F64, F64]:
        at, twice = place[rows], -2.0 * centroids.weight[rows]
        near, mean = np.full(len(block), np.inf), np.full(len(block), np.inf)
        inner = np.zeros(len(block))
        for low in range(0, len(filled), width):
            part = slice(low, min(low + width, len(filled)))
            tile = whole.reshape(-1)[: len(block) * (part.stop - low)].reshape(len(block), -1)
            np.matmul(block, centred[part].T, out=tile)
            tile *= twice[:, None]
            tile += base[part]  # the squared distance less |x - p|^2, but for the own column's
            inside = np.flatnonzero((at >= low) & (at < part.stop))
            own = inside, at[inside] - low
            inner[inside] = tile[own]
            tile[own] = np.inf
            np.minimum(near, tile.min(axis=1), out=near)
            tile += spread[filled[part]]
            np.minimum(mean, tile.min(axis=1), out=mean)
        inner -= radii.radius2[rows]
        return near - inner, mean - inner

    # half a block: there is a tile beside it
    run_side_by_side(measure, csr.blocks(2 * max(width, csr.dim)))
    return left & admitted.good


def _nearest_other(
    csr: Csr,
    centroids: Centroids,
    radii: Radii,
    size: I64,
    owner: I64,
    asked: Bool,
    mean_least: F64,
    near_least: F64,
) -> None:
    """Of each row that is `asked`, written over filled clusters other than its own: least mean squared distance to the
    members, and least squared distance to the centroid. Needs two filled clusters.

    |x - m|^2 = |x - o|^2 + |o - m|^2 - 2 (x - o)(m - o), o the row's own mean: products are as small as its radius. With
    one origin for all they are as large as the store, and clusters side by side lost six digits a million radii from others.
    """
    filled, spread = np.flatnonzero(size > 0), _per_row(radii.within, size)
    centred = centroids.mean[filled]
    centred = centred - np.average(centred, axis=0, weights=size[filled])
    norm2, doubled = np.einsum("kd,kd->k", centred, centred), 2.0 * centred
    column = np.zeros(csr.clusters, dtype=np.int64)  # of one without good rows: nobody asks
    column[filled] = np.arange(len(filled))
    place: I64 = column[owner]
    begins: Bool = np.diff(owner, prepend=-1) != 0
    width = min(len(filled), 1024)
    # once for all rows where a tile holds it; else as rows need it, which is K x d a block again
    table = None
    if len(filled) ** 2 <= TILE_VALUES:
        # the library's others would spin on beside ours: twice the time of all sweeps
        with ONE_THREAD:
            table = _apart2(centred, norm2, np.arange(len(filled)), slice(0, len(filled)))

    def measure(rows: slice) -> None:
        weight = centroids.weight[rows]
        block = csr.rows[rows].astype(np.float64)
        left_out = weight == 0
        if left_out.any():
            block[left_out] = 0.0
        block *= weight[:, None]
        start = np.flatnonzero(begins[rows])
        if not begins[rows.start]:
            start = np.concatenate([[0], start])
        here, at = owner[rows][start], place[rows]
        of = np.repeat(np.arange(len(start)), np.diff(start, append=len(block)))
        if len(here) * LOOP_SEGMENT_ROWS > len(block):
            block -= centroids.mean[here][of]
        else:  # without a second block of that size
            for cluster, first, last in zip(here, start, [*start[1:], len(block)], strict=True):
                block[first:last] -= centroids.mean[cluster]
        near, mean = np.full(len(block), np.inf), np.full(len(block), np.inf)
        inner = np.zeros(len(block))
        for low in range(0, len(filled), width):
            end = min(low + width, len(filled))
            part = slice(low, end)
            tile = block @ doubled[part].T
            inside = np.flatnonzero((at >= low) & (at < end))
            own = inside, at[inside] - low
            inner[inside] = tile[own]
            apart = (
                _apart2(centred, norm2, column[here], part)[of]
                if table is None
                else table[at, part]
            )
            np.subtract(apart, tile, out=tile)  # distance2 less the row's own, radius2 + inner
            tile[own] = np.inf
            near = np.minimum(near, tile.min(axis=1))
            tile += spread[filled[part]]
            mean = np.minimum(mean, tile.min(axis=1))
        inner += radii.radius2[rows]
        near += inner
        mean += inner
        wanted = asked[rows]
        near_least[rows][wanted] = np.maximum(near, 0.0)[wanted]
        mean_least[rows][wanted] = np.maximum(mean, 0.0)[wanted]

    blocks = csr.blocks(2 * max(width, csr.dim))
    run_side_by_side(measure, (rows for rows in blocks if asked[rows].any()))
