"""Functions whose rows cannot land for now, each with its own reason and its own pause.

Keeps no rows: those of a function that waits lie with the broker, which is told to pass them over. One function at a time
is tried again, with a few of its rows, so that a lock that somebody holds costs one writer and no more. Refuses to judge
what may wait: whoever lands says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PAUSE_LEAST_S = 0.1
PAUSE_MOST_S = 5.0


def longer(pause_s: float) -> float:
    return min(max(pause_s * 2, PAUSE_LEAST_S), PAUSE_MOST_S)


@dataclass(slots=True)
class _Wait:
    reason: str
    pause_s: float
    again_s: float
    failed: bool = True  # since it was last tried


class Waiting:
    """clock_s: monotonic. say: one line to people when a function begins to wait and when it goes on."""

    def __init__(self, clock_s: Callable[[], float], say: Callable[[str], None]) -> None:
        self._clock_s, self._say = clock_s, say
        self._waits: dict[str, _Wait] = {}

    def __contains__(self, function: str) -> bool:
        return function in self._waits

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(self._waits)

    @property
    def reasons(self) -> dict[str, str]:
        """By function, for what it waits."""
        return {function: wait.reason for function, wait in self._waits.items()}

    def failed(self, function: str, reason: str) -> None:
        """Its rows were refused, now or once more."""
        wait = self._waits.get(function)
        if wait is None:
            wait = self._waits[function] = _Wait(reason, 0.0, 0.0, failed=False)
            self._say(f"function {function} waits, its tasks stay with the broker: {reason}")
        if not wait.failed:  # several landings of it that ran at once are one trial
            wait.pause_s = longer(wait.pause_s)
        wait.reason, wait.failed = reason, True
        wait.again_s = self._clock_s() + wait.pause_s

    def due_in_s(self) -> float:
        """Until the next is to be tried; for ever where none waits."""
        next_s = min((wait.again_s for wait in self._waits.values()), default=float("inf"))
        return max(next_s - self._clock_s(), 0.0)

    def try_next(self) -> str | None:
        """The function that is to be tried now, as the one that has waited for it longest."""
        if self.due_in_s() > 0 or not self._waits:
            return None
        function = min(self._waits, key=lambda name: self._waits[name].again_s)
        self._waits[function].failed = False
        return function

    def tried(self, function: str) -> None:
        """What was tried of it is through: it goes on, unless a part of that failed."""
        if function in self._waits and not self._waits[function].failed:
            del self._waits[function]
            self._say(f"function {function} goes on")
