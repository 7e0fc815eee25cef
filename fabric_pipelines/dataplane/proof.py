"""Whether a database holds the landing of every task that its broker has settled.

A landing commits, ids and all, before the broker hears of it; so whatever the broker has settled is in `fabric.acks`,
or the database is not the one that it was: restored from an older dump, or promoted from a replica that was
behind. Sets of ids are compared, never totals: a landing that is not settled yet is no substitute for a lost one. Ask the
broker first and the database afterwards, and what goes on meanwhile does no harm.
"""

from __future__ import annotations

import numpy as np

from fabric_pipelines.dataplane.database import Connection, Database, read_identity
from fabric_pipelines.dataplane.sql import query
from fabric_pipelines.errors import IncarnationMismatch, UsageError
from fabric_pipelines.records.settled import Ids, Settled


def require_landed(database: Database, settled: Settled, journal_id: str) -> None:
    """IncarnationMismatch if a settled task never landed here, unless it was given up."""
    with database.session() as connection:
        firsts, ends = never_landed(connection, settled, whole=True)
        missing = int((ends - firsts).sum())
        if not missing:
            return
        name = read_identity(connection).database
    raise IncarnationMismatch(
        f"database {name!r} has landed {settled.tasks - missing:,} of the {settled.tasks:,} tasks that journal {journal_id} "
        f"retired, so it was restored from an older state: point FABRIC_PG_URL to the one that has all, or start "
        f"`fabric broker serve`, let `fabric db check` name the {missing:,} tasks, take them as lost with "
        f"`fabric db accept-loss {missing}`, and submit their rows again with a salt"
    )


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
