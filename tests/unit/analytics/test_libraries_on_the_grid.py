"""Metrics that a public library defines equal what it answers at every size, beside spoilt rows, copies and empty clusters.

One store a dimension holds all sizes (edges.py); a library gets the good rows of one cluster, or of all. HDBSCAN has none of
the 38: what it clusters by, the distance to the k-th neighbour, is held here by the temperature.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import pdist, squareform
from scipy.special import logsumexp
from scipy.stats import skew
from sklearn.decomposition import PCA
from sklearn.metrics import calinski_harabasz_score, davies_bouldin_score, silhouette_samples
from sklearn.neighbors import LocalOutlierFactor
from threadpoolctl import threadpool_limits
from vendi_score import vendi

from fabric_pipelines.analytics.health import HealthTable, Metric, Status
from tests.unit.analytics.edges import SIZES, good_rows, store, table, value

# all dimensions around a lane, a warp and a tile; each metric of distance with either parity
GRID: list[tuple[int, Metric]] = [
    (2, "cosine"), (3, "l2"), (7, "cosine"), (8, "l2"), (31, "cosine"), (32, "l2"), (33, "cosine"), (64, "l2"),
    (127, "cosine"), (128, "l2"), (129, "cosine"), (257, "l2"), (384, "cosine"), (1025, "l2"), (1536, "cosine"),
]  # fmt: skip
grid = pytest.mark.parametrize(("dim", "metric"), GRID)
REL = 1e-8


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threadpool_limits(1):
        yield


@cache
def measured(dim: int, metric: Metric) -> tuple[HealthTable, list[np.ndarray]]:
    csr = store(dim, SIZES, seed=2)
    return table(csr, metric), [good_rows(csr, at, metric) for at in range(len(SIZES))]


def clusters(dim: int, metric: Metric, least: int) -> Iterator[tuple[HealthTable, int, np.ndarray]]:
    found, rows = measured(dim, metric)
    yield from ((found, at, rows[at]) for at in range(len(SIZES)) if SIZES[at] >= least)


@grid
def test_separation_is_scikit_learns(dim: int, metric: Metric) -> None:
    found, rows = measured(dim, metric)
    every, owner = np.concatenate(rows), np.repeat(np.arange(len(SIZES)), SIZES)
    kind = "sqeuclidean" if metric == "l2" else "cosine"
    samples = silhouette_samples(every, owner, metric=kind)
    for at, size in enumerate(SIZES):
        if size == 0:
            assert found.readings["silhouette"].status[at] == Status.U_SIZE
            continue
        own = samples[owner == at]
        assert value(found, "silhouette", at) == pytest.approx(own.mean(), abs=1e-9)
        negative = value(found, "silhouette_negative_fraction", at)
        assert negative == pytest.approx((own < 0).mean(), abs=1e-12)
    terms = found.readings["davies_bouldin_term"].value[np.array(SIZES) > 0]
    assert terms.mean() == pytest.approx(davies_bouldin_score(every, owner), rel=REL)
    within = np.array(
        [((one - one.mean(axis=0)) ** 2).sum() if len(one) > 1 else 0 for one in rows]
    )
    whole = np.nansum(within * found.readings["calinski_harabasz_term"].value)
    # a lone row has no spread to divide by, and its own part is undefined: it goes in by its distance
    lone, middle = rows[SIZES.index(1)][0], every.mean(axis=0)
    filled = sum(size > 0 for size in SIZES)
    whole += ((lone - middle) ** 2).sum() * (len(every) - filled) / (filled - 1)
    whole /= within.sum()
    assert whole == pytest.approx(calinski_harabasz_score(every, owner), rel=REL)


@grid
def test_shape_and_diversity_are_those_of_scikit_learn_and_vendi_score(
    dim: int, metric: Metric
) -> None:
    for found, at, rows in clusters(dim, metric, 2):
        shares = PCA(svd_solver="full").fit(rows).explained_variance_ratio_
        assert value(found, "anisotropy", at) == pytest.approx(shares[0], rel=REL)
        shares = shares[shares > 1e-30]
        rank = np.exp(-(shares * np.log(shares)).sum())
        assert value(found, "effective_rank", at) == pytest.approx(rank, rel=REL)
        direction = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        small = direction.T @ direction if dim < len(rows) else direction @ direction.T
        shares = np.linalg.eigvalsh(small / len(rows))
        score = np.exp(vendi.entropy_q(shares[shares > 1e-14]))
        if dim < 33:
            assert score == pytest.approx(vendi.score_dual(rows), rel=REL)
        assert value(found, "vendi_score", at) == pytest.approx(score, rel=REL)


@grid
def test_distances_and_kernel_sums_are_those_of_scipy(dim: int, metric: Metric) -> None:
    for found, at, rows in clusters(dim, metric, 2):
        every, size = pdist(rows), len(rows)
        near = np.sort(squareform(every) + np.diag(np.full(size, np.inf)), axis=1)
        first = near[:, 0]
        heat = np.median(near[:, min(10, size - 1) - 1]) ** 2
        energy = np.concatenate([every**2 / 2] * 2)
        expected = {
            "mean_pairwise_distance": every.mean(),
            "nn_distance_mean": first.mean(),
            "kernel_temperature": heat,
            "free_energy": np.log(len(energy)) - logsumexp(-energy / heat),
        }
        for name, number in expected.items():
            assert value(found, name, at) == pytest.approx(number, rel=REL, abs=1e-9), (name, at)
        spread = value(found, "nn_distance_cv", at)
        assert spread == pytest.approx(first.std() / first.mean(), rel=REL, abs=1e-7)


@grid
def test_the_graph_is_that_of_scipy_and_scikit_learn(dim: int, metric: Metric) -> None:
    for found, at, rows in clusters(dim, metric, 3):
        size = len(rows)
        apart = squareform(pdist(rows)) + np.diag(np.full(size, np.inf))
        listed = np.argsort(apart, axis=1, kind="stable")[:, : min(10, size - 1)]
        degree = np.bincount(listed.reshape(-1), minlength=size)
        expected = skew(degree) if degree.std() > 0 else 0.0
        assert value(found, "hubness_skewness", at) == pytest.approx(expected, rel=REL, abs=1e-12)
        start = np.repeat(np.arange(size), listed.shape[1])
        links = coo_array((np.ones(len(start)), (start, listed.reshape(-1))), shape=(size, size))
        owner = connected_components(links, directed=False)[1]
        largest = np.bincount(owner).max() / size
        assert value(found, "largest_component_share", at) == pytest.approx(largest, abs=1e-12)
        lof = LocalOutlierFactor(n_neighbors=min(20, size - 1), algorithm="brute").fit(rows)
        factor = -lof.negative_outlier_factor_
        least, most = (factor > 1.5 + 1e-9).mean(), (factor > 1.5 - 1e-9).mean()
        assert least <= value(found, "lof_outlier_fraction", at) <= most


@pytest.mark.parametrize(("dim", "metric"), [case for case in GRID if case[0] > 2])
def test_the_dimension_is_that_of_scikit_dimension(dim: int, metric: Metric) -> None:
    from skdim.id import TwoNN  # here: it compiles for seconds

    for found, at, rows in clusters(dim, metric, 3):
        near = np.sort(squareform(pdist(rows)) + np.diag(np.full(len(rows), np.inf)), axis=1)
        two = near[near[:, 0] > 0, :2]  # copies say nothing of a ratio
        with np.errstate(divide="ignore"):
            expected = TwoNN(discard_fraction=0.0, dist=True, method="mle").fit(two).dimension_
        assert value(found, "intrinsic_dimension", at) == pytest.approx(expected, rel=1e-6)
