"""The metrics of what lies inside a cluster equal their float64 twins at every edge of size and dimension."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from fabric_pipelines.analytics.csr import Csr
from fabric_pipelines.analytics.dip import dip
from fabric_pipelines.analytics.health import HealthTable, Metric
from fabric_pipelines.analytics.reference.gauss_tile import gauss_tile
from fabric_pipelines.analytics.reference.geometric_median import geometric_median
from fabric_pipelines.analytics.reference.knn_graph import knn_graph
from fabric_pipelines.analytics.reference.pair_tile import distances, pair_tile
from fabric_pipelines.analytics.reference.spectrum import spectrum
from fabric_pipelines.analytics.reference.two_means import two_means
from tests.unit.analytics.edges import DIMS, LARGE, SIZES, good_rows, store, table, value

grid = pytest.mark.parametrize(
    ("dim", "metric"),
    [
        (dim, metric)
        for dim in DIMS
        for metric in ("l2", "cosine")
        if (dim, metric) != (1, "cosine")
    ],
)
REL = 1e-9  # float64 over at most 4,097 rows and 4,096 dimensions; the products alone lose 1e-12


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The twins' small matrices wait a hundredfold for the library's threads on a busy machine."""
    with threadpool_limits(1):
        yield


@cache
def measured(dim: int, metric: Metric) -> tuple[Csr, HealthTable]:
    csr = store(dim, SIZES)
    found = table(csr, metric)
    assert len(found.breaches) == 0
    return csr, found


def clusters(dim: int, metric: Metric, least: int) -> Iterator[tuple[HealthTable, int, np.ndarray]]:
    csr, found = measured(dim, metric)
    for cluster, size in enumerate(SIZES):
        if size >= least:
            rows = good_rows(csr, cluster, metric)
            assert len(rows) == size == value(found, "size", cluster)
            yield found, cluster, rows


def require_equal(found: HealthTable, cluster: int, expected: dict[str, float]) -> None:
    for name, number in expected.items():
        got = value(found, name, cluster)
        least = (
            1e-11 if name == "dip" else 1e-12
        )  # coordinates are told apart to 2^-44 of the longest
        assert got == pytest.approx(number, rel=REL, abs=least), (name, cluster)


@grid
def test_geometric_median(dim: int, metric: Metric) -> None:
    for found, cluster, rows in clusters(dim, metric, 2):
        median, steps = geometric_median(rows)
        apart = rows - rows.mean(axis=0)
        radius = np.sqrt((apart**2).sum(axis=1).mean())
        offset = np.sqrt(((median - rows.mean(axis=0)) ** 2).sum()) / radius
        # a step more or less where one ends at the very stop
        got = value(found, "geometric_median_offset", cluster)
        assert got == pytest.approx(offset, abs=1e-9)
        assert found.aux["geometric_median_steps"][cluster] == steps


@grid
def test_spectrum(dim: int, metric: Metric) -> None:
    for found, cluster, rows in clusters(dim, metric, 2):
        expected = spectrum(rows)._asdict()
        centred = expected.pop("coding_rate_centred")
        require_equal(found, cluster, expected)
        assert found.aux["coding_rate_centred"][cluster] == pytest.approx(centred, rel=REL)


@grid
def test_pairs(dim: int, metric: Metric) -> None:
    for found, cluster, rows in clusters(dim, metric, 2):
        expected = pair_tile(distances(rows))._asdict()
        assert found.aux["diameter"][cluster] == pytest.approx(expected.pop("diameter"), rel=REL)
        if len(rows) == 2:
            del expected["intrinsic_dimension"]
        require_equal(found, cluster, expected)


@grid
def test_graph(dim: int, metric: Metric) -> None:
    for found, cluster, rows in clusters(dim, metric, 3):
        require_equal(found, cluster, knn_graph(distances(rows))._asdict())


@grid
def test_kernel_sums(dim: int, metric: Metric) -> None:
    for found, cluster, rows in clusters(dim, metric, 2):
        apart = distances(rows)
        expected = gauss_tile(apart, pair_tile(apart).kernel_temperature)._asdict()
        heat = expected.pop("heat_capacity")
        require_equal(found, cluster, expected)
        assert found.aux["heat_capacity"][cluster] == pytest.approx(heat, rel=1e-7, abs=1e-12)


@grid
def test_two_means_and_the_dip_between_them(dim: int, metric: Metric) -> None:
    for found, cluster, rows in clusters(dim, metric, 3):
        side, within, place = two_means(rows)
        whole = ((rows - rows.mean(axis=0)) ** 2).sum()
        null = 2 / np.pi * spectrum(rows).anisotropy
        expected = {
            "split_gain_ratio": (1 - within / whole) / null,
            "split_balance": min(side.mean(), 1 - side.mean()),
        }
        if len(rows) > 3:
            expected["dip"] = dip(np.sort(place))
        require_equal(found, cluster, expected)


@pytest.mark.parametrize(("dim", "size"), [(3, LARGE[0]), (8, LARGE[1]), (33, LARGE[2])])
def test_all_of_them_at_the_border_of_a_tile(dim: int, size: int) -> None:
    csr = store(dim, [size, 5], seed=1)
    found, rows = table(csr), good_rows(csr, 0, "l2")
    apart = distances(rows)
    pairs = pair_tile(apart)._asdict()
    sums = gauss_tile(apart, pairs["kernel_temperature"])._asdict()
    assert found.aux["diameter"][0] == pytest.approx(pairs.pop("diameter"), rel=REL)
    assert found.aux["heat_capacity"][0] == pytest.approx(sums.pop("heat_capacity"), rel=1e-7)
    shape = spectrum(rows)._asdict()
    del shape["coding_rate_centred"]
    side, within, place = two_means(rows)
    whole = ((rows - rows.mean(axis=0)) ** 2).sum()
    require_equal(
        found,
        0,
        pairs | sums | shape | knn_graph(apart)._asdict() | {
            "split_gain_ratio": (1 - within / whole) / (2 / np.pi * shape["anisotropy"]),
            "split_balance": min(side.mean(), 1 - side.mean()),
            "dip": dip(np.sort(place)),
        },
    )  # fmt: skip
