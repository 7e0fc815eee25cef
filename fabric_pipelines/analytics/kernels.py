"""Launches of the kernel families of cuda/, and the sweeps of analytics.sweeps on a card.

A launch takes arrays on the device and queues; it decides lanes a row, vector width and grid, nothing else.
The bits of a result do not depend on the grid, which `blocks` sets by hand only to prove that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics import card_plan, card_tiles
from fabric_pipelines.analytics import kernels_moments as moments
from fabric_pipelines.analytics.card_plan import MOVE_ROWS, REDUCE_ROWS, SLAB, window_width
from fabric_pipelines.analytics.card_points import CardPoints
from fabric_pipelines.analytics.csr import F64, I64, U64, Bool, Csr, segment_sum
from fabric_pipelines.analytics.kernels_rows import WARP, lanes_for, variant
from fabric_pipelines.analytics.kernels_rows import csr_centroid as csr_centroid
from fabric_pipelines.analytics.kernels_rows import csr_quantiles as csr_quantiles
from fabric_pipelines.analytics.kernels_rows import csr_radius as csr_radius
from fabric_pipelines.analytics.kernels_rows import csr_reduce as csr_reduce
from fabric_pipelines.analytics.kernels_rows import csr_words as csr_words
from fabric_pipelines.analytics.kernels_rows import row_admit as row_admit
from fabric_pipelines.analytics.kernels_rows import row_admit_into as row_admit_into
from fabric_pipelines.analytics.reference.flat_select import SLOTS
from fabric_pipelines.analytics.reference.two_means import ROUNDS_MAX
from fabric_pipelines.analytics.search import Metric
from fabric_pipelines.analytics.stacks import Members
from fabric_pipelines.analytics.sweeps import (
    Admitted,
    Cost,
    CpuSweeps,
    Linked,
    Nearest,
    Parted,
    Pulled,
    Spectra,
    Summed,
)
from fabric_pipelines.analytics.threads import over_rows
from fabric_pipelines.device.card import Card, DeviceArray
from fabric_pipelines.device.gpu import THREADS, Gpu
from fabric_pipelines.errors import DeviceRefused

OPTIONAL = ("P6",)  # stays with the CPU where the card has no room for it


def csr_copies(
    gpu: Card, row_hash: DeviceArray, indptr: DeviceArray, *, blocks: int | None = None
) -> tuple[DeviceArray, DeviceArray]:
    """row_hash u64 [N, 2], indptr i64 [K+1] -> i64 [N]: the lowest row of the same cluster with the same hash; u64 [K, 2]:
    first the distinct rows. Twin: reference.csr_select.csr_copies. Holds 16 to 32 bytes a row for a table meanwhile."""
    count, clusters = len(row_hash), len(indptr) - 1
    copy_of, fresh = gpu.empty(count, np.int64), gpu.empty(count, np.uint64)
    if count:
        slots = 1 << (2 * count - 1).bit_length()
        table = gpu.empty(slots, np.uint64)
        gpu.fill(table, 0xFF)
        grid = blocks or gpu.blocks_for(-(-count // REDUCE_ROWS))
        where = (row_hash, indptr, count, clusters, table, slots - 1)
        gpu.launch("csr_select", "csr_select_insert", grid, where)
        gpu.launch("csr_select", "csr_select_find", grid, (*where, copy_of, fresh))
    return copy_of, csr_words(gpu, fresh, indptr, blocks=blocks)


@dataclass(frozen=True, slots=True)
class Graphed:
    """degree i32 [N], factor f64 [N], label i64 [N]: lowest row of the component; largest u64 [K]: members."""

    degree: DeviceArray
    factor: DeviceArray
    label: DeviceArray
    largest: DeviceArray


def knn_graph(
    gpu: Card,
    row: DeviceArray,
    distance: DeviceArray,
    flag: DeviceArray,
    indptr: DeviceArray,
    near: int,
    *,
    blocks: int | None = None,
) -> Graphed:
    """row i32 or i64 [N, k], -1 past the end; distance f64 [N, k]; flag u8 [N], 0 for a member; degrees and components of
    the first `near`. Twin: reference.knn_graph.of_lists."""
    (count, width), clusters = row.shape, len(indptr) - 1
    bits = 8 * row.dtype.itemsize
    out = Graphed(
        degree=gpu.empty(count, np.int32),
        factor=gpu.empty(count, np.float64),
        label=gpu.empty(count, np.int64),
        largest=gpu.empty(clusters, np.uint64),
    )
    gpu.fill(out.largest, 0)
    if count == 0:
        return out
    known, members = gpu.empty(count, np.int32), gpu.empty(count, np.int32)
    reach, density = gpu.empty(count, np.float64), gpu.empty(count, np.float64)
    parent = gpu.empty(count, np.uint64)
    for counted in (out.degree, members):
        gpu.fill(counted, 0)
    lists, size = blocks or gpu.blocks_for(-(-count // 4)), (count, width)

    def queue(name: str, *arguments: DeviceArray | int, grid: int = lists) -> None:
        gpu.launch("knn_graph", f"knn_graph_{name}", grid, arguments)

    queue(f"degree_{bits}", row, distance, *size, near, out.degree, known, reach, parent)
    queue(f"density_{bits}", row, distance, known, reach, *size, density)
    queue(f"factor_{bits}", row, known, density, *size, out.factor)
    queue(f"hook_{bits}", row, known, *size, near, parent)
    threads = blocks or gpu.blocks_for(-(-count // WARP))
    queue("label", parent, flag, count, out.label, members, grid=threads)
    runs = blocks or gpu.blocks_for(-(-count // REDUCE_ROWS))
    queue("largest", members, indptr, count, clusters, out.largest, grid=runs)
    return out


@dataclass(frozen=True, slots=True)
class Halved:
    """side u8 [N]; place f64 [N]: coordinate along the line through both means; apart2 f64 [N]: squared distance to the
    mean of its side; above i64 [K]: rows of the upper side; norm2 f64 [K]: squared length of the sum of its rows."""

    side: DeviceArray
    place: DeviceArray
    apart2: DeviceArray
    above: DeviceArray
    norm2: DeviceArray


def two_means(
    gpu: Card,
    rows: DeviceArray,
    weight: DeviceArray,
    indptr: DeviceArray,
    mean: DeviceArray,
    size: DeviceArray,
    start: DeviceArray,
    *,
    blocks: int | None = None,
    window_bytes: int | None = None,
    rounds: int = ROUNDS_MAX,
) -> Halved:
    """rows f32 [N, d], weight f64 [N], indptr i64 [K+1], mean f64 [K, d] of weight x row, size i64 [K] rows of weight
    above 0, start u8 [N]. Twin: reference.two_means.from_sides. The host waits for nothing between rounds."""
    (count, dim), clusters = rows.shape, len(indptr) - 1
    out = Halved(
        side=gpu.empty(count, np.uint8),
        place=gpu.empty(count, np.float64),
        apart2=gpu.empty(count, np.float64),
        above=gpu.empty(clusters, np.int64),
        norm2=gpu.empty(clusters, np.float64),
    )
    for zeros in (out.above, out.norm2):
        gpu.fill(zeros, 0)
    if count == 0:
        return out
    upper, active = gpu.empty((clusters, dim), np.float64), gpu.empty(clusters, np.uint8)
    gpu.fill(upper, 0)
    gpu.fill(active, 1)
    runs = -(-count // MOVE_ROWS)
    slots = runs + clusters
    moves = gpu.empty(slots, np.uint64)
    width = window_width(slots, dim, window_bytes)
    partial = gpu.empty(slots * width, np.float64)
    kind, shape = variant(gpu, rows), (count, dim, clusters)

    def queue(name: str, warps: int, *arguments: DeviceArray | int) -> None:
        gpu.launch("two_means", f"two_means_{name}", blocks or gpu.blocks_for(warps), arguments)

    def settle() -> None:
        queue("settle", clusters, moves, indptr, size, clusters, out.above, active)
        for low in range(0, dim, width):
            part = (low, min(width, dim - low))
            queue(f"move_{kind}", runs * -(-part[1] // SLAB), rows, weight, indptr, mean, out.side,
                  moves, active, *shape, *part, partial)  # fmt: skip
            queue("fold", -(-clusters * part[1] // WARP), partial, moves, indptr, active, dim,
                  clusters, *part, upper)  # fmt: skip
        queue("norm", clusters, upper, active, dim, clusters, out.norm2)

    queue("count", runs, start, weight, indptr, count, clusters, out.side, moves)
    settle()
    swept = (rows, weight, indptr, mean, upper, out.norm2, out.above, size, active, *shape)
    lanes = f"{kind}_{lanes_for(dim)}"
    for _ in range(rounds):
        queue(f"assign_{lanes}", runs, *swept, out.side, moves)
        settle()
    queue(f"finish_{lanes}", runs, *swept, out.side, out.place, out.apart2)
    return out


@dataclass(frozen=True, slots=True)
class TileScores:
    """What flat_slots and flat_take make a distance of: products f32 [q, stride] of `rows` rows, length f32 [rows],
    reach and slack f32 [q], and the constants of the error bound. Twin: reference.flat_select."""

    products: DeviceArray
    length: DeviceArray
    reach: DeviceArray
    slack: DeviceArray
    queries: int
    rows: int
    gamma: float
    tiny: float
    metric: Metric

    def arguments(self) -> tuple[DeviceArray, ...]:
        return (self.products, self.length, self.reach, self.slack)

    @property
    def stride(self) -> int:
        return int(self.products.shape[1])


def flat_slots(gpu: Card, tile: TileScores, bound: DeviceArray) -> None:
    """bound f32 [q, SLOTS] is lowered to the least upper bound of the rows of each slot."""
    gpu.launch(
        "flat_select",
        f"flat_slots_{tile.metric}",
        gpu.blocks_for(tile.queries * SLOTS // WARP),
        (*tile.arguments(), tile.queries, tile.rows, tile.stride, tile.gamma, tile.tiny, bound),
    )


def flat_limit(gpu: Card, bound: DeviceArray, queries: int, k: int, limit: DeviceArray) -> None:
    """limit f32 [q]: the k-th smallest of bound [q, SLOTS]."""
    assert 1 <= k <= SLOTS
    gpu.launch("flat_select", "flat_limit", queries, (bound, queries, k, limit))


def flat_take(
    gpu: Card,
    tile: TileScores,
    first: int,
    limit: DeviceArray,
    capacity: int,
    out: tuple[DeviceArray, DeviceArray, DeviceArray],
) -> None:
    """Rows whose lower bound is at most `limit` are counted in out[0], count i32 [q], and the first `capacity` of a
    query join out[1], taken i64, and out[2], lower f32: flat arrays of [capacity, q]."""
    spans = tile.queries * -(-tile.rows // (8 * THREADS))
    gpu.launch(
        "flat_select",
        f"flat_take_{tile.metric}",
        min(spans, gpu.blocks_for(spans * THREADS // WARP)),
        (*tile.arguments(), limit, tile.queries, tile.rows, tile.stride, first, tile.gamma,
         tile.tiny, capacity, *out),
    )  # fmt: skip


def flat_words(
    gpu: Card, source: DeviceArray, rows: DeviceArray, count: int, out: DeviceArray
) -> None:
    """The rows numbered rows i64 [count] of `source` [N, ...], word by word of 32 bits, to out [count, ...]."""
    words = source.nbytes // max(1, len(source)) // 4
    assert out.nbytes >= 4 * words * count
    gpu.launch(
        "flat_select", "flat_words", gpu.blocks_for(count), (source, rows, count, words, out)
    )


class CudaSweeps(CpuSweeps):
    """The sweeps by kernels, and tiles by kernels in float32. Rows, ids and borders are uploaded once and stay on the card until
    close. `tiles` is None where they leave too little of its memory for a window of centred rows, and P6 is not swept where they
    leave too little for the largest matrix: the table then says "cpu" of those passes."""

    name = "cuda"
    swept = frozenset({"open", "P1", "P2", "P3", "P4", "P5", "P6", "P10", "P12"})

    def __init__(self, csr: Csr, ordinal: int = 0, *, at_once_bytes: int = 0) -> None:
        """at_once_bytes: what P1, P2, P3 and P8 together may hold beyond the rows, card and host, where nothing of a row is wanted
        (`summed`); 0 where it is."""
        super().__init__(csr)
        self._gpu = Gpu(ordinal)
        self._points: CardPoints | None = None
        self._rows: DeviceArray
        self._indptr: DeviceArray
        self._ids: DeviceArray
        planned = card_plan.costs(csr)
        try:
            if at_once_bytes:
                self._points = CardPoints.open(self._gpu, csr, at_once_bytes)
            if self._points is None:
                self._upload(csr, planned)
            else:
                self._rows, self._ids = self._points.rows, self._points.ids
                self._indptr = self._points.indptr
            free = self._gpu.memory().free_bytes
            if max(planned[name].card_bytes for name in card_tiles.PASSES) <= free:
                self.tiles = card_tiles.CardTiles(self._gpu, self._rows, csr)
        except DeviceRefused:
            self.close()
            raise
        self._spectra_fit = planned["P6"].card_bytes <= free
        if not self._spectra_fit:
            self.swept = self.swept - {"P6"}
        taken = self.swept | set(card_tiles.PASSES if self.tiles is not None else ())
        self.costs = {name: cost for name, cost in planned.items() if name in taken}
        self._costs_by_row = self.costs
        if self._points is not None:
            self.costs = {**self.costs, "P8": self._points.cost}

    def _upload(self, csr: Csr, planned: Mapping[str, Cost]) -> None:
        needed = [cost for name, cost in planned.items() if name in self.swept - set(OPTIONAL)]
        self._gpu.require_memory(
            card_plan.opening_bytes(csr) + max(cost.card_bytes for cost in needed),
            f"measuring {len(csr.rows):,} rows of {csr.dim}",
            "measure fewer clusters at a time, or use the cpu backend",
        )
        self._rows = self._gpu.upload(csr.rows)
        self._indptr = self._gpu.upload(csr.indptr)
        self._ids = self._gpu.upload(csr.ids)

    def summed(self, min_norm: float, *, cosine: bool, margins: bool) -> Summed | None:
        found = None
        if self._points is not None:
            found = self._points.summed(min_norm, cosine=cosine, margins=margins)
        if found is None:
            self.costs = self._costs_by_row
        else:
            self.swept = self.swept | {
                "P8"
            }  # even where there is no room for tiles and what they leave
        return found

    def admit(self, min_norm: float, *, hashed: bool) -> Admitted:
        """The kernel hashes on its way through the row, asked or not; what nobody reads stays there."""
        norm2, flag, row_hash = row_admit(self._gpu, self._rows, min_norm)
        there = self._gpu.download(row_hash) if hashed else np.zeros(row_hash.shape, np.uint64)
        return Admitted(self._gpu.download(norm2), self._gpu.download(flag), there)

    def centroid(self, weight: F64) -> F64:
        return self._gpu.download(
            csr_centroid(self._gpu, self._rows, self._gpu.upload(weight), self._indptr)
        )

    def radius2(self, weight: F64, centroid: F64) -> F64:
        weight_there, centroid_there = self._gpu.upload(weight), self._gpu.upload(centroid)
        return self._gpu.download(
            csr_radius(self._gpu, self._rows, weight_there, self._indptr, centroid_there)
        )

    def _left_out(self, kept: Bool) -> DeviceArray:
        return self._gpu.upload((~kept).astype(np.uint8))

    def _reduced(self, value: F64, flag: DeviceArray) -> tuple[F64, I64]:
        there = (self._gpu.upload(value), flag, self._ids, self._indptr)
        real, whole = csr_reduce(self._gpu, *there)
        return self._gpu.download(real), self._gpu.download(whole)

    def totals(self, value: F64) -> F64:
        flag = self._gpu.empty(len(value), np.uint8)
        self._gpu.fill(flag, 0)
        return self._reduced(value, flag)[0][:, 0]

    def nearest(self, value: F64, kept: Bool) -> Nearest:
        real, whole = self._reduced(value, self._left_out(kept))
        return Nearest(real[:, 0], real[:, 2], whole[:, 1])

    def digests(self, mark: U64) -> tuple[U64, U64]:
        found = self._gpu.download(csr_words(self._gpu, self._gpu.upload(mark), self._indptr))
        return found[:, 0], found[:, 1]

    def quantiles(self, value: F64, kept: Bool, shares: Sequence[float]) -> list[F64]:
        there = (self._gpu.upload(value), self._left_out(kept), self._indptr)
        asked = self._gpu.upload(np.array(shares))
        return list(self._gpu.download(csr_quantiles(self._gpu, *there, asked)).T)

    def equal_hashes(self, row_hash: U64) -> I64 | None:
        copy_of, _ = csr_copies(self._gpu, self._gpu.upload(row_hash), self._indptr)
        return self._gpu.download(copy_of)

    def pulled(self, weight: F64, mean: F64, here: F64, reach: F64) -> Pulled | None:
        """By the kernels of P2 and P3; what is made of one number a row is made here."""
        csr, apart2 = self._csr, self.radius2(weight, mean + here)
        pull, near, weighed = np.zeros((3, len(weight)))

        def judge(rows: slice) -> None:
            apart, listed = np.sqrt(apart2[rows]), weight[rows] != 0
            far = listed & (apart > np.repeat(reach, csr.sizes_within(rows)))
            np.divide(1.0, apart, out=pull[rows], where=far)
            near[rows] = listed & ~far
            np.multiply(weight[rows], pull[rows], out=weighed[rows])

        over_rows(judge, len(weight))
        strength, met = segment_sum(pull, csr.indptr), segment_sum(near, csr.indptr)
        total = self.centroid(weighed)
        total -= mean * strength[:, None]
        return Pulled(total, strength, met)

    def spectra(
        self, members: Members, weight: F64, growth: float, *, centred: bool, sided: bool
    ) -> Spectra | None:
        if not self._spectra_fit:
            return None
        given = (self._gpu.upload(part) for part in (weight, members.places, members.mean))
        store = moments.Store(self._rows, *given)
        upper = self._gpu.empty(len(weight), np.uint8)
        self._gpu.fill(upper, 0)
        real, status = (
            np.full((moments.REAL, self._csr.clusters), np.nan),
            np.zeros(self._csr.clusters, np.int32),
        )
        for work in moments.waves(members.first, members.size, self._csr.dim):
            found = moments.shapes(
                self._gpu, store, work, growth, centred=centred, side=upper if sided else None
            )
            real[:, work.clusters], status[work.clusters] = found.real.T, found.status
        trace, total, largest, entropy, squares, logs = real
        return Spectra(
            trace,
            total,
            largest,
            entropy,
            squares,
            logs,
            status == 0,
            self._gpu.download(upper) != 0,
        )

    def linked(self, row: npt.NDArray[Any], distance: F64, good: Bool, near: int) -> Linked | None:
        """None where no row has a neighbour."""
        if row.size == 0:
            return None
        lists = (self._gpu.upload(row), self._gpu.upload(distance), self._left_out(good))
        found = knn_graph(self._gpu, *lists, self._indptr, near)
        degree, factor = self._gpu.download(found.degree), self._gpu.download(found.factor)
        return Linked(degree, factor, self._gpu.download(found.largest).astype(np.int64))

    def parted(self, weight: F64, mean: F64, size: I64, upper: Bool) -> Parted | None:
        given = (self._gpu.upload(part) for part in (mean, size, upper.astype(np.uint8)))
        found = two_means(self._gpu, self._rows, self._gpu.upload(weight), self._indptr, *given)
        above, norm2 = self._gpu.download(found.above), self._gpu.download(found.norm2)
        rest = np.maximum(above * (size - above), 1)  # nobody on one side: norm2 is 0
        place, apart2 = self._gpu.download(found.place), self._gpu.download(found.apart2)
        return Parted(place, apart2, above, norm2 * size / rest)

    def close(self) -> None:
        self._rows = self._indptr = self._ids = self.tiles = None
        self._gpu.close()
        points, self._points = self._points, None
        if points is not None:
            points.close()
