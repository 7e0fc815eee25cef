"""The work that every system does in the broker's benchmark, and what a system is to it.

A round is: enqueue N tasks of 1 KB, lease them with their payload, report an outcome for each, fetch the outcomes
and retire the tasks; every step in batches. A `Server` owns processes and a folder, a `Client` lives in a
process of its own and never sees the server object, only its endpoint. Refuses to time anything but `run`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt
import psutil

from fabric_pipelines.errors import CheckFailed, StartFailed

TASK_TOKENS = 256  # uint32: 1,024 bytes a task
OUTCOME_TOKENS = 16  # uint32: 64 bytes an outcome
START_S = 60.0
STOP_S = 20.0
VOCAB_SIZE = 50_000

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Work:
    """One round. `synced_leases`: a lease, too, is durable before its answer, where a system can choose."""

    number: int
    tasks: int
    batch: int = 1000
    lease: int = 256
    synced_leases: bool = False
    width: int = TASK_TOKENS

    @property
    def tokens(self) -> Tokens:
        """uint32 [tasks, width]; the first two of a row are its number, so that a payload can be told."""
        draw = np.random.default_rng(self.number)
        tokens = draw.integers(0, VOCAB_SIZE, (self.tasks, self.width), dtype=np.uint32)
        rows = np.arange(self.tasks, dtype=np.uint32)
        tokens[:, 0], tokens[:, 1] = rows % VOCAB_SIZE, rows // VOCAB_SIZE
        return tokens

    def batches(self) -> list[Tokens]:
        whole = self.tokens
        return [whole[at : at + self.batch] for at in range(0, self.tasks, self.batch)]

    @staticmethod
    def row_of(payload: bytes | memoryview) -> int:
        low, high = np.frombuffer(payload, np.uint32, 2).tolist()
        return int(low + high * VOCAB_SIZE)


@dataclass(frozen=True, slots=True)
class Held:
    """What one lease gave: the system's own handles, and which rows of the round their payloads are."""

    handles: Any
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class Durable:
    """For each step, what its answer says about the disk. `lease_is_a_choice`: `Work.synced_leases` changes
    something here."""

    enqueue: str
    lease: str
    computed: str
    retire: str
    lease_is_a_choice: bool = False

    def as_json(self) -> dict[str, str]:
        return {step: getattr(self, step) for step in ("enqueue", "lease", "computed", "retire")}


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall time of the steps of one round, CPU time of the client in it."""

    enqueue: float
    lease: float
    computed: float
    retire: float
    client_cpu: float

    @property
    def cycle(self) -> float:
        return self.enqueue + self.lease + self.computed + self.retire


class Client(Protocol):
    def prepare(self, work: Work) -> None:
        """Untimed: put the round's payloads into the form a program would have them in."""

    def enqueue(self) -> None:
        """All batches of the round, each durable before this returns."""

    def lease(self) -> Held | None:
        """Up to `work.lease` tasks with their payloads in this process."""

    def computed(self, held: Held) -> None:
        """An outcome for each, durable."""

    def retire(self) -> int:
        """Fetch up to `work.lease` outcomes and end their tasks, durably; how many."""

    def close(self) -> None: ...


class Server(Protocol):
    name: str
    version: str
    durable: Durable
    endpoint: str

    def start(self, folder: Path) -> None: ...
    def stop(self) -> None: ...

    @property
    def pids(self) -> list[int]:
        """Every process that may write for this system; empty when the client does it itself."""


def run(client: Client, work: Work) -> Seconds:
    """One timed round; CheckFailed if a task came twice, was lost, or carried another payload."""
    client.prepare(work)
    seen = np.zeros(work.tasks, np.bool_)
    begin_cpu, begin = time.process_time(), time.perf_counter()
    client.enqueue()
    enqueued = now = time.perf_counter()
    lease_s = computed_s = 0.0
    while (held := client.lease()) is not None:
        leased = time.perf_counter()
        client.computed(held)
        lease_s, computed_s = lease_s + leased - now, computed_s + time.perf_counter() - leased
        rows = np.array(held.rows)
        if seen[rows].any() or len(np.unique(rows)) != len(rows):
            raise CheckFailed(f"a task of round {work.number} was leased twice")
        seen[rows] = True
        now = time.perf_counter()
    retired, begin_retire = 0, time.perf_counter()
    while retired < work.tasks and (count := client.retire()):
        retired += count
    end = time.perf_counter()
    if not seen.all() or retired != work.tasks:
        raise CheckFailed(
            f"round {work.number} leased {int(seen.sum())} and retired {retired} of {work.tasks} tasks"
        )
    cpu = time.process_time() - begin_cpu
    return Seconds(enqueued - begin, lease_s, computed_s, end - begin_retire, cpu)


class Processes:
    """A server process of ours in a folder, its log, and its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._path = Path()

    def spawn(
        self, arguments: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        """Its log goes to `folder`; it runs where we run, so that a relative PYTHONPATH holds."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "server.log"
        self._log = self._path.open("ab")
        self._process = subprocess.Popen(
            arguments,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def await_answer(self, probe: Callable[[], Any]) -> None:
        """Until `probe` no longer raises OSError."""
        assert self._process is not None
        until = time.monotonic() + START_S
        while True:
            try:
                probe()
                return
            except OSError as fault:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise StartFailed(
                        f"{self._process.args!r} did not start ({fault}): {self.last_words()}"
                    ) from fault
            time.sleep(0.05)

    def last_words(self) -> str:
        return self._path.read_text(errors="replace")[-400:].replace("\n", " | ")

    @property
    def pids(self) -> list[int]:
        if self._process is None:
            return []
        root = psutil.Process(self._process.pid)
        return [root.pid, *(child.pid for child in root.children(recursive=True))]

    def stop(self) -> None:
        """SIGTERM, then SIGKILL, for the group that we started and no other."""
        process = self._process
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            try:
                process.wait(STOP_S)
                break
            except subprocess.TimeoutExpired:
                continue
        self._process = None
        if self._log is not None:
            self._log.close()


def program(name: str, *places: str) -> str:
    """The path of a program, or StartFailed."""
    found = shutil.which(name) or next((place for place in places if Path(place).is_file()), None)
    if found is None:
        raise StartFailed(f"{name} is not installed")
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def can_connect(address: str | tuple[str, int]) -> None:
    """Raises OSError while nobody listens there."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        probe.connect(address)
