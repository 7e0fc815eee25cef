"""The twelve passes: what each does, which it needs, which kernel families serve it, and what it will cost.

Costs are known before a pass starts, from the sizes of the clusters alone. A pass over budget is not begun, nor is
any that needs it: there are no half measurements and no samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fabric_pipelines.analytics import (
    gauss_sums,
    knn_graph,
    neighbours,
    robust,
    spectrum,
    two_means,
)
from fabric_pipelines.analytics.csr import BLOCK_VALUES, Csr
from fabric_pipelines.analytics.pair_tiles import SIDE_VALUES
from fabric_pipelines.analytics.stacks import HELD_VALUES, STACK_VALUES
from fabric_pipelines.analytics.sweeps import Cost
from fabric_pipelines.analytics.threads import workers

# The spectrum at d = 16,384 with as many rows or more takes 8.2 GiB; everything else stays far below.
WORKSPACE_BYTES = 9 << 30


@dataclass(frozen=True, slots=True)
class Pass:
    """`kernels`: families of cuda/ that can serve it, by their numbers; those not built run on the CPU."""

    name: str
    does: str
    needs: tuple[str, ...]
    kernels: tuple[str, ...]


PASSES: Mapping[str, Pass] = {
    each.name: each
    for each in (
        Pass("P1", "admit", (), ("F1", "F2")),
        Pass("P2", "centroid", ("P1",), ("F3",)),
        Pass("P3", "radius", ("P2",), ("F4",)),
        Pass("P4", "order", ("P3",), ("F5",)),
        Pass("P5", "robust centre", ("P3",), ("F4", "F3")),
        Pass("P6", "spectrum", ("P2",), ("F6", "F7")),
        Pass("P7", "centroid pairs", ("P3",), ("F8",)),
        Pass("P8", "point to centroid", ("P3",), ("F8", "F5", "F13")),
        Pass("P9", "pairs", ("P4",), ("F9", "F5")),
        Pass("P10", "graph", ("P9",), ("F10",)),
        Pass("P11", "kernel sums", ("P9",), ("F11",)),
        Pass("P12", "two-means", ("P6",), ("F12", "F5")),
    )
}


@dataclass(frozen=True, slots=True)
class Plan:
    """flop and workspace_bytes of each pass, and the passes that may run; card_bytes: what a device holds of workspace_bytes, where one
    takes the pass over."""

    flop: Mapping[str, float]
    workspace_bytes: Mapping[str, int]
    card_bytes: Mapping[str, int]
    allowed: frozenset[str]


ALWAYS = frozenset(
    {"P1", "P2", "P3"}
)  # every other pass and the status of every metric rest on these


def draw(
    csr: Csr,
    *,
    wanted: Iterable[str],
    budget_flop: float | None,
    workspace_bytes: int,
    costs: Mapping[str, Cost] | None = None,
) -> Plan:
    """`wanted`: the passes whose metrics are asked for; those that they need come along. costs: of the passes that a device takes
    over."""
    costs = costs or {}
    flop, needed, beside = _flop(csr), _workspace(csr), _beside_card(csr)
    for name, cost in costs.items():
        here = beside[name] if cost.host_bytes is None else cost.host_bytes
        needed[name] = here + cost.card_bytes
        flop[name] = flop[name] if cost.flop is None else cost.flop
    asked = set(wanted)
    for name, each in reversed(list(PASSES.items())):
        if name in asked:
            asked.update(each.needs)
    allowed: set[str] = set()
    for name, each in PASSES.items():
        cheap = budget_flop is None or flop[name] <= budget_flop
        fits = cheap and needed[name] <= workspace_bytes
        if name in ALWAYS or (name in asked and fits and allowed.issuperset(each.needs)):
            allowed.add(name)
    card_bytes = {name: cost.card_bytes for name, cost in costs.items()}
    return Plan(flop, needed, card_bytes, frozenset(allowed))


def _flop(csr: Csr) -> dict[str, float]:
    rows, dim, clusters = float(len(csr.rows)), csr.dim, float(csr.clusters)
    size = csr.sizes.astype(np.float64)
    sort = rows * max(1.0, np.log2(max(rows, 2)))
    return {
        "P1": 2 * rows * dim,
        "P2": 2 * rows * dim,
        "P3": 3 * rows * dim,
        "P4": 4 * sort,
        "P5": robust.flop(size, dim),
        "P6": spectrum.flop(size, dim),
        "P7": 3 * clusters * clusters * dim,
        "P8": 2 * rows * clusters * dim,
        "P9": neighbours.flop(size, dim),
        "P10": knn_graph.flop(size),
        "P11": gauss_sums.flop(size, dim),
        "P12": two_means.flop(size, dim),
    }


def _workspace(csr: Csr) -> dict[str, int]:
    """Bytes a pass holds at most beyond the rows: per row and cluster, and for the cluster at hand."""
    rows, dim, clusters = len(csr.rows), csr.dim, csr.clusters
    largest = int(csr.sizes.max(initial=0))
    kept = 8 * min(largest * dim, HELD_VALUES) + 24 * largest
    stack = workers() * (8 * 4 * STACK_VALUES + kept)
    listed = min(neighbours.LOF_NEIGHBOURS, max(0, largest - 1))
    tile = 8 * 2 * SIDE_VALUES + stack
    wide = 8 * min(rows * dim, workers() * BLOCK_VALUES)
    return {
        "P1": 57 * rows + wide,
        "P2": 8 * rows + 16 * clusters * dim + wide,
        "P3": 24 * rows + wide,
        "P4": 64 * rows,
        "P5": 24 * rows + stack,
        "P6": rows + stack + spectrum.workspace_bytes(largest, dim),
        "P7": 8 * 3 * STACK_VALUES + 16 * clusters * dim,
        "P8": 80 * rows + 8 * 3 * STACK_VALUES + 16 * clusters * dim + 2 * wide,
        "P9": (12 * listed + 24) * rows + tile,
        "P10": 16 * (neighbours.NEIGHBOURS + 4) * rows,
        "P11": 8 * rows + tile,
        "P12": rows + stack,
    }


def _beside_card(csr: Csr) -> dict[str, int]:
    """Bytes that the host holds at most while a device has the pass: what goes there, what comes back, no blocks of rows. As
    tracemalloc saw them at 20 to 2,000 clusters of 4 to 1,000 rows, and a fifth more."""
    rows, dim, clusters = len(csr.rows), csr.dim, csr.clusters
    means = 8 * clusters * dim
    listed = min(neighbours.LOF_NEIGHBOURS, max(0, int(csr.sizes.max(initial=0)) - 1))
    return {
        "P1": 80 * rows + 100 * clusters,
        "P2": 28 * rows + 4 * means,
        "P3": 40 * rows + 100 * clusters,
        "P4": 128 * rows + 100 * clusters,
        "P5": 72 * rows + 7 * means,
        "P6": 32 * rows + 512 * clusters,
        "P7": 8 * 3 * STACK_VALUES + 4 * means,
        "P8": 144 * rows + 4 * means,
        "P9": (64 * listed + 120) * rows + means,
        "P10": (16 * listed + 16 * (neighbours.NEIGHBOURS + 4)) * rows,
        "P11": 160 * rows + means,
        "P12": 64 * rows + 2 * means + 1400 * clusters,  # a dip a cluster is queued by itself
    }
