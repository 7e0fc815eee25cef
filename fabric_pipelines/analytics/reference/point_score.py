"""Twin of cuda/point_score.cu: columns, means, origin, scale, centres and scores, one line of the contract a function."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.csr import F32, F64, I64, U64
from fabric_pipelines.analytics.reference.row_admit import INF, NAN, ZERO

U8 = npt.NDArray[np.uint8]


class Admitted(NamedTuple):
    """column f64 [2, n], weight f64 [n], own int64 [n], mark u64 [2, n]."""

    column: F64
    weight: F64
    own: I64
    mark: U64


class Unit(NamedTuple):
    """unit f64 [2]: scale and reach2; spread and size f64 [K]."""

    unit: F64
    spread: F64
    size: F64


class Scored(NamedTuple):
    """column f64 [2, n]: silhouette and error of the own distance; margin f64 [n]; mark u64 [2, n]."""

    column: F64
    margin: F64
    mark: U64


def _pair(low: npt.NDArray[np.bool_], high: npt.NDArray[np.bool_]) -> U64:
    both: U64 = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    return both


def admit(norm2: F64, flag: U8, indptr: I64, *, cosine: bool) -> Admitted:
    good = flag == 0
    norm = np.sqrt(np.where(good, norm2, 0.0))
    inverse = np.divide(1.0, norm, out=np.zeros(len(norm)), where=good)
    mark = np.stack([_pair((flag & NAN) != 0, (flag & INF) != 0), (flag & ZERO != 0)])
    own = np.repeat(np.arange(len(indptr) - 1, dtype=np.int64), np.diff(indptr))
    weight = inverse if cosine else good.astype(np.float64)
    return Admitted(np.stack([norm, norm * norm]), weight, own, mark.astype(np.uint64))


def means(total: F64, count: I64) -> tuple[F64, F64]:
    """total f64 [K, d], count int64 [K] -> means and their squared lengths."""
    mean = total / np.maximum(count, 1)[:, None]
    return mean, (mean * mean).sum(axis=1)


def origin(mean: F64, count: I64) -> F64:
    total = np.zeros(mean.shape[1])
    for own, rows in zip(mean, count, strict=True):
        total += own * float(rows)
    out: F64 = total / max(int(count.sum()), 1)
    return out


def reach(mean: F64, origin: F64) -> F64:
    apart = mean - origin
    out: F64 = (apart * apart).sum(axis=1)
    return out


def unit(far2: F64, within: F64, count: I64) -> Unit:
    some = count > 0
    spread = np.divide(within, count, out=np.zeros(len(count)), where=some)
    reach2 = far2[some].max(initial=0.0) + spread.max(initial=0.0)
    scale = np.exp2(-np.rint(np.log2(reach2) / 2)) if reach2 > 0 else 1.0
    return Unit(np.array([scale, reach2]), spread * scale**2, count.astype(np.float64))


def centres(mean: F64, origin: F64, scale: float, pitch: int) -> tuple[F32, F32]:
    """-> rows f32 [K, pitch] and their squared lengths f32 [K]."""
    rows = np.zeros((len(mean), pitch), np.float32)
    rows[:, : mean.shape[1]] = (mean - origin) * scale
    return rows, (rows.astype(np.float64) ** 2).sum(axis=1).astype(np.float32)


def rows(
    radius2: F64, own2: F32, near2: F32, b: F64, flag: U8, own: I64, within: F64, count: I64,
    unit: F64, *, rounding: float, told: float, narrow: float,
) -> Scored:  # fmt: skip
    """near2 f32 [n]: the upper words of the keys; within and count [K]."""
    scale2, reach2, n = unit[0] ** 2, unit[1], count[own].astype(np.float64)
    none = np.zeros((2, len(own)))
    out = Scored(none, none[0].copy(), none.astype(np.uint64))
    for row in np.flatnonzero(flag == 0):
        away2, other = float(near2[row]) / scale2, float(b[row]) / scale2
        inside = (n[row] * radius2[row] + within[own[row]]) / max(n[row] - 1, 1.0)
        if n[row] >= 2 and max(inside, other) > 0:
            out.column[0, row] = (other - inside) / max(inside, other)
        r, away = np.sqrt(radius2[row]), np.sqrt(away2)
        margin = out.margin[row] = (away - r) / (r + away) if r + away > 0 else 0.0
        error = abs(float(own2[row]) / scale2 - radius2[row])
        error /= rounding * max(radius2[row] + reach2, np.finfo(float).tiny)
        out.column[1, row] = np.inf if np.isnan(error) else error
        out.mark[0, row] = (out.column[0, row] < 0) + (int(margin < narrow) << 32)
        out.mark[1, row] = (margin < 0) + (int(away2 < told * reach2) << 32)
    return out
