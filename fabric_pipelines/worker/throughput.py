"""What a worker tells about its speed: counters that only grow, shares derived from them.

Tokens are kept apart (offered, reused, computed, generated, padded), since one number hides which of them was
gained. An idle gap is a span in which the engine held nothing; busy time is the engine's own measure, and that of the card
beside it where the engine can tell. What landed is not known here: completion counts what was retired.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from fabric_pipelines.worker.engines.door import EngineStats
from fabric_pipelines.worker.gaps import Gaps


@dataclass(slots=True)
class Throughput:
    """ok, refused, failed: outcomes of the engine; wrong: those of the failed that the engine called ok (worker.results). sent: results the broker took; duplicates, late, unknown: as
    it answered instead. expired: tasks lost to a lease that ran out. undelivered: results left at the end. lease_s,
    send_s: seconds the loop waited for the broker's answer; an engine with a thread of its own ran on meanwhile.
    prompt_tokens, output_tokens: of outcomes that are ok. fill_s: seconds with work inside, each weighed by the share of
    the batch's places that was taken; filled_s: the same seconds as they are. first_fill, first_wait_s: share of the budget
    that was in hand when the engine was first given work, None before, and how long that waited for it (first_batch)."""

    leases: int = 0
    lane_switches: int = 0
    ok: int = 0
    refused: int = 0
    failed: int = 0
    wrong: int = 0
    sends: int = 0
    sent: int = 0
    duplicates: int = 0
    late: int = 0
    unknown: int = 0
    nacked: int = 0
    expired: int = 0
    resends: int = 0
    reattached: int = 0
    undelivered: int = 0
    lease_s: float = 0.0
    send_s: float = 0.0
    idle_gaps: int = 0
    idle_s: float = 0.0
    gaps: Gaps = field(default_factory=Gaps)
    prompt_tokens: int = 0
    output_tokens: int = 0
    fill_s: float = 0.0
    filled_s: float = 0.0
    first_fill: float | None = None
    first_wait_s: float = 0.0
    seconds: float = 0.0

    def close_gap(self, seconds: float) -> None:
        self.idle_gaps += 1
        self.idle_s += seconds
        self.gaps.add(seconds)

    def as_json(self, stats: EngineStats, rungs: dict[str, int]) -> dict[str, Any]:
        """Stable keys of the worker's exit line. Shares of nothing are 0; batch_fill is of steps where the engine cuts them,
        else of places over time; device_busy_share is null where the engine has no clock of its card."""
        counted = {name: value for name, value in asdict(self).items() if name != "gaps"}
        on_device = bool(stats.device_s)
        return {
            **counted,
            "idle_gap_lengths": self.gaps.as_json(),
            "prompt_tokens_per_s": _share(self.prompt_tokens, self.seconds),
            "output_tokens_per_s": _share(self.output_tokens, self.seconds),
            "offered_tokens": stats.offered_tokens,
            "reused_tokens": stats.reused_tokens,
            "computed_tokens": stats.computed_tokens,
            "generated_tokens": stats.generated_tokens,
            "padded_tokens": stats.padded_tokens,
            "prefix_hit_share": _share(stats.reused_tokens, stats.offered_tokens),
            "padding_share": _share(
                stats.padded_tokens, stats.padded_tokens + stats.computed_tokens
            ),
            "batch_fill": self._fill(stats),
            "busy_s": stats.busy_s,
            "busy_share": _share(stats.busy_s, self.seconds),
            "device_s": stats.device_s if on_device else None,
            "device_busy_share": _share(stats.device_s, self.seconds) if on_device else None,
            "device_gap_lengths": stats.device_gaps.as_json() if on_device else None,
            "steps_ahead": stats.extra.get("steps_ahead"),
            "rungs": dict(rungs),
        }

    def _fill(self, stats: EngineStats) -> float:
        if stats.steps:
            return stats.fill / stats.steps
        return _share(self.fill_s, self.filled_s)

    def as_line(self, stats: EngineStats, rung: str) -> str:
        """One line for a log, read by people."""
        share = 100 * _share(stats.busy_s, self.seconds)
        rate = (stats.computed_tokens + stats.generated_tokens) / max(self.seconds, 1e-9)
        return (
            f"{self.ok:,} tasks ok, {self.refused:,} refused, {self.failed:,} failed; "
            f"{stats.computed_tokens:,} prompt + {stats.generated_tokens:,} new tokens "
            f"({rate:,.0f}/s), {stats.padded_tokens:,} padding; engine busy {share:.0f} %, "
            f"{self.idle_gaps} idle gaps ({self.idle_s:.1f} s), "
            f"{self.lane_switches} lane switches, rung {rung}"
        )


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
