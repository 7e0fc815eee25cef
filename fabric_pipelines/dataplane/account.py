"""Is what once landed still there: every task id of every landing, looked for by id.

An anti-join over the ids that each landing recorded in its own transaction, never a comparison of totals. It finds rows that
were deleted, truncated away or not restored; what never landed is still with the broker. Changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.sinks import sink_of
from fabric_pipelines.dataplane.sql import compose, query, relation

SHOWN = 20


@dataclass(frozen=True, slots=True)
class Lost:
    """tasks: how many ids are nowhere; task_ids: the first of them."""

    function: str
    tasks: int
    task_ids: list[int]


@dataclass(frozen=True, slots=True)
class Account:
    """landings: transactions whose ids are known; unproven: those from before ids were kept."""

    landings: int
    unproven: int
    lost: list[Lost] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.lost


def check(database: Database) -> Account:
    """One snapshot of acks and tables. Costs an index lookup a landed task."""
    with database.session() as connection, connection.transaction():
        connection.execute(query("one_snapshot"))
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
    return Account(int(row[0]), int(row[1]), lost)


def multirange(ids: npt.NDArray[np.int64]) -> str:
    """Ids as text of an int8multirange: a run of neighbours is one range."""
    if not ids.size:
        return "{}"
    ordered = np.sort(ids)
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    firsts = ordered[np.r_[0, breaks + 1]].tolist()
    ends = (ordered[np.r_[breaks, ordered.size - 1]] + 1).tolist()
    return "{" + ",".join(f"[{a},{b})" for a, b in zip(firsts, ends, strict=True)) + "}"
