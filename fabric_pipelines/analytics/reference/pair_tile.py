"""Twin of cuda/pair_tile.cu (F9): every distance of one cluster as a sum of squared differences, then a plain sort."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fabric_pipelines.analytics.csr import F32, F64, I64


class PairTwin(NamedTuple):
    mean_pairwise_distance: float
    nn_distance_mean: float
    nn_distance_cv: float
    intrinsic_dimension: float
    kernel_temperature: float
    diameter: float


class PairRows(NamedTuple):
    """Per row: total and total2 f64 of distances and their squares, greatest2; place int64 [n, k] of the nearest in the cluster
    (-1 beyond the last), and their distances (NaN there)."""

    total: F64
    total2: F64
    greatest2: F64
    place: I64
    distance: F64


def centred(rows: F32, weight: F64, place: I64, indptr: I64, centre: F64) -> F32:
    """Twin of pair_tile_rows: f32 [len(place), d] of weight x row - centre of the cluster; a row of weight 0 is 0."""
    kept = weight[place] != 0
    wide = np.where(kept[:, None], rows[place], 0).astype(np.float64) * weight[place][:, None]
    wide -= centre[np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))]
    wide[~kept] = 0
    return wide.astype(np.float32)


def pair_rows(rows: F32, indptr: I64, k: int) -> PairRows:
    """rows f32 [n, d], cluster c in indptr[c]:indptr[c+1]."""
    count = len(rows)
    total, total2, greatest2 = np.zeros((3, count))
    place = np.full((count, k), -1)
    distance = np.full((count, k), np.nan)
    for start, stop in pairwise(indptr):
        own, found = slice(start, stop), min(k, stop - start - 1)
        apart = distances(rows[own].astype(np.float64))
        if stop - start:
            total[own], total2[own] = apart.sum(axis=1), (apart**2).sum(axis=1)
            greatest2[own] = (apart**2).max(axis=1)
        if found > 0:
            place[own, :found] = nearest(apart, found)
            distance[own, :found] = np.take_along_axis(apart, place[own, :found], axis=1)
    return PairRows(total, total2, greatest2, place, distance)


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
