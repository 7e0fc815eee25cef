"""The three sweeps over all rows that a device may take over: admit, centroid sums, squared radii.

A sweep sees every row once and returns float64. The CPU backend here runs the twins block by block, so that
memory stays at a few blocks whatever the number of rows; analytics.kernels has the same three on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.csr import F64, I64, U64, Csr
from fabric_pipelines.analytics.reference.csr_centroid import csr_centroid
from fabric_pipelines.analytics.reference.csr_radius import csr_radius
from fabric_pipelines.analytics.reference.row_admit import row_admit
from fabric_pipelines.analytics.threads import run_side_by_side, side_by_side


class Admitted(NamedTuple):
    """norm2 f64 [N]; flag u8 [N], bits NAN, INF, ZERO of reference.row_admit; hash u64 [N, 2]."""

    norm2: F64
    flag: npt.NDArray[np.uint8]
    hash: U64


class Sweeps(Protocol):
    """`name` is the backend that a health table reports; `weight` 0 leaves a row out."""

    name: str

    def admit(self, min_norm: float) -> Admitted: ...

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

    def __init__(self, csr: Csr) -> None:
        self._csr = csr

    def admit(self, min_norm: float) -> Admitted:
        count = len(self._csr.rows)
        norm2, flag = np.empty(count), np.empty(count, dtype=np.uint8)
        row_hash = np.empty((count, 2), dtype=np.uint64)

        def admit(rows: slice) -> None:
            norm2[rows], flag[rows], row_hash[rows] = row_admit(self._csr.rows[rows], min_norm)

        run_side_by_side(admit, self._csr.blocks())
        return Admitted(norm2, flag, row_hash)

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
