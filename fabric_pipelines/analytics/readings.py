"""What a metric reads and what it answers: the facts of all passes, a status, a value, and the form of a spec.

A value is a number only under OK: no 0, -1 or largest float stands in for "undefined".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.csr import F64, I64, U64, Bool
from fabric_pipelines.analytics.gauss_sums import Gauss
from fabric_pipelines.analytics.knn_graph import Graph
from fabric_pipelines.analytics.neighbours import Neighbours
from fabric_pipelines.analytics.passes import Admission, Centroids, Order, Pairs, Points, Radii
from fabric_pipelines.analytics.robust import Robust
from fabric_pipelines.analytics.spectrum import Spectrum
from fabric_pipelines.analytics.two_means import Halves
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
    """What an earlier measurement found, one entry a cluster, in the same order (HealthTable.reference).
    same_rows: the rows must still be those; without it digests say nothing, and checksum_mismatch is U_CONTEXT."""

    size_raw: I64
    norm_mean: F64
    digest_sum: U64
    digest_xor: U64
    centroid: F64
    rms_radius: F64
    same_rows: bool = True

    def require_fits(self, clusters: int, dim: int) -> None:
        if self.centroid.shape != (clusters, dim):
            raise UsageError(
                f"the reference describes {self.centroid.shape[0]} clusters of dimension "
                f"{self.centroid.shape[1]}, the data has {clusters} of {dim}: measure it again"
            )


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the passes found; from `order` on, None where a pass was skipped."""

    cosine: bool
    reference: Reference | None
    admission: Admission
    centroids: Centroids
    radii: Radii
    order: Order | None
    pairs: Pairs | None
    points: Points | None
    robust: Robust | None
    spectrum: Spectrum | None
    neighbours: Neighbours | None
    graph: Graph | None
    gauss: Gauss | None
    halves: Halves | None

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
    """`sizes` is the answer at n = 0, 1 and 2 good rows: U undefined, ok, or the number itself. `family` is the
    group of the catalogue; the pass says which kernels serve it (docs/analytics.md)."""

    number: int
    name: str
    formula: str
    range: str
    unit: str
    sizes: tuple[str, str, str]
    source: str
    pass_name: str
    family: str
    read: Callable[[Facts], Reading]

    def as_json(self) -> dict[str, Any]:
        names = ("number", "name", "formula", "range", "unit", "source", "pass_name", "family")
        return {**{name: getattr(self, name) for name in names}, "sizes": list(self.sizes)}


def reading(
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


def share(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> F64:
    """part / whole, 0 where whole is 0 (the status tells why)."""
    result: F64 = part / np.maximum(whole, 1).astype(np.float64)
    return result


def ratio(above: F64, below: F64) -> F64:
    """above / below, NaN where below is 0 (the status tells why)."""
    result: F64 = np.divide(above, below, out=np.full(len(above), np.nan), where=below != 0)
    return result


def undefined(facts: Facts) -> Reading:
    """U_CONTEXT everywhere: there is no reference."""
    return reading(np.full(len(facts.admission.size), np.nan), context=False)
