"""Kernel family centre_tile against its twin: the source on the CPU, and the cubin on a real card."""

import numpy as np

from fabric_pipelines.analytics import kernels_tiles as tiles
from fabric_pipelines.analytics.reference.centre_tile import centre_partners, centre_points
from fabric_pipelines.device.card import Card
from tests.gpu.grid import DIMS, both
from tests.gpu.test_pair_tile import tolerance2, upload

# side of the tile, dimension, rows, centres
EDGES = [
    (64, 1, 3, 65), (64, 33, 65, 2), (64, 129, 1, 64), (64, 32, 63, 1),
    (128, 2, 129, 127), (128, 65, 128, 130), (128, 1025, 2, 3), (128, 36, 127, 1),
]  # fmt: skip
CARD_EDGES = [
    *((side, dim, rows, centres) for side, rows, centres in ((64, 65, 1), (64, 257, 63), (128, 129, 257)) for dim in DIMS),
    *((side, dim, 129, 4097) for side in (64, 128) for dim in (2, 33, 129)),
]  # fmt: skip


def scene(dim: int, count: int, listed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng([dim, count, listed])
    centres = rng.standard_normal((listed, dim)).astype(np.float32)
    own = rng.integers(0, listed, count)
    rows = (centres[own] + 0.5 * rng.standard_normal((count, dim))).astype(np.float32)
    spread, size = rng.uniform(0, 2, listed) * dim, rng.integers(1, 9, listed).astype(np.float64)
    return rows, centres, own, spread, size


def whole(card: Card, rows: np.ndarray) -> tiles.TileRows:
    return upload(card, rows, np.array([0, len(rows)]))


def points(card: Card, given: tuple[np.ndarray, ...], **how: int) -> tuple[np.ndarray, ...]:
    rows, centres, *others = given
    found = tiles.centre_points(
        card,
        whole(card, rows),
        whole(card, centres),
        *(card.upload(each) for each in others),
        **how,
    )
    return tuple(card.download(part) for part in found)


def partners(
    card: Card, centres: np.ndarray, radius: np.ndarray, **how: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    found = tiles.centre_partners(card, whole(card, centres), card.upload(radius), 0.0, **how)
    partner, ratio = tiles.greatest_partner(card.download(found.key))
    return partner, ratio, card.download(found.coincident)


@both("side,dim,count,listed", CARD_EDGES, EDGES)
def test_own_and_nearest_centres_and_silhouette_means_equal_the_twin(
    card: Card, side: int, dim: int, count: int, listed: int
) -> None:
    given = scene(dim, count, listed)
    own2, near, a, b = points(card, given, side=side)
    exact = centre_points(*given)
    slack = tolerance2(np.concatenate(given[:2])).max()
    np.testing.assert_allclose(own2, exact.own2, rtol=1e-6, atol=slack)
    np.testing.assert_allclose(a, exact.a, rtol=1e-6, atol=9 * slack)
    np.testing.assert_allclose(b, exact.b, rtol=1e-6, atol=slack)
    number, near2 = tiles.nearest_centre(near)
    if listed == 1:
        assert (number == -1).all()
        assert np.isinf(b).all()
        return
    np.testing.assert_allclose(near2, exact.near2, rtol=1e-6, atol=slack)
    apart = ((given[0].astype(np.float64) - given[1][number]) ** 2).sum(axis=1)
    np.testing.assert_allclose(apart, exact.near2, rtol=1e-6, atol=slack)
    assert (number != given[2]).all()


@both("side,dim,listed", [(s, d, n) for s in (64, 128) for d in DIMS for n in (1, 2, 65, 129)],
      [(64, 3, 65), (64, 40, 2), (128, 1, 129), (128, 130, 127), (64, 33, 1)])  # fmt: skip
def test_partners_equal_the_twin(card: Card, side: int, dim: int, listed: int) -> None:
    rng = np.random.default_rng([dim, listed])
    centres = rng.standard_normal((listed, dim)).astype(np.float32)
    radius = rng.uniform(0.1, 2, listed).astype(np.float32)
    exact = centre_partners(centres, radius, 0.0)
    partner, ratio, coincident = partners(card, centres, radius, side=side)
    lost = tolerance2(centres).max() / 2
    least2 = ((radius + radius.max()) / np.nan_to_num(exact.ratio, nan=1.0)).min() ** 2
    np.testing.assert_allclose(ratio, exact.ratio, rtol=1e-6 + lost / least2)
    assert (partner == exact.partner).mean() > 0.99 or listed < 3
    assert not coincident.any()


@both("dim", [1, 31, 33, 129, 1000], [1, 33])
def test_a_signal_in_the_last_dimension_alone_is_seen(card: Card, dim: int) -> None:
    rows, centres = np.zeros((3, dim), np.float32), np.zeros((3, dim), np.float32)
    rows[:, -1], centres[:, -1] = [0, 3, 9], [1, 4, 8]
    spread, size = np.array([0.0, 100.0, 1.0]), np.array([1.0, 2.0, 3.0])
    for side in (64, 128):
        found = points(card, (rows, centres, np.array([0, 1, 2]), spread, size), side=side)
        assert found[0].tolist() == [1, 1, 1]
        assert tiles.nearest_centre(found[1])[0].tolist() == [1, 0, 1]
        assert found[2].tolist() == [1, 202, 3]
        assert found[3].tolist() == [65, 4, 64]
        partner, ratio, _ = partners(card, centres, np.float32([1, 1, 3]), side=side)
        assert partner.tolist() == [1, 2, 1]
        assert ratio.tolist() == [np.float32(2) / np.float32(3), 1, 1]


@both("dim", [3, 64, 768], [3, 40])
def test_equal_centres_are_named_and_ties_go_to_the_lower_number(card: Card, dim: int) -> None:
    rng = np.random.default_rng(dim)
    centres = np.tile(rng.standard_normal(dim).astype(np.float32), (70, 1))
    centres[40:] = -centres[0]
    rows = np.repeat(centres[:1], 3, axis=0)
    flat = (np.zeros(70), np.full(70, 2.0))
    own2, near, _, b = points(card, (rows, centres, np.array([0, 1, 50]), *flat))
    assert tiles.nearest_centre(near)[0].tolist() == [1, 0, 0]
    assert own2[:2].tolist() == [0, 0]
    assert b.tolist() == [0, 0, 0]
    partner, ratio, coincident = partners(card, centres, np.ones(70, np.float32))
    assert coincident.all()
    assert (partner[:40] == 40).all()
    assert (partner[40:] == 0).all()
    assert len(set(ratio.tolist())) == 1
    same, _, _ = partners(card, centres[:40], np.ones(40, np.float32))
    assert (same == -1).all()


@both("dim", [3, 128, 768], [40])
def test_any_grid_and_any_tile_give_the_same_bytes(card: Card, dim: int) -> None:
    given = scene(dim, 150, 70)
    first = [part.tobytes() for part in points(card, given, side=64)]
    for how in ({"blocks": 1}, {"blocks": 3}, {"side": 128}):
        assert [part.tobytes() for part in points(card, given, **how)] == first
    radius = np.ones(70, np.float32)
    pair = [part.tobytes() for part in partners(card, given[1], radius, side=64)]
    for how in ({"blocks": 1}, {"side": 128}):
        assert [part.tobytes() for part in partners(card, given[1], radius, **how)] == pair


@both("rows,side", [(100, 64), (1 << 20, 128)], [(100, 64), (385, 128)])
def test_small_sets_take_the_smaller_tile(card: Card, rows: int, side: int) -> None:
    assert tiles._side_for(card, rows) == side
