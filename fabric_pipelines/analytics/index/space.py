"""The space that scans work in, where squared distance orders rows as either metric does.

Under cosine a row is its direction, under l2 its difference from a centre that is fixed when an index is built, so
that a common offset eats no digits. A scan's score is |x|^2 / 2 - q.x (under cosine -q.x), computed in float32, with
a bound on how far it may be from the truth; where squares would overflow float32 everything is float64.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_pipelines.analytics.index.shortlist import places
from fabric_pipelines.analytics.index.store import F32, F64, ROWS_AT_ONCE, Rows
from fabric_pipelines.analytics.index.traffic import SearchHealth, Watch
from fabric_pipelines.analytics.search import (
    FLOAT32_SQUARE_MAX,
    NO_ID,
    Floats,
    Ids,
    Metric,
    dot_error,
    have_distance,
    norms_of,
    paired,
)
from fabric_pipelines.analytics.threads import side_by_side
from fabric_pipelines.errors import UsageError

PIECE_FLOATS = (
    1 << 17
)  # 1 MiB a gather: in pieces of 32 MiB the same distances take four times as long
PAIRS_FOR_THREADS = 1 << 14
CENTRE_ROWS = 2048


@dataclass(frozen=True, slots=True)
class Answer:
    """D float64 [q, k] ascending (NaN where nothing was found), I int64 [q, k] (NO_ID there), found int64 [q].

    D is a distance: 1 - cos under "cosine", squared under "l2". Unpacks as `D, I, found = answer`."""

    D: F64
    I: Ids  # noqa: E741 (the field's word)
    found: Ids
    metric: Metric
    health: SearchHealth | None = None  # where it was asked for

    def __iter__(self) -> Iterator[Any]:
        return iter((self.D, self.I, self.found))


@dataclass(frozen=True, slots=True)
class Space:
    metric: Metric
    centre: F64

    @classmethod
    def around(cls, vectors: F32, metric: Metric) -> Space:
        """Centred on the middle of rows [n, d] that can be scored: the median of some, which one row far out does not
        move. Any centre gives the same answers."""
        centre = np.zeros(vectors.shape[1])
        if metric == "l2" and len(vectors):
            some = vectors[:: -(-len(vectors) // CENTRE_ROWS)]
            centre = np.median(some.astype(np.float64), axis=0)
        return cls(metric, centre)

    @property
    def dim(self) -> int:
        return len(self.centre)

    def working(self, rows: Floats, norms: F64) -> tuple[Floats, F64]:
        """Rows [n, d] that can be scored as they are multiplied, and their lengths there [n]."""
        reach, parts = np.empty(len(rows)), []
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            wide = np.asarray(rows[part], np.float64)
            wide = wide / norms[part, None] if self.metric == "cosine" else wide - self.centre
            with np.errstate(over="ignore", under="ignore"):
                reach[part] = norms_of(wide)
            top = float(reach[part].max(initial=0.0))
            parts.append(wide.astype(np.float32) if 4 * top * top < FLOAT32_SQUARE_MAX else wide)
        return (np.concatenate(parts) if parts else np.empty((0, self.dim), np.float32)), reach

    def row_terms(self, reach: F64, kind: np.dtype[Any]) -> tuple[Floats | None, Floats | None]:
        """What is added to -q.x to make a lower bound of the score, and how far below the upper bound that is.

        A score is off by at most g (|q| |x| + |x|^2 / 2) (search.py has the derivation of g), which is no more than
        g |x|^2 + g |q|^2: a part of the row and a part of the query, so that one long row does not blur the others."""
        if self.metric == "cosine":
            return None, None
        square = reach * reach
        return (square / 2 - self._off * square - self._tiny).astype(kind), (
            2 * self._off * square + 2 * self._tiny
        ).astype(kind)

    def gap(self, reach: F64) -> F64:
        """The queries' part, both ways together."""
        if self.metric == "cosine":
            return np.full(len(reach), 2 * self._off)
        return 2 * self._off * reach * reach + 2 * self._tiny

    @property
    def _off(self) -> float:
        return dot_error(self.dim, float(np.finfo(np.float32).eps) / 2)

    @property
    def _tiny(self) -> float:
        return self.dim * float(np.finfo(np.float32).tiny)


class Asked:
    """Queries [q, d] made ready: `open` [o] are those that can be scored, `working` [o, d] and `reach` [o] theirs."""

    def __init__(self, xq: Floats, space: Space) -> None:
        self.wide: F64 = np.ascontiguousarray(np.atleast_2d(xq), dtype=np.float64)
        if self.wide.ndim != 2 or self.wide.shape[1] != space.dim:
            raise UsageError(
                f"queries of shape {np.shape(xq)} do not fit an index of dimension {space.dim}"
            )
        self.space = space
        with np.errstate(over="ignore", invalid="ignore"):
            self.norms = norms_of(self.wide)
        self.open: Ids = np.flatnonzero(have_distance(self.norms, space.metric))
        self.working, self.reach = space.working(self.wide[self.open], self.norms[self.open])

    def __len__(self) -> int:
        return len(self.wide)

    def only(self, numbers: Ids) -> Asked:
        """The same queries, of which only `numbers` (places in `open`) are scanned for."""
        some = copy.copy(self)
        some.open = self.open[numbers]
        some.working, some.reach = self.working[numbers], self.reach[numbers]
        return some


def ranked(
    asked: Asked, rows: Rows, query: Ids, slot: Ids, k: int, watch: Watch | None = None
) -> tuple[Answer, Ids]:
    """The k nearest of the candidates (number in `asked.open`, slot): in float64, ties to the lower id; and their slots
    [q, k] (-1: none)."""
    distances = distances_of(asked, rows, query, slot, watch)
    query = asked.open[query]
    names = rows.ids[slot]
    order = np.lexsort((names, distances, query))
    query = query[order]
    place = places(query)
    within = place < k
    at = (query[within], place[within])
    out = Answer(
        np.full((len(asked), k), np.nan),
        np.full((len(asked), k), NO_ID, np.int64),
        np.bincount(query[within], minlength=len(asked)).astype(np.int64),
        asked.space.metric,
    )
    order = order[within]
    slots = np.full((len(asked), k), -1, np.int64)
    out.D[at], out.I[at], slots[at] = distances[order], names[order], slot[order]
    return out, slots


def distances_of(
    asked: Asked, rows: Rows, query: Ids, slot: Ids, watch: Watch | None = None
) -> F64:
    """Of query[i] (number in `asked.open`) to the stored row at slot[i], in float64."""
    query = asked.open[query]
    distances = np.empty(len(query))
    step = max(1, PIECE_FLOATS // rows.dim)

    def score(start: int) -> None:
        part = slice(start, start + step)
        q, x = query[part], slot[part]
        wide = rows.vectors[x].astype(np.float64)
        if watch is not None:
            watch.rows(x, wide, rows.norms[x])
        lengths = asked.norms[q] * rows.norms[x]
        distances[part] = paired(asked.wide[q], wide, lengths, asked.space.metric)

    pieces = range(0, len(query), step)
    if len(query) >= PAIRS_FOR_THREADS:
        for _ in side_by_side(score, pieces):
            pass
    else:
        for start in pieces:
            score(start)
    if watch is not None:
        watch.ranked += len(query)
    return distances
