"""Stores that have every edge at once: sizes around 0, a warp and a tile, spoilt rows, copies, shuffled ids."""

import numpy as np

from fabric_pipelines.analytics.csr import Csr
from fabric_pipelines.analytics.health import HealthTable, Metric, Status, measure

DIMS = [1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 384, 768, 1000, 1024, 1025,
        1536, 3072, 4096]  # fmt: skip
SIZES = [0, 1, 2, 3, 4, 31, 32, 33, 127, 128, 129]
LARGE = [4095, 4096, 4097]


def store(dim: int, sizes: list[int], seed: int = 0) -> Csr:
    """A cluster a size, of that many good rows: uneven spread, its mean off the origin. From 31 rows on also
    copies, a pair a hair apart, and among the good rows some with NaN, Inf or nothing but zeros."""
    rng = np.random.default_rng([seed, dim, len(sizes)])
    scale = np.exp(-2.0 * np.arange(dim) / dim)
    parts = []
    for size in sizes:
        centre = rng.standard_normal(dim)
        rows = centre + scale * rng.standard_normal((size, dim)) * rng.uniform(0.2, 1.5)
        rows = rows.astype(np.float32)
        if size > 30:
            rows[3] = rows[9] = rows[1]
            rows[5] = np.nextafter(rows[4], np.float32(np.inf))
            bad = np.zeros((4, dim), np.float32)
            bad[0, -1], bad[1, 0], bad[2, -1] = np.nan, np.inf, -np.inf
            rows = np.insert(rows, rng.integers(0, size, 4), bad, axis=0)
        parts.append(rows)
    indptr = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    ids = rng.permutation(3 * indptr[-1])[: indptr[-1]].astype(np.int64)
    return Csr(np.concatenate(parts), indptr, ids)


def good_rows(csr: Csr, cluster: int, metric: Metric) -> np.ndarray:
    """f64 rows of a cluster that count, by id; of length 1 in a cosine store."""
    own = slice(csr.indptr[cluster], csr.indptr[cluster + 1])
    rows = csr.rows[own][np.argsort(csr.ids[own])].astype(np.float64)
    rows = rows[np.isfinite(rows).all(axis=1)]
    norm = np.sqrt((rows**2).sum(axis=1, keepdims=True))
    rows, norm = rows[norm[:, 0] >= 1e-12], norm[norm[:, 0] >= 1e-12]
    return rows / norm if metric == "cosine" else rows


def table(csr: Csr, metric: Metric = "l2", **rest: object) -> HealthTable:
    return measure(csr.rows, csr.indptr, csr.ids, metric=metric, **rest)  # type: ignore[arg-type]


def value(found: HealthTable, name: str, cluster: int = 0) -> float:
    """Of a metric that must be known."""
    status = Status(found.readings[name].status[cluster])
    assert status == Status.OK, f"{name} of cluster {cluster} is {status.name}"
    return float(found.readings[name].value[cluster])
