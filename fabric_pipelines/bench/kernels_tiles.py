"""Kernel families that compute, or that read what an earlier one left: what each is given, and the least it must do.

Operations: of pairs of rows of one cluster the least is half of what the tiles make, since each sum has one owner and so every
product is made twice (`made`); only products count, no roots, exponentials or choices. Bytes: each input once, each output once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fabric_pipelines.analytics import kernels, resident
from fabric_pipelines.analytics import kernels_moments as moments
from fabric_pipelines.analytics import kernels_scans as scans
from fabric_pipelines.analytics import kernels_tiles as tiles
from fabric_pipelines.analytics.card_plan import STURM_FLOP
from fabric_pipelines.analytics.csr import I64
from fabric_pipelines.analytics.search import Queries, norms_of
from fabric_pipelines.bench.kernels_run import COPY, TRIPLE, Case, Item, random_rows, repeated
from fabric_pipelines.device.card import DeviceArray
from fabric_pipelines.errors import CheckFailed

NEAR = 10  # neighbours, and rows that a search answers with
SECOND_CACHE = (
    50 << 20
)  # bytes, of an H200: matrices that fit it need not be read from memory twice
E8_NOTE = "by dp4a; the ceiling is that of int8 matrix units"
F64_NOTE = "NVIDIA's sheet of an H200: 34 TFLOP/s outside matrix units, 67 on them"


@dataclass(frozen=True, slots=True)
class Scale:
    """What is drawn: rows against centres; pairs within clusters; numbers of csr_reduce and csr_select; lists and queries."""

    dims: tuple[int, ...] = (128, 768)
    points: int = 1_000_000
    centres: int = 4096
    partners: int = 16_384
    clusters: int = 1000
    cluster_rows: int = 1000
    numbers: int = 32 << 20
    listed: int = 1 << 20
    list_width: int = 20
    halves: int = 2_000_000
    moments: int = 256
    lists: int = 1024
    list_rows: int = 1000
    queries: int = 4096
    probes: int = 32
    bits: int = 3
    flat_rows: int = 1 << 20
    flat_queries: int = 512
    side: int = 8192
    copy_bytes: int = 2 << 30


TINY = Scale(
    dims=(40,), points=70, centres=5, partners=9, clusters=3, cluster_rows=20, numbers=300, listed=90,
    list_width=5, halves=60, moments=3, lists=3, list_rows=20, queries=5, probes=2, flat_rows=150,
    flat_queries=3, side=32, copy_bytes=1 << 14,
)  # fmt: skip


class Pairs(NamedTuple):
    """Rows of clusters of one size, centred; copy i64 [n]: all rows differ; held: rows in all."""

    rows: tiles.TileRows
    copy: DeviceArray
    held: int
    made: float
    least: float
    size: int


def items(scale: Scale) -> list[Item]:
    """An item a family and dimension, so that what fails takes nothing else along."""
    of_dim: tuple[tuple[str, str, Callable[[Scale, int, Any], Iterator[Case]]], ...] = (
        ("pair_tile", "pair_tile", pair_tile),
        ("pair_tile", "pair_tile split", pair_tile_split),
        ("centre_tile", "centre_tile points", centre_points),
        ("centre_tile", "centre_tile partners", centre_partners),
        ("gauss_tile", "gauss_tile", gauss_tile),
        ("csr_syrk", "csr_syrk", partial(csr_syrk, units=False)),
        ("csr_syrk", "csr_syrk units", partial(csr_syrk, units=True)),
        ("spectrum", "spectrum", spectrum),
        ("ivf_scan", "ivf_scan", ivf_scan),
        ("e8_codec_scan", "e8_codec_scan", e8_codec_scan),
        ("flat_select", "flat_select", flat_select),
        ("two_means", "two_means", two_means),
    )
    of_none: tuple[tuple[str, Callable[[Scale, Any], Iterator[Case]]], ...] = (
        ("csr_reduce", csr_reduce),
        ("csr_select", csr_select),
        ("knn_graph", knn_graph),
    )
    found = [
        Item(family, f"{label} d={dim}", partial(draw, scale, dim))
        for family, label, draw in of_dim
        for dim in scale.dims
    ]
    return [*found, *(Item(family, family, partial(draw, scale)) for family, draw in of_none)]


def _shape(*sides: int) -> str:
    return " x ".join(f"{side:,}" for side in sides)


def whole(card: Any, count: int, dim: int, seed: int) -> tiles.TileRows:
    """Random rows as one set, made ready by the card."""
    return _centred(card, count, dim, np.array([0, count]), seed)


def _centred(card: Any, count: int, dim: int, bounds: I64, seed: int) -> tiles.TileRows:
    rows, weight = random_rows(card, count, dim, seed), card.upload(np.ones(count))
    centre = np.zeros((len(bounds) - 1, dim))
    return tiles.tile_rows(card, rows, weight, np.arange(count), bounds, centre)


def _pairs(scale: Scale, dim: int, card: Any) -> Pairs:
    bounds = np.arange(scale.clusters + 1) * scale.cluster_rows
    count = int(bounds[-1])
    rows = _centred(card, count, dim, bounds, seed=0)
    squares = float(scale.clusters) * scale.cluster_rows**2
    size = count * (4 * tiles.pitch_of(dim) + 4 + 8)
    copy = card.upload(np.arange(count))
    return Pairs(rows, copy, count, 2 * dim * squares, dim * (squares - count), size)


def pair_tile(scale: Scale, dim: int, card: Any) -> Iterator[Case]:
    """The rows made ready, which the tiles of all three families start from, and the tiles."""
    card.forget()
    pairs = _pairs(scale, dim, card)
    shape = f"{scale.clusters:,} of {_shape(scale.cluster_rows, dim)}"
    pitch = tiles.pitch_of(dim)
    yield Case(
        f"pair_tile_rows {shape}", COPY,
        pairs.held * (4 * dim + 4 * pitch + 4 + 8 + 8) + 8 * scale.clusters * dim,
        _last(card, "pair_tile"),
    )  # fmt: skip
    card.forget()
    tiles.pair_tile(card, pairs.rows, pairs.copy, NEAR)
    size = pairs.size + pairs.held * (20 + 8 * NEAR)
    yield Case(f"pair_tile {shape}", "f32", size, card.again(), pairs.least, pairs.made)


def _last(card: Any, family: str) -> Callable[[], object]:
    """The last launch of a family, without the copies that made its data."""
    found: Callable[[], object] = [step.run for step in card.steps if step.family == family][-1]
    return found


def pair_tile_split(scale: Scale, dim: int, card: Any) -> Iterator[Case]:
    """Products on matrix units, which tiles of 128 rows alone have."""
    pairs = _pairs(scale, dim, card)
    card.forget()
    tiles.pair_tile(card, pairs.rows, pairs.copy, NEAR, side=128, split=True)
    if not card.launches["pair_tile_split_128"]:
        raise CheckFailed(f"pair_tile at d = {dim} did not take matrix units")
    size = pairs.size + pairs.held * (20 + 8 * NEAR)
    shape = f"{scale.clusters:,} of {_shape(scale.cluster_rows, dim)}"
    yield Case(f"pair_tile_split_128 {shape}", TRIPLE, size, card.again(), pairs.least, pairs.made)


def gauss_tile(scale: Scale, dim: int, card: Any) -> Iterator[Case]:
    pairs = _pairs(scale, dim, card)
    heat = np.full(scale.clusters, float(dim))
    card.forget()
    tiles.gauss_tile(card, pairs.rows, pairs.copy, heat)
    size = pairs.size + 28 * pairs.held + 8 * scale.clusters
    shape = f"{scale.clusters:,} of {_shape(scale.cluster_rows, dim)}"
    yield Case(f"gauss_tile {shape}", "f32", size, card.again(), pairs.least, pairs.made)


def centre_points(scale: Scale, dim: int, card: Any) -> Iterator[Case]:
    count, listed, rng = scale.points, scale.centres, np.random.default_rng(1)
    rows, centres = whole(card, count, dim, 0), whole(card, listed, dim, 1)
    own = card.upload(rng.integers(0, listed, count))
    spread = card.upload(rng.uniform(0.5, 1.5, listed) * dim)
    size = card.upload(rng.integers(2, 2000, listed).astype(np.float64))
    card.forget()
    tiles.centre_points(card, rows, centres, own, spread, size)
    row = 4 * tiles.pitch_of(dim) + 4
    yield Case(
        f"centre_tile_points {_shape(count, listed, dim)}", "f32",
        count * (row + 8 + 28) + listed * (row + 16), card.again(), 2.0 * count * listed * dim,
    )  # fmt: skip


def centre_partners(scale: Scale, dim: int, card: Any) -> Iterator[Case]:
    listed, rng = scale.partners, np.random.default_rng(1)
    centres = whole(card, listed, dim, 1)
    radius = card.upload(rng.uniform(0.5, 1.5, listed).astype(np.float32))
    card.forget()
    tiles.centre_partners(card, centres, radius, 0.0)
    size = listed * (4 * tiles.pitch_of(dim) + 4 + 4 + 12)
    made = 2.0 * listed**2 * dim
    yield Case(
        f"centre_tile_partners {_shape(listed, listed, dim)}", "f32", size, card.again(),
        made / 2 - listed * dim, made,
    )  # fmt: skip


class Moments(NamedTuple):
    store: moments.Store
    work: moments.Work
    flop: float
    size: int
    shape: str


def _moments(scale: Scale, dim: int, card: Any) -> Moments:
    """A wave of matrices of clusters of one size; upper halves are what must be computed."""
    bounds = np.arange(scale.moments + 1) * scale.cluster_rows
    count = int(bounds[-1])
    mean = card.upload(np.zeros((scale.moments, dim)))
    store = moments.Store(
        random_rows(card, count, dim), card.upload(np.ones(count)), card.upload(np.arange(count)), mean
    )  # fmt: skip
    work = next(moments.waves(bounds[:-1], np.diff(bounds), dim))
    own, side = work.list[:, 2], work.side.astype(np.float64)
    flop = float((own * dim * side).sum())
    size = int((4 * dim + 16) * own.sum() + 8 * (side**2).sum() + 8 * dim * len(side))
    return Moments(store, work, flop, size, f"{len(side):,} of {_shape(int(own.max()), dim)}")


def csr_syrk(scale: Scale, dim: int, card: Any, *, units: bool) -> Iterator[Case]:
    given = _moments(scale, dim, card)
    card.forget()
    moments.csr_syrk(card, given.store, given.work, centred=True, units=units)
    name = "csr_syrk units" if units else "csr_syrk"
    yield Case(f"{name} {given.shape}", "f64", given.size, card.again(), given.flop, note=F64_NOTE)


def spectrum(scale: Scale, dim: int, card: Any) -> Iterator[Case]:
    """Bytes: the trailing square of a matrix once a column, or once where all fit the second cache. The copy of the matrices, which a spectrum overwrites, is timed too."""
    given = _moments(scale, dim, card)
    matrices = moments.csr_syrk(card, given.store, given.work, centred=True)
    copied = card.empty(matrices.shape, np.float64)
    card.forget()
    card.copy(copied, matrices)
    moments.spectrum(card, copied, given.work, 4.0 * dim, axes=True)
    side = given.work.side.astype(np.float64)
    squares, cubes = float((side**2).sum()), float((side**3).sum())
    size = 8 * squares if 8 * squares <= SECOND_CACHE else 8 / 3 * cubes
    yield Case(
        f"spectrum {given.shape}", "f64", int(size), card.again(),
        4 / 3 * cubes + STURM_FLOP * squares, note=F64_NOTE,
    )  # fmt: skip


def _probed(scale: Scale) -> tuple[I64, I64, int]:
    """sizes [lists]; probes [m, p]: neighbouring lists, each once a query; pairs of a query and a row."""
    rng = np.random.default_rng(3)
    sizes = rng.integers(max(1, scale.list_rows // 2), scale.list_rows * 3 // 2, scale.lists)
    first = rng.integers(0, scale.lists, (scale.queries, 1))
    probes = (first + np.arange(scale.probes)) % scale.lists
    return sizes, probes, int(sizes[probes].sum())


def ivf_scan(scale: Scale, dim: int, card: Any) -> Iterator[Case]:
    sizes, probes, pairs = _probed(scale)
    indptr = np.concatenate([[0], np.cumsum(sizes)])
    count, rng = int(indptr[-1]), np.random.default_rng(4)
    xq = rng.standard_normal((scale.queries, dim), dtype=np.float32)
    store = scans.FloatStore(
        random_rows(card, count, dim), card.upload(np.ones(count, np.float32)),
        card.upload(np.arange(count)), card.upload(indptr), sizes,
    )  # fmt: skip
    reach = card.upload(norms_of(xq.astype(np.float64)).astype(np.float32))
    asked = card.upload(xq)
    card.forget()
    scans.ivf_scan(card, store, asked, reach, probes, NEAR, "l2")
    rows = int(sizes[np.unique(probes)].sum())
    size = rows * (4 * dim + 12) + scale.queries * (4 * dim + 4 + 12 * NEAR + 8)
    shape = f"{scale.queries:,} queries, {scale.probes} of {scale.lists:,} lists, d={dim}"
    yield Case(f"ivf_scan {shape}", "f32", size, card.again(), 2.0 * pairs * dim)


def e8_codec_scan(scale: Scale, dim: int, card: Any) -> Iterator[Case]:
    """Products of one plane of int8; then the best of each query and list, which reads them."""
    sizes, probes, pairs = _probed(scale)
    rng, one = np.random.default_rng(5), np.float32(1)
    lists = [
        (rng.integers(0, 256, (size, dim // 8 * scale.bits), np.uint8), *np.full((2, size), one))
        for size in sizes.tolist()
    ]
    codes = scans.e8_codes(card, lists, scale.bits)
    levels = rng.integers(-127, 128, (scale.queries, dim))
    queries = scans.e8_queries(card, codes, levels, np.ones(scale.queries, np.float32))
    plan = scans.planned(probes, sizes, scans.GROUP_ROWS)
    card.forget()
    product = scans.e8_codec_scan(card, codes, queries, plan)
    scan = card.again()
    rows = int(sizes[np.unique(probes)].sum())
    shape = f"{scale.queries:,} queries, {scale.probes} of {scale.lists:,} lists, d={dim}, {scale.bits} bits"
    yield Case(
        f"e8_codec_scan {shape}", "int8", rows * dim // 8 * scale.bits + scale.queries * dim + 4 * pairs,
        scan, 2.0 * pairs * dim * queries.planes, note=E8_NOTE,
    )  # fmt: skip
    card.forget()
    scans.e8_codec_best(card, codes, queries, plan, product, np.zeros(probes.shape), NEAR)
    kept = 8 * scale.queries * scale.probes * NEAR
    yield Case(f"e8_codec_best {shape}", COPY, 4 * pairs + 8 * rows + kept, card.again())


def flat_select(scale: Scale, dim: int, card: Any) -> Iterator[Case]:
    """An exact search of resident rows: its choice alone, products that are there read once, and with the products."""
    count, asked = scale.flat_rows, scale.flat_queries
    rng = np.random.default_rng(6)
    rows = random_rows(card, count, dim)
    length = np.full(count, np.sqrt(dim), np.float32)  # near enough: no answer is looked at
    search = resident.ResidentScan(
        card, rows, card.upload(np.arange(count)), card.upload(length), metric="l2",
        length_max=2.0 * float(np.sqrt(dim)),
    )  # fmt: skip
    queries = Queries(rng.standard_normal((asked, dim), dtype=np.float32), "l2")
    card.forget()
    search.candidates(queries, NEAR)
    shape = _shape(asked, count, dim)
    yield Case(
        f"flat_select {shape}", COPY, 4 * asked * count + 4 * count, card.again(without="products")
    )
    yield Case(
        f"flat_select, products {shape}", "f32", count * (4 * dim + 4) + 4 * asked * dim, card.again(),
        2.0 * asked * count * dim,
    )  # fmt: skip


def _indptr(count: int, each: int) -> I64:
    inner = np.sort(np.random.default_rng(7).integers(0, count + 1, max(0, count // each - 1)))
    return np.concatenate([[0], inner, [count]]).astype(np.int64)


def two_means(scale: Scale, dim: int, card: Any) -> Iterator[Case]:
    count, rng = scale.halves, np.random.default_rng(8)
    indptr = _indptr(count, scale.cluster_rows)
    clusters = len(indptr) - 1
    given = (
        random_rows(card, count, dim), card.upload(np.ones(count)), card.upload(indptr),
        card.upload(rng.standard_normal((clusters, dim))), card.upload(np.diff(indptr)),
        card.upload(rng.integers(0, 2, count, np.uint8)),
    )  # fmt: skip
    card.forget()
    kernels.two_means(card, *given, rounds=1)
    yield Case(
        f"two_means, one round {_shape(count, dim)}", COPY, 8 * count * dim + 16 * clusters * dim,
        card.again(),
    )  # fmt: skip


def csr_reduce(scale: Scale, card: Any) -> Iterator[Case]:
    count, rng = scale.numbers, np.random.default_rng(9)
    piece = min(count, 1 << 20)
    value, flag = repeated(card, rng.random(piece), count), card.empty(count, np.uint8)
    card.fill(flag, 0)
    ids = repeated(card, np.arange(piece), count)
    indptr = card.upload(_indptr(count, scale.cluster_rows))
    card.forget()
    kernels.csr_reduce(card, value, flag, ids, indptr)
    yield Case(f"csr_reduce {count:,}", COPY, 9 * count, card.again())


def csr_select(scale: Scale, card: Any) -> Iterator[Case]:
    """Three quantiles of numbers; first of equal rows, of which there are none."""
    count, rng = scale.numbers, np.random.default_rng(10)
    piece = min(count, 1 << 20)
    value, flag = repeated(card, rng.random(piece), count), card.empty(count, np.uint8)
    card.fill(flag, 0)
    indptr = card.upload(_indptr(count, scale.cluster_rows))
    share = card.upload(np.array([0.5, 0.95, 0.99]))
    card.forget()
    kernels.csr_quantiles(card, value, flag, indptr, share)
    yield Case(f"csr_select quantiles {count:,}", COPY, 9 * count, card.again())
    del value, flag
    words = rng.integers(0, 1 << 64, (piece, 2), np.uint64)
    row_hash = repeated(card, words, count)
    card.forget()
    kernels.csr_copies(card, row_hash, indptr)
    yield Case(f"csr_select copies {count:,}", COPY, 40 * count, card.again())


def knn_graph(scale: Scale, card: Any) -> Iterator[Case]:
    """Neighbours that are the next rows of a cluster, round its end, with rising distances."""
    count, width = scale.listed, scale.list_width
    indptr = _indptr(count, scale.cluster_rows)
    sizes = np.diff(indptr)
    first, size = np.repeat(indptr[:-1], sizes)[:, None], np.repeat(sizes, sizes)[:, None]
    step = np.arange(1, width + 1)
    row = first + (np.arange(count)[:, None] - first + step) % size
    row[step >= size] = -1
    distance = np.cumsum(np.random.default_rng(2).random(row.shape, np.float32), axis=1)
    given = (
        row.astype(np.int32), distance.astype(np.float64), np.zeros(count, np.uint8), indptr
    )  # fmt: skip
    near, far, flag, borders = (card.upload(part) for part in given)
    card.forget()
    kernels.knn_graph(card, near, far, flag, borders, min(NEAR, width))
    yield Case(f"knn_graph {_shape(count, width)}", COPY, (12 * width + 60) * count, card.again())
