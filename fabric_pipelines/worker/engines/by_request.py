"""The door's side of an engine whose driver takes requests one by one and hands answers back as they end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa

from fabric_pipelines.errors import EngineFailed
from fabric_pipelines.worker.engines.door import EngineStats
from fabric_pipelines.worker.engines.tasks import Outbox, Outcome, Task


class RequestDriver(Protocol):
    """An answer has the `request` it is to, with its task and when it was added, and when it ended, in us."""

    busy_s: float

    def take(self, timeout_s: float) -> Sequence[Any]: ...
    def tasks(self) -> list[Task]: ...
    def withdraw(self) -> list[Task]: ...


D = TypeVar("D", bound=RequestDriver)


class ByRequest(ABC, Generic[D]):
    """`_driver` is there while the engine is open."""

    name: str
    stats: EngineStats
    _outbox: Outbox
    _driver: D | None

    @abstractmethod
    def _judge(self, answer: Any) -> Outcome:
        """What became of its task, and what it cost in tokens."""

    def poll(self, timeout_s: float) -> list[pa.RecordBatch]:
        driver = self._opened()
        ready = bool(self._outbox.outcomes)
        answers: Sequence[Any] = ()
        try:
            answers = driver.take(0.0 if ready else timeout_s)
        except EngineFailed:
            if not ready:
                raise
        self._outbox.outcomes.extend(self._outcome(answer) for answer in answers)
        self.stats.busy_s = driver.busy_s
        return self._outbox.take()

    def _outcome(self, answer: Any) -> Outcome:
        outcome = self._judge(answer)
        outcome.started_us, outcome.ended_us = answer.request.added_us, answer.ended_us
        self.stats.tasks += 1
        return outcome

    def unfinished(self) -> list[int]:
        ended = [outcome.task.task_id for outcome in self._outbox.outcomes]
        return [*ended, *(task.task_id for task in self._opened().tasks())]

    def withdraw_unstarted(self) -> list[int]:
        return [task.task_id for task in self._opened().withdraw()]

    def _opened(self) -> D:
        assert self._driver is not None, f"{self.name} is not open"
        return self._driver
