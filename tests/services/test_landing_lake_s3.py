"""The lake on a real S3 server (SeaweedFS): what was put is read back whole, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.dataplane.lake import Lake
from fabric_pipelines.errors import DigestMismatch, StorageFailed, TransientError
from tests.support_s3 import environment_of, free_ports, make_bucket, seaweed

BUCKET = "lake"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as url:
        yield url


@pytest.fixture
def lake(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Lake:
    _use(endpoint, monkeypatch)
    made = Lake(f"s3://{BUCKET}/results")
    make_bucket(made._store._files, BUCKET)  # type: ignore[union-attr]
    return made


def _use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(endpoint).items():
        monkeypatch.setenv(name, value)


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
    _use(f"http://127.0.0.1:{free_ports(1)[0]}", monkeypatch)
    with pytest.raises(TransientError):
        Lake(f"s3://{BUCKET}/results").put("x.bin", b"abc")
