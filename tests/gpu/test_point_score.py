"""Kernel family point_score against its twin: the source on the CPU, and the cubin on a real card."""

from typing import Any

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels_points as launches
from fabric_pipelines.analytics.reference import point_score as twin
from fabric_pipelines.device.card import Card

STRIDE = 2048
COUNT = 1500
BOUNDS = (1e-5, 1e-5, 0.05)


def stored(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """norm2, flag, indptr: an empty cluster, one of one row, one of bad rows, and rows of every flag."""
    rng = np.random.default_rng(seed)
    indptr = np.array([0, 700, 700, 701, 704, COUNT])
    flag = rng.choice([0, 0, 0, 1, 2, 3, 4], COUNT).astype(np.uint8)
    flag[700], flag[701:704] = 0, [1, 2, 4]
    norm2 = np.where(flag & 3, np.nan, rng.uniform(0.1, 9, COUNT))
    return norm2, flag, indptr


def whole_of(count: np.ndarray) -> np.ndarray:
    return np.stack([count, np.full(len(count), -1)], axis=1)


def run(card: Card, launch: Any, out: dict[str, np.ndarray], **more: Any) -> dict[str, np.ndarray]:
    """The launch by the card's grid and by one block: the same bytes."""
    found = []
    for blocks in ({}, {"blocks": 1}):
        there = {name: card.upload(array) for name, array in out.items()}
        launch(tuple(there.values()), **more, **blocks)
        found.append({name: card.download(array) for name, array in there.items()})
    for name in out:
        assert found[0][name].tobytes() == found[1][name].tobytes(), name
    return found[0]


@pytest.mark.parametrize("cosine", [False, True])
def test_columns_weights_owners_and_marks_are_the_twins(card: Card, cosine: bool) -> None:
    norm2, flag, indptr = stored()
    there = [card.upload(part) for part in (norm2, flag, indptr)]
    out = {
        "column": np.zeros((2, STRIDE)), "again": np.zeros(COUNT, np.uint8), "weight": np.zeros(COUNT),
        "own": np.zeros(COUNT, np.int64), "place": np.zeros(COUNT, np.int64), "mark": np.zeros((4, STRIDE), np.uint64),
    }  # fmt: skip

    def launch(into: tuple[Any, ...], **blocks: int) -> None:
        launches.admit(card, *there, STRIDE, into, cosine=cosine, **blocks)

    found, expected = run(card, launch, out), twin.admit(norm2, flag, indptr, cosine=cosine)
    assert np.array_equal(found["column"][:, :COUNT], expected.column)
    assert np.array_equal(found["weight"], expected.weight)
    assert np.array_equal(found["again"], flag)
    assert np.array_equal(found["own"], expected.own)
    assert np.array_equal(found["place"], np.arange(COUNT))
    assert np.array_equal(found["mark"][:2, :COUNT], expected.mark)


@pytest.mark.parametrize("dim", [1, 3, 33, 257])
def test_means_origin_scale_and_centres_are_the_twins(card: Card, dim: int) -> None:
    rng = np.random.default_rng(dim)
    count = np.array([5, 0, 1, 1000, 17])
    total = rng.standard_normal((5, dim)) * 1e3 * np.maximum(count, 1)[:, None]
    total[1] = 0
    within = np.abs(rng.standard_normal(5)) * count
    real = np.zeros((5, 4))
    real[:, 0] = within
    whole, real_there, total_there = (
        card.upload(part) for part in (whole_of(count), real, total)
    )  # fmt: skip
    slack = 2 * np.finfo(float).eps * dim**0.5

    def means(into: tuple[Any, ...], **blocks: int) -> None:
        launches.means(card, total_there, whole, *into, **blocks)

    found = run(card, means, {"mean": np.zeros((5, dim)), "length2": np.zeros(5)})
    mean, length2 = twin.means(total, count)
    assert np.array_equal(found["mean"], mean)
    np.testing.assert_allclose(found["length2"], length2, rtol=slack)
    mean_there = card.upload(mean)

    def origin(into: tuple[Any, ...], **blocks: int) -> None:
        launches.origin(card, mean_there, whole, *into, **blocks)

    middle = run(card, origin, {"origin": np.zeros(dim)})["origin"]
    assert np.array_equal(middle, twin.origin(mean, count))
    some = count > 0
    if dim > 1:  # as the passes find it on the host
        assert np.array_equal(middle, np.average(mean[some], axis=0, weights=count[some]))
    middle_there = card.upload(middle)

    def reach(into: tuple[Any, ...], **blocks: int) -> None:
        launches.reach(card, mean_there, middle_there, *into, **blocks)

    far2 = run(card, reach, {"far2": np.zeros(5)})["far2"]
    np.testing.assert_allclose(far2, twin.reach(mean, middle), rtol=slack)

    unit, spread, size = (card.upload(np.zeros(n)) for n in (2, 5, 5))
    launches.unit(card, card.upload(far2), real_there, whole, (unit, spread, size))
    expected = twin.unit(far2, within, count)
    for part, same in zip((unit, spread, size), expected, strict=True):
        assert np.array_equal(card.download(part), same)
    weight, pitch = card.upload(rng.random(COUNT)), -(-dim // 4) * 4

    def centres(into: tuple[Any, ...], **blocks: int) -> None:
        launches.centres(card, mean_there, middle_there, unit, weight, into, **blocks)

    out = {
        "rows": np.full((5, pitch), 7, np.float32), "norm2": np.zeros(5, np.float32),
        "scaled": np.zeros(COUNT), "shifted": np.zeros(dim),
    }  # fmt: skip
    found = run(card, centres, out)
    scale = float(expected.unit[0])
    rows, norm2 = twin.centres(mean, middle, scale, pitch)
    assert np.array_equal(found["rows"], rows)
    np.testing.assert_allclose(found["norm2"], norm2, rtol=2.0**-23)
    assert np.array_equal(found["scaled"], card.download(weight) * scale)
    assert np.array_equal(found["shifted"], middle * scale)


@pytest.mark.parametrize(
    "reach2", [0.0, 5e-324, 1e-310, 1e-300, 0.4, 0.5, 1.0, 1.9, 2.0, 2.1, 8.0, 32.0, 1e200]
)
def test_the_scale_is_the_power_of_two_that_brings_the_reach_to_about_one(
    card: Card, reach2: float
) -> None:
    unit, spread, size = (card.upload(np.zeros(n)) for n in (2, 1, 1))
    one = (np.array([reach2]), np.zeros((1, 4)), whole_of(np.array([3])))
    launches.unit(card, *(card.upload(part) for part in one), (unit, spread, size))
    expected = np.exp2(-np.rint(np.log2(reach2) / 2)) if reach2 > 0 else 1.0
    assert card.download(unit).tolist() == [expected, reach2]


def test_scores_margins_and_errors_are_the_twins(card: Card) -> None:
    """Rows that count and others; on both centres at once, on the other one, on top of their own; distances that are no number."""
    rng = np.random.default_rng(3)
    _, flag, indptr = stored()
    own = np.repeat(np.arange(5), np.diff(indptr))
    count = np.bincount(own[flag == 0], minlength=5)
    scale, reach2 = 0.25, 13.0
    radius2, near2 = rng.uniform(0, 4, COUNT), rng.uniform(0, 1, COUNT).astype(np.float32)
    own2 = (radius2 * scale**2 * rng.uniform(0.99, 1.01, COUNT)).astype(np.float32)
    b = rng.uniform(0, 1, COUNT).astype(np.float32).astype(np.float64)
    good = np.flatnonzero(flag == 0)
    radius2[good[:20]], near2[good[10:30]], b[good[10:15]] = 0, 0, 0
    own2[good[30]] = np.nan
    within = np.bincount(own[good], radius2[good], 5)
    within[0] = 0  # so that a = b = 0 where a row lies on both
    real = np.zeros((5, 4))
    real[:, 0] = within
    near = near2.view(np.uint32).astype(np.uint64) << np.uint64(32) | np.uint64(3)
    given = [card.upload(part) for part in (radius2, own2, near, b, flag, own)]
    clusters = (card.upload(real), card.upload(whole_of(count)))
    unit = np.array([scale, reach2])
    unit_there = card.upload(unit)

    def launch(into: tuple[Any, ...], **blocks: int) -> None:
        launches.rows(card, tuple(given), clusters, unit_there, STRIDE, BOUNDS, into, **blocks)  # type: ignore[arg-type]

    out = {
        "column": np.zeros((2, STRIDE)), "margins": np.zeros(COUNT),
        "mark": np.zeros((4, STRIDE), np.uint64),
    }  # fmt: skip
    found = run(card, launch, out)
    expected = twin.rows(
        radius2, own2, near2, b, flag, own, within, count, unit,
        rounding=BOUNDS[0], told=BOUNDS[1], narrow=BOUNDS[2],
    )  # fmt: skip
    assert np.array_equal(found["column"][:, :COUNT], expected.column)
    assert np.array_equal(found["margins"], expected.margin)
    assert np.array_equal(found["mark"][2:, :COUNT], expected.mark)
    assert np.isinf(found["column"][1, good[30]])
    assert (found["column"][0, :COUNT][flag != 0] == 0).all()
    value = card.upload(radius2)

    def roots(into: tuple[Any, ...], **blocks: int) -> None:
        launches.roots(card, value, *into, **blocks)

    assert np.array_equal(run(card, roots, {"root": np.zeros(COUNT)})["root"], np.sqrt(radius2))
