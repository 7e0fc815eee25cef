"""The processes of `fabric up` on one machine, as a table."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from fabric_pipelines.dagster_home import WORKSPACE_NAME, ensure_dagster_home
from fabric_pipelines.errors import StartFailed
from fabric_pipelines.settings import Settings
from fabric_pipelines.supervise.spec import ProcessSpec, Ready

DEFAULT_ENGINES = (
    "smollm2-135m-instruct@ctranslate2-int8",
    "smollm2-135m-instruct@onnxruntime-fp32",
    "all-minilm-l6-v2@onnxruntime-fp32",
)
PORTS_TRIED = 100
SAYS_READY = Ready(log_pattern=r"^(ready: \w+|\w+ ready)\b")


def process_table(
    settings: Settings, *, ui: bool, engines: Sequence[str]
) -> tuple[list[ProcessSpec], str]:
    """The table and the URL of the UI ("" without one). Raises StartFailed when no port is free."""
    table = []
    if not settings.pg_url:
        table.append(_module("postgres", "dataplane.postgres", stop_timeout_s=60))
    stores = tuple(spec.name for spec in table)
    table += [
        _module("broker", "broker", stop_timeout_s=30),
        _module("completion", "completion", depends_on=("broker", *stores), stop_timeout_s=30),
    ]
    for number, engine in enumerate(engines):
        table.append(
            _module(
                f"worker-{number}",
                "worker",
                "--engine",
                engine,
                "--device",
                f"cpu:{number}",
                ready=Ready(log_pattern=r" runs on "),
                depends_on=("broker",),
                stop_timeout_s=60,
                ready_timeout_s=300,
            )
        )
    if not ui:
        return table, ""
    workspace = ("-w", str(ensure_dagster_home(settings) / WORKSPACE_NAME))
    port = free_port(settings.ui_host, settings.ui_port)
    url = f"http://{settings.ui_host}:{port}"
    home = {"DAGSTER_HOME": str(settings.dagster_home)}
    serve = ("-h", settings.ui_host, "-p", str(port), *workspace)
    table += [
        ProcessSpec(
            name="dagster-webserver",
            argv=(sys.executable, "-m", "dagster_webserver", *serve),
            ready=Ready(http_url=f"{url}/server_info"),
            depends_on=("broker",),
            environment=home,
            ready_timeout_s=300,
        ),
        ProcessSpec(
            name="dagster-daemon",
            argv=(sys.executable, "-m", "dagster._daemon", "run", *workspace),
            ready=Ready(log_pattern=r"configured with the following daemons"),
            depends_on=("broker",),
            environment=home,
            ready_timeout_s=300,
        ),
    ]
    return table, url


def free_port(host: str, first: int) -> int:
    """The first port from `first` on that can be bound."""
    last = min(first + PORTS_TRIED, 65_536)
    for port in range(first, last):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # as the server will: without it a port in TIME_WAIT looks taken
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise StartFailed(
        f"no free port for the Dagster UI on {host} from {first} to {last - 1}: set FABRIC_UI_PORT"
    )


def _module(
    name: str,
    module: str,
    *arguments: str,
    ready: Ready = SAYS_READY,
    depends_on: tuple[str, ...] = (),
    stop_timeout_s: float = 20,
    ready_timeout_s: float = 120,
) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-m", f"fabric_pipelines.{module}", *arguments),
        ready=ready,
        depends_on=depends_on,
        stop_timeout_s=stop_timeout_s,
        ready_timeout_s=ready_timeout_s,
    )
