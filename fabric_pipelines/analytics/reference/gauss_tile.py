"""Twin of the kernel sums (F11): Gaussian weights of all pairs of one cluster, by the definitions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fabric_pipelines.analytics.csr import F64
from fabric_pipelines.analytics.reference.pair_tile import nearest


class GaussTwin(NamedTuple):
    free_energy: float
    pair_entropy: float
    density_modes: int
    heat_capacity: float


def gauss_tile(apart: F64, temperature: float) -> GaussTwin:
    """apart f64 [n, n], n >= 2, places by id; temperature > 0."""
    count = len(apart)
    energy = apart**2 / 2
    exponent = -energy / temperature
    np.fill_diagonal(exponent, -np.inf)
    top = exponent.max(axis=1)
    log_density = np.log(np.exp(exponent - top[:, None]).sum(axis=1)) + top
    least = log_density.max()
    log_z = np.log(np.exp(log_density - least).sum()) + least - np.log(count * (count - 1))
    weight = np.exp(exponent - log_z) / (count * (count - 1))
    mean = (weight * energy).sum()
    return GaussTwin(
        free_energy=-log_z,
        pair_entropy=float(np.exp(mean / temperature + log_z)),
        density_modes=_modes(log_density, nearest(apart, min(10, count - 1)).tolist()),
        heat_capacity=((weight * energy**2).sum() - mean**2) / temperature**2,
    )


def _modes(log_density: F64, near: list[list[int]]) -> int:
    found = 0
    for place, others in enumerate(near):
        ahead = [log_density[place] - log_density[other] for other in others]
        found += all(
            by > 1e-10 or (abs(by) <= 1e-10 and place < other)
            for by, other in zip(ahead, others, strict=True)
        )
    return found
