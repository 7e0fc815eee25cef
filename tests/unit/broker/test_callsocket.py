"""The call socket: frames arrive whole or not at all, and a caller always hears a typed error."""

from __future__ import annotations

import errno
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.broker import callsocket
from fabric_pipelines.broker.callsocket import (
    FRAME_BYTES_MAX,
    STREAM_BYTES_MAX,
    Allowance,
    CallConnection,
    CallServer,
    CallStream,
    Held,
    path_beside,
    receive,
)
from fabric_pipelines.broker.envelope import Part, pack, unpack
from fabric_pipelines.broker.wire import error_head
from fabric_pipelines.errors import Backpressure, BrokerUnavailable, SchemaError, SettingsError
from tests.support import eventually


class Echo:
    """Answers with what it was asked; holds an answer back while `gate` is shut."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(
        self, name: str, head: dict[str, Any], parts: list[memoryview]
    ) -> tuple[dict[str, Any], Sequence[Part]]:
        self.seen.append(name)
        self.gate.wait(30)
        return {**head, "name": name}, parts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return path_beside(tmp_path / "broker.sock")


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(path: Path, echo: Echo) -> Iterator[CallServer]:
    made = CallServer(path, echo, error_head)
    yield made
    echo.gate.set()
    made.close()


def raw(path: Path, sent: bytes) -> dict[str, Any] | None:
    """The head of what comes back for these bytes; None if the connection just ends."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(10)
        caller.connect(str(path))
        caller.sendall(sent)
        caller.shutdown(socket.SHUT_WR)
        body = receive(caller)
    return None if body is None else unpack(body)[0]


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 5 << 20])
def test_a_request_and_its_parts_come_back_as_they_were(
    path: Path, server: CallServer, size: int
) -> None:
    sent = [b"x" * size, b"y" * 7]
    connection = CallConnection(path, "here")
    for number in range(3):
        head, parts = connection.call("say", {"number": number}, sent, 10.0)
        assert head == {"number": number, "name": "say"}
        assert [bytes(part) for part in parts] == sent
    connection.close()


def test_a_stranger_is_refused_in_one_answer(path: Path, server: CallServer) -> None:
    head = raw(path, b"PRI * HTTP/2.0\r\n\r\n")
    assert head is not None
    assert head["error"] == "SchemaError"
    assert "its own client" in head["message"]


def test_an_oversized_frame_is_refused_before_it_is_read(path: Path, server: CallServer) -> None:
    head = raw(path, struct.pack("<4sI", b"FPC1", FRAME_BYTES_MAX + 1))
    assert head is not None
    assert "send fewer tasks at a time" in head["message"]


def test_a_truncated_frame_is_never_acted_on(path: Path, server: CallServer, echo: Echo) -> None:
    whole = struct.pack("<4sI", b"FPC1", 100) + b"z" * 100
    for cut in range(len(whole)):
        assert raw(path, whole[:cut]) is None
    assert echo.seen == []


def test_a_malformed_envelope_is_answered_and_the_connection_lives(
    path: Path, server: CallServer
) -> None:
    head = raw(path, struct.pack("<4sI", b"FPC1", 4) + b"junk")
    assert head is not None
    assert head["error"] == "SchemaError"


def test_a_broker_that_restarted_is_found_again_by_the_same_connection(
    path: Path, echo: Echo
) -> None:
    first = CallServer(path, echo, error_head)
    connection = CallConnection(path, "here")
    connection.call("one", {}, (), 10.0)
    first.close()
    second = CallServer(path, echo, error_head)
    connection.call("two", {}, (), 10.0)
    second.close()
    assert echo.seen == ["one", "two"]
    with pytest.raises(BrokerUnavailable, match="no broker answers at here"):
        connection.call("three", {}, (), 10.0)


def test_an_answer_that_does_not_come_in_time_is_said(
    path: Path, server: CallServer, echo: Echo
) -> None:
    echo.gate.clear()
    connection = CallConnection(path, "here")
    with pytest.raises(BrokerUnavailable, match="does not answer in time"):
        connection.call("slow", {}, (), 0.05)
    connection.close()


def test_what_was_asked_before_the_end_is_answered(
    path: Path, server: CallServer, echo: Echo
) -> None:
    echo.gate.clear()
    connection = CallConnection(path, "here")
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(
        target=lambda: answers.append(connection.call("last", {}, (), 10.0)[0])
    )
    asking.start()
    eventually(lambda: bool(echo.seen), within_s=60, what="the server has seen the call")
    threading.Timer(0.05, echo.gate.set).start()
    server.close()
    asking.join(timeout=30)
    connection.close()
    assert answers == [{"name": "last"}]
    assert not path.exists()


def test_a_message_too_long_is_refused_before_anything_is_sent(
    path: Path, server: CallServer, echo: Echo
) -> None:
    connection = CallConnection(path, "here")
    half = memoryview(bytes(FRAME_BYTES_MAX // 2 + 1))
    with pytest.raises(SchemaError, match="send fewer tasks at a time"):
        connection.call("big", {}, (half, half), 10.0)
    assert connection.call("small", {}, (), 10.0)[0] == {"name": "small"}
    assert echo.seen == ["small"]
    connection.close()


def test_only_its_owner_may_call_and_its_name_is_its_own(path: Path, server: CallServer) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(SettingsError, match="set FABRIC_BROKER_URL to another name"):
        path_beside(path)


def test_a_server_that_ends_while_callers_come_in_waits_for_no_thread_that_never_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the note of a connection and the start of its thread `close` once found a thread it could not join."""
    begun = threading.Event()

    class Slow(threading.Thread):
        def start(self) -> None:
            if self.name == "broker-call":
                begun.set()
                threading.Event().wait(0.1)
            super().start()

    monkeypatch.setattr(threading, "Thread", Slow)
    path = path_beside(tmp_path / "broker.sock")
    server = CallServer(path, Echo(), error_head)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
        assert begun.wait(30)
        server.close()
    assert not path.exists()


def test_callers_beyond_the_bound_are_told_so_and_served_when_one_leaves(
    path: Path, echo: Echo
) -> None:
    server = CallServer(path, echo, error_head, connections_max=2)
    inside = [CallConnection(path, "here") for _ in range(2)]
    for connection in inside:
        connection.call("in", {}, (), 10.0)
    late = CallConnection(path, "here")
    head, _ = late.call("late", {}, (), 10.0)
    assert (head["error"], head["retry_after_s"]) == ("Backpressure", 1.0)
    late.close()
    inside.pop().close()
    while True:  # until the server has seen it leave
        late = CallConnection(path, "here")
        head, _ = late.call("late", {}, (), 10.0)
        late.close()
        if "error" not in head:
            break
    assert head == {"name": "late"}
    inside.pop().close()
    server.close()


def test_a_server_out_of_descriptors_waits_for_one_and_does_not_spin(
    path: Path, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = CallServer(path, echo, error_head)
    asked = []
    real = server._listener

    class Exhausted:
        def accept(self) -> tuple[socket.socket, Any]:
            asked.append(None)
            if len(asked) <= 3:
                raise OSError(errno.EMFILE, "too many open files")
            return real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    waits: list[float] = []
    monkeypatch.setattr(server, "_listener", Exhausted())
    wait = server._ending.wait
    monkeypatch.setattr(server._ending, "wait", lambda s: waits.append(s) or wait(0))
    for _ in range(2):  # the first is taken by the accept that was waiting already
        connection = CallConnection(path, "here")
        assert connection.call("on", {}, (), 10.0)[0] == {"name": "on"}
        connection.close()
    assert len(waits) == 3
    server.close()


def test_a_declared_size_that_is_not_sent_takes_no_memory(path: Path, server: CallServer) -> None:
    tracemalloc.start()
    callers = []
    for _ in range(8):
        caller = socket.socket(socket.AF_UNIX)
        caller.connect(str(path))
        caller.sendall(struct.pack("<4sI", b"FPC1", 200 << 20) + b"x" * 100)
        callers.append(caller)
    connection = CallConnection(path, "here")
    connection.call("after", {}, (), 10.0)  # the server has run since
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for each in (*callers, connection):
        each.close()
    assert peak < 64 << 20


def test_a_broker_that_accepts_nobody_is_said_after_the_callers_own_patience(path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(0)
    inside: list[CallConnection] = []

    def crowd() -> None:
        while len(inside) < 8:
            inside.append(CallConnection(path, "here", timeout_s=0.05))

    with pytest.raises(BrokerUnavailable, match="does not answer in time"):
        crowd()
    for each in inside:
        each.close()
    listener.close()


def test_a_frame_of_an_upload_is_no_longer_than_a_task_batch_may_be(path: Path, echo: Echo) -> None:
    said: list[str] = []

    def upload(parts: list[memoryview], stream: CallStream) -> None:
        with pytest.raises(SchemaError, match="send fewer tasks at a time"):
            stream.read()
        said.append("refused")

    server = CallServer(path, echo, error_head, upload=upload)
    stream = CallStream.opened(path, "here", b"{}")
    stream._socket.sendall(struct.pack("<4sI", b"FPC1", STREAM_BYTES_MAX + 1))
    assert stream.read() is None
    stream.close()
    server.close()
    assert said == ["refused"]


def test_requests_of_all_connections_hold_so_much_together_and_give_it_back() -> None:
    allowance = Allowance(100)
    one, other = Held(allowance), Held(allowance)
    one.take(60)
    with pytest.raises(Backpressure, match="as many bytes of unanswered requests as it may"):
        other.take(50)
    other.take(40)
    one.release()
    one.release()
    other.take(60)
    with pytest.raises(Backpressure):
        one.take(1)


def test_a_request_that_the_allowance_has_no_room_for_is_told_so(
    path: Path, server: CallServer, echo: Echo
) -> None:
    server._allowance = Allowance(1 << 20)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(30)
        caller.connect(str(path))
        with suppress(BrokenPipeError, ConnectionResetError):
            caller.sendall(struct.pack("<4sI", b"FPC1", 20 << 20) + bytes(20 << 20))
        body = receive(caller)
    assert body is not None
    assert unpack(body)[0]["error"] == "Backpressure"
    assert echo.seen == []


def test_callers_that_never_read_are_not_waited_for_one_by_one(
    path: Path, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has an answer that fits no socket; at the end none of their threads is left."""
    monkeypatch.setattr(callsocket, "_STOP_S", 0.2)
    server = CallServer(path, echo, error_head)
    callers = []
    for _ in range(6):
        caller = socket.socket(socket.AF_UNIX)
        caller.connect(str(path))
        body = b"".join(pack({"do": "say"}, [bytes(8 << 20)]))
        caller.sendall(struct.pack("<4sI", b"FPC1", len(body)) + body)
        callers.append(caller)
    eventually(lambda: len(echo.seen) == 6, within_s=30, what="all were answered")
    threads = list(server._open.values())
    server.close()
    assert not any(thread.is_alive() for thread in threads)
    for caller in callers:
        caller.close()
