"""No kernel has a race: two threads that touch a value, one of them writing, with no barrier, collective or atomic between.

The sources run on the CPU with every load and store watched (testing.host_gpu, races=True); nothing here needs a card, and
none has been asked. The families whose threads share memory; in the others each value has one thread.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines.testing.host_gpu import HostGpu
from tests.gpu import (
    test_centre_tile,
    test_csr_select,
    test_csr_syrk,
    test_flat_select,
    test_gauss_tile,
    test_knn_graph,
    test_pair_tile,
    test_point_score,
    test_spectrum,
    test_two_means,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def watching(host: HostGpu) -> HostGpu:
    """`host` says whether there is a compiler."""
    return HostGpu(ROOT / "cuda", ROOT / "build" / "host_cuda", races=True)


def quantiles(card: HostGpu) -> None:
    """One block does them all: many rows, none that counts, few rows."""
    indptr = np.array([0, 40, 400, 500, 510])
    flag = np.zeros(510, np.uint8)
    flag[40:400] = 1
    test_csr_select.run(card, (test_csr_select.values("radii", 510), flag, indptr), blocks=1)


def limits(card: HostGpu) -> None:
    """One block sorts the bounds of several queries."""
    bound = np.random.default_rng(0).random((3, 1024), np.float32)
    where = (card.upload(bound), 3, 10, card.empty(3, np.float32))
    card.launch("flat_select", "flat_limit", 1, where)


WORK: dict[str, Callable[[HostGpu], object]] = {
    "csr_select": quantiles,
    "flat_select": limits,
    "flat_select of a tile": lambda card: (
        test_flat_select.test_bounds_limits_and_rows_taken_are_the_twins(card, 2, 1100, 1100, "l2")
    ),
    "csr_syrk": lambda card: [
        test_csr_syrk.run(card, test_csr_syrk.given(dim, [dim, 3]), units=True) for dim in (33, 98)
    ],
    "spectrum": lambda card: test_spectrum.run(
        card, [test_spectrum.gram(20, 30), test_spectrum.gram(66, 80)]
    ),
    "knn_graph": lambda card: test_knn_graph.run(card, test_knn_graph.lists([40, 100, 3], 20)),
    "two_means": lambda card: test_two_means.run(card, test_two_means.given(33, [40, 200])[0]),
    "pair_tile": lambda card: test_pair_tile.test_sums_extremes_and_neighbours_equal_the_twin(
        card, 32, 33, [70, 3]
    ),
    "gauss_tile": lambda card: test_gauss_tile.test_densities_and_energies_equal_the_twin(
        card, 32, 33, [70, 3]
    ),
    "centre_tile": lambda card: (
        test_centre_tile.test_own_and_nearest_centres_and_silhouette_means_equal_the_twin(
            card, 64, 33, 100, 70
        )
    ),
    "point_score": lambda card: test_point_score.test_means_origin_scale_and_centres_are_the_twins(
        card, 33
    ),
}


@pytest.mark.parametrize("work", WORK, ids=lambda work: f"host-{work}")
def test_no_two_threads_race(watching: HostGpu, work: str) -> None:
    WORK[work](watching)  # a race is a CheckFailed that names the value and both threads
    assert sum(watching.launches.values()) > 0
