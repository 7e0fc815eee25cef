"""The one thread that touches TensorRT-LLM: an event loop with one task a request.

A request's result can be awaited only if it was made inside a running loop, so both happen here. The library gets a bounded
number of requests and queues what it cannot run at once; the rest waits on our side, where it can be taken back. The
thread is a daemon: a wedged runtime must not keep the process alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fabric_pipelines.clock import Clock
from fabric_pipelines.worker.engines.by_request import RequestDriver
from fabric_pipelines.worker.engines.faults import ends_engine, is_judgement, told
from fabric_pipelines.worker.engines.stepping import FAILED_STEPS_MAX
from fabric_pipelines.worker.engines.tasks import Task

STALL_S = 86_400.0  # the worker loop comes first, by its setting; for callers without a loop
JOIN_S = 10.0


@dataclass(slots=True, eq=False)
class Request:
    """A task on its way; `params` is the library's own SamplingParams object."""

    task: Task
    params: Any
    added_us: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """`output` is the library's RequestOutput; None when the request was not taken (`refusal`) or broke (`fault`)."""

    request: Request
    output: Any
    refusal: str
    fault: str
    ended_us: int


class Driver(RequestDriver):
    """submit: makes the library's request of a task and its parameters, in the loop; inside_max: requests that the
    library holds at most."""

    def __init__(
        self,
        submit: Callable[[Request], Any],
        name: str,
        *,
        inside_max: int,
        clock: Clock,
    ) -> None:
        super().__init__(name, clock)
        self._submit, self._inside_max = submit, inside_max
        self._waiting: deque[Request] = deque()
        self._inside: dict[int, Request] = {}
        self._closing = False
        self._failed = 0  # in a row
        self._ended_s = clock.monotonic_s()
        self._busy_since_s: float | None = None
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=f"{name}-requests", daemon=True)
        self._thread.start()

    # ---- the worker loop's side

    def add(self, requests: Sequence[Request]) -> None:
        with self._changed:
            self._waiting.extend(requests)
        self._wake()

    def tasks(self) -> list[Task]:
        """Every task that was added and not taken."""
        with self._changed:
            ended = [answer.request for answer in self._answers]
            return [request.task for request in (*ended, *self._inside.values(), *self._waiting)]

    def withdraw(self) -> list[Task]:
        """Take back what the library was not given yet; what it queues itself cannot be told from what runs."""
        with self._changed:
            taken = [request.task for request in self._waiting]
            self._waiting.clear()
            return taken

    def close(self) -> None:
        with self._changed:
            self._closing = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(JOIN_S if self._fault is None else 0.1)

    def _wedged(self) -> str:
        quiet_s = self._clock.monotonic_s() - self._ended_s
        if not self._inside or quiet_s <= STALL_S:
            return ""
        return f"nothing ended for {quiet_s:.0f} s with {len(self._inside)} requests inside"

    # ---- the thread's side

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except (
            BaseException
        ) as fault:  # a library that calls exit() ends this thread, and nobody would serve again
            with self._changed:
                self._fault = self._fault or fault
                self._changed.notify_all()
            raise
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    def _wake(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._fill)

    def _fill(self) -> None:
        while (request := self._next()) is not None:
            task = self._loop.create_task(self._serve(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next(self) -> Request | None:
        with self._changed:
            full = len(self._inside) >= self._inside_max
            if full or not self._waiting or self._closing or self._fault is not None:
                return None
            request = self._waiting.popleft()
            if not self._inside:
                self._ended_s = self._busy_since_s = self._clock.monotonic_s()
            self._inside[request.task.task_id] = request
            request.added_us = self._clock.wall_us()
            return request

    async def _serve(self, request: Request) -> None:
        try:
            output = await self._submit(request).aresult()
        except Exception as fault:  # noqa: BLE001 - the library's faults share no base
            if is_judgement(fault):  # of this request
                why = str(fault) if isinstance(fault, ValueError) else told(fault)
                self._end(request, None, refusal=why)
            else:
                self._broke(request, fault)
        except (
            asyncio.CancelledError
        ) as fault:  # no Exception, and nobody here cancels before the end
            if self._closing:
                raise
            self._broke(request, fault)
        else:
            self._failed = 0
            self._end(request, output)

    def _broke(self, request: Request, fault: BaseException) -> None:
        """One request may break alone; several in a row are the runtime's end, and stay unfinished."""
        self._failed += 1
        if self._failed < FAILED_STEPS_MAX and not ends_engine(fault):
            self._end(request, None, fault=told(fault))
            return
        with self._changed:
            self._fault = self._fault or fault
            self._changed.notify_all()

    def _end(self, request: Request, output: Any, *, refusal: str = "", fault: str = "") -> None:
        now = self._clock.monotonic_s()
        with self._changed:
            del self._inside[request.task.task_id]
            self._answers.append(Answer(request, output, refusal, fault, self._clock.wall_us()))
            self._ended_s = now
            if self._busy_since_s is not None:
                self.busy_s += now - self._busy_since_s
                self._busy_since_s = now if self._inside else None
            self._changed.notify_all()
        self._fill()
