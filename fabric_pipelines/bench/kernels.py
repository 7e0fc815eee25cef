"""Kernel families on one card: GB/s beside the copy rate of the same card in the same run.

`python -m fabric_pipelines.bench.kernels [--json PATH] [ROWSxDIM ...]`. Bytes are the least a family must move
(each input once, each output once); times are medians over rounds that alternate between copy and kernels.
Data is random: zeros can run faster than anything real. The card's settings are left as they are.

Families that compute more than they move (csr_syrk, spectrum) stand in a table of their own beside a floor in milliseconds: the greater of
their arithmetic at the card's rate and of their bytes at the copy rate. The rates are NVIDIA's of an H200 in float64, so on another card
the floors are of that one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fabric_pipelines.analytics import kernels
from fabric_pipelines.analytics import kernels_moments as moments
from fabric_pipelines.analytics.csr import I64, Csr
from fabric_pipelines.analytics.health import measure
from fabric_pipelines.device.card import DeviceArray
from fabric_pipelines.device.cubins import read_manifest
from fabric_pipelines.device.gpu import Gpu
from fabric_pipelines.errors import UsageError

DEFAULT_SHAPES = ("10000000x128", "4000000x768", "20000000x32", "10000000x127", "1000000x4096")
ROWS_A_CLUSTER = 1000
ROUNDS, REPEATS = 4, 5
PIECE_ROWS = 1 << 16  # random rows made on the host, then repeated on the card by copies
COPY = "copy device to device"
DENSE_ROWS = (
    1 << 18
)  # whose moments are timed: one wave of matrices, read from the start of the store
F64_FLOP, F64_UNITS_FLOP = 34e12, 67e12  # a second, of an H200 by its data sheet
STURM_FLOP = 53 * 4  # halvings of an eigenvalue, and a step of a count
LISTS_ROWS, LISTS_WIDTH = (
    1 << 20,
    20,
)  # the neighbour graph's lists are made on the host, so for no more rows


@dataclass(frozen=True, slots=True)
class Line:
    what: str
    rows: int
    dim: int
    size: int
    median_ms: float
    spread: float
    gb_per_s: float
    share_of_copy: float


@dataclass(frozen=True, slots=True)
class Dense:
    """Least flop and bytes of what `queue` does to so many matrices, and the flop a second that a card has for it."""

    matrices: int
    flop: float
    size: int
    ceiling: float
    queue: Callable[[], object]


@dataclass(frozen=True, slots=True)
class DenseLine:
    what: str
    rows: int
    dim: int
    matrices: int
    flop: float
    size: int
    median_ms: float
    spread: float
    tflop_per_s: float
    floor_ms: float
    share_of_floor: float


@dataclass(frozen=True, slots=True)
class Load:
    """Random rows in clusters of random sizes, all on the card."""

    rows: DeviceArray
    target: DeviceArray
    weight: DeviceArray
    indptr: DeviceArray
    centroid: DeviceArray
    admitted: tuple[DeviceArray, DeviceArray, DeviceArray]
    flag: DeviceArray
    ids: DeviceArray
    size: DeviceArray
    share: DeviceArray
    start: DeviceArray
    lists: tuple[DeviceArray, DeviceArray, DeviceArray, DeviceArray]

    @classmethod
    def draw(cls, gpu: Gpu, count: int, dim: int) -> Load:
        rng = np.random.default_rng(0)
        piece = gpu.upload(rng.standard_normal((min(count, PIECE_ROWS), dim), dtype=np.float32))
        rows, target = gpu.empty((count, dim), np.float32), gpu.empty((count, dim), np.float32)
        for start in range(0, count, PIECE_ROWS):
            stop = min(start + PIECE_ROWS, count)
            gpu.copy(rows[start:stop], piece[: stop - start])
        inner = np.sort(rng.integers(0, count + 1, max(0, count // ROWS_A_CLUSTER - 1)))
        indptr = np.concatenate([[0], inner, [count]]).astype(np.int64)
        return cls(
            rows=rows,
            target=target,
            weight=gpu.upload(rng.uniform(0.5, 1.0, count)),
            indptr=gpu.upload(indptr),
            centroid=gpu.upload(rng.standard_normal((len(indptr) - 1, dim))),
            admitted=(
                gpu.empty(count, np.float64),
                gpu.empty(count, np.uint8),
                gpu.empty((count, 2), np.uint64),
            ),
            flag=gpu.upload(np.zeros(count, np.uint8)),
            ids=gpu.upload(np.arange(count)),
            size=gpu.upload(np.diff(indptr)),
            share=gpu.upload(np.array([0.5, 0.95, 0.99])),
            start=gpu.upload(rng.integers(0, 2, count, np.uint8)),
            lists=_lists(gpu, indptr[indptr <= LISTS_ROWS]),
        )


def _lists(gpu: Gpu, indptr: I64) -> tuple[DeviceArray, DeviceArray, DeviceArray, DeviceArray]:
    """Neighbours that are the next rows of a cluster, round its end, with rising distances; flags and borders."""
    sizes, count = np.diff(indptr), int(indptr[-1])
    first, size = np.repeat(indptr[:-1], sizes)[:, None], np.repeat(sizes, sizes)[:, None]
    step = np.arange(1, LISTS_WIDTH + 1)
    row = first + (np.arange(count)[:, None] - first + step) % np.maximum(size, 1)
    row[step >= size] = -1
    distance = np.sort(np.random.default_rng(2).random(row.shape), axis=1)
    flag = np.zeros(count, np.uint8)
    return (
        gpu.upload(row.astype(np.int32)),
        gpu.upload(distance),
        gpu.upload(flag),
        gpu.upload(indptr),
    )


def work(gpu: Gpu, load: Load) -> dict[str, tuple[int, Callable[[], object]]]:
    """Name -> (least bytes, what to queue)."""
    count, dim = load.rows.shape
    clusters = len(load.indptr) - 1
    row_bytes, centroid_bytes = 4 * count * dim, 8 * clusters * dim
    base = (load.rows, load.weight, load.indptr)
    return {
        COPY: (2 * row_bytes, lambda: gpu.copy(load.target, load.rows)),
        "row_admit": (
            row_bytes + 25 * count,
            lambda: kernels.row_admit_into(gpu, load.rows, 1e-12, load.admitted),
        ),
        "csr_centroid": (
            row_bytes + 8 * count + centroid_bytes,
            lambda: kernels.csr_centroid(gpu, *base),
        ),
        "csr_radius": (
            row_bytes + 16 * count + centroid_bytes,
            lambda: kernels.csr_radius(gpu, *base, load.centroid),
        ),
        "csr_reduce": (
            9 * count,
            lambda: kernels.csr_reduce(gpu, load.weight, load.flag, load.ids, load.indptr),
        ),
        "csr_select quantiles": (
            9 * count,
            lambda: kernels.csr_quantiles(gpu, load.weight, load.flag, load.indptr, load.share),
        ),
        "csr_select copies": (
            40 * count,
            lambda: kernels.csr_copies(gpu, load.admitted[2], load.indptr),
        ),
        "knn_graph": (
            (12 * LISTS_WIDTH + 60) * len(load.lists[0]),
            lambda: kernels.knn_graph(gpu, *load.lists, 10),
        ),
        "two_means, one round": (
            2 * row_bytes + 16 * clusters * dim,
            lambda: kernels.two_means(gpu, *base, load.centroid, load.size, load.start, rounds=1),
        ),
    }


def dense(gpu: Gpu, load: Load) -> dict[str, Dense]:
    """Moments of the first clusters of the store and the spectra of those."""
    dim = load.rows.shape[1]
    indptr = gpu.download(load.indptr)
    bounds = indptr[indptr <= max(DENSE_ROWS, indptr[1])]
    size = np.diff(bounds)
    wave = next(moments.waves(bounds[:-1], size, dim))
    place = gpu.upload(np.arange(bounds[-1]))
    store = moments.Store(load.rows, load.weight, place, load.centroid)
    matrices = moments.csr_syrk(gpu, store, wave, centred=True)
    copied = gpu.empty(matrices.shape, np.float64)

    def decompose() -> None:
        gpu.copy(copied, matrices)  # a spectrum overwrites them
        moments.spectrum(gpu, copied, wave, 4.0 * dim, axes=True)

    own, side = wave.list[:, 2], wave.side.astype(np.float64)
    count, squares, cubes = len(side), float((side**2).sum()), float((side**3).sum())
    flop, read = float((own * dim * side).sum()), int(4 * dim * own.sum() + 8 * squares)
    return {
        "csr_syrk": Dense(
            count, flop, read, F64_FLOP,
            lambda: moments.csr_syrk(gpu, store, wave, centred=True),
        ),
        "csr_syrk, matrix units": Dense(
            count, flop, read, F64_UNITS_FLOP,
            lambda: moments.csr_syrk(gpu, store, wave, centred=True, units=True),
        ),
        "spectrum": Dense(
            count, 4 / 3 * cubes + STURM_FLOP * squares, int(8 / 3 * cubes), F64_FLOP, decompose
        ),
    }  # fmt: skip


def run_dense(gpu: Gpu, load: Load, copy_gb_per_s: float) -> list[DenseLine]:
    count, dim = load.rows.shape
    lines = []
    for name, each in dense(gpu, load).items():
        taken = gpu.time(each.queue, repeats=REPEATS, warm_up=1)
        floor_ms = 1e3 * max(each.flop / each.ceiling, each.size / copy_gb_per_s / 1e9)
        lines.append(
            DenseLine(
                what=name,
                rows=count,
                dim=dim,
                matrices=each.matrices,
                flop=each.flop,
                size=each.size,
                median_ms=taken.median_ms,
                spread=taken.spread,
                tflop_per_s=each.flop / taken.median_ms / 1e9,
                floor_ms=floor_ms,
                share_of_floor=floor_ms / taken.median_ms,
            )
        )
    return lines


def run_shape(gpu: Gpu, load: Load) -> list[Line]:
    count, dim = load.rows.shape
    todo = work(gpu, load)
    times: dict[str, list[float]] = {name: [] for name in todo}
    for _ in range(ROUNDS):
        for name, (_size, queue) in todo.items():
            times[name] += gpu.time(queue, repeats=REPEATS, warm_up=2).repeats_ms
    median = {name: statistics.median(taken) for name, taken in times.items()}
    rate = {name: size / median[name] / 1e6 for name, (size, _queue) in todo.items()}
    return [
        Line(
            what=name,
            rows=count,
            dim=dim,
            size=size,
            median_ms=median[name],
            spread=(max(times[name]) - min(times[name])) / median[name],
            gb_per_s=rate[name],
            share_of_copy=rate[name] / rate[COPY],
        )
        for name, (size, _queue) in todo.items()
    ]


def run_health(count: int = 1_000_000, dim: int = 128, clusters: int = 1000) -> dict[str, Any]:
    """Seconds of each pass of a whole measurement, host array in, table out, on both backends."""
    rng = np.random.default_rng(1)
    labels = np.sort(rng.integers(0, clusters, count))
    rows = rng.standard_normal((clusters, dim), dtype=np.float32)[labels]
    rows += rng.standard_normal((count, dim), dtype=np.float32)
    indptr = np.searchsorted(labels, np.arange(clusters + 1)).astype(np.int64)
    csr = Csr(rows, indptr, np.arange(count))
    seconds: dict[str, dict[str, float]] = {}
    # the first run on the card also loads the cubins, so the second is the one reported
    order: tuple[Literal["cpu", "cuda"], ...] = ("cuda", "cpu", "cuda")
    for backend in order:
        found = measure(csr.rows, csr.indptr, csr.ids, metric="cosine", backend=backend)
        seconds[backend] = dict(found.pass_seconds)
    return {"rows": count, "dim": dim, "clusters": clusters, "pass_seconds": seconds}


def table(lines: Sequence[Line]) -> str:
    head = f"{'what':<24}{'rows':>12}{'dim':>6}{'ms':>10}{'spread':>8}{'GB/s':>8}{'of copy':>9}\n"
    return head + "".join(
        f"{line.what:<24}{line.rows:>12,}{line.dim:>6}{line.median_ms:>10.3f}{line.spread:>8.1%}"
        f"{line.gb_per_s:>8.0f}{line.share_of_copy:>9.1%}\n"
        for line in lines
    )


def dense_table(lines: Sequence[DenseLine]) -> str:
    head = f"{'what':<24}{'matrices':>10}{'dim':>6}{'ms':>10}{'spread':>8}{'TFLOP/s':>9}{'floor ms':>10}{'of floor':>10}\n"
    return head + "".join(
        f"{line.what:<24}{line.matrices:>10,}{line.dim:>6}{line.median_ms:>10.3f}{line.spread:>8.1%}"
        f"{line.tflop_per_s:>9.1f}{line.floor_ms:>10.3f}{line.share_of_floor:>10.1%}\n"
        for line in lines
    )


def health_table(health: dict[str, Any]) -> str:
    passes = health["pass_seconds"]
    head = (
        f"measure {health['rows']:,} x {health['dim']}, {health['clusters']:,} clusters, seconds\n"
    )
    return head + "".join(
        f"  {backend:<6}" + "  ".join(f"{name} {taken:.3f}" for name, taken in found.items()) + "\n"
        for backend, found in passes.items()
    )


def parse_shape(text: str) -> tuple[int, int]:
    count, cross, dim = text.partition("x")
    if not cross or not count.isdigit() or not dim.isdigit() or not int(count) * int(dim):
        raise UsageError(f"shape {text!r} must be ROWSxDIM, for example 1000000x128")
    return int(count), int(dim)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m fabric_pipelines.bench.kernels")
    parser.add_argument("shapes", nargs="*", default=DEFAULT_SHAPES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    lines: list[Line] = []
    matrices: list[DenseLine] = []
    with Gpu() as gpu:
        identity = gpu.identity
        sys.stdout.write(f"{identity.name}, driver {identity.driver}, {identity.architecture}\n")
        for shape in options.shapes:
            load = Load.draw(gpu, *parse_shape(shape))
            found = run_shape(gpu, load)
            sys.stdout.write(table(found))
            products = run_dense(gpu, load, found[0].gb_per_s)
            sys.stdout.write(dense_table(products))
            sys.stdout.flush()
            lines += found
            matrices += products
            del load, found, products  # before the next one is drawn
    health = run_health()
    sys.stdout.write(health_table(health))
    if options.json:
        cubins = {
            cubin.family: cubin.sha256
            for cubin in read_manifest().cubins
            if cubin.arch == identity.architecture
        }
        report = {
            "device": identity.as_json(),
            "cubins": cubins,
            "rounds": ROUNDS,
            "repeats": REPEATS,
            "lines": [asdict(line) for line in lines],
            "dense": [asdict(line) for line in matrices],
            "health": health,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
