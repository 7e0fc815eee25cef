"""Clusters of the same number of good rows as one array: no padding, and no loop over a million small clusters.

A pass that works inside clusters takes stacks [g, n, d]. Many small clusters share a stack until it fills its
share of memory; a cluster too large for one is a stack of its own, read in blocks of rows. Rows stand in the order
of their ids, so a tie that goes to the lower place goes to the lower id, however the rows are stored.

Stacks run side by side; a cluster too large to keep has the machine for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fabric_pipelines.analytics.csr import F64, I64, Bool, Csr
from fabric_pipelines.analytics.threads import run_side_by_side

STACK_VALUES = 1 << 20  # float64 values of one array of a stack, 8 MiB: the last-level cache
HELD_VALUES = (
    1 << 24
)  # a stack below this is converted once and kept, 128 MiB; above, at every sweep


@dataclass(frozen=True, slots=True)
class Members:
    """Good rows of each cluster, by id. weight f64 [N] (1 / norm in a cosine store), mean f64 [K, d], places
    int64 [good rows]: cluster c owns places[first[c] : first[c] + size[c]]."""

    csr: Csr
    weight: F64
    mean: F64
    places: I64
    first: I64
    size: I64

    @classmethod
    def of(cls, csr: Csr, good: Bool, size: I64, weight: F64, mean: F64) -> Members:
        by_id = np.lexsort((csr.ids, csr.owner()))
        return cls(csr, weight, mean, by_id[good[by_id]], np.cumsum(size) - size, size)

    def sweep(
        self, least: int, values: Callable[[int], int], work: Callable[[Stack], None]
    ) -> None:
        """`work` on stacks of all clusters of `least` rows and more; it must write to its own clusters only.
        `values`: of the largest array that it makes for one cluster of n rows."""
        order = np.argsort(self.size, kind="stable")
        order = order[np.searchsorted(self.size[order], least) :]
        counts, repeats = np.unique(self.size[order], return_counts=True)
        stops = np.cumsum(repeats)
        small: list[tuple[I64, int]] = []
        alone: list[tuple[I64, int]] = []
        # the largest first, or one thread ends with it while the others wait
        for count, start, stop in zip(
            counts[::-1], (stops - repeats)[::-1], stops[::-1], strict=True
        ):
            step = max(1, STACK_VALUES // max(1, values(int(count))))
            kept = int(count) * self.csr.dim <= HELD_VALUES
            for low in range(start, stop, step):
                part = (order[low : min(low + step, stop)], int(count))
                (small if kept else alone).append(part)
        for clusters, count in alone:
            work(Stack(self, clusters, count))
        # the stack is made where it is used and goes with it
        run_side_by_side(lambda part: work(Stack(self, *part)), small)


class Stack:
    """clusters int64 [g] of `count` good rows each; places int64 [g, count]: their rows, by id."""

    def __init__(self, members: Members, clusters: I64, count: int) -> None:
        self.clusters, self.count = clusters, count
        self.places: I64 = members.places[members.first[clusters][:, None] + np.arange(count)]
        self._members = members
        self._held: F64 | None = None

    @property
    def dim(self) -> int:
        return self._members.csr.dim

    @property
    def mean(self) -> F64:
        """[g, d]"""
        return self._members.mean[self.clusters]

    def rows(self, part: slice, weight: F64 | None = None) -> F64:
        """Weighted rows of a range of places, f64 [g, rows, d]."""
        at = self.places[:, part]
        block: F64 = self._members.csr.rows[at].astype(np.float64)
        block *= (self._members.weight if weight is None else weight)[at][:, :, None]
        return block

    def centred(self, part: slice) -> F64:
        """Rows less the mean of their cluster, f64 [g, rows, d]: no distance changes, no digit is lost."""
        if self._held is not None:
            return self._held[:, part]
        block = self.rows(part)
        block -= self.mean[:, None, :]
        return block

    def blocks(self, rows_max: int | None = None) -> Iterator[tuple[slice, F64]]:
        """Ranges of places with their centred rows. A stack that fits is kept for the next sweep."""
        if self._held is None and len(self.clusters) * self.count * self.dim <= HELD_VALUES:
            self._held = self.centred(slice(0, self.count))
        step = rows_max or max(1, STACK_VALUES // (len(self.clusters) * self.dim))
        for low in range(0, self.count, step):
            part = slice(low, min(low + step, self.count))
            yield part, self.centred(part)
