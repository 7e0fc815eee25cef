"""Measure the health of every cluster of a store: the passes in order, then the metrics over what they left.

Exact or not at all: nothing is sampled, and a pass over its budget is skipped whole and says so. Passes that see the
same quantity independently must agree (analytics.invariants); where they do not, every value built on them is CORRUPT,
which is how a kernel that drops dimensions shows itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.analytics import passes, plan, summed
from fabric_pipelines.analytics.csr import F32, I64, Bool, Csr
from fabric_pipelines.analytics.gauss_sums import gauss
from fabric_pipelines.analytics.invariants import contradictions
from fabric_pipelines.analytics.knn_graph import graph
from fabric_pipelines.analytics.metrics import METRICS
from fabric_pipelines.analytics.neighbours import neighbours
from fabric_pipelines.analytics.plan import WORKSPACE_BYTES, Plan
from fabric_pipelines.analytics.readings import Facts, MetricSpec, Reading, Reference, Status
from fabric_pipelines.analytics.robust import robust
from fabric_pipelines.analytics.spectrum import spectrum
from fabric_pipelines.analytics.stacks import Members
from fabric_pipelines.analytics.sweeps import CpuSweeps, Sweeps
from fabric_pipelines.analytics.two_means import halves
from fabric_pipelines.errors import UsageError
from fabric_pipelines.telemetry import timed

__all__ = ["METRICS", "HealthTable", "Reference", "Status", "measure"]

Metric = Literal["cosine", "l2"]
MIN_NORM = 1e-12  # below it a row has no direction
CHECKSUM = "checksum_mismatch"
# What a device may take over; "open" is the upload to it.
TILED = ("P7", "P8", "P9", "P11")  # run where the sweeps say, if those have tiles
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HealthTable:
    """readings[name]: value and status per cluster. aux: arrays kept beside them (sub-counts, medoid id,
    partner). pass_bytes[pass]: foreseen beyond the rows, pass_card_bytes[pass] of them on the card. backend[pass]: where its sweep ran. breaches: clusters whose passes contradict each other;
    disagreements: the same by the two passes. Where P1, P2, P3 and P8 ran at once (analytics.summed), their seconds stand under P8, and
    facts have no arrays of rows."""

    metric: Metric
    dim: int
    readings: Mapping[str, Reading]
    aux: Mapping[str, npt.NDArray[Any]]
    facts: Facts = field(repr=False)
    pass_seconds: Mapping[str, float]
    pass_flop: Mapping[str, float]
    pass_bytes: Mapping[str, int]
    pass_card_bytes: Mapping[str, int]
    backend: Mapping[str, str]
    breaches: I64
    disagreements: Mapping[str, I64]

    @property
    def clusters(self) -> int:
        return len(self.facts.admission.size)

    def to_arrow(self) -> pa.Table:
        """One row a cluster: cluster, then <metric> (null unless OK) and <metric>_status, then aux columns."""
        columns: dict[str, Any] = {"cluster": pa.array(np.arange(self.clusters, dtype=np.int64))}
        names = pa.array([status.name for status in Status])
        for name, reading in self.readings.items():
            columns[name] = pa.array(reading.value, mask=reading.status != Status.OK)
            columns[f"{name}_status"] = pa.DictionaryArray.from_arrays(
                pa.array(reading.status.astype(np.int8)), names
            )
        columns.update({name: pa.array(values) for name, values in self.aux.items()})
        return pa.table(columns)

    def to_json(self) -> dict[str, Any]:
        """Everything but the rows' facts, ready for json.dumps; values that are not OK are None."""
        return {
            "metric": self.metric,
            "dim": self.dim,
            "clusters": self.clusters,
            "metrics": {
                name: {
                    "values": [
                        None if np.isnan(value) else float(value) for value in reading.value
                    ],
                    "status": [Status(code).name for code in reading.status],
                }
                for name, reading in self.readings.items()
            },
            "aux": {
                name: [None if value != value else value for value in values.tolist()]
                for name, values in self.aux.items()
            },
            "pass_seconds": dict(self.pass_seconds),
            "pass_flop": dict(self.pass_flop),
            "pass_bytes": dict(self.pass_bytes),
            "pass_card_bytes": dict(self.pass_card_bytes),
            "backend": dict(self.backend),
            "breaches": self.breaches.tolist(),
            "disagreements": {pair: at.tolist() for pair, at in self.disagreements.items()},
        }

    def summary(self) -> dict[str, dict[str, float | int | None]]:
        """Per metric: clusters with a value, and least, median, greatest of them (None without any)."""
        out: dict[str, dict[str, float | int | None]] = {}
        for name, reading in self.readings.items():
            known = reading.value[reading.status == Status.OK]
            out[name] = {
                "ok": len(known),
                "least": float(known.min()) if len(known) else None,
                "median": float(np.median(known)) if len(known) else None,
                "greatest": float(known.max()) if len(known) else None,
            }
        return out

    def reference(self) -> Reference:
        """What a later measurement is compared with; NaN in it makes that comparison U_CONTEXT. UsageError where
        `only` has left the digests out."""
        if CHECKSUM not in self.readings:
            raise UsageError(f"a reference needs the digests: measure with {CHECKSUM!r} in `only`")
        found = self.facts.admission
        none = found.size == 0
        return Reference(
            size_raw=found.size_raw,
            norm_mean=np.where(none, np.nan, found.norm_sum / np.maximum(found.size, 1)),
            digest_sum=found.digest_sum,
            digest_xor=found.digest_xor,
            centroid=self.facts.centroids.mean,
            rms_radius=np.where(none, np.nan, self.facts.rms_radius),
        )


def measure(
    X: F32,
    indptr: I64,
    ids: I64,
    *,
    metric: Metric,
    backend: Literal["cpu", "cuda"] = "cpu",
    reference: Reference | None = None,
    min_norm: float = MIN_NORM,
    budget_flop: float | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    only: Collection[str] | None = None,
) -> HealthTable:
    """Health of each cluster c = rows indptr[c]:indptr[c+1] of X (f32 [N, d]); ids int64 [N].

    metric "cosine": rows count as directions; "l2": as they are. backend "cuda" runs every pass by kernels on
    the GPU, those of P7, P8, P9 and P11 in float32, and here what the card has no room for; table.backend says which. A pass that costs
    more than `budget_flop`, or holds more than `workspace_bytes` beyond the rows, is skipped whole, and so is one that needs it. `only`: names of
    metrics, to run no pass but those they need. Raises UsageError for input out of order, MissingDependency or DeviceRefused for "cuda" without
    CuPy or a fit device.
    """
    if metric not in ("cosine", "l2"):
        raise UsageError(f"metric {metric!r} is unknown; it must be 'cosine' or 'l2'")
    asked = _asked(only)
    csr = Csr(X, indptr, ids)
    if reference is not None:
        reference.require_fits(csr.clusters, csr.dim)
    with timed() as opening:
        names = {spec.name for spec in asked}
        together = names <= summed.READ and any(spec.pass_name == "P8" for spec in asked)
        sweeps = _sweeps(backend, csr, workspace_bytes if together else 0)
    try:
        seconds = {"open": opening["seconds"]}

        def draw() -> Plan:
            return plan.draw(
                csr,
                wanted={spec.pass_name for spec in asked},
                budget_flop=budget_flop,
                workspace_bytes=workspace_bytes,
                costs=sweeps.costs,
            )

        drawn = draw()
        facts = None
        if together and "P8" in drawn.allowed:
            margins = summed.ORDERED in names
            facts = _at_once(csr, sweeps, metric, reference, min_norm, margins, seconds)
            if facts is None and backend != "cpu":
                drawn = draw()  # row by row it costs something else
        if facts is None:
            hashed = "P4" in drawn.allowed or CHECKSUM in names
            facts = _run(
                csr, sweeps, metric == "cosine", reference, min_norm, hashed, drawn, seconds
            )
        return _table(csr, sweeps, metric, facts, drawn, asked, seconds)
    finally:
        sweeps.close()


def _asked(only: Collection[str] | None) -> list[MetricSpec]:
    unknown = sorted(set(only or ()) - set(METRICS))
    if unknown:
        raise UsageError(f"metric {unknown[0]!r} is unknown; docs/analytics.md lists all")
    return [spec for name, spec in METRICS.items() if only is None or name in only]


def _at_once(
    csr: Csr,
    sweeps: Sweeps,
    metric: Metric,
    reference: Reference | None,
    min_norm: float,
    margins: bool,
    seconds: dict[str, float],
) -> Facts | None:
    """Four passes without a number a row on the host; their time stands under the last of them."""
    with timed() as time:
        cosine = metric == "cosine"
        found = sweeps.summed(min_norm, cosine=cosine, margins=margins)
        facts = None
        if found is not None:
            facts = summed.facts(csr, found, cosine=cosine, reference=reference)
    if facts is not None:
        seconds.update({**dict.fromkeys(summed.PASSES, 0.0), "P8": time["seconds"]})
    return facts


def _sweeps(backend: str, csr: Csr, at_once_bytes: int) -> Sweeps:
    if backend == "cpu":
        return CpuSweeps(csr)
    if backend == "cuda":
        # here and not above: the CPU path must not need CuPy, not even to be looked for
        from fabric_pipelines.analytics.kernels import CudaSweeps

        return CudaSweeps(csr, at_once_bytes=at_once_bytes)
    raise UsageError(f"backend {backend!r} is unknown; it must be 'cpu' or 'cuda'")


def _table(
    csr: Csr,
    sweeps: Sweeps,
    metric: Metric,
    facts: Facts,
    drawn: Plan,
    asked: Sequence[MetricSpec],
    seconds: dict[str, float],
) -> HealthTable:
    disagreements = contradictions(facts)
    broken = np.zeros(csr.clusters, dtype=np.bool_)
    for clusters in disagreements.values():
        broken[clusters] = True
    readings = {}
    for spec in asked:
        if spec.pass_name in seconds:
            reading = spec.read(facts)
        else:
            skipped = spec.pass_name not in drawn.allowed
            reading = _unknown(facts, Status.SKIPPED_BUDGET if skipped else Status.U_CONTEXT)
        readings[spec.name] = reading if spec.pass_name == "P1" else _distrust(reading, broken)
    return HealthTable(
        metric=metric,
        dim=csr.dim,
        readings=readings,
        aux=_aux(facts),
        facts=facts,
        pass_seconds=seconds,
        pass_flop=drawn.flop,
        pass_bytes=drawn.workspace_bytes,
        pass_card_bytes=drawn.card_bytes,
        backend={
            name: sweeps.name
            if name in sweeps.swept or (name in TILED and sweeps.tiles is not None)
            else "cpu"
            for name in seconds
        },
        breaches=np.flatnonzero(broken).astype(np.int64),
        disagreements=disagreements,
    )


def _run(
    csr: Csr,
    sweeps: Sweeps,
    cosine: bool,
    reference: Reference | None,
    min_norm: float,
    hashed: bool,
    drawn: Plan,
    seconds: dict[str, float],
) -> Facts:
    """Every pass that is allowed, in order; `seconds` gets an entry for each that ran."""

    def run(name: str, work: Callable[[], T]) -> T:
        with timed() as time:
            result = work()
        seconds[name] = time["seconds"]
        return result

    def may(name: str, work: Callable[[], T]) -> T | None:
        return run(name, work) if name in drawn.allowed else None

    found = run("P1", lambda: passes.admit(csr, sweeps, min_norm=min_norm, hashed=hashed))
    means = run("P2", lambda: passes.centroid(csr, sweeps, found, cosine=cosine))
    radii = run("P3", lambda: passes.radius(csr, sweeps, found, means))
    order = may("P4", lambda: passes.order(csr, sweeps, found, radii))
    size, radius2 = found.size, radii.radius2
    members = Members.of(csr, found.good, size, means.weight, means.mean)
    rms = np.sqrt(radii.within / np.maximum(size, 1))
    centre = may("P5", lambda: robust(csr, sweeps, members, radius2, rms))
    shape = may("P6", lambda: spectrum(csr, sweeps, members, found.norm, cosine=cosine))
    pairs = may("P7", lambda: passes.pairs(means, radii, size, sweeps.tiles))
    several = int((size > 0).sum()) > 1
    points = None
    if several:
        points = may("P8", lambda: passes.points(csr, sweeps, found, means, radii))
    near = edges = sums = None
    if order is not None:
        copies = order.copy_of
        near = may("P9", lambda: neighbours(csr, sweeps, members, radius2, copies))
    if near is not None and order is not None:
        lists, heat = near, near.bandwidth**2
        edges = may("P10", lambda: graph(csr, sweeps, found.good, size, lists))
        sums = may("P11", lambda: gauss(csr, members, lists, radius2, copies, heat, sweeps.tiles))
    split = None
    if shape is not None:
        upper = shape.upper
        split = may("P12", lambda: halves(csr, sweeps, members, upper))
    return Facts(
        cosine=cosine,
        reference=reference,
        admission=found,
        centroids=means,
        radii=radii,
        order=order,
        pairs=pairs,
        points=points,
        robust=centre,
        spectrum=shape,
        neighbours=near,
        graph=edges,
        gauss=sums,
        halves=split,
    )


def _unknown(facts: Facts, why: Status) -> Reading:
    """No value anywhere; an empty cluster still says U_SIZE first."""
    size = facts.admission.size
    undefined = why is Status.U_CONTEXT
    status = np.where((size == 0) & undefined, Status.U_SIZE, why).astype(np.uint8)
    return Reading(np.full(len(size), np.nan), status)


def _distrust(reading: Reading, broken: Bool) -> Reading:
    if not broken.any():
        return reading
    return Reading(
        np.where(broken, np.nan, reading.value),
        np.where(broken, np.uint8(Status.CORRUPT), reading.status),
    )


def _aux(facts: Facts) -> dict[str, npt.NDArray[Any]]:
    found = facts.admission
    variance = (
        found.norm2_sum / np.maximum(found.size, 1)
        - (found.norm_sum / np.maximum(found.size, 1)) ** 2
    )
    mean = found.norm_sum / np.maximum(found.size, 1)
    aux: dict[str, npt.NDArray[Any]] = {
        "n_raw": found.size_raw,
        "nan_rows": found.nan,
        "inf_rows": found.inf,
        "zero_rows": found.zero,
        "norm_cv": np.divide(
            np.sqrt(np.maximum(variance, 0.0)), mean, out=np.full(len(mean), np.nan), where=mean > 0
        ),
        "medoid_id": facts.radii.medoid,
    }
    if facts.pairs is not None:
        aux["davies_bouldin_partner"] = facts.pairs.partner
    if facts.points is not None:
        aux["misassigned_rows"] = facts.points.misassigned
    if facts.robust is not None:
        aux["geometric_median_steps"] = facts.robust.steps
    if facts.spectrum is not None:
        aux["vendi_score_order2"] = 1.0 / facts.spectrum.direction_purity
        aux["coding_rate_centred"] = facts.spectrum.coding_rate_centred
    if facts.neighbours is not None:
        aux["diameter"] = facts.neighbours.diameter
    if facts.gauss is not None:
        aux["heat_capacity"] = facts.gauss.heat_capacity
    return aux
