"""Probes of lists that gave nothing: counted by searches, or by asking a store for the neighbours of its own rows.

What rows say of themselves never shows that a list's centroid no longer stands for them; that queries are sent there in vain does.
Asked are the narrowest searches that can waste a probe, of two lists: of eight, sound lists waste nine in ten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fabric_pipelines.analytics.csr import F32, F64, I64
from fabric_pipelines.analytics.readings import Reading, Status, ratio
from fabric_pipelines.analytics.search import Metric, Queries, probed_topk
from fabric_pipelines.ledger import hash64

PROBES_MIN = (
    50  # of a list: the share of those that gave nothing is off by 0.07 there, and by more below
)
PROBES_WANTED = 200  # of a list, on average, where there are rows to ask
WIDTH, WIDTH_MAX = 2, 8  # lists a query: of own rows; what thresholds hold for
K = 10
QUERIES_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Probes:
    """What searches met in each list: probe int64 [K], queries that looked at it; wasted [K], those of them that got no row
    of it. width: lists that each query looked at."""

    probe: I64
    wasted: I64
    width: int

    def reading(self) -> Reading:
        """The share wasted; U_SIZE below PROBES_MIN, U_CONTEXT of searches wider than WIDTH_MAX."""
        status = np.where(self.probe < PROBES_MIN, Status.U_SIZE, Status.OK).astype(np.uint8)
        if self.width > WIDTH_MAX:
            status[:] = Status.U_CONTEXT
        share = ratio(self.wasted.astype(np.float64), self.probe.astype(np.float64))
        return Reading(np.where(status == Status.OK, share, np.nan), status)


def questions(ids: I64, lists: int) -> I64:
    """Places of the rows that are asked, by hash: of a store without some rows, the others stay."""
    count = PROBES_WANTED // WIDTH * lists
    return np.argsort(hash64(ids), kind="stable")[:count]


def of_own_rows(
    xq: F32,
    own: I64,
    centroids: F64,
    list_rows: Callable[[int], tuple[F32, I64]],
    list_of: Callable[[I64], I64],
    metric: Metric,
) -> Probes:
    """Of rows xq [q, d] named own [q], each left out of its own answer. centroids f64 [K, d] (NaN: a list that is no
    more); list_rows: rows and ids of a list; list_of: the lists of ids."""
    lists = len(centroids)
    width = min(WIDTH, lists)
    probe, useful = np.zeros((2, lists), np.int64)
    for start in range(0, len(xq), QUERIES_AT_ONCE):
        part = slice(start, start + QUERIES_AT_ONCE)
        ranked, probes = probed_topk(Queries(xq[part], metric), K + 1, centroids, width, list_rows)
        counted = (ranked.I >= 0) & (own[part, None] != ranked.I)
        counted &= np.cumsum(counted, axis=1) <= K  # a row that has K copies does not find itself
        query, place = np.nonzero(counted)
        probe += np.bincount(probes[probes >= 0], minlength=lists)
        pairs = np.unique(query * lists + list_of(ranked.I[query, place]))
        useful += np.bincount(pairs % lists, minlength=lists)
    return Probes(probe, probe - useful, width)
