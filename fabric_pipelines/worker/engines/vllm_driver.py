"""The one thread that touches vLLM's engine: adds requests, steps, aborts.

vLLM's sockets belong to one thread and its `step` blocks until its scheduler, a process of its own, has done one.
So the loop puts requests into an inbox and takes answers from a list, with a timeout of its own; while it waits for
the broker's disk, the steps go on. Requests are added in groups: vLLM puts a prompt into the next step whatever else runs, and
a step that mixes both leaves the path of steps that only generate (captured whole as a graph, attention laid out for
one token a sequence). So a place that comes free waits until `group` of them are. A fault of vLLM ends the thread and is raised in the loop, after all answers
that came before it. The thread is a daemon: a wedged runtime must not keep the process alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fabric_pipelines.clock import Clock
from fabric_pipelines.device import calls
from fabric_pipelines.worker.engines.by_request import RequestDriver
from fabric_pipelines.worker.engines.faults import ends_engine, told
from fabric_pipelines.worker.engines.tasks import Task

ADDS_PER_TURN = 256  # 0.1 ms each: more would keep finished requests waiting for a step's time
STALL_S = 86_400.0  # the worker loop comes first, by its setting; for callers without a loop
WITHDRAW_S = 30.0
JOIN_S = 10.0
ENDS = (RuntimeError, OSError, AssertionError)  # of adding a request: vLLM's own, not the request's


@dataclass(slots=True, eq=False)
class Request:
    """A task on its way through vLLM; `params` is its own SamplingParams object."""

    task: Task
    params: Any
    added_us: int = 0

    @property
    def request_id(self) -> str:
        return str(self.task.task_id)


@dataclass(frozen=True, slots=True)
class Answer:
    """`output` is vLLM's RequestOutput, None when it would not take the request; then `refusal` says why."""

    request: Request
    output: Any
    refusal: str
    ended_us: int


class Driver(RequestDriver):
    """engine: vLLM's LLMEngine; prompt_of: how it wants token ids to be wrapped; is_dead: whether its scheduler
    process is known to be gone (killed, it leaves `step` blocked for ever); places: sequences that it runs at once;
    group: so many of them must be free before requests are added."""

    def __init__(
        self,
        engine: Any,
        name: str,
        *,
        prompt_of: Callable[[list[int]], Any],
        is_dead: Callable[[], bool],
        clock: Clock,
        places: int,
        group: int,
    ) -> None:
        super().__init__(name, clock)
        assert 1 <= group <= places, "an empty engine takes a group"
        self.places, self.group = places, group
        self._engine, self._prompt_of, self._is_dead = engine, prompt_of, is_dead
        self._inbox: list[Request] = []
        self._inside: dict[str, Request] = {}
        self._withdrawn: list[Request] = []
        self._asked_back = False
        self._closing = False
        self._stepped_s = clock.monotonic_s()
        self.steps = 0
        self._thread = threading.Thread(target=self._run, name=f"{name}-steps", daemon=True)
        self._thread.start()

    # ---- the loop's side

    @property
    def inside(self) -> int:
        """Requests that vLLM holds, running or waiting."""
        return len(self._inside)

    def add(self, requests: Sequence[Request]) -> None:
        with self._changed:
            self._inbox.extend(requests)
            self._changed.notify_all()

    def tasks(self) -> list[Task]:
        """Every task that was added and not taken."""
        with self._changed:
            ended = [answer.request for answer in self._answers]
            held = [*ended, *self._inside.values(), *self._withdrawn, *self._inbox]
            return [request.task for request in held]

    def withdraw(self) -> list[Task]:
        """Take back what has not produced a token. After a fault only what vLLM never saw: which of the others
        brought it down is not known."""
        with self._changed:
            taken, self._inbox = self._inbox, []
            if self._inside and self._fault is None:
                self._asked_back = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._asked_back or self._fault, WITHDRAW_S)
                self._asked_back = (
                    False  # nobody waits for what a step that outlasts it would give back
                )
            taken, self._withdrawn = [*self._withdrawn, *taken], []
            return [request.task for request in taken]

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        # After a fault the thread has ended, or is blocked in vLLM for good.
        self._thread.join(JOIN_S if self._fault is None else 0.0)

    def _wedged(self) -> str:
        quiet_s = self._clock.monotonic_s() - self._stepped_s
        if not self._inside:
            return ""
        if self._is_dead():
            return "its scheduler process has ended"
        if quiet_s > STALL_S:
            return f"it made no step for {quiet_s:.0f} s with {len(self._inside)} requests inside"
        return ""

    # ---- the thread's side

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as fault:  # noqa: BLE001 - vLLM's faults share no base; `take` raises it again
            with self._changed:
                self._fault = self._fault or fault
                self._changed.notify_all()

    def _turn(self) -> bool:
        with self._changed:
            self._changed.wait_for(self._has_work)
            if self._closing:
                return False
            count = self._wanted()
            fresh, self._inbox = self._inbox[:count], self._inbox[count:]
            asked_back = self._asked_back
            if fresh and not self._inside:
                self._stepped_s = self._clock.monotonic_s()
            self._inside.update((request.request_id, request) for request in fresh)
        started_s = self._clock.monotonic_s()
        refusals = [answer for request in fresh if (answer := self._admit(request)) is not None]
        if refusals:
            self._hand_out(refusals)
        if asked_back:
            self._give_back()
        if self._inside:
            self._step()
            self.busy_s += self._clock.monotonic_s() - started_s
        return True

    def _wanted(self) -> int:
        """How many requests to add now."""
        free = self.places - len(self._inside)
        return min(free, ADDS_PER_TURN) if free >= self.group else 0

    def _has_work(self) -> bool:
        return bool(self._inbox or self._inside or self._asked_back or self._closing)

    def _admit(self, request: Request) -> Answer | None:
        """The answer when vLLM refuses this one (its validation errors are ValueErrors, but a value of a wrong
        kind meets any error of Python first), else None. What tells of vLLM itself goes through."""
        request.added_us = self._clock.wall_us()
        try:
            prompt = self._prompt_of(request.task.tokens.tolist())
            self._engine.add_request(request.request_id, prompt, request.params)
        except Exception as fault:
            if isinstance(fault, ENDS) or ends_engine(fault) or self._is_dead():
                raise
            why = str(fault) if isinstance(fault, ValueError) else told(fault)
            return Answer(request, None, why, self._clock.wall_us())
        return None

    def _step(self) -> None:
        with calls.engine():
            outputs = self._engine.step()
        self.steps += 1
        self._stepped_s = self._clock.monotonic_s()
        ended_us = self._clock.wall_us()
        self._hand_out(
            [
                Answer(self._inside[output.request_id], output, "", ended_us)
                for output in outputs
                if output.finished
            ]
        )

    def _hand_out(self, answers: list[Answer]) -> None:
        if answers:
            with self._changed:
                for answer in answers:
                    del self._inside[answer.request.request_id]
                self._answers.extend(answers)
                self._changed.notify_all()

    def _give_back(self) -> None:
        """Abort what produced no token yet: vLLM's output processor knows it as still prefilling."""
        states = self._engine.output_processor.request_states.values()
        waiting = [state.external_req_id for state in states if state.is_prefilling]
        if waiting:
            self._engine.abort_request(waiting)
        with self._changed:
            taken = [self._inside.pop(request_id) for request_id in waiting]
            if self._asked_back:
                self._withdrawn.extend(taken)
            else:  # asked for and given up meanwhile: they run here after all
                self._inbox[:0] = taken
            self._asked_back = False
            self._changed.notify_all()
