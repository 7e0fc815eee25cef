"""Twins of the spectrum: of P6 as a whole by singular values of the rows, so no product is ever formed; of cuda/spectrum.cu
(F7) by the eigenvalues of one matrix at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fabric_pipelines.analytics.csr import F64


class Moments(NamedTuple):
    """Eigenvalues, rising, none below 0; entropy of their shares, NaN without any; sums of squares and of ln(1 + growth x)."""

    value: F64
    entropy: float
    squares: float
    logs: float


def moments(matrix: F64, growth: float) -> Moments:
    """matrix f64 [m, m], symmetric."""
    value: F64 = np.maximum(np.linalg.eigvalsh(matrix), 0.0)
    total = value.sum()
    share = value[value > 0] / total if total > 0 else np.full(1, np.nan)
    return Moments(
        value,
        float(-(share * np.log(share)).sum()),
        float((value**2).sum()),
        float(np.log1p(growth * value).sum()),
    )


class SpectrumTwin(NamedTuple):
    anisotropy: float
    effective_rank: float
    vendi_score: float
    coding_rate: float
    coding_rate_centred: float


def spectrum(rows: F64, error: float = 0.5) -> SpectrumTwin:
    """rows f64 [n, d], n >= 2, not all equal and none of length 0."""
    apart = rows - rows.mean(axis=0)
    direction = rows / np.sqrt((rows**2).sum(axis=1, keepdims=True))
    covariance, growth = _moments(apart), rows.shape[1] / error**2
    return SpectrumTwin(
        anisotropy=covariance[0] / covariance.sum(),
        effective_rank=_exp_entropy(covariance),
        vendi_score=_exp_entropy(_moments(direction)),
        coding_rate=0.5 * np.log1p(growth * _moments(rows)).sum(),
        coding_rate_centred=0.5 * np.log1p(growth * covariance).sum(),
    )


def _moments(rows: F64) -> F64:
    """Eigenvalues of X'X / n, falling; those that are 0 for want of rows are left out."""
    values: F64 = np.linalg.svd(rows, compute_uv=False) ** 2 / len(rows)
    return values


def _exp_entropy(values: F64) -> float:
    share = values[values > 0] / values.sum()
    return float(np.exp(-(share * np.log(share)).sum()))
