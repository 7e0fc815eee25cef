"""What a status shows of the work as a whole and of each lane. Pure questions to the core."""

from __future__ import annotations

from typing import Any

from fabric_pipelines.broker.classes import members
from fabric_pipelines.broker.core import Core
from fabric_pipelines.broker.lanes import Lane
from fabric_pipelines.broker.refusals import parked
from fabric_pipelines.broker.replies import BrokerStatus
from fabric_pipelines.broker.sessions import Session
from fabric_pipelines.broker.state import State
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


def consumer_row(state: State, session: Session) -> dict[str, Any]:
    return {
        "session": session.name,
        "engine": session.engine,
        "device": session.device,
        "profile": session.profile.as_json(),
        "leased": sum(state.leases[at].open for at in state.session_leases.get(session.name, ())),
        "lane": session.lane.name if session.lane else None,
    }


def tenant_status(core: Core, journal_id: str, tenant: str) -> BrokerStatus:
    """What that tenant may know: its own lanes, nobody's sessions, not how the broker is doing."""
    state = core.state
    lanes = [lane for lane in state.lanes if lane.key.tenant == tenant]
    ledgers = [state.accounts.ledger(lane.index) for lane in lanes]
    total = sum(ledgers, Ledger())
    return BrokerStatus(
        lanes=[lane_row(core, lane, ledger) for lane, ledger in zip(lanes, ledgers, strict=True)],
        total=total,
        counters={},
        journal={"journal_id": journal_id},
        progress=progress_of(total, rate=0.0),  # the rate is that of all tenants together
        submissions=sum(record.header.tenant == tenant for record in state.submissions),
        consumers=[],
        hold=bool(core.hold_reason),
        draining=core.draining,
        fault="",
    )
