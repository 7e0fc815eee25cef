"""Keeps leases alive while one step computes for longer than the lease time.

A thread with a client of its own renews for the same session, but only while the loop is seen to move: after
`stall_s` without a turn of the loop it stops, the leases run out and the work goes elsewhere. A wedged
engine must not keep its tasks for ever.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from fabric_pipelines.errors import FabricError

LOG = logging.getLogger("fabric.worker")
STALL_S = 900.0


class Renewing(Protocol):
    def renew(self) -> object: ...


class Pulse:
    """`last_turn_s` tells when the loop last came round, on the clock that `now_s` reads. `connect` is called
    in the thread, since a client belongs to one thread."""

    def __init__(
        self,
        connect: Callable[[], Renewing],
        *,
        last_turn_s: Callable[[], float],
        now_s: Callable[[], float],
        heartbeat_s: float,
        stall_s: float = STALL_S,
    ) -> None:
        self._connect = connect
        self._last_turn_s = last_turn_s
        self._now_s = now_s
        self._heartbeat_s = heartbeat_s
        self._stall_s = stall_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_end, name="pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()

    def is_needed(self) -> bool:
        """The loop is inside a long step, and not for too long."""
        age = self._now_s() - self._last_turn_s()
        return self._heartbeat_s <= age < self._stall_s

    def _beat_until_end(self) -> None:
        client: Renewing | None = None
        while not self._end.wait(self._heartbeat_s):
            if not self.is_needed():
                continue
            try:
                client = client or self._connect()
                client.renew()
            except FabricError as fault:
                # The loop itself finds out when it comes round; here only the next beat matters.
                LOG.warning("lease renewal during a long step failed: %s", fault)
                client = None
