"""The loop of the supervisor process: start in order, restart what ends, stop in reverse order.

It blocks its signals and waits for them, so there is no handler and no race between a look and a sleep; its process
has one thread, since another would take signals that are meant for the process. It refuses nothing and gives up on
nothing: what cannot be kept up is shown in the state with its last exit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

from fabric_pipelines.supervise.child import Child
from fabric_pipelines.supervise.ground import Ground, leave_words
from fabric_pipelines.supervise.orphans import end_marked
from fabric_pipelines.supervise.place import MARK_NAME, Place, ProcessState
from fabric_pipelines.supervise.spec import ProcessSpec, levels

WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
IDLE_S = 5.0
ORPHAN_GRACE_S = 5.0
FALL_GRACE_S = 3.0


class Supervisor:
    def __init__(
        self,
        table: Sequence[ProcessSpec],
        place: Place,
        *,
        ui_url: str,
        say: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
        look: Callable[[Sequence[ProcessState], float], None] = lambda found, now_s: None,
        started_by: str = "",
    ) -> None:
        self._levels = levels(table)
        self._ground = Ground(place)
        self._place, self._ui_url, self._say, self._now_s = place, ui_url, say, now_s
        self._look, self._started_by = look, started_by
        environment = {**os.environ, MARK_NAME: place.mark, "PYTHONUNBUFFERED": "1"}
        self.children = {
            spec.name: Child(spec, place.log_of(spec.name), environment, say) for spec in table
        }
        self.lost = ""  # what it says when its home was deleted under it
        self.hurried = False  # asked a second time, so it did not wait for anything
        self._seen: list[ProcessState] = []
        self._written: list[ProcessState] = []

    def run(self) -> None:
        """Until SIGTERM, SIGINT or SIGHUP, or until the home is gone; a SIGINT while it stops kills what is left. Call from the main
        thread: a child dies with the thread that started it."""
        assert threading.current_thread() is threading.main_thread()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        try:
            while not self._has_lost_its_ground():
                if self._asked_to_stop(self._turn()):
                    self._stop()
                    return
            self._fall()
        finally:
            for child in self.children.values():
                child.kill()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _has_lost_its_ground(self) -> bool:
        gone = self._ground.lost()
        if gone is not None:
            self.lost = (
                f"{gone} was deleted or replaced while the fabric ran, so all of it was stopped: what it held is "
                "lost, and `fabric up` starts with what is there now"
            )
        return gone is not None

    def _fall(self) -> None:
        """Without its home nothing can be saved any more. What lies under the home's name by now belongs to somebody
        else: neither its state file nor its processes are touched."""
        children = list(self.children.values())
        for child in children:
            child.ask_to_stop()
        self._await_gone(children, self._now_s() + FALL_GRACE_S)
        for child in children:
            child.kill_left()
        leave_words(self._place, self.lost)
        self._say(self.lost)

    def _turn(self) -> float:
        """Let every child move on; returns how long nothing needs doing."""
        now = self._now_s()
        for child in self.children.values():
            if child.state == "waiting" and self._may_start(child):
                child.start(now)
            child.step(now)
        changed = self._show()
        self._look(self._seen, now)
        if changed:
            return 0.0  # what changed may let another one start
        waits = [child.wake_in_s(now) for child in self.children.values()]
        return min((wait for wait in waits if wait is not None), default=IDLE_S)

    def _may_start(self, child: Child) -> bool:
        return all(self.children[name].state == "running" for name in child.spec.depends_on)

    def _asked_to_stop(self, wait_s: float) -> bool:
        got = signal.sigtimedwait(WATCHED, wait_s)
        return got is not None and got.si_signo != signal.SIGCHLD

    def _stop(self) -> None:
        for layer in reversed(self._levels):
            children = [self.children[name] for name in layer]
            for child in children:
                child.ask_to_stop()
            self._show()
            deadline_s = self._now_s() + max(child.spec.stop_timeout_s for child in children)
            self._await_gone(children, deadline_s)
        left = end_marked(self._place.mark, grace_s=0.0 if self.hurried else ORPHAN_GRACE_S)
        if left:
            self._say(f"ended {left} processes that others had started")
        self._place.forget_state()

    def _await_gone(self, children: list[Child], deadline_s: float) -> None:
        while not all([child.reaped() for child in children]):
            left_s = deadline_s - self._now_s()
            if left_s <= 0:
                for child in children:
                    if not child.reaped():
                        self._say(f"{child.spec.name} did not stop in time and is killed")
                        child.kill()
                deadline_s = self._now_s() + 1.0
                continue
            got = signal.sigtimedwait([signal.SIGCHLD, signal.SIGINT], min(left_s, 1.0))
            if got is not None and got.si_signo == signal.SIGINT:
                self._hurry()
        if not self.lost:
            self._show()

    def _hurry(self) -> None:
        self.hurried = True
        for child in self.children.values():
            child.kill()

    def _show(self) -> bool:
        """Write the state file when something changed; returns whether it did. A disk that takes no file is no
        reason to end what runs: the next look tries again."""
        found = [child.described() for child in self.children.values()]
        changed, self._seen = found != self._seen, found
        if found != self._written:
            with contextlib.suppress(OSError):
                self._place.write_state(os.getpid(), self._ui_url, found, self._started_by)
                self._written = found
        return changed
