"""The health metrics as a registry: each states its formula, range, policy for small clusters, source and pass.

A metric reads what the passes left and answers one float64 and one status per cluster. A value is a number
only under OK: no 0, -1 or largest float stands in for "undefined". Numbers follow the catalogue of 38 in
docs/analytics.md; those missing here are not measured yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.csr import F64, I64, U64, Bool
from fabric_pipelines.analytics.passes import Admission, Centroids, Order, Pairs, Points, Radii
from fabric_pipelines.errors import UsageError

ZERO_SPREAD = 1e-12  # rms radius below this share of the rms norm is rounding, not spread


class Status(IntEnum):
    """OK; U_SIZE: too few rows; U_DEGENERATE: zero variance, coincident centroids; U_CONTEXT: fewer than two
    clusters, or no reference to compare with; SKIPPED_BUDGET: its pass costs more than allowed; CORRUPT: two
    independent passes contradict each other."""

    OK = 0
    U_SIZE = 1
    U_DEGENERATE = 2
    U_CONTEXT = 3
    SKIPPED_BUDGET = 4
    CORRUPT = 5


@dataclass(frozen=True, slots=True)
class Reference:
    """What an earlier measurement found, one entry a cluster, in the same order (HealthTable.reference)."""

    size_raw: I64
    norm_mean: F64
    digest_sum: U64
    digest_xor: U64
    centroid: F64
    rms_radius: F64

    def require_fits(self, clusters: int, dim: int) -> None:
        if self.centroid.shape != (clusters, dim):
            raise UsageError(
                f"the reference describes {self.centroid.shape[0]} clusters of dimension "
                f"{self.centroid.shape[1]}, the data has {clusters} of {dim}: measure it again"
            )


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the passes found; `order`, `pairs` and `points` are None where they were skipped."""

    cosine: bool
    reference: Reference | None
    admission: Admission
    centroids: Centroids
    radii: Radii
    order: Order | None
    pairs: Pairs | None
    points: Points | None

    @property
    def size(self) -> F64:
        size: F64 = self.admission.size.astype(np.float64)
        return size

    @property
    def filled(self) -> int:
        return int((self.admission.size > 0).sum())

    @property
    def rms_radius(self) -> F64:
        rms: F64 = np.sqrt(self.radii.within / np.maximum(self.size, 1))
        return rms

    @property
    def no_spread(self) -> Bool:
        """Clusters whose rows are all the same point, up to rounding."""
        scale2 = self.size if self.cosine else self.admission.norm2_sum
        return self.radii.within <= ZERO_SPREAD**2 * scale2


@dataclass(frozen=True, slots=True)
class Reading:
    """value f64 [K], NaN unless status is OK; status u8 [K]."""

    value: F64
    status: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """`sizes` is the answer at n = 0, 1 and 2 good rows: U undefined, ok, or the number itself."""

    number: int
    name: str
    formula: str
    range: str
    unit: str
    sizes: tuple[str, str, str]
    source: str
    pass_name: str
    read: Callable[[Facts], Reading]

    def as_json(self) -> dict[str, Any]:
        names = ("number", "name", "formula", "range", "unit", "source", "pass_name")
        return {**{name: getattr(self, name) for name in names}, "sizes": list(self.sizes)}


def _reading(
    value: F64,
    *,
    size: Bool | bool = True,
    context: Bool | bool = True,
    spread: Bool | bool = True,
) -> Reading:
    """Each argument says where the value is defined; the first that fails names the status."""
    status = np.full(len(value), Status.OK, dtype=np.uint8)
    for defined, why in (
        (spread, Status.U_DEGENERATE),
        (context, Status.U_CONTEXT),
        (size, Status.U_SIZE),
    ):
        status[~np.broadcast_to(defined, status.shape)] = why
    return Reading(np.where(status == Status.OK, value, np.nan), status)


def _share(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> F64:
    share: F64 = part / np.maximum(whole, 1).astype(np.float64)
    return share


def _ratio(above: F64, below: F64) -> F64:
    """above / below, NaN where below is 0 (the status tells why)."""
    ratio: F64 = np.divide(above, below, out=np.full(len(above), np.nan), where=below != 0)
    return ratio


def _undefined(facts: Facts) -> Reading:
    return _reading(np.full(len(facts.admission.size), np.nan), context=False)


def _bad_row_fraction(facts: Facts) -> Reading:
    found = facts.admission
    return _reading(_share(found.bad, found.size_raw), size=found.size_raw > 0)


def _norm_drift(facts: Facts) -> Reading:
    found = facts.admission
    mean = _share(found.norm_sum, found.size)
    if facts.cosine:
        return _reading(np.abs(mean - 1.0), size=found.size > 0)
    if facts.reference is None:
        return _undefined(facts)
    expected = facts.reference.norm_mean
    return _reading(
        _ratio(np.abs(mean - expected), expected),
        size=found.size > 0,
        context=np.isfinite(expected) & (expected > 0),
    )


def _exact_duplicate_fraction(facts: Facts) -> Reading:
    assert facts.order is not None
    raw = facts.admission.size_raw
    return _reading(1.0 - _share(facts.order.distinct, raw), size=raw > 0)


def _checksum_mismatch(facts: Facts) -> Reading:
    if facts.reference is None:
        return _undefined(facts)
    found, expected = facts.admission, facts.reference
    same = (
        (found.size_raw == expected.size_raw)
        & (found.digest_sum == expected.digest_sum)
        & (found.digest_xor == expected.digest_xor)
    )
    return _reading((~same).astype(np.float64))


def _size(facts: Facts) -> Reading:
    return _reading(facts.size)


def _mean_resultant_length(facts: Facts) -> Reading:
    # a sum of unit vectors can pass 1 by rounding only
    return _reading(np.minimum(facts.centroids.resultant, 1.0), size=facts.admission.size > 0)


def _centroid_shift(facts: Facts) -> Reading:
    if facts.reference is None:
        return _undefined(facts)
    apart = facts.centroids.mean - facts.reference.centroid
    expected = facts.reference.rms_radius
    return _reading(
        _ratio(np.sqrt(np.einsum("kd,kd->k", apart, apart)), expected),
        size=facts.admission.size > 0,
        context=np.isfinite(expected),
        spread=expected > 0,
    )


def _medoid_offset(facts: Facts) -> Reading:
    size = facts.admission.size
    single = size == 1
    value = np.where(single, 0.0, _ratio(facts.radii.least_radius, facts.rms_radius))
    return _reading(value, size=size > 0, spread=single | ~facts.no_spread)


def _rms_radius(facts: Facts) -> Reading:
    return _reading(facts.rms_radius, size=facts.admission.size > 0)


def _radius_median(facts: Facts) -> Reading:
    assert facts.order is not None
    return _reading(facts.order.median, size=facts.admission.size > 0)


def _radius_p95(facts: Facts) -> Reading:
    assert facts.order is not None
    return _reading(facts.order.p95, size=facts.admission.size > 0)


def _radius_tail_ratio(facts: Facts) -> Reading:
    assert facts.order is not None
    return _reading(
        _ratio(facts.order.p99, facts.order.median),
        size=facts.admission.size > 1,
        spread=~facts.no_spread & (facts.order.median > 0),
    )


def _silhouette(facts: Facts) -> Reading:
    assert facts.points is not None
    size = facts.admission.size
    return _reading(
        _share(facts.points.silhouette_sum, size), size=size > 0, context=facts.filled > 1
    )


def _share_of_rows(name: str) -> Callable[[Facts], Reading]:
    def read(facts: Facts) -> Reading:
        size = facts.admission.size
        part = getattr(facts.points, name)
        return _reading(_share(part, size), size=size > 0, context=facts.filled > 1)

    return read


def _davies_bouldin_term(facts: Facts) -> Reading:
    assert facts.pairs is not None
    return _reading(
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
    value = _ratio(facts.pairs.between / max(clusters - 1, 1), within)
    return _reading(value, size=size > 1, context=clusters > 1, spread=~facts.no_spread)


def _centroid_margin_p10(facts: Facts) -> Reading:
    assert facts.points is not None
    return _reading(
        facts.points.margin_p10, size=facts.admission.size > 0, context=facts.filled > 1
    )


def _cosine_diversity(facts: Facts) -> Reading:
    size = facts.size
    resultant = facts.centroids.resultant
    value = 1.0 - (size * resultant**2 - 1.0) / np.maximum(size - 1, 1)
    return _reading(value, size=size > 1)


_ALL = (
    MetricSpec(
        1, "bad_row_fraction", "(rows with NaN or Inf + rows shorter than min_norm) / n_raw",
        "[0,1]", "share", ("U", "ok", "ok"), "FAISS PR #2986 (policy)", "P1", _bad_row_fraction,
    ),
    MetricSpec(
        2, "norm_drift", "|mean norm - ref| / ref; ref = 1 for cosine, else the reference",
        ">=0", "share", ("U", "ok", "ok"), "Chan, Golub, LeVeque 1979", "P1", _norm_drift,
    ),
    MetricSpec(
        3, "exact_duplicate_fraction", "1 - distinct rows / n_raw, bytes compared on a hash hit",
        "[0,1)", "share", ("U", "0", "0 or 0.5"), "deduplication practice", "P4",
        _exact_duplicate_fraction,
    ),
    MetricSpec(
        4, "checksum_mismatch", "1 if sum or xor of mix64(id, row hash), or n_raw, differ",
        "{0,1}", "flag", ("ok", "ok", "ok"), "order-free digest", "P1", _checksum_mismatch,
    ),
    MetricSpec(
        5, "size", "good rows", ">=0", "rows", ("0", "1", "2"), "count", "P1", _size,
    ),
    MetricSpec(
        6, "mean_resultant_length", "R = |mean of x / |x||", "[0,1]", "", ("U", "1", "ok"),
        "Mardia & Jupp 2000", "P2", _mean_resultant_length,
    ),
    MetricSpec(
        7, "centroid_shift", "|mean - reference mean| / reference rms radius", ">=0", "radii",
        ("U", "ok", "ok"), "drift practice", "P2", _centroid_shift,
    ),
    MetricSpec(
        8, "medoid_offset", "min r / rms radius; argmin r is the exact medoid for squared L2",
        "[0,1]", "radii", ("U", "0", "1"), "Kaufman & Rousseeuw 1990", "P3", _medoid_offset,
    ),
    MetricSpec(
        10, "rms_radius", "sqrt(W / n), W = sum of |x - mean|^2", ">=0", "data unit",
        ("U", "0", "ok"), "moments", "P3", _rms_radius,
    ),
    MetricSpec(
        11, "radius_median", "q50 of r = |x - mean|, type 7", ">=0", "data unit",
        ("U", "0", "ok"), "Hyndman & Fan 1996", "P4", _radius_median,
    ),
    MetricSpec(
        12, "radius_p95", "q95 of r", ">=0", "data unit", ("U", "0", "ok"),
        "Hyndman & Fan 1996", "P4", _radius_p95,
    ),
    MetricSpec(
        13, "radius_tail_ratio", "q99 / q50 of r", ">=1", "", ("U", "U", "1"),
        "Hyndman & Fan 1996", "P4", _radius_tail_ratio,
    ),
    MetricSpec(
        17, "silhouette", "mean of (b - a) / max(a, b) in squared L2 or cosine, by moments",
        "[-1,1]", "", ("U", "0", "ok"), "Rousseeuw 1987", "P8", _silhouette,
    ),
    MetricSpec(
        18, "silhouette_negative_fraction", "share of rows with s < 0", "[0,1]", "share",
        ("U", "0", "ok"), "Rousseeuw 1987", "P8", _share_of_rows("negative"),
    ),
    MetricSpec(
        19, "davies_bouldin_term", "max over j of (S + S_j) / |mean - mean_j|, S = mean r",
        ">=0", "", ("U", "ok", "ok"), "Davies & Bouldin 1979", "P7", _davies_bouldin_term,
    ),
    MetricSpec(
        20, "calinski_harabasz_term", "(B / (K - 1)) / (W / (N - K)), B = n |mean - global|^2",
        ">=0", "", ("U", "U", "ok"), "Calinski & Harabasz 1974", "P7", _calinski_harabasz_term,
    ),
    MetricSpec(
        21, "centroid_margin_p10", "q10 of (d2 - d1) / (d2 + d1): d1 own, d2 nearest other mean",
        "[-1,1]", "", ("U", "ok", "ok"), "simplified silhouette, Hruschka 2004", "P8",
        _centroid_margin_p10,
    ),
    MetricSpec(
        22, "boundary_fraction", "share of rows with margin < 0.05", "[0,1]", "share",
        ("U", "ok", "ok"), "inverted-file practice", "P8", _share_of_rows("narrow"),
    ),
    MetricSpec(
        30, "cosine_diversity", "1 - mean over pairs of cos = 1 - (n R^2 - 1) / (n - 1)",
        "[0,n/(n-1)]", "", ("U", "U", "ok"), "identity of the resultant", "P2", _cosine_diversity,
    ),
)  # fmt: skip

METRICS: Mapping[str, MetricSpec] = {spec.name: spec for spec in _ALL}
