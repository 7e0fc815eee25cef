"""Health metrics on this machine: silhouette beside scikit-learn, and all 38 metrics on a store of uneven clusters.

`fabric bench health`. Rows are seeded. The silhouette is the same number in both columns, of cosine distances, which
the peer takes by matrix products (squared ones it would sum pair by pair, and be slower). It is asked once a shape,
since it takes long; ours is the median of rounds before and after it. CPU seconds stand beside seconds, since a machine
with other work on it stretches the two unequally. Memory is the
process's resident size, read fifty times a second while the metrics are measured.

With `--backend cuda` the passes run on the card, after a small store whose measurement loads the kernels. Both metrics of change are held to a reference taken from the same rows before the clock starts.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import psutil

from fabric_pipelines.analytics import health
from fabric_pipelines.analytics.csr import F32, I64, Csr, group
from fabric_pipelines.analytics.plan import PASSES, WORKSPACE_BYTES
from fabric_pipelines.analytics.threads import workers
from fabric_pipelines.errors import MissingDependency
from fabric_pipelines.telemetry import timed

SHAPES = ((20_000, 128), (20_000, 768))
SILHOUETTE_CLUSTERS = 50
ROUNDS = 5
LARGEST_SHARE = 0.055
SPAN_ROWS = 1 << 14  # drawn from a seed of their own, so that no row depends on how many cores draw
WARM_ROWS, WARM_CLUSTERS = 2000, 8
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Where:
    """As `health.measure` takes them."""

    backend: Literal["cpu", "cuda"] = "cpu"
    workspace_bytes: int = WORKSPACE_BYTES


def measure(
    rows: int, dim: int, clusters: int, *, peer: bool, say: Say, where: Where | None = None
) -> dict[str, Any]:
    """Both tables as one object; without `peer` only the second."""
    beside = [silhouette(count, width, say) for count, width in SHAPES] if peer else []
    return {
        "cores": workers(),
        "silhouette": beside,
        "metrics": everything(rows, dim, clusters, say, where or Where()),
    }


def silhouette(rows: int, dim: int, say: Say) -> dict[str, Any]:
    try:
        from sklearn.metrics import silhouette_samples  # a peer: never installed by us
    except ImportError as error:
        raise MissingDependency("scikit-learn", "dev", "the silhouette's peer") from error
    rng = np.random.default_rng(0)
    labels = rng.integers(0, SILHOUETTE_CLUSTERS, rows)
    centre = rng.standard_normal((SILHOUETTE_CLUSTERS, dim))
    drawn = (centre[labels] + rng.standard_normal((rows, dim))).astype(np.float32)
    csr, _ = group(drawn, labels, np.arange(rows, dtype=np.int64), SILHOUETTE_CLUSTERS)
    say(f"silhouette of {rows:,} x {dim}, ours")
    found, clocks = _rounds(csr)
    say(f"silhouette of {rows:,} x {dim}, scikit-learn")
    with timed() as peer:
        samples = silhouette_samples(csr.rows, csr.owner(), metric="cosine")
    clocks += _rounds(csr)[1]
    expected = np.add.reduceat(samples, csr.indptr[:-1]) / csr.sizes
    seconds = [clock["seconds"] for clock in clocks]
    ours, cpu = statistics.median(seconds), statistics.median(c["cpu_seconds"] for c in clocks)
    return {
        "rows": rows,
        "dim": dim,
        "clusters": SILHOUETTE_CLUSTERS,
        "seconds": ours,
        "seconds_least": min(seconds),
        "seconds_greatest": max(seconds),
        "cpu_seconds": cpu,
        "peer_seconds": peer["seconds"],
        "peer_cpu_seconds": peer["cpu_seconds"],
        "times_faster": peer["seconds"] / ours,
        "times_less_cpu": peer["cpu_seconds"] / cpu,
        "largest_difference": float(np.abs(found - expected).max()),
    }


def _rounds(csr: Csr) -> tuple[Any, list[dict[str, float]]]:
    clocks = []
    for _ in range(ROUNDS):
        with timed() as clock:
            table = health.measure(
                csr.rows, csr.indptr, csr.ids, metric="cosine", only=["silhouette"]
            )
        clocks.append(clock)
    return table.readings["silhouette"].value, clocks


def everything(rows: int, dim: int, clusters: int, say: Say, where: Where) -> dict[str, Any]:
    """Every metric on clusters of log-normal sizes, the largest with 5.5 % of the rows."""
    if where.backend == "cuda":
        say(f"{WARM_ROWS:,} rows first, to load the kernels")
        few, borders = _uneven(WARM_ROWS, dim, WARM_CLUSTERS)
        _measured(few, borders, where)
    say(f"drawing {rows:,} x {dim} in {clusters:,} clusters")
    drawn, indptr = _uneven(rows, dim, clusters)
    say("the reference of the metrics of change")
    reference = _measured(drawn, indptr, where, only=("checksum_mismatch",)).reference()
    say(f"{len(health.METRICS)} metrics")
    with resident_peak() as memory, timed() as clock:
        table = _measured(drawn, indptr, where, reference=reference)
    known = {
        name: int((reading.status == health.Status.OK).sum())
        for name, reading in table.readings.items()
    }
    return {
        "rows": rows,
        "dim": dim,
        "clusters": clusters,
        "largest": int(np.diff(indptr).max()),
        "metrics": len(table.readings),
        "clusters_with_value": known,
        "corrupt": {
            name: count
            for name, reading in table.readings.items()
            if (count := int((reading.status == health.Status.CORRUPT).sum()))
        },
        "breaches": len(table.breaches),
        "seconds": clock["seconds"],
        "cpu_seconds": clock["cpu_seconds"],
        "open_seconds": table.pass_seconds["open"],
        "data_bytes": drawn.nbytes,
        "memory_beyond_data_bytes": memory["beyond"],
        "workspace_bytes": max(table.pass_bytes.values()),
        "device": _card(where),
        "passes": [
            {
                "name": name,
                "does": each.does,
                "where": table.backend.get(name, "skipped"),
                "seconds": table.pass_seconds.get(name, 0.0),
                "flop": table.pass_flop[name],
                "workspace_bytes": table.pass_bytes[name],
                "card_bytes": table.pass_card_bytes.get(name, 0),
            }
            for name, each in PASSES.items()
        ],
    }


def _measured(rows: F32, indptr: I64, where: Where, **what: Any) -> health.HealthTable:
    return health.measure(
        rows, indptr, np.arange(len(rows), dtype=np.int64), metric="cosine", backend=where.backend,
        workspace_bytes=where.workspace_bytes, **what,
    )  # fmt: skip


def _card(where: Where) -> dict[str, Any] | None:
    """The card and the digests of what runs on it."""
    if where.backend == "cpu":
        return None
    from fabric_pipelines.device.cubins import read_manifest
    from fabric_pipelines.device.gpu import Gpu

    with Gpu() as gpu:
        identity = gpu.identity
    cubins = {
        cubin.family: cubin.sha256
        for cubin in read_manifest().cubins
        if cubin.arch == identity.architecture
    }
    return {**identity.as_json(), "cubins": cubins}


def _uneven(rows: int, dim: int, clusters: int) -> tuple[F32, I64]:
    rng = np.random.default_rng(0)
    share = rng.lognormal(0.0, 1.0, clusters)
    share[clusters // 2] = 0.0
    share *= (1.0 - LARGEST_SHARE) / share.sum()
    sizes = np.floor(share * rows).astype(np.int64)
    sizes[clusters // 2] = rows - sizes.sum()
    indptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    scale = np.exp(-np.arange(dim) / max(1.0, dim / 4)).astype(np.float32)
    centre = rng.standard_normal((clusters, dim), dtype=np.float32)
    drawn = np.empty((rows, dim), dtype=np.float32)

    def draw(start: int) -> None:
        span = drawn[start : start + SPAN_ROWS]
        np.random.default_rng((1, start)).standard_normal(dtype=np.float32, out=span)
        span *= scale
        stop = start + len(span)
        inside = indptr[np.searchsorted(indptr, start, "right") : np.searchsorted(indptr, stop)]
        for left, right in pairwise([start, *inside.tolist(), stop]):
            drawn[left:right] += centre[np.searchsorted(indptr, left, "right") - 1]

    with ThreadPoolExecutor(workers()) as pool:
        for _ in pool.map(draw, range(0, rows, SPAN_ROWS)):
            pass
    return drawn, indptr


@contextmanager
def resident_peak() -> Iterator[dict[str, int]]:
    """Leaves the greatest resident size within the block, less that at its start, under "beyond"."""
    process, done = psutil.Process(), threading.Event()
    start = process.memory_info().rss
    out = {"beyond": 0}

    def watch() -> None:
        while not done.wait(0.02):
            out["beyond"] = max(out["beyond"], process.memory_info().rss - start)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield out
    finally:
        done.set()
        watcher.join()


def table(found: dict[str, Any]) -> str:
    """For the page and the terminal."""
    lines = []
    if found["silhouette"]:
        lines += [
            "| silhouette | ours (CPU) | scikit-learn (CPU) | times faster (less CPU) | difference |",
            "|---|---|---|---|---|",
            *(
                f"| {one['rows']:,} x {one['dim']}, {one['clusters']} clusters | {one['seconds']:.3f} s, "
                f"{one['seconds_least']:.3f}-{one['seconds_greatest']:.3f} ({one['cpu_seconds']:.3f} s) | "
                f"{one['peer_seconds']:.1f} s ({one['peer_cpu_seconds']:.1f} s) | "
                f"{one['times_faster']:.0f} ({one['times_less_cpu']:.0f}) | "
                f"{one['largest_difference']:.1e} |"
                for one in found["silhouette"]
            ),
            "",
        ]
    every = found["metrics"]
    if every["device"]:
        lines += [f"{every['device']['name']}, driver {every['device']['driver']}", ""]
    lines += [
        f"{every['metrics']} metrics of {every['rows']:,} x {every['dim']} in {every['clusters']:,} clusters, "
        f"largest {every['largest']:,}, {found['cores']} cores: {every['seconds']:.1f} s, "
        f"{every['cpu_seconds']:.1f} s CPU; {every['memory_beyond_data_bytes'] / 2**20:.0f} MiB beyond "
        f"{every['data_bytes'] / 2**20:.0f} MiB of data, {every['breaches']} breaches",
        "",
        "| pass | where | seconds | Gflop foreseen | MiB foreseen | of them on the card |",
        "|---|---|---|---|---|---|",
        f"| opening, the rows to where they are read | | {every['open_seconds']:.2f} | | | |",
        *(
            f"| {one['name']} {one['does']} | {one['where']} | {one['seconds']:.2f} | {one['flop'] / 1e9:.2f} | "
            f"{one['workspace_bytes'] / 2**20:.0f} | {one['card_bytes'] / 2**20:.0f} |"
            for one in every["passes"]
        ),
    ]
    return "\n".join(lines)
