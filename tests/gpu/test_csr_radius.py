"""Kernel family csr_radius against its twin: the source on the CPU, and the cubin on a real card."""

import numpy as np

from fabric_pipelines.analytics import kernels
from fabric_pipelines.analytics.csr import Csr
from fabric_pipelines.analytics.sweeps import CpuSweeps
from fabric_pipelines.device.card import Card
from tests.gpu.grid import both, every_dim, store, weights


def means(csr: Csr, weight: np.ndarray) -> np.ndarray:
    return CpuSweeps(csr).centroid(weight) / np.maximum(csr.sizes, 1)[:, None]


def run(
    card: Card, csr: Csr, weight: np.ndarray, centroid: np.ndarray, blocks: int | None = None
) -> np.ndarray:
    host = (csr.rows, weight, csr.indptr, centroid)
    return card.download(
        kernels.csr_radius(card, *(card.upload(part) for part in host), blocks=blocks)
    )


@every_dim
def test_squared_radii_equal_the_twin_at_every_size_of_cluster(card: Card, dim: int) -> None:
    csr = store(dim)
    weight = weights(csr)
    centroid = means(csr, weight)
    found = run(card, csr, weight, centroid)
    expected = CpuSweeps(csr).radius2(weight, centroid)
    np.testing.assert_allclose(found, expected, rtol=2 * np.finfo(float).eps * max(1, dim) ** 0.5)
    assert (found[weight == 0] == 0).all()


@every_dim
def test_a_signal_in_the_last_dimension_alone_is_seen(card: Card, dim: int) -> None:
    rows = np.zeros((5, dim), dtype=np.float32)
    rows[:, -1] = [1, 2, 3, 4, 5]
    csr = Csr(rows, np.array([0, 2, 2, 5]), np.arange(5))
    centroid = np.zeros((3, dim))
    centroid[:, -1] = [1, 9, 3]
    assert run(card, csr, np.ones(5), centroid).tolist() == [0, 1, 0, 1, 4]


def test_a_tight_cluster_far_from_the_origin_keeps_its_digits(card: Card) -> None:
    rng = np.random.default_rng(0)
    rows = (1000 + 1e-3 * rng.standard_normal((500, 768))).astype(np.float32)
    csr = Csr(rows, np.array([0, 500]), np.arange(500))
    centroid = rows.astype(np.float64).mean(axis=0, keepdims=True)
    exact = ((rows.astype(np.float64) - centroid) ** 2).sum(axis=1)
    np.testing.assert_allclose(run(card, csr, np.ones(500), centroid), exact, rtol=1e-13)


@both("dim", [3, 128, 768, 1025], [3, 64])
def test_ten_runs_and_any_grid_give_the_same_bytes(card: Card, dim: int) -> None:
    csr = store(dim)
    weight = weights(csr)
    centroid = means(csr, weight)
    first = run(card, csr, weight, centroid).tobytes()
    assert all(run(card, csr, weight, centroid).tobytes() == first for _ in range(9))
    for blocks in (1, 7, 1000):
        assert run(card, csr, weight, centroid, blocks).tobytes() == first
