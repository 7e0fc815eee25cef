"""The two clocks, as values that can be handed in.

`monotonic_s` measures how long; `wall_us` names when (UTC, microseconds since 1970). Nothing below the
rim reads a clock by itself: the core takes time as an argument, which lets a test run a year in a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

STEP_US = 1_000_000  # less is a clock being slewed


@dataclass(frozen=True, slots=True)
class Clock:
    monotonic_s: Callable[[], float]
    wall_us: Callable[[], int]


SYSTEM_CLOCK = Clock(monotonic_s=time.monotonic, wall_us=lambda: time.time_ns() // 1000)


class ForwardWall:
    """The wall clock as a log may tell it: where the system's steps back, it stands still until that has caught up.
    steps_back: how often that happened, by more than a second."""

    __slots__ = ("_behind", "_clock", "_latest_us", "steps_back")

    def __init__(self, clock: Clock) -> None:
        self._clock, self._latest_us, self._behind = clock, 0, False
        self.steps_back = 0

    def us(self) -> int:
        now_us = self._clock.wall_us()
        behind = now_us < self._latest_us - STEP_US
        self.steps_back += behind and not self._behind
        self._behind = behind
        self._latest_us = max(self._latest_us, now_us)
        return self._latest_us
