"""What a run costs, seen from beside it: energy of the card, and CUDA calls that take memory or wait.

A run has settled one second after its engine was first given work: buffers are there and pools have grown. What is called
after that is told apart, since of ours it must be nothing. What nobody counts is null and never 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fabric_pipelines.device.calls import Calls

SETTLED_S = 1.0


class RunMeter:
    """joules: the card's counter; read: calls of this process so far (device.calls.read). Both give None where unknown."""

    def __init__(
        self, joules: Callable[[], float | None], read: Callable[[], Calls | None]
    ) -> None:
        self._joules, self._read = joules, read
        self._joules_before = joules()
        self._before = read()
        self._settled: Calls | None = None

    def turn(self, running_s: float) -> None:
        if self._settled is None and running_s >= SETTLED_S:
            self._settled = self._read()

    def as_json(self, tokens: int) -> dict[str, Any]:
        now, joules = self._read(), self._used()
        per_joule = tokens / joules if joules else None
        return {
            "joules": joules,
            "tokens_per_joule": per_joule,
            "cuda_calls": _since(now, self._before),
            "cuda_calls_settled": _since(now, self._settled),
        }

    def _used(self) -> float | None:
        now = self._joules()
        if now is None or self._joules_before is None:
            return None
        return now - self._joules_before


def _since(now: Calls | None, before: Calls | None) -> dict[str, Any] | None:
    return None if now is None or before is None else now.since(before).as_json()
