"""How fast and in how large transactions bulk results may be written, so that a busy database stays usable.

A token bucket in bytes of write cost (prices.py) whose rate follows the database's pressure (pressure.py): every
TICK it shrinks when pressed and grows when bulk was made to wait and nothing was pressed. Transaction size is the
first lever and rate the second, since a large commit holds up everybody's commit whatever the rate. Two classes:
bulk waits, everything else is only charged, so that bulk makes room for it. Blind for SILENCE_S, it falls to a
floor. Pure: time is an argument, and whoever reads signals or sleeps is elsewhere (watch.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fabric_pipelines.dataplane.pressure import (
    DELAY,
    KINDS,
    Bounds,
    Latencies,
    Signals,
    judge,
    p90,
)
from fabric_pipelines.dataplane.prices import Price, prior

TICK_S = 0.5
SILENCE_S = 5.0
WHOLE = 0.9
HUSH_STEP_S = 0.01
"""Bulk asks so often while the watcher listens, who may be done sooner than it said."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates in bytes of write cost a second."""

    rate_start: float = 32e6
    rate_floor: float = 1e6
    rate_most: float = 1e9
    step: float = 3e6  # a tick; by 5 MB/s a cut is taken back before it was measured
    backoff: float = 0.8
    rows_start: int = 1_000
    rows_most: int = 5_000
    rows_least: int = 1_000
    writers_most: int = 2
    calm_ticks: int = 40  # in which bulk wrote without pressure, before transactions grow again
    bounds: Bounds = field(default_factory=Bounds)


@dataclass(slots=True)
class ClassCounters:
    transactions: int = 0
    rows: int = 0
    cost_bytes: float = 0.0
    wal_bytes: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pass:
    """Leave to run one transaction: what it was charged, to be set against what it cost. `in_class`: "bulk" or
    "regular"."""

    sink: str
    in_class: str
    rows: int
    charged: float


@dataclass(slots=True)
class Governor:
    """One per database. `now_s` is any clock that only grows, the same in every call."""

    limits: Limits
    now_s: float
    rate: float = field(init=False)
    rows: int = field(init=False)
    writers: int = field(init=False, default=1)
    latencies: Latencies = field(default_factory=Latencies)
    signals: Signals | None = field(init=False, default=None)
    pressed_by: tuple[str, ...] = field(init=False, default=())
    pressures: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    classes: dict[str, ClassCounters] = field(
        default_factory=lambda: {"bulk": ClassCounters(), "regular": ClassCounters()}
    )
    prices: dict[str, Price] = field(default_factory=dict)
    in_flight: int = field(init=False, default=0)  # bulk transactions
    started: int = field(init=False, default=0)
    _balance: float = field(init=False, default=0.0)
    _refilled_s: float = field(init=False)
    _hushed_until_s: float = field(init=False, default=float("-inf"))
    _heard_s: float = field(init=False)
    throttled: bool = field(init=False, default=False)
    _calm: int = field(init=False, default=0)
    _taken: float = field(init=False, default=0.0)  # write cost since the last look
    _looked_s: float = field(init=False)
    _slow_start: bool = field(init=False, default=True)
    _was_blind: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.rate, self.rows = self.limits.rate_start, self.limits.rows_start
        self._refilled_s = self._heard_s = self._looked_s = self.now_s
        self._balance = self._capacity

    # ---- the two classes

    def wait_s(self, now_s: float) -> float:
        """How long bulk must still wait before its next transaction; 0: go."""
        self._refill(now_s)
        if now_s < self._hushed_until_s:
            return min(self._hushed_until_s - now_s, HUSH_STEP_S)
        if self._balance > 0:
            return 0.0
        self.throttled = True
        return max(-self._balance / self.effective_rate(now_s), 1e-3)

    def waited(self, seconds: float) -> None:
        self.classes["bulk"].waited_s += seconds

    def admit(self, sink: str, rows: int, size: int, now_s: float, *, bulk: bool) -> Pass:
        """Charge a transaction of `rows` rows and about `size` bytes on the wire; always granted. Bulk asks
        wait_s first; a transaction larger than what is left puts the bucket in debt, which later ones wait for."""
        self._refill(now_s)
        charged = rows * self.price(sink).row_cost(size / rows) if rows else 0.0
        self._balance -= charged
        if bulk:
            self.in_flight += 1
            self.started += 1
        return Pass(sink, "bulk" if bulk else "regular", rows, charged)

    def settle(
        self, leave: Pass, *, rows: int, size: int, wal_bytes: int | None, commit_ms: float | None
    ) -> None:
        """What the transaction of `leave` did: `rows` inserted, `size` bytes sent, WAL written where the server
        can say. The bucket is corrected, the price learnt."""
        price, counters = self.price(leave.sink), self.classes[leave.in_class]
        cost = rows * price.row_cost(size / rows) if rows else 0.0
        if wal_bytes is not None:
            if rows >= WHOLE * leave.rows:  # what was there already is in `size` and not in the WAL
                price.learn(rows, size, wal_bytes)
            cost = price.actual_cost(rows, wal_bytes)
            counters.wal_bytes += wal_bytes
        self._balance += leave.charged - cost
        counters.transactions += 1
        counters.rows += rows
        counters.cost_bytes += cost
        self._taken += cost
        self._ended(leave)
        if commit_ms is not None and leave.in_class == "bulk":
            self.latencies.own.append(commit_ms)

    def withdraw(self, leave: Pass) -> None:
        """The transaction of `leave` came to nothing; what it cost stays charged, for it may have cost that."""
        self._ended(leave)

    # ---- what the database says

    def probed(self, latency_ms: float, *, loaded: bool) -> None:
        """One small transaction of the watcher; `loaded`: bulk ran beside it."""
        (self.latencies.loaded if loaded else self.latencies.idle).append(latency_ms)

    def hush(self, until_s: float) -> None:
        """No bulk begins before `until_s`: the watcher listens to the database without it. A time that is past
        ends it."""
        self._hushed_until_s = until_s

    def observe(self, signals: Signals | None, now_s: float) -> None:
        """Every TICK_S. None, or signals that hold nothing: nobody answered."""
        if signals is None or signals.silent:
            return
        blind = self.blind(now_s) or self._was_blind
        self._heard_s = now_s
        before, self.signals = self.signals, signals
        if blind:  # this look only says from where to count
            self._restart()
            return
        self.pressed_by = judge(before, signals, self.latencies, self.limits.bounds)
        if self.pressed_by:
            self._press(now_s)
        else:
            self._ease()
        self.throttled = False
        self._taken, self._looked_s = 0.0, now_s

    def blind(self, now_s: float) -> bool:
        """Without a signal for SILENCE_S: then bulk runs at the floor rate."""
        if now_s - self._heard_s > SILENCE_S:
            self._was_blind = True
        return now_s - self._heard_s > SILENCE_S

    def effective_rate(self, now_s: float) -> float:
        return self.limits.rate_floor if self.blind(now_s) else self.rate

    def effective_rows(self, now_s: float) -> int:
        return self.limits.rows_least if self.blind(now_s) else self.rows

    def price(self, sink: str) -> Price:
        return self.prices.setdefault(sink, prior(()))

    def built_of(self, sink: str, parts: tuple[str, ...]) -> None:
        """Indexes and triggers of the sink's table. A table that changed has to be measured anew."""
        if self.price(sink).parts != parts:
            self.prices[sink] = prior(parts)

    def as_json(self, now_s: float) -> dict[str, Any]:
        """What it decided and why: stable keys, for `fabric status --json` and exporters."""
        seen = self.signals or Signals()
        return {
            "rate_bytes_per_s": self.effective_rate(now_s),
            "rows_per_transaction": self.effective_rows(now_s),
            "writers": self.writers,
            "blind": self.blind(now_s),
            "signal_age_s": now_s - self._heard_s,
            "pressed_by": list(self.pressed_by),
            "pressures": {name: self.pressures[name] for name in KINDS},
            "moves": {name: self.moves[name] for name in MOVES},
            "signals": asdict(seen),
            "commit_p90_ms": {
                name: p90(getattr(self.latencies, name)) for name in ("idle", "loaded", "own")
            },
            "classes": {name: asdict(item) for name, item in self.classes.items()},
            "prices": {
                name: {
                    "parts": list(item.parts),
                    "cpu_us_per_row": item.cpu_us,
                    "wal_per_byte": item.wal_per_byte,
                    "measured": item.measured,
                }
                for name, item in self.prices.items()
            },
        }

    # ---- levers

    def _press(self, now_s: float) -> None:
        self.pressures.update(self.pressed_by)
        self._calm = 0
        self._slow_start = False
        limits = self.limits
        only_delay = all(KINDS[name] == DELAY for name in self.pressed_by)
        # what is in these windows was measured before the move: it must not press a second time
        self.latencies.loaded.clear()
        self.latencies.own.clear()
        if only_delay and self.rows > limits.rows_least:
            self.rows = max(self.rows // 2, limits.rows_least)
            self.moves["smaller"] += 1
            return
        if only_delay and self.writers > 1:
            self.writers = 1
            self.moves["fewer_writers"] += 1
            return
        # down from what was written, or a rate that nobody reached is cut again and again without effect
        written = self._taken / (now_s - self._looked_s) if now_s > self._looked_s else 0.0
        reached = min(max(written, self.rate / 2), self.rate) if written else self.rate
        self.rate = max(reached * limits.backoff, limits.rate_floor)
        self._balance = min(self._balance, self._capacity)
        self.moves["slower"] += 1

    def _ease(self) -> None:
        """Upward only on evidence: while bulk wrote, and while it doubles after a whole window of probes beside it."""
        limits, heard = self.limits, len(self.latencies.loaded)
        if self._taken:
            self._calm += 1
        if self.throttled and self.rate < limits.rate_most:
            if self._slow_start and heard < limits.bounds.samples_least:
                return
            grown = self.rate + limits.step
            if self._slow_start:
                grown = self.rate * 2
                self.latencies.loaded.clear()
            self.rate = min(grown, limits.rate_most)
            self.moves["faster"] += 1
        elif self._taken and self._calm % limits.calm_ticks == 0:
            if self.rows < limits.rows_most:
                self.rows = min(self.rows * 2, limits.rows_most)
                self.moves["larger"] += 1
            elif self.writers < limits.writers_most:
                self.writers += 1
                self.moves["more_writers"] += 1

    def _restart(self) -> None:
        """Sight is back: what was right before the silence may be wrong now."""
        self._was_blind = False
        self.rate = max(self.limits.rate_floor, min(self.rate, self.limits.rate_start) / 2)
        self.rows = min(self.rows, self.limits.rows_start)
        self.writers = 1
        self._slow_start = True
        self.throttled = False
        self.moves["restarts"] += 1

    def _ended(self, leave: Pass) -> None:
        if leave.in_class == "bulk":
            self.in_flight -= 1
            assert self.in_flight >= 0

    @property
    def _capacity(self) -> float:
        return self.rate * TICK_S

    def _refill(self, now_s: float) -> None:
        assert now_s >= self._refilled_s, "time ran backwards"
        rate = self.effective_rate(now_s)
        gained = (now_s - self._refilled_s) * rate
        self._balance = min(self._balance + gained, rate * TICK_S)
        self._refilled_s = now_s


MOVES = ("smaller", "larger", "fewer_writers", "more_writers", "slower", "faster", "restarts")


def limits_of(*, floor: int, most: int, lag_bytes: int) -> Limits:
    """Limits with the operator's three numbers; `most` 0: whatever the database takes."""
    usual = Limits()
    top = float(most) if most else usual.rate_most
    return replace(
        usual,
        rate_floor=min(float(floor), top),
        rate_most=top,
        rate_start=min(usual.rate_start, top),
        bounds=replace(usual.bounds, replication_lag_bytes=lag_bytes),
    )
