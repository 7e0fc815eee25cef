"""Twin of cuda/gauss_tile.cu (F11): Gaussian weights of all pairs of one cluster, by the definitions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fabric_pipelines.analytics.csr import F32, F64, I64
from fabric_pipelines.analytics.reference.pair_tile import distances, nearest


class GaussTwin(NamedTuple):
    free_energy: float
    pair_entropy: float
    density_modes: int
    heat_capacity: float


class GaussRows(NamedTuple):
    """Per row, with E = d^2 / 2 over the others: log_density = ln sum exp(-E / T); energy and energy2: mean of E and of E^2
    under these weights. NaN for rows without others."""

    log_density: F64
    energy: F64
    energy2: F64


def gauss_rows(rows: F32, indptr: I64, temperature: F64) -> GaussRows:
    """rows f32 [n, d], cluster c in indptr[c]:indptr[c+1]; temperature f64 [K], above 0."""
    out = np.full((3, len(rows)), np.nan)
    for start, stop, heat in zip(indptr[:-1], indptr[1:], temperature, strict=True):
        if stop - start < 2:
            continue
        energy = distances(rows[start:stop].astype(np.float64)) ** 2 / 2
        exponent = -energy / heat
        np.fill_diagonal(exponent, -np.inf)
        top = exponent.max(axis=1, keepdims=True)
        weight = np.exp(exponent - top)
        total = weight.sum(axis=1)
        out[0, start:stop] = np.log(total) + top[:, 0]
        out[1, start:stop] = (weight * energy).sum(axis=1) / total
        out[2, start:stop] = (weight * energy**2).sum(axis=1) / total
    return GaussRows(*out)


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
