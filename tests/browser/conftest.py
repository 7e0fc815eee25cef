"""A real webserver over the quickstarted instance, and Chromium to look at it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from fabric_pipelines.dagster_home import WORKSPACE_NAME
from tests.support import eventually, skip_or_fail
from tests.support_quickstart import Demo


class Look(Protocol):
    def __call__(self, path: str, *, picture: Path | None = None) -> str: ...


START_S = 120
LOOK_S = 120
# Wide enough that the lineage draws its nodes with their status. Virtual time: Chromium runs the page's timers ahead until this much has passed or nothing is pending.
BUDGET_MS = 25_000
OFFLINE = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--window-size=2400,1500",
)  # fmt: skip


@pytest.fixture(scope="session")
def webserver(quickstarted: Demo) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = quickstarted.settings.dagster_home
    url = f"http://127.0.0.1:{port}"
    log = quickstarted.folder / "webserver.log"
    serve = ("-h", "127.0.0.1", "-p", str(port), "-w", str(home / WORKSPACE_NAME))
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "dagster_webserver", *serve],
            env={**quickstarted.environment(), "DAGSTER_HOME": str(home)},
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
        try:
            eventually(
                lambda: process.poll() is None and _answers(f"{url}/server_info"),
                within_s=START_S,
                what=f"the webserver answers; its log ends {log.read_text()[-500:]!r}",
            )
            yield url
        finally:
            process.terminate()
            process.wait(30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="session")
def ask(webserver: str) -> Callable[[str], dict[str, Any]]:
    """The `data` of a GraphQL query."""

    def asked(query: str) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{webserver}/graphql",
            json.dumps({"query": query}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer: dict[str, Any] = json.load(reply)
        assert "errors" not in answer, answer["errors"]
        data: dict[str, Any] = answer["data"]
        return data

    return asked


@pytest.fixture(scope="session")
def look(webserver: str) -> Look:
    """The page at a path as Chromium has it once nothing moves any more, as its DOM or as a picture."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if program is None:
        skip_or_fail("Chromium is not installed (Debian: apt-get install chromium)")

    def looked(path: str, *, picture: Path | None = None) -> str:
        shown = ["--dump-dom"] if picture is None else [f"--screenshot={picture}"]
        with tempfile.TemporaryDirectory(
            prefix="fabric-look-",
            ignore_cleanup_errors=True,  # a child of the browser may still write there
        ) as profile:
            command = [
                program, *OFFLINE, f"--user-data-dir={profile}",
                f"--virtual-time-budget={BUDGET_MS}", *shown, f"{webserver}{path}",
            ]  # fmt: skip
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=LOOK_S
            )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return looked
