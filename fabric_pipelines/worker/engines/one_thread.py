"""One daemon thread that runs what it is given in order. The library's executor is joined when the interpreter ends, whatever its
thread does; a step that hangs must not keep a worker that has said so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class OneThread:
    """`submit` and `shutdown` are those of concurrent.futures' executors."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[P, R], /, *given: P.args, **named: P.kwargs) -> Future[R]:
        future: Future[R] = Future()
        self._work.put((future, lambda: work(*given, **named)))  # type: ignore[arg-type]
        return future

    def shutdown(self) -> None:
        """What runs is waited for, what waits is cancelled."""
        while not self._work.empty():
            waiting = self._work.get()
            if waiting is not None:
                waiting[0].cancel()
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (next_one := self._work.get()) is not None:
            future, work = next_one
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as fault:  # noqa: BLE001 - it is raised where the result is asked for
                    future.set_exception(fault)
