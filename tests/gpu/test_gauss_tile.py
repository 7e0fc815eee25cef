"""Kernel family gauss_tile against its twin: the source on the CPU, and the cubin on a real card."""

import numpy as np

from fabric_pipelines.analytics import kernels_tiles as tiles
from fabric_pipelines.analytics.reference.gauss_tile import gauss_rows
from fabric_pipelines.device.card import Card
from tests.gpu.grid import DIMS, both
from tests.gpu.test_pair_tile import cloud, copies, upload

EDGES = [
    (32, 1, [0, 33, 1, 2]), (32, 33, [31, 32, 0]), (64, 2, [65, 1]), (64, 129, [64, 2]),
    (128, 3, [129]), (128, 65, [127, 0, 2]), (128, 1025, [5]),
]  # fmt: skip
CARD_EDGES = [
    *((side, dim, sizes) for side, sizes in ((32, [0, 1, 2, 31, 33, 127]), (64, [63, 65, 129]), (128, [127, 257])) for dim in DIMS),
    *((side, dim, [4097]) for side in (64, 128) for dim in (2, 33, 129)),
]  # fmt: skip


def run(
    card: Card, rows: np.ndarray, bounds: np.ndarray, heat: np.ndarray, **how: int
) -> tuple[np.ndarray, ...]:
    found = tiles.gauss_tile(
        card, upload(card, rows, bounds), card.upload(copies(rows)), heat, **how
    )
    return tuple(card.download(part) for part in found)


def readings(parts: tuple[np.ndarray, ...], heat: np.ndarray) -> tuple[np.ndarray, ...]:
    """ln density, mean and mean square of E of each row, by moments; heat: T of each row's cluster."""
    least, weight, first, second = (part.astype(np.float64) for part in parts)
    first, second = first / weight, second / weight
    return (
        np.log(weight) - least / (2 * heat),
        (least + first) / 2,
        (least**2 + 2 * least * first + second) / 4,
    )


@both("side,dim,sizes", CARD_EDGES, EDGES)
def test_densities_and_energies_equal_the_twin(
    card: Card, side: int, dim: int, sizes: list[int]
) -> None:
    rows, bounds = cloud(dim, sizes)
    heat = np.linspace(0.2, 1.5, len(sizes)) * dim
    exact = gauss_rows(rows, bounds, heat)
    several = np.repeat(np.array(sizes) > 1, sizes)
    parts = tuple(part[several] for part in run(card, rows, bounds, heat, side=side))
    for got, expected in zip(readings(parts, np.repeat(heat, sizes)[several]), exact, strict=True):
        np.testing.assert_allclose(got, expected[several], rtol=1e-5, atol=1e-5)


@both("dim", [1, 31, 33, 129, 1000], [1, 33])
def test_a_signal_in_the_last_dimension_alone_is_seen(card: Card, dim: int) -> None:
    rows = np.zeros((3, dim), dtype=np.float32)
    rows[:, -1] = [0, 1, 3]
    for side in tiles.SIDES:
        parts = run(card, rows, np.array([0, 3]), np.array([2.0]), side=side)
        assert parts[0].tolist() == [1, 1, 4]
        np.testing.assert_allclose(parts[1], 1 + np.exp([-2, -0.75, -1.25]), rtol=1e-6)
        np.testing.assert_allclose(
            parts[2], [8 * np.exp(-2), 3 * np.exp(-0.75), 5 * np.exp(-1.25)], rtol=1e-6
        )


@both("side", tiles.SIDES, [32])
def test_a_nearer_row_that_comes_late_rescales_what_was_summed(card: Card, side: int) -> None:
    """Rows come nearer and nearer to the last one, a thousand temperatures in all: plain weights would all be 0."""
    rows = np.linspace(60, 0, 140).astype(np.float32)[:, None] ** 2
    heat = np.array([1.0])
    parts = run(card, rows, np.array([0, 140]), heat, side=side)
    exact = gauss_rows(rows, np.array([0, 140]), heat)
    for got, expected in zip(readings(parts, heat), exact, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert np.exp(exact.log_density[0]) == 0


def test_a_cluster_of_copies_weighs_its_other_rows(card: Card) -> None:
    rows = np.tile(np.float32([[1, 2, 3]]), (40, 1))
    least, weight, first, second = run(card, rows, np.array([0, 40]), np.array([0.5]))
    assert (weight == 39).all()
    assert not np.stack([least, first, second]).any()


@both("dim", [3, 128, 768], [40])
def test_any_grid_gives_the_same_bytes(card: Card, dim: int) -> None:
    rows, bounds = cloud(dim, [40, 0, 70, 1, 33])
    heat = np.full(5, float(dim))
    kept = np.repeat([True, True, False, True], [40, 70, 1, 33])
    first, *others = (run(card, rows, bounds, heat, blocks=blocks) for blocks in (2, 1, 5))
    assert all(np.isfinite(part[kept]).all() for part in first)
    for other in others:
        assert [part[kept].tobytes() for part in other] == [part[kept].tobytes() for part in first]
