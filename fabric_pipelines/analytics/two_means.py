"""P12, two-means: Lloyd's iteration in every cluster from the two sides of its first axis.

No random start: centres at plus and minus one step along the first axis part the rows by the sign of their
coordinate, which P6 has left. Ends when no row changes sides or after 16 rounds; a side that would fall empty ends
it too. The rows' coordinates between the two centres then tell by their dip whether there is a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fabric_pipelines.analytics.csr import F64, I64, Bool, Csr, ranges, segment_sum, unknown
from fabric_pipelines.analytics.dip import dips
from fabric_pipelines.analytics.stacks import Members, Stack
from fabric_pipelines.analytics.sweeps import Parted, Sweeps
from fabric_pipelines.analytics.threads import run_side_by_side

ROUNDS_MAX = 16
# Coordinates this close, as a share of the longest, are one value: rounding must not part what is equal, since
# the dip sees any gap, however small.
SAME = 2.0**-44
DIP_ROWS = (
    1 << 18
)  # whose dips are found together: below, calls of numpy count; above, the cache is left


@dataclass(frozen=True, slots=True)
class Halves:
    """P12. Per cluster, NaN where none was asked: sum of squares within the two halves, the part of W between
    them, dip of the coordinate; rows of the smaller half."""

    within: F64
    between: F64
    dip: F64
    smaller: I64


def halves(csr: Csr, sweeps: Sweeps, members: Members, upper: Bool) -> Halves:
    """upper bool [N]: the side of the first axis on which each row starts."""
    out = Halves(
        within=unknown(csr.clusters),
        between=unknown(csr.clusters),
        dip=unknown(csr.clusters),
        smaller=np.zeros(csr.clusters, dtype=np.int64),
    )
    parted = sweeps.parted(members.weight, members.mean, members.size, upper)
    if parted is not None:
        _gather(csr, members, parted, out)
        return out
    members.sweep(
        3,
        lambda count: count * csr.dim,
        lambda stack: _split(stack, upper[stack.places], out),
    )
    return out


def _gather(csr: Csr, members: Members, parted: Parted, out: Halves) -> None:
    """What a device has parted, per cluster of three rows and more."""
    size, within = members.size, segment_sum(parted.apart2, csr.indptr)
    asked = np.flatnonzero(size >= 3)
    out.within[asked], out.between[asked] = within[asked], parted.between[asked]
    out.smaller[asked] = np.minimum(parted.above, size - parted.above)[asked]

    def measure(clusters: I64) -> None:
        at = members.places[ranges(members.first[clusters], size[clusters])]
        out.dip[clusters] = _dips(parted.place[at], size[clusters])

    if len(asked):
        part = np.cumsum(size[asked]) // DIP_ROWS
        run_side_by_side(measure, np.split(asked, np.flatnonzero(np.diff(part)) + 1))


def flop(size: F64, dim: int) -> float:
    return float((4 * (ROUNDS_MAX + 2) * dim * size + 100 * size).sum())


def _split(stack: Stack, side: Bool, out: Halves) -> None:
    count = stack.count
    for _ in range(ROUNDS_MAX):
        mean, other = _centres(stack, side)
        place, middle = _coordinates(stack, other - mean, other + mean)
        new = place > middle[:, None]
        upper = new.sum(axis=1)
        whole = (upper == 0) | (upper == count)
        new[whole] = side[whole]
        if np.array_equal(new, side):
            break
        side = new
    mean, other = _centres(stack, side)
    between, upper = other - mean, side.sum(axis=1)
    length2 = np.einsum("gd,gd->g", between, between)
    out.between[stack.clusters] = upper * (count - upper) / count * length2
    out.within[stack.clusters] = _within(stack, side, mean, other)
    out.smaller[stack.clusters] = np.minimum(upper, count - upper)
    place, _ = _coordinates(stack, between, other + mean)
    out.dip[stack.clusters] = _dips(place.reshape(-1), np.full(len(place), count))


def _dips(place: F64, size: I64) -> F64:
    """place f64 [n] of clusters one after another, size [g] of one row and more -> dip f64 [g]; NaN where all rows have one
    place."""
    bounds = np.concatenate([[0], np.cumsum(size)])
    step = SAME * np.maximum.reduceat(np.abs(place), bounds[:-1])
    several = step > 0
    values = np.rint(place / np.repeat(np.where(several, step, 1.0), size))
    for low, high in pairwise(bounds.tolist()):
        values[low:high].sort()
    return np.where(several, dips(values, bounds), np.nan)


def _centres(stack: Stack, side: Bool) -> tuple[F64, F64]:
    """Means of the lower and of the upper half, f64 [g, d] each, counted from the mean of the cluster; an empty
    half has the mean itself."""
    upper, total = np.zeros((2, len(stack.clusters), stack.dim))
    for part, block in stack.blocks():
        upper += (side[:, None, part].astype(np.float64) @ block)[:, 0]
        total += block.sum(axis=1)
    count = side.sum(axis=1)
    over = upper / np.maximum(count, 1)[:, None]
    under = (total - upper) / np.maximum(stack.count - count, 1)[:, None]
    return under, over


def _coordinates(stack: Stack, axis: F64, twice_middle: F64) -> tuple[F64, F64]:
    """Each row along the axis [g, n], and where the middle between the centres lies on it [g]."""
    place = np.concatenate(
        [(block @ axis[:, :, None])[:, :, 0] for _, block in stack.blocks()], axis=1
    )
    return place, 0.5 * np.einsum("gd,gd->g", axis, twice_middle)


def _within(stack: Stack, side: Bool, under: F64, over: F64) -> F64:
    within = np.zeros(len(stack.clusters))
    for part, block in stack.blocks():
        own = np.where(side[:, part, None], over[:, None], under[:, None])
        own -= block
        within += np.einsum("gnd,gnd->g", own, own)
    return within
