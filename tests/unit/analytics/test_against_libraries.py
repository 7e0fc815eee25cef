"""Metrics that a public library defines too equal what it answers."""

from collections.abc import Iterator

import diptest
import numpy as np
import pytest
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import pdist, squareform
from scipy.special import logsumexp
from scipy.stats import skew
from sklearn.decomposition import PCA
from sklearn.neighbors import KernelDensity, LocalOutlierFactor, NearestNeighbors
from threadpoolctl import threadpool_limits
from vendi_score import vendi

from fabric_pipelines.analytics.csr import Csr
from fabric_pipelines.analytics.dip import dip
from fabric_pipelines.analytics.health import HealthTable, Metric, measure
from tests.unit.analytics.edges import good_rows, table, value

CASES = [(3, 1), (3, 40), (25, 2), (60, 7), (60, 129), (200, 33), (300, 768), (700, 5)]
sizes_and_dims = pytest.mark.parametrize(("size", "dim"), CASES)
both = pytest.mark.parametrize("metric", ["l2", "cosine"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threadpool_limits(1):
        yield


def cloud(size: int, dim: int) -> Csr:
    """One cluster of uneven spread with a second lump and a few far rows, off the origin."""
    rng = np.random.default_rng([size, dim])
    rows = 3 + rng.standard_normal((size, dim)) * np.linspace(1.5, 0.2, dim)
    rows[: size // 3, 0] += 4
    rows[: size // 50] *= 4
    return Csr(rows.astype(np.float32), np.array([0, size]), rng.permutation(size))


def pair(size: int, dim: int, metric: Metric = "l2") -> tuple[HealthTable, np.ndarray]:
    csr = cloud(size, dim)
    return table(csr, metric), good_rows(csr, 0, metric)


def neighbours_of(rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Distances and places of the k nearest others."""
    return NearestNeighbors(n_neighbors=k, algorithm="brute").fit(rows).kneighbors()


@both
@sizes_and_dims
def test_anisotropy_equals_the_first_ratio_of_pca(size: int, dim: int, metric: Metric) -> None:
    if dim == 1 and metric == "cosine":
        return require_no_spread(size)
    found, rows = pair(size, dim, metric)
    expected = PCA(svd_solver="full").fit(rows).explained_variance_ratio_
    assert value(found, "anisotropy") == pytest.approx(expected[0], rel=1e-9)
    shares = expected[expected > 1e-30]
    rank = np.exp(-(shares * np.log(shares)).sum())
    assert value(found, "effective_rank") == pytest.approx(rank, rel=1e-9)


def require_no_spread(size: int) -> None:
    """Positive numbers all point the same way."""
    found = table(cloud(size, 1), "cosine")
    assert found.readings["anisotropy"].status[0] == 2


@both
@sizes_and_dims
def test_vendi_score_equals_its_authors_in_both_forms(size: int, dim: int, metric: Metric) -> None:
    found, rows = pair(size, dim, metric)
    got = value(found, "vendi_score")
    assert got == pytest.approx(vendi.score_dual(rows), rel=1e-9)
    direction = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    values = np.linalg.eigvalsh(direction @ direction.T / size)
    assert got == pytest.approx(np.exp(vendi.entropy_q(values[values > 1e-14])), rel=1e-9)
    order2 = np.exp(vendi.entropy_q(values, q=2))
    assert found.aux["vendi_score_order2"][0] == pytest.approx(order2, rel=1e-9)


@both
@sizes_and_dims
def test_coding_rate_equals_the_determinant_of_its_paper(
    size: int, dim: int, metric: Metric
) -> None:
    found, rows = pair(size, dim, metric)
    sign, log_det = np.linalg.slogdet(np.eye(dim) + dim / (size * 0.25) * rows.T @ rows)
    assert sign == 1
    assert value(found, "coding_rate") == pytest.approx(log_det / 2, rel=1e-9)


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e4, 1e6, 1e9])
def test_coding_rate_of_rows_on_one_line_is_that_of_their_one_eigenvalue(scale: float) -> None:
    """Beside it a factorisation loses the identity: from a scale of some 1e5 there is no factor."""
    rng = np.random.default_rng(0)
    lengths, axis = rng.integers(1, 256, (200, 1)), rng.integers(1, 3, (1, 784))
    rows = (lengths * axis * scale).astype(np.float32)
    table = measure(
        np.concatenate([rows, rng.standard_normal((50, 784), dtype=np.float32)]),
        np.array([0, 200, 250]), np.arange(250), metric="l2", only=["coding_rate"],
    )  # fmt: skip
    growth, greatest = 784 / 0.25, (rows.astype(np.float64) ** 2).sum() / 200
    expected = 0.5 * np.log1p(growth * greatest)
    assert table.readings["coding_rate"].value[0] == pytest.approx(expected, rel=2e-5)
    assert np.isfinite(table.readings["coding_rate"].value[1])


@pytest.mark.parametrize(("size", "dim"), [case for case in CASES if case[1] > 1])
def test_intrinsic_dimension_equals_the_maximum_likelihood_of_scikit_dimension(
    size: int, dim: int
) -> None:
    from skdim.id import TwoNN  # here: it compiles for seconds

    found, rows = pair(size, dim)
    two = neighbours_of(rows, 2)[0]
    with np.errstate(divide="ignore"):  # it takes the logarithm of 1 - 1 for a plot
        expected = TwoNN(discard_fraction=0.0, dist=True, method="mle").fit(two).dimension_
    assert value(found, "intrinsic_dimension") == pytest.approx(expected, rel=1e-9)


@both
@sizes_and_dims
def test_distances_equal_scipy(size: int, dim: int, metric: Metric) -> None:
    if dim == 1 and metric == "cosine":
        return require_no_spread(size)
    found, rows = pair(size, dim, metric)
    every = pdist(rows)
    k = min(10, size - 1)
    near = np.sort(squareform(every) + np.diag(np.full(size, np.inf)), axis=1)
    assert value(found, "mean_pairwise_distance") == pytest.approx(every.mean(), rel=1e-9)
    assert value(found, "nn_distance_mean") == pytest.approx(near[:, 0].mean(), rel=1e-9)
    spread = near[:, 0].std() / near[:, 0].mean()
    assert value(found, "nn_distance_cv") == pytest.approx(spread, rel=1e-8)
    temperature = np.median(near[:, k - 1]) ** 2
    assert value(found, "kernel_temperature") == pytest.approx(temperature, rel=1e-9)
    assert found.aux["diameter"][0] == pytest.approx(every.max(), rel=1e-9)


@sizes_and_dims
def test_hubness_equals_the_skewness_of_scipy(size: int, dim: int) -> None:
    found, rows = pair(size, dim)
    listed = neighbours_of(rows, min(10, size - 1))[1]
    degree = np.bincount(listed.reshape(-1), minlength=size)
    expected = skew(degree) if degree.std() > 0 else 0.0
    assert value(found, "hubness_skewness") == pytest.approx(expected, rel=1e-9)


@sizes_and_dims
def test_outliers_equal_those_of_scikit_learn(size: int, dim: int) -> None:
    found, rows = pair(size, dim)
    lof = LocalOutlierFactor(n_neighbors=min(20, size - 1), algorithm="brute").fit(rows)
    expected = (-lof.negative_outlier_factor_ > 1.5).mean()
    assert value(found, "lof_outlier_fraction") == pytest.approx(expected, abs=1e-15)


@sizes_and_dims
def test_components_equal_scipy(size: int, dim: int) -> None:
    found, rows = pair(size, dim)
    listed = neighbours_of(rows, min(10, size - 1))[1]
    start = np.repeat(np.arange(size), listed.shape[1])
    graph = coo_array((np.ones(len(start)), (start, listed.reshape(-1))), shape=(size, size))
    owner = connected_components(graph, directed=False)[1]
    expected = np.bincount(owner).max() / size
    assert value(found, "largest_component_share") == pytest.approx(expected, abs=1e-15)


def test_lumps_far_apart_are_components() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((90, 6)).astype(np.float32)
    rows[:30] += 100
    rows[30:45] -= 100
    found = table(Csr(rows, np.array([0, 90]), np.arange(90)))
    assert value(found, "largest_component_share") == 0.5


@both
@sizes_and_dims
def test_free_energy_and_entropy_equal_log_sum_exp_of_scipy(
    size: int, dim: int, metric: Metric
) -> None:
    if dim == 1 and metric == "cosine":
        return require_no_spread(size)
    found, rows = pair(size, dim, metric)
    heat = value(found, "kernel_temperature")
    energy = np.concatenate([pdist(rows, "sqeuclidean") / 2] * 2)  # ordered pairs
    log_z = logsumexp(-energy / heat) - np.log(len(energy))
    assert value(found, "free_energy") == pytest.approx(-log_z, rel=1e-9)
    weight = np.exp(-energy / heat - logsumexp(-energy / heat))
    divergence = (
        weight * np.log(weight * len(energy), where=weight > 0, out=np.zeros(len(weight)))
    ).sum()
    # e^S, S = -KL(weights || all pairs alike)
    assert value(found, "pair_entropy") == pytest.approx(np.exp(-divergence), rel=1e-9)
    return None


@sizes_and_dims
def test_modes_equal_the_peaks_of_the_kernel_density_of_scikit_learn(size: int, dim: int) -> None:
    found, rows = pair(size, dim)
    width = np.sqrt(value(found, "kernel_temperature"))
    density = KernelDensity(bandwidth=width, rtol=0, atol=0).fit(rows).score_samples(rows)
    # without the row itself: e^0 of n kernels
    scale = np.log(size) + dim / 2 * np.log(2 * np.pi * width**2)
    others = np.exp(density + scale) - 1
    listed = neighbours_of(rows, min(10, size - 1))[1]
    told = others > 1e-9  # what is left of a lone row after the subtraction is rounding
    expected = (others[:, None] > others[listed]).all(axis=1) & told
    if told.all():
        assert value(found, "density_modes") == expected.sum()
    else:
        assert value(found, "density_modes") >= expected.sum()


@sizes_and_dims
def test_the_dip_of_the_split_is_that_of_diptest(size: int, dim: int) -> None:
    if size < 4:
        assert table(cloud(size, dim)).readings["dip"].status[0] == 1
        return
    found, rows = pair(size, dim)
    apart = rows - rows.mean(axis=0)
    axis = np.linalg.svd(apart, full_matrices=False)[2][0]
    labels = apart @ axis > 0
    for _ in range(16):
        centres = np.stack([apart[~labels].mean(axis=0), apart[labels].mean(axis=0)])
        distance = ((apart[:, None] - centres) ** 2).sum(axis=2)
        labels = distance[:, 1] < distance[:, 0]
    centres = np.stack([apart[~labels].mean(axis=0), apart[labels].mean(axis=0)])
    expected = diptest.dipstat(apart @ (centres[1] - centres[0]), allow_zero=False)
    assert value(found, "dip") == pytest.approx(expected, rel=1e-9, abs=1e-11)


def values_for_the_dip(kind: int, size: int) -> np.ndarray:
    rng = np.random.default_rng([kind, size])
    drawn = rng.standard_normal(size)
    made = [
        drawn,
        drawn + 4 * (np.arange(size) < size // 2),
        rng.integers(0, 10, size).astype(np.float64),
        rng.uniform(size=size),
        np.linspace(0, 1, size) ** 2,
        np.append(np.sqrt(np.linspace(0, 1, size - 1)), 50.0),
        np.round(drawn, 1),
        rng.integers(0, 3, size).astype(np.float64),
        np.full(size, 7.0),
    ]
    return np.sort(made[kind])


@pytest.mark.parametrize("kind", range(9))
def test_the_dip_equals_the_compiled_one(kind: int) -> None:
    for size in [*range(4, 90), 255, 256, 4095, 4097, 30000]:
        values = values_for_the_dip(kind, size)
        expected = diptest.dipstat(values, allow_zero=False)
        assert dip(values) == pytest.approx(expected, rel=1e-12), size
