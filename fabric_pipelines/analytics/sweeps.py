"""The three sweeps over all rows that a device may take over: admit, centroid sums, squared radii.

A sweep sees every row once and returns float64. The CPU backend here runs the twins block by block, so that
memory stays at a few blocks whatever the number of rows; analytics.kernels has the same three on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.csr import F64, I64, U64, Bool, Csr
from fabric_pipelines.analytics.reference.csr_centroid import csr_centroid
from fabric_pipelines.analytics.reference.csr_radius import csr_radius
from fabric_pipelines.analytics.reference.row_admit import row_flags, row_hash
from fabric_pipelines.analytics.stacks import Members
from fabric_pipelines.analytics.threads import run_side_by_side, side_by_side


class Admitted(NamedTuple):
    """norm2 f64 [N]; flag u8 [N], bits NAN, INF, ZERO of reference.row_admit; hash u64 [N, 2]."""

    norm2: F64
    flag: npt.NDArray[np.uint8]
    hash: U64


class NearCentres(NamedTuple):
    """Per row f64 [N], over clusters other than its own: near2, squared distance to the nearest centre; mean2, least mean squared
    distance to the members; own2, squared distance to the own centre; reach2: the scale that their rounding is relative to."""

    own2: F64
    near2: F64
    mean2: F64
    reach2: float


class PairRows(NamedTuple):
    """Per row over the others of its cluster: sums of distances and of their squares, greatest squared distance; place int64 [n, k]
    of the nearest in the cluster (-1 beyond the last) and their distances f64 (NaN there)."""

    total: F64
    total2: F64
    greatest2: F64
    place: I64
    distance: F64


class WeighedRows(NamedTuple):
    """Per row over the others, by weights exp(-d^2 / 2T): ln of their sum, mean d^2, mean d^4. NaN where T is not above 0."""

    log_density: F64
    mean2: F64
    mean4: F64


class Tiles(Protocol):
    """What a device takes over of P7, P8, P9 and P11. `rounding`: relative, of what it finds."""

    rounding: float

    def partners(self, centres: F64, radius: F64) -> tuple[I64, Bool]:
        """centres f64 [m, d], radius f64 [m] = S -> j of the greatest (S_c + S_j) / |c - j| (-1: none), and whether
        others seem to be at the same place: those are to be looked at again."""

    def nearest_other(
        self, weight: F64, centres: F64, origin: F64, own: I64, size: F64, within: F64
    ) -> NearCentres:
        """weight f64 [N]; centres f64 [m, d]; origin f64 [d], a point among them; own int64 [N]: number of a row's centre, or
        any one of a row left out; size and within = W, f64 [m]."""

    def pairs(
        self, members: Members, radius2: F64, copy_of: I64, k: int
    ) -> Iterator[tuple[slice, PairRows]]:
        """Ranges of members.places, whole clusters, with what was found of their rows."""

    def weighed(
        self, members: Members, radius2: F64, copy_of: I64, temperature: F64
    ) -> Iterator[tuple[slice, WeighedRows]]:
        """temperature f64 [K]. Ranges of members.places, whole clusters."""


class Sweeps(Protocol):
    """`name` is the backend that a health table reports; `weight` 0 leaves a row out."""

    name: str
    tiles: Tiles | None  # None: the CPU's own, in float64

    def admit(self, min_norm: float, *, hashed: bool) -> Admitted:
        """Without `hashed` the hashes may be anything: nobody reads them."""

    def centroid(self, weight: F64) -> F64:
        """Sum of weight x row of each cluster, f64 [K, d]."""

    def radius2(self, weight: F64, centroid: F64) -> F64:
        """|weight x row - centroid of its cluster|^2, f64 [N]; 0 for rows left out."""

    def close(self) -> None:
        """Release what the sweeps hold. Idempotent."""


def _segments(indptr: I64, rows: slice) -> tuple[slice, I64]:
    """Clusters that own rows of a block, and their borders counted from its first row."""
    first = int(np.searchsorted(indptr, rows.start, side="right")) - 1
    last = int(np.searchsorted(indptr, rows.stop, side="left"))
    local = np.clip(indptr[first : last + 1], rows.start, rows.stop) - rows.start
    return slice(first, last), local


class CpuSweeps:
    name = "cpu"
    tiles: Tiles | None = None

    def __init__(self, csr: Csr) -> None:
        self._csr = csr

    def admit(self, min_norm: float, *, hashed: bool) -> Admitted:
        count = len(self._csr.rows)
        norm2, flag = np.empty(count), np.empty(count, dtype=np.uint8)
        found = np.zeros((count, 2), dtype=np.uint64)

        def admit(rows: slice) -> None:
            norm2[rows], flag[rows] = row_flags(self._csr.rows[rows], min_norm)
            if hashed:
                found[rows] = row_hash(self._csr.rows[rows])

        run_side_by_side(admit, self._csr.blocks())
        return Admitted(norm2, flag, found)

    def centroid(self, weight: F64) -> F64:
        csr = self._csr
        total = np.zeros((csr.clusters, csr.dim))

        def sums(rows: slice) -> tuple[slice, F64]:
            clusters, local = _segments(csr.indptr, rows)
            return clusters, csr_centroid(csr.rows[rows], weight[rows], local)

        for clusters, part in side_by_side(sums, csr.blocks()):
            total[clusters] += part  # in the order of the blocks, whichever was ready first
        return total

    def radius2(self, weight: F64, centroid: F64) -> F64:
        csr = self._csr
        out = np.empty(len(csr.rows))

        def measure(rows: slice) -> None:
            clusters, local = _segments(csr.indptr, rows)
            out[rows] = csr_radius(csr.rows[rows], weight[rows], local, centroid[clusters])

        run_side_by_side(measure, csr.blocks())
        return out

    def close(self) -> None:
        """Nothing is held beyond the caller's rows."""
