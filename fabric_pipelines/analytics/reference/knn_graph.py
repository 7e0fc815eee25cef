"""Twin of the neighbour graph (F10): degrees, local outlier factors and components, by loops.

`knn_graph` works on the distances of one cluster, as the metrics are defined; `of_lists` on neighbour lists, as
cuda/knn_graph.cu does.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fabric_pipelines.analytics.csr import F64, I64, Bool
from fabric_pipelines.analytics.reference.pair_tile import nearest


class GraphTwin(NamedTuple):
    hubness_skewness: float
    lof_outlier_fraction: float
    largest_component_share: float


def knn_graph(apart: F64) -> GraphTwin:
    """apart f64 [n, n], n >= 3."""
    count = len(apart)
    near = nearest(apart, min(10, count - 1))
    degree = np.bincount(near.reshape(-1), minlength=count).astype(np.float64)
    off = degree - degree.mean()
    variance = (off**2).mean()
    return GraphTwin(
        hubness_skewness=(off**3).mean() / variance**1.5 if variance > 0 else 0.0,
        lof_outlier_fraction=float((local_outlier_factor(apart) > 1.5).mean()),
        largest_component_share=_largest_component(near) / count,
    )


def local_outlier_factor(apart: F64, neighbours: int = 20) -> F64:
    """Breunig 2000 as scikit-learn has it, with 1e-10 added to the mean reachability. [n]"""
    count = len(apart)
    near = nearest(apart, min(neighbours, count - 1))
    reach = apart[np.arange(count), near[:, -1]]
    density = np.empty(count)
    for place in range(count):
        reachable = np.maximum(apart[place, near[place]], reach[near[place]])
        density[place] = 1.0 / (reachable.mean() + 1e-10)
    factor: F64 = density[near].mean(axis=1) / density
    return factor


def _largest_component(near: I64) -> int:
    linked: list[set[int]] = [set() for _ in near]
    for place, row in enumerate(near.tolist()):
        for other in row:
            linked[place].add(other)
            linked[other].add(place)
    largest, unseen = 0, set(range(len(near)))
    while unseen:
        border = {unseen.pop()}
        size = 0
        while border:
            size += len(border)
            border = {other for place in border for other in linked[place]} & unseen
            unseen -= border
        largest = max(largest, size)
    return largest


class ListsTwin(NamedTuple):
    """Per row: in-degree, local outlier factor, lowest row of its component; per cluster: most members of one."""

    degree: I64
    factor: F64
    label: I64
    largest: I64


def of_lists(row: I64, distance: F64, counts: Bool, indptr: I64, near: int) -> ListsTwin:
    """row int64 [n, k], -1 past the end of a list; distance f64 [n, k]; counts bool [n]: rows that are members of their
    component. Degrees and components are those of the first `near` neighbours."""
    lists = [[other for other in own if other >= 0] for own in row.tolist()]
    degree = np.zeros(len(row), dtype=np.int64)
    label = np.arange(len(row))
    for others in lists:
        for other in others[:near]:
            degree[other] += 1
    moved = True
    while moved:
        before = label.copy()
        for own, others in enumerate(lists):
            for other in others[:near]:
                label[own] = label[other] = min(label[own], label[other])
        moved = not np.array_equal(label, before)
    members = np.bincount(label[counts], minlength=len(row) + 1)
    largest = [members[low:high].max(initial=0) for low, high in pairwise(indptr.tolist())]
    return ListsTwin(
        degree, _factor_of_lists(lists, distance), label, np.array(largest, dtype=np.int64)
    )


def _factor_of_lists(lists: list[list[int]], distance: F64) -> F64:
    density, factor = np.zeros(len(lists)), np.ones(len(lists))
    reach = np.array([distance[own, len(others) - 1] for own, others in enumerate(lists)])
    for own, others in enumerate(lists):
        if others:
            reachable = np.maximum(distance[own, : len(others)], reach[others])
            density[own] = 1.0 / (reachable.mean() + 1e-10)
    for own, others in enumerate(lists):
        if others:
            factor[own] = density[others].mean() / density[own]
    return factor
