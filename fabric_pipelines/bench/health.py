"""Health metrics on this machine: silhouette beside scikit-learn, and all 38 metrics on a store of uneven clusters.

`fabric bench health`. Rows are seeded. The silhouette is the same number in both columns, of squared distances; the
peer is asked once a shape, since it takes long, and ours is the median of rounds before and after it. Memory is the
process's resident size, read fifty times a second while the metrics are measured.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import psutil

from fabric_pipelines.analytics import health
from fabric_pipelines.analytics.csr import F32, Csr, group
from fabric_pipelines.analytics.plan import PASSES
from fabric_pipelines.analytics.threads import workers
from fabric_pipelines.errors import MissingDependency
from fabric_pipelines.telemetry import timed

SHAPES = ((20_000, 128), (20_000, 768))
SILHOUETTE_CLUSTERS = 50
ROUNDS = 5
LARGEST_SHARE = 0.055
Say = Callable[[str], None]


def measure(rows: int, dim: int, clusters: int, *, peer: bool, say: Say) -> dict[str, Any]:
    """Both tables as one object; without `peer` only the second."""
    beside = [silhouette(count, width, say) for count, width in SHAPES] if peer else []
    return {
        "cores": workers(),
        "silhouette": beside,
        "metrics": everything(rows, dim, clusters, say),
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
        samples = silhouette_samples(csr.rows, csr.owner(), metric="sqeuclidean")
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
            table = health.measure(csr.rows, csr.indptr, csr.ids, metric="l2", only=["silhouette"])
        clocks.append(clock)
    return table.readings["silhouette"].value, clocks


def everything(rows: int, dim: int, clusters: int, say: Say) -> dict[str, Any]:
    """Every metric on clusters of log-normal sizes, the largest with 5.5 % of the rows."""
    say(f"drawing {rows:,} x {dim} in {clusters:,} clusters")
    drawn, indptr = _uneven(rows, dim, clusters)
    say(f"{len(health.METRICS)} metrics")
    with resident_peak() as memory, timed() as clock:
        table = health.measure(drawn, indptr, np.arange(rows, dtype=np.int64), metric="cosine")
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
        "breaches": len(table.breaches),
        "seconds": clock["seconds"],
        "cpu_seconds": clock["cpu_seconds"],
        "data_bytes": drawn.nbytes,
        "memory_beyond_data_bytes": memory["beyond"],
        "workspace_bytes": max(table.pass_bytes.values()),
        "passes": [
            {
                "name": name,
                "does": each.does,
                "seconds": table.pass_seconds[name],
                "flop": table.pass_flop[name],
                "workspace_bytes": table.pass_bytes[name],
            }
            for name, each in PASSES.items()
        ],
    }


def _uneven(rows: int, dim: int, clusters: int) -> tuple[F32, Any]:
    rng = np.random.default_rng(0)
    share = rng.lognormal(0.0, 1.0, clusters)
    share[clusters // 2] = 0.0
    share *= (1.0 - LARGEST_SHARE) / share.sum()
    sizes = np.floor(share * rows).astype(np.int64)
    sizes[clusters // 2] = rows - sizes.sum()
    indptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    scale = np.exp(-np.arange(dim) / max(1.0, dim / 4)).astype(np.float32)
    drawn = np.empty((rows, dim), dtype=np.float32)
    for start, stop in pairwise(indptr):
        centre = rng.standard_normal(dim, dtype=np.float32)
        drawn[start:stop] = (
            rng.standard_normal((stop - start, dim), dtype=np.float32) * scale + centre
        )
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
    lines += [
        f"{every['metrics']} metrics of {every['rows']:,} x {every['dim']} in {every['clusters']:,} clusters, "
        f"largest {every['largest']:,}, {found['cores']} cores: {every['seconds']:.1f} s, "
        f"{every['cpu_seconds']:.1f} s CPU; {every['memory_beyond_data_bytes'] / 2**20:.0f} MiB beyond "
        f"{every['data_bytes'] / 2**20:.0f} MiB of data, {every['breaches']} breaches",
        "",
        "| pass | seconds | Gflop foreseen | MiB foreseen |",
        "|---|---|---|---|",
        *(
            f"| {one['name']} {one['does']} | {one['seconds']:.2f} | {one['flop'] / 1e9:.2f} | "
            f"{one['workspace_bytes'] / 2**20:.0f} |"
            for one in every["passes"]
        ),
    ]
    return "\n".join(lines)
