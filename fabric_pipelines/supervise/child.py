"""One supervised process: start it, see it become ready, see it end, start it again, stop it.

What it had started itself (Dagster's webserver a code server) ends before it starts again: the old one would hold
its port, its files and its memory until it notices by itself.

Its parent's death ends it (PR_SET_PDEATHSIG), it has a session of its own, and it gets the default signal
handlers: a process started from a script with `&` would inherit an ignored SIGINT, and Dagster then ignores
SIGTERM too. Time is an argument; the caller owns the loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from fabric_pipelines.supervise.orphans import alive, ask_to_end, left_by
from fabric_pipelines.supervise.place import STARTER_NAME, ProcessState
from fabric_pipelines.supervise.spec import ProcessSpec

LOG_BYTES_MAX = 10 << 20
LOGS_KEPT = 3
LEFT_EVERY_S = 0.05
HTTP_EVERY_S = 0.25
PR_SET_PDEATHSIG = 1
FATAL_EXITS = (2, 4)  # usage and fail-closed refusals: another start changes nothing
RESET_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Child:
    spec: ProcessSpec
    log: Path
    environment: dict[str, str]
    say: Callable[[str], None]
    state: str = "waiting"
    restarts: int = 0
    last_exit: str = ""
    start_fault: str = ""
    last_words: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _left: list[psutil.Process] = field(default_factory=list)
    _kill_left_at_s: float = 0.0
    _was_ready: bool = False
    _failed_starts: int = 0
    _crashes: int = 0
    _started_s: float = 0.0
    _start_at_s: float = 0.0
    _asked_s: float = 0.0
    _log_offset: int = 0
    _log_rest: bytes = b""
    _ready_line: re.Pattern[bytes] | None = field(init=False)

    def __post_init__(self) -> None:
        pattern = self.spec.ready.log_pattern
        self._ready_line = re.compile(pattern.encode()) if pattern else None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def described(self) -> ProcessState:
        return ProcessState(
            name=self.spec.name,
            state=self.state,
            pid=self.pid,
            restarts=self.restarts,
            last_exit=self.last_exit,
            log=str(self.log),
            start_fault=self.start_fault,
            last_words=self.last_words,
        )

    def step(self, now_s: float) -> None:
        """Move on as far as the world did."""
        if self._process is not None and (status := self._process.poll()) is not None:
            self._ended(exit_words(status), status in FATAL_EXITS, now_s)
        if self.state == "restarting" and self._alone(now_s) and now_s >= self._start_at_s:
            self.start(now_s)
        elif self.state == "starting":
            self._check_ready(now_s)

    def wake_in_s(self, now_s: float) -> float | None:
        """When `step` should be called next without a signal; None: only when something ends."""
        if self.state == "starting":
            return 0.05
        if self.state == "restarting":
            return max(LEFT_EVERY_S if self._left else 0.0, self._start_at_s - now_s)
        return None

    def start(self, now_s: float) -> None:
        assert self._process is None, f"{self.spec.name} runs already"
        self._started_s, self._asked_s, self._log_rest = now_s, 0.0, b""
        try:
            self.log.parent.mkdir(exist_ok=True)  # not its parents: a home that is gone stays gone
            rotate(self.log)
            log = self.log.open("ab", buffering=0)
        except OSError as fault:
            self._ended(f"not started: {fault.filename}: {fault.strerror}", False, now_s)
            return
        with log:
            with contextlib.suppress(OSError):  # a full disk under the log ends nobody
                log.write(f"--- {_stamp()} {' '.join(self.spec.argv)}\n".encode())
            self._log_offset = log.tell()
            try:
                self._process = self._spawn(log.fileno())
            except OSError as fault:
                with contextlib.suppress(OSError):
                    log.write(f"{fault}\n".encode())
                self._ended(f"not started: {fault.strerror}", True, now_s)
                return
        self.state = "starting"
        self.say(f"{self.spec.name} started (pid {self._process.pid})")

    def ask_to_stop(self) -> None:
        """Send the stop signal; `step` no longer restarts it."""
        self.state = "stopping" if self._process else "stopped"
        self._signal(self.spec.stop_signal)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def kill_left(self) -> None:
        """All that it started, at once."""
        ask_to_end(left_by(self._starter), kill=True)

    def reaped(self) -> bool:
        """While stopping: whether it is gone."""
        if self._process is not None and (status := self._process.poll()) is not None:
            self.last_exit = exit_words(status)
            self._process = None
            self.say(f"{self.spec.name} stopped ({self.last_exit})")
        if self._process is None:
            self.state = "stopped"
        return self._process is None

    def _spawn(self, log_fd: int) -> subprocess.Popen[bytes]:
        parent = os.getpid()

        def tether() -> None:
            _LIBC.prctl(PR_SET_PDEATHSIG, int(self.spec.stop_signal))
            if os.getppid() != parent:
                os._exit(1)  # the parent died before the line above
            for number in RESET_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])

        return subprocess.Popen(
            self.spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            env={**self.environment, **self.spec.environment, STARTER_NAME: self._starter},
            start_new_session=True,
            preexec_fn=tether,  # the supervisor has one thread, so nothing can hold a lock over the fork
        )

    @property
    def _starter(self) -> str:
        return f"{os.getpid()}/{self.spec.name}"

    def _alone(self, now_s: float) -> bool:
        """Whether nothing is left of what the last one started; what does not end when asked is killed."""
        self._left = alive(self._left)
        if self._left and now_s >= self._kill_left_at_s:
            ask_to_end(self._left, kill=True)
        return not self._left

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _check_ready(self, now_s: float) -> None:
        if self._answers(now_s):
            self.state, self._was_ready, self._failed_starts, self.start_fault = (
                "running",
                True,
                0,
                "",
            )
            self.say(f"{self.spec.name} is running")
        elif now_s - self._started_s > self.spec.ready_timeout_s:
            words = f"not ready within {self.spec.ready_timeout_s:.0f} s"
            self.say(f"{self.spec.name} was {words} and is killed")
            self._blame(words, final=True)
            self._started_s = now_s  # it ends at once, which the next step sees
            self.kill()

    def _answers(self, now_s: float) -> bool:
        if self._ready_line is not None:
            return self._log_shows(self._ready_line)
        if self.spec.ready.http_url:
            if now_s - self._asked_s < HTTP_EVERY_S:
                return False
            self._asked_s = now_s
            return http_answers(self.spec.ready.http_url)
        return True

    def _log_shows(self, pattern: re.Pattern[bytes]) -> bool:
        with self.log.open("rb") as log:
            log.seek(self._log_offset)
            content = log.read(1 << 20)
        self._log_offset += len(content)
        *lines, self._log_rest = (self._log_rest + content).split(b"\n")
        return any(pattern.search(line) for line in lines)

    def _ended(self, words: str, fatal: bool, now_s: float) -> None:
        self._process = None
        self.last_exit = words
        ready = self.state == "running" and self._was_ready
        stable = ready and now_s - self._started_s >= self.spec.backoff.stable_s
        self._crashes = 1 if stable else self._crashes + 1
        if not ready:
            self._failed_starts += 1
            self._blame(words, final=fatal or self._failed_starts >= self.spec.starts_max)
        wait_s = self.spec.backoff.wait_s(self._crashes)
        self.restarts += 1
        self.state, self._start_at_s = "restarting", now_s + wait_s
        self._left, self._kill_left_at_s = left_by(self._starter), now_s + self.spec.left_grace_s
        ask_to_end(self._left)
        count = len(self._left)
        ended = f" with {count} process{'es' * (count > 1)} that it had started" if count else ""
        self.say(f"{self.spec.name} ended ({words}){ended}; next start in {wait_s:.1f} s")

    def _blame(self, words: str, *, final: bool) -> None:
        if final and not self._was_ready and not self.start_fault:
            # read now: the next start, a moment later, begins another chapter of the log
            self.start_fault, self.last_words = words, last_lines(self.log)
            self.say(f"{self.spec.name} did not start; its log ends with:\n{self.last_words}")


def exit_words(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    return f"signal {-status} ({signal.Signals(-status).name})"


def http_answers(url: str) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=0.5)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def rotate(log: Path) -> None:
    """Before a start: a log above LOG_BYTES_MAX becomes .1, .1 becomes .2, and so on."""
    if not log.exists() or log.stat().st_size <= LOG_BYTES_MAX:
        return
    for number in range(LOGS_KEPT - 1, 0, -1):
        older = log.with_name(f"{log.name}.{number}")
        if older.exists():
            older.replace(log.with_name(f"{log.name}.{number + 1}"))
    log.replace(log.with_name(f"{log.name}.1"))


def last_lines(log: Path, count: int = 12) -> str:
    """The end of what the last start wrote."""
    if not log.exists():
        return "(no log)"
    with log.open("rb") as content:
        content.seek(max(0, log.stat().st_size - (64 << 10)))
        lines = content.read().decode(errors="replace").splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith("--- ")]
    mine = lines[starts[-1] + 1 :] if starts else lines
    return "\n".join(mine[-count:]) or "(it wrote nothing)"


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
