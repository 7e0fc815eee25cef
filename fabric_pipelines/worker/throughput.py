"""What a worker tells about its speed: counters that only grow, shares derived from them.

Tokens are kept apart (offered, reused, computed, generated, padded), since one number hides which of them was
gained. An idle gap is a span in which the engine held nothing; busy time is the engine's own measure.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fabric_pipelines.worker.engines.door import EngineStats


@dataclass(slots=True)
class Throughput:
    """ok, refused, failed: outcomes of the engine. sent: results the broker took; duplicates, late, unknown: as
    it answered instead. expired: tasks lost to a lease that ran out. undelivered: results left at the end. lease_s,
    send_s: seconds the loop waited for the broker's answer; an engine with a thread of its own ran on meanwhile."""

    leases: int = 0
    lane_switches: int = 0
    ok: int = 0
    refused: int = 0
    failed: int = 0
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
    seconds: float = 0.0

    def as_json(self, stats: EngineStats, rungs: dict[str, int]) -> dict[str, Any]:
        """Stable keys of the worker's exit line."""
        return {
            **asdict(self),
            "offered_tokens": stats.offered_tokens,
            "reused_tokens": stats.reused_tokens,
            "computed_tokens": stats.computed_tokens,
            "generated_tokens": stats.generated_tokens,
            "padded_tokens": stats.padded_tokens,
            "busy_s": stats.busy_s,
            "busy_share": stats.busy_s / self.seconds if self.seconds > 0 else 0.0,
            "rungs": dict(rungs),
        }

    def as_line(self, stats: EngineStats, rung: str) -> str:
        """One line for a log, read by people."""
        share = 100 * stats.busy_s / self.seconds if self.seconds > 0 else 0.0
        rate = (stats.computed_tokens + stats.generated_tokens) / max(self.seconds, 1e-9)
        return (
            f"{self.ok:,} tasks ok, {self.refused:,} refused, {self.failed:,} failed; "
            f"{stats.computed_tokens:,} prompt + {stats.generated_tokens:,} new tokens "
            f"({rate:,.0f}/s), {stats.padded_tokens:,} padding; busy {share:.0f} %, "
            f"{self.idle_gaps} idle gaps ({self.idle_s:.1f} s), "
            f"{self.lane_switches} lane switches, rung {rung}"
        )
