"""Connections that say nothing: pyarrow offers no way to bound them, and gRPC gives one up after a minute at the earliest.

They cost a descriptor each and never the broker's work: what is connected goes on, and the journal has descriptors of its
own that no connection can take. docs/operations.md has the limits.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fabric_pipelines import settings
from fabric_pipelines.broker.client import BrokerClient
from tests.support import eventually
from tests.support_broker import LANDED, completions, ids_of, submission_of, tasks_of
from tests.support_broker_process import Broker, attach

SILENT = 2_000
SEGMENT_BYTES = 1 << 16
SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # an empty frame, RFC 9113 section 6.5
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS
ACKNOWLEDGED = b"\0\0\0\4\1\0\0\0\0"  # the server's own settings
SAID = (b"", PREFACE, PREFACE + ACKNOWLEDGED)
FEW = 512  # descriptors


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """For this end of the connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = SILENT + 1_000
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"{wanted} descriptors are needed, {hard} is the most there may be")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    flags = {"home": tmp_path / "home", "segment_bytes": SEGMENT_BYTES, "lease_ms": 60_000}
    made = Broker(settings.load(flags, {}, tmp_path))
    made.start()
    yield made
    made.kill()


def silent_ones(broker: Broker, stack: ExitStack, count: int) -> list[socket.socket]:
    """Some say nothing at all, some begin in HTTP/2, some are clients in all but a request."""
    path = broker.settings.broker_endpoint.removeprefix("grpc+unix://")
    made = []
    for at in range(count):
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.connect(path)
        connection.sendall(SAID[at % len(SAID)])
        made.append(connection)
    return made


def held_by(broker: Broker) -> int:
    assert broker.process is not None
    return len(list(Path(f"/proc/{broker.process.pid}/fd").iterdir()))


def work(producer: BrokerClient, worker: BrokerClient, completion: BrokerClient, mark: int) -> int:
    """Tasks that went all the way, over segments' ends: submitted, leased, computed and retired."""
    batches = [tasks_of([200] * 20, seed=100 * mark + at) for at in range(8)]
    assert producer.submit(submission_of(batches, mark), batches).closed
    retired = 0
    while (lease := worker.lease(sequences=64, tokens=1 << 20, kv_tokens=None)) is not None:
        worker.computed(completions(ids_of(lease)))
        while (rows := completion.pull_computed(rows=500)) is not None:
            retired += completion.retire(rows.column("task_id"), LANDED)
    return retired


@pytest.mark.parametrize("descriptors", [0, FEW])
@pytest.mark.usefixtures("many_descriptors")
def test_two_thousand_silent_connections_stop_no_lease_no_acknowledgement_and_no_segment(
    broker: Broker, descriptors: int
) -> None:
    """With all descriptors that a broker takes for itself, and with so few that these use up every one of them."""
    assert broker.process is not None
    clients = [broker.client(role) for role in ("producer", "worker", "completion", "admin")]
    with ExitStack() as stack:
        producer, worker, completion, admin = map(stack.enter_context, clients)
        attach(worker)
        assert work(producer, worker, completion, 1) == 160
        if descriptors:
            limit = resource.RLIMIT_NOFILE
            _, hard = resource.prlimit(broker.process.pid, limit)
            resource.prlimit(broker.process.pid, limit, (descriptors, hard))
        before = admin.status()
        made = silent_ones(broker, stack, SILENT)
        reached = descriptors - 8 if descriptors else SILENT
        eventually(lambda: held_by(broker) >= reached, within_s=60, what="all are connected")
        for mark in range(2, 6):
            assert work(producer, worker, completion, mark) == 160
        after = admin.status()
        assert after.total.retired.tasks == 5 * 160
        assert after.journal["durable_lsn"] > before.journal["durable_lsn"]
        assert after.journal["segments"] + after.counters["segments_dropped"] >= 8, (
            "segments were filled and others begun"
        )
        assert admin.verify().differences == []
        for connection in made:
            connection.close()
        eventually(lambda: held_by(broker) < 200, within_s=60, what="they are let go of")
        with broker.client("admin") as newcomer:
            assert newcomer.status().total.open_tasks == 0
