"""Patience: how long a producer waits for a broker that is full or away, and what a person sees meanwhile.

A full broker says when to ask again (`retry_after_s`); nobody asks sooner, and a random share on top keeps many
producers that were refused together from coming back together. A broker that is away is tried at growing intervals.
Both share one limit, after which the broker's own error goes to the caller. Nobody waits for a broker that was never
there: one that did not answer this caller is waited for while a keeper starts it again, and no longer. Sleeps through
what it is given, so that a test of an hour takes no time.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fabric_pipelines.clock import SYSTEM_CLOCK, Clock
from fabric_pipelines.errors import Backpressure, BrokerUnavailable

JITTER = 0.5  # of the wait, at most, on top of it
AWAY_FIRST_S = 0.2
AWAY_MOST_S = 5.0


@dataclass(slots=True)
class Patience:
    """limit_s: of waiting without progress. say: gets one line before each wait. keeper: who starts a broker again,
    in words, "" for nobody (broker/keeper.py). draw: uniform in [0, 1)."""

    limit_s: float
    say: Callable[[str], None] | None = None
    keeper: Callable[[], str] = str
    clock: Clock = SYSTEM_CLOCK
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = random.random
    waits: int = 0
    _since_s: float | None = field(default=None, init=False)
    _away_s: float = field(default=AWAY_FIRST_S, init=False)

    def progressed(self) -> None:
        """The broker took something: the limit counts from the next refusal."""
        self._since_s, self._away_s = None, AWAY_FIRST_S

    def wait(
        self,
        fault: Backpressure | BrokerUnavailable,
        *,
        answered: bool = True,
        most_s: float = math.inf,
    ) -> None:
        """Return when it is time to ask again, within `most_s`; raise `fault` if that would be past the limit, or for
        a broker that is away, has not `answered` the caller so far and has no keeper."""
        keeper = ""
        if isinstance(fault, BrokerUnavailable):
            keeper = self.keeper()
            if not answered and not keeper:
                raise fault
        now_s = self.clock.monotonic_s()
        if self._since_s is None:
            self._since_s = now_s
        if isinstance(fault, Backpressure):
            told_s, why = max(fault.retry_after_s, 0.0), "waiting for room in the broker"
        else:
            told_s, why = self._away_s, "waiting for the broker"
            self._away_s = min(2 * self._away_s, AWAY_MOST_S)
        pause_s = min(told_s * (1 + JITTER * self.draw()), most_s)
        if now_s + pause_s - self._since_s > self.limit_s:
            raise self._given_up(fault, keeper)
        self.waits += 1
        if self.say is not None:
            # the remedy of the error, to start one, is not for a broker that somebody starts
            self.say(f"{why}, asking again in {pause_s:.1f} s: {keeper or fault}")
        self.sleep(pause_s)

    def _given_up(
        self, fault: Backpressure | BrokerUnavailable, keeper: str
    ) -> Backpressure | BrokerUnavailable:
        if not keeper or type(fault) is not BrokerUnavailable:
            return fault
        return BrokerUnavailable(
            f"no broker answered for {self.limit_s:g} s, although {keeper}: `fabric status` shows how it ended, and its "
            "log why"
        )
