"""Invariant checks: what two passes find independently must agree, or the cluster is corrupt and the pair is named.

A kernel or a machine that damages a pass silently gives numbers that look right. Each pass after the first is held to
a sum that another one found by other arithmetic; the tolerance is rounding, far below any damage that matters.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fabric_pipelines.analytics.csr import F64, I64, Bool
from fabric_pipelines.analytics.readings import Facts

AGREEMENT = 1e-9  # relative; float64 sums of 2^31 rows stay 1,000 times below it


def contradictions(facts: Facts) -> dict[str, I64]:
    """Clusters in which two passes disagree, by the names of both; those that agree everywhere are left out."""
    found = {}
    for pair, wrong in _checks(facts):
        clusters = np.flatnonzero(wrong).astype(np.int64)
        if len(clusters):
            found[pair] = clusters
    return found


def _checks(facts: Facts) -> Iterator[tuple[str, Bool]]:
    within = facts.radii.within
    # sum of |x|^2 = W + n |mean|^2; in a cosine store the sum is n
    seen = facts.size if facts.cosine else facts.admission.norm2_sum
    rebuilt: F64 = within + facts.size * facts.centroids.length2
    yield "P1 and P2, P3", _differ(seen, rebuilt)
    spread = ~facts.no_spread & (facts.admission.size > 1)
    if facts.spectrum is not None:
        yield "P3 and P6", spread & _differ(within, facts.size * facts.spectrum.trace)
        yield "P6 and its eigenvalues", spread & _differ(facts.spectrum.trace, facts.spectrum.total)
    if facts.pairs is not None and not facts.cosine:
        yield "P1 and P3, P7", _store_differs(facts, facts.pairs.between)
    if facts.points is not None:
        # a device measures the own centroid among all others
        yield "P3 and P8", ~(facts.points.own_error <= 1)
    if facts.neighbours is not None:
        # sum over others of |x_i - x_j|^2 = n r_i^2 + W, for every row
        yield (
            "P3 and P9",
            spread & ~(facts.neighbours.imbalance <= max(AGREEMENT, facts.neighbours.rounding)),
        )
    if facts.halves is not None:
        halved = facts.halves.within + facts.halves.between
        yield "P3 and P12", spread & (facts.admission.size > 2) & _differ(within, halved)


def _differ(one: F64, other: F64) -> Bool:
    """True also where either is NaN."""
    return ~(np.abs(one - other) <= AGREEMENT * np.maximum(np.abs(one), np.abs(other)))


def _store_differs(facts: Facts, between: F64) -> Bool:
    """Total sum of squares = within + between, of the whole store: every filled cluster is in doubt."""
    size = facts.size
    rows = size.sum()
    total = (size[:, None] * facts.centroids.mean).sum(axis=0) / max(rows, 1)
    around = facts.admission.norm2_sum.sum()
    seen = around - rows * (total @ total)
    rebuilt = facts.radii.within.sum() + between.sum()
    wrong = not abs(seen - rebuilt) <= AGREEMENT * around
    return (size > 0) & wrong
