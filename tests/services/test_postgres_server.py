"""The embedded server as an operating system sees it: users, modes, signals, crashes, leftovers."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psycopg
import pytest

from fabric_pipelines.dataplane import postgres, postgres_binaries, results
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.postgres import EmbeddedPostgres, Place, find_binaries, place
from fabric_pipelines.dataplane.postgres_folder import (
    SHIM,
    ids_arguments,
    server_environment,
    why_ended,
)
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import (
    AlreadyRunning,
    DatabaseUnavailable,
    SettingsError,
    StorageFailed,
    VersionRefused,
)
from fabric_pipelines.settings import Settings
from tests.support import eventually, send, skip_or_fail
from tests.support_command import small_disk
from tests.support_completions import pulled_batch

SMALL = {"shared_buffers": "32MB", "max_connections": "20"}
AS_ROOT = os.geteuid() == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="fabric-pg-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def made_folder() -> Iterator[Path]:
    """A data folder that initdb made once, to be copied; it costs seconds."""
    made = Path(tempfile.mkdtemp(prefix="fabric-pg-"))
    made.chmod(0o755)
    server = _server(made)
    server.start()
    server.stop()
    yield made
    shutil.rmtree(made)


@pytest.fixture
def home(made_folder: Path, folder: Path) -> Path:
    subprocess.run(["cp", "-a", made_folder / "postgres", folder / "postgres"], check=True)
    return folder


def _server(folder: Path, **more: object) -> EmbeddedPostgres:
    return EmbeddedPostgres(
        Place(folder, folder / "postgres", folder / "run"),
        options=SMALL,
        log=folder / "server.log",
        durable_initdb=False,
        **more,  # type: ignore[arg-type]
    )


def _answers(url: str) -> bool:
    try:
        with psycopg.connect(url, connect_timeout=2):
            return True
    except psycopg.OperationalError:
        return False


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_the_server_has_no_tcp_a_private_socket_folder_and_leaves_what_is_above_alone(
    home: Path,
) -> None:
    above = [home, *home.parents]
    before = [(path.stat().st_mode, path.stat().st_uid) for path in above]
    server = _server(home)
    with psycopg.connect(server.start()) as connection:
        tcp = connection.execute("show listen_addresses").fetchone()
        checksums = connection.execute("show data_checksums").fetchone()
    assert (tcp, checksums) == (("",), ("on",))
    assert stat.S_IMODE((home / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "postgres").stat().st_mode) == 0o700
    assert [(path.stat().st_mode, path.stat().st_uid) for path in above] == before
    owner = Path(f"/proc/{server.pid}").stat().st_uid
    server.stop()
    assert owner != 0
    assert owner == (home / "postgres").stat().st_uid


def test_data_outlives_a_clean_stop_and_a_second_owner_is_refused_by_name(home: Path) -> None:
    server = _server(home)
    with psycopg.connect(server.start(), autocommit=True) as connection:
        connection.execute("create table kept (x int)")
    with pytest.raises(AlreadyRunning, match=str(os.getpid())):
        _server(home).start()
    server.stop()
    server.stop()
    assert not (home / "postgres" / "postmaster.pid").exists()
    with psycopg.connect(server.start()) as connection:
        connection.execute("select from kept")
    server.stop()


def test_a_postmaster_killed_in_mid_landing_recovers_and_the_batch_lands_once(home: Path) -> None:
    server = _server(home)
    database = Database(server.start())
    database.migrate()
    writer = Writer(database)
    writer.land(pulled_batch(500, function="generate"))
    assert server.pid is not None
    # the server is killed between the landing's statements, on its own word that it is in one
    killer = threading.Thread(target=_kill_when_landing, args=(database, server.pid))
    killer.start()
    second = pulled_batch(500, function="generate", first=500)
    with closing(psycopg.connect(database.url, autocommit=True)) as blocker:
        blocker.execute("begin; lock table fabric.generate in share mode")
        with pytest.raises(DatabaseUnavailable):
            writer.land(second)
        killer.join(timeout=60)
    server.stop()
    server.start()
    assert results.counts(database)["generate"] == 500
    assert writer.land(second).rows == 500
    assert writer.land(second).rows == 0
    writer.close()
    server.stop()


def _kill_when_landing(database: Database, pid: int) -> None:
    with closing(psycopg.connect(database.url, autocommit=True)) as connection:
        eventually(
            lambda: connection.execute(
                "select 1 from pg_stat_activity where wait_event_type = 'Lock'"
            ).fetchone(),
            within_s=60,
            what="a landing that waits for the table",
        )
        send(pid)


def test_the_server_dies_with_a_killed_parent_and_the_next_one_starts(home: Path) -> None:
    wrapper = _wrapper(home)
    try:
        assert wrapper.stdout is not None
        assert wrapper.stdout.readline().startswith("postgres ready: ")
        pid = int((home / "postgres" / "postmaster.pid").read_text().split()[0])
        wrapper.kill()
        wrapper.wait(timeout=60)
        eventually(lambda: _gone(pid), within_s=60, what="the server ends with its parent")
    finally:
        wrapper.kill()
        wrapper.communicate(timeout=60)
    server = _server(home)
    assert _answers(server.start())
    server.stop()


def test_sigterm_ends_the_foreground_process_cleanly(home: Path) -> None:
    wrapper = _wrapper(home)
    assert wrapper.stdout is not None
    assert wrapper.stdout.readline().startswith("postgres ready: ")
    wrapper.send_signal(signal.SIGTERM)
    _, err = wrapper.communicate(timeout=90)
    assert wrapper.returncode == 0, err
    assert not (home / "postgres" / "postmaster.pid").exists()


def test_a_server_that_ends_by_itself_ends_the_foreground_process_with_1(home: Path) -> None:
    wrapper = _wrapper(home)
    assert wrapper.stdout is not None
    wrapper.stdout.readline()
    pid = int((home / "postgres" / "postmaster.pid").read_text().split()[0])
    send(pid)
    _, err = wrapper.communicate(timeout=90)
    assert wrapper.returncode == 1
    assert "ended by itself" in err


def _wrapper(home: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "FABRIC_HOME": str(home)}
    return subprocess.Popen(
        [sys.executable, "-m", "fabric_pipelines.dataplane.postgres"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_a_server_that_outlived_its_parent_is_stopped_first(home: Path) -> None:
    data, sockets = home / "postgres", home / "run"
    sockets.mkdir()
    os.chown(sockets, data.stat().st_uid, data.stat().st_gid)
    # reachable: the packages may lie in a folder that the server's user cannot enter
    binaries = postgres_binaries.reachable(find_binaries())
    command = [str(binaries.postgres), "-D", str(data), "-k", str(sockets), "-h", ""]
    ids = ids_arguments(data.stat(), die_with_parent=False)
    orphan = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", SHIM, *ids, *command],
        env=server_environment(),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    said: list[str] = []
    server = _server(home, say=said.append)
    eventually(lambda: _answers(server.url), within_s=60, what="the orphan answers")
    reaper = threading.Thread(target=orphan.wait)
    reaper.start()
    server.start()
    reaper.join(10)
    assert said == [f"stopping Postgres {orphan.pid}, which outlived the process that started it"]
    assert server.pid != orphan.pid
    server.stop()


@pytest.mark.parametrize("pid", [os.getpid(), 2**22 + 1], ids=["ours", "nobodys"])
def test_a_pid_file_that_names_somebody_else_stops_nobody(home: Path, pid: int) -> None:
    data = home / "postgres"
    (data / "postmaster.pid").write_text(f"{pid}\n{data}\n0\n5432\n\n\n")
    server = _server(home)
    assert _answers(server.start())
    server.stop()


def test_data_of_another_version_is_refused_with_the_remedy(home: Path) -> None:
    (home / "postgres" / "PG_VERSION").write_text("13\n")
    with pytest.raises(VersionRefused, match="FABRIC_PG_BIN"):
        _server(home).start()


def test_a_folder_with_something_else_in_it_is_left_alone(folder: Path) -> None:
    (folder / "postgres").mkdir()
    (folder / "postgres" / "diary.txt").write_text("mine")
    with pytest.raises(StorageFailed, match="not a Postgres data folder"):
        _server(folder).start()
    assert (folder / "postgres" / "diary.txt").read_text() == "mine"


def test_a_server_that_cannot_start_says_why(home: Path) -> None:
    server = _server(home)
    server.options = {"shared_buffers": "nonsense"}
    with pytest.raises(StorageFailed, match="shared_buffers"):
        server.start()
    assert not server.running


def test_a_socket_path_beyond_the_systems_limit_is_refused(folder: Path) -> None:
    deep = folder / ("d" * 100)
    server = EmbeddedPostgres(Place(folder, folder / "postgres", deep))
    with pytest.raises(SettingsError, match="107"):
        postgres._make_socket_folder(server.place.sockets, os.geteuid())


def test_a_server_older_than_15_is_refused(tmp_path: Path) -> None:
    for name in ("postgres", "initdb"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 14.2'\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(VersionRefused, match=r"14\.2"):
        find_binaries({"FABRIC_PG_BIN": str(tmp_path)})


def test_a_folder_without_a_server_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="FABRIC_PG_BIN"):
        find_binaries({"FABRIC_PG_BIN": str(tmp_path)})


@pytest.mark.skipif(not AS_ROOT, reason="only root drops to another user")
def test_root_with_a_home_and_binaries_nobody_else_can_reach_works_all_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = folder / "state"
    monkeypatch.setattr(postgres, "STATE_DIR", state)
    monkeypatch.setattr(postgres_binaries, "STATE_DIR", state)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    root = find_binaries().root
    libraries = root.parent.with_name(root.parent.name + ".libs")
    for part in (root, libraries):
        if part.is_dir():
            shutil.copytree(part, closed / part.relative_to(root.parent.parent), symlinks=True)
    monkeypatch.setenv("FABRIC_PG_BIN", str(closed / root.relative_to(root.parent.parent) / "bin"))
    settings = Settings(home=closed / "home")
    server = EmbeddedPostgres.of(settings)
    server.durable_initdb, server.options = False, SMALL
    assert _answers(server.start())
    server.stop()
    assert place(settings) == server.place
    assert server.place.elsewhere
    assert (closed / "home" / "postgres").is_symlink()
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    # a home that was emptied must not find its former database, and nothing is deleted
    shutil.rmtree(closed / "home")
    (closed / "home").mkdir()
    said: list[str] = []
    postgres._link_home(server.place, said.append)
    assert "was emptied" in said[0]
    assert not server.place.data.exists()
    assert len(list(server.place.data.parent.glob("data-of-an-emptied-home-*"))) == 1


@pytest.mark.skipif(not AS_ROOT, reason="needs a second user to become")
def test_an_ordinary_user_runs_it_as_itself(folder: Path) -> None:
    home = folder / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    source, packages = Path(postgres.__file__).parents[2], Path(psycopg.__file__).parents[1]
    if not (postgres_binaries.passable(source) and postgres_binaries.passable(packages)):
        pytest.skip("another user cannot read this checkout or these packages")
    wrapper = subprocess.Popen(
        [_python_for_all(), "-B", "-m", "fabric_pipelines.dataplane.postgres"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={
            "PATH": "/usr/bin:/bin",
            "FABRIC_HOME": str(home),
            "PYTHONPATH": f"{source}:{packages}",
        },
        user=65534,
        group=65534,
        extra_groups=[],
    )
    assert wrapper.stdout is not None
    line = wrapper.stdout.readline()
    owner = (home / "postgres").stat().st_uid if (home / "postgres").exists() else None
    wrapper.terminate()
    _, err = wrapper.communicate(timeout=90)
    assert line.startswith("postgres ready: "), err
    assert (owner, wrapper.returncode) == (65534, 0)


def _python_for_all() -> str:
    """This interpreter, or the machine's own of the same version where only root can reach this one."""
    system = Path(f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}")
    for candidate in (Path(sys.executable), system):
        if candidate.exists() and postgres_binaries.passable(candidate.resolve()):
            return str(candidate)
    pytest.skip("no interpreter that another user can run")


def test_the_oldest_server_we_take_keeps_vectors_as_bytes(folder: Path) -> None:
    old = Path("/usr/lib/postgresql/15/bin")
    if not (old / "initdb").exists():
        skip_or_fail("Postgres 15 of the machine")
    server = _server(folder, binaries=find_binaries({"FABRIC_PG_BIN": str(old)}))
    database = Database(server.start())
    database.migrate()
    batch = pulled_batch(20, function="embed", poison={3: float("nan")})
    writer = Writer(database)
    assert (writer.land(batch).rows, writer.land(batch).rows) == (19, 0)
    writer.close()
    assert database.vector_type == "bytea"
    read = results.read(database, function="embed")
    assert read.column("vector")[0].as_py() == batch.column("vector")[0].as_py()
    server.stop()


FULL = "the disk of /d is full: free some space, then run the same command again"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["running bootstrap script ... ", "PANIC: could not write to file: No space left on device", "child process was terminated", "initdb: removing contents"], FULL),
        (['FATAL:  could not extend file "base/1/2691": wrote only 4096 of 8192 bytes at block 10', "HINT:  Check free disk space."], FULL),
        (["initdb: error: could not create directory: Disk quota exceeded"], FULL),
        (["initdb: error: invalid locale name.", "initdb: hint: try another"], "invalid locale name"),
        (["2026-01-01 [1] FATAL:  data directory has wrong ownership", "2026-01-01 [1] HINT:  The server must be"], "data directory has wrong ownership"),
        (["Segmentation fault", ""], "Segmentation fault"),
        ([], "it said nothing"),
    ],
)  # fmt: skip
def test_what_postgres_said_at_its_end_is_a_part_of_one_sentence(
    lines: list[str], says: str
) -> None:
    assert why_ended(lines, Path("/d")) == says


def test_a_server_on_a_full_disk_is_told_in_one_sentence(folder: Path, made_folder: Path) -> None:
    """Not initdb this time: the data is there, and the server finds no room for its pid file."""
    with small_disk(folder, "60m"):
        where = _server(folder).place
        shutil.copytree(made_folder / where.data.name, where.data)
        if AS_ROOT:
            owner = (made_folder / where.data.name).stat()
            for path in [where.data, *where.data.rglob("*")]:
                os.chown(path, owner.st_uid, owner.st_gid)
        (folder / "postgres.lock").write_text("1")
        with (folder / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
            while ballast.write(bytes(1 << 12)):
                pass
        server = _server(folder)
        server.log = made_folder / "server.log"
        with pytest.raises(StorageFailed) as said:
            server.start()
        server.stop()
    text = str(said.value)
    assert f"the disk of {where.data} is full: free some space" in text
    assert not any(word in text for word in ("FATAL", "PANIC", "HINT"))
