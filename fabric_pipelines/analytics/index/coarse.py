"""The lists of an inverted file: centroids by balanced k-means, and the nearest of them, exact.

Where rows have more clusters than there are lists, k-means leaves lists of a dozen clusters around the middle, which are
nearest to much and slow for all. Three things hold the sizes: while training, the centroids of lists below a quarter of
the mean move into lists above the bound; after it, a list that is still large is cut by k-means of its own, so that
there are more lists than were asked for; and when rows are placed, no list takes more than its bound: the nearest rows
stay, the others bid for the nearest list that has room. (Bounds at placing alone leave rows where no query looks:
docs/rejected.md.) Everything has one order (rows by id, ties to the lower list, then to the lower id), starts from
rows with the smallest mixed ids, and compares float64 distances where float32 cannot tell: same rows, same lists, on any
number of threads. Rows are in working space (space.py), where under cosine centroids have length one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fabric_pipelines.analytics.index.lists import tiles
from fabric_pipelines.analytics.index.shortlist import Shortlist, places
from fabric_pipelines.analytics.index.store import F64
from fabric_pipelines.analytics.search import Floats, Ids, Metric, dot_error, norms_of
from fabric_pipelines.analytics.threads import run_side_by_side
from fabric_pipelines.ledger import hash64

TRAINING_ROWS_PER_LIST = 256  # more rows hardly move a centroid (faiss uses the same cap)
SMALL = 0.25  # of the mean size: such a list gives its centroid to one that is too large
CUTS_MAX = 3  # rounds of cutting
ROOM_TO_GROW = (
    0.8  # of the bound: lists above it are cut, since all rows are more than those trained on
)
ROWS_AT_ONCE = 1 << 13
PIECE_FLOATS = 1 << 17


class Coarse:
    """centroids float32 or float64 [lists, d]."""

    def __init__(self, centroids: Floats) -> None:
        self.centroids = np.ascontiguousarray(centroids)
        wide = self.centroids.astype(np.float64)
        self._half = (wide * wide).sum(axis=1) / 2
        self._top = float(norms_of(wide).max(initial=0.0))

    def __len__(self) -> int:
        return len(self.centroids)

    def nearest(self, rows: Floats, count: int) -> tuple[F64, Ids]:
        """Squared distances [n, count] in float64 and lists of the nearest centroids, ties to the lower list."""
        count = min(count, len(self))
        D, lists = np.empty((len(rows), count)), np.empty((len(rows), count), np.int64)

        def block(start: int) -> None:
            part = slice(start, start + ROWS_AT_ONCE)
            D[part], lists[part] = self._of_block(rows[part], count)

        starts = range(0, len(rows), ROWS_AT_ONCE)
        if len(starts) > 1:
            run_side_by_side(block, starts)
        elif len(starts):
            block(0)
        return D, lists

    def _of_block(self, rows: Floats, count: int) -> tuple[F64, Ids]:
        found = Shortlist(len(rows), count, self._gap(rows))
        every = np.arange(len(rows))
        for queries, columns in tiles(len(rows), len(self)):
            products = rows[queries] @ self.centroids[columns].T
            low = self._half[columns].astype(products.dtype) - products
            found.offer(every[queries], low, np.arange(len(self))[columns], None)
        query, number = found.candidates()
        distances = np.empty(len(query))
        step = max(1, PIECE_FLOATS // self.centroids.shape[1])
        for start in range(0, len(query), step):
            part = slice(start, start + step)
            apart = rows[query[part]].astype(np.float64) - self.centroids[number[part]]
            distances[part] = (apart * apart).sum(axis=1)
        order = np.lexsort((number, distances, query))
        order = order[places(query[order]) < count]
        return distances[order].reshape(-1, count), number[order].reshape(-1, count)

    def _gap(self, rows: Floats) -> F64:
        """Twice what a score of each row may be off by (search.py has the derivation)."""
        reach = norms_of(rows.astype(np.float64))
        off = dot_error(rows.shape[1], float(np.finfo(np.float32).eps) / 2)
        tiny = rows.shape[1] * float(np.finfo(np.float32).tiny)
        gap: F64 = off * (reach + self._top) ** 2 + 2 * tiny
        return gap


def train(
    rows: Floats,
    ids: Ids,
    count: int,
    *,
    seed: int,
    metric: Metric,
    iterations: int,
    balance: float,
) -> Floats:
    """Centroids [lists, d] of rows [n, d] with different ids [n], n >= count: `count` of them, and more where lists
    above `balance` times the mean had to be cut."""
    mixed = _mixed_order(ids, seed)
    sample = mixed[: count * TRAINING_ROWS_PER_LIST]
    sample = sample[np.argsort(ids[sample])]
    kept, names = rows[sample], ids[sample]
    mean = len(kept) / count
    plan = _Plan(seed, metric, iterations, balance)
    centroids = _lloyd(kept, names, rows[mixed[:count]].copy(), plan)
    for _ in range(CUTS_MAX):
        labels = Coarse(centroids).nearest(kept, 1)[1][:, 0]
        sizes = np.bincount(labels, minlength=len(centroids))
        large = np.flatnonzero(sizes > ROOM_TO_GROW * balance * mean)
        parts = [_cut(kept, names, np.flatnonzero(labels == one), mean, plan) for one in large]
        cut = [number for number, part in zip(large, parts, strict=True) if len(part) > 1]
        if not cut:
            break
        more = [part for part in parts if len(part) > 1]
        centroids = np.concatenate([np.delete(centroids, cut, axis=0), *more])
    return centroids


@dataclass(frozen=True, slots=True)
class _Plan:
    seed: int
    metric: Metric
    iterations: int
    balance: float


def _cut(rows: Floats, ids: Ids, members: Ids, mean: float, plan: _Plan) -> Floats:
    """Different centroids of about `mean` rows each for one list; one where all its rows are copies."""
    first = members[_mixed_order(ids[members], plan.seed)][: int(np.ceil(len(members) / mean))]
    found = _lloyd(rows[members], ids[members], rows[first].copy(), plan)
    _, where = np.unique(found, axis=0, return_index=True)
    return found[np.sort(where)]


def _lloyd(rows: Floats, ids: Ids, centroids: Floats, plan: _Plan) -> Floats:
    """`centroids`, moved; it is written to."""
    salted, labels = _salted(ids, plan.seed), np.full(len(rows), -1, np.int64)
    for step in range(plan.iterations):
        near = Coarse(centroids).nearest(rows, 1)[1][:, 0]
        if np.array_equal(near, labels):
            break
        labels = near
        centroids = _means(rows, labels, centroids, plan.metric)
        if step < plan.iterations - 2:  # the last rounds settle what was moved
            _refill(centroids, rows, labels, salted, plan.balance)
    return centroids


def capacity_of(rows: int, lists: int, balance: float) -> int:
    """The most rows that one list takes."""
    return max(1, int(np.ceil(balance * rows / lists)))


def place(rows: Floats, ids: Ids, coarse: Coarse, capacity: int) -> Ids:
    """List [n] of each row, none with more than `capacity` rows.

    In rounds: every row that has no list bids for the nearest one with room; a list takes the nearest of those
    that bid (ties to the lower id) until it is full."""
    assert capacity * len(coarse) >= len(rows), "not enough room for all rows"
    labels = np.full(len(rows), -1, np.int64)
    room = np.full(len(coarse), capacity, np.int64)
    left = np.arange(len(rows))
    while len(left):
        free = np.flatnonzero(room)
        some = coarse if len(free) == len(coarse) else Coarse(coarse.centroids[free])
        D, near = some.nearest(rows[left], 1)
        bid = free[near[:, 0]]
        order = np.lexsort((ids[left], D[:, 0], bid))
        taken = order[places(bid[order]) < room[bid[order]]]
        labels[left[taken]] = bid[taken]
        room -= np.bincount(bid[taken], minlength=len(coarse))
        left = np.delete(left, taken)
    return labels


def _refill(centroids: Floats, rows: Floats, labels: Ids, salted: F64, balance: float) -> None:
    """Move the centroids of small lists onto rows of lists above the bound, largest first."""
    sizes = np.bincount(labels, minlength=len(centroids))
    bound = balance * len(rows) / len(centroids)
    small = np.flatnonzero(sizes < SMALL * len(rows) / len(centroids))
    spare = small[np.argsort(sizes[small], kind="stable")].tolist()
    over = np.flatnonzero(sizes > bound)
    for number in over[np.argsort(-sizes[over], kind="stable")]:
        members = np.flatnonzero(labels == number)
        members = members[np.argsort(salted[members], kind="stable")]
        for row in members[: int(sizes[number] / bound)]:
            if not spare:
                return
            centroids[spare.pop(0)] = rows[row]


def _means(rows: Floats, labels: Ids, before: Floats, metric: Metric) -> Floats:
    """Mean of each list, summed in float64 row after row; one that has none keeps its centroid."""
    order = np.argsort(labels, kind="stable")
    present, starts = np.unique(labels[order], return_index=True)
    after = before.copy()
    for number, part in zip(present, np.split(order, starts[1:]), strict=True):
        mean = rows[part].sum(axis=0, dtype=np.float64) / len(part)
        if metric == "cosine":
            length = float(np.sqrt((mean * mean).sum()))
            if length <= 1e-9:  # directions that cancel out
                continue
            mean = mean / length
        after[number] = mean
    return after


def _salted(ids: Ids, seed: int) -> F64:
    return hash64(ids ^ hash64(np.array([seed], np.int64)).astype(np.int64)[0]).astype(np.float64)


def _mixed_order(ids: Ids, seed: int) -> Ids:
    """Row numbers in an order that looks random and depends on nothing but id and seed."""
    salt = hash64(np.array([seed], np.int64)).astype(np.int64)[0]
    return np.lexsort((ids, hash64(ids ^ salt))).astype(np.int64)
