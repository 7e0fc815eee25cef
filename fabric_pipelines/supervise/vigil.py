"""What `fabric up` says while it waits: the reason of a process that waits as soon as it has one, then a heartbeat.

Decides only what is to be said; who looks, how often and where it is printed is the caller's. A reason is said once,
however often it is given; the heartbeat says it again, with how long it has been.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fabric_pipelines.supervise.place import ProcessState
from fabric_pipelines.waits import Wait

HEARTBEAT_S = 10.0


@dataclass(slots=True)
class Vigil:
    """waits: whoever waits in this home now; say: one line to a person; begun_s: when the waiting for all began."""

    waits: Callable[[], Sequence[Wait]]
    say: Callable[[str], None]
    begun_s: float
    _said: dict[str, str] = field(default_factory=dict)
    _beat_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._beat_s = self.begun_s

    def look(self, processes: Sequence[ProcessState], now_s: float) -> None:
        late = [item for item in processes if item.state != "running"]
        if not late:
            return
        reasons = {wait.pid: wait.reason for wait in self.waits()}
        found = {item.name: reasons[item.pid] for item in late if item.pid in reasons}
        for name, reason in found.items():
            if self._said.get(name) != reason:
                self.say(f"{name} waits: {reason}")
                self._beat_s = now_s
        self._said = found
        if now_s - self._beat_s >= HEARTBEAT_S:
            self._beat_s = now_s
            self._beat(late, now_s - self.begun_s)

    def _beat(self, late: Sequence[ProcessState], seconds: float) -> None:
        for item in late:
            if reason := self._said.get(item.name):
                self.say(f"{item.name} still waits after {seconds:.0f} s: {reason}")
        silent = [f"{item.name} ({item.state})" for item in late if item.name not in self._said]
        if silent:
            self.say(f"not running after {seconds:.0f} s: {', '.join(silent)}")
