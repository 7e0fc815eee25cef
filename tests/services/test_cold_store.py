"""The cold tier over real stores: a folder, and S3 (SeaweedFS); then a broker process whose log lies mostly there."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_pipelines import settings
from fabric_pipelines.dataplane.cold_store import BucketStore, FolderStore, cold_store
from fabric_pipelines.errors import (
    Backpressure,
    StorageFailed,
    StoreUnreachable,
    TransientError,
)
from fabric_pipelines.journal import Journal, ObjectStore
from tests.services.test_broker_process import Broker
from tests.support import eventually
from tests.support_broker import LANDED, PROFILE, completions, ids_of, submission_of, tasks_of
from tests.support_s3 import environment_of, free_ports, make_bucket, seaweed

BUCKET = "cold"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as url:
        yield url


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> BucketStore:
    for name, value in environment_of(endpoint).items():
        monkeypatch.setenv(name, value)
    made = cold_store(f"s3://{BUCKET}/journals")
    assert isinstance(made, BucketStore)
    make_bucket(made._files, BUCKET)
    return made


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "s3":
        found: ObjectStore = request.getfixturevalue("bucket")
        return found
    made = cold_store(str(tmp_path / "cold"))
    assert isinstance(made, FolderStore)
    return made


def pieces(content: bytes, step: int) -> Iterator[memoryview]:
    for at in range(0, len(content), step):
        yield memoryview(content)[at : at + step]


def test_an_object_is_kept_whole_read_by_range_replaced_and_removed(store: ObjectStore) -> None:
    content = np.random.default_rng(1).bytes(18 << 20)  # more than one block of a multipart upload
    name = "a" * 32 + "/00000007.segment"
    assert store.size(name) is None
    assert store.read(name, 0, 10) == b""
    store.remove(name)
    store.put(name, pieces(content, 5 << 20), len(content))
    assert store.size(name) == len(content)
    assert store.read(name, 0, 64) == content[:64]
    assert store.read(name, (17 << 20) + 3, 1000) == content[(17 << 20) + 3 :][:1000]
    assert store.read(name, len(content) - 5, 64) == content[-5:]
    assert store.read(name, len(content), 64) == b""
    assert store.read(name, len(content) + 99, 64) == b""
    store.put(name, pieces(b"shorter", 7), 7)
    assert (store.size(name), store.read(name, 0, 64)) == (7, b"shorter")
    store.remove(name)
    assert store.size(name) is None


def test_a_put_that_breaks_off_leaves_no_half_object(store: ObjectStore) -> None:
    def broken() -> Iterator[memoryview]:
        yield memoryview(bytes(20 << 20))
        raise StoreUnreachable("the broker is stopping")

    with pytest.raises(StoreUnreachable, match="stopping"):
        store.put("b" * 32 + "/00000001.segment", broken(), 40 << 20)
    assert store.size("b" * 32 + "/00000001.segment") is None


def test_a_segment_goes_and_comes_back_and_is_scrubbed(store: ObjectStore, tmp_path: Path) -> None:
    with Journal.open(tmp_path / "j", segment_bytes=1 << 16, lazy=True, store=store) as journal:
        for at in range(20):
            journal.append(1, bytes([at]) * 1000, rows=1, time_us=1)
        journal.commit()
        journal.roll()
        segment = journal.sealed_segment(1)
        assert segment is not None
        stub = journal.cold.copy_out(segment)
        journal.went_cold(stub, journal.durable_lsn)
        assert [bytes(frame.payload[:2]) for frame in journal.replay()] == [
            bytes([at, at]) for at in range(20)
        ]
        assert bytes(journal.read(7).payload) == bytes([6]) * 1000
        assert journal.cold.scrub(segment).damaged == ()
        assert journal.recycle_below(stub.last_lsn + 1) == 1
        journal.cold.remove(stub)
        assert store.size(journal.cold.object_name(1)) is None


def test_a_store_that_is_not_there_may_be_tried_again(
    bucket: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    lost = BucketStore(f"s3://{BUCKET}/journals")
    for call in (
        lambda: lost.size("x/1"),
        lambda: lost.read("x/1", 0, 10),
        lambda: lost.put("x/1", pieces(b"abc", 3), 3),
        lambda: lost.remove("x/1"),
    ):
        with pytest.raises(StoreUnreachable, match=r"cannot .* s3://cold/journals"):
            call()


def test_wrong_keys_are_told_as_what_they_are(
    bucket: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorageFailed, match="check bucket and credentials"):
        BucketStore(f"s3://{BUCKET}/journals").put("x/1", pieces(b"abc", 3), 3)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageFailed, match="cannot keep"):
        FolderStore(tmp_path / "file").put("x/1", pieces(b"abc", 3), 3)


# -- a broker process

TASKS, BATCHES = 200, 16


@pytest.fixture
def broker(tmp_path: Path, store: ObjectStore) -> Iterator[Broker]:
    flags = {
        "home": tmp_path / "home",
        "segment_bytes": 1 << 18,
        "checkpoint_bytes": 1 << 18,
        "broker_cold": store.where,
        "broker_hot_high_water_bytes": 1 << 19,
        "broker_hot_low_water_bytes": 1 << 18,
        "lease_ms": 2_000,
    }
    made = Broker(settings.load(flags, dict(os.environ), tmp_path))
    yield made
    if made.process is not None:
        made.kill()


def status_of(broker: Broker) -> Any:
    with broker.client("admin") as client:
        return client.status()


def submit(broker: Broker, mark: int) -> int:
    batches = [tasks_of([60] * TASKS, seed=100 * mark + at) for at in range(BATCHES)]
    with broker.client("producer") as client:
        return client.submit(submission_of(batches, mark), batches).enqueued


def drain(broker: Broker, session: str) -> int:
    """Lease, report and retire until nothing is left; how many were retired."""
    retired = 0

    def some() -> bool:
        nonlocal retired
        with broker.client("consumer", session) as worker, broker.client("completion", "c") as sink:
            worker.attach(engine="model@engine", engine_fingerprint="f", device="cpu:0",
                          profile=PROFILE, held=())  # fmt: skip
            while True:
                try:
                    lease = worker.lease(sequences=64, tokens=1 << 20, kv_tokens=None)
                except Backpressure:
                    return False
                if lease is None:
                    break
                worker.computed(completions(ids_of(lease)))
            while (pulled := sink.pull_computed(rows=1000)) is not None:
                retired += sink.retire(pulled.column("task_id").to_pylist(), LANDED)
        total = status_of(broker).total
        return bool(total.enqueued.tasks == total.retired.tasks)

    eventually(some, within_s=60, what="everything is retired")
    return retired


@pytest.mark.slow
def test_a_broker_works_through_a_log_that_lies_mostly_in_the_store(
    broker: Broker, store: ObjectStore
) -> None:
    broker.start()
    for mark in range(2):
        assert submit(broker, mark) == TASKS * BATCHES
    eventually(
        lambda: status_of(broker).journal["cold_segments"] >= 3, within_s=30, what="segments go"
    )
    with broker.client("admin") as client:
        assert client.verify().ok
        report = client.scrub()
        assert report.ok
        assert report.segments >= 4
    code, errors = broker.end(signal.SIGTERM)
    assert (code, errors) == (0, "")
    broker.start()
    assert drain(broker, "w") == 2 * TASKS * BATCHES
    found = status_of(broker)
    assert found.counters["cold_fetches"] > 0
    assert found.total.balance.tasks == 0
    with broker.client("admin") as client:
        assert client.verify().ok


@pytest.mark.slow
def test_kill_9_at_any_moment_of_a_life_with_a_cold_tier_loses_and_doubles_nothing(
    broker: Broker,
) -> None:
    """A soak, short here. It shows the logic of restarts in a real process, not durability: the page cache
    survives a kill, so a missing fsync would pass. That is what the enumerated crash states are for."""
    broker.start()
    stop, sent = threading.Event(), []

    def produce() -> None:
        for mark in range(3):
            while not stop.is_set():
                try:
                    sent.append(submit(broker, mark))
                    break
                except (TransientError, StorageFailed):
                    stop.wait(0.05)

    producer = threading.Thread(target=produce)
    producer.start()
    pause = np.random.default_rng(3)
    kills = 0
    try:
        while producer.is_alive() or kills < 5:
            producer.join(float(pause.uniform(0.3, 1.2)))
            broker.kill()
            kills += 1
            broker.start()
            assert kills < 60
    finally:
        stop.set()
        producer.join()
    assert sent == [TASKS * BATCHES] * 3
    drain(broker, "w")
    total = status_of(broker).total
    assert total.retired.tasks == 3 * TASKS * BATCHES
    assert (total.balance.tasks, total.balance.tokens) == (0, 0)
    with broker.client("admin") as client:
        assert client.verify().ok
