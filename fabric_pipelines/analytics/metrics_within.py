"""The metrics of what lies inside a cluster: its centre, spectrum, pairs, graph, kernel sums and two halves."""

from __future__ import annotations

import numpy as np

from fabric_pipelines.analytics.csr import F64, Bool
from fabric_pipelines.analytics.readings import Facts, MetricSpec, Reading, ratio, reading, share

GAUSSIAN_GAIN = (
    2 / np.pi
)  # share of the variance along an axis that two halves of a Gaussian explain


def _geometric_median_offset(facts: Facts) -> Reading:
    assert facts.robust is not None
    size = facts.admission.size
    value = np.where(size == 1, 0.0, ratio(facts.robust.offset, facts.rms_radius))
    return reading(value, size=size > 0, spread=(size == 1) | ~facts.no_spread)


def _leading_share(facts: Facts) -> F64:
    assert facts.spectrum is not None
    return ratio(facts.spectrum.largest, facts.spectrum.trace)


def _anisotropy(facts: Facts) -> Reading:
    # rounding of the largest eigenvalue alone passes 1
    value = np.minimum(_leading_share(facts), 1.0)
    return reading(value, size=facts.admission.size > 1, spread=~facts.no_spread)


def _effective_rank(facts: Facts) -> Reading:
    assert facts.spectrum is not None
    value = np.exp(facts.spectrum.entropy)
    return reading(value, size=facts.admission.size > 1, spread=~facts.no_spread)


def _vendi_score(facts: Facts) -> Reading:
    assert facts.spectrum is not None
    return reading(np.exp(facts.spectrum.direction_entropy), size=facts.admission.size > 0)


def _coding_rate(facts: Facts) -> Reading:
    assert facts.spectrum is not None
    return reading(facts.spectrum.coding_rate, size=facts.admission.size > 0)


def _intrinsic_dimension(facts: Facts) -> Reading:
    assert facts.neighbours is not None
    value = facts.neighbours.dimension
    return reading(value, size=facts.admission.size > 2, spread=~np.isnan(value))


def _mean_pairwise_distance(facts: Facts) -> Reading:
    assert facts.neighbours is not None
    size = facts.size
    value = facts.neighbours.distance_sum / np.maximum(size * (size - 1), 1)
    return reading(value, size=size > 1)


def _nn_distance_mean(facts: Facts) -> Reading:
    assert facts.neighbours is not None
    return reading(facts.neighbours.nearest_mean, size=facts.admission.size > 1)


def _nn_distance_cv(facts: Facts) -> Reading:
    assert facts.neighbours is not None
    mean = facts.neighbours.nearest_mean
    value = ratio(facts.neighbours.nearest_deviation, mean)
    return reading(value, size=facts.admission.size > 1, spread=mean > 0)


def _hubness_skewness(facts: Facts) -> Reading:
    assert facts.graph is not None
    return reading(facts.graph.skewness, size=facts.admission.size > 2)


def _lof_outlier_fraction(facts: Facts) -> Reading:
    assert facts.graph is not None
    size = facts.admission.size
    return reading(share(facts.graph.outliers, size), size=size > 2)


def _largest_component_share(facts: Facts) -> Reading:
    assert facts.graph is not None
    size = facts.admission.size
    return reading(share(facts.graph.largest, size), size=size > 0)


def _warm(facts: Facts) -> Bool:
    assert facts.neighbours is not None
    warm: Bool = facts.neighbours.bandwidth > 0
    return warm


def _kernel_temperature(facts: Facts) -> Reading:
    assert facts.neighbours is not None
    value = facts.neighbours.bandwidth**2
    return reading(value, size=facts.admission.size > 1, spread=_warm(facts))


def _free_energy(facts: Facts) -> Reading:
    assert facts.gauss is not None
    value = -facts.gauss.log_partition
    return reading(value, size=facts.admission.size > 1, spread=_warm(facts))


def _pair_entropy(facts: Facts) -> Reading:
    assert facts.gauss is not None
    assert facts.neighbours is not None
    over_temperature = ratio(facts.gauss.energy, facts.neighbours.bandwidth**2)
    # the logarithm of a share: rounding alone passes 1
    value = np.minimum(np.exp(over_temperature + facts.gauss.log_partition), 1.0)
    return reading(value, size=facts.admission.size > 1, spread=_warm(facts))


def _density_modes(facts: Facts) -> Reading:
    assert facts.gauss is not None
    size = facts.admission.size
    value = np.where(size == 1, 1.0, facts.gauss.modes)
    return reading(value, size=size > 0, spread=(size == 1) | _warm(facts))


def _split_gain_ratio(facts: Facts) -> Reading:
    assert facts.halves is not None
    gain = ratio(facts.halves.between, facts.radii.within)
    value = ratio(gain, GAUSSIAN_GAIN * _leading_share(facts))
    return reading(value, size=facts.admission.size > 2, spread=~facts.no_spread)


def _split_balance(facts: Facts) -> Reading:
    assert facts.halves is not None
    size = facts.admission.size
    value = share(facts.halves.smaller, size)
    return reading(value, size=size > 2, spread=~facts.no_spread)


def _dip(facts: Facts) -> Reading:
    assert facts.halves is not None
    return reading(facts.halves.dip, size=facts.admission.size > 3, spread=~facts.no_spread)


WITHIN = (
    MetricSpec(
        9, "geometric_median_offset", "|g - mean| / rms radius, g the geometric median; Weiszfeld, "
        "stop at a step of 1e-6 radii or 32 steps", "[0,1]", "radii", ("U", "0", "0"),
        "Vardi & Zhang 2000", "P5", "location", _geometric_median_offset,
    ),
    MetricSpec(
        14, "anisotropy", "largest eigenvalue of the covariance / sum of them", "[1/d,1]", "share",
        ("U", "U", "1"), "PCA", "P6", "spread", _anisotropy,
    ),
    MetricSpec(
        15, "effective_rank", "exp(-sum p ln p), p = eigenvalues of the covariance / their sum",
        "[1,min(n-1,d)]", "dimensions", ("U", "U", "1"), "Roy & Vetterli 2007", "P6", "spread",
        _effective_rank,
    ),
    MetricSpec(
        16, "intrinsic_dimension", "(m - 1) / sum ln(r2 / r1) over the m rows with r1 > 0", ">0",
        "dimensions", ("U", "U", "U"), "TwoNN, Facco 2017", "P9", "spread", _intrinsic_dimension,
    ),
    MetricSpec(
        23, "mean_pairwise_distance", "2 / (n (n - 1)) sum over i < j of d_ij", ">=0", "data unit",
        ("U", "U", "ok"), "all pairs", "P9", "density", _mean_pairwise_distance,
    ),
    MetricSpec(
        24, "nn_distance_mean", "mean distance to the nearest other row", ">=0", "data unit",
        ("U", "U", "ok"), "nearest neighbours", "P9", "density", _nn_distance_mean,
    ),
    MetricSpec(
        25, "nn_distance_cv", "deviation / mean of the distance to the nearest other row", ">=0",
        "share", ("U", "U", "0"), "nearest neighbours", "P9", "density", _nn_distance_cv,
    ),
    MetricSpec(
        26, "hubness_skewness", "skewness of how often a row is among the k nearest of others, "
        "k = min(10, n - 1); 0 without variance", "real", "skewness", ("U", "U", "U"),
        "Radovanovic 2010", "P10", "density", _hubness_skewness,
    ),
    MetricSpec(
        27, "lof_outlier_fraction", "share of rows with a local outlier factor of "
        "min(20, n - 1) neighbours above 1.5", "[0,1]", "share", ("U", "U", "U"), "Breunig 2000",
        "P10", "density", _lof_outlier_fraction,
    ),
    MetricSpec(
        28, "largest_component_share", "rows in the largest component of the symmetric graph of "
        "k nearest, k = min(10, n - 1), / n", "(0,1]", "share", ("U", "1", "1"),
        "single linkage of HDBSCAN", "P10", "density", _largest_component_share,
    ),
    MetricSpec(
        29, "vendi_score", "exp(-sum p ln p), p = eigenvalues of U'U / n, U the directions, not "
        "centred", "[1,min(n,d)]", "rows", ("U", "1", "ok"), "Friedman & Dieng 2022", "P6",
        "diversity", _vendi_score,
    ),
    MetricSpec(
        31, "coding_rate", "1/2 ln det(I + d / (n e^2) X'X), e = 0.5, not centred", ">=0", "nats",
        ("U", "ok", "ok"), "Yu 2020 (MCR^2)", "P6", "diversity", _coding_rate,
    ),
    MetricSpec(
        32, "kernel_temperature", "T = h^2, h = median distance to neighbour min(10, n - 1)", ">0",
        "squared data unit", ("U", "U", "ok"), "median heuristic", "P9", "kernel",
        _kernel_temperature,
    ),
    MetricSpec(
        33, "free_energy", "-ln Z, Z = mean over pairs of exp(-d^2 / (2 T))", ">=0", "nats",
        ("U", "U", "ok"), "Principe 2010; Wang & Isola 2020", "P11", "kernel", _free_energy,
    ),
    MetricSpec(
        34, "pair_entropy", "exp(E / T + ln Z), E = mean of d^2 / 2 under the weights: the share of "
        "pairs that interact", "(0,1]", "share", ("U", "U", "1"), "statistical mechanics", "P11",
        "kernel", _pair_entropy,
    ),
    MetricSpec(
        35, "density_modes", "rows whose kernel density beats all min(10, n - 1) neighbours; a tie "
        "goes to the lower id", ">=1", "rows", ("U", "1", "1"), "Rodriguez & Laio 2014", "P11",
        "kernel", _density_modes,
    ),
    MetricSpec(
        36, "split_gain_ratio", "(1 - WSS2 / W) / ((2 / pi) anisotropy), WSS2 of two-means; 1 = as a "
        "Gaussian", ">=0", "share", ("U", "U", "U"), "idea of Hamerly & Elkan 2003", "P12",
        "two-means", _split_gain_ratio,
    ),
    MetricSpec(
        37, "split_balance", "rows of the smaller half / n", "(0,1/2]", "share", ("U", "U", "U"),
        "two-means", "P12", "two-means", _split_balance,
    ),
    MetricSpec(
        38, "dip", "Hartigan's dip of the coordinate between the two halves' means; n >= 4",
        "[1/(2n),1/4]", "share", ("U", "U", "U"), "Hartigan & Hartigan 1985", "P12", "two-means",
        _dip,
    ),
)  # fmt: skip
