"""Kernel families on one card, beside the copy rate and the rates of matrix products of the same card in the same run.

`python -m fabric_pipelines.bench.kernels [--only FAMILY,...] [--json PATH] [ROWSxDIM ...]`: the ceilings, the families of
kernels_tiles, then the row sweeps of each shape. Bytes are the least a family must move (each input once, each output once); times
are medians over rounds that alternate with the ceilings. Data is random: zeros can run faster than anything real. The card's
settings are left as they are. A family that fails or hangs is a line with its fault, and the program ends with 1 after the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fabric_pipelines.analytics import kernels
from fabric_pipelines.analytics.csr import Csr
from fabric_pipelines.analytics.health import measure
from fabric_pipelines.bench import kernels_tiles
from fabric_pipelines.bench.kernels_run import (
    COPY,
    Case,
    Ceilings,
    Item,
    Line,
    random_rows,
    send,
    supervised,
    work_through,
)
from fabric_pipelines.device.card import DeviceArray
from fabric_pipelines.device.cubins import read_manifest
from fabric_pipelines.device.gpu import Gpu, Timing
from fabric_pipelines.errors import DeviceRefused, MissingDependency, UsageError
from fabric_pipelines.named_file import beside
from fabric_pipelines.testing.host_gpu import HostGpu

DEFAULT_SHAPES = ("10000000x128", "4000000x768", "20000000x32", "10000000x127", "1000000x4096")
TINY_SHAPES = ("120x8",)
ROWS_A_CLUSTER = 1000
ITEM_SECONDS, TOTAL_SECONDS = 30.0, 110.0
ROOT = Path(__file__).parents[2]


class Rehearsal(HostGpu):
    """The host stand-in with a clock, whose times mean nothing, and without a library of matrix products."""

    def matrix_product(
        self,
        left: DeviceArray,
        right: DeviceArray,
        out: DeviceArray,
        mode: str,
        *,
        add: bool = False,
    ) -> None:
        raise DeviceRefused(f"no card: the rate of {mode} products is one of a card")

    def time(self, work: Callable[[], object], *, repeats: int, warm_up: int = 3) -> Timing:
        del warm_up
        marks = [time.perf_counter()]
        for _ in range(repeats):
            work()
            marks.append(time.perf_counter())
        return Timing(tuple(1e3 * taken for taken in np.diff(marks).tolist()))


@dataclass(frozen=True, slots=True)
class Load:
    """Random rows in clusters of random sizes, all on the card."""

    rows: DeviceArray
    weight: DeviceArray
    indptr: DeviceArray
    centroid: DeviceArray
    admitted: tuple[DeviceArray, DeviceArray, DeviceArray]

    @classmethod
    def draw(cls, gpu: Any, count: int, dim: int) -> Load:
        rng = np.random.default_rng(0)
        inner = np.sort(rng.integers(0, count + 1, max(0, count // ROWS_A_CLUSTER - 1)))
        indptr = np.concatenate([[0], inner, [count]]).astype(np.int64)
        return cls(
            rows=random_rows(gpu, count, dim),
            weight=gpu.upload(rng.uniform(0.5, 1.0, count)),
            indptr=gpu.upload(indptr),
            centroid=gpu.upload(rng.standard_normal((len(indptr) - 1, dim))),
            admitted=(
                gpu.empty(count, np.float64),
                gpu.empty(count, np.uint8),
                gpu.empty((count, 2), np.uint64),
            ),
        )


def sweeps(count: int, dim: int, card: Any) -> Iterator[Case]:
    load = Load.draw(card, count, dim)
    clusters = len(load.indptr) - 1
    row_bytes, centroid_bytes = 4 * count * dim, 8 * clusters * dim
    base = (load.rows, load.weight, load.indptr)
    queued: tuple[tuple[str, int, Callable[[], object]], ...] = (
        (
            "row_admit",
            row_bytes + 25 * count,
            lambda: kernels.row_admit_into(card, load.rows, 1e-12, load.admitted),
        ),
        (
            "csr_centroid",
            row_bytes + 8 * count + centroid_bytes,
            lambda: kernels.csr_centroid(card, *base),
        ),
        (
            "csr_radius",
            row_bytes + 16 * count + centroid_bytes,
            lambda: kernels.csr_radius(card, *base, load.centroid),
        ),
    )
    for name, size, queue in queued:
        card.forget()
        queue()
        yield Case(f"{name} {count:,} x {dim:,}", COPY, size, card.again())


def every_item(
    card: Any, shapes: Sequence[str], only: Sequence[str], scale: kernels_tiles.Scale
) -> tuple[Ceilings, list[Item]]:
    """`only`: families, none for all; the ceilings always come along."""
    ceilings = Ceilings(card, scale.side, scale.copy_bytes)
    rows = [
        Item("sweeps", f"sweeps {shape}", partial(sweeps, *parse_shape(shape))) for shape in shapes
    ]
    found = [*kernels_tiles.items(scale), *rows]
    families = list(dict.fromkeys(item.family for item in found))
    unknown = sorted(set(only) - set(families))
    if unknown:
        raise UsageError(f"no family {', '.join(unknown)}: --only takes {', '.join(families)}")
    chosen = [item for item in found if not only or item.family in only]
    return ceilings, [*ceilings.items(), *chosen]


def serve(
    pipe: Connection, labels: Sequence[str], shapes: Sequence[str], only: Sequence[str]
) -> None:
    """One process and its card: see supervised."""
    try:
        gpu = Gpu()
    except (DeviceRefused, MissingDependency) as fault:
        send(pipe, "refused", str(fault))
        return
    send(pipe, "told", gpu.identity.as_json())
    ceilings, found = every_item(gpu, shapes, only, kernels_tiles.Scale())
    left = [item for item in found if item.label in labels]
    whole = work_through(
        gpu,
        left,
        ceilings,
        lambda line: send(pipe, "line", asdict(line)),
        lambda label: send(pipe, "done", label),
    )
    if not whole:
        send(pipe, "lost", "")


def begun(
    labels: Sequence[str], shapes: Sequence[str], only: str
) -> tuple[subprocess.Popen[bytes], Connection]:
    """A process of this program that serves, and the end of the pipe on which it tells."""
    ours, theirs = os.pipe()
    command = [sys.executable, "-m", "fabric_pipelines.bench.kernels", f"--only={only}"]
    process = subprocess.Popen(
        [*command, f"--serve={theirs}", f"--labels={json.dumps(labels)}", *shapes], pass_fds=(theirs,)
    )  # fmt: skip
    os.close(theirs)
    return process, Connection(ours, writable=False)


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


HEAD = (
    f"{'what':<64}{'mode':<13}{'ms':>10}{'spread':>8}{'rate':>9}{'ceiling':>9}{'share':>8}"
    f"{'GB/s':>8}{'floor ms':>10}{'t/floor':>9}\n"
)


def text_of(line: Line) -> str:
    """rate and ceiling: GB/s where the mode is a copy's, TFLOP/s elsewhere."""
    if line.fault:
        return f"{line.what:<64}FAILED: {line.fault}\n"
    if line.median_ms is None or line.spread is None:
        return f"{line.what:<64}{line.mode:<13}not measured: {line.note}\n"
    share = "-" if line.share is None else f"{line.share:.1%}"
    body = (
        f"{line.what:<64}{line.mode:<13}{line.median_ms:>10.3f}{line.spread:>8.1%}"
        f"{_shown(line.rate):>9}{_shown(line.ceiling):>9}{share:>8}{_shown(line.gb_per_s):>8}"
        f"{_shown(line.floor_ms, 3):>10}{_shown(line.times_floor, 2):>9}"
    )
    return body + (f"  ({line.note})\n" if line.note else "\n")


def _shown(number: float | None, digits: int = 1) -> str:
    return "-" if number is None else f"{number:,.{digits}f}"


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


@dataclass(slots=True)
class Report:
    """Lines go out as they come, and the file is written anew after each, so that a machine that is taken away leaves both."""

    path: Path | None
    device: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    health: dict[str, Any] | None = None

    def told(self, device: dict[str, Any]) -> None:
        if not self.device:
            _out(f"{device['name']}, driver {device.get('driver', '-')}\n{HEAD}")
        self.device = device

    def say(self, line: Line) -> None:
        self.lines.append(line)
        _out(text_of(line))
        self.save()

    def save(self) -> None:
        if self.path is None:
            return
        cubins = {
            cubin.family: cubin.sha256
            for cubin in read_manifest().cubins
            if cubin.arch == self.device.get("architecture")
        }
        whole = {
            "device": self.device,
            "cubins": cubins,
            "lines": [asdict(line) for line in self.lines],
            "health": self.health,
        }
        with beside(self.path, replace=True) as made:
            made.write_text(json.dumps(whole, indent=1) + "\n")


def _out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def rehearse(shapes: Sequence[str], only: Sequence[str], report: Report) -> None:
    """Every family at a tiny shape on the host stand-in, which needs g++ and the sources: no time here is one of a card."""
    card = Rehearsal(ROOT / "cuda", ROOT / "build" / "host_cuda")
    report.told({"name": card.name})
    ceilings, items = every_item(card, shapes, only, kernels_tiles.TINY)
    work_through(card, items, ceilings, report.say, lambda _label: None, line_seconds=0.0)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fabric_pipelines.bench.kernels")
    parser.add_argument("shapes", nargs="*", help="ROWSxDIM of the row sweeps")
    parser.add_argument("--only", default="", help="families, separated by commas; sweeps is one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="of the whole run")
    parser.add_argument("--item-seconds", type=float, default=ITEM_SECONDS, help="of one family")
    parser.add_argument("--rehearse", action="store_true", help="tiny, without a card")
    parser.add_argument("--health", action="store_true", help="a whole measurement, too")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--labels", type=json.loads, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    only = [name for name in options.only.split(",") if name]
    if options.serve is not None:
        pipe = Connection(options.serve, readable=False)
        serve(pipe, options.labels, options.shapes or DEFAULT_SHAPES, only)
        return 0
    report = Report(options.json)
    if options.rehearse:
        rehearse(options.shapes or TINY_SHAPES, only, report)
        return int(any(line.fault for line in report.lines))
    shapes = options.shapes or DEFAULT_SHAPES
    _, items = every_item(None, shapes, only, kernels_tiles.Scale())
    supervised(
        items, lambda labels: begun(labels, shapes, options.only), report.say, report.told,
        item_seconds=options.item_seconds, total_seconds=options.seconds,
    )  # fmt: skip
    if options.health:
        report.health = run_health()
        _out(health_table(report.health))
        report.save()
    return int(any(line.fault for line in report.lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
