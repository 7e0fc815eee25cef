"""The backpressure ladder: named rungs from "pull freely" to "stop", each with a counter.

Pressure climbs at once to the rung that the worst signal asks for, since a full buffer cannot wait. A gauge
(outbox, busy engine) comes down one rung at a time, each after `calm_s` without that pressure, so that a value
at its edge does not make the worker flutter; a word (hold, away, stop) counts while it is said, since a device
that idles after its broker is back is waste. Decides only; what a rung forbids is the loop's to obey.

    OPEN            pull `window_tokens` ahead
    PREFETCH_OFF    pull only what the engine can start now
    NO_NEW_LANE     ... and only of the lane that runs: no shape switch under pressure
    HOLD            lease nothing; what is in hand goes on
    NACK_UNSTARTED  ... and hand back what did not start, so that another worker may have it
    STOP            ... and end once what runs is finished
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class Rung(IntEnum):
    OPEN = 0
    PREFETCH_OFF = 1
    NO_NEW_LANE = 2
    HOLD = 3
    NACK_UNSTARTED = 4
    STOP = 5


@dataclass(frozen=True, slots=True)
class Signals:
    """outbox_share: unsent completions / their bound; engine_busy_s: how long the engine has refused more;
    broker_hold: computed work stands at its high-water mark; broker_away: no broker answers (nothing can be
    leased or nacked, so this alone never goes beyond HOLD); stopping: SIGTERM came."""

    outbox_share: float = 0.0
    engine_busy_s: float = 0.0
    broker_hold: bool = False
    broker_away: bool = False
    stopping: bool = False


# The first column's rung is due from this share of the outbox, or this many seconds of a busy engine, on.
# A quarter of the outbox leaves room for everything in hand to finish while the broker restarts.
THRESHOLDS = (
    (Rung.NACK_UNSTARTED, 1.0, 30.0),
    (Rung.HOLD, 0.75, 10.0),
    (Rung.NO_NEW_LANE, 0.5, 2.0),
    (Rung.PREFETCH_OFF, 0.25, 0.001),
)


def gauge_rung(signals: Signals) -> Rung:
    """The lowest rung that meets the gauges. Pure."""
    for rung, share, busy_s in THRESHOLDS:
        if signals.outbox_share >= share or signals.engine_busy_s >= busy_s:
            return rung
    return Rung.OPEN


def word_rung(signals: Signals) -> Rung:
    """The rung that somebody asked for. Pure."""
    if signals.stopping:
        return Rung.STOP
    return Rung.HOLD if signals.broker_hold or signals.broker_away else Rung.OPEN


@dataclass(slots=True)
class Ladder:
    """`climbed[rung]` counts how often the worker came up to that rung or past it."""

    calm_s: float = 1.0
    rung: Rung = Rung.OPEN
    climbed: dict[str, int] = field(
        default_factory=lambda: {rung.name.lower(): 0 for rung in Rung if rung is not Rung.OPEN}
    )
    _gauge: Rung = Rung.OPEN
    _calm_since_s: float | None = None

    def observe(self, signals: Signals, now_s: float) -> Rung:
        self._follow(gauge_rung(signals), now_s)
        rung = max(self._gauge, word_rung(signals))
        for passed in range(self.rung + 1, rung + 1):
            self.climbed[Rung(passed).name.lower()] += 1
        self.rung = rung
        return rung

    def _follow(self, due: Rung, now_s: float) -> None:
        if due >= self._gauge:
            self._gauge, self._calm_since_s = due, None
        elif self._calm_since_s is None:
            self._calm_since_s = now_s
        elif now_s - self._calm_since_s >= self.calm_s:
            self._gauge, self._calm_since_s = Rung(self._gauge - 1), now_s
