"""How much of the prompts an engine finds in its prefix cache, of late: what the tasks in hand share of it.

From the engine's own counters, which only grow. What lies further back than about one filling of the cache counts
half, and half again: work without common prefixes before must not hide those of the work at hand, nor the reverse.
"""

from __future__ import annotations

from fabric_pipelines.worker.engines.door import EngineStats


class Reuse:
    """`horizon`: prompt tokens after which what was seen counts half."""

    def __init__(self, stats: EngineStats, horizon: int) -> None:
        self._stats, self._horizon = stats, max(horizon, 1)
        self._told = (stats.reused_tokens, stats.computed_tokens)
        self._reused = self._prompts = 0.0

    def share(self) -> float:
        """0 to 1; 0 as long as the engine has reported nothing."""
        told = (self._stats.reused_tokens, self._stats.computed_tokens)
        reused, computed = (now - then for now, then in zip(told, self._told, strict=True))
        self._told = told
        self._reused += reused
        self._prompts += reused + computed
        if self._prompts > self._horizon:
            self._reused, self._prompts = self._reused / 2, self._prompts / 2
        return self._reused / self._prompts if self._prompts else 0.0
