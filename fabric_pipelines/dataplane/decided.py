"""One decision a task and round: it landed, or it is dead, and both tables and the broker say the same.

What was decided first stays until the task is requeued. Two landings that have one task in hand at the same moment cannot
see each other's rows; the last statement of each before its commit therefore takes a lock (block `acknowledge`), and then
looks here. Refuses to mend: the later one rolls back and begins again, with what was decided before its eyes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from psycopg import sql

from fabric_pipelines.dataplane.database import Connection
from fabric_pipelines.dataplane.sql import compose, query, relation

TaskIds = npt.NDArray[np.int64]


class DecidedMeanwhile(Exception):
    """Others buried tasks that this transaction landed (`buried`), or landed what it buried."""

    def __init__(self, buried: list[int]) -> None:
        super().__init__(buried)
        self.buried = buried


def among(
    connection: Connection, statement: bytes | sql.Composed, ids: TaskIds
) -> npt.NDArray[np.bool_]:
    """Which of `ids` the statement finds; it is not asked of none."""
    if not len(ids):
        return np.zeros(0, np.bool_)
    found = connection.execute(statement, {"task_ids": ids.tolist()}).fetchall()
    return np.isin(ids, np.array([row[0] for row in found], np.int64))


def require_alone(connection: Connection, table: str, alive: TaskIds, dead: TaskIds) -> None:
    """Raises DecidedMeanwhile when a task would be landed and dead. One look at a range of ids, in a transaction that
    buries nothing and where no letters are: 50 us a landing."""
    landed = among(connection, compose("in_table", table=relation(table)), dead)
    every = np.concatenate([alive, dead])
    span = {"first_task": int(every.min()), "last_task": int(every.max())}
    row = connection.execute(query("has_letters"), span).fetchone()
    assert row is not None
    buried = among(connection, query("letters_of"), alive) if row[0] else alive == -1
    if landed.any() or buried.any():
        raise DecidedMeanwhile(alive[buried].tolist())
