"""The embedded Postgres of one home: where it lives, start, stop, and what a killed one left behind.

A real server, started by us over binaries found on the machine, reachable only through a Unix socket in a
folder that nobody else can enter; no TCP. Run as root it drops to a user of its own, because Postgres
refuses root. It changes owner or mode of nothing but its own data and socket folders: where that user cannot
reach the home, data and sockets go to /var/lib/fabric-pipelines, and binaries it cannot reach are copied
once. Dies with its parent; a server that outlived a killed parent is stopped by the next start.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO
from urllib.parse import quote

import psycopg
from psycopg import sql

from fabric_pipelines import settings as settings_module
from fabric_pipelines.dataplane import libpq
from fabric_pipelines.dataplane.postgres_binaries import (
    STATE_DIR,
    PostgresBinaries,
    find_binaries,
    make_folder,
    passable,
    reachable,
)
from fabric_pipelines.dataplane.postgres_folder import (
    FULL,
    SHIM,
    SUPERUSER,
    WRONG,
    Say,
    ids_arguments,
    initialise,
    server_environment,
    why_ended,
)
from fabric_pipelines.errors import (
    AlreadyRunning,
    DatabaseUnavailable,
    FabricError,
    Interrupted,
    SettingsError,
    StorageFailed,
    VersionRefused,
    as_line,
    storage_failed,
)
from fabric_pipelines.settings import UNIX_PATH_BYTES_MAX, Settings, make_runtime_folder

DATABASE = "fabric"
PORT = 5432
"""Part of the socket's name; said everywhere, since PGPORT in a shell says another."""
_EMBEDDED = re.compile(rf"postgresql://{SUPERUSER}@/{DATABASE}\?host=[^&]+&port={PORT}")
RECOVERY_S = 120.0
USERS = "postgres.users"
LOCK_LOOK_S = 0.05  # flock by itself has no time limit and says nothing while it waits
PATIENCE_S = 3600.0
"""The foreground process waits so long: ending a recovery only makes the next start recover from the beginning."""
STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where the embedded server of a home lives. Data is under `home`, except where the server's own user
    could not reach it there."""

    home: Path
    data: Path
    sockets: Path

    @property
    def elsewhere(self) -> bool:
        return self.home not in self.data.parents

    @property
    def url(self) -> str:
        host = quote(str(self.sockets), safe="")
        return f"postgresql://{SUPERUSER}@/{DATABASE}?host={host}&port={PORT}"


def place(settings: Settings) -> Place:
    """Data and socket folder for these settings; the same answer in every process, started or not.

    A link at <home>/postgres says that the data is elsewhere. Emptying the home removes the link, and with
    it the claim on that data.
    """
    local = settings.home / "postgres"
    near = Place(settings.home, local, settings.runtime_dir / "postgres")
    if os.geteuid() != 0 or (local.is_dir() and not local.is_symlink()):
        return near
    if not local.is_symlink() and passable(settings.home) and passable(settings.runtime_dir):
        return near
    mark = hashlib.sha256(os.fsencode(settings.home)).hexdigest()[:12]
    return Place(settings.home, STATE_DIR / mark / "data", STATE_DIR / mark / "run")


def is_embedded(url: str) -> bool:
    """Whether `url` is of the kind that `Place.url` makes: a socket folder, our user, our database."""
    return _EMBEDDED.fullmatch(url) is not None


def kept_elsewhere(settings: Settings) -> Path | None:
    """The folder outside the home that holds this home's data, for whoever shows sizes or empties the home."""
    where = place(settings)
    return where.data.parent if where.elsewhere else None


@dataclass(slots=True)
class EmbeddedPostgres:
    """One server over one data folder. `start` makes the folder if needed and returns the URL; `stop` ends
    it. The process that started it owns it (a lock says so) and takes it along when it dies."""

    place: Place
    binaries: PostgresBinaries | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    durable_initdb: bool = True
    say: Say = lambda line: None
    asked_to_stop: Callable[[], bool] = lambda: False
    """Looked at while the server does not answer yet; `start` then ends with Interrupted."""
    _process: subprocess.Popen[bytes] | None = None
    _lock: IO[str] | None = None

    @classmethod
    def of(cls, settings: Settings, *, say: Say = lambda line: None) -> EmbeddedPostgres:
        make_folder(settings.home)  # before the question who can reach it
        make_runtime_folder(settings.runtime_dir)
        return cls(place(settings), log=settings.log_dir / "postgres-server.log", say=say)

    @property
    def url(self) -> str:
        return self.place.url

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, timeout_s: float = RECOVERY_S) -> str:
        """Returns once the server answers, crash recovery included. Raises AlreadyRunning when another
        process owns the folder, VersionRefused, StorageFailed, or DatabaseUnavailable after `timeout_s`."""
        assert not self.running, "this server is started already"
        # the kernel's parent-death signal follows the thread, not the process
        assert threading.current_thread() is threading.main_thread()
        self._claim()
        try:
            self._prepare()
            self._launch(timeout_s)
        except BaseException:
            self.stop()
            raise
        return self.url

    def stop(self, *, timeout_s: float = STOP_S) -> None:
        """Fast shutdown (open transactions are rolled back, the data is checkpointed). Idempotent."""
        if self._process is not None:
            if self.running:
                self._process.send_signal(signal.SIGINT)
                try:
                    self._process.wait(timeout_s)
                except subprocess.TimeoutExpired:
                    self.say(
                        f"the server did not stop within {timeout_s:.0f} s; it recovers at the next start"
                    )
                    self._process.send_signal(signal.SIGQUIT)
                    self._process.wait()
            self._process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Exit status once the server ended by itself; None when it still runs after `timeout_s`."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def _claim(self) -> None:
        folder = self.place.data.parent
        make_folder(folder)
        lock = (folder / "postgres.lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as fault:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise AlreadyRunning(
                f"process {owner} already runs the Postgres of {self.place.data}; stop it first"
            ) from fault
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def _prepare(self) -> None:
        data = self.place.data
        if self.place.elsewhere:
            _link_home(self.place, self.say)
        _require_reachable(data.parent)
        if not (data / "PG_VERSION").exists():
            self._refuse_foreign(data)
            self.binaries = reachable(self.binaries or find_binaries())
            initialise(data, self.binaries, durable=self.durable_initdb, say=self.say)
        else:
            major = int((data / "PG_VERSION").read_text())
            if self.binaries is None:
                self.binaries = reachable(find_binaries(major=major))
            elif self.binaries.major != major:
                raise VersionRefused(
                    f"{data} was made by Postgres {major} and cannot be opened by "
                    f"{self.binaries.version}: use the bin folder of a Postgres {major}"
                )
            _stop_orphan(data, self.say)
        _make_socket_folder(self.place.sockets, data.stat().st_uid)

    @staticmethod
    def _refuse_foreign(data: Path) -> None:
        if data.is_dir() and any(data.iterdir()):
            raise StorageFailed(
                f"{data} is not empty and not a Postgres data folder; move it away or set FABRIC_HOME"
            )

    def _launch(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self._process = self._spawn()
            fault = self._await_ready(deadline)
            if fault is None:
                _ensure_database(self.place)
                return
            # backends of a killed server hold its shared memory for a moment after its end
            if "still in use" not in fault or time.monotonic() > deadline:
                raise StorageFailed(f"Postgres on {self.place.data} does not start: {fault}")
            time.sleep(0.2)

    def _spawn(self) -> subprocess.Popen[bytes]:
        assert self.binaries is not None
        owner = self.place.data.stat()
        options = {**server_options(), **self.options}
        arguments = [
            str(self.binaries.postgres), "-D", str(self.place.data), "-k", str(self.place.sockets), "-h", "",
            "-p", str(PORT),
            *(part for name, value in options.items() for part in ("-c", f"{name}={value}")),
        ]  # fmt: skip
        command = [sys.executable, "-I", "-S", "-c", SHIM, *ids_arguments(owner), *arguments]
        with self._open_log() as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=server_environment(),
                start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
            )

    def _open_log(self) -> IO[bytes]:
        if self.log is None:
            return Path(os.devnull).open("ab")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        return self.log.open("ab")

    def _await_ready(self, deadline: float) -> str | None:
        """None once the server takes connections, else the reason it ended."""
        assert self._process is not None
        said_s = time.monotonic()
        url = self.place.url.replace(f"/{DATABASE}?", "/postgres?")
        while True:
            if self._process.poll() is not None:
                return self._last_words()
            if self.asked_to_stop():
                raise Interrupted(f"asked to stop before Postgres on {self.place.data} answered")
            try:
                with libpq.connect(url, embedded=True, connect_timeout=5):
                    return None
            except psycopg.OperationalError as fault:
                why = " ".join(str(fault).split())
            now = time.monotonic()
            if now > deadline:
                raise DatabaseUnavailable(
                    f"Postgres on {self.place.data} does not answer yet ({why}); "
                    "it may still be recovering, see its log"
                )
            if now - said_s > 5:
                said_s = now
                self.say(f"waiting for Postgres: {why.rpartition('FATAL:')[2].strip()}")
            time.sleep(0.03)

    def _last_words(self) -> str:
        if self.log is None:
            return f"it ended with status {self._process.returncode if self._process else '?'}"
        lines = self.log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
        # its log goes on through restarts: the last thing that went wrong is of this one
        wrong = [line for line in lines if WRONG.search(line) or FULL.search(line)]
        return f"{why_ended((wrong or lines)[-1:], self.place.data)} (log: {self.log})"


@contextmanager
def at_hand(settings: Settings, say: Say) -> Iterator[None]:
    """The embedded server answers for the life of the block: who stopped, or was refused, left it down. One that somebody
    else runs is used and left alone, and so is the server of `pg_url`; one that was never made is not made.

    Commands that overlap share the server that one of them started. Each holds USERS shared as long as it needs it, and
    the one that started it, with whom it would die, stays until nobody else does. Ctrl-C there ends it at once."""
    server = None if settings.pg_url else EmbeddedPostgres.of(settings, say=say)
    if server is None or not (server.place.data / "PG_VERSION").exists():
        yield
        return
    with (server.place.data.parent / USERS).open("a") as users:
        if not _join(server, users):
            yield
            return
        try:
            say("the embedded Postgres was down: it runs for this command")
            try:
                yield
            except KeyboardInterrupt:
                raise
            except BaseException:
                _await_last(users, say)
                raise
            _await_last(users, say)
        finally:
            server.stop()


def _join(server: EmbeddedPostgres, users: IO[str]) -> bool:
    """Be one of those who use the server, which answers; True if it was started here. It may be starting or stopping in
    somebody else's hands meanwhile."""
    deadline = time.monotonic() + RECOVERY_S
    while True:
        if _locked(users, fcntl.LOCK_SH):  # else whoever started it is stopping it
            try:
                server.start()
            except AlreadyRunning:
                if _answers(server.place):
                    return False
                fcntl.flock(users, fcntl.LOCK_UN)
            else:
                return True
        if time.monotonic() > deadline:
            raise DatabaseUnavailable(
                f"another process starts or stops the Postgres of {server.place.data}, which did not answer within "
                f"{RECOVERY_S:.0f} s: try again"
            )
        time.sleep(LOCK_LOOK_S)


def _await_last(users: IO[str], say: Say) -> None:
    """Nobody uses the server any more, and nobody can begin to."""
    said = False
    while not _locked(users, fcntl.LOCK_EX):
        if not said:
            say(
                "other commands use the embedded Postgres that this one started: waiting for them to end"
            )
        said = True
        time.sleep(LOCK_LOOK_S)


def _locked(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _answers(where: Place) -> bool:
    try:
        with libpq.connect(where.url, embedded=True, connect_timeout=5):
            return True
    except psycopg.OperationalError:
        return False


def server_options() -> dict[str, str]:
    """Sized for a small machine: an eighth of the memory up to 2 GB for buffers, WAL room that keeps
    checkpoints timed instead of forced (fewer full-page images: 1,529 -> 1,373 B a row), durable commits.
    WAL segments stay to be used again: a new one is 16 MB of zeros, and everybody's commit waits 8 ms for them."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    buffers = min(max(memory // 8, 64 << 20), 2 << 30) >> 20
    return {
        "shared_buffers": f"{buffers}MB",
        "wal_buffers": "16MB" if buffers < 1024 else "64MB",
        "max_wal_size": "4GB",
        "min_wal_size": "1GB",
        "checkpoint_timeout": "15min",
        "max_connections": "100",
        "unix_socket_permissions": "0700",
        "log_min_messages": "warning",
        "log_checkpoints": "off",
        "log_line_prefix": "%m [%p] ",
        "log_timezone": "UTC",
        "timezone": "UTC",
    }


def _make_socket_folder(folder: Path, uid: int) -> None:
    longest = len(os.fsencode(folder / f".s.PGSQL.{PORT}"))
    if longest > UNIX_PATH_BYTES_MAX:
        raise SettingsError(
            f"the socket path under {folder} has {longest} bytes, more than {UNIX_PATH_BYTES_MAX}: "
            "set FABRIC_HOME to a shorter path"
        )
    make_folder(folder)
    owner = folder.stat().st_uid
    if owner not in (uid, os.geteuid()):
        raise StorageFailed(f"{folder} belongs to user {owner}; remove it, it must be ours alone")
    if owner != uid:
        os.chown(folder, uid, uid)
    folder.chmod(0o700)


def _link_home(where: Place, say: Say) -> None:
    """Leave <home>/postgres as a link to data kept elsewhere. Data without a link belongs to a home that was
    emptied: it is moved aside, never opened by the new home and never deleted."""
    link = where.home / "postgres"
    if link.is_symlink():
        return
    if where.data.exists():
        aside = where.data.with_name(f"data-of-an-emptied-home-{time.time_ns()}")
        where.data.rename(aside)
        say(f"{where.home} was emptied; its former database is kept in {aside}")
    link.symlink_to(where.data)


def _require_reachable(folder: Path) -> None:
    if os.geteuid() == 0 and not passable(folder):
        raise SettingsError(
            f"Postgres must not run as root, and its own user cannot enter {folder}: let others pass "
            "(chmod o+x) on each folder above it, set FABRIC_HOME elsewhere, or set FABRIC_PG_URL"
        )


def _stop_orphan(data: Path, say: Say) -> None:
    """Nobody owns the folder (we hold the lock), so a server on it outlived its parent: stop it. A pid file
    whose number belongs to something else by now would stop the start, so it goes."""
    pid_file = data / "postmaster.pid"
    try:
        pid = int(pid_file.read_text().split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return
    if not _serves(pid, data):
        pid_file.unlink(missing_ok=True)
        return
    say(f"stopping Postgres {pid}, which outlived the process that started it")
    for number, patience_s in (
        (signal.SIGINT, STOP_S),
        (signal.SIGQUIT, 10.0),
        (signal.SIGKILL, 10.0),
    ):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if not _serves(pid, data):
                return
            time.sleep(0.05)
    raise AlreadyRunning(f"process {pid} serves {data} and does not end; stop it first")


def _serves(pid: int, data: Path) -> bool:
    """Whether process `pid` is a server on `data`: a server's working folder is its data folder."""
    try:
        return Path(f"/proc/{pid}/cwd").resolve(strict=True) == data.resolve()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def _ensure_database(where: Place) -> None:
    url = where.url.replace(f"/{DATABASE}?", "/postgres?")
    with libpq.connect(url, embedded=True, autocommit=True) as connection:
        found = connection.execute("select from pg_database where datname = %s", (DATABASE,))
        if found.fetchone() is None:
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(DATABASE)))


def main() -> int:
    """Run the server of these settings in the foreground until SIGTERM or SIGINT, or until it ends by itself
    (then 1). One ready line on stdout."""
    settings = settings_module.load()
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    server = EmbeddedPostgres.of(settings, say=say)
    server.asked_to_stop = lambda: bool(asked)
    try:
        server.start(timeout_s=PATIENCE_S)
    except Interrupted as word:
        say(str(word))
        return 0
    try:
        assert server.binaries is not None
        sys.stdout.write(f"postgres ready: {server.binaries.version} on {server.place.sockets}\n")
        sys.stdout.flush()
        while not asked:
            status = server.wait(0.25)
            if status is not None:
                say(f"Postgres ended by itself (status {status}): {server._last_words()}")
                return 1
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FabricError as problem:
        sys.stderr.write(as_line(problem) + "\n")
        sys.exit(problem.exit_code)
    except OSError as problem:
        failed = storage_failed(problem)
        sys.stderr.write(as_line(failed) + "\n")
        sys.exit(failed.exit_code)
