"""Kernel family csr_centroid against its twin: the source on the CPU, and the cubin on a real card."""

import numpy as np

from fabric_pipelines.analytics import kernels
from fabric_pipelines.analytics.csr import Csr
from fabric_pipelines.analytics.sweeps import CpuSweeps
from fabric_pipelines.device.card import Card
from tests.gpu.grid import both, every_dim, store, weights


def run(card: Card, csr: Csr, weight: np.ndarray, **rest: int) -> np.ndarray:
    return card.download(
        kernels.csr_centroid(
            card, card.upload(csr.rows), card.upload(weight), card.upload(csr.indptr), **rest
        )
    )


@every_dim
def test_sums_equal_the_twin_at_every_size_of_cluster(card: Card, dim: int) -> None:
    csr = store(dim)
    weight = weights(csr)
    found = run(card, csr, weight)
    whole = Csr(np.abs(np.nan_to_num(csr.rows, posinf=0, neginf=0)), csr.indptr, csr.ids)
    bound = CpuSweeps(whole).centroid(weight)  # sum of |w x|: what rounding is measured against
    assert (np.abs(found - CpuSweeps(csr).centroid(weight)) <= 1e-14 * bound).all()


@every_dim
def test_a_signal_in_the_last_dimension_alone_is_seen(card: Card, dim: int) -> None:
    rows = np.zeros((300, dim), dtype=np.float32)
    rows[:, -1] = 1.0
    csr = Csr(rows, np.array([0, 255, 255, 257, 300]), np.arange(300))
    found = run(card, csr, np.ones(300))
    assert found[:, -1].tolist() == [255, 0, 2, 43]
    assert not found[:, :-1].any()


@both("dim", [3, 129, 1000, 1024], [3, 65])
def test_ten_runs_any_grid_and_any_window_give_the_same_bytes(card: Card, dim: int) -> None:
    csr = store(dim)
    weight = weights(csr)
    first = run(card, csr, weight).tobytes()
    assert all(run(card, csr, weight).tobytes() == first for _ in range(9))
    assert all(run(card, csr, weight, blocks=blocks).tobytes() == first for blocks in (1, 7, 1000))
    assert run(card, csr, weight, window_bytes=1).tobytes() == first


def test_more_clusters_than_rows_and_no_rows_at_all(card: Card) -> None:
    indptr = np.concatenate([np.zeros(5000), np.full(5001, 3)]).astype(np.int64)
    rows = np.ones((3, 6), dtype=np.float32)
    found = run(card, Csr(rows, indptr, np.arange(3)), np.ones(3))
    assert found.sum(axis=1).nonzero()[0].tolist() == [4999]
    nothing = Csr(rows[:0], np.zeros(4, dtype=np.int64), np.arange(0))
    assert run(card, nothing, np.ones(0)).tolist() == [[0.0] * 6] * 3
