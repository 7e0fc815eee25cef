"""The edges every kernel is held to: dimensions, cluster sizes, and one store that has all sizes at once.

A test of a kernel has one body and takes `card`: the kernel's source on the CPU (testing.host_gpu, always), and a real
card where there is one. `both` gives each of them its own values: the host's are the edges that its time allows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.analytics.csr import Csr

DIMS = [1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 384, 768, 1000, 1024, 1025,
        1536, 3072, 4096]  # fmt: skip
HOST_DIMS = [1, 2, 3, 31, 32, 33, 127, 128, 129, 255, 257, 768, 1025]
SIZES = [0, 1, 2, 31, 32, 33, 127, 128, 129, 4095, 4096, 4097]
BAD = 40  # rows spoilt with NaN, Inf or zeros


def both(names: str, cuda: Sequence[Any], host: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise `card` with `names`, each card with its own values."""
    single = "," not in names
    return pytest.mark.parametrize(
        f"card,{names}",
        [
            pytest.param(where, *((value,) if single else value), marks=marks)
            for where, values, marks in (("host", host, ()), ("cuda", cuda, pytest.mark.gpu))
            for value in values
        ],
        indirect=["card"],
    )


every_dim = both("dim", DIMS, HOST_DIMS)


def store(dim: int, seed: int = 0) -> Csr:
    """Clusters of every size of SIZES, shuffled, empty ones first and last; some bad rows in each big one."""
    rng = np.random.default_rng([seed, dim])
    sizes = np.concatenate([[0], rng.permutation(SIZES), [0]])
    indptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows = rng.standard_normal((indptr[-1], dim), dtype=np.float32)
    rows *= rng.uniform(0.1, 10, (len(rows), 1)).astype(np.float32)
    at = rng.choice(len(rows), BAD, replace=False)
    place = rng.integers(0, dim, BAD)
    rows[at[:10], place[:10]] = np.nan
    rows[at[10:20], place[10:20]] = np.inf
    rows[at[20:30], place[20:30]] = -np.inf
    rows[at[30:]] = 0.0
    return Csr(rows, indptr, rng.permutation(len(rows)).astype(np.int64))


def weights(csr: Csr, seed: int = 0) -> np.ndarray:
    """Positive for good rows, 0 for bad ones and for a tenth of the others."""
    rng = np.random.default_rng([seed, csr.dim, 1])
    weight = rng.uniform(0.1, 2.0, len(csr.rows))
    good = np.isfinite(csr.rows).all(axis=1) & (csr.rows != 0).any(axis=1)
    weight[~good | (rng.random(len(weight)) < 0.1)] = 0.0
    return weight
