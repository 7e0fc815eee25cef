"""Dead letters as people work with them: which there are, and which are to be tried again.

Two owners, each asked for its own fact: the database says why a task died, the broker whether it is dead now. A task
that was requeued keeps its old row until it lands (the row goes) or dies again (the row is replaced).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.broker.replies import RequeueReply
from fabric_pipelines.dataplane import refusals, results
from fabric_pipelines.dataplane.database import Database

TaskIds = npt.NDArray[np.int64]
IDS_PER_CALL = 50_000


@dataclass(frozen=True, slots=True)
class Listing:
    """dead: tasks that are dead now, by the broker. reasons: rows of the database by error code. letters: one row
    each with the task's present state, at most as many as were asked for. refusals: what tables said to every row of a
    function, accepted or waited for."""

    dead: int
    reasons: list[dict[str, Any]]
    letters: list[dict[str, Any]]
    refusals: list[dict[str, Any]]


def listed(
    database: Database,
    client: BrokerClient,
    *,
    reason: str | None = None,
    function: str | None = None,
    limit: int | None = None,
) -> Listing:
    """Dead letters by task id; of one reason (error code), one function, or all."""
    table = results.dead_letters(database, error_code=reason, function=function, limit=limit)
    states: list[str] = []
    for ids in _pages(table.column("task_id").to_numpy()):
        states += client.states(ids)
    letters = [
        {**row, "state": state, "landed_at": row["landed_at"].isoformat()}
        for row, state in zip(table.to_pylist(), states, strict=True)
    ]
    found = results.dead_letter_reasons(database, function=function)
    reasons = [
        {"reason": code, "letters": count}
        for code, count in found.items()
        if reason in (None, code)
    ]
    said = [as_json(each) for each in refusals.listed(database, function)]
    return Listing(client.status().total.dead.tasks, reasons, letters, said)


def as_json(refusal: refusals.Refusal) -> dict[str, Any]:
    given = asdict(refusal)
    times = {
        name: value.isoformat() for name, value in given.items() if isinstance(value, datetime)
    }
    return {**given, **times}


def requeue(
    database: Database, client: BrokerClient, *, reason: str, function: str | None = None
) -> RequeueReply:
    """Everything that died of `reason` is ready again. Idempotent."""
    pages = results.dead_letter_ids(database, reason, function=function)
    return requeue_ids(client, pages, why=f"died of {reason}")


def requeue_ids(client: BrokerClient, pages: Iterable[TaskIds], *, why: str) -> RequeueReply:
    total = RequeueReply()
    for page in pages:
        for ids in _pages(page):
            total += client.requeue(ids, reason=why)
    return total


def _pages(ids: TaskIds) -> list[TaskIds]:
    return [ids[at : at + IDS_PER_CALL] for at in range(0, len(ids), IDS_PER_CALL)]
