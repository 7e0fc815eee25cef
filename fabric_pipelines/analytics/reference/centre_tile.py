"""Twin of cuda/centre_tile.cu (F8): every squared distance to a centre as a sum of squared differences."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fabric_pipelines.analytics.csr import F32, F64, I64, Bool


class PointTwin(NamedTuple):
    """Per row: own2 and near2, squared distance to the own and to the nearest other centre, near its number (-1: none); a and b, mean
    squared distance to the rest of the own cluster and to the nearest other one (inf without)."""

    own2: F64
    near2: F64
    near: I64
    a: F64
    b: F64


class PartnerTwin(NamedTuple):
    """Per centre: greatest (S_c + S_j) / |c - j|, its j (-1: none), and whether some other centre is at the same place."""

    ratio: F64
    partner: I64
    coincident: Bool


def _distance2(rows: F64, centres: F64) -> F64:
    out = np.empty((len(rows), len(centres)))
    for number, centre in enumerate(centres):
        out[:, number] = ((rows - centre) ** 2).sum(axis=1)
    return out


def centre_points(rows: F32, centres: F32, own: I64, spread: F64, size: F64) -> PointTwin:
    """rows f32 [n, d], centres f32 [m, d], own int64 [n], spread = W / n and size f64 [m]."""
    distance2, here = (
        _distance2(rows.astype(np.float64), centres.astype(np.float64)),
        np.arange(len(rows)),
    )
    own2 = distance2[here, own].copy()
    distance2[here, own] = np.inf
    near = distance2.argmin(axis=1)
    near2 = distance2[here, near]
    near[np.isinf(near2)] = -1
    rest = np.maximum(size[own] - 1, 1)
    return PointTwin(
        own2, near2, near, size[own] * (own2 + spread[own]) / rest, (distance2 + spread).min(axis=1)
    )


def centre_partners(centres: F32, radius: F32, same2: float) -> PartnerTwin:
    """centres f32 [m, d], radius f32 [m] = S; at the same place up to same2."""
    wide = centres.astype(np.float64)
    distance2 = _distance2(wide, wide)
    np.fill_diagonal(distance2, np.inf)
    same: Bool = np.less_equal(distance2, same2)
    apart = np.sqrt(np.where(same, np.inf, distance2))
    ratio = (radius[:, None].astype(np.float64) + radius) / apart
    ratio[np.isinf(apart)] = -np.inf
    partner = ratio.argmax(axis=1)
    greatest = ratio[np.arange(len(wide)), partner]
    none = np.isinf(greatest)
    return PartnerTwin(
        np.where(none, np.nan, greatest), np.where(none, -1, partner), np.any(same, axis=1)
    )
