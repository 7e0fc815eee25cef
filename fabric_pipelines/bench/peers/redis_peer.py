"""Redis streams, append-only file synced before every reply (appendfsync always), over its Unix socket.

Batches go as MULTI ... EXEC: a plain pipeline is synced once per 16 KB that the server reads, which would cost it
most of its speed. The protocol is RESP2, spoken directly: a batch is one write of prepared bytes.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
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
    program,
)
from fabric_pipelines.errors import CheckFailed

Reply = Any  # nested lists of bytes and int
TASKS, OUTCOMES, GROUP = b"tasks", b"outcomes", b"workers"


class RedisServer:
    name = "redis"
    durable = Durable(
        enqueue="AOF fsync before the reply of EXEC",
        lease="AOF fsync before the reply of XREADGROUP (cannot be turned off per command)",
        computed="AOF fsync before the reply of EXEC",
        retire="AOF fsync before the reply of EXEC",
    )

    def __init__(self) -> None:
        self._program = program("redis-server")
        said = subprocess.run([self._program, "--version"], capture_output=True, text=True)
        self.version = said.stdout.partition("v=")[2].partition(" ")[0]
        self._processes = Processes()
        self.endpoint = ""

    def start(self, folder: Path) -> None:
        self.endpoint = str(folder / "redis.sock")
        options = {
            "port": "0",
            "unixsocket": self.endpoint,
            "dir": str(folder),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "auto-aof-rewrite-percentage": "0",
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        self._processes.spawn([self._program, *flags], folder)
        self._processes.await_answer(lambda: can_connect(self.endpoint))

    def stop(self) -> None:
        self._processes.stop()

    @property
    def pids(self) -> list[int]:
        return self._processes.pids


def command(*words: bytes | int) -> bytes:
    parts = [word if isinstance(word, bytes) else b"%d" % word for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(
        b"$%d\r\n%b\r\n" % (len(part), part) for part in parts
    )


def transaction(commands: Iterator[bytes]) -> bytes:
    return command(b"MULTI") + b"".join(commands) + command(b"EXEC")


class RedisClient:
    def __init__(self, endpoint: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(endpoint)
        self._reader = self._socket.makefile("rb", 1 << 20)
        for stream in (TASKS, OUTCOMES):
            self._ask(command(b"XGROUP", b"CREATE", stream, GROUP, b"$", b"MKSTREAM"))

    def prepare(self, work: Work) -> None:
        self._work = work
        self._batches = [[row.tobytes() for row in batch] for batch in work.batches()]
        self._outcome = np.arange(OUTCOME_TOKENS, dtype=np.uint32).tobytes()

    def enqueue(self) -> None:
        for batch in self._batches:
            adds = (command(b"XADD", TASKS, b"*", b"t", payload) for payload in batch)
            self._transact(adds, len(batch))

    def lease(self) -> Held | None:
        entries = self._read(TASKS)
        if not entries:
            return None
        return Held(
            [entry[0] for entry in entries], [Work.row_of(entry[1][1]) for entry in entries]
        )

    def computed(self, held: Held) -> None:
        adds = (
            command(b"XADD", OUTCOMES, b"*", b"i", task, b"o", self._outcome)
            for task in held.handles
        )
        self._transact(adds, len(held.handles))

    def retire(self) -> int:
        entries = self._read(OUTCOMES)
        if not entries:
            return 0
        outcomes = [entry[0] for entry in entries]
        tasks = [entry[1][1] for entry in entries]
        ends = (
            command(name, stream, *group, *ids)
            for stream, ids in ((TASKS, tasks), (OUTCOMES, outcomes))
            for name, group in ((b"XACK", (GROUP,)), (b"XDEL", ()))
        )
        self._transact(ends, 4)
        return len(entries)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def _read(self, stream: bytes) -> list[Any]:
        words = (b"GROUP", GROUP, b"w1", b"COUNT", self._work.lease, b"STREAMS", stream, b">")
        found = self._ask(command(b"XREADGROUP", *words))
        return found[0][1] if found else []

    def _transact(self, commands: Iterator[bytes], count: int) -> list[Any]:
        self._socket.sendall(transaction(commands))
        for _ in range(count + 1):  # OK, then QUEUED for each
            self._reply()
        answers: list[Any] = self._reply()
        assert len(answers) == count
        return answers

    def _ask(self, request: bytes) -> Reply:
        self._socket.sendall(request)
        return self._reply()

    def _reply(self) -> Reply:
        line = self._reader.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            size = int(rest)
            return None if size < 0 else self._reader.read(size + 2)[:-2]
        if kind == b"*":
            return None if int(rest) < 0 else [self._reply() for _ in range(int(rest))]
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        raise CheckFailed(f"redis answered {line[:200]!r}")


connect = RedisClient
