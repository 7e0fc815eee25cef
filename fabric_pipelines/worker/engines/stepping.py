"""Stepping: the half of an engine that every batch-at-a-time runtime shares.

Submitted tasks wait in order; one step at a time runs in the engine's own thread, so `poll` honours its
timeout and a long step never starves the lease's heartbeat. The next step starts before the results of the
last one are handed out, and where work can be queued on a device, before they are there (`steps_most`). Any fault of the library fails the tasks of its step, each by name; after FAILED_STEPS_MAX
faults in a row that are no judgement of those tasks (`faults`) the engine declares itself broken.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import pyarrow as pa

from fabric_pipelines.clock import SYSTEM_CLOCK, Clock
from fabric_pipelines.errors import EngineFailed, FabricError, ManifestRefused
from fabric_pipelines.models.description import remedy_of_files
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.manifest import EngineManifest
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.worker.engines.agreement import Told, require_agreement
from fabric_pipelines.worker.engines.door import Capabilities, EngineStats
from fabric_pipelines.worker.engines.faults import ends_engine, is_judgement, told
from fabric_pipelines.worker.engines.one_thread import OneThread
from fabric_pipelines.worker.engines.opening import EngineFolder
from fabric_pipelines.worker.engines.tasks import (
    Outbox,
    Outcome,
    Task,
    failed,
    refusal_of,
    tasks_of,
)

LOG = logging.getLogger("fabric.worker")
FAILED_STEPS_MAX = 3


@dataclass(slots=True)
class _Step:
    tasks: list[Task]
    future: Future[list[Outcome]]
    started_us: int


class SteppingEngine(ABC):
    """Subclasses load and free the runtime, judge a task, cut a step and run it. steps_most: begun and not ended."""

    steps_most = 1
    _folder: EngineFolder  # of those that are opened from files

    def __init__(
        self,
        name: str,
        manifest: EngineManifest,
        fingerprint: str,
        capabilities: Capabilities,
        profile: Profile,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.name = name
        self.manifest = manifest
        self.fingerprint = fingerprint
        self.capabilities = capabilities
        self.profile = profile
        self.stats = EngineStats()
        self._clock = clock
        self._pending: list[Task] = []
        self._steps: deque[_Step] = deque()
        self._outbox = Outbox(name, fingerprint)
        self._thread: OneThread | None = None
        self._failed_steps = 0
        self._fault: EngineFailed | None = None

    @abstractmethod
    def _load(self) -> None:
        """Bring the runtime up; ManifestRefused on a contradiction, RuntimeError when the files are no good."""

    def _ready(self) -> None:  # noqa: B027 - most runtimes take nothing beforehand
        """The runtime is up and agrees with its manifest: take what every step needs. RuntimeError when there is no room."""

    @abstractmethod
    def _free(self) -> None:
        """Let the runtime go."""

    @abstractmethod
    def introspect(self) -> Mapping[str, Told]:
        """See door.Engine."""

    @abstractmethod
    def _objection(self, task: Task) -> str | None:
        """Why this task's sampling cannot be served, or None. Length is judged before."""

    @abstractmethod
    def _cut(self, pending: Sequence[Task]) -> list[Task]:
        """The tasks of the next step; at least one, all of one group."""

    @abstractmethod
    def _run(self, tasks: list[Task]) -> list[Outcome]:
        """Compute, in the engine's thread; one outcome a task. An exception fails the whole step."""

    def open(self) -> None:
        if self._thread is None:
            try:
                self._load()
            except FabricError:
                raise
            except Exception as fault:
                folder: EngineFolder | None = getattr(self, "_folder", None)
                way = "" if folder is None else f": {remedy_of_files(folder.path)}"
                raise EngineFailed(f"{self.name} cannot be loaded ({told(fault)}){way}") from fault
            try:
                require_agreement(self.manifest, self.name, self.introspect())
            except ManifestRefused:
                self._free()
                raise
            try:
                self._ready()
            except Exception as fault:
                self._free()
                raise EngineFailed(
                    f"{self.name} cannot take a step of its largest size ({told(fault)}): describe it with a smaller "
                    "--max-num-tokens or --max-batch-size"
                ) from fault
            self._thread = OneThread(self.name)

    def submit(self, lease: Lease) -> None:
        assert self._thread is not None, f"{self.name} is not open"
        now_us = self._clock.wall_us()
        for task in tasks_of(lease):
            self.stats.offered_tokens += task.length
            refusal = refusal_of(task, self.manifest, self.name, self._objection)
            if refusal is None:
                self._pending.append(task)
            else:
                refusal.started_us = refusal.ended_us = now_us
                self._outbox.outcomes.append(refusal)

    def poll(self, timeout_s: float) -> list[pa.RecordBatch]:
        assert self._thread is not None, f"{self.name} is not open"
        if self._fault is not None:
            raise self._fault
        self._start_steps()
        if self._steps and not self._outbox.outcomes:
            wait([self._steps[0].future], timeout_s)
        if self._steps and self._steps[0].future.done():
            finished = self._steps.popleft()
            self._start_steps()
            try:
                self._collect(finished)
            except EngineFailed as fault:
                if not self._outbox.outcomes:
                    raise
                self._fault = fault  # what ended before it is handed out first
        return self._outbox.take()

    def _start_steps(self) -> None:
        while self._pending and len(self._steps) < self.steps_most and self._thread is not None:
            tasks = self._cut(self._pending)
            assert tasks, "a cut takes at least one task"
            chosen = {id(task) for task in tasks}
            self._pending = [task for task in self._pending if id(task) not in chosen]
            self.stats.add_step(len(tasks), sum(task.length for task in tasks), self.profile)
            started_us = self._clock.wall_us()
            self._steps.append(_Step(tasks, self._begin(tasks, self._thread), started_us))

    def _begin(self, tasks: list[Task], thread: OneThread) -> Future[list[Outcome]]:
        return thread.submit(self._timed_run, tasks)

    def _timed_run(self, tasks: list[Task]) -> list[Outcome]:
        started = time.perf_counter()
        try:
            return self._run(tasks)
        finally:
            self.stats.busy_s += time.perf_counter() - started

    def _collect(self, step: _Step) -> None:
        try:
            outcomes = step.future.result()
        except AssertionError:  # a bug of ours, no fault of a library
            raise
        except Exception as fault:  # noqa: BLE001 - libraries raise what they like; `faults` tells what it means
            self._require_whole(step, fault)
            outcomes = [failed(task, "EngineFailed", told(fault)) for task in step.tasks]
        else:
            answered = sorted(id(outcome.task) for outcome in outcomes)
            if answered != sorted(id(task) for task in step.tasks):
                self._pending = [*step.tasks, *self._pending]
                raise EngineFailed(
                    f"{self.name} gave {len(outcomes)} results to {len(step.tasks)} tasks, not one each: "
                    "its results cannot be trusted"
                )
            self._failed_steps = 0
        ended_us = self._clock.wall_us()
        for outcome in outcomes:
            outcome.started_us, outcome.ended_us = step.started_us, ended_us
        self.stats.tasks += len(outcomes)
        self._outbox.outcomes.extend(outcomes)

    def _require_whole(self, step: _Step, fault: Exception) -> None:
        """EngineFailed when `fault` means the engine itself; the step's tasks then stay unfinished."""
        if is_judgement(fault):
            LOG.warning("%s failed a step of %d tasks: %s", self.name, len(step.tasks), told(fault))
            return
        self._failed_steps += 1
        if ends_engine(fault):
            why = f"{self.name} is broken: {told(fault)}"
        elif self._failed_steps >= FAILED_STEPS_MAX:
            why = (
                f"{self.name} failed {self._failed_steps} steps in a row, last with: {told(fault)}"
            )
        else:
            return
        self._pending = [*step.tasks, *self._pending]
        raise EngineFailed(why) from fault

    def unfinished(self) -> list[int]:
        running = [task for step in self._steps for task in step.tasks]
        waiting = [outcome.task for outcome in self._outbox.outcomes]
        return [task.task_id for task in (*waiting, *running, *self._pending)]

    def withdraw_unstarted(self) -> list[int]:
        withdrawn, self._pending = self._pending, []
        return [task.task_id for task in withdrawn]

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
            self._free()
