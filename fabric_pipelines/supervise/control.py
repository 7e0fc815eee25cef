"""`fabric up`, `down` and the processes part of `status`: start a supervisor, stop it, read what it shows.

The lock is taken here and handed to the supervisor, so that of two `up` at once exactly one starts anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fabric_pipelines import waits
from fabric_pipelines.errors import (
    AlreadyRunning,
    FabricError,
    Interrupted,
    StartFailed,
    StorageFailed,
    from_line,
)
from fabric_pipelines.interrupts import CTRL_C
from fabric_pipelines.settings import Settings
from fabric_pipelines.supervise.child import last_lines, rotate
from fabric_pipelines.supervise.ground import forget_words, last_words
from fabric_pipelines.supervise.orphans import end_marked
from fabric_pipelines.supervise.place import (
    MARK_NAME,
    STARTER_NAME,
    Place,
    ProcessState,
    SupervisorState,
)
from fabric_pipelines.supervise.spec import ProcessSpec, levels
from fabric_pipelines.supervise.supervisor import ORPHAN_GRACE_S, Supervisor
from fabric_pipelines.supervise.table import DEFAULT_ENGINES, process_table
from fabric_pipelines.supervise.vigil import Vigil

POLL_S = 0.05
UP_S = 900.0
DOWN_S = 180.0


@dataclass(frozen=True, slots=True)
class UpReport:
    """pid: the supervisor; ui_url: "" without UI; seconds: until everything ran."""

    pid: int
    ui_url: str
    processes: tuple[ProcessState, ...]
    log_dir: str
    seconds: float


def up(
    settings: Settings,
    *,
    ui: bool = True,
    engines: Sequence[str] = DEFAULT_ENGINES,
    foreground: bool = False,
    table: Sequence[ProcessSpec] | None = None,
    say: Callable[[str], None] | None = None,
    on_wait: Callable[[str], None] | None = None,
    started_by: str = "",
) -> UpReport:
    """Start everything and return once all of it runs; `foreground` stays until it is stopped. `table`
    replaces the fabric's own processes. on_wait: takes the lines that say what is waited for, in place of `say`;
    started_by: the command that stops it all at its own end, so that what a killed one leaves is known.

    Raises AlreadyRunning for a second one, StartFailed with the sentence of what did not come up (the
    rest is stopped again), Interrupted on Ctrl-C.
    """
    say = _to_stderr if say is None else say
    started_s = time.monotonic()
    vigil = _vigil(settings, on_wait or say, started_s)
    place = Place.of(settings)
    place.make()
    lock = place.take_lock(patience_s=0.3)
    if lock is None:
        raise _already_running(place)
    try:
        try:
            if left := end_marked(place.mark, grace_s=ORPHAN_GRACE_S):
                say(f"ended {left} processes that an earlier supervisor left behind")
            place.forget_state()
            if words := last_words(place):
                say(words)
                forget_words(place)
            ui_url = ""
            if table is None:
                table, ui_url = process_table(settings, ui=ui, engines=engines)
            levels(table)
            if foreground:
                return _run_here(settings, place, table, ui_url, say, vigil)
            _start_detached(settings, place, table, ui_url, lock, started_by)
        finally:
            os.close(lock)
        with CTRL_C.letting_go(lambda: let_go(settings)):
            return _await_running(place, say, vigil)
    except KeyboardInterrupt:
        with CTRL_C.letting_go(lambda: let_go(settings)):
            down(settings)
        raise Interrupted(
            "stopped before everything ran; nothing is lost, so run the same command again"
        ) from None
    except FabricError:
        down(settings)
        raise


def join(settings: Settings, *, on_wait: Callable[[str], None]) -> UpReport:
    """Wait until all of what somebody else started runs. Raises StartFailed as `up` does, and stops nothing."""
    started_s = time.monotonic()
    place = Place.of(settings)
    return _await_running(place, lambda line: None, _vigil(settings, on_wait, started_s))


def down(settings: Settings, timeout_s: float = DOWN_S) -> tuple[str, ...]:
    """Stop everything in reverse order and return the names of what ran. Idempotent. What does not end within
    `timeout_s` is killed; what a killed supervisor left behind is ended too."""
    place = Place.of(settings)
    deadline_s = time.monotonic() + timeout_s
    asked = False
    names: tuple[str, ...] = ()
    while place.locked():
        found = place.read_state()
        late = time.monotonic() > deadline_s
        if late and found.pid is None:
            raise StartFailed(
                f"somebody holds {place.lock_path} and runs nothing: end that process"
            )
        if found.pid is not None and found.running:
            names = names or tuple(item.name for item in found.processes)
            if late or not asked:
                _signal_supervisor(found.pid, signal.SIGKILL if late else signal.SIGTERM)
                asked = True
        time.sleep(POLL_S)
    if place.runtime_dir.exists():
        end_marked(place.mark, grace_s=ORPHAN_GRACE_S)
        place.forget_state()
    return names


def let_go(settings: Settings) -> None:
    """Ask for everything to stop and wait for nothing: the supervisor sees to the rest alone."""
    found = Place.of(settings).read_state()
    if found.running and found.pid is not None:
        _signal_supervisor(found.pid, signal.SIGTERM)


def fallen(settings: Settings) -> str:
    """Why the last supervisor of this home gave up; "" while one runs, and if none ever did."""
    place = Place.of(settings)
    return "" if place.locked() else last_words(place)


def state(settings: Settings) -> SupervisorState:
    """What runs. Without a supervisor the processes it left in its state are shown as stopped."""
    found = Place.of(settings).read_state()
    if found.running:
        return found
    gone = tuple(
        ProcessState(item.name, "stopped", None, item.restarts, item.last_exit, item.log)
        for item in found.processes
    )
    return SupervisorState(False, None, "", gone, found.started_by)


def _vigil(settings: Settings, say: Callable[[str], None], begun_s: float) -> Vigil:
    return Vigil(lambda: waits.read(settings.waits_dir), say, begun_s)


def _start_detached(
    settings: Settings,
    place: Place,
    table: Sequence[ProcessSpec],
    ui_url: str,
    lock: int,
    started_by: str,
) -> None:
    """A process in its own session that forks once more, so that nobody has to wait for it."""
    order = {
        "table": [spec.as_json() for spec in table],
        "ui_url": ui_url,
        "home": str(place.home),
        "runtime_dir": str(place.runtime_dir),
        "log_dir": str(place.log_dir),
        "mark": place.mark,
        "lock": lock,
        "started_by": started_by,
    }
    environment = {**os.environ, **settings.as_environment()}
    for name in (MARK_NAME, STARTER_NAME):  # `up` from inside a supervised process
        environment.pop(name, None)
    rotate(place.own_log)
    with place.own_log.open("ab") as log:
        started = subprocess.run(
            [sys.executable, "-m", "fabric_pipelines.supervise"],
            input=json.dumps(order).encode(),
            stdout=log,
            stderr=log,
            pass_fds=[lock],
            start_new_session=True,
            env=environment,
            check=False,
        )
    if started.returncode:
        raise StartFailed(
            f"the supervisor did not start ({last_lines(place.own_log, 1)}); see its log {place.own_log}"
        )


def _run_here(
    settings: Settings,
    place: Place,
    table: Sequence[ProcessSpec],
    ui_url: str,
    say: Callable[[str], None],
    vigil: Vigil,
) -> UpReport:
    before = dict(os.environ)
    os.environ.update(settings.as_environment())
    try:
        supervisor = Supervisor(table, place, ui_url=ui_url, say=say, look=vigil.look)
        supervisor.run()
    finally:
        os.environ.clear()
        os.environ.update(before)
    if supervisor.lost:
        raise StorageFailed(supervisor.lost)
    if supervisor.hurried:
        raise Interrupted(
            "stopped at once: what ran was killed, all that was acknowledged is kept; "
            "`fabric up` goes on where it stopped"
        )
    shown = tuple(child.described() for child in supervisor.children.values())
    return UpReport(
        os.getpid(), ui_url, shown, str(place.log_dir), time.monotonic() - vigil.begun_s
    )


def _await_running(place: Place, say: Callable[[str], None], vigil: Vigil) -> UpReport:
    told: dict[str, str] = {}
    while True:
        found = place.read_state()
        for item in found.processes:
            line = f"{item.name} {item.state}" + (f" ({item.last_exit})" if item.last_exit else "")
            if told.get(item.name) != line and item.state != "waiting":
                say(line if item.pid is None else f"{line}, pid {item.pid}")
                told[item.name] = line
        fault = next((item for item in found.processes if item.start_fault), None)
        if fault is not None:
            raise _start_failed(fault)
        if not found.running:
            raise StartFailed(f"the supervisor ended; see its log {place.own_log}")
        now_s = time.monotonic()
        seconds = now_s - vigil.begun_s
        vigil.look(found.processes, now_s)
        if found.all_running and found.pid is not None:
            return UpReport(
                found.pid, found.ui_url, found.processes, str(place.log_dir), round(seconds, 2)
            )
        if seconds > UP_S:
            late = [item.name for item in found.processes if item.state != "running"]
            raise StartFailed(f"not running after {UP_S:.0f} s: {', '.join(late)}")
        time.sleep(POLL_S)


def _start_failed(item: ProcessState) -> StartFailed:
    """What the process itself said at its end, with its exit code; else how it ended and where to look."""
    lines = item.last_words.splitlines()
    for line in reversed(lines):
        if said := from_line(line):
            cls, sentence = said
            return StartFailed(f"{item.name} did not start: {sentence}", cls.exit_code)
    why = ": ".join(filter(None, (item.start_fault, *lines[-1:])))
    return StartFailed(f"{item.name} did not start ({why}); see its log {item.log}")


def _already_running(place: Place) -> AlreadyRunning:
    found = place.read_state()
    where = f", UI at {found.ui_url}" if found.ui_url else ""
    where += f", started by `fabric {found.started_by}`" if found.started_by else ""
    return AlreadyRunning(
        f"already running, pid {found.pid or 'unknown'}{where}: stop it with `fabric down`"
    )


def _signal_supervisor(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk under the log ends nobody
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
