"""The health metrics as a registry: each states its formula, range, policy for small clusters, source and pass.

A metric reads what the passes left and answers one float64 and one status per cluster. Here stand those of rows,
radii and centroids; metrics_within has those of what lies inside a cluster. METRICS holds all, by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from fabric_pipelines.analytics.metrics_within import WITHIN
from fabric_pipelines.analytics.readings import (
    Facts,
    MetricSpec,
    Reading,
    ratio,
    reading,
    share,
    undefined,
)


def _bad_row_fraction(facts: Facts) -> Reading:
    found = facts.admission
    return reading(share(found.bad, found.size_raw), size=found.size_raw > 0)


def _norm_drift(facts: Facts) -> Reading:
    found = facts.admission
    mean = share(found.norm_sum, found.size)
    if facts.cosine:
        return reading(np.abs(mean - 1.0), size=found.size > 0)
    if facts.reference is None:
        return undefined(facts)
    expected = facts.reference.norm_mean
    return reading(
        ratio(np.abs(mean - expected), expected),
        size=found.size > 0,
        context=np.isfinite(expected) & (expected > 0),
    )


def _exact_duplicate_fraction(facts: Facts) -> Reading:
    assert facts.order is not None
    raw = facts.admission.size_raw
    return reading(1.0 - share(facts.order.distinct, raw), size=raw > 0)


def _checksum_mismatch(facts: Facts) -> Reading:
    if facts.reference is None or not facts.reference.same_rows:
        return undefined(facts)
    found, expected = facts.admission, facts.reference
    same = (
        (found.size_raw == expected.size_raw)
        & (found.digest_sum == expected.digest_sum)
        & (found.digest_xor == expected.digest_xor)
    )
    return reading((~same).astype(np.float64))


def _size(facts: Facts) -> Reading:
    return reading(facts.size)


def _mean_resultant_length(facts: Facts) -> Reading:
    # a sum of unit vectors can pass 1 by rounding only
    return reading(np.minimum(facts.centroids.resultant, 1.0), size=facts.admission.size > 0)


def _centroid_shift(facts: Facts) -> Reading:
    if facts.reference is None:
        return undefined(facts)
    apart = facts.centroids.mean - facts.reference.centroid
    expected = facts.reference.rms_radius
    return reading(
        ratio(np.sqrt(np.einsum("kd,kd->k", apart, apart)), expected),
        size=facts.admission.size > 0,
        context=np.isfinite(expected),
        spread=expected > 0,
    )


def _medoid_offset(facts: Facts) -> Reading:
    size = facts.admission.size
    single = size == 1
    value = np.where(single, 0.0, ratio(facts.radii.least_radius, facts.rms_radius))
    return reading(value, size=size > 0, spread=single | ~facts.no_spread)


def _rms_radius(facts: Facts) -> Reading:
    return reading(facts.rms_radius, size=facts.admission.size > 0)


def _radius_median(facts: Facts) -> Reading:
    assert facts.order is not None
    return reading(facts.order.median, size=facts.admission.size > 0)


def _radius_p95(facts: Facts) -> Reading:
    assert facts.order is not None
    return reading(facts.order.p95, size=facts.admission.size > 0)


def _radius_tail_ratio(facts: Facts) -> Reading:
    assert facts.order is not None
    return reading(
        ratio(facts.order.p99, facts.order.median),
        size=facts.admission.size > 1,
        spread=~facts.no_spread & (facts.order.median > 0),
    )


def _silhouette(facts: Facts) -> Reading:
    assert facts.points is not None
    size = facts.admission.size
    return reading(
        share(facts.points.silhouette_sum, size), size=size > 0, context=facts.filled > 1
    )


def _share_of_rows(name: str) -> Callable[[Facts], Reading]:
    def read(facts: Facts) -> Reading:
        size = facts.admission.size
        part = getattr(facts.points, name)
        return reading(share(part, size), size=size > 0, context=facts.filled > 1)

    return read


def _davies_bouldin_term(facts: Facts) -> Reading:
    assert facts.pairs is not None
    return reading(
        facts.pairs.ratio,
        size=facts.admission.size > 0,
        context=facts.filled > 1,
        spread=~facts.pairs.coincident,
    )


def _calinski_harabasz_term(facts: Facts) -> Reading:
    assert facts.pairs is not None
    size, clusters = facts.admission.size, facts.filled
    free = int(size.sum()) - clusters
    within = facts.radii.within / max(free, 1)
    value = ratio(facts.pairs.between / max(clusters - 1, 1), within)
    return reading(value, size=size > 1, context=clusters > 1, spread=~facts.no_spread)


def _centroid_margin_p10(facts: Facts) -> Reading:
    assert facts.points is not None
    return reading(facts.points.margin_p10, size=facts.admission.size > 0, context=facts.filled > 1)


def _cosine_diversity(facts: Facts) -> Reading:
    size = facts.size
    resultant = facts.centroids.resultant
    value = 1.0 - (size * resultant**2 - 1.0) / np.maximum(size - 1, 1)
    return reading(value, size=size > 1)


_OUTER = (
    MetricSpec(
        1, "bad_row_fraction", "(rows with NaN or Inf + rows shorter than min_norm) / n_raw",
        "[0,1]", "share", ("U", "ok", "ok"), "FAISS PR #2986 (policy)", "P1", "integrity", _bad_row_fraction,
    ),
    MetricSpec(
        2, "norm_drift", "|mean norm - ref| / ref; ref = 1 for cosine, else the reference",
        ">=0", "share", ("U", "ok", "ok"), "Chan, Golub, LeVeque 1979", "P1", "integrity", _norm_drift,
    ),
    MetricSpec(
        3, "exact_duplicate_fraction", "1 - distinct rows / n_raw, bytes compared on a hash hit",
        "[0,1)", "share", ("U", "0", "0 or 0.5"), "deduplication practice", "P4", "integrity",
        _exact_duplicate_fraction,
    ),
    MetricSpec(
        4, "checksum_mismatch", "1 if sum or xor of mix64(id, row hash), or n_raw, differ",
        "{0,1}", "flag", ("ok", "ok", "ok"), "order-free digest", "P1", "integrity", _checksum_mismatch,
    ),
    MetricSpec(
        5, "size", "good rows", ">=0", "rows", ("0", "1", "2"), "count", "P1", "location", _size,
    ),
    MetricSpec(
        6, "mean_resultant_length", "R = |mean of x / |x||", "[0,1]", "", ("U", "1", "ok"),
        "Mardia & Jupp 2000", "P2", "location", _mean_resultant_length,
    ),
    MetricSpec(
        7, "centroid_shift", "|mean - reference mean| / reference rms radius", ">=0", "radii",
        ("U", "ok", "ok"), "drift practice", "P2", "location", _centroid_shift,
    ),
    MetricSpec(
        8, "medoid_offset", "min r / rms radius; argmin r is the exact medoid for squared L2",
        "[0,1]", "radii", ("U", "0", "1"), "Kaufman & Rousseeuw 1990", "P3", "location", _medoid_offset,
    ),
    MetricSpec(
        10, "rms_radius", "sqrt(W / n), W = sum of |x - mean|^2", ">=0", "data unit",
        ("U", "0", "ok"), "moments", "P3", "spread", _rms_radius,
    ),
    MetricSpec(
        11, "radius_median", "q50 of r = |x - mean|, type 7", ">=0", "data unit",
        ("U", "0", "ok"), "Hyndman & Fan 1996", "P4", "spread", _radius_median,
    ),
    MetricSpec(
        12, "radius_p95", "q95 of r", ">=0", "data unit", ("U", "0", "ok"),
        "Hyndman & Fan 1996", "P4", "spread", _radius_p95,
    ),
    MetricSpec(
        13, "radius_tail_ratio", "q99 / q50 of r", ">=1", "", ("U", "U", "1"),
        "Hyndman & Fan 1996", "P4", "spread", _radius_tail_ratio,
    ),
    MetricSpec(
        17, "silhouette", "mean of (b - a) / max(a, b) in squared L2 or cosine, by moments",
        "[-1,1]", "", ("U", "0", "ok"), "Rousseeuw 1987", "P8", "separation", _silhouette,
    ),
    MetricSpec(
        18, "silhouette_negative_fraction", "share of rows with s < 0", "[0,1]", "share",
        ("U", "0", "ok"), "Rousseeuw 1987", "P8", "separation", _share_of_rows("negative"),
    ),
    MetricSpec(
        19, "davies_bouldin_term", "max over j of (S + S_j) / |mean - mean_j|, S = mean r",
        ">=0", "", ("U", "ok", "ok"), "Davies & Bouldin 1979", "P7", "separation", _davies_bouldin_term,
    ),
    MetricSpec(
        20, "calinski_harabasz_term", "(B / (K - 1)) / (W / (N - K)), B = n |mean - global|^2",
        ">=0", "", ("U", "U", "ok"), "Calinski & Harabasz 1974", "P7", "separation", _calinski_harabasz_term,
    ),
    MetricSpec(
        21, "centroid_margin_p10", "q10 of (d2 - d1) / (d2 + d1): d1 own, d2 nearest other mean",
        "[-1,1]", "", ("U", "ok", "ok"), "simplified silhouette, Hruschka 2004", "P8", "separation",
        _centroid_margin_p10,
    ),
    MetricSpec(
        22, "boundary_fraction", "share of rows with margin < 0.05", "[0,1]", "share",
        ("U", "ok", "ok"), "inverted-file practice", "P8", "separation", _share_of_rows("narrow"),
    ),
    MetricSpec(
        30, "cosine_diversity", "1 - mean over pairs of cos = 1 - (n R^2 - 1) / (n - 1)",
        "[0,n/(n-1)]", "", ("U", "U", "ok"), "identity of the resultant", "P2", "diversity", _cosine_diversity,
    ),
)  # fmt: skip

METRICS: Mapping[str, MetricSpec] = {
    spec.name: spec for spec in sorted((*_OUTER, *WITHIN), key=lambda spec: spec.number)
}
