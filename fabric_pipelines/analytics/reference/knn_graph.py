"""Twin of the neighbour graph (F10): degrees, local outlier factors and components of one cluster, by loops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fabric_pipelines.analytics.csr import F64, I64
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
