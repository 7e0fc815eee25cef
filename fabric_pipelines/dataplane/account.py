"""Is what once landed still there: every task id of every landing, looked for by id.

An anti-join over the ids that each landing recorded in its own transaction, and over those that the broker settled: a database
restored from an older dump forgets rows and landings alike, and only the broker knows of them. Never a comparison of
totals. What never landed is still with the broker. Changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fabric_pipelines.dataplane.database import Connection, Database
from fabric_pipelines.dataplane.proof import never_landed
from fabric_pipelines.dataplane.sinks import sink_of
from fabric_pipelines.dataplane.sql import compose, query, relation
from fabric_pipelines.errors import UsageError
from fabric_pipelines.records.settled import Settled

SHOWN = 20
LOOKED_UP = 50_000


@dataclass(frozen=True, slots=True)
class Lost:
    """tasks: how many ids are nowhere; task_ids: the first of them."""

    function: str
    tasks: int
    task_ids: list[int]


@dataclass(frozen=True, slots=True)
class Unrestored:
    """Tasks of one submission that the broker settled and that this database knows neither a landing nor a row of."""

    submission_id: str
    function: str
    tasks: int
    task_ids: list[int]


@dataclass(frozen=True, slots=True)
class Account:
    """landings: transactions whose ids are known; unproven: those from before ids were kept. settled: how many tasks the
    broker says are retired or dead, None if it was not asked; given_up: those of them that an operator took as lost."""

    landings: int
    unproven: int
    lost: list[Lost] = field(default_factory=list)
    settled: int | None = None
    unrestored: list[Unrestored] = field(default_factory=list)
    given_up: int = 0

    @property
    def ok(self) -> bool:
        return not self.lost and not self.unrestored


def check(database: Database, settled: Settled | None = None) -> Account:
    """One snapshot of acks and tables, later than `settled` was told. Costs an index lookup a landed task."""
    with database.session() as connection, connection.transaction():
        connection.execute(query("one_snapshot"))
        if connection.execute(query("has_given_up")).fetchone() == (None,):
            raise UsageError(
                f"{database!r} was made or dumped by an older program: run `fabric db migrate`, then check it"
            )
        row = connection.execute(query("count_acks")).fetchone()
        assert row is not None
        functions = [name for (name,) in connection.execute(query("acked_functions")).fetchall()]
        lost = []
        for name in functions:
            statement = compose("lost", table=relation(sink_of(name).table))
            found = connection.execute(statement, {"function": name, "shown": SHOWN}).fetchone()
            assert found is not None
            if found[0]:
                lost.append(Lost(name, int(found[0]), list(found[1])))
        given_up = connection.execute(query("count_given_up")).fetchone()
        assert given_up is not None
        missing = [] if settled is None else _unrestored(connection, settled)
    tasks = None if settled is None else settled.tasks
    return Account(int(row[0]), int(row[1]), lost, tasks, missing, int(given_up[0]))


def _unrestored(connection: Connection, settled: Settled) -> list[Unrestored]:
    firsts, ends = never_landed(connection, settled, whole=False)
    tasks: dict[int, int] = {}
    shown: dict[int, list[int]] = {}
    for run in zip(firsts.tolist(), ends.tolist(), strict=True):
        for begin in range(*run, LOOKED_UP):
            ids = list(range(begin, min(begin + LOOKED_UP, run[1])))
            rows = connection.execute(query("unaccounted"), {"task_ids": ids}).fetchall()
            gone = np.array([row[0] for row in rows], np.int64)
            for owner, task in zip(settled.owner(gone).tolist(), gone.tolist(), strict=True):
                tasks[owner] = tasks.get(owner, 0) + 1
                if len(named := shown.setdefault(owner, [])) < SHOWN:
                    named.append(task)
    return [
        Unrestored(*settled.submissions[owner], tasks[owner], shown[owner])
        for owner in sorted(tasks)
    ]


def multirange(ids: npt.NDArray[np.int64]) -> str:
    """Ids as text of an int8multirange: a run of neighbours is one range."""
    if not ids.size:
        return "{}"
    ordered = np.sort(ids)
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    firsts = ordered[np.r_[0, breaks + 1]].tolist()
    ends = (ordered[np.r_[breaks, ordered.size - 1]] + 1).tolist()
    return "{" + ",".join(f"[{a},{b})" for a, b in zip(firsts, ends, strict=True)) + "}"
