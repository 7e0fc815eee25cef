"""The two clocks, as values that can be handed in.

`monotonic_s` measures how long; `wall_us` names when (UTC, microseconds since 1970). Nothing below the
rim reads a clock by itself: the core takes time as an argument, which lets a test run a year in a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    monotonic_s: Callable[[], float]
    wall_us: Callable[[], int]


SYSTEM_CLOCK = Clock(monotonic_s=time.monotonic, wall_us=lambda: time.time_ns() // 1000)
