"""Kernel family spectrum against its twin: the source on the CPU, and the cubin on a real card."""

from typing import Any

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels_moments as moments
from fabric_pipelines.analytics.reference import spectrum as twin
from fabric_pipelines.device.card import Card
from tests.gpu.grid import DIMS, both

GROWTH = 100.0
EPSILON = np.finfo(float).eps


def gram(side: int, rank: int, seed: int = 0) -> np.ndarray:
    """Of `rank` random rows, in the order of magnitude of 1,000."""
    rows = 30 * np.random.default_rng([seed, side, rank]).standard_normal((rank, side))
    return rows.T @ rows / max(rank, 1)


def work_of(matrices: list[np.ndarray]) -> moments.Work:
    """A wave of as many clusters, each of as many rows as dimensions."""
    side = np.array([len(matrix) for matrix in matrices])
    at = np.cumsum(side**2) - side**2
    listed = np.stack([np.arange(len(side)), 0 * side, side, side, at], axis=1)
    vector = np.concatenate([[0], np.cumsum(side)])
    return moments.Work(listed, side, vector, vector, int((side**2).sum()), int(side.max()))


def run(
    card: Card, matrices: list[np.ndarray], *, axes: bool = True, **how: Any
) -> tuple[list[np.ndarray], ...]:
    """Eigenvalues and axis of each, then the six numbers and the status of each."""
    work = work_of(matrices)
    held = card.upload(np.concatenate([matrix.ravel() for matrix in matrices]))
    found = [
        card.download(part) for part in moments.spectrum(card, held, work, GROWTH, axes=axes, **how)
    ]
    value, axis = (np.split(part, work.vector[1:-1]) if len(part) else [] for part in found[:2])
    return value, axis, list(found[2]), list(found[3])


def require_equal(found: tuple[list[np.ndarray], ...], matrices: list[np.ndarray]) -> None:
    for value, axis, real, status, matrix in zip(*found, matrices, strict=True):
        side, exact = len(matrix), twin.moments(matrix, GROWTH)
        slack = 8 * EPSILON * side * max(exact.value[-1], 1e-300)
        assert status == 0
        np.testing.assert_allclose(value, exact.value, rtol=0, atol=slack)
        assert (np.diff(value) >= 0).all()
        trace, total, largest, entropy, squares, logs = real
        assert abs(trace - np.trace(matrix)) <= slack
        assert abs(total - value.sum()) <= slack
        assert largest == value[-1]
        np.testing.assert_allclose(entropy, exact.entropy, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(
            [squares, logs], exact[2:], rtol=1e-9, atol=GROWTH * side * slack
        )
        np.testing.assert_allclose(np.linalg.norm(axis), 1, rtol=1e-12)
        missed = matrix @ axis - largest * axis
        assert np.linalg.norm(missed) <= 1e-7 * largest + slack


@both("side", DIMS, [1, 2, 3, 16, 17, 31, 32, 33, 64, 128, 129])
def test_eigenvalues_and_axis_equal_the_twin(card: Card, side: int) -> None:
    matrices = [gram(side, 2 * side), gram(side, side // 2)]  # the other has zeros among them
    require_equal(run(card, matrices), matrices)


@both("dim", [768], [200])
def test_eigenvalues_of_a_common_embedding_equal_the_twin(card: Card, dim: int) -> None:
    falling = gram(dim, dim) * np.outer(*2 * [np.exp(-np.arange(dim) / 20)])
    require_equal(run(card, [falling]), [falling])


def test_matrices_that_break_solvers(card: Card) -> None:
    """Zeros, a diagonal, one value for all, equal pairs, one direction, blocks, tiny and huge units."""
    step = np.diag(np.arange(1.0, 41.0))
    pairs = np.kron(np.eye(20), [[2.0, 1.0], [1.0, 2.0]])
    line = np.outer(*2 * [np.arange(1.0, 34.0)])
    matrices = [np.zeros((33, 33)), np.zeros((1, 1)), step, np.eye(40), pairs, line,
                gram(20, 30) * 1e-70, gram(40, 60) * 1e70, np.full((5, 5), 1.0)]  # fmt: skip
    value, axis, real, status = run(card, matrices)
    kept = [at for at, matrix in enumerate(matrices) if matrix.any()]
    require_equal(
        tuple([part[at] for at in kept] for part in (value, axis, real, status)),
        [matrices[at] for at in kept],
    )
    for empty in (0, 1):
        assert not value[empty].any()
        assert status[empty] == 0
        assert np.isnan(real[empty][3])
        assert real[empty][[0, 1, 2, 4, 5]].tolist() == [0] * 5


def test_a_signal_in_the_last_dimension_alone_is_seen(card: Card) -> None:
    matrices = [np.zeros((side, side)) for side in (1, 31, 33, 129)]
    for matrix in matrices:
        matrix[-1, -1] = 7.0
    value, axis, _, status = run(card, matrices)
    assert [part[-1] for part in value] == pytest.approx([7.0] * 4, rel=1e-15)
    assert [np.abs(part).argmax() + 1 for part in axis] == [1, 31, 33, 129]
    assert status == [0] * 4


def test_the_axis_has_the_side_that_the_cpu_gives_it(card: Card) -> None:
    """Also among equal eigenvalues: it is what they have of the start."""
    wide = np.diag([3.0, 3.0, 1.0, 3.0])
    matrices = [wide, gram(40, 80)]
    start = np.cos(np.arange(40) * 1.7)
    axis = run(card, matrices)[1]
    expected = start[:4] * [1, 1, 0, 1]
    np.testing.assert_allclose(axis[0], expected / np.linalg.norm(expected), atol=1e-9)
    assert axis[1] @ start > 0


def test_what_is_not_finite_or_not_its_trace_has_a_status(card: Card) -> None:
    """No value goes out as if it were one. Of a matrix with an eigenvalue below 0, which no moment has, the sum is wrong."""
    for side in (5, 40):
        spoilt, endless, below = gram(side, side), gram(side, side), np.diag(np.arange(side) - 2.0)
        spoilt[-1, 0] = spoilt[0, -1] = np.nan
        endless[2, 2] = np.inf
        status = run(card, [spoilt, gram(side, side), endless, below])[3]
        assert [part != 0 for part in status] == [True, False, True, True]
        assert status[3] & 2


@both("side", [3, 33, 384], [3, 40])
def test_any_grid_gives_the_same_bytes_and_so_does_an_axis_less(card: Card, side: int) -> None:
    matrices = [gram(side, side, seed) for seed in range(5)] + [gram(2, 2)]
    first = run(card, matrices)
    for blocks in (1, 7):
        again = run(card, matrices, blocks=blocks)
        for one, other in zip(first, again, strict=True):
            assert (
                np.concatenate(one, axis=None).tobytes()
                == np.concatenate(other, axis=None).tobytes()
            )
    without = run(card, matrices, axes=False)
    assert np.concatenate(without[2]).tobytes() == np.concatenate(first[2]).tobytes()
    assert without[1] == []
