"""Recall against latency of one index on this machine, as numbers and as a picture.

Recall is a fact of the index and its rows (quality.py); latency is one of the machine and the minute, so it is measured
here, on demand, and never kept with the index.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_pipelines.analytics.index import quality
from fabric_pipelines.analytics.index.door import VectorIndex
from fabric_pipelines.analytics.index.kinds import choices_of
from fabric_pipelines.analytics.index.store import F64
from fabric_pipelines.analytics.search import recall_at_k
from fabric_pipelines.errors import UsageError

MANY = 64
REPEATS = 5
RERANKS = (2, 4, 16)  # times k


@dataclass(frozen=True, slots=True)
class Step:
    """recall@k at an effort (0: the kind has no such choice), and milliseconds a query, median of REPEATS: asked
    alone, and among MANY."""

    nprobe: int
    rerank: int
    recall: float
    alone_ms: float
    among_ms: float


def tradeoff(index: VectorIndex[Any], k: int = quality.K) -> list[Step]:
    """Up to 256 rows of the index are asked for their k nearest others. UsageError where there are none."""
    own, xq = index.questions()
    if len(own) < 2:
        raise UsageError("recall needs at least two rows that can be scored: add some")
    if k < 1:
        raise UsageError(f"k is {k}; ask for at least one neighbour")
    true = quality.without(own, index.exact(xq, k + 1).I)
    steps = []
    for effort in _efforts(index, k):
        found = quality.without(own, index.search(xq, k + 1, **effort).I)
        few = [xq[i % len(xq)][None] for i in range(4 * REPEATS)]
        many = [np.resize(np.roll(xq, i, axis=0), (MANY, index.dim)) for i in range(REPEATS)]

        def ask(part: Any, effort: dict[str, Any] = effort) -> None:
            index.search(part, k, **effort)

        steps.append(
            Step(
                effort.get("nprobe", 0),
                effort.get("rerank", 0),
                recall_at_k(found, true),
                _median_ms(ask, few),
                _median_ms(ask, many) / MANY,
            )
        )
    return steps


def picture(steps: Sequence[Step], title: str) -> bytes:
    """PNG: recall against milliseconds a query, asked alone and among MANY; every effort a dot, a line through those
    that no faster one surpasses."""
    # Imported here: a search should not pay a second for a figure nobody draws.
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(6.4, 4), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    recall = np.array([step.recall for step in steps])
    for name, colour, taken in (
        (f"{MANY} at once", "#36b", np.array([step.among_ms for step in steps])),
        ("one at a time", "#c43", np.array([step.alone_ms for step in steps])),
    ):
        best = best_steps(taken, recall)
        axes.plot(taken, recall, "o", color=colour, markersize=3, alpha=0.35)
        axes.plot(taken[best], recall[best], "o-", color=colour, markersize=4, label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("milliseconds a query")
    axes.set_ylabel("recall")
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    sink = io.BytesIO()
    figure.savefig(sink, format="png", metadata={"Software": None})
    return sink.getvalue()


def best_steps(taken: F64, recall: F64) -> list[int]:
    """Those of which none faster has as much recall, by time."""
    best: list[int] = []
    for number in np.lexsort((-recall, taken)).tolist():
        if not best or recall[number] > recall[best[-1]]:
            best.append(number)
    return best


def _efforts(index: VectorIndex[Any], k: int) -> list[dict[str, Any]]:
    choices = choices_of(index.kind)
    probes = quality.doubling(1, max(index.stats().lists, 1)) if "nprobe" in choices else [0]
    reranks = [many * k for many in RERANKS] if "rerank" in choices else [0]
    both = [{"nprobe": n, "rerank": r} for r in reranks for n in probes]
    return [{name: value for name, value in effort.items() if value} for effort in both]


def _median_ms(ask: Callable[[Any], None], parts: Sequence[Any]) -> float:
    taken = []
    for part in parts:
        begin = time.perf_counter()
        ask(part)
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken)) * 1000
