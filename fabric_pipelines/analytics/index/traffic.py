"""What the searches themselves say of an index: lists that are asked and give nothing, and rows that changed since they came.

Counted in the sweep that answers, from rows and scores that it looks at anyway, and from float64 distances, so the
same searches give the same numbers on a CPU and on a card. All are whole numbers: those of several searches are added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fabric_pipelines.analytics.index.store import F64
from fabric_pipelines.analytics.search import Floats, Ids, norms_of

BINS = 64
LEVEL = BINS // 2  # the bin of a list whose nearest row is as near as the query's last neighbour


@dataclass(frozen=True, slots=True)
class SearchHealth:
    """By list [lists]: probe (queries that looked at it), hit (rows of it in an answer), wasted (probes without one);
    none for a kind without lists of its own. margin [64]: probes by (b - w) / (|b| + |w|) from -1 to 1, b the distance of
    the list's nearest row (of a lattice: of the row with the least score), w that of the query's last neighbour; both
    0: the middle; above it are wasted ones, and those just above it missed narrowly. ranked: pairs of a query and a row
    that were scored for the ranking, which depends on the scan; nonfinite and norm_changed: rows among them that hold NaN
    or infinity, or whose norm is not what it was when they came."""

    probe: Ids
    hit: Ids
    wasted: Ids
    margin: Ids
    ranked: int
    nonfinite: int
    norm_changed: int

    @property
    def wasted_share(self) -> float:
        """Of the probes; NaN without any."""
        probes = int(self.probe.sum())
        return int(self.wasted.sum()) / probes if probes else float("nan")

    def __add__(self, other: SearchHealth) -> SearchHealth:
        """Of both, on the same lists; a row that changed counts in each search that met it."""
        return SearchHealth(
            self.probe + other.probe,
            self.hit + other.hit,
            self.wasted + other.wasted,
            self.margin + other.margin,
            self.ranked + other.ranked,
            self.nonfinite + other.nonfinite,
            self.norm_changed + other.norm_changed,
        )


class Firsts:
    """The row of least score of each probe, the first of equals."""

    def __init__(self, count: int) -> None:
        self._least, self._slot = np.full(count, np.inf), np.full(count, -1, np.int64)

    def offer(self, pairs: Ids, low: Floats, slots: Ids) -> None:
        """low [m, n] of the rows at slots [n] for the probes `pairs` [m]; no two threads offer to one probe."""
        known = np.where(np.isnan(low), np.inf, low)
        first = known.argmin(axis=1)
        least = known[np.arange(len(pairs)), first]
        better = least < self._least[pairs]
        self._least[pairs[better]], self._slot[pairs[better]] = least[better], slots[first[better]]

    def candidates(self) -> tuple[Ids, Ids]:
        """Probe and slot, of the probes that saw a row."""
        seen = np.flatnonzero(self._slot >= 0)
        return seen, self._slot[seen]


class Watch:
    """What one search has looked at. Rows that rot are met by several threads."""

    def __init__(self) -> None:
        self.ranked = 0
        self._nonfinite: list[Ids] = []
        self._changed: list[Ids] = []

    def rows(self, slots: Ids, wide: F64, norms: F64) -> None:
        """Rows `wide` [n, d] as they are stored now at slots [n], with the norms that they came with."""
        with np.errstate(over="ignore", invalid="ignore"):
            now = norms_of(wide)
        odd = now != norms  # NaN too
        if odd.any():
            finite = np.isfinite(now)
            self._nonfinite.append(slots[odd & ~finite])
            self._changed.append(slots[odd & finite])

    def counted(
        self,
        probes: Ids,
        lists: int,
        hit: tuple[Ids, Ids],
        last: F64,
        near: tuple[Ids, Ids],
        distance: Callable[[Ids, Ids], F64],
    ) -> SearchHealth:
        """probes [o, p] (-1: none); hit: query and list of every row in an answer; last [o]: distance of each query's
        last neighbour (NaN: none); near: number of a probe and slot of rows of which one is the nearest of its list."""
        width = probes.shape[1]
        asked = probes.ravel()
        probe = np.bincount(asked[asked >= 0], minlength=lists)
        query, number = hit
        useful = np.unique(query * lists + number) % max(1, lists)
        return SearchHealth(
            probe,
            np.bincount(number, minlength=lists),
            probe - np.bincount(useful, minlength=lists),
            self._margins(near, last, width, distance),
            self.ranked,
            _different(self._nonfinite),
            _different(self._changed),
        )

    def _margins(
        self, near: tuple[Ids, Ids], last: F64, width: int, distance: Callable[[Ids, Ids], F64]
    ) -> Ids:
        pair, slot = near
        if not len(pair):
            return np.zeros(BINS, np.int64)
        order = np.argsort(pair, kind="stable")
        pair, slot = pair[order], slot[order]
        begin = np.flatnonzero(np.diff(pair, prepend=-1))
        nearest = np.fmin.reduceat(distance(pair // width, slot), begin)
        beside = last[pair[begin] // width]
        known = ~np.isnan(nearest + beside)  # a row that rotted may have no distance any more
        return np.bincount(bins(nearest[known], beside[known]), minlength=BINS)


def bins(nearest: F64, last: F64) -> Ids:
    """[n] of distances [n]."""
    size = np.abs(nearest) + np.abs(last)
    share = np.zeros(len(size))
    np.divide(nearest - last, size, out=share, where=(size > 0) & np.isfinite(size))
    return np.clip(np.floor(LEVEL * (1 + share)), 0, BINS - 1).astype(np.int64)


def _different(parts: list[Ids]) -> int:
    return len(np.unique(np.concatenate(parts))) if parts else 0
