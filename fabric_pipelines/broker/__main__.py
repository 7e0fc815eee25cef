"""The broker process: journal, owner, doors; one ready line on stdout; SIGTERM or SIGINT ends it cleanly.

Its first door is on this machine. With `broker_listen` there is a second one for others, over mutual TLS, in front
of the same desk.

Settings come from the environment and fabric.toml. A second broker on the same journal is refused by its lock;
a socket file that a dead broker left behind is removed, one that somebody answers on is not.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from fabric_pipelines import settings as settings_module
from fabric_pipelines.broker import callsocket
from fabric_pipelines.broker.callsocket import CallServer
from fabric_pipelines.broker.checkpoint import Checkpoints
from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.desk import Desk, reason_of
from fabric_pipelines.broker.exporter import Door, export
from fabric_pipelines.broker.home import Home
from fabric_pipelines.broker.losses import told_at_start
from fabric_pipelines.broker.owner import Fatal, Owner
from fabric_pipelines.broker.server import BrokerServer
from fabric_pipelines.broker.tiering import Water
from fabric_pipelines.broker.transport import (
    TLS,
    UNIX,
    Credentials,
    call_path,
    credentials_for,
    prove_strong,
    require_listen,
    require_local,
)
from fabric_pipelines.broker.wire import error_head
from fabric_pipelines.dataplane.cold_store import cold_store
from fabric_pipelines.errors import (
    AlreadyRunning,
    CorruptionFound,
    FabricError,
    SettingsError,
    StorageFailed,
    as_line,
)
from fabric_pipelines.journal import Journal, OsFileOps
from fabric_pipelines.settings import UNIX_PATH_BYTES_MAX, Settings, make_runtime_folder

LOOK_EVERY_S = 1.0
DESCRIPTORS = 16_384
OF_THE_JOURNAL = 1_024  # of those, two a segment
STOP_WAIT_S = 2.0


def main() -> int:
    return run()


def run(settings: Settings | None = None, *, as_json: bool = False) -> int:
    """Exit code of a broker with these settings, or those of the environment."""
    try:
        found = settings_module.load() if settings is None else settings
        try:
            return serve(found, as_json=as_json)
        except CorruptionFound as fault:
            raise told_at_start(fault, found.journal_dir, OsFileOps()) from fault
    except (FabricError, Fatal, OSError) as fault:
        reason = reason_of(fault)
        _say(reason)
        return reason.exit_code


def serve(settings: Settings, *, as_json: bool = False) -> int:
    """Runs until a signal. Raises what keeps it from starting."""
    doors = _doors(settings)
    endpoint = doors[0][0]
    stop = threading.Event()
    _bound_descriptors()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    folder, segment_bytes = settings.journal_dir, settings.segment_bytes
    water = Water(settings.broker_hot_high_water_bytes, settings.broker_hot_low_water_bytes)
    store = cold_store(settings.broker_cold)
    with (
        Journal.open(folder, segment_bytes=segment_bytes, lazy=True, store=store) as journal,
        ThreadPoolExecutor(1, "checkpoint") as writer,
        ThreadPoolExecutor(3, "cold") as porter,  # to bring, to fetch, to remove
    ):
        make_runtime_folder(settings.runtime_dir)
        _free_socket(endpoint)
        limits = Limits(
            lease_s=settings.lease_ms / 1000,
            attempts_max=settings.attempts_max,
            computed_high_water=settings.computed_high_water_tasks,
        )
        owner = Owner(
            journal,
            limits,
            journal_high_water=settings.journal_high_water_bytes,
            tenant_high_water=settings.tenant_high_water_bytes,
            checkpoints=Checkpoints(folder, journal.journal_id, OsFileOps()),
            checkpoint_bytes=settings.checkpoint_bytes,
            background=writer.submit,
            water=water,
            cold_background=porter.submit,
        )
        for reason in owner.restored.ignored:
            print(f"broker: checkpoint ignored: {reason}", file=sys.stderr, flush=True)  # noqa: T201
        home = Home(folder)
        desk = Desk(owner, lambda fault: _end(home.lost() or fault))
        desk.start()
        shared = Door()
        exporter = export(desk, shared, settings.metrics_port) if settings.metrics_port else None
        servers = [_bind(where, desk, credentials, shared) for where, credentials in doors]
        calls = _bind_calls(endpoint, servers[0])
        said = {
            "ready": [where for where, _ in doors],
            "journal": journal.journal_id,
            "incarnation": journal.incarnation,
            "pid": os.getpid(),
            "tasks": owner.core.state.index.count,
        }
        print(_ready(said, as_json), flush=True)  # noqa: T201 - a supervisor waits for this line
        while not stop.wait(LOOK_EVERY_S):
            if (gone := home.lost()) is not None:
                _end(gone)
        if exporter is not None:
            exporter.close()
        clean = _shut(servers, calls, desk)
        owner.finish()
    if not clean:
        os._exit(0)  # the journal is closed; a producer's open stream would keep the interpreter
    return 0


def _ready(said: dict[str, Any], as_json: bool) -> str:
    if as_json:
        return json.dumps(said)
    rest = " ".join(f"{name} {value}" for name, value in said.items() if name != "ready")
    return f"broker ready on {' and '.join(said['ready'])} {rest}"


def _say(fault: FabricError) -> None:
    """Its one sentence, which `fabric up` tells on."""
    print(as_line(fault), file=sys.stderr, flush=True)  # noqa: T201


def _bound_descriptors() -> None:
    """A descriptor for each connection: the usual soft limit of 1,024 is too near, and none at all lets connections that
    say nothing, which pyarrow offers no way to bound, take memory without end. What lies between the soft and the
    hard limit is the journal's own (`journal.files`)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else hard - min(OF_THE_JOURNAL, hard // 4)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(DESCRIPTORS, most), hard))


def _end(fault: FabricError) -> NoReturn:
    """The owner cannot go on: no answer may leave any more, so nothing is unwound."""
    _say(fault)
    os._exit(fault.exit_code)


def _shut(servers: list[BrokerServer], calls: CallServer | None, desk: Desk) -> bool:
    """Answer what was asked, then close. A producer that holds its stream open is cut off after a while
    (False); what it sent is safe."""
    closing = [threading.Thread(target=server.shutdown, daemon=True) for server in servers]
    desk.stop()
    if calls is not None:
        calls.close()
    for thread in closing:
        thread.start()
    until = time.monotonic() + STOP_WAIT_S
    for thread in closing:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in closing)


def _doors(settings: Settings) -> list[tuple[str, Credentials | None]]:
    """Where to serve: on this machine, and for others if they are to be."""
    local, remote = settings.broker_endpoint, settings.broker_listen
    if local.startswith(TLS):
        raise SettingsError(
            f"broker_url {local} names a broker of another machine, so none starts here; to serve others from here "
            "set FABRIC_BROKER_LISTEN to that, and leave FABRIC_BROKER_URL to this machine's own clients"
        )
    doors: list[tuple[str, Credentials | None]] = [(require_local(local), None)]
    if remote:
        credentials = credentials_for(remote, settings)
        doors.append((require_listen(remote, credentials), credentials))
    return doors


def _bind(endpoint: str, desk: Desk, credentials: Credentials | None, shared: Door) -> BrokerServer:
    try:
        server = BrokerServer(endpoint, desk, credentials, shared)
    except (pa.ArrowException, OSError) as fault:
        which = "BROKER_URL" if credentials is None else "BROKER_LISTEN"
        raise StorageFailed(
            f"the broker cannot listen on {endpoint} ({str(fault).splitlines()[0]}): set FABRIC_{which} to "
            "a socket path or port that is free"
        ) from fault
    if credentials is not None:
        prove_strong(endpoint, server.port)
    elif endpoint.startswith(UNIX):
        Path(endpoint.removeprefix(UNIX)).chmod(0o600)
    return server


def _bind_calls(endpoint: str, server: BrokerServer) -> CallServer | None:
    """The call socket beside a Unix socket; none beside a port."""
    path = call_path(endpoint)
    if path is None:
        return None
    try:
        return CallServer(path, server.answer, error_head, upload=server.upload)
    except OSError as fault:
        raise StorageFailed(
            f"the broker cannot listen on {path} ({fault.strerror}): set FABRIC_BROKER_URL to a socket path "
            "that is free"
        ) from fault


def _free_socket(endpoint: str) -> None:
    if not endpoint.startswith(UNIX):
        return
    path = Path(endpoint.removeprefix(UNIX))
    if len(os.fsencode(callsocket.path_beside(path))) > UNIX_PATH_BYTES_MAX:
        raise StorageFailed(
            f"socket path {path} is longer than {UNIX_PATH_BYTES_MAX} bytes: set FABRIC_HOME or "
            "FABRIC_BROKER_URL to a shorter one"
        )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # its broker died without taking it along
            return
        except OSError as fault:
            raise AlreadyRunning(
                f"{path} is in the way ({fault}): remove it or set FABRIC_BROKER_URL"
            ) from fault
    raise AlreadyRunning(
        f"another broker listens on {path}: stop it with `fabric down`, or set FABRIC_BROKER_URL"
    )


if __name__ == "__main__":
    sys.exit(main())
