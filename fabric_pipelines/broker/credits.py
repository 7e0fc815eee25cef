"""Credits: bytes of uploads that this process may hold before they are in the log, per tenant and in total.

Counted is the memory that a received batch really keeps alive, from when it was read until its answer may leave. A
stream that finds no credit waits a moment, which slows its sender down by flow control; if the log does not catch up
in that time it is refused with a time to retry, so that no thread waits for ever and the producer can say why.
"""

from __future__ import annotations

import threading

from fabric_pipelines.errors import Backpressure, UsageError

TOTAL_BYTES = 256 << 20
TENANT_BYTES = 128 << 20
FRAME_BYTES_MAX = 64 << 20
PATIENCE_S = 2.0
RETRY_S = 1.0


def require_size(size: int) -> None:
    """UsageError for a batch that no credit would ever do for."""
    if size > FRAME_BYTES_MAX:
        raise UsageError(
            f"a task batch of {size} bytes is larger than {FRAME_BYTES_MAX}: send fewer tasks at a time"
        )


class Credits:
    """Safe in any thread."""

    def __init__(
        self,
        total: int = TOTAL_BYTES,
        tenant: int = TENANT_BYTES,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.total, self.each, self._patience_s = total, tenant, patience_s
        self._held: dict[str, int] = {}
        self._freed = threading.Condition()
        self.refusals = 0

    @property
    def held(self) -> int:
        """Bytes, now."""
        return sum(self._held.values())

    def take(self, tenant: str, size: int) -> None:
        """Hold so much for this tenant; give it back with `give`. Backpressure if there is no credit for it within
        a moment."""
        with self._freed:
            if self._freed.wait_for(lambda: self._fits(tenant, size), self._patience_s):
                self._held[tenant] = self._held.get(tenant, 0) + size
                return
            self.refusals += 1
            mine, held = self._held.get(tenant, 0), self.held
        raise Backpressure(
            f"{mine} bytes of tenant {tenant!r} and {held} in all wait for the broker's disk, and {size} more do not "
            f"fit {self.each} and {self.total}: send them again when some are durable",
            retry_after_s=RETRY_S,
        )

    def give(self, tenant: str, size: int) -> None:
        with self._freed:
            left = self._held[tenant] - size
            assert left >= 0, f"tenant {tenant!r} gave back more than it held"
            if left:
                self._held[tenant] = left
            else:
                del self._held[tenant]
            self._freed.notify_all()

    def _fits(self, tenant: str, size: int) -> bool:
        mine = self._held.get(tenant, 0)
        return mine + size <= self.each and self.held + size <= self.total
