"""P7, P8, P9 and P11 on a card: what their tiles need of a store, and what comes back in the units of the store.

Rows are centred and scaled by powers of two on the card, so that f32 holds a store of any unit; windows of rows or of whole
clusters bound the memory. Distances are f32: `ROUNDING` is what a metric may differ by from the float64 of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics import card_plan
from fabric_pipelines.analytics import kernels_tiles as tiles
from fabric_pipelines.analytics.csr import F64, I64, Bool, Csr, segment_sum
from fabric_pipelines.analytics.stacks import Members
from fabric_pipelines.analytics.threads import over_rows
from fabric_pipelines.analytics.tiles import NearCentres, PairRows, WeighedRows
from fabric_pipelines.device.card import Card, DeviceArray

PASSES = ("P7", "P8", "P9", "P11")
ROUNDING = 1e-5


class _Window(NamedTuple):
    """Clusters and their places; rows on the card, scaled by `scale` f64 a cluster."""

    clusters: slice
    places: slice
    rows: tiles.TileRows
    copy: DeviceArray
    scale: F64


class CardTiles:
    """rows: f32 [N, d] of `csr` on the card, which stay the caller's."""

    rounding = ROUNDING

    def __init__(
        self, gpu: Card, rows: DeviceArray, csr: Csr, *, window_bytes: int | None = None
    ) -> None:
        self._gpu, self._rows, self._csr = gpu, rows, csr
        self._window_rows = card_plan.window_rows(csr.dim, window_bytes)  # or one cluster

    def partners(self, centres: F64, radius: F64) -> tuple[I64, Bool]:
        """See tiles.Tiles."""
        scale = _unit(np.einsum("kd,kd->k", centres, centres).max(initial=0.0))
        found = tiles.centre_partners(
            self._gpu, self._flat(centres * scale), self._send((radius * scale).astype(np.float32)), 0.0
        )  # fmt: skip
        partner, _ = tiles.greatest_partner(self._gpu.download(found.key))
        return partner, self._gpu.download(found.coincident) != 0

    def nearest_other(
        self, weight: F64, centres: F64, origin: F64, own: I64, size: F64, within: F64
    ) -> NearCentres:
        """See tiles.Tiles."""
        spread = within / size
        apart = centres - origin
        reach2 = np.einsum("kd,kd->k", apart, apart).max() + spread.max()
        scale = _unit(reach2)
        apart *= scale
        there = self._flat(apart)
        spread_there, size_there = self._send(spread * scale**2), self._send(size)
        weight_there = self._send(weight * scale)
        count = len(weight)
        out = NearCentres(np.empty(count), np.empty(count), np.empty(count), reach2)
        for low in range(0, count, self._window_rows):
            part = slice(low, min(low + self._window_rows, count))
            place = np.arange(part.start, part.stop)
            block = tiles.tile_rows(
                self._gpu, self._rows, weight_there, place, np.array([0, len(place)]),
                (origin * scale)[None],
            )  # fmt: skip
            found = tiles.centre_points(
                self._gpu, block, there, self._send(own[part]), spread_there, size_there
            )
            near2 = tiles.squares(self._gpu.download(found.near))
            for into, scaled in (
                (out.own2, self._gpu.download(found.own2)),
                (out.near2, near2),
                (out.mean2, self._gpu.download(found.b)),
            ):
                np.divide(scaled, scale**2, out=into[part])
            del block, found  # before the next window is taken
        return out

    def pairs(
        self, members: Members, radius2: F64, copy_of: I64, k: int
    ) -> Iterator[tuple[slice, PairRows]]:
        """See tiles.Tiles."""
        for window in self._windows(members, radius2, copy_of):
            found = tiles.pair_tile(self._gpu, window.rows, window.copy, k)
            scale = np.repeat(window.scale, np.diff(window.rows.bounds))
            place, distance = _neighbours(self._gpu.download(found.near), scale)
            yield (
                window.places,
                PairRows(
                    self._gpu.download(found.total) / scale,
                    self._gpu.download(found.total2) / scale**2,
                    self._gpu.download(found.greatest2) / scale**2,
                    place,
                    distance,
                ),
            )
            del window, found  # before the next one is taken

    def weighed(
        self, members: Members, radius2: F64, copy_of: I64, temperature: F64
    ) -> Iterator[tuple[slice, WeighedRows]]:
        """See tiles.Tiles."""
        for window in self._windows(members, radius2, copy_of):
            heat = temperature[window.clusters] * window.scale**2
            found = tiles.gauss_tile(self._gpu, window.rows, window.copy, heat)
            several = np.repeat(
                (heat > 0) & (np.diff(window.rows.bounds) > 1), np.diff(window.rows.bounds)
            )
            least, weight, first, second = (
                np.where(several, self._gpu.download(part), np.nan) for part in found
            )
            scale2 = np.repeat(window.scale, np.diff(window.rows.bounds)) ** 2
            first, second = first / weight, second / weight
            yield (
                window.places,
                WeighedRows(
                    np.log(weight) - least / (2 * np.repeat(heat, np.diff(window.rows.bounds))),
                    (least + first) / scale2,
                    (least**2 + 2 * least * first + second) / scale2**2,
                ),
            )
            del window, found  # before the next one is taken

    def _windows(self, members: Members, radius2: F64, copy_of: I64) -> Iterator[_Window]:
        bounds = np.concatenate([members.first, [len(members.places)]])
        within = segment_sum(radius2[members.places], bounds)
        scale = _unit(within / np.maximum(members.size, 1))
        owner = np.repeat(np.arange(len(scale)), self._csr.sizes)
        weight = self._send(members.weight * scale[owner])
        start = 0
        while start < len(scale):
            stop = int(np.searchsorted(bounds, bounds[start] + self._window_rows, side="right")) - 1
            stop = min(max(stop, start + 1), len(scale))
            clusters, part = slice(start, stop), slice(int(bounds[start]), int(bounds[stop]))
            start = stop
            if part.start == part.stop:
                continue
            place = members.places[part]
            rows = tiles.tile_rows(
                self._gpu, self._rows, weight, place, bounds[clusters.start : stop + 1] - part.start,
                members.mean[clusters] * scale[clusters][:, None],
            )  # fmt: skip
            window = [_Window(clusters, part, rows, self._send(copy_of[place]), scale[clusters])]
            del rows
            yield window.pop()  # nobody but the caller holds it

    def _flat(self, centres: F64) -> tiles.TileRows:
        """Centres as the columns or rows of one set."""
        count, dim = centres.shape
        padded = np.zeros((count, tiles.pitch_of(dim)), dtype=np.float32)
        padded[:, :dim] = centres
        norm2 = np.einsum("kd,kd->k", padded, padded, dtype=np.float64).astype(np.float32)
        bounds = np.array([0, count])
        return tiles.TileRows(
            self._send(padded), self._send(norm2), self._send(bounds), bounds, dim
        )

    def _send(self, host: npt.NDArray[Any]) -> DeviceArray:
        there = self._gpu.empty(host.shape, host.dtype)
        self._gpu.store(there, host)
        return there


def _neighbours(near: npt.NDArray[np.uint64], scale: F64) -> tuple[I64, F64]:
    """Keys u64 [n, k] of rows scaled by f64 [n] -> places and distances."""
    place, distance = np.empty(near.shape, np.int64), np.empty(near.shape)

    def decode(rows: slice) -> None:
        place[rows], scaled = tiles.pair_neighbours(near[rows])
        distance[rows] = scaled / scale[rows, None]

    over_rows(decode, *near.shape)
    return place, distance


def _unit(length2: F64 | float) -> F64:
    """The power of two that brings lengths to about 1; 1 where they are 0."""
    some = np.asarray(length2, dtype=np.float64)
    exponent = np.rint(np.log2(np.where(some > 0, some, 1.0)) / 2)
    unit: F64 = np.exp2(-exponent)
    return unit
