"""The dips of many segments together are those of each alone, to the last bit."""

from itertools import pairwise

import numpy as np
import pytest

from fabric_pipelines.analytics import dip as module
from fabric_pipelines.analytics.dip import Hulls, dip, dips


def twin(values: np.ndarray) -> float:
    """AS 217 as it is written: point by point. Whole numbers, so that a hull is the same by any way."""
    low, high, least = 0, len(values) - 1, 1.0
    while values[low] < values[high]:
        at = np.arange(low, high + 1)
        under = module._hull_one_by_one(values, at, convex=True)
        over = module._hull_one_by_one(values, at, convex=False)
        apart, left, right = module._walked(values, under, over)
        if apart < least:
            break
        for hull, sign in ((under[under <= left], 1), (over[over >= right], -1)):
            for start, end in pairwise(hull.tolist()):
                if values[end] > values[start]:
                    slope = (end - start) / (values[end] - values[start])
                    along = (values[start:end] - values[start]) * slope
                    least = max(least, (1 + sign * (np.arange(end - start) - along)).max())
        if (low, high) == (left, right):
            break
        low, high = left, right
    return float(least / (2 * len(values)))


def segments(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = [1, 2, 2, 3, 3, 4, 5, 9, 33, 34, 35, 64, 65, 66, 150, 700]
    drawn = [rng.standard_normal(size) for size in sizes]
    drawn += [rng.random(300), np.exp(3 * rng.standard_normal(90)), np.zeros(40), np.ones(1)]
    drawn += [np.arange(80) ** 2, np.arange(80) ** 0.5, np.arange(70), np.repeat([0, 1], [1, 30])]
    drawn += [np.concatenate([part - 4, part + 4]) for part in drawn[10:16]]
    scales = rng.choice([3, 1 << 18], len(drawn))  # with ties, and without
    return [np.sort(np.rint(part * scale / 8)) for part, scale in zip(drawn, scales, strict=True)]


@pytest.mark.parametrize("seed", range(8))
def test_dips_of_segments_together_are_those_of_each_alone(seed: int) -> None:
    parts = segments(seed)
    bounds = np.cumsum([0, *map(len, parts)])
    together = dips(np.concatenate(parts), bounds)
    assert together.tolist() == [twin(part) for part in parts] == [dip(part) for part in parts]


def test_hulls_that_meet_before_their_ends_are_walked_as_far_as_they_meet() -> None:
    """By rounding alone; planted here, in the second of two segments."""
    values = np.array([0, 5, 6, 7, 0, 1, 4, 6, 9, 10, 30], np.float64)
    low, high = np.array([0, 4]), np.array([3, 10])
    minorant = Hulls(np.array([0, 1, 3, 4, 5, 7, 9, 10]), np.array([0, 0, 0, 1, 1, 1, 1, 1]))
    majorant = Hulls(np.array([0, 3, 4, 6, 7, 8, 10]), np.array([0, 0, 1, 1, 1, 1, 1]))
    apart, left, right = module._widest(values, low, high, minorant, majorant)
    walked = [
        module._walked(values, *(hull.at[hull.of == one] for hull in (minorant, majorant)))
        for one in (0, 1)
    ]
    assert list(zip(apart.tolist(), left.tolist(), right.tolist(), strict=True)) == walked
    assert left[1] < 7
