"""The call socket: requests and answers between processes of one machine, beside Flight's own socket.

A Flight action costs a call 0.4 ms of both processes' time before anything is done, which is more than the broker
needs for a lease; the same envelope in a length-prefixed frame on a Unix socket costs a tenth (docs/rejected.md has
the figures). Everything off the machine stays with Flight; what may be asked, by whom, and what it means is decided in
one place for both.

    "FPC1" | u32 length | envelope, whose head names the operation under "do"

A connection has one request outstanding, but after the request "upload": then frames go both ways as they come until
the producer says "end", and that is the end of the connection as well. Refuses a frame that does not begin so or is longer than any message can
be; such a connection is closed, since nothing after it could be told apart.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fabric_pipelines.broker.credits import FRAME_BYTES_MAX as BATCH_BYTES_MAX
from fabric_pipelines.broker.envelope import Part, pack, unpack
from fabric_pipelines.errors import (
    Backpressure,
    BrokerUnavailable,
    FabricError,
    SchemaError,
    SettingsError,
)

SUFFIX = ".call"
MAGIC = b"FPC1"
FRAME_BYTES_MAX = 256 << 20  # a batch must fit a journal segment
BESIDE_BYTES = 1 << 20  # of a task batch, in its frame
STREAM_BYTES_MAX = BATCH_BYTES_MAX + BESIDE_BYTES  # of a frame of an upload
HELD_BYTES_MAX = 1 << 30  # of requests that are not answered, beyond _TRUSTED_BYTES each
_HEADER = struct.Struct("<4sI")
_BUFFER_BYTES = 1 << 20  # a lease of 256 prompts passes in one go
_TRUSTED_BYTES = 5 << 20  # a piece of an upload is 4 MiB and what is beside it
STREAM = "upload"
_SILENT_S = 600.0  # as long as any call may take
_STOP_S = 2.0
_RETRY_S = 0.1
CONNECTIONS_MAX = 512  # a thread each

Head = dict[str, Any]
Answer = Callable[[str, Head, list[memoryview]], tuple[Head, Sequence[Part]]]
Converse = Callable[[list[memoryview], "CallStream"], None]


def path_beside(socket_path: Path) -> Path:
    """Where the calls go of a broker that serves Flight on `socket_path`."""
    if socket_path.suffix == SUFFIX:
        raise SettingsError(
            f"the broker's socket {socket_path} ends in {SUFFIX}, the name of the socket beside it: set "
            "FABRIC_BROKER_URL to another name"
        )
    return socket_path.with_name(socket_path.stem + SUFFIX)


class Allowance:
    """What the requests of all connections may hold in memory together; each takes of it as its bytes arrive."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        with self._lock:
            if size > self._left:
                raise Backpressure(
                    "the broker holds as many bytes of unanswered requests as it may: ask again, or send less at a time"
                )
            self._left -= size

    def give(self, size: int) -> None:
        with self._lock:
            self._left += size


class Held:
    """What one connection holds of an allowance."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._size = 0

    def take(self, size: int) -> None:
        self._allowance.take(size)
        self._size += size

    def release(self) -> None:
        self._allowance.give(self._size)
        self._size = 0


class CallServer:
    """A thread for each connection; `answer`, and `upload` for a stream, are called in it and must not raise
    FabricError."""

    def __init__(
        self,
        path: Path,
        answer: Answer,
        refuse: Callable[[FabricError], Head],
        *,
        upload: Converse | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._answer, self._upload, self._refuse = answer, upload, refuse
        self._most = connections_max
        self._path = path
        path.unlink(missing_ok=True)  # the caller holds the journal's lock: nobody lives there
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(128)
        self._open: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._allowance = Allowance(HELD_BYTES_MAX)
        threading.Thread(target=self._accept, name="broker-calls", daemon=True).start()

    def close(self) -> None:
        """Take no new requests; those under way are answered, for a while that is the same for all."""
        with self._lock:
            self._ending.set()
            threads = list(self._open.values())
            self._shut(socket.SHUT_RD)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink(missing_ok=True)
        _join(threads, _STOP_S)
        with self._lock:
            self._shut(socket.SHUT_RDWR)  # who does not read its answer by now is not waited for
        _join(threads, _STOP_S)

    def _shut(self, how: int) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(how)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._ending.wait(_RETRY_S):
                    return
                continue  # out of descriptors: a caller that leaves gives one back
            if len(self._open) >= self._most:
                self._turn_away(connection)
                continue
            thread = threading.Thread(
                target=self._converse, args=(connection,), name="broker-call", daemon=True
            )
            with self._lock:
                if self._ending.is_set():
                    connection.close()
                    return
                try:
                    thread.start()  # before `close` can see it: what never ran cannot be waited for
                except RuntimeError:  # no thread to be had
                    self._turn_away(connection)
                    continue
                self._open[connection] = thread

    def _turn_away(self, connection: socket.socket) -> None:
        full = Backpressure(
            f"the broker serves {len(self._open)} connections and takes no more now"
        )
        with contextlib.suppress(OSError):
            send(connection, self._refuse(full), ())
        connection.close()

    def _converse(self, connection: socket.socket) -> None:
        held = Held(self._allowance)
        try:
            _widen(connection)
            while (body := receive(connection, take=held.take)) is not None:
                try:
                    head, parts = unpack(body)
                except SchemaError as fault:
                    send(connection, self._refuse(fault), ())
                    continue
                name = str(head.pop("do", None))
                if name == STREAM and self._upload is not None:
                    self._upload(parts, CallStream(connection, self._ending, held))
                    _let_go(connection)
                    return
                send(connection, *self._answer(name, head, parts))
                held.release()
        except FabricError as fault:
            with contextlib.suppress(OSError):
                send(connection, self._refuse(fault), ())
                _let_go(connection)
        except OSError:
            pass  # the caller is gone; whatever it asked for is in the journal or never was
        finally:
            held.release()
            with self._lock:
                self._open.pop(connection, None)
            connection.close()


def _join(threads: list[threading.Thread], within_s: float) -> None:
    end = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))


class CallStream:
    """An upload's connection, at either end; one thread receives and one sends."""

    def __init__(
        self,
        connection: socket.socket,
        ending: threading.Event | None = None,
        held: Held | None = None,
    ) -> None:
        self._socket, self._ending, self._held = connection, ending, held

    @classmethod
    def opened(cls, path: Path, endpoint: str, command: bytes) -> CallStream:
        """To the broker, with its request under way. BrokerUnavailable if nobody answers there."""
        made = cls(_connected(path, endpoint, _SILENT_S))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # why is said in an answer
            made.send({"do": STREAM}, command)
        return made

    def close(self) -> None:
        self._socket.close()

    def send(self, head: Mapping[str, Any], *parts: Part) -> None:
        send(self._socket, head, parts)

    def read(self) -> tuple[Head, list[memoryview]] | None:
        """Head and parts of the next frame, None at the end. SchemaError for what is no frame, and BrokerUnavailable if
        it is this broker that ends."""
        if self._held is None:
            body = receive(self._socket)
        else:
            self._held.release()  # what was read before is on its tenant's account now
            body = receive(self._socket, STREAM_BYTES_MAX, take=self._held.take)
        if body is not None:
            return unpack(body)
        if self._ending is not None and self._ending.is_set():
            raise BrokerUnavailable("the broker is stopping")
        return None


class CallConnection:
    """A caller's end, for one thread. A broker that restarted since the last call is found again; after any failure
    that is raised, a new connection has to be made."""

    def __init__(self, path: Path, endpoint: str, timeout_s: float = 10.0) -> None:
        self._path, self._endpoint = path, endpoint
        self._timeout_s = timeout_s
        self._socket = _connected(path, endpoint, timeout_s)

    def close(self) -> None:
        self._socket.close()

    def call(
        self, name: str, head: Mapping[str, Any], parts: Sequence[Part], timeout_s: float
    ) -> tuple[Head, list[memoryview]]:
        """BrokerUnavailable if no whole answer comes in time; what was asked may have been done then."""
        if timeout_s != self._timeout_s:
            _limit(self._socket, timeout_s)
            self._timeout_s = timeout_s
        try:
            body = self._ask({**head, "do": name}, parts)
        except BlockingIOError as fault:
            raise _unanswered(self._endpoint) from fault
        except OSError as fault:
            raise BrokerUnavailable(
                f"the broker at {self._endpoint} cannot be reached: {os.strerror(fault.errno or 0)}"
            ) from fault
        if body is None:
            raise BrokerUnavailable(
                f"the broker at {self._endpoint} ended before it answered: start it with `fabric up`"
            )
        return unpack(body)

    def _ask(self, head: Head, parts: Sequence[Part]) -> memoryview | None:
        """The answer's envelope. A request that cannot even be sent was not seen by anybody whole, so it may be sent
        again, unless the broker said why it would not have it."""
        for last in (False, True):
            try:
                send(self._socket, head, parts)
            except (BrokenPipeError, ConnectionResetError):
                said = self._last_words()
                if said is not None or last:
                    return said
                self._socket.close()
                self._socket = _connected(self._path, self._endpoint, self._timeout_s)
            else:
                break
        return receive(self._socket)

    def _last_words(self) -> memoryview | None:
        try:
            return receive(self._socket)
        except OSError:
            return None


def _connected(path: Path, endpoint: str, timeout_s: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _limit(made, timeout_s)
    try:
        made.connect(str(path))
    except BlockingIOError as fault:
        made.close()
        raise _unanswered(endpoint) from fault
    except OSError as fault:
        made.close()
        raise BrokerUnavailable(
            f"no broker answers at {endpoint}: start one with `fabric up`"
        ) from fault
    _widen(made)
    return made


def _unanswered(endpoint: str) -> BrokerUnavailable:
    return BrokerUnavailable(
        f"the broker at {endpoint} does not answer in time: see `fabric status` and its log"
    )


def _limit(connection: socket.socket, timeout_s: float) -> None:
    """By the kernel's own timers, which cost a call nothing; Python's would poll before each step."""
    whole, part = divmod(timeout_s, 1)
    value = struct.pack("ll", int(whole), max(int(part * 1e6), 0 if whole else 1))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, value)


def send(connection: socket.socket, head: Mapping[str, Any], parts: Sequence[Part]) -> None:
    pieces = pack(head, parts)
    size = sum(map(len, pieces))
    if size > FRAME_BYTES_MAX:
        raise SchemaError(
            f"a message of {size} bytes is longer than {FRAME_BYTES_MAX}: send fewer tasks at a time"
        )
    left = [_HEADER.pack(MAGIC, size), *pieces]
    sent = connection.sendmsg(left)
    if sent == size + _HEADER.size:
        return
    rest = memoryview(b"".join(left))[sent:]
    while len(rest):
        rest = rest[connection.send(rest) :]


def receive(
    connection: socket.socket,
    most: int = FRAME_BYTES_MAX,
    *,
    take: Callable[[int], None] = lambda size: None,
) -> memoryview | None:
    """The next message's envelope, in memory of its own; None at the end. SchemaError: not our frame. `take` is told
    of memory beyond the first 5 MiB before it is used, and may refuse."""
    header = _read(connection, _HEADER.size, take)
    if header is None:
        return None
    magic, size = _HEADER.unpack(header)
    if magic != MAGIC:
        raise SchemaError("the call socket takes frames of this fabric only: use its own client")
    if size > most:
        raise SchemaError(
            f"a message of {size} bytes is longer than {most}: send fewer tasks at a time"
        )
    body = _read(connection, size, take)
    if body is None:
        raise ConnectionResetError("the message ended early")
    return body


def _read(connection: socket.socket, size: int, take: Callable[[int], None]) -> memoryview | None:
    """Exactly so many bytes, or None if the connection ended. Memory grows with what arrives: a size alone is a word
    that costs its sender nothing."""
    room = np.empty(min(size, _TRUSTED_BYTES), np.uint8)  # not touched before bytes are there
    at = 0
    while at < size:
        if at == len(room):
            larger = min(size, 2 * at)
            take(larger - len(room))
            more = np.empty(larger, np.uint8)
            more[:at] = room
            room = more
        count = connection.recv_into(room.data[at:], len(room) - at, socket.MSG_WAITALL)
        if not count:
            return None
        at += count
    return room.data


def _let_go(connection: socket.socket) -> None:
    """Read what is still coming, for a moment: a connection closed before that takes the answer with it."""
    connection.shutdown(socket.SHUT_WR)
    connection.settimeout(_STOP_S)
    left = _BUFFER_BYTES
    while left > 0 and (more := connection.recv(min(left, 1 << 16))):
        left -= len(more)


def _widen(connection: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
