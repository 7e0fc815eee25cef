"""A run during which Postgres goes away: real processes, a producer that goes on, an account of both ends.

The short test and the command of five minutes (tests/bench/postgres_away.py) are this code with other numbers.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fabric_pipelines import ids, models, settings, supervise
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.postgres import EmbeddedPostgres, Place
from fabric_pipelines.ledger import Ledger
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.records.task import task_batch

ENGINE = "all-minilm-l6-v2@onnxruntime-fp32"
VOCABULARY = 30_522
EACH = 40
"""Tasks of one submission."""


@contextmanager
def own_server(folder: Path) -> Iterator[EmbeddedPostgres]:
    """A server that no supervisor brings back."""
    server = EmbeddedPostgres(
        Place(folder, folder / "postgres", folder / "run"), log=folder / "postgres.log"
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def running(server: EmbeddedPostgres, folder: Path, high_water: int) -> Iterator[settings.Settings]:
    """Broker, completion and one worker over that server. Raises FabricError where the model cannot be had."""
    flags = {
        "home": folder / "home",
        "pg_url": server.url,
        "computed_high_water_tasks": high_water,
        "models": os.environ.get("FABRIC_MODELS"),
    }
    loaded = settings.load(flags, {}, folder)
    models.pull("all-minilm-l6-v2", loaded.models)
    supervise.up(loaded, ui=False, engines=[ENGINE])
    try:
        yield loaded
    finally:
        supervise.down(loaded)


@dataclass(slots=True)
class Producer:
    """Submits EACH tasks every `every_s` seconds in a thread of its own, from `begin` to `end`; remembers what was
    taken."""

    endpoint: str
    every_s: float
    taken: list[str] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)
    _done: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._done.set()
        self._thread.join()

    @property
    def tasks(self) -> int:
        return EACH * len(self.taken)

    def _run(self) -> None:
        try:
            with BrokerClient(self.endpoint, role="producer") as client:
                while not self._done.wait(self.every_s):
                    self._submit(client, len(self.taken))
        except Exception as fault:  # noqa: BLE001 the thread that asks for the outcome raises it
            self.faults.append(fault)

    def _submit(self, client: BrokerClient, number: int) -> None:
        draw = random.Random(number)
        prompts = [
            [101, *(draw.randrange(1_000, VOCABULARY) for _ in range(draw.randrange(8, 40))), 102]
            for _ in range(EACH)
        ]
        batches = [task_batch(prompts)]
        tasks, tokens, fingerprint = fingerprint_of(batches)
        header = Submission(
            submission_id=ids.digest({"away": number}),
            function="embed",
            engine=ENGINE,
            sampling={"kind": "embed", "pooling": "mean", "normalise": True},
            vocab_size=VOCABULARY,
            tasks=tasks,
            tokens=tokens,
            fingerprint=fingerprint,
        )
        client.submit(header, batches)
        self.taken.append(header.submission_id)


@dataclass(frozen=True, slots=True)
class Look:
    """The broker's ledger at one moment of the outage."""

    away_s: float
    enqueued: int
    ready: int
    computed: int
    retired: int


@dataclass(slots=True)
class Outcome:
    """looks: while Postgres was away; total: the ledger at the end; missing, twice: (submission, row) by anti-join;
    restarts: processes that have another pid than before."""

    submitted: int
    looks: list[Look]
    total: Ledger
    missing: list[tuple[str, int]]
    twice: list[tuple[str, int]]
    restarts: list[str]


def look(endpoint: str, away_s: float) -> Look:
    total = ledger(endpoint)
    return Look(
        round(away_s, 1),
        total.enqueued.tasks,
        total.ready.tasks,
        total.computed.tasks,
        total.retired.tasks,
    )


def ledger(endpoint: str) -> Ledger:
    with BrokerClient(endpoint, role="admin") as admin:
        return admin.status().total


def outage(
    loaded: settings.Settings,
    server: EmbeddedPostgres,
    *,
    away_s: float,
    every_s: float,
    until: Callable[[Callable[[], object], float, str], object],
    say: Callable[[Look], None] = lambda seen: None,
    look_s: float = 1.0,
) -> Outcome:
    """Work, then no Postgres for `away_s` seconds, and until the worker is at the high-water mark, while the producer
    goes on, then Postgres again until all landed. until(probe, within_s, what): waits for the first true answer, fails naming what it waited for."""
    endpoint = loaded.broker_endpoint
    producer = Producer(endpoint, every_s)
    producer.begin()
    try:
        until(lambda: ledger(endpoint).retired.tasks, 120, "the first rows land")
        before = _pids(loaded)
        server.stop()
        gone = time.monotonic()
        looks: list[Look] = []

        def over() -> bool:
            away = time.monotonic() - gone
            if not looks or away - looks[-1].away_s >= look_s:
                looks.append(look(endpoint, away))
                say(looks[-1])
            return away >= away_s and looks[-1].computed >= loaded.computed_high_water_tasks

        until(over, away_s + 300, "the time away, and the worker at the mark")
        looks.append(look(endpoint, time.monotonic() - gone))
        say(looks[-1])
        server.start()
    finally:
        producer.end()
    if producer.faults:
        raise producer.faults[0]
    until(lambda: not ledger(endpoint).open_tasks, 600, "all has landed")
    landed = Counter(_landed(loaded))
    wanted = {(name, row) for name in producer.taken for row in range(EACH)}
    return Outcome(
        producer.tasks,
        looks,
        ledger(endpoint),
        sorted(wanted - set(landed)),
        sorted(key for key, count in landed.items() if count > 1 or key not in wanted),
        sorted(name for name, pid in _pids(loaded).items() if before.get(name) != pid),
    )


def _pids(loaded: settings.Settings) -> dict[str, int | None]:
    return {item.name: item.pid for item in supervise.state(loaded).processes}


def _landed(loaded: settings.Settings) -> list[tuple[str, int]]:
    with Database.of(loaded).connect() as connection:
        return connection.execute("select submission_id, source_row from fabric.embed").fetchall()  # type: ignore[return-value]
