"""Twin of the pairs (F9): every distance of one cluster as a sum of squared differences, then a plain sort."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fabric_pipelines.analytics.csr import F64, I64


class PairTwin(NamedTuple):
    mean_pairwise_distance: float
    nn_distance_mean: float
    nn_distance_cv: float
    intrinsic_dimension: float
    kernel_temperature: float
    diameter: float


def distances(rows: F64) -> F64:
    """rows f64 [n, d] -> f64 [n, n]; exact 0 between copies."""
    out = np.empty((len(rows), len(rows)))
    for place, row in enumerate(rows):
        out[place] = np.sqrt(((rows - row) ** 2).sum(axis=1))
    return out


def nearest(apart: F64, k: int) -> I64:
    """The k nearest others of each row [n, k] by (distance, place)."""
    out = np.empty((len(apart), k), dtype=np.int64)
    for place, row in enumerate(apart):
        order = np.argsort(row, kind="stable")
        out[place] = order[order != place][:k]
    return out


def pair_tile(apart: F64) -> PairTwin:
    """apart f64 [n, n], n >= 2. A number that is undefined is NaN."""
    count = len(apart)
    others = np.sort(apart + np.diag(np.full(count, np.inf)), axis=1)
    first, k = others[:, 0], min(10, count - 1)
    mean = first.mean()
    dimension = np.nan
    told = first > 0
    if count > 2 and told.sum() > 1:
        spread = np.log(others[told, 1] / first[told]).sum()
        dimension = (told.sum() - 1) / spread if spread > 0 else np.nan
    return PairTwin(
        mean_pairwise_distance=apart.sum() / (count * (count - 1)),
        nn_distance_mean=mean,
        nn_distance_cv=first.std() / mean if mean > 0 else np.nan,
        intrinsic_dimension=dimension,
        kernel_temperature=float(np.median(others[:, k - 1])) ** 2,
        diameter=apart.max(),
    )
