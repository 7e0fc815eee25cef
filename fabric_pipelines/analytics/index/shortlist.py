"""Which rows may be among the k best of each query: lower bounds of scores in, a short list of candidates out.

A row's score is at least `low` and at most `low + slack` of the row, plus a `gap` of the query. The k-th smallest upper
bound of what was seen is a proven limit: a row whose lower bound lies above it cannot be among the k nearest. Limits
only tell which rows are worth keeping; the answer is ranked in float64 by who asked, so neither the order of offers
nor two threads that update one limit at a time can change it (a lost update leaves an older limit, which holds as
well).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fabric_pipelines.analytics.index.store import F64
from fabric_pipelines.analytics.search import FLOAT32_SQUARE_MAX, Floats, Ids

GROUPS = 256


class Shortlist:
    """For `count` queries. gap [count]: what their scores may be off by, both ways together, beside the rows' slack."""

    def __init__(self, count: int, k: int, gap: F64) -> None:
        assert k >= 1, "a list of no place"
        self.k, self._gap = k, gap
        self._limit = np.full(count, np.inf)
        self._parts: list[tuple[Ids, Ids, F64, F64]] = []

    def offer(self, asked: Ids, low: Floats, slots: Ids, slack: Floats | None) -> None:
        """low [m, n] of the rows at slots [n] for the queries `asked` [m], smaller is nearer; slack [n], None: 0."""
        limit, gap = self._limit[asked], self._gap[asked]
        near = low <= _upward(limit + gap, low.dtype)[:, None]
        if np.count_nonzero(near) > self.k * (1 + len(asked) // 2):
            tighter = np.flatnonzero(np.count_nonzero(near, axis=1) > self.k)
            if len(tighter):
                high = low if len(tighter) == len(asked) else low[tighter]
                limit[tighter] = np.minimum(
                    limit[tighter], _kth(high if slack is None else high + slack, self.k)
                )
                self._limit[asked] = limit
                near = low <= _upward(limit + gap, low.dtype)[:, None]
        flat = np.flatnonzero(near)
        which, row = np.divmod(flat, low.shape[1])
        least = low.ravel()[flat].astype(np.float64)
        most = least if slack is None else least + slack[row]
        self._parts.append((asked[which], slots[row], least, most))

    def candidates(self) -> tuple[Ids, Ids]:
        """Query and slot of every row that all that was seen leaves possible."""
        if not self._parts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        query, slot, low, high = (
            np.concatenate(column) for column in zip(*self._parts, strict=True)
        )
        limit = limits_of(query, high, len(self._limit), self.k) + self._gap
        kept = low <= limit[query]
        return query[kept], slot[kept]


def limits_of(query: Ids, high: F64, count: int, k: int) -> F64:
    """The k-th smallest `high` of each query, rounded up to float32 however it is found; inf where one has fewer."""
    limit = np.full(count, np.inf)
    if count == 1:
        if len(high) >= k:
            limit[0] = np.partition(high, k - 1)[k - 1]
        return _upward32(limit)
    held = np.bincount(query, minlength=count)
    full = np.flatnonzero(held >= k)
    at = (np.cumsum(held) - held)[full] + k - 1
    if float(np.abs(high).max(initial=0.0)) > FLOAT32_SQUARE_MAX:
        limit[full] = high[np.lexsort((high, query))[at]]
        return _upward32(limit)
    # query and value as one word, whose order is theirs: sorted ten times as fast as by two keys
    bits = _upward32(high).astype(np.float32).view(np.int32)
    ordered = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
    words = (query << 32) + (ordered.astype(np.int64) + (1 << 31))
    words.sort()
    kth = ((words[at] & 0xFFFFFFFF) - (1 << 31)).astype(np.int32)
    limit[full] = (kth ^ ((kth >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)
    return limit


def _upward32(values: F64) -> F64:
    """The least float32 that is no less; what lies beyond float32 stays as it is."""
    with np.errstate(over="ignore"):
        near = values.astype(np.float32)
    up = np.where(near < values, np.nextafter(near, np.float32(np.inf)), near).astype(np.float64)
    inside: F64 = np.where(np.abs(values) > FLOAT32_SQUARE_MAX, values, up)
    return inside


def places(owner: Ids) -> Ids:
    """Number of each entry within its run; `owner` is sorted."""
    starts = np.concatenate(([0], np.flatnonzero(owner[1:] != owner[:-1]) + 1))
    sizes = np.concatenate((starts[1:], [len(owner)])) - starts
    numbers: Ids = np.arange(len(owner)) - np.repeat(starts, sizes)
    return numbers


def _kth(high: Floats, k: int) -> Floats:
    """At least the k-th smallest of each row [m, n], n > k, and seldom more.

    Of columns taken GROUPS apart the least is kept, and the k-th smallest of these is proven by k rows: 15 times as
    fast as a partition of 4,096 columns."""
    groups = max(GROUPS, 16 * k)
    folds = high.shape[1] // groups
    if folds > 1:
        high = high[:, : folds * groups].reshape(len(high), folds, groups).min(axis=1)
    kth: Floats = np.partition(high, k - 1, axis=1)[:, k - 1]
    return kth


def _upward(bound: F64, kind: np.dtype[Any]) -> Floats:
    """Rounded up to the scores' own type (a wider comparison would widen the tile), below its infinity."""
    top = np.finfo(kind).max
    with np.errstate(over="ignore"):
        cast = np.nextafter(bound.astype(kind), kind.type(np.inf))
    below: Floats = np.minimum(cast, top)
    return below
