"""Bad input over the real wire: each kind is refused with its own type, and nothing of it is in the log.

The tables name every kind; each case is sent to a real broker process, through the door of this machine and through
the one for others. `unchanged` compares the log's last LSN and its bytes before and after. Strange values in every
field of every request are drawn in tests/unit/broker/test_bad_requests.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from fabric_pipelines import settings
from fabric_pipelines.broker import certificates
from fabric_pipelines.broker.callsocket import (
    FRAME_BYTES_MAX,
    MAGIC,
    CallConnection,
    CallStream,
    receive,
)
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.broker.envelope import pack
from fabric_pipelines.broker.transport import call_path
from fabric_pipelines.broker.wire import from_flight_error, message, raise_error, read_message
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.errors import (
    AlreadyRunning,
    BrokerUnavailable,
    FabricError,
    IncarnationMismatch,
    NotAttached,
    Refused,
    SchemaError,
    StorageFailed,
    SubmissionConflict,
    UsageError,
    VersionRefused,
    WrongRole,
    WrongTenant,
    by_code,
)
from fabric_pipelines.journal.frame import CONTROL_FRAME_BYTES
from fabric_pipelines.records.arrow import crc32c, to_ipc
from fabric_pipelines.records.task import TASK_SCHEMA, column_checksums
from fabric_pipelines.supervise.table import free_port
from tests.support import eventually
from tests.support_broker import (
    BURIED,
    LANDED,
    PROFILE,
    Bench,
    completions,
    ids_of,
    submission_of,
    tasks_of,
)
from tests.support_broker_process import (
    Broker,
    Served,
    attach,
    credentials_of,
    finish_everything,
    served_settings,
)

GOOD = tasks_of([10] * 4)
TAKEN = submission_of([GOOD], 1, tenant="acme")
DOORS = ("local", "tls")
CERTIFICATE = {"producer": "acme-producer", "worker": "consumer"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("bad-input")
    clients = ["consumer", "completion", "admin", "acme/producer"]
    certificates.make(folder / "papers", hosts=["127.0.0.1"], clients=clients)
    endpoint = f"grpc+tls://127.0.0.1:{free_port('127.0.0.1', 18_571)}"
    loaded = served_settings(folder / "home", folder / "papers", endpoint)
    broker = Broker(replace(loaded, lease_ms=60_000, segment_bytes=1 << 24))
    broker.start()
    with broker.client("producer") as producer:
        producer.submit(TAKEN, [GOOD])
    yield Served(broker, folder / "papers", endpoint)
    broker.kill()


@contextmanager
def unchanged(served: Served) -> Iterator[None]:
    """The log is as it was: nothing appended, nothing half-written. An idle broker may have added the mark that says
    that all before it is durable; it is no frame, and carries nothing of a request."""
    with served.broker.client("admin") as admin:
        lsn, size = admin.hello().durable_lsn, admin.status().journal["bytes"]
        yield
        assert admin.hello().durable_lsn == lsn
        assert admin.status().journal["bytes"] - size in (0, CONTROL_FRAME_BYTES)


def client(served: Served, door: str, role: str) -> BrokerClient:
    if door == "local":
        return served.broker.client(role)
    return served.remote(CERTIFICATE.get(role, role), role=role)


def raw_flight(served: Served, door: str, role: str) -> flight.FlightClient:
    """As a client in another language would connect."""
    if door == "local":
        return flight.FlightClient(served.broker.settings.broker_endpoint)
    mine = credentials_of(served.papers, CERTIFICATE.get(role, role))
    return flight.FlightClient(
        served.endpoint, tls_root_certs=mine.ca, cert_chain=mine.chain, private_key=mine.key
    )


# ---- uploads


def tokens_with(offsets: list[int], values: int = 40) -> pa.RecordBatch:
    """Four prompts whose offsets are what they are."""
    ends = pa.py_buffer(np.array(offsets, np.int32))
    child = pa.array(range(values), pa.uint32())
    rows = len(offsets) - 1
    lists = pa.Array.from_buffers(pa.list_(pa.uint32()), rows, [None, ends], children=[child])
    return with_tokens(lists)


def with_tokens(lists: pa.Array) -> pa.RecordBatch:
    rows = len(lists)
    columns = [
        lists,
        pa.array([16] * rows, pa.uint32()),
        pa.array(range(rows), pa.int64()),
        pa.array([b""] * rows, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=TASK_SCHEMA)


def nested(rows: list[list[int] | None]) -> pa.RecordBatch:
    return with_tokens(pa.array(rows, pa.list_(pa.uint32())))


@dataclass(frozen=True)
class Upload:
    """What is sent, and what comes of it. head: changes of the header; note: of the batch's own, None for none."""

    kind: str
    expected: type[FabricError] | tuple[type[FabricError], ...]
    match: str
    batch: pa.RecordBatch = field(default_factory=lambda: GOOD)
    head: dict[str, Any] | None = None
    note: dict[str, Any] | None = None


LARGE = nested([[1] * 16_900_000])

UPLOADS = [
    Upload(
        "wrong schema, a column missing", SchemaError, "lacks the column", GOOD.select([0, 1, 2])
    ),
    Upload(
        "wrong schema, another type",
        SchemaError,
        "must be uint32",
        GOOD.set_column(1, "max_new_tokens", pa.array([1] * 4, pa.int64())),
    ),
    Upload("negative offsets", SchemaError, "not valid Arrow", tokens_with([0, -8, 20, 30, 40])),
    Upload(
        "out-of-bounds offsets",
        SchemaError,
        "not valid Arrow",
        tokens_with([0, 10, 1 << 30, 30, 40]),
    ),
    Upload(
        "offsets that run backwards", SchemaError, "not valid", tokens_with([0, 30, 10, 35, 40])
    ),
    Upload("empty tokens", SchemaError, "empty prompt in row 2", nested([[1], [2], [], [3]])),
    Upload("null tokens", SchemaError, "nulls", nested([[1], None, [2], [3]])),
    Upload("no rows", SchemaError, "no rows", GOOD.slice(0, 0)),
    Upload(
        "token ids above the declared vocabulary",
        SchemaError,
        "the vocabulary ends at 2",
        head={"vocab_size": 3},
    ),
    Upload(
        "an oversized frame",
        UsageError,
        "send fewer tasks",
        LARGE,
        head={"tasks": 1, "tokens": 16_900_000},
    ),
    Upload(
        "a duplicate submission with different content",
        SubmissionConflict,
        "set the salt",
        head={"submission_id": TAKEN.submission_id, "tokens": 41, "fingerprint": "0" * 64},
    ),
    Upload("an unknown protocol version", VersionRefused, "protocol 99", head={"protocol": 99}),
    Upload("a protocol that equals one", VersionRefused, "protocol True", head={"protocol": True}),
    Upload("a fingerprint that is none", UsageError, "fingerprint", head={"fingerprint": "zz"}),
    Upload(
        "a row that equals one",
        SchemaError,
        "app_metadata",
        note={"first_row": False, "crc32c": [0]},
    ),
    Upload("no protocol version", VersionRefused, "protocol None", head={"protocol": None}),
    Upload("more tasks than declared", SubmissionConflict, "declared", head={"tasks": 2}),
    Upload("more tokens than declared", SubmissionConflict, "declared", head={"tokens": 39}),
    Upload("a wrong checksum", SchemaError, "CRC32C", note={"first_row": 0, "crc32c": [0] * 6}),
    Upload("no checksum", SchemaError, "app_metadata", note={}),
    Upload(
        "a row before the first", UsageError, "row -1", note={"first_row": -1, "crc32c": [0] * 6}
    ),
    Upload("a gap before the first row", SubmissionConflict, "past", note={"first_row": 7}),
    Upload("a tenant that is no name", (UsageError, WrongTenant), "tenant", head={"tenant": "a/b"}),
    Upload(
        "an engine that no outcome can name", UsageError, "129 bytes", head={"engine": "e" * 129}
    ),
    Upload("a count that is no number", UsageError, "field tasks", head={"tasks": "four"}),
    Upload("a field that is not one", UsageError, "surprise", head={"surprise": 1}),
]


def upload(served: Served, door: str, case: Upload) -> None:
    """Raises what the broker answers; whatever it is, a producer must be able to read it."""
    header = json.loads(submission_of([GOOD], 77, tenant="acme").to_json())
    head = {**header, "protocol": 1, "role": "producer", **(case.head or {})}
    note = {"first_row": 0, "crc32c": [0] * 6}
    with suppress(Exception):
        note["crc32c"] = column_checksums(case.batch)
    note = note if case.note is None else ({**note, **case.note} if case.note else {})
    if door == "call":
        say_on_the_call_socket(
            served, head, [({**note, "do": "batch"}, to_ipc(case.batch)), ({"do": "end"},)]
        )
        return
    descriptor = flight.FlightDescriptor.for_command(json.dumps(head).encode())
    faults: list[Exception] = []
    with raw_flight(served, door, "producer") as raw:
        writer, reader = raw.do_put(descriptor, case.batch.schema)
        with suppress_into(faults):
            writer.write_with_metadata(case.batch, json.dumps(note).encode())
            writer.done_writing()
        with suppress_into(faults), writer:
            while (answer := reader.read()) is not None:
                raise_error(json.loads(bytes(answer)))
    for fault in faults:
        raise from_flight_error(fault, "the broker") from fault


def call_stream(served: Served, head: dict[str, Any]) -> CallStream:
    path = call_path(served.broker.settings.broker_endpoint)
    assert path is not None
    return CallStream.opened(
        path, served.broker.settings.broker_endpoint, json.dumps(head).encode()
    )


def say_on_the_call_socket(
    served: Served, head: dict[str, Any], frames: Sequence[tuple[Any, ...]]
) -> list[dict[str, Any]]:
    """Every answer; raises the error among them."""
    stream, answers = call_stream(served, head), []
    with closing(stream):
        with suppress(BrokenPipeError, ConnectionResetError):
            for said, *parts in frames:
                stream.send(said, *parts)
        while (found := stream.read()) is not None:
            raise_error(found[0])
            answers.append(found[0])
    return answers


@contextmanager
def suppress_into(faults: list[Exception]) -> Iterator[None]:
    try:
        yield
    except (flight.FlightError, pa.ArrowException) as fault:
        faults.append(fault)


@pytest.mark.parametrize("door", [*DOORS, "call"])
@pytest.mark.parametrize("case", UPLOADS, ids=lambda case: case.kind)
def test_an_upload_of(served: Served, door: str, case: Upload) -> None:
    with unchanged(served), pytest.raises(case.expected, match=case.match):
        upload(served, door, case)


@pytest.mark.parametrize("door", DOORS)
def test_a_tenant_that_claims_anothers_lane(served: Served, door: str) -> None:
    """On this machine the tenant is the submitter's word, which the socket's permissions guard."""
    other = submission_of([GOOD], 78, tenant="beta")
    with client(served, door, "producer") as producer:
        if door == "local":
            assert producer.submit(other, [GOOD]).closed
            return
        with unchanged(served), pytest.raises(WrongTenant, match="FABRIC_TENANT=acme"):
            producer.submit(other, [GOOD])


FRAME = {"do": "batch", "first_row": 0, "crc32c": column_checksums(GOOD)}
FRAMES: list[tuple[str, Sequence[tuple[Any, ...]], type[FabricError], str]] = [
    ("an operation it is not for", [({"do": "lease"},)], SchemaError, "batches and an end"),
    ("no operation", [({},)], SchemaError, "batches and an end"),
    ("a batch without its bytes", [(FRAME,)], SchemaError, "batches and an end"),
    (
        "a batch twice over",
        [(FRAME, to_ipc(GOOD), to_ipc(GOOD))],
        SchemaError,
        "batches and an end",
    ),
    (
        "bytes that are no batch",
        [(FRAME, b"rubbish" * 99)],
        SchemaError,
        "not a valid Arrow IPC stream",
    ),
    ("no bytes", [(FRAME, b"")], SchemaError, "it ends before its batch"),
    (
        "half a batch",
        [(FRAME, to_ipc(GOOD)[: len(to_ipc(GOOD)) // 2])],
        SchemaError,
        "not a valid Arrow IPC stream",
    ),
    ("numbers that are none", [({**FRAME, "first_row": "0"}, to_ipc(GOOD))], SchemaError, "note"),
    ("a check that is no list", [({**FRAME, "crc32c": 1}, to_ipc(GOOD))], SchemaError, "note"),
]


@pytest.mark.parametrize(
    ("kind", "frames", "expected", "match"), FRAMES, ids=lambda it: str(it)[:30]
)
def test_a_frame_of_an_upload_that_is(
    served: Served,
    kind: str,
    frames: Sequence[tuple[Any, ...]],
    expected: type[FabricError],
    match: str,
) -> None:
    header = json.loads(submission_of([GOOD], 79, tenant="acme").to_json())
    head = {**header, "protocol": 1, "role": "producer"}
    with unchanged(served), pytest.raises(expected, match=match):
        say_on_the_call_socket(served, head, frames)


@pytest.mark.parametrize("parts", [(), (b"",), (b"[1]",), (b" " * (2 << 20),)], ids=len)
def test_an_upload_that_does_not_begin_with_a_header(
    served: Served, parts: Sequence[bytes]
) -> None:
    path = call_path(served.broker.settings.broker_endpoint)
    assert path is not None
    connection = CallConnection(path, served.broker.settings.broker_endpoint)
    with unchanged(served), closing(connection):
        answer, _ = connection.call("upload", {}, parts, 10)
        with pytest.raises(UsageError, match=r"header|malformed"):
            raise_error(answer)


def test_an_upload_cut_anywhere_on_the_call_socket_leaves_whole_batches(served: Served) -> None:
    """A stream of two batches that ends after each of a few hundred places; every one can be gone on with."""
    batches = [tasks_of([10] * 4, seed=7), tasks_of([10] * 4, seed=8)]
    path = call_path(served.broker.settings.broker_endpoint)
    assert path is not None
    frames = []
    for first, batch in zip((0, 4), batches, strict=True):
        note = {"do": "batch", "first_row": first, "crc32c": column_checksums(batch)}
        frames.append(framed(note, to_ipc(batch)))
    sent = b"".join([*frames, framed({"do": "end"})])
    places = [
        *range(0, len(sent), len(sent) // 40),
        len(frames[0]),
        len(frames[0]) + 1,
        len(sent) - 1,
    ]
    for number, place in enumerate(places):
        header = submission_of(batches, 1000 + number, tenant="acme")
        head = {**json.loads(header.to_json()), "protocol": 1, "role": "producer"}
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(path))
            raw.sendall(framed({"do": "upload"}, json.dumps(head).encode()) + sent[:place])
            raw.shutdown(socket.SHUT_WR)
            while receive(raw) is not None:
                pass
        with client(served, "local", "producer") as producer:
            state = producer.submission(header.submission_id)
            enqueued = 0 if state is None else state.enqueued
            whole = sum(place >= end for end in accumulate(map(len, frames)))
            assert enqueued == 4 * whole, place
            assert producer.submit(header, batches).closed


def framed(head: dict[str, Any], *parts: bytes) -> bytes:
    body = b"".join(pack(head, parts))
    return MAGIC + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("door", DOORS)
def test_a_stream_that_breaks_off_leaves_whole_batches_or_nothing(
    served: Served, door: str
) -> None:
    batches = [tasks_of([10] * 4, seed=5), tasks_of([10] * 4, seed=6)]
    header = submission_of(batches, 80 + DOORS.index(door), tenant="acme")
    head = {**json.loads(header.to_json()), "protocol": 1, "role": "producer"}
    raw = raw_flight(served, door, "producer")
    descriptor = flight.FlightDescriptor.for_command(json.dumps(head).encode())
    writer, reader = raw.do_put(descriptor, TASK_SCHEMA)
    assert json.loads(bytes(reader.read()))["enqueued"] == 0
    note = {"first_row": 0, "crc32c": column_checksums(batches[0])}
    writer.write_with_metadata(batches[0], json.dumps(note).encode())
    assert json.loads(bytes(reader.read()))["enqueued"] == 4
    raw.close()  # in the middle of its stream
    del writer, reader, raw
    with client(served, door, "producer") as producer:
        state = producer.submission(header.submission_id)
        assert state is not None
        assert (state.enqueued, state.closed) == (4, False)
        assert producer.submit(header, batches).closed


# ---- requests


@dataclass(frozen=True)
class Request:
    kind: str
    role: str
    call: Callable[[BrokerClient], Any]
    expected: type[FabricError]
    match: str


def tampered(batch: pa.RecordBatch, find: bytes, put: bytes) -> bytes:
    """A completion batch as bytes, changed after it was made."""
    ipc = to_ipc(batch)
    assert ipc.count(find) >= 1
    return ipc.replace(find, put, 1)


OFFSETS = np.arange(0, 10, 2, dtype=np.int32).tobytes()  # of four outputs of two tokens
BROKEN = np.array([0, 2, 1 << 28, 6, 8], np.int32).tobytes()
NEGATIVE = np.array([0, -2, 4, 6, 8], np.int32).tobytes()


def report(ipc: bytes, check: int | None = None) -> Callable[[BrokerClient], Any]:
    return lambda c: c._call("computed", {"crc32c": crc32c(ipc) if check is None else check}, ipc)


def ask(name: str, *parts: bytes, **head: Any) -> Callable[[BrokerClient], Any]:
    return lambda c: c._call(name, head, *parts)


FOUR = completions([1, 2, 3, 4])
REQUESTS = [
    Request(
        "completion of another schema",
        "worker",
        report(to_ipc(GOOD)),
        SchemaError,
        "lacks the column",
    ),
    Request(
        "completion with a wrong checksum", "worker", report(to_ipc(FOUR), 1), SchemaError, "CRC"
    ),
    Request("completion cut short", "worker", report(to_ipc(FOUR)[:200]), SchemaError, "Arrow IPC"),
    Request(
        "completion with offsets out of bounds",
        "worker",
        report(tampered(FOUR, OFFSETS, BROKEN)),
        SchemaError,
        "Arrow IPC",
    ),
    Request(
        "completion with negative offsets",
        "worker",
        report(tampered(FOUR, OFFSETS, NEGATIVE)),
        SchemaError,
        "Arrow IPC",
    ),
    Request(
        "completion with a status that is not one",
        "worker",
        report(to_ipc(completions([1], "fine"))),
        SchemaError,
        "status",
    ),
    Request(
        "unknown task, retired",
        "completion",
        lambda c: c.retire([1 << 41], LANDED),
        UsageError,
        "not of this journal",
    ),
    Request(
        "unknown task, buried",
        "completion",
        lambda c: c.dead([1 << 41], BURIED),
        UsageError,
        "not of this journal",
    ),
    Request(
        "unknown submission, closed",
        "producer",
        ask("close", submission_id="0" * 64),
        UsageError,
        "not known",
    ),
    Request(
        "a session whose engine no outcome can name",
        "worker",
        lambda c: c.attach(
            engine="é" * 65, engine_fingerprint="f", device="cpu:0", profile=PROFILE
        ),
        UsageError,
        "engine is of 130 bytes",
    ),
    Request(
        "a session whose engine has a fingerprint like a book",
        "worker",
        lambda c: c.attach(
            engine="e", engine_fingerprint="f" * 65, device="cpu:0", profile=PROFILE
        ),
        UsageError,
        "engine_fingerprint is of 65 bytes",
    ),
    Request("a session that is not attached", "worker", lambda c: c.renew(), NotAttached, "attach"),
    Request(
        "a worker that tries to retire",
        "worker",
        lambda c: c.retire([1], LANDED),
        WrongRole,
        "may not settle: only completion",
    ),
    Request(
        "a producer that leases",
        "producer",
        lambda c: c.lease(sequences=1, tokens=1, kv_tokens=None),
        WrongRole,
        "may not lease: only consumer",
    ),
    Request("a completion that verifies", "completion", lambda c: c.verify(), WrongRole, "verify"),
    Request("an admin that reports", "admin", report(to_ipc(FOUR)), WrongRole, "may not computed"),
    Request(
        "an operation that does not exist",
        "admin",
        ask("explode"),
        UsageError,
        "no operation 'explode'",
    ),
    Request(
        "ids that are not whole",
        "completion",
        ask("settle", b"123", dead=False, kind="postgres", proof=LANDED.proof),
        UsageError,
        "malformed",
    ),
    Request(
        "a confirmation without proof",
        "completion",
        ask("settle", b"", dead=False, kind="postgres", proof={}),
        UsageError,
        "lacks cluster",
    ),
    Request(
        "a number past every column",
        "worker",
        ask("lease", sequences=10**30, tokens=1, kv_tokens=None, call=1),
        UsageError,
        "sequences must be",
    ),
    Request(
        "a profile of nonsense",
        "worker",
        ask(
            "attach", b"", engine="e", engine_fingerprint="f", device="d", profile={"a": 1}, call=1
        ),
        UsageError,
        "malformed",
    ),
    Request(
        "a place that is no text",
        "worker",
        ask(
            "attach",
            b"",
            engine="e",
            engine_fingerprint="f",
            device="d",
            profile=PROFILE.as_json(),
            call=1,
            place=["cuda:0"],
        ),
        UsageError,
        "place must be",
    ),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", REQUESTS, ids=lambda case: case.kind)
def test_a_request_of(served: Served, door: str, case: Request) -> None:
    with (
        client(served, door, case.role) as caller,
        unchanged(served),
        pytest.raises(case.expected, match=case.match),
    ):
        case.call(caller)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
def test_a_request_of_an_unknown_protocol_version(served: Served, door: str, version: Any) -> None:
    body = message({"protocol": version, "role": "admin", "session": "s"})
    with raw_flight(served, door, "admin") as raw, unchanged(served):
        (answer,) = raw.do_action(flight.Action("hello", body))
        head, _ = read_message(answer.body)
        assert by_code(head["error"]) is VersionRefused
        assert "install the same fabric-pipelines" in head["message"]


def test_a_task_that_is_not_this_sessions_changes_nothing_and_is_counted(served: Served) -> None:
    """One bad row must not cost the good ones, so a report's rows are judged one by one."""
    with served.broker.client("worker") as caller:
        attach(caller)
        with unchanged(served):
            reply = caller.computed(completions([1 << 41, 7]))
            assert (reply.accepted, reply.unknown) == (0, 2)
            assert caller.nack([1 << 41], reason="not mine") == 0
            caller.detach()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        MAGIC + struct.pack("<I", FRAME_BYTES_MAX + 1),
        MAGIC + struct.pack("<I", 4) + b"\0\0\0\0",
        MAGIC + struct.pack("<I", 1000) + b"half of it",
        MAGIC[:3],
        b"",
    ],
    ids=["foreign", "oversized", "no envelope", "truncated", "cut in its head", "nothing"],
)
def test_bytes_on_the_call_socket_that_are(served: Served, sent: bytes) -> None:
    path = call_path(served.broker.settings.broker_endpoint)
    with unchanged(served), socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(10)
        raw.connect(str(path))
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        answer = b""
        while more := raw.recv(1 << 16):
            answer += more
        if len(sent) >= 8 and b"half" not in sent:
            assert b"SchemaError" in answer
        else:
            assert answer == b""


def test_a_declared_size_that_is_not_sent_is_refused_before_memory_is_given(served: Served) -> None:
    body = b"".join(pack({"protocol": 1, "role": "admin", "session": "s"}, [b"x"]))
    body = body.replace(b'"#":[1]', b'"#":[9]')
    with raw_flight(served, "local", "admin") as raw, unchanged(served):
        (answer,) = raw.do_action(flight.Action("hello", body))
        head, _ = read_message(answer.body)
        assert by_code(head["error"]) is SchemaError


# ---- the world around the broker


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    flags = {"home": tmp_path / "home", "segment_bytes": 1 << 20, "lease_ms": 300}
    made = Broker(settings.load(flags, {}, tmp_path))
    made.start()
    yield made
    if made.process is not None:
        made.kill()


def test_a_lease_that_ran_out_and_is_with_another_now(broker: Broker) -> None:
    header = submission_of([GOOD])
    with (
        broker.client("producer") as producer,
        broker.client("worker", "slow") as slow,
        broker.client("worker", "quick") as quick,
        broker.client("admin") as admin,
    ):
        producer.submit(header, [GOOD])

        def leased() -> tuple[int, ...]:
            attach(slow)
            with suppress(NotAttached):  # 300 ms pass between two calls, too, on a busy machine
                lease = slow.lease(sequences=8, tokens=1 << 20, kv_tokens=None)
                return () if lease is None else ids_of(lease)
            return ()

        late = eventually(leased, within_s=60, what="a lease")

        def all_with_quick() -> bool:
            attach(quick)  # which keeps it alive, and takes what came back
            return attach(quick, late) == tuple(sorted(late))

        def turned_away_without_a_fact() -> bool:
            """False where the other lease, of 300 ms too, ran out meanwhile on a busy machine: that is a fact."""
            eventually(all_with_quick, within_s=60, what="the lease of a silent session to run out")
            before = admin.hello().durable_lsn
            with pytest.raises(NotAttached, match="attach again"):
                slow.renew()
            reply = slow.computed(completions(late))
            assert (reply.accepted, reply.late) == (0, 4)
            assert slow.nack(late, reason="too late") == 0
            after = admin.hello().durable_lsn
            return all_with_quick() and after == before

        eventually(turned_away_without_a_fact, within_s=60, what="a late worker to be turned away")


def test_a_second_broker_on_the_same_folder(broker: Broker) -> None:
    elsewhere = broker.settings.home / "elsewhere.sock"
    second = Broker(replace(broker.settings, broker_url=f"grpc+unix://{elsewhere}"))
    with broker.client("admin") as admin:
        before = admin.hello().durable_lsn
        code, errors = second.refused()
        assert code == Refused.exit_code
        assert errors.startswith(f"{AlreadyRunning.__name__}: ")
        assert len(errors.splitlines()) == 1
        assert admin.hello().durable_lsn == before


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


def test_a_read_only_folder_is_one_sentence_before_anything_is_served(small_disk: Path) -> None:
    run = small_disk.parent / "run.sock"
    flags = {
        "home": small_disk / "home",
        "broker_url": f"grpc+unix://{run}",
        "segment_bytes": 1 << 20,
    }
    stopped = Broker(settings.load(flags, {}, small_disk))
    stopped.start()
    assert stopped.end(signal.SIGTERM) == (0, "")
    held = {path: path.stat().st_mtime_ns for path in stopped.settings.journal_dir.iterdir()}
    remount(small_disk, "ro")
    try:
        code, errors = stopped.refused()
        assert code == StorageFailed.exit_code
        assert len(errors.splitlines()) == 1
        assert errors.startswith(f"{StorageFailed.__name__}: ")
        assert "read-only" in errors.lower()
        assert {path: path.stat().st_mtime_ns for path in held} == held
    finally:
        remount(small_disk, "rw")


def test_a_full_disk_refuses_new_tasks_and_writes_nothing_of_them(small_disk: Path) -> None:
    flags = {"home": small_disk / "home", "segment_bytes": 1 << 20, "lease_ms": 5_000}
    broker = Broker(settings.load(flags, {}, small_disk))
    broker.start()
    batches = [tasks_of([1000] * 60)]
    with broker.client("producer") as producer, broker.client("admin") as admin:
        mark = 0
        with pytest.raises(StorageFailed, match="full"):  # noqa: PT012 - any of them may be the one
            while True:
                mark += 1
                before = admin.hello().durable_lsn, admin.status().total.enqueued
                producer.submit(submission_of(batches, mark), batches)
        assert (admin.hello().durable_lsn, admin.status().total.enqueued) == before
        assert producer.submission(submission_of(batches, mark).submission_id) is None
        assert len(finish_everything(broker)) == before[1].tasks
    broker.kill()


def test_a_journal_and_a_database_that_do_not_know_each_other(
    broker: Broker, database: Database
) -> None:
    """Asked for over the wire by the completion process itself, which ends and retires nothing."""
    with broker.client("admin") as admin, broker.client("producer") as producer:
        producer.submit(submission_of([GOOD]), [GOOD])
        finish_everything(broker)
        before = admin.hello().durable_lsn
        done = subprocess.run(
            [sys.executable, "-m", "fabric_pipelines.completion"],
            env={
                **os.environ,
                **replace(broker.settings, pg_url=database.url).as_environment(),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == IncarnationMismatch.exit_code
        assert "has already retired 4 tasks" in done.stderr
        assert admin.hello().durable_lsn == before


def test_no_broker_at_all(tmp_path: Path) -> None:
    for endpoint in (f"grpc+unix://{tmp_path}/none.sock", "grpc://127.0.0.1:1"):
        with (
            BrokerClient(endpoint, role="producer", timeout_s=2) as caller,
            pytest.raises(BrokerUnavailable, match="fabric up"),
        ):
            caller.hello()


def test_a_clock_that_goes_backwards_moves_no_lease_and_no_time_in_the_log() -> None:
    """Leases run by the monotonic clock; what the log tells stands still until the wall has caught up."""
    bench = Bench()
    bench.submit(submission_of([GOOD]), [GOOD])
    bench.attach()
    assert bench.lease() is not None
    bench.time.stepped_s -= 3600
    bench.owner.tick()
    bench.owner.renew("w")
    more = [tasks_of([10] * 4, seed=1)]
    bench.submit(submission_of(more, 2), more)
    assert bench.counts() == {"ready": 4, "leased": 4}
    times = [frame.time_us for frame in bench.journal.replay()]
    assert times == sorted(times)
    assert bench.owner.status().counters["clock_steps_back"] == 1
    bench.time.stepped_s += 7200
    bench.owner.tick()
    assert bench.counts() == {"ready": 4, "leased": 4}
    assert bench.owner.verify().differences == []
