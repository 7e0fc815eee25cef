"""Where one fabric's supervisor keeps what outlives it: lock, state, logs, and the mark its processes carry.

The state file is a whole JSON document, replaced by rename, so a reader never sees half of one. Who holds
the lock is the truth about whether a supervisor runs; the state file only says what it was doing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fabric_pipelines.errors import CorruptionFound, StorageFailed, VersionRefused
from fabric_pipelines.folders import make_folders
from fabric_pipelines.given import value_of
from fabric_pipelines.settings import SUPERVISOR_LOCK, Settings, make_runtime_folder

MARK_NAME = "FABRIC_SUPERVISED"
STARTER_NAME = (
    "FABRIC_SUPERVISED_BY"  # supervisor's pid and process's name, for what a process starts
)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """state: waiting, starting, running, restarting, stopping or stopped. last_exit: how it last ended, "" if it
    never did. start_fault: why it cannot be brought up, "" while it may; last_words: the end of its log then."""

    name: str
    state: str
    pid: int | None
    restarts: int
    last_exit: str
    log: str
    start_fault: str = ""
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class SupervisorState:
    """running: a supervisor holds the lock; pid: its process. Without one, `processes` are those it left. started_by:
    the command that stops it at its own end, "" for one that stays until `fabric down`."""

    running: bool
    pid: int | None
    ui_url: str
    processes: tuple[ProcessState, ...]
    started_by: str = ""

    @property
    def all_running(self) -> bool:
        return bool(self.processes) and all(item.state == "running" for item in self.processes)


@dataclass(frozen=True, slots=True)
class Place:
    home: Path
    runtime_dir: Path
    log_dir: Path
    mark: str

    @classmethod
    def of(cls, settings: Settings) -> Place:
        mark = hashlib.sha256(os.fsencode(settings.home)).hexdigest()[:24]
        return cls(settings.home, settings.runtime_dir, settings.log_dir, mark)

    @property
    def lock_path(self) -> Path:
        return self.runtime_dir / SUPERVISOR_LOCK

    @property
    def state_path(self) -> Path:
        return self.runtime_dir / "supervisor.json"

    @property
    def own_log(self) -> Path:
        return self.log_dir / "supervisor.log"

    def log_of(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def make(self) -> None:
        try:
            make_folders(self.home)
            make_runtime_folder(self.runtime_dir)
            make_folders(self.log_dir)
        except OSError as fault:
            raise StorageFailed(
                f"{fault.filename} cannot be created ({fault.strerror}): choose another folder with FABRIC_HOME"
            ) from fault

    def take_lock(self, *, patience_s: float = 0.0) -> int | None:
        """A descriptor that holds the lock, or None if somebody else does. With some patience it outlasts the
        moment for which `locked` holds it."""
        try:
            fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as fault:
            raise StorageFailed(
                f"{self.lock_path} cannot be written ({fault.strerror}): choose another folder with FABRIC_HOME"
            ) from fault
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    os.close(fd)
                    return None
            time.sleep(0.01)

    def locked(self) -> bool:
        if not self.lock_path.exists():
            return False
        fd = self.take_lock()
        if fd is not None:
            os.close(fd)
        return fd is None

    def write_state(
        self, pid: int, ui_url: str, processes: Sequence[ProcessState], started_by: str = ""
    ) -> None:
        content = {
            "pid": pid,
            "ui_url": ui_url,
            "processes": [asdict(item) for item in processes],
            "started_by": started_by,
        }
        beside = self.state_path.with_suffix(".new")
        beside.write_text(json.dumps(content, indent=1))
        beside.replace(self.state_path)

    def read_state(self) -> SupervisorState:
        running = self.locked()
        try:
            return _state_of(self.state_path, running)
        except FileNotFoundError:
            return SupervisorState(running, None, "", ())
        except (CorruptionFound, VersionRefused) as fault:
            if not running:  # what an ended one left; the next writes it anew
                return SupervisorState(running, None, "", ())
            raise type(fault)(
                f"{fault} (the supervisor is the process that holds {self.lock_path}: `fuser` names it)"
            ) from fault

    def forget_state(self) -> None:
        self.state_path.unlink(missing_ok=True)


def _state_of(path: Path, running: bool) -> SupervisorState:
    remedy = "end the supervisor, then run `fabric up`"
    what = "state of a supervisor"
    try:
        content = json.loads(path.read_bytes())
        processes = tuple(
            value_of(ProcessState, item, str(path), what=what, remedy=remedy)
            for item in content["processes"]
        )
    except (ValueError, KeyError, TypeError) as fault:
        raise CorruptionFound(f"{path} is no {what} ({fault!r}): {remedy}") from fault
    told = {**content, "running": running, "processes": processes}
    state = value_of(SupervisorState, told, str(path), what=what, remedy=remedy)
    for pid in (state.pid, *(item.pid for item in processes)):
        # 0 is the reader's own process group to `kill`, -1 everybody, 1 what started the machine
        if pid is not None and pid <= 1:
            raise CorruptionFound(f"{path} is no {what} (pid {pid}): {remedy}")
    return state
