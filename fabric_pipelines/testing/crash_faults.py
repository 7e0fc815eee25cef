"""A disk that fails under a living broker: a recorded life is lived again and again, and each time one call fails.

The law: after an error of the journal's disk nothing is acknowledged any more, and what was before is there after a
power cut at that moment, whatever of the rest became durable. A store that fails is no disk that fails: the life goes
on, and says that it failed. A full disk may refuse, wait or end the broker; it loses nothing either.
"""

from __future__ import annotations

import errno
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from fabric_pipelines.broker.owner import Fatal
from fabric_pipelines.errors import Backpressure, FabricError, StorageFailed
from fabric_pipelines.testing.crash_judge import LOST, Broken, Judge, require
from fabric_pipelines.testing.crash_life import Life
from fabric_pipelines.testing.sim_disk import SimDisk, crash_states

FATAL, REFUSED, WHOLE = "fatal", "refused", "whole"
ENDS = (FATAL, REFUSED, WHOLE)
CODES = (errno.EIO, errno.ENOSPC)
STATES_EACH = 2  # nothing of what was pending, and all of it
AGAIN = 70  # mark of a submission that no life has


class WatchedDisk(SimDisk):
    """Knows which calls were the store's: a folder that fails is a store that is away, not the journal's end. And which
    were those of a process that only makes a folder and is killed: the broker makes the same ones after it."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.of_the_store: set[int] = set()
        self.of_the_dying: set[int] = set()

    def _call(self, name: str) -> None:
        frame = sys._getframe(1)
        for _ in range(6):
            if frame.f_code.co_qualname.startswith("FolderStore."):
                self.of_the_store.add(self.calls)
                break
            if frame.f_code.co_name == Life.die_in_making.__name__:
                self.of_the_dying.add(self.calls)
                break
            if frame.f_back is None:
                break
            frame = frame.f_back
        super()._call(name)


def recorded() -> Life:
    """The life in which nothing fails."""
    return Life(WatchedDisk()).run()


def calls_of(life: Life) -> list[int]:
    """All that its broker made."""
    disk = life.disk
    assert isinstance(disk, WatchedDisk)
    return [at for at in range(disk.calls) if at not in disk.of_the_dying]


def lived(number: int, code: int) -> tuple[Life, str]:
    """A life in which that call fails, and how it ended."""
    life = Life(WatchedDisk(failing={number: code}))
    try:
        life.run()
    except Fatal:
        return life, FATAL
    except (StorageFailed, Backpressure):  # outcomes wait for room, new tasks are refused
        return life, REFUSED
    return life, WHOLE


def require_kept(life: Life, seed: int) -> int:
    """What a power cut after the failure may leave is held to what was acknowledged; how many states."""
    few = list(
        islice(crash_states(life.disk, seed=seed, subsets=0, since=len(life.disk.log)), STATES_EACH)
    )
    Judge(life).judge_all(few)
    return len(few)


def require_stopped(life: Life) -> None:
    """No acknowledgement leaves any more: a journal that failed refuses every further commit."""
    bench = getattr(life, "bench", None)
    if bench is None or not bench.disk._stopped:
        return  # it did not come up, or a checkpoint failed: the process ends either way
    before = len(life.promises)
    try:
        life.submit(AGAIN, [2])
    except (Fatal, FabricError):
        require(len(life.promises) == before, LOST, "something was acknowledged after the failure")
        return
    raise Broken(LOST, "a journal that failed took more")


@dataclass
class FaultJudge:
    """ends: by errno and end; calls, states: by errno, how many were made to fail and what was judged after it; broken:
    by kind."""

    life: Life = field(default_factory=recorded)
    ends: Counter[tuple[int, str]] = field(default_factory=Counter)
    calls: Counter[int] = field(default_factory=Counter)
    states: Counter[int] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)

    def judge(self, number: int, code: int, *, states: bool = True) -> str:
        """How the life ended in which that call fails; with `states` what is left is judged, too. Raises Broken."""
        name = self.life.disk.call_names[number]
        where = f"{errno.errorcode[code]} at call {number}, {name}: "
        self.calls[code] += 1
        try:
            failed, end = lived(number, code)
            self.ends[code, end] += 1
            self._require_law(failed, end, number, code)
            self.states[code] += require_kept(failed, number) if states else 0
        except Broken as broken:
            raise Broken(broken.kind, f"{where}{broken}") from broken
        except (AssertionError, ArithmeticError, LookupError, OSError, FabricError) as fault:
            raise Broken(LOST, f"{where}it ended in {fault!r}") from fault
        return end

    def _require_law(self, failed: Life, end: str, number: int, code: int) -> None:
        disk = self.life.disk
        assert isinstance(disk, WatchedDisk)
        if number in disk.of_the_store:
            require(end == WHOLE, LOST, f"the store failed, and the life ended {end}")
            said = [what for what in failed.counters if what.endswith("failures")]
            told = sum(failed.counters[what] for what in said) >= 1
            require(told, LOST, "the store failed, and nothing says so")
        elif code == errno.EIO:
            require(end != WHOLE, LOST, "the disk failed, and the life went on")
            require_stopped(failed)
        elif end == FATAL:
            require_stopped(failed)

    def count(self, say: Callable[[str], None] = lambda line: None) -> Iterator[str]:
        """Lets every call fail in each way, one at a time; a sentence for each law that was broken."""
        for code in CODES:
            for number in calls_of(self.life):
                try:
                    self.judge(number, code)
                except Broken as broken:
                    self.broken[broken.kind] += 1
                    yield str(broken)
            say(f"{errno.errorcode[code]} at each of {self.calls[code]} calls")

    def table(self) -> dict[str, dict[str, int]]:
        """By errno: calls, how the lives ended, states that were judged."""
        return {
            errno.errorcode[code]: {
                "calls": self.calls[code],
                **{end: self.ends[code, end] for end in ENDS},
                "states": self.states[code],
            }
            for code in CODES
        }
