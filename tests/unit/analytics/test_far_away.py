"""Rows far from the origin and clusters far from each other: what does not hang on where the origin is does not change.

Rows are multiples of an eighth, so that a store and its copy a million radii away hold the very same differences: what they
measure differs by rounding alone, and the near one is held to its twins elsewhere (test_twins.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fabric_pipelines.analytics.health import METRICS, HealthTable, measure

CLUSTERS, EACH, DIM = 6, 24, 12
LABELS = np.repeat(np.arange(CLUSTERS), EACH)
OFFSETS = [2.0**13, 2.0**17, 2.0**20]  # a radius is about 4
FROM_ORIGIN = {
    "norm_drift",
    "mean_resultant_length",
    "vendi_score",
    "cosine_diversity",
    "coding_rate",
}
OF_PAIRS = (
    "intrinsic_dimension",
    "mean_pairwise_distance",
    "nn_distance_mean",
    "nn_distance_cv",
    "kernel_temperature",
    "free_energy",
    "pair_entropy",
)
ROBUST = (
    1e-16  # of the robust centre: a share of |mean| / radius, from where its sums take their digits
)


def rows() -> np.ndarray:
    rng = np.random.default_rng(6)
    drawn = rng.standard_normal((CLUSTERS, DIM))[LABELS] * 1.5
    return np.round((drawn + rng.standard_normal((len(LABELS), DIM))) * 8) / 8


def measured(drawn: np.ndarray, **where: Any) -> HealthTable:
    stored = drawn.astype(np.float32)
    assert np.array_equal(stored, drawn)
    indptr = np.arange(CLUSTERS + 1) * EACH
    return measure(stored, indptr, np.arange(len(drawn)), metric="l2", **where)


def separation(drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Silhouette (squared), the tenth percentile of margins and the Davies-Bouldin term of each cluster, by a plain loop in long double."""
    wide, at = drawn.astype(np.longdouble), np.arange(len(drawn))
    mean = np.stack([wide[c == LABELS].mean(axis=0) for c in range(CLUSTERS)])
    far2 = ((wide[:, None] - mean) ** 2).sum(axis=-1)
    radius2 = far2[at, LABELS]
    within = np.array([radius2[c == LABELS].mean() for c in range(CLUSTERS)])
    a, others = (radius2 + within[LABELS]) * EACH / (EACH - 1), far2 + within
    far2[at, LABELS] = others[at, LABELS] = np.inf
    b, near, own = others.min(axis=1), np.sqrt(far2.min(axis=1)), np.sqrt(radius2)
    score, margin = (b - a) / np.maximum(a, b), (near - own) / (near + own)
    spread = np.array([own[c == LABELS].mean() for c in range(CLUSTERS)])
    apart = np.sqrt(((mean[:, None] - mean) ** 2).sum(axis=-1))
    np.fill_diagonal(apart, np.inf)
    each = [c == LABELS for c in range(CLUSTERS)]
    return (
        np.array([score[c].mean() for c in each], float),
        np.array([np.quantile(margin[c].astype(float), 0.1) for c in each]),
        ((spread[:, None] + spread) / apart).max(axis=1).astype(float),
    )


def moved(offset: float, slack: float, **where: Any) -> HealthTable:
    """Held to be the same: every metric that only asks for differences, of the store and of the store moved by `offset`."""
    near = measured(rows(), **where)
    far = measured(rows() + offset * np.where(np.arange(DIM) % 2, 1, -1), **where)
    for name in set(METRICS) - FROM_ORIGIN:
        one, other = near.readings[name], far.readings[name]
        assert one.status.tolist() == other.status.tolist(), name
        bound = slack
        if name == "geometric_median_offset":
            bound = ROBUST * offset * DIM**0.5 * 10
        np.testing.assert_allclose(other.value, one.value, rtol=bound, atol=bound, err_msg=name)
    return far


def parted(offset: float, slack: float, **where: Any) -> HealthTable:
    """Two groups of three clusters, `offset` from each other: what is inside a cluster does not change, and what is between
    neighbours is that of a plain loop."""
    drawn = rows()
    near = measured(drawn, **where)
    drawn[LABELS >= CLUSTERS // 2, 0] += offset
    far = measured(drawn, **where)
    for name in (*OF_PAIRS, "rms_radius", "effective_rank", "split_gain_ratio", "dip"):
        np.testing.assert_allclose(
            far.readings[name].value, near.readings[name].value, rtol=1e-9, err_msg=name
        )
    true = separation(drawn)
    names = ("silhouette", "centroid_margin_p10", "davies_bouldin_term")
    for name, value in zip(names, true, strict=True):
        np.testing.assert_allclose(
            far.readings[name].value, value, rtol=slack, atol=slack, err_msg=name
        )
    return far


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_common_offset_of_a_million_radii_changes_nothing(offset: float) -> None:
    assert len(moved(offset, 1e-9).breaches) == 0


@pytest.mark.parametrize("offset", OFFSETS)
def test_neighbours_are_told_apart_however_far_other_clusters_are(offset: float) -> None:
    assert len(parted(offset, 1e-9).breaches) == 0
