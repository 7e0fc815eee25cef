"""Whether a database holds the landing of every task that its broker has settled.

A landing commits, ids and all, before the broker hears of it; so whatever the broker has settled is in `fabric.acks`,
or the database is not the one that it was: restored from an older dump, or promoted from a replica that was
behind. Sets of ids are compared, never totals: a landing that is not settled yet is no substitute for a lost one. Ask the
broker first and the database afterwards, and what goes on meanwhile does no harm. What was proven once is written down
beside the landings, in sums by page, so that a start of ten million settled tasks asks for those of the last hours.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fabric_pipelines.dataplane.database import Connection, Database, read_identity
from fabric_pipelines.dataplane.sql import query
from fabric_pipelines.errors import IncarnationMismatch, UsageError
from fabric_pipelines.ledger import MASK64, hash64
from fabric_pipelines.records.settled import Ids, Settled, Sums


class Settlement(Protocol):
    """What is asked of a broker."""

    def settled_sums(self) -> Sums: ...
    def settled_page(self, begin: int) -> Settled: ...


def require_landed(database: Database, broker: Settlement, journal_id: str) -> None:
    """IncarnationMismatch if a settled task never landed here, unless it was given up.

    Only pages of which the broker now says something else than was proven here are asked for, one at a time."""
    sums = broker.settled_sums()
    tasks = missing = 0
    with database.session() as connection:
        known = _proven(connection, journal_id)
        for page, said in enumerate(zip(sums.tasks.tolist(), sums.marks.tolist(), strict=True)):
            if known.get(page, (0, 0)) == said:
                tasks += said[0]
                continue
            settled = broker.settled_page(page * sums.rows)
            firsts, ends = never_landed(connection, settled, whole=True)
            tasks, missing = tasks + settled.tasks, missing + int((ends - firsts).sum())
            if not len(firsts):
                _prove(connection, journal_id, page, settled)
        if not missing:
            connection.execute(query("proven_by"), {"journal_id": journal_id})
            return
        name = read_identity(connection).database
    raise IncarnationMismatch(
        f"database {name!r} has landed {tasks - missing:,} of the {tasks:,} tasks that journal {journal_id} "
        f"retired, so it was restored from an older state: point FABRIC_PG_URL to the one that has all, or start "
        f"`fabric broker serve`, let `fabric db check` name the {missing:,} tasks, take them as lost with "
        f"`fabric db accept-loss {missing}`, and submit their rows again with a salt"
    )


def _proven(connection: Connection, journal_id: str) -> dict[int, tuple[int, int]]:
    """tasks and mark by page; nothing where the landings are no longer those that it rests on."""
    rows = connection.execute(query("proven"), {"journal_id": journal_id}).fetchall()
    return {page: (tasks, mark & MASK64) for page, tasks, mark in rows}


def _prove(connection: Connection, journal_id: str, page: int, settled: Settled) -> None:
    with np.errstate(over="ignore"):
        mark = hash64(settled.ids()).sum(dtype=np.uint64)
    values = {"page": page, "tasks": settled.tasks, "mark": int(mark.astype(np.int64))}
    connection.execute(query("prove_page"), {"journal_id": journal_id, **values})


def accept_loss(database: Database, settled: Settled, tasks: int) -> int:
    """Give up the settled tasks that never landed here; returns how many. UsageError unless they are `tasks` many."""
    with database.session() as connection, connection.transaction():
        connection.execute(query("journals_lock"))
        firsts, ends = never_landed(connection, settled, whole=True)
        missing = int((ends - firsts).sum())
        if missing != tasks:
            raise UsageError(
                f"{missing:,} tasks that the broker retired are not in the database, not {tasks:,}: see `fabric db check`, "
                "and give that number"
            )
        if missing:
            connection.execute(query("give_up"), {"ids": _text(firsts, ends), "tasks": missing})
    return missing


def never_landed(connection: Connection, settled: Settled, *, whole: bool) -> tuple[Ids, Ids]:
    """Runs [first, end) of settled ids that no landing names and nobody gave up. Landings from before ids were kept count
    with `whole` for all between their first and last task, without it for none."""
    if not len(settled.firsts):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    values = {
        "ids": _text(settled.firsts, settled.ends),
        "first": int(settled.firsts[0]),
        "end": int(settled.ends[-1]),
        "whole": whole,
    }
    rows = connection.execute(query("never_landed"), values).fetchall()
    found = np.array(rows, np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _text(firsts: Ids, ends: Ids) -> str:
    runs = zip(firsts.tolist(), ends.tolist(), strict=True)
    return "{" + ",".join(f"[{first},{end})" for first, end in runs) + "}"
