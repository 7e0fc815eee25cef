"""The sweeps that a device may take over: admit, centroid sums, squared radii, and what is made of numbers a row.

A sweep sees every row once and returns float64. The CPU backend here runs the twins block by block, so that
memory stays at a few blocks whatever the number of rows; analytics.kernels has the same ones on a GPU. Five more are a
GPU's alone (copies, Weiszfeld's step, spectra, the neighbour graph, two-means): the CPU backend answers None, and the pass does it
in its own way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.csr import (
    F64,
    I64,
    U64,
    Bool,
    Csr,
    segment_argmin,
    segment_min,
    segment_quantiles,
    segment_sum,
    segment_xor,
)
from fabric_pipelines.analytics.reference.csr_centroid import csr_centroid
from fabric_pipelines.analytics.reference.csr_radius import csr_radius
from fabric_pipelines.analytics.reference.row_admit import row_flags, row_hash
from fabric_pipelines.analytics.stacks import Members
from fabric_pipelines.analytics.threads import Scratch, run_side_by_side, side_by_side
from fabric_pipelines.analytics.tiles import Tiles


class Admitted(NamedTuple):
    """norm2 f64 [N]; flag u8 [N], bits NAN, INF, ZERO of reference.row_admit; hash u64 [N, 2]."""

    norm2: F64
    flag: npt.NDArray[np.uint8]
    hash: U64


class Nearest(NamedTuple):
    """Per cluster, over the rows kept: sum, least value (inf of none), lowest id that has it (-1 of none)."""

    total: F64
    least: F64
    least_id: I64


class Linked(NamedTuple):
    """degree [N]: how often a row is among the first neighbours of others; factor f64 [N]: local outlier factor, 1 without
    neighbours; largest int64 [K]: good rows of the largest component."""

    degree: I64
    factor: F64
    largest: I64


class Parted(NamedTuple):
    """place f64 [N]: coordinate along the line through both means; apart2 f64 [N]: squared distance to the mean of the row's
    side, 0 for rows left out; above int64 [K]: rows of the upper side; between f64 [K]: the part of W between the sides."""

    place: F64
    apart2: F64
    above: I64
    between: F64


class Pulled(NamedTuple):
    """Per cluster, over its rows further than `reach` from a point: sum of (row - mean) / distance f64 [K, d], sum of 1 / distance f64
    [K]; met f64 [K]: how many are not further."""

    pulled: F64
    strength: F64
    met: F64


class Spectra(NamedTuple):
    """Per cluster, NaN without rows: trace of the second moment; of its eigenvalues the sum, the greatest, the entropy of their
    shares, the sums of squares and of ln(1 + growth x); sound bool [K]: all of that is. upper bool [N]: rows on the positive side
    of the first axis, where that was asked."""

    trace: F64
    total: F64
    largest: F64
    entropy: F64
    squares: F64
    logs: F64
    sound: Bool
    upper: Bool


class Summed(NamedTuple):
    """P1, P2, P3 and P8 per cluster, f64 or int64 [K]: size, good rows; nan, inf and zero, bad ones; norm and norm2, sums of norms and
    of their squares; length2 of the mean; radius and within, sums of distances to it and of their squares; least of these distances
    (inf of none) and the id that has it (-1); silhouette, a sum; negative, narrow, misassigned, error and margin_p10 (NaN where
    it was not asked for) as in passes.Points."""

    size: I64
    nan: I64
    inf: I64
    zero: I64
    norm: F64
    norm2: F64
    length2: F64
    radius: F64
    within: F64
    least: F64
    least_id: I64
    silhouette: F64
    negative: I64
    narrow: I64
    misassigned: I64
    error: F64
    margin_p10: F64


class Cost(NamedTuple):
    """Of a pass on a device: bytes held there at most beyond the rows; flop and bytes held on the host, None where they are those of
    plan.py."""

    card_bytes: int
    flop: float | None = None
    host_bytes: int | None = None

    @property
    def bytes(self) -> int:
        return self.card_bytes + (self.host_bytes or 0)


class Sweeps(Protocol):
    """`name` is the backend that a health table reports; `weight` 0 leaves a row out."""

    name: str
    swept: frozenset[str]  # passes that run where `name` says, and "open"
    tiles: Tiles | None  # None: the CPU's own, in float64
    costs: Mapping[str, Cost]  # of the passes that it takes over, tiles among them

    def summed(self, min_norm: float, *, cosine: bool, margins: bool) -> Summed | None:
        """P1, P2, P3 and P8 at once, where they were asked for so when the sweeps were made and no row has to be looked at."""

    def admit(self, min_norm: float, *, hashed: bool) -> Admitted:
        """Without `hashed` the hashes may be anything: nobody reads them."""

    def centroid(self, weight: F64) -> F64:
        """Sum of weight x row of each cluster, f64 [K, d]."""

    def radius2(self, weight: F64, centroid: F64) -> F64:
        """|weight x row - centroid of its cluster|^2, f64 [N]; 0 for rows left out."""

    def totals(self, value: F64) -> F64:
        """Sum of each cluster."""

    def nearest(self, value: F64, kept: Bool) -> Nearest:
        """value f64 [N], 0 where it is not kept."""

    def digests(self, mark: U64) -> tuple[U64, U64]:
        """Sum modulo 2^64 and xor of each cluster."""

    def quantiles(self, value: F64, kept: Bool, shares: Sequence[float]) -> list[F64]:
        """By linear interpolation, one array a share; NaN where a cluster keeps none."""

    def equal_hashes(self, row_hash: U64) -> I64 | None:
        """row_hash u64 [N, 2] -> the lowest row of the same cluster with the same hash, int64 [N]."""

    def pulled(self, weight: F64, mean: F64, here: F64, reach: F64) -> Pulled | None:
        """Step towards the geometric median from mean + here f64 [K, d]; rows of weight 0 are left out. reach f64 [K]."""

    def spectra(
        self, members: Members, weight: F64, growth: float, *, centred: bool, sided: bool
    ) -> Spectra | None:
        """Of weight x row f64 [N], less the mean of its cluster where it is to be `centred`."""

    def linked(self, row: npt.NDArray[Any], distance: F64, good: Bool, near: int) -> Linked | None:
        """Neighbour lists [N, k] of rows in the same cluster, -1 past their end, with rising distances."""

    def parted(self, weight: F64, mean: F64, size: I64, upper: Bool) -> Parted | None:
        """Lloyd's iteration with two centres in every cluster from the sides `upper` on."""

    def close(self) -> None:
        """Release what the sweeps hold. Idempotent."""


def _segments(indptr: I64, rows: slice) -> tuple[slice, I64]:
    """Clusters that own rows of a block, and their borders counted from its first row."""
    first = int(indptr.searchsorted(rows.start, side="right")) - 1
    last = int(indptr.searchsorted(rows.stop, side="left"))
    local = (
        indptr[first : last + 1] - rows.start
    )  # only the outer two can lie outside; np.clip costs ten times as much
    local[0], local[-1] = max(local[0], 0), min(local[-1], rows.stop - rows.start)
    return slice(first, last), local


class CpuSweeps:
    name = "cpu"
    swept: frozenset[str] = frozenset()
    tiles: Tiles | None = None
    costs: Mapping[str, Cost] = MappingProxyType({})

    def __init__(self, csr: Csr) -> None:
        self._csr, self._scratch = csr, Scratch()

    def summed(self, min_norm: float, *, cosine: bool, margins: bool) -> Summed | None:
        return None

    def admit(self, min_norm: float, *, hashed: bool) -> Admitted:
        count = len(self._csr.rows)
        norm2, flag = np.empty(count), np.empty(count, dtype=np.uint8)
        found = np.zeros((count, 2), dtype=np.uint64)

        def admit(rows: slice) -> None:
            block = self._csr.rows[rows]
            with self._scratch.taken(*block.shape) as wide:
                norm2[rows], flag[rows] = row_flags(block, min_norm, wide)
            if hashed:
                found[rows] = row_hash(block)

        run_side_by_side(admit, self._csr.blocks())
        return Admitted(norm2, flag, found)

    def centroid(self, weight: F64) -> F64:
        csr = self._csr
        total = np.zeros((csr.clusters, csr.dim))

        def sums(rows: slice) -> tuple[slice, F64]:
            clusters, local = _segments(csr.indptr, rows)
            block = csr.rows[rows]
            with self._scratch.taken(*block.shape) as wide:
                return clusters, csr_centroid(block, weight[rows], local, wide)

        for clusters, part in side_by_side(sums, csr.blocks()):
            total[clusters] += part  # in the order of the blocks, whichever was ready first
        return total

    def radius2(self, weight: F64, centroid: F64) -> F64:
        csr = self._csr
        out = np.empty(len(csr.rows))

        def measure(rows: slice) -> None:
            clusters, local = _segments(csr.indptr, rows)
            block = csr.rows[rows]
            with self._scratch.taken(*block.shape) as wide:
                out[rows] = csr_radius(block, weight[rows], local, centroid[clusters], wide)

        run_side_by_side(measure, csr.blocks())
        return out

    def totals(self, value: F64) -> F64:
        return segment_sum(value, self._csr.indptr)

    def nearest(self, value: F64, kept: Bool) -> Nearest:
        indptr, far = self._csr.indptr, np.where(kept, value, np.inf)
        return Nearest(
            segment_sum(value, indptr),
            segment_min(far, indptr),
            segment_argmin(far, self._csr.ids, indptr),
        )

    def digests(self, mark: U64) -> tuple[U64, U64]:
        indptr = self._csr.indptr
        with np.errstate(over="ignore"):
            return segment_sum(mark, indptr), segment_xor(mark, indptr)

    def quantiles(self, value: F64, kept: Bool, shares: Sequence[float]) -> list[F64]:
        return segment_quantiles(value, kept, self._csr.owner(), self._csr.clusters, shares)

    def equal_hashes(self, row_hash: U64) -> I64 | None:
        return None

    def pulled(self, weight: F64, mean: F64, here: F64, reach: F64) -> Pulled | None:
        return None

    def spectra(
        self, members: Members, weight: F64, growth: float, *, centred: bool, sided: bool
    ) -> Spectra | None:
        return None

    def linked(self, row: npt.NDArray[Any], distance: F64, good: Bool, near: int) -> Linked | None:
        return None

    def parted(self, weight: F64, mean: F64, size: I64, upper: Bool) -> Parted | None:
        return None

    def close(self) -> None:
        """Nothing is held beyond the caller's rows."""


def beside_tiles(sweeps: Sweeps, csr: Csr) -> Sweeps:
    """For what a pass of tiles makes of their numbers: the device where it has the tiles, else the CPU."""
    return sweeps if sweeps.tiles is not None else CpuSweeps(csr)
