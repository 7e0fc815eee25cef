"""RabbitMQ quorum queues (one node), publishes confirmed after the Raft log is synced.

AMQP 0-9-1 spoken directly: publishes of a batch are one write, then all their confirms are awaited; leases are
deliveries under a prefetch of one lease; acknowledgements name the last tag of a lease (`multiple`). The protocol
has no answer to an acknowledgement, so the ends of tasks are weaker here than elsewhere.
"""

from __future__ import annotations

import os
import socket
import struct
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

SCRIPTS = "/usr/lib/rabbitmq/bin"
METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
FRAME_END = b"\xce"
TASKS, OUTCOMES = "tasks", "outcomes"
PUBLISH, DELIVER, ACK_METHOD = (60, 40), (60, 60), (60, 80)


class RabbitServer:
    name = "rabbitmq"
    durable = Durable(
        enqueue="Raft log fsync before the confirm",
        lease="delivery logged, not awaited",
        computed="Raft log fsync before the confirm",
        retire="logged, never confirmed to the client (weaker)",
    )

    def __init__(self) -> None:
        self._program = program("rabbitmq-server-script", f"{SCRIPTS}/rabbitmq-server")
        program("erl")
        found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*"))
        self.version = found[-1].name.partition("-")[2] if found else "unknown"
        self._processes = Processes()
        self._epmd = 0
        self.endpoint = ""

    def start(self, folder: Path) -> None:
        port, self._epmd = free_port(), free_port()
        self.endpoint = str(port)
        folder.mkdir(parents=True)
        (folder / "plugins").write_text("[].\n")
        (folder / "rabbitmq.conf").write_text("loopback_users.guest = true\n")
        environ = {
            "HOME": str(folder),
            "RABBITMQ_NODENAME": "fabricbench@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": self.endpoint,
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(folder / "base"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "ERL_CRASH_DUMP": str(folder / "erl_crash.dump"),
            "ERL_EPMD_PORT": str(self._epmd),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }
        self._processes.spawn([self._program], folder, environ)
        self._processes.await_answer(lambda: can_connect(("127.0.0.1", port)))

    def stop(self) -> None:
        self._processes.stop()
        if (
            self._epmd
        ):  # the Erlang port mapper makes itself a daemon; this one is ours, by its port
            environ = {**os.environ, "ERL_EPMD_PORT": str(self._epmd)}
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.run(["epmd", "-kill"], env=environ, check=False, **quiet)  # type: ignore[call-overload]

    @property
    def pids(self) -> list[int]:
        return self._processes.pids


def _short(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _long(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + FRAME_END


def _method(channel: int, which: tuple[int, int], arguments: bytes = b"") -> bytes:
    return _frame(METHOD, channel, struct.pack(">HH", *which) + arguments)


def _publish(queue: str, body: bytes) -> bytes:
    """To the default exchange, persistent (delivery mode 2)."""
    head = struct.pack(">HHQHB", 60, 0, len(body), 0x1000, 2)
    arguments = b"\0\0" + _short("") + _short(queue) + b"\0"
    return _method(1, PUBLISH, arguments) + _frame(HEADER, 1, head) + _frame(BODY, 1, body)


class RabbitClient:
    def __init__(self, endpoint: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", int(endpoint)), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = self._socket.makefile("rb", 1 << 20)
        self._delivered: dict[str, list[tuple[int, bytes]]] = {TASKS: [], OUTCOMES: []}
        self._published = self._confirmed = 0
        self._consuming = False
        self._log_in()
        for queue in (TASKS, OUTCOMES):
            kind = _short("x-queue-type") + b"S" + _long(b"quorum")
            self._ask((50, 10), b"\0\0" + _short(queue) + b"\x02" + _long(kind), (50, 11))
        self._ask((85, 10), b"\0", (85, 11))  # confirm.select

    def _log_in(self) -> None:
        self._socket.sendall(b"AMQP\0\0\x09\x01")
        self._await((10, 10))
        login = _long(b"\0guest\0guest")
        self._socket.sendall(
            _method(0, (10, 11), _long(b"") + _short("PLAIN") + login + _short("en_US"))
        )
        tune = self._await((10, 30))
        channels, frame_max, _ = struct.unpack(">HIH", tune)
        self._socket.sendall(_method(0, (10, 31), struct.pack(">HIH", channels, frame_max, 0)))
        self._socket.sendall(_method(0, (10, 40), _short("/") + b"\0\0"))
        self._await((10, 41))
        self._ask((20, 10), b"\0", (20, 11))

    def prepare(self, work: Work) -> None:
        self._work = work
        self._left = {TASKS: work.tasks, OUTCOMES: work.tasks}
        self._batches = [[row.tobytes() for row in batch] for batch in work.batches()]
        self._outcome = np.arange(OUTCOME_TOKENS, dtype=np.uint32).tobytes()

    def enqueue(self) -> None:
        for batch in self._batches:
            self._publish_all(TASKS, batch)
        if not self._consuming:
            self._consuming = True
            qos = struct.pack(">IHB", 0, self._work.lease, 0)
            self._ask((60, 10), qos, (60, 11))
            for queue in (TASKS, OUTCOMES):
                words = b"\0\0" + _short(queue) + _short(queue) + b"\0" + _long(b"")
                self._ask((60, 20), words, (60, 21))

    def lease(self) -> Held | None:
        found = self._take(TASKS)
        if not found:
            return None
        return Held([tag for tag, _ in found], [Work.row_of(body) for _, body in found])

    def computed(self, held: Held) -> None:
        self._publish_all(OUTCOMES, [self._outcome] * len(held.handles))
        self._acknowledge(held.handles)

    def retire(self) -> int:
        found = self._take(OUTCOMES)
        self._acknowledge([tag for tag, _ in found])
        return len(found)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def _take(self, queue: str) -> list[tuple[int, bytes]]:
        wanted = min(self._work.lease, self._left[queue])
        waiting = self._delivered[queue]
        while len(waiting) < wanted:
            self._read()
        self._left[queue] -= wanted
        taken, self._delivered[queue] = waiting[:wanted], waiting[wanted:]
        return taken

    def _acknowledge(self, tags: list[int]) -> None:
        """One frame a tag: the deliveries of two queues share a channel's numbers, `multiple` would end both."""
        frames = (_method(1, ACK_METHOD, struct.pack(">QB", tag, 0)) for tag in tags)
        self._socket.sendall(b"".join(frames))

    def _publish_all(self, queue: str, bodies: list[bytes]) -> None:
        self._socket.sendall(b"".join(_publish(queue, body) for body in bodies))
        self._published += len(bodies)
        while self._confirmed < self._published:
            self._read()

    def _ask(self, which: tuple[int, int], arguments: bytes, answer: tuple[int, int]) -> bytes:
        channel = 0 if which[0] == 10 else 1
        self._socket.sendall(_method(channel, which, arguments))
        return self._await(answer)

    def _await(self, which: tuple[int, int]) -> bytes:
        while True:
            found, arguments = self._read()
            if found == which:
                return arguments

    def _read(self) -> tuple[tuple[int, int], bytes]:
        """One method from the server; deliveries and confirms are taken in on the way."""
        kind, payload = self._read_frame()
        while kind == HEARTBEAT:
            kind, payload = self._read_frame()
        which: tuple[int, int] = struct.unpack_from(">HH", payload)
        arguments = payload[4:]
        if which == DELIVER:
            size = arguments[0]
            (tag,) = struct.unpack_from(">Q", arguments, 1 + size)
            self._delivered[arguments[1 : 1 + size].decode()].append((tag, self._read_content()))
        elif which == ACK_METHOD:
            tag, multiple = struct.unpack(">QB", arguments)
            self._confirmed = tag if multiple else self._confirmed + 1
        elif which in ((10, 50), (20, 40), (60, 120)):
            raise CheckFailed(f"rabbitmq closed or refused: {arguments[:200]!r}")
        return which, arguments

    def _read_content(self) -> bytes:
        _, head = self._read_frame()
        (size,) = struct.unpack_from(">Q", head, 4)
        body = b""
        while len(body) < size:
            body += self._read_frame()[1]
        return body

    def _read_frame(self) -> tuple[int, bytes]:
        kind, _, size = struct.unpack(">BHI", self._exactly(7))
        payload = self._exactly(size + 1)
        return kind, payload[:-1]

    def _exactly(self, size: int) -> bytes:
        data: Any = self._reader.read(size)
        if len(data) < size:
            raise CheckFailed("rabbitmq closed the connection")
        return bytes(data)


connect = RabbitClient
