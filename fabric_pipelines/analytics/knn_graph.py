"""P10, the graph of nearest neighbours: hubs, local outliers, connected components.

Works on the neighbour lists of P9 over all clusters at once: edges never leave a cluster, so one sweep of integers
serves a million of them. Refuses nothing; clusters of fewer than two rows simply have no edges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fabric_pipelines.analytics.csr import F64, I64, Bool, Csr, segment_sum
from fabric_pipelines.analytics.neighbours import NEIGHBOURS, Neighbours, Rows
from fabric_pipelines.analytics.sweeps import Linked, Sweeps

LOF_OUTLIER = 1.5
LOF_FLOOR = 1e-10  # added to a mean reachability, as scikit-learn does: copies have none
BLOCK_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Graph:
    """P10. Per cluster: skewness of the in-degrees (0 without variance), rows with a local outlier factor above
    1.5, rows of the largest component."""

    skewness: F64
    outliers: I64
    largest: I64


def graph(csr: Csr, sweeps: Sweeps, good: Bool, size: I64, found: Neighbours) -> Graph:
    linked = sweeps.linked(found.row, found.distance, good, NEIGHBOURS)
    if linked is None:
        row = found.row[:, :NEIGHBOURS]
        linked = Linked(
            degree=np.bincount(row[row >= 0], minlength=len(csr.rows)),
            factor=_local_outlier_factor(found, good),
            largest=_largest_component(csr, good, row),
        )
    outlying = good & (linked.factor > LOF_OUTLIER)
    return Graph(
        skewness=_skewness(csr, good, size, linked.degree.astype(np.float64)),
        outliers=segment_sum(outlying.astype(np.int64), csr.indptr),
        largest=linked.largest,
    )


def flop(size: F64) -> float:
    return float(200 * size.sum())


def _skewness(csr: Csr, good: Bool, size: I64, degree: F64) -> F64:
    """Third standardised moment over each cluster of how often a row is among the neighbours of others."""
    count = np.maximum(size, 1)
    apart = degree - np.repeat(segment_sum(degree, csr.indptr) / count, csr.sizes)
    apart[~good] = 0.0
    variance = segment_sum(apart**2, csr.indptr) / count
    third = segment_sum(apart**3, csr.indptr) / count
    skewness: F64 = np.divide(third, variance**1.5, out=np.zeros_like(third), where=variance > 0)
    return skewness


def _local_outlier_factor(found: Neighbours, good: Bool) -> F64:
    """Breunig and others 2000, in scikit-learn's words: 1 / (mean reachability + 1e-10) is a row's density, the
    factor is the mean density of its neighbours over its own. 1 for rows without neighbours."""
    rows, width = found.row.shape
    factor = np.ones(rows)
    if width == 0:
        return factor
    known = (found.row >= 0).sum(axis=1)
    has = np.flatnonzero(good & (known > 0))
    reach, density = np.zeros(rows), np.zeros(rows)
    reach[has] = found.distance[has, known[has] - 1]
    for low in range(0, len(has), BLOCK_ROWS):
        at = has[low : low + BLOCK_ROWS]
        there, listed = found.row[at], found.row[at] >= 0
        reachable = np.maximum(found.distance[at], reach[there])
        mean = np.where(listed, reachable, 0.0).sum(axis=1) / known[at]
        density[at] = 1.0 / (mean + LOF_FLOOR)
    for low in range(0, len(has), BLOCK_ROWS):
        at = has[low : low + BLOCK_ROWS]
        around = np.where(found.row[at] >= 0, density[found.row[at]], 0.0).sum(axis=1) / known[at]
        factor[at] = around / density[at]
    return factor


def _largest_component(csr: Csr, good: Bool, row: Rows) -> I64:
    """Hook every root to the least root across an edge, then halve the paths, until no edge joins two roots."""
    root = np.arange(len(csr.rows), dtype=np.int64)
    start, place = np.nonzero(row >= 0)
    end = row[start, place].astype(np.int64)
    while len(start):
        here, there = root[start], root[end]
        joins = here != there
        start, end = start[joins], end[joins]
        higher, lower = np.maximum(here, there)[joins], np.minimum(here, there)[joins]
        np.minimum.at(root, higher, lower)
        while not np.array_equal(root, above := root[root]):
            root = above
    rows = np.bincount(root[good], minlength=len(csr.rows))
    largest = np.zeros(csr.clusters, dtype=np.int64)
    np.maximum.at(largest, csr.owner(), rows)
    return largest
