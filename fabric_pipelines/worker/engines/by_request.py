"""The door's side of an engine whose driver takes requests one by one and hands answers back as they end."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import pyarrow as pa

from fabric_pipelines.clock import Clock
from fabric_pipelines.errors import EngineFailed
from fabric_pipelines.worker.engines.door import EngineStats
from fabric_pipelines.worker.engines.faults import told
from fabric_pipelines.worker.engines.tasks import Outbox, Outcome, Task, failed


class RequestDriver(ABC):
    """What is the same of the threads that touch an engine's library: how answers and the end of it reach the loop.

    `_changed` guards what both sides touch. An answer has the `request` it is to, with its task and when it was added,
    and when it ended, in us. A fault of the library is raised once everything that ended before it was taken.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock
        self._changed = threading.Condition()
        self._answers: list[Any] = []
        self._fault: BaseException | None = None
        self.busy_s = 0.0

    def take(self, timeout_s: float) -> list[Any]:
        """What has ended since; waits at most `timeout_s` for the first. EngineFailed once nothing more will
        come: everything that ended before was handed out."""
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self._fault, timeout_s)
            answers, self._answers = self._answers, []
            if not answers:
                self._require_alive()
            return answers

    def _require_alive(self) -> None:
        if self._fault is None and (wedged := self._wedged()):
            self._fault = RuntimeError(wedged)
        if self._fault is not None:
            kind, text = type(self._fault).__name__, str(self._fault).strip()
            raise EngineFailed(
                f"{self._name} failed: {kind}: {text}" if text else f"{self._name} failed: {kind}"
            ) from self._fault

    @abstractmethod
    def _wedged(self) -> str:
        """Why nothing more will come though the library raised nothing; empty while it works."""

    @abstractmethod
    def tasks(self) -> list[Task]:
        """Every task that was added and not taken."""

    @abstractmethod
    def withdraw(self) -> list[Task]:
        """Take back what can still be run elsewhere at no loss."""


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
        try:
            outcome = self._judge(answer)
        except Exception as fault:  # noqa: BLE001 - an answer of an unknown shape is this task's alone
            outcome = failed(answer.request.task, "EngineFailed", told(fault))
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
