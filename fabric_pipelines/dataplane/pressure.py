"""Whether the database is pressed, from what it says of itself: two looks are compared with limits.

A signal that a server or role cannot give is None and judged by nothing; a look that brought nothing at all is no
look. Each pressure is of one of two kinds, since they have different remedies: "delay" (somebody waits longer, so
smaller transactions help) and "volume" (too many bytes, so only a lower rate helps). Pure; no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import ceil

DELAY, VOLUME = "delay", "volume"
KINDS = {
    "commit": DELAY,
    "foreground": DELAY,
    "lock_waiters": DELAY,
    "wal_buffers_full": DELAY,
    "checkpoints_requested": VOLUME,
    "replication_lag": VOLUME,
    "wal_since_redo": VOLUME,
}


@dataclass(frozen=True, slots=True)
class Signals:
    """One look. wal_since_redo: share of max_wal_size; checkpoints_requested and wal_buffers_full: counted since
    the server's statistics began; lock_waiters: backends that are not ours and wait for a lock."""

    wal_since_redo: float | None = None
    checkpoints_requested: int | None = None
    wal_buffers_full: int | None = None
    replication_lag_bytes: int | None = None
    lock_waiters: int | None = None

    @property
    def silent(self) -> bool:
        return all(getattr(self, item.name) is None for item in fields(self))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Above these the database is pressed."""

    wal_since_redo: float = 1.1  # a checkpoint that volume forced is planned to end at 1.0
    wal_buffers_full: int = 256  # new ones between two looks
    replication_lag_bytes: int = 64 << 20
    lock_waiters: int = 0
    foreground_ratio: float = 1.2  # of p90, for a p99 within 1.3
    commit_ratio: float = 4.0
    slack_ms: float = 0.5  # a disk that answers in microseconds triples its time by chance
    samples_least: int = 20  # of fewer the p90 is the luck of one


@dataclass(slots=True)
class Latencies:
    """Milliseconds of the newest commits: of a small foreign-like transaction while no bulk ran (`idle`) and while
    it ran (`loaded`), and of bulk itself (`own`)."""

    idle: deque[float] = field(default_factory=lambda: deque(maxlen=30))
    loaded: deque[float] = field(default_factory=lambda: deque(maxlen=40))
    own: deque[float] = field(default_factory=lambda: deque(maxlen=24))


def p90(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return sorted(values)[ceil(0.9 * len(values)) - 1]


def judge(
    before: Signals | None, now: Signals, latencies: Latencies, bounds: Bounds
) -> tuple[str, ...]:
    """Names of the pressures (keys of KINDS) that stand at `now`."""
    found = []
    if _above(now.wal_since_redo, bounds.wal_since_redo):
        found.append("wal_since_redo")
    if _above(now.replication_lag_bytes, bounds.replication_lag_bytes):
        found.append("replication_lag")
    if _above(now.lock_waiters, bounds.lock_waiters):
        found.append("lock_waiters")
    if before is not None:
        if _above(_grown(before.checkpoints_requested, now.checkpoints_requested), 0):
            found.append("checkpoints_requested")
        if _above(_grown(before.wal_buffers_full, now.wal_buffers_full), bounds.wal_buffers_full):
            found.append("wal_buffers_full")
    return (*found, *_delays(latencies, bounds))


def _delays(latencies: Latencies, bounds: Bounds) -> list[str]:
    """Against the idle probe: without one nothing can be said."""
    if len(latencies.idle) < bounds.samples_least:
        return []
    idle_ms = p90(latencies.idle)
    assert idle_ms is not None
    found = []
    for name, values, ratio in (
        ("foreground", latencies.loaded, bounds.foreground_ratio),
        ("commit", latencies.own, bounds.commit_ratio),
    ):
        bound_ms = max(idle_ms * ratio, idle_ms + bounds.slack_ms)
        if len(values) >= bounds.samples_least and _above(p90(values), bound_ms):
            found.append(name)
    return found


def _above(value: float | None, bound: float) -> bool:
    return value is not None and value > bound


def _grown(before: int | None, now: int | None) -> int | None:
    """None also after a reset of the statistics."""
    if before is None or now is None or now < before:
        return None
    return now - before
