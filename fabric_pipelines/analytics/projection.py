"""Clusters on a plane: their means along the two axes that these spread most along, weighted by rows (PCA of the means)."""

from __future__ import annotations

import numpy as np

from fabric_pipelines.analytics.csr import F64


def plane(means: F64, size: F64) -> tuple[F64, F64]:
    """means f64 [K, d] and size [K] -> places [K, 2] (NaN where size is 0) and the share of the means' variance that each axis
    holds [2]. An axis points where its greatest component is positive, so that the same means lie in the same places."""
    filled = size > 0
    places, share = np.full((len(size), 2), np.nan), np.zeros(2)
    if not filled.any():
        return places, share
    weight = size[filled] / size[filled].sum()
    apart = means[filled] - weight @ means[filled]
    scaled = apart * np.sqrt(weight)[:, None]
    if scaled.shape[1] <= scaled.shape[0]:
        variance, axes = np.linalg.eigh(scaled.T @ scaled)
    else:  # the same from the smaller matrix
        variance, sides = np.linalg.eigh(scaled @ scaled.T)
        axes = scaled.T @ sides
        length = np.sqrt((axes**2).sum(axis=0))
        axes = np.divide(axes, length, out=np.zeros_like(axes), where=length > 0)
    total = float(np.maximum(variance, 0.0).sum())
    places[filled] = 0.0
    for at, axis in enumerate(axes.T[::-1][:2]):
        sign = 1.0 if axis[np.abs(axis).argmax()] >= 0 else -1.0
        places[filled, at] = sign * (apart @ axis)
        share[at] = max(float(variance[-1 - at]), 0.0) / total if total > 0 else 0.0
    return places, share
