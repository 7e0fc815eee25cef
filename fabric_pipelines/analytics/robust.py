"""P5, the robust centre: geometric median of each cluster by Weiszfeld's iteration with the fix of Vardi and Zhang.

It starts at the mean and ends with a step below 1e-6 of the rms radius, or after 32 steps, which the number of
steps then says. Weiszfeld alone stops for ever on a row that it meets; Vardi and Zhang (2000) weigh the rows met
against the pull of all others. A row counts as met within 1e-9 of the rms radius: rounding alone moves it less.
A device takes the sums over rows; where a cluster lies far from the origin, its sums lose the digits that the mean takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fabric_pipelines.analytics.csr import F64, I64, Bool, Csr, unknown
from fabric_pipelines.analytics.stacks import Members, Stack
from fabric_pipelines.analytics.sweeps import Pulled, Sweeps
from fabric_pipelines.analytics.threads import over_rows

STEP_SHARE = 1e-6
STEPS_MAX = 32
MET_SHARE = 1e-9
# Squared distances below this share of the norms lose digits in the expansion and are summed directly.
NEAR = 1e-6


@dataclass(frozen=True, slots=True)
class Robust:
    """P5. offset f64 [K]: |median - mean|, NaN where no cluster was asked; steps int64 [K]."""

    offset: F64
    steps: I64


def robust(csr: Csr, sweeps: Sweeps, members: Members, radius2: F64, rms_radius: F64) -> Robust:
    """radius2 f64 [N] and rms_radius f64 [K], as P3 left them."""
    out = Robust(unknown(csr.clusters), np.zeros(csr.clusters, dtype=np.int64))
    if _by_sweeps(csr, sweeps, members, rms_radius, out):
        return out

    def measure(stack: Stack) -> None:
        median, steps = _median(stack, radius2[stack.places], rms_radius[stack.clusters])
        out.offset[stack.clusters] = np.sqrt(np.einsum("gd,gd->g", median, median))
        out.steps[stack.clusters] = steps

    members.sweep(1, lambda count: count * csr.dim, measure)
    return out


def flop(size: F64, dim: int) -> float:
    return float(4 * STEPS_MAX * dim * size.sum())


def _by_sweeps(csr: Csr, sweeps: Sweeps, members: Members, radius: F64, out: Robust) -> bool:
    """False where the sweeps leave it to the CPU. Rows of clusters that have arrived are left out."""
    owner, asked = csr.owner(), members.size > 0
    given = True

    def step(here: F64, moving: Bool) -> F64:
        nonlocal given
        weight = np.zeros(len(owner))

        def leave_out(rows: slice) -> None:
            np.copyto(weight[rows], members.weight[rows], where=moving[owner[rows]])

        over_rows(leave_out, len(owner))
        found = sweeps.pulled(weight, members.mean, here, MET_SHARE * radius)
        given = found is not None
        return here if found is None else _moved(found, here)

    median, steps = _iterate(step, np.where(asked, radius, 0.0), csr.dim)
    if given:
        out.offset[asked] = np.sqrt(np.einsum("gd,gd->g", median, median))[asked]
        out.steps[asked] = steps[asked]
    return given


def _median(stack: Stack, norm2: F64, radius: F64) -> tuple[F64, I64]:
    """Median less mean, f64 [g, d], and the steps taken."""
    return _iterate(
        lambda here, _: _step(stack, norm2, here, MET_SHARE * radius), radius, stack.dim
    )


def _iterate(step: Callable[[F64, Bool], F64], radius: F64, dim: int) -> tuple[F64, I64]:
    here = np.zeros((len(radius), dim))
    steps = np.zeros(len(radius), dtype=np.int64)
    moving = radius > 0
    while moving.any() and steps.max(initial=0) < STEPS_MAX:
        there = step(here, moving)
        there[~moving] = here[~moving]
        moved = np.sqrt(np.einsum("gd,gd->g", there - here, there - here))
        steps[moving] += 1
        here = there
        moving &= moved > STEP_SHARE * radius
    return here, steps


def _step(stack: Stack, norm2: F64, here: F64, reach: F64) -> F64:
    pulled, strength = np.zeros_like(here), np.zeros(len(here))
    met = np.zeros(len(here))
    for part, block in stack.blocks():
        apart = _apart(block, norm2[:, part], here)
        far = apart > reach[:, None]
        pull = np.divide(1.0, apart, out=np.zeros_like(apart), where=far)
        pulled += (pull[:, None, :] @ block)[:, 0]
        strength += pull.sum(axis=1)
        met += (~far).sum(axis=1)
    return _moved(Pulled(pulled, strength, met), here)


def _moved(found: Pulled, here: F64) -> F64:
    """Vardi and Zhang's next point."""
    pulled, strength, met = found
    alone = np.where(strength > 0, strength, 1.0)[:, None]
    target = np.where(strength[:, None] > 0, pulled / alone, here)
    force = pulled - here * strength[:, None]
    size = np.sqrt(np.einsum("gd,gd->g", force, force))
    held = np.minimum(1.0, np.divide(met, size, out=np.ones_like(met), where=size > 0))
    held[met == 0] = 0.0
    there: F64 = (1.0 - held)[:, None] * target + held[:, None] * here
    return there


def _apart(block: F64, norm2: F64, here: F64) -> F64:
    """Distances of rows [g, n, d] of squared norms [g, n] to one point each [g, d] -> [g, n]."""
    scale = norm2 + np.einsum("gd,gd->g", here, here)[:, None]
    distance2 = scale - 2.0 * (block @ here[:, :, None])[:, :, 0]
    near = np.nonzero(distance2 <= NEAR * scale)
    close = block[near] - here[near[0]]
    distance2[near] = np.einsum("nd,nd->n", close, close)
    apart: F64 = np.sqrt(distance2)
    return apart
