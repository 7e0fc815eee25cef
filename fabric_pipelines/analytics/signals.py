"""What a rule may ask of a cluster: the 38 metrics, and a few numbers made of them or of two measurements.

A signal is as undefined as what it is made of: its status is the first of its inputs' that is not OK. What compares
with an earlier measurement says in `applies` where there is one; without it such a question does not arise, which is
another thing than an answer that could not be had. Likewise what searches met applies where searches were counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.csr import F64, I64, Bool
from fabric_pipelines.analytics.health import HealthTable
from fabric_pipelines.analytics.metrics import METRICS
from fabric_pipelines.analytics.probes import Probes
from fabric_pipelines.analytics.readings import Reading, Reference, Status, ratio

GAUSSIAN_GAIN = 2.0 / np.pi  # share of its axis' variance that halving a Gaussian explains
BASELINE = (
    "effective_rank",
    "vendi_score",
    "silhouette",
    "size",
)  # asked of an earlier measurement


@dataclass(frozen=True, slots=True)
class Signals:
    """readings[name] [K]; applies[name] [K]: where the question arises (names left out: everywhere)."""

    clusters: int
    readings: Mapping[str, Reading]
    applies: Mapping[str, Bool]


DERIVED: Mapping[str, str] = {
    "contradicted": "1 where two passes contradict each other",
    "nonfinite_fraction": "rows with NaN or Inf / all rows",
    "zero_fraction": "rows shorter than min_norm / all rows",
    "norm_cv": "deviation / mean of the rows' norms",
    "misassigned_fraction": "share of rows nearer to another cluster's mean",
    "size_share": "rows / mean rows of the clusters that have any",
    "dip_scaled": "dip * sqrt(rows): what a single hump leaves does not grow with rows",
    "merge_gain_ratio": "variance between this cluster and its Davies-Bouldin partner, over what one Gaussian cut "
    "in two along their widest axis would show; 1 or less = as one cluster",
    "effective_rank_share": "effective_rank / that of the earlier measurement",
    "vendi_score_share": "vendi_score / that of the earlier measurement",
    "silhouette_fall": "silhouette of the earlier measurement - silhouette",
    "size_over_earlier": "rows / rows in the earlier measurement",
    "wasted_probes": "share of the queries that looked at the list and got no row of it",
    "wasted_probes_rise": "wasted_probes - that of the earlier measurement",
    "store_shift": "|mean of all rows - that of the earlier measurement| / its rms radius; the same for all clusters",
}

KNOWN: frozenset[str] = frozenset(METRICS) | frozenset(DERIVED)
OF_SEARCHES = frozenset({"size", "wasted_probes"})  # what a search tells without measuring rows


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a measurement is compared with: `reference` goes to `measure`, `readings` of BASELINE and of
    `wasted_probes` to `signals`."""

    reference: Reference
    readings: Mapping[str, Reading]
    store_mean: F64
    store_rms: float

    @classmethod
    def of(
        cls,
        table: HealthTable,
        clusters: int,
        *,
        same_rows: bool,
        anew: I64 | None = None,
        probes: Probes | None = None,
    ) -> Earlier:
        """For a store that has `clusters` clusters now, of which the last may be newer than `table`; those in `anew`
        keep their number but were cut anew, so that nothing of before is theirs. same_rows: see Reference."""
        known = np.zeros(clusters, np.bool_)
        known[: table.clusters] = True
        if anew is not None:
            known[anew] = False
        then, at = table.reference(), np.flatnonzero(known)
        centroid = np.full((clusters, table.dim), np.nan)
        centroid[at] = then.centroid[at]
        reference = Reference(
            size_raw=_widened(then.size_raw, at, clusters, 0),
            norm_mean=_widened(then.norm_mean, at, clusters, np.nan),
            digest_sum=_widened(then.digest_sum, at, clusters, 0),
            digest_xor=_widened(then.digest_xor, at, clusters, 0),
            centroid=centroid,
            rms_radius=_widened(then.rms_radius, at, clusters, np.nan),
            same_rows=same_rows,
        )
        measured = {name: table.readings[name] for name in BASELINE}
        measured["wasted_probes"] = probes.reading() if probes else _unasked(table.clusters)
        readings = {
            name: Reading(
                _widened(each.value, at, clusters, np.nan),
                _widened(each.status, at, clusters, Status.U_CONTEXT),
            )
            for name, each in measured.items()
        }
        mean, rms = _store(table)
        return cls(reference, readings, mean, rms)


def _store(table: HealthTable) -> tuple[F64, float]:
    """Mean and rms radius of all good rows (of their directions in a cosine store)."""
    size, means = table.facts.size, table.facts.centroids.mean
    rows = max(float(size.sum()), 1.0)
    mean: F64 = (size[:, None] * means).sum(axis=0) / rows
    between = (size * ((means - mean) ** 2).sum(axis=1)).sum()
    return mean, float(np.sqrt((table.facts.radii.within.sum() + between) / rows))


def _widened(values: npt.NDArray[Any], at: I64, clusters: int, filler: Any) -> npt.NDArray[Any]:
    wide = np.full(clusters, filler, values.dtype)
    wide[at] = values[at]
    return wide


def signals(
    table: HealthTable, earlier: Earlier | None = None, probes: Probes | None = None
) -> Signals:
    """`table` has every metric, measured against `earlier.reference` if there is an earlier measurement. probes: of searches
    over the same lists, where some were counted."""
    readings = dict(table.readings)
    readings.update({name: made(table) for name, made in _MADE.items()})
    nothing = _unasked(table.clusters)
    then = earlier.readings if earlier else dict.fromkeys((*BASELINE, "wasted_probes"), nothing)
    now = table.readings
    for name in ("effective_rank", "vendi_score"):
        share = ratio(now[name].value, then[name].value)
        readings[f"{name}_share"] = _made(share, now[name], then[name])
    fall = then["silhouette"].value - now["silhouette"].value
    readings["silhouette_fall"] = _made(fall, now["silhouette"], then["silhouette"])
    readings["size_over_earlier"] = _made(ratio(table.facts.size, then["size"].value), then["size"])
    wasted = readings["wasted_probes"] = probes.reading() if probes else nothing
    rise = wasted.value - then["wasted_probes"].value
    readings["wasted_probes_rise"] = _made(rise, wasted, then["wasted_probes"])
    readings["store_shift"] = nothing if earlier is None else _store_shift(table, earlier)
    return Signals(table.clusters, readings, _applies(table, then, earlier, probes))


def of_searches(sizes: I64, probes: Probes) -> Signals:
    """OF_SEARCHES alone, of lists of `sizes` rows [K]."""
    size = _made(sizes.astype(np.float64))
    readings = {"size": size, "wasted_probes": probes.reading()}
    chosen = np.full(len(sizes), probes.width < len(sizes))
    return Signals(len(sizes), readings, {"wasted_probes": chosen})


def _unasked(clusters: int) -> Reading:
    return Reading(np.full(clusters, np.nan), np.full(clusters, Status.U_CONTEXT, np.uint8))


def _applies(
    table: HealthTable,
    then: Mapping[str, Reading],
    earlier: Earlier | None,
    probes: Probes | None,
) -> dict[str, Bool]:
    """A cluster that is new, or has no reference, has nothing that it could have moved away from."""
    reference = table.facts.reference
    none = np.zeros(table.clusters, np.bool_)
    placed = none if reference is None else np.isfinite(reference.rms_radius)
    compared = {
        made: then[name].status != Status.U_CONTEXT
        for made, name in (
            ("effective_rank_share", "effective_rank"),
            ("vendi_score_share", "vendi_score"),
            ("silhouette_fall", "silhouette"),
            ("size_over_earlier", "size"),
        )
    }
    # who looks at every list has chosen none
    chosen = np.full(table.clusters, probes is not None and probes.width < table.clusters)
    applies = {
        **compared,
        "wasted_probes": chosen,
        "wasted_probes_rise": chosen & (then["wasted_probes"].status != Status.U_CONTEXT),
        "centroid_shift": placed,
        "store_shift": none if earlier is None else ~none,
        "checksum_mismatch": none if reference is None or not reference.same_rows else ~none,
    }
    if not table.facts.cosine:  # a cosine store's norm is 1 without any reference
        applies["norm_drift"] = placed
    return applies


def _store_shift(table: HealthTable, earlier: Earlier) -> Reading:
    mean, _ = _store(table)
    apart = float(np.linalg.norm(mean - earlier.store_mean))
    moved = apart / earlier.store_rms if earlier.store_rms > 0 else np.nan
    return _made(np.full(table.clusters, moved))


def _made(value: F64, *inputs: Reading) -> Reading:
    status = np.full(len(value), Status.OK, np.uint8)
    for each in reversed(inputs):
        status = np.where(each.status != Status.OK, each.status, status)
    status[(status == Status.OK) & ~np.isfinite(value)] = Status.U_DEGENERATE
    return Reading(np.where(status == Status.OK, value, np.nan), status)


def _contradicted(table: HealthTable) -> Reading:
    value = np.zeros(table.clusters)
    value[table.breaches] = 1.0
    return _made(value)


def _of_all_rows(table: HealthTable, *counts: str) -> Reading:
    rows = table.aux["n_raw"].astype(np.float64)
    part = sum((table.aux[name] for name in counts), np.zeros(table.clusters, np.int64))
    return _made(ratio(part.astype(np.float64), rows), table.readings["bad_row_fraction"])


def _misassigned_fraction(table: HealthTable) -> Reading:
    found = table.readings["boundary_fraction"]  # of the same pass
    if "misassigned_rows" not in table.aux:
        return found
    return _made(table.aux["misassigned_rows"] / np.maximum(table.facts.size, 1), found)


def _size_share(table: HealthTable) -> Reading:
    mean = table.facts.size.sum() / max(table.facts.filled, 1)
    return _made(table.facts.size / max(mean, 1.0), table.readings["size"])


def _dip_scaled(table: HealthTable) -> Reading:
    return _made(
        table.readings["dip"].value * np.sqrt(table.facts.size),
        table.readings["dip"],
    )


def _merge_gain_ratio(table: HealthTable) -> Reading:
    """With b = variance between the two means and u = largest variance inside, b is (2 / pi) (b + u) when one Gaussian
    was cut along its widest axis, and more when there is a gap. From stored moments: no row is read."""
    spread, anisotropy = table.readings["davies_bouldin_term"], table.readings["anisotropy"]
    if table.facts.pairs is None:
        return spread
    mean, size = table.facts.centroids.mean, table.facts.size
    partner: I64 = np.where(table.facts.pairs.partner < 0, 0, table.facts.pairs.partner)
    both = np.maximum(size + size[partner], 1)
    apart2 = ((mean - mean[partner]) ** 2).sum(axis=1)
    between = size * size[partner] / both**2 * apart2
    widest = anisotropy.value * table.facts.radii.within
    inside = (widest + widest[partner]) / both
    other = Reading(anisotropy.value[partner], anisotropy.status[partner])
    return _made(ratio(between, GAUSSIAN_GAIN * (between + inside)), spread, anisotropy, other)


def _norm_cv(table: HealthTable) -> Reading:
    return _made(
        table.aux["norm_cv"],
        table.readings["norm_drift"] if table.facts.cosine else table.readings["size"],
    )


_MADE: Mapping[str, Callable[[HealthTable], Reading]] = {
    "contradicted": _contradicted,
    "nonfinite_fraction": lambda table: _of_all_rows(table, "nan_rows", "inf_rows"),
    "zero_fraction": lambda table: _of_all_rows(table, "zero_rows"),
    "norm_cv": _norm_cv,
    "misassigned_fraction": _misassigned_fraction,
    "size_share": _size_share,
    "dip_scaled": _dip_scaled,
    "merge_gain_ratio": _merge_gain_ratio,
}
