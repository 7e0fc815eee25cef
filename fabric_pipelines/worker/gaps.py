"""Spans of time in which something had nothing to do, by length: how many, how long together, and a histogram.

Two seconds of idling are another fault as one gap than as two thousand, which a sum does not show.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

BOUNDS_S = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)


@dataclass(slots=True)
class Gaps:
    """counts: one a bound (a gap of just that length is in it), and one for longer ones."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    def as_json(self) -> dict[str, Any]:
        """Stable keys, each with the gaps that are longer than the bound before it."""
        names = [*(f"up_to_{bound:g}_s" for bound in BOUNDS_S), "longer"]
        return {"seconds": self.seconds, **dict(zip(names, self.counts, strict=True))}
