"""Hartigan's dip of sorted values: how far their distribution is from the nearest with a single mode.

Hartigan and Hartigan 1985, by the algorithm of Hartigan 1985 (AS 217): the greatest convex minorant and the least
concave majorant of the distribution function close in on the modal interval. The hulls are found by striking out
points above their neighbours' chord, all at once, until none is left, so a value costs array steps and no Python in the common case.
"""

from __future__ import annotations

import numpy as np

from fabric_pipelines.analytics.csr import F64, I64

# Striking at once halves random points a round; where it strikes few of many, a stack ends sooner.
SLOW_FROM, SLOW_SHARE = 32, 0.9
FEW = 64  # points that a stack sorts out sooner than the first array step is called


def dip(values: F64) -> float:
    """values f64 [n], rising, n >= 1 -> the dip, from 1 / (2n) to 1/4."""
    count = len(values)
    least = 1.0  # in steps of the distribution function, twice over: / 2n at the end
    low, high = 0, count - 1
    if values[low] == values[high]:
        return least / (2 * count)
    while True:
        minorant = _hull(values, low, high, convex=True)
        majorant = _hull(values, low, high, convex=False)
        apart, left, right = _widest(values, minorant, majorant)
        if apart < least:
            break
        under = _beyond(values, minorant[: left + 1], convex=True)
        over = _beyond(values, majorant[right:], convex=False)
        least = max(least, under, over)
        if low == minorant[left] and high == majorant[right]:
            break
        low, high = int(minorant[left]), int(majorant[right])
    return float(least / (2 * count))


def _hull(values: F64, low: int, high: int, *, convex: bool) -> I64:
    """Vertices of the greatest convex minorant (or least concave majorant) of rank over value, rising."""
    at = np.arange(low, high + 1)
    if len(at) <= FEW:
        return _hull_one_by_one(values, at, convex=convex)
    while len(at) > 2:
        step, rise = np.diff(values[at]), np.diff(at)
        before, after = rise[:-1] * step[1:], rise[1:] * step[:-1]
        kept = before < after if convex else before > after
        if kept.all():
            break
        if len(kept) > SLOW_FROM and kept.mean() > SLOW_SHARE:
            return _hull_one_by_one(values, at, convex=convex)
        at = at[np.concatenate([[True], kept, [True]])]
    return at


def _hull_one_by_one(values: F64, at: I64, *, convex: bool) -> I64:
    """The same with a stack: one look back a point, where striking all at once would peel one off a round."""
    sign = 1.0 if convex else -1.0
    value, rank = (sign * values[at]).tolist(), (sign * at).tolist()
    kept: list[int] = []
    for point in range(len(at)):
        while len(kept) > 1:
            first, last = kept[-2], kept[-1]
            before = (rank[last] - rank[first]) * (value[point] - value[last])
            after = (rank[point] - rank[last]) * (value[last] - value[first])
            if before * sign < after * sign:
                break
            kept.pop()
        kept.append(point)
    return at[kept]


def _widest(values: F64, minorant: I64, majorant: I64) -> tuple[float, int, int]:
    """Greatest distance between the hulls, and the vertex of each that ends the next interval. Both are walked
    from the left; the last of equal distances counts, as in AS 217."""
    left, right = 0, len(majorant) - 1
    if len(minorant) == 2 and len(majorant) == 2:
        return 1.0, left, right
    under, over = minorant.tolist(), majorant.tolist()
    x_under, x_over = values[minorant].tolist(), values[majorant].tolist()
    widest, p, q = 0.0, 1, 1
    while True:
        if under[p] > over[q]:
            slope = _slope(under, x_under, p)
            apart = over[q] - under[p - 1] + 1 - (x_over[q] - x_under[p - 1]) * slope
            if apart >= widest:
                widest, left, right = apart, p - 1, q
            q = min(q + 1, len(over) - 1)
        else:
            slope = _slope(over, x_over, q)
            apart = (x_under[p] - x_over[q - 1]) * slope - (under[p] - over[q - 1] - 1)
            if apart >= widest:
                widest, left, right = apart, p, q
            p = min(p + 1, len(under) - 1)
        if under[p] == over[q]:
            return widest, left, right


def _slope(rank: list[int], value: list[float], end: int) -> float:
    """Of the side of a hull that ends in a vertex; 0 for one without width."""
    width = value[end] - value[end - 1]
    return (rank[end] - rank[end - 1]) / width if width > 0 else 0.0


def _beyond(values: F64, vertices: I64, *, convex: bool) -> float:
    """Greatest distance of the distribution function from a hull over the part given; at least 1."""
    if len(vertices) < 2:
        return 1.0
    rise, width = np.diff(vertices), np.diff(values[vertices])
    slope = np.divide(rise, width, out=np.zeros(len(rise)), where=width > 0)
    inside = np.repeat(width > 0, rise)
    start = np.repeat(vertices[:-1], rise)
    at = np.arange(vertices[0], vertices[-1])
    along = (values[at] - values[start]) * np.repeat(slope, rise)
    apart = at - start + 1 - along if convex else along - (at - start - 1)
    return float(max(1.0, apart.max(initial=1.0, where=inside)))
