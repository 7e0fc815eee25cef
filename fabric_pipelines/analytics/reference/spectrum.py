"""Twin of the spectrum (F6 and F7): singular values of the rows of one cluster, so no product is ever formed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fabric_pipelines.analytics.csr import F64


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
