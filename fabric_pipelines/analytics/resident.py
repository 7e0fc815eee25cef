"""Exact search over rows that lie on a card: the same ranked list, bit for bit, as analytics.search gives.

As there, float32 products with a proven error bound say which rows can possibly belong to the answer; here the card
makes the products and the choice. What stays, a dozen rows a query, is fetched from the card itself and scored
in float64 by the one function that defines a distance. So the answer is that of the CPU twin down to the last bit, and a
bit that rotted on the card shows in it. Queries that the card cannot settle are named, not guessed: k above
K_MAX, values that overflow float32, more than CAPACITY rows within rounding of the k-th (copies of one row).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from fabric_pipelines.analytics import kernels
from fabric_pipelines.analytics.reference.flat_select import SLOTS
from fabric_pipelines.analytics.search import (
    NO_ID,
    Float64s,
    Floats,
    Ids,
    Metric,
    Queries,
    Ranked,
    pair_distance,
)
from fabric_pipelines.device.card import Card, DeviceArray

K_MAX = 256
ROW_TILE = 1 << 16
QUERY_TILE = 512
CAPACITY = 2048  # rows a query may keep until they are scored
GATHER_ROWS = 1 << 14
SCORED_FLOATS = 1 << 17  # of float64 at a time
LENGTH_MAX = 1e18  # squares and products of longer rows or queries overflow float32
ROWS_MAX = 1 << 31  # the kernel counts the rows that a query keeps in 32 bits
HALF_MAX = 6e4  # components of queries that are sent as float16
# Tensor cores align the terms of a sum to the largest and cut the rest off (Fasi et al. 2021, Numerical behavior of
# NVIDIA tensor cores): two bits more than rounding each sum to nearest.
UNIT = {np.dtype("<f4"): 2.0**-24, np.dtype("<f2"): 2.0**-22}


def workspace_bytes(count: int, dim: int) -> int:
    """What a ResidentScan takes beside the rows: no search allocates anything."""
    tile = min(ROW_TILE, count)
    return (
        4 * QUERY_TILE * (tile + SLOTS + 2 * dim + 4)
        + 12 * QUERY_TILE * CAPACITY
        + GATHER_ROWS * (4 * dim + 16)
    )


class ResidentScan:
    """rows float32 or float16 [n, d] and ids int64 [n] on `card`; length float32 [n] there too, NaN for a row that does
    not count, otherwise its norm. length_max: the largest of them."""

    def __init__(
        self,
        card: Card,
        rows: DeviceArray,
        ids: DeviceArray,
        length: DeviceArray,
        *,
        metric: Metric,
        length_max: float,
    ) -> None:
        self._card, self._rows, self._ids, self._length = card, rows, ids, length
        self._metric, self._fits = metric, length_max < LENGTH_MAX and len(rows) < ROWS_MAX
        self._lock = threading.Lock()  # one search at a time: they share what follows
        count, dim = rows.shape
        self._xq = card.empty((QUERY_TILE, dim), rows.dtype)
        self._xq_rest = card.empty((QUERY_TILE, dim), rows.dtype)
        self._reach = card.empty(QUERY_TILE, np.float32)
        self._slack = card.empty(QUERY_TILE, np.float32)
        self._products = card.empty((QUERY_TILE, max(1, min(ROW_TILE, count))), np.float32)
        self._bound = card.empty((QUERY_TILE, SLOTS), np.float32)
        self._limit = card.empty(QUERY_TILE, np.float32)
        self._count = card.empty(QUERY_TILE, np.int32)
        self._taken = card.empty(QUERY_TILE * CAPACITY, np.int64)
        self._lower = card.empty(QUERY_TILE * CAPACITY, np.float32)
        self._places = card.empty(GATHER_ROWS, np.int64)
        self._near = card.empty((GATHER_ROWS, dim), rows.dtype)
        self._names = card.empty(GATHER_ROWS, np.int64)

    def search(self, queries: Queries, k: int) -> tuple[Ranked, Ids]:
        """The k nearest rows of each query, and the numbers of the queries that were not settled here: their
        lists are empty."""
        answer = Ranked(
            np.full((len(queries), k), np.nan),
            np.full((len(queries), k), NO_ID, np.int64),
            np.zeros(len(queries), np.int64),
        )
        asked = self._settled_here(queries, k)
        left = [np.setdiff1d(queries.open, asked)]
        with self._lock:
            for first in range(0, len(asked), QUERY_TILE):
                part = asked[first : first + QUERY_TILE]
                found, crowded = self._possible(queries, part, k)
                _rank(answer, found, k)
                left.append(crowded)
        return answer, np.concatenate(left)

    def candidates(self, queries: Queries, k: int) -> tuple[Ids, Ids, Ids]:
        """Number of a query and place of a row on the card, for every row that can be among its k nearest; and the
        numbers of the queries that were not settled here."""
        asked = self._settled_here(queries, k)
        left, chosen = [np.setdiff1d(queries.open, asked)], [(asked[:0], asked[:0])]
        with self._lock:
            for first in range(0, len(asked), QUERY_TILE):
                which, rows, crowded = self._chosen(queries, asked[first : first + QUERY_TILE], k)
                chosen.append((which, rows))
                left.append(crowded)
        which, rows = (np.concatenate(column) for column in zip(*chosen, strict=True))
        return which, rows, np.concatenate(left)

    def _settled_here(self, queries: Queries, k: int) -> Ids:
        if not self._fits or k > K_MAX or not len(self._rows):
            return np.empty(0, np.int64)
        good = queries.norms[queries.open] < LENGTH_MAX
        if self._rows.dtype.itemsize == 2 and self._metric == "l2":
            good &= np.abs(queries.wide[queries.open]).max(axis=1) < HALF_MAX
        return queries.open[good]

    def _possible(self, queries: Queries, asked: Ids, k: int) -> tuple[_Found, Ids]:
        """Every row that can be among the k nearest of each query, scored; and the queries with too many."""
        which, rows, crowded = self._chosen(queries, asked, k)
        return self._scored(queries, which, rows), crowded

    def _chosen(self, queries: Queries, asked: Ids, k: int) -> tuple[Ids, Ids, Ids]:
        """As `candidates`, for at most QUERY_TILE queries."""
        count = len(asked)
        self._send(queries, asked)
        self._choose(count, k)
        taken_of = self._card.download(self._count[:count])
        depth = min(int(taken_of.max(initial=0)), CAPACITY)
        limit = self._card.download(self._limit[:count])
        rows = self._card.download(self._taken[: depth * count]).reshape(depth, count)
        lower = self._card.download(self._lower[: depth * count]).reshape(depth, count)
        crowded = taken_of > CAPACITY
        filled = np.arange(depth)[:, None] < taken_of[None, :]
        # Early tiles were judged by a limit that has sunk since.
        place, which = np.nonzero(filled & (lower <= limit[None, :]) & ~crowded[None, :])
        return asked[which], rows[place, which], asked[crowded]

    def _send(self, queries: Queries, asked: Ids) -> None:
        wide, norms = queries.wide[asked], queries.norms[asked]
        if self._metric == "cosine":
            wide, norms = wide / norms[:, None], np.ones(len(asked))
        kind = self._rows.dtype
        sent = wide.astype(kind)
        rest = wide - sent
        if kind.itemsize == 2:  # what eleven bits leave over goes along as a second factor
            more = rest.astype(kind)
            rest = rest - more
            self._card.store(self._xq_rest[: len(asked)], more)
        slack = np.sqrt(np.square(rest).sum(axis=1))
        self._card.store(self._xq[: len(asked)], sent)
        self._card.store(self._reach[: len(asked)], norms.astype(np.float32))
        self._card.store(self._slack[: len(asked)], _rounded_up(slack))

    def _choose(self, count: int, k: int) -> None:
        card, dim = self._card, self._rows.shape[1]
        out = (self._count, self._taken, self._lower)
        card.fill(self._bound, 0x7F)
        card.fill(self._count, 0)
        for first in range(0, len(self._rows), ROW_TILE):
            rows = self._rows[first : first + ROW_TILE]
            card.products(self._xq[:count], rows, self._products)
            if rows.dtype.itemsize == 2:
                card.products(self._xq_rest[:count], rows, self._products, add=True)
            tile = kernels.TileScores(
                products=self._products,
                length=self._length[first : first + ROW_TILE],
                reach=self._reach,
                slack=self._slack,
                queries=count,
                rows=len(rows),
                gamma=_gamma(dim, UNIT[rows.dtype]),
                tiny=dim * float(np.finfo(np.float32).tiny),
                metric=self._metric,
            )
            kernels.flat_slots(card, tile, self._bound)
            kernels.flat_limit(card, self._bound, count, k, self._limit)
            kernels.flat_take(card, tile, first, self._limit, CAPACITY, out)

    def _scored(self, queries: Queries, which: Ids, rows: Ids) -> _Found:
        names, distances = np.empty(len(rows), np.int64), np.empty(len(rows))
        for start in range(0, len(rows), GATHER_ROWS):
            part = slice(start, start + GATHER_ROWS)
            vectors, names[part] = self._fetch(rows[part])
            distances[part] = _distances(queries, which[part], vectors)
        return _Found(which, names, distances)

    def _fetch(self, rows: Ids) -> tuple[Floats, Ids]:
        """Vectors and ids of these rows, as the card holds them."""
        count = len(rows)
        self._card.store(self._places[:count], np.ascontiguousarray(rows))
        kernels.flat_words(self._card, self._rows, self._places, count, self._near)
        kernels.flat_words(self._card, self._ids, self._places, count, self._names)
        near = self._card.download(self._near[:count])
        return near.astype(np.float32, copy=False), self._card.download(self._names[:count])


@dataclass(frozen=True, slots=True)
class _Found:
    """Candidate i is row `names[i]` for query number `which[i]`, at distances[i]."""

    which: Ids
    names: Ids
    distances: Float64s


def _distances(queries: Queries, which: Ids, vectors: Floats) -> Float64s:
    """Of query which[i] to vectors[i], in pieces that stay in a core's cache: 4 times as fast as all at once."""
    out = np.empty(len(which))
    step = max(1, SCORED_FLOATS // queries.dim)
    for start in range(0, len(which), step):
        part = slice(start, start + step)
        out[part] = pair_distance(queries.wide[which[part]], vectors[part], queries.metric)
    return out


def _rank(answer: Ranked, found: _Found, k: int) -> None:
    """Write the k nearest of each query's candidates, by (D, id), into `answer`."""
    order = np.lexsort((found.names, found.distances, found.which))
    owner = found.which[order]
    place = np.arange(len(owner)) - np.searchsorted(owner, owner)
    kept = place < k
    owner, place, order = owner[kept], place[kept], order[kept]
    answer.D[owner, place] = found.distances[order]
    answer.I[owner, place] = found.names[order]
    answer.found[:] += np.bincount(owner, minlength=len(answer.found))


def _rounded_up(values: Float64s) -> Floats:
    return np.nextafter(values.astype(np.float32), np.float32(np.inf))


def _gamma(dim: int, unit: float) -> float:
    """As in analytics.search: d roundings of a product, 32 more for everything after it."""
    return (dim + 32) * unit / (1 - (dim + 32) * unit)
