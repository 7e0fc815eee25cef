"""What a status shows of the work as a whole and of each lane. Pure questions to the core."""

from __future__ import annotations

from typing import Any

from fabric_pipelines.broker.classes import members
from fabric_pipelines.broker.core import Core
from fabric_pipelines.broker.lanes import Lane
from fabric_pipelines.broker.refusals import parked
from fabric_pipelines.ledger import Ledger


def progress_of(total: Ledger, rate: float, *, flows: bool = True) -> dict[str, Any]:
    """In prompt tokens, over all that was ever enqueued; the ETA is None while nothing moves, and while nothing is
    leased any more, since what is ready then stays."""
    done = total.retired.tokens + total.dead.tokens
    left = total.enqueued.tokens - done
    return {
        "tokens_total": total.enqueued.tokens,
        "tokens_done": done,
        "tokens_per_s": rate,
        "eta_s": 0.0 if not left else left / rate if rate > 0 and flows else None,
    }


def lane_row(core: Core, lane: Lane, ledger: Ledger) -> dict[str, Any]:
    kinds = list(core.state.classes)
    return {
        "lane": lane.name,
        "step": lane.step.name.lower(),
        "generation": lane.generation,
        "refused_by": [kinds[number] for number in members(lane.key.refused_by)],
        "parked": parked(core.state, lane, core.roster),
        **ledger.as_json(),
    }
