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
from fabric_pipelines.analytics.search import Floats, Ids


class Shortlist:
    """For `count` queries. gap [count]: what their scores may be off by, both ways together, beside the rows' slack."""

    def __init__(self, count: int, k: int, gap: F64) -> None:
        assert k >= 1, "a list of no place"
        self.k, self._gap = k, gap
        self._limit = np.full(count, np.inf)
        self._parts: list[tuple[Ids, Ids, F64, F64]] = []

    def offer(self, asked: Ids, low: Floats, slots: Ids, slack: Floats | None) -> None:
        """low [m, n] of the rows at slots [n] for the queries `asked` [m], smaller is nearer; slack [n], None: 0."""
        limit = self._limit[asked]
        near = low <= _upward(limit + self._gap[asked], low.dtype)[:, None]
        passed = np.count_nonzero(near, axis=1)
        if passed.max(initial=0) > self.k:
            tighter = np.flatnonzero(passed > self.k)
            high = low if len(tighter) == len(asked) else low[tighter]
            if slack is not None:
                high = high + slack
            kth = np.partition(high, self.k - 1, axis=1)[:, self.k - 1]
            limit[tighter] = np.minimum(limit[tighter], kth)
            self._limit[asked] = limit
            near = low <= _upward(limit + self._gap[asked], low.dtype)[:, None]
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
        order = np.lexsort((high, query))
        owner = query[order]
        kth = order[places(owner) == self.k - 1]
        limit = np.full(len(self._limit), np.inf)
        limit[query[kth]] = high[kth] + self._gap[query[kth]]
        kept = low <= limit[query]
        return query[kept], slot[kept]


def places(owner: Ids) -> Ids:
    """Number of each entry within its run; `owner` is sorted."""
    if not len(owner):
        return np.empty(0, np.int64)
    starts = np.flatnonzero(np.diff(owner, prepend=owner[0] - 1))
    return np.arange(len(owner)) - np.repeat(starts, np.diff(starts, append=len(owner)))


def _upward(bound: F64, kind: np.dtype[Any]) -> Floats:
    """Rounded up to the scores' own type (a wider comparison would widen the tile), below its infinity."""
    top = np.finfo(kind).max
    with np.errstate(over="ignore"):
        cast = np.nextafter(bound.astype(kind), kind.type(np.inf))
    return np.minimum(cast, top)
