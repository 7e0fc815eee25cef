"""Quota: how many bytes of the log one tenant's unfinished tasks hold, and when it is refused new ones.

Counted are bytes that are really held: an uploaded batch's share of its frame for each task of it that has no outcome
yet. An exact count looks at every task (about 10 ms a million), so it is made only when it can matter: what was
counted plus all that came since is an upper bound, and below the mark the bound is enough.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fabric_pipelines.broker.recovery import Log
from fabric_pipelines.broker.space import needed
from fabric_pipelines.broker.state import State
from fabric_pipelines.errors import Backpressure

RECOUNT_S = 1.0
RETRY_S = 5.0


def held_bytes(state: State, log: Log) -> dict[str, int]:
    """Bytes of the log that tasks without an outcome hold, by tenant."""
    index, need = state.index, needed(state, log.first_lsn, pin_open=False, pin_dead=False)
    frames = index.frames.view
    rows = np.diff(index.base.view, append=index.count)
    for lsn, moved in index.moved.items():
        rows[frames == lsn] = len(
            moved
        )  # such a frame is shared by what is left of several batches
    sizes = log.extents(frames) * need.batch_rows // np.maximum(rows, 1)
    held: dict[str, int] = {}
    for record in state.submissions:
        tenant = record.header.tenant
        held[tenant] = held.get(tenant, 0) + int(sizes[record.batches].sum())
    return held


class Quota:
    """mark: for each tenant; 0: none."""

    def __init__(self, mark: int, count: Callable[[], dict[str, int]]) -> None:
        self.mark, self._count = mark, count
        self._bounds: dict[str, int] = {}
        self._counted_s = float("-inf")

    def charge(self, tenant: str, size: int) -> None:
        """So many bytes of that tenant went into the log."""
        self._bounds[tenant] = self._bounds.get(tenant, 0) + size

    def require(self, tenant: str, now_s: float) -> None:
        """Backpressure if the tenant holds its share already."""
        if not self.mark:
            return
        first = self._counted_s == float("-inf")
        over = self._bounds.get(tenant, 0) >= self.mark
        if first or (over and now_s - self._counted_s >= RECOUNT_S):
            self._bounds, self._counted_s = self._count(), now_s
        held = self._bounds.get(tenant, 0)
        if held >= self.mark:
            raise Backpressure(
                f"unfinished tasks of tenant {tenant!r} hold {held} bytes, at or above its share of {self.mark}: "
                "tasks are taken again when some of them are done",
                retry_after_s=RETRY_S,
            )
