"""NATS JetStream work queues with file storage, publishes answered by the server.

The 2.9 line answers before it syncs and has no setting to change that (its files are synced on a timer), so this
peer is weaker than all others in every step: it is listed, and never the base of a ratio.
"""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from fabric_pipelines.bench.peers.peer import (
    OUTCOME_TOKENS,
    Durable,
    Held,
    Processes,
    Work,
    can_connect,
    free_port,
    program,
)
from fabric_pipelines.errors import CheckFailed

NOT_SYNCED = "page cache only: the server cannot sync per publish (weaker)"
TASKS, OUTCOMES = "tasks", "outcomes"
PULL_S = 5


class NatsServer:
    name = "nats"
    durable = Durable(NOT_SYNCED, NOT_SYNCED, NOT_SYNCED, NOT_SYNCED)

    def __init__(self) -> None:
        self._program = program("nats-server", "/usr/sbin/nats-server")
        said = subprocess.run([self._program, "--version"], capture_output=True, text=True)
        self.version = said.stdout.strip().rpartition("v")[2]
        self._processes = Processes()
        self.endpoint = ""

    def start(self, folder: Path) -> None:
        port = free_port()
        self.endpoint = str(port)
        store = str(folder / "store")
        arguments = ["-js", "-sd", store, "-a", "127.0.0.1", "-p", self.endpoint]
        self._processes.spawn([self._program, *arguments], folder)
        self._processes.await_answer(lambda: can_connect(("127.0.0.1", port)))

    def stop(self) -> None:
        self._processes.stop()

    @property
    def pids(self) -> list[int]:
        return self._processes.pids


class NatsClient:
    """Subscription 1 is the inbox of answers, 2 that of pulled messages."""

    def __init__(self, endpoint: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", int(endpoint)), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = self._socket.makefile("rb", 1 << 20)
        self._reader.readline()  # INFO
        hello = json.dumps({"verbose": False, "pedantic": False, "headers": True})
        self._send(f"CONNECT {hello}\r\nSUB answers 1\r\nSUB pulled 2\r\n".encode())
        for name in (TASKS, OUTCOMES):
            stream = {"name": name, "subjects": [name], "retention": "workqueue", "storage": "file"}
            self._api(f"STREAM.CREATE.{name}", stream)
            consumer = {"durable_name": "w", "ack_policy": "explicit", "max_ack_pending": -1}
            self._api(
                f"CONSUMER.DURABLE.CREATE.{name}.w", {"stream_name": name, "config": consumer}
            )

    def prepare(self, work: Work) -> None:
        self._work = work
        self._left = {TASKS: work.tasks, OUTCOMES: work.tasks}
        self._batches = [[row.tobytes() for row in batch] for batch in work.batches()]
        self._outcome = np.arange(OUTCOME_TOKENS, dtype=np.uint32).tobytes()

    def enqueue(self) -> None:
        for batch in self._batches:
            self._ask_all(TASKS, batch)

    def lease(self) -> Held | None:
        found = self._pull(TASKS)
        if not found:
            return None
        return Held([reply for reply, _ in found], [Work.row_of(body) for _, body in found])

    def computed(self, held: Held) -> None:
        self._ask_all(OUTCOMES, [self._outcome] * len(held.handles))
        self._acknowledge(held.handles)

    def retire(self) -> int:
        found = self._pull(OUTCOMES)
        self._acknowledge([reply for reply, _ in found])
        return len(found)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def _pull(self, stream: str) -> list[tuple[bytes, bytes]]:
        wanted = min(self._work.lease, self._left[stream])
        if not wanted:
            return []
        self._left[stream] -= wanted
        body = json.dumps({"batch": wanted, "expires": PULL_S * 10**9}).encode()
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.w".encode()
        self._send(_pub(subject, b"pulled", body))
        return [self._message()[1:] for _ in range(wanted)]

    def _acknowledge(self, replies: list[bytes]) -> None:
        """Each is answered (a double acknowledgement), so that the server has really taken it."""
        self._send(b"".join(_pub(reply, b"answers", b"+ACK") for reply in replies))
        for _ in replies:
            self._message()

    def _ask_all(self, subject: str, bodies: list[bytes]) -> None:
        self._send(b"".join(_pub(subject.encode(), b"answers", body) for body in bodies))
        for _ in bodies:
            _, _, answer = self._message()
            if b'"error"' in answer:
                raise CheckFailed(f"nats refused a publish: {answer[:200]!r}")

    def _api(self, name: str, body: dict[str, Any]) -> None:
        self._send(_pub(f"$JS.API.{name}".encode(), b"answers", json.dumps(body).encode()))
        answer = json.loads(self._message()[2])
        if "error" in answer:
            raise CheckFailed(f"nats refused {name}: {answer['error']}")

    def _send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def _message(self) -> tuple[bytes, bytes, bytes]:
        """(subject, reply subject, payload) of the next message; the server's pings are answered."""
        while True:
            line = self._reader.readline()
            if line.startswith(b"MSG "):
                words = line.split()
                body = self._reader.read(int(words[-1]) + 2)[:-2]
                return words[1], words[3] if len(words) == 5 else b"", body
            if line.startswith(b"PING"):
                self._send(b"PONG\r\n")
            elif not line.startswith((b"PONG", b"+OK", b"INFO")):
                raise CheckFailed(f"nats answered {line[:200]!r}")


def _pub(subject: bytes, reply: bytes, body: bytes) -> bytes:
    return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(body), body)


connect = NatsClient
