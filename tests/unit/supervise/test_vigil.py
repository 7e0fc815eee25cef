"""What `fabric up` says while it waits."""

from __future__ import annotations

from fabric_pipelines.supervise.place import ProcessState
from fabric_pipelines.supervise.vigil import HEARTBEAT_S, Vigil
from fabric_pipelines.waits import Wait


class Night:
    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.lines: list[str] = []
        self.vigil = Vigil(lambda: self.waits, self.lines.append, begun_s=100.0)

    def look(self, at_s: float, **states: str) -> list[str]:
        """Lines that this look adds; a process's pid is the length of its name."""
        before = len(self.lines)
        found = [ProcessState(name, state, len(name), 0, "", "") for name, state in states.items()]
        self.vigil.look(found, 100.0 + at_s)
        return self.lines[before:]


def test_a_reason_is_said_at_once_once_and_again_by_the_heartbeat() -> None:
    night = Night()
    assert night.look(0.1, completion="starting") == []
    night.waits = [Wait("completion", len("completion"), "no Postgres answers", 0.0)]
    assert night.look(1, completion="starting") == ["completion waits: no Postgres answers"]
    assert night.look(1 + HEARTBEAT_S - 0.1, completion="starting") == []
    assert night.look(1 + HEARTBEAT_S, completion="starting") == [
        "completion still waits after 11 s: no Postgres answers"
    ]
    night.waits = [Wait("completion", len("completion"), "it starts up", 0.0)]
    assert night.look(13, completion="starting") == ["completion waits: it starts up"]
    assert night.look(100, completion="running", broker="running") == []


def test_who_gives_no_reason_is_named_by_the_heartbeat_and_others_waits_are_not_ours() -> None:
    night = Night()
    night.waits = [Wait("completion of another home's", 7777, "no Postgres answers", 0.0)]
    assert night.look(9, broker="running", completion="starting", ui="waiting") == []
    assert night.look(10, broker="running", completion="starting", ui="waiting") == [
        "not running after 10 s: completion (starting), ui (waiting)"
    ]
    assert night.look(15, broker="running", completion="starting", ui="waiting") == []
    assert len(night.look(20, completion="starting")) == 1


def test_a_start_that_takes_no_time_says_nothing() -> None:
    night = Night()
    assert night.look(0.5, broker="starting") == []
    assert night.look(99, broker="running") == []
