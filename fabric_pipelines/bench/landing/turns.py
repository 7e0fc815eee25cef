"""What the turns of a governor's run say: percentiles, ratios, and whether the limits were kept.

A run has turns of silence, of ungoverned and of governed bulk; its figures are over all samples of a kind. Two more tell
how far they can be trusted: what other processes took of the CPUs in silence, and one half of silence
against the other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

QUIET_SHARE = 0.2
"""Of the CPUs' time in silence: the small writer, the watcher and the server take about a tenth of two cores."""
RATIO_MOST, SHARE_LEAST = 1.3, 0.5
KINDS = ("ungoverned", "governed")


@dataclass(slots=True)
class Turns:
    """All turns of one kind: milliseconds of small transactions, rows that bulk landed meanwhile."""

    waits_ms: list[float] = field(default_factory=list)
    each_ms: list[list[float]] = field(default_factory=list)  # the same by turn
    rows: int = 0
    seconds: float = 0.0
    busy_s: float = 0.0  # of all CPUs together

    def p(self, share: int) -> float:
        return round(float(np.percentile(self.waits_ms, share)), 2)

    def noise(self) -> float:
        """p99 of every other turn against that of the rest, at least 1: what a ratio of two like things comes to here."""
        halves = [np.concatenate([[], *self.each_ms[at::2]]) for at in (0, 1)]
        if not all(map(len, halves)):
            return 1.0
        less, more = sorted(float(np.percentile(half, 99)) for half in halves)
        return round(more / less, 2)


Run = dict[str, Turns]


def line(run: Run) -> dict[str, Any]:
    idle = run["idle"]
    told: dict[str, Any] = {
        "load": round(os.getloadavg()[0], 1),
        "idle": {
            "transactions": len(idle.waits_ms),
            "p50_ms": idle.p(50),
            "p99_ms": idle.p(99),
            "noise": idle.noise(),
            "busy_share": round(idle.busy_s / idle.seconds / (os.cpu_count() or 1), 2),
        },
    }
    for name in KINDS:
        turns = run[name]
        told[name] = {
            "transactions": len(turns.waits_ms),
            "p50_ms": turns.p(50),
            "p99_ms": turns.p(99),
            "p99_ratio": round(turns.p(99) / idle.p(99), 2),
            "rows_per_s": round(turns.rows / turns.seconds),
        }
    share = told["governed"]["rows_per_s"] / max(told["ungoverned"]["rows_per_s"], 1)
    return {**told, "rate_share": round(share, 2)}


def verdict(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """In how many of `runs` (lines of the report) both limits, and each alone, were kept; medians; runs without quiet."""
    ratios = [run["governed"]["p99_ratio"] for run in runs]
    shares = [run["rate_share"] for run in runs]
    kept = [
        (ratio <= RATIO_MOST, share >= SHARE_LEAST)
        for ratio, share in zip(ratios, shares, strict=True)
    ]
    return {
        "both": sum(all(each) for each in kept),
        "ratio": sum(each[0] for each in kept),
        "share": sum(each[1] for each in kept),
        "median_ratio": round(float(np.median(ratios)), 2),
        "median_ungoverned_ratio": round(
            float(np.median([run["ungoverned"]["p99_ratio"] for run in runs])), 2
        ),
        "median_noise": round(float(np.median([run["idle"]["noise"] for run in runs])), 2),
        "median_share": round(float(np.median(shares)), 2),
        "not_quiet": [
            number for number, run in enumerate(runs, 1) if run["idle"]["busy_share"] > QUIET_SHARE
        ],
    }
