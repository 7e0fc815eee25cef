"""Start full: when a worker's engine may be given its first work.

The first leases of a run may be small (a producer that has just begun, lanes that hold little), and a batch that was begun
small is computed small. So the first work waits beside the engine until it fills the engine's own budget, for a bounded time,
and no longer than more of it keeps coming: two asks in a row that bring nothing mean that the broker has no more. Decides
only; afterwards it says yes for ever.
"""

from __future__ import annotations

from fabric_pipelines.records.profile import Profile
from fabric_pipelines.worker.supply import Supply

EMPTY_ASKS = 2  # one may have come between two pieces of a submission


class FirstBatch:
    """wait_s: at most, from the first lease on; 0 = start with what there is. begun: the engine was given work."""

    def __init__(self, profile: Profile, *, continuous: bool, wait_s: float) -> None:
        self._profile, self._continuous, self._wait_s = profile, continuous, wait_s
        self._since_s: float | None = None
        self._empty_asks = 0
        self._enough = False
        self.begun = False

    def share(self, supply: Supply) -> float:
        """Of the budget that what is in hand fills, by the bound that is reached first, at most 1. An engine that refills per finished
        task takes prompts over many steps, so tokens a step are no bound of its batch."""
        profile = self._profile
        shares = [len(supply) / profile.max_batch_size]
        if profile.kv_cache_tokens:
            shares.append(supply.kv_tokens / profile.kv_cache_tokens)
        if not self._continuous:
            shares.append(supply.tokens / profile.max_num_tokens)
        return min(max(shares), 1.0)

    # ---- what the loop sees

    def came(self, now_s: float) -> None:
        """A lease was taken."""
        self._since_s = now_s if self._since_s is None else self._since_s
        self._empty_asks = 0

    def nothing_came(self) -> None:
        self._empty_asks += 1

    def enough_is_in_hand(self) -> None:
        """The loop would not ask for more: waiting on brings nothing."""
        self._enough = True

    # ---- what it decides

    def is_due(self, supply: Supply, now_s: float, *, asks: bool) -> bool:
        """Whether the engine may begin. asks: the loop leases at all now."""
        if self.begun or self._since_s is None or not asks:
            return True
        waited = now_s - self._since_s >= self._wait_s
        return waited or self._enough or self._empty_asks >= EMPTY_ASKS or self.share(supply) >= 1

    def waits_until_s(self) -> float | None:
        """When it will be due at the latest; None where nothing waits for it."""
        return None if self.begun or self._since_s is None else self._since_s + self._wait_s

    def begin(self, now_s: float) -> float:
        """The engine is given its first work now; seconds that it waited for that."""
        self.begun = True
        return 0.0 if self._since_s is None else now_s - self._since_s
