"""Where a small writer waits beside bulk.

    PYTHONPATH=. python tests/bench/foreground_waits.py slices half async --rate 30000 --seconds 20

Bulk of 1,000 rows a transaction lands at a fixed rate in one of several ways, or not at all; ways take turns at random, a
slot each, so that the machine's other work falls on all of them. Around each transaction of the small writer the
kernel's `schedstat` of client and backend tells what it ran and how long it waited for a CPU; with `--events` another
session asks Postgres every millisecond what that backend waits for, and takes a core's time itself. With `--trace` (as
root) the kernel's scheduler tells who had the CPU meanwhile. Printed per way: percentiles, their ratio to silence, and of the
slowest 1 % the mean of its parts and the events that were seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from fabric_pipelines import settings as settings_module
from fabric_pipelines.bench.behind import database as new_database
from fabric_pipelines.bench.behind import postgres
from fabric_pipelines.bench.landing import governed
from fabric_pipelines.bench.landing.foreground import PAUSE_S, ROWS, TABLE
from fabric_pipelines.completion.receive import OpenGate
from fabric_pipelines.dataplane import writer
from fabric_pipelines.dataplane.cpu_slices import LONG_NS, BackendSlice, ask
from fabric_pipelines.dataplane.database import Connection, Database
from fabric_pipelines.dataplane.writer import Landed, Writer
from tests.bench.scheduler import switches, who_ran

SLOT_S, BREATH_S, STEP_S = 0.8, 0.2, 0.001
REST_S = 6e-5
SIPPING = threading.local()
WRITE = "update foreground set n = n + 1 where id = %s"
STATE = "select state, wait_event_type || ':' || wait_event from pg_stat_get_activity(%s) limit 1"


class Paced(OpenGate):
    """So many rows a second, and no burst to catch up."""

    rows = 1_000

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate, self._next_s = rate, 0.0

    def wait_s(self) -> float:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return self._next_s - now_s
        self._next_s = max(self._next_s + self.rows / self._rate, now_s - 0.05)
        return 0.0

    def waited(self, seconds: float) -> None:
        """Nobody asks."""


class Plain(Writer):
    """Bulk like any other process."""

    def __init__(self, *rest: Any, elastic: bool = False, **named: Any) -> None:
        super().__init__(*rest, **named)


class Slices(Plain):
    """It asks for long slices, on any core."""

    def land(self, batch: pa.RecordBatch) -> Landed:
        ask(LONG_NS)
        return super().land(batch)

    def _meet(self, connection: Connection) -> None:
        super()._meet(connection)
        self._slice = BackendSlice.of(connection)
        os.sched_setaffinity(connection.info.backend_pid, os.sched_getaffinity(os.getpid()))


class Async(Writer):
    """As completion does it, and its commits wait for no sync: one would have to be waited for before the broker hears."""

    def _meet(self, connection: Connection) -> None:
        super()._meet(connection)
        connection.execute("set synchronous_commit = off")


class Sips(Writer):
    """As completion does it, and in no stretch of the CPU longer than half a millisecond: 64 rows a COPY, 250 an encoding, a
    rest after each. Postgres inserts what COPY BINARY brings only once it has 1,000 rows, 4 ms of work, or the COPY ends."""

    def land(self, batch: pa.RecordBatch) -> Landed:
        SIPPING.on = True
        try:
            return super().land(batch)
        finally:
            SIPPING.on = False


def _sip() -> None:
    """Teach the writer's module sips; threads that land otherwise notice nothing."""
    whole_copy, whole_pieces, whole_encode = (
        writer._Target._copy,
        writer._pieces,
        writer.encode_copy,
    )

    def pieces(batch: pa.RecordBatch, rows: Any) -> list[Any]:
        found = whole_pieces(batch, rows)
        if not getattr(SIPPING, "on", False):
            return found
        return [part for piece in found for part in np.array_split(piece, -(-len(piece) // 250))]

    def encode(columns: Any) -> Any:
        SIPPING.columns = columns
        return whole_encode(columns)

    def copy(self: Any, target: Any, names: Any, stream: Any) -> int:
        if not getattr(SIPPING, "on", False):
            return whole_copy(self, target, names, stream)
        rows = len(SIPPING.columns[0].values)
        size, rest = divmod(len(stream[1]), rows)
        assert not rest, "rows of one size are cut"
        counted = 0
        for first in range(0, rows, 64):
            part = stream[1][first * size : (first + 64) * size]
            counted += whole_copy(self, target, names, [stream[0], part, stream[2]])
            time.sleep(REST_S)
        return counted

    writer._Target._copy, writer._pieces, writer.encode_copy = copy, pieces, encode  # type: ignore[method-assign]


WAYS: dict[str, type[Writer]] = {
    "plain": Plain,
    "slices": Slices,
    "half": Writer,  # long slices on half of the cores: what completion does
    "async": Async,
    "sips": Sips,
}


def _ran_ns(*pids: int) -> tuple[int, int]:
    """(on a CPU, runnable without one) of all `pids`."""
    words = [Path(f"/proc/{pid}/schedstat").read_bytes().split() for pid in pids]
    return sum(int(each[0]) for each in words), sum(int(each[1]) for each in words)


def foreground(url: str, seconds: float, core: int | None) -> None:
    """In a process of its own: its backend, then (began, ms, ms on a CPU, ms runnable) of each transaction."""
    draw, took = random.Random(1), []
    with psycopg.connect(url, autocommit=True) as connection:
        pids = os.getpid(), connection.info.backend_pid
        if core is not None:
            for pid in pids:
                os.sched_setaffinity(pid, {core})
        sys.stdout.write(f"{pids[1]}\n")
        sys.stdout.flush()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            before, at, began = _ran_ns(*pids), time.time(), time.perf_counter()
            connection.execute(WRITE, (draw.randint(1, ROWS),))
            ms, after = (time.perf_counter() - began) * 1e3, _ran_ns(*pids)
            took.append((at, ms, *((b - a) / 1e6 for a, b in zip(before, after, strict=True))))
            time.sleep(PAUSE_S)
    sys.stdout.write(json.dumps(took))


def events(url: str, seconds: float, pid: int) -> None:
    """In a process of its own: (when, what backend `pid` waits for)."""
    found = []
    with psycopg.connect(url, autocommit=True) as connection:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            at = time.time()
            row = connection.execute(STATE, (pid,), prepare=True).fetchone()
            if row is not None and row[0] == "active":
                found.append((at, row[1] or "nothing: it runs or waits for a CPU"))
            time.sleep(STEP_S)
    sys.stdout.write(json.dumps(found))


def measure(
    names: list[str],
    rate: float,
    seconds: float,
    core: int | None,
    *,
    events: bool,
    trace: bool,
) -> list[str]:
    order = ["silence", *names] * max(1, round(seconds / SLOT_S))
    random.Random().shuffle(order)
    total_s = len(order) * (SLOT_S + BREATH_S)
    rows: Counter[str] = Counter()
    spans: list[tuple[str, float, float]] = []
    with ExitStack() as stack:
        url = new_database(stack.enter_context(postgres(settings_module.load().home)), "waits")
        database = Database(url)
        with database.session() as connection:
            connection.execute(TABLE.encode())
        governed._fill(url)
        bulk = {}
        for at, name in enumerate(names):
            stack.enter_context(_writers(WAYS[name]))
            made = governed._bulk(database, Paced(rate), at << 34, elastic=True)
            bulk[name] = stack.enter_context(made)
            with bulk[name].turn():
                time.sleep(SLOT_S)
        small = _child("foreground", url, total_s, *([] if core is None else [str(core)]))
        assert small.stdout is not None
        backend = small.stdout.readline()
        watcher = _child("events", url, total_s, backend) if events else None
        traced = stack.enter_context(switches()) if trace else None
        for name in order:
            with bulk[name].turn() if name in bulk else ExitStack():
                time.sleep(BREATH_S)
                began, before = time.time(), governed._inserted(bulk, name)
                time.sleep(SLOT_S)
                spans.append((name, began, time.time()))
                rows[name] += governed._inserted(bulk, name) - before
        took, waits = (
            json.loads(each.communicate()[0]) if each else [] for each in (small, watcher)
        )
        heard = traced.read() if traced else None
    lines = _lines(["silence", *names], spans, took, waits, rows)
    if heard is not None and traced is not None:
        lines += who_ran(heard, {small.pid, int(backend)}, spans, traced.ahead_s)
    return lines


def _writers(kind: type[Writer]) -> Any:
    """While `_bulk` makes its writers they are of this kind."""
    stack = ExitStack()
    usual, governed.Writer = governed.Writer, kind  # type: ignore[misc]
    stack.callback(setattr, governed, "Writer", usual)
    return stack


def _child(what: str, url: str, seconds: float, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", what, url, str(seconds), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _lines(
    names: list[str], spans: list[Any], took: list[Any], waits: list[Any], rows: Counter[str]
) -> list[str]:
    lines = [
        f"load {os.getloadavg()[0]:.1f}",
        "| bulk | p50 ms | p95 / silence | p99 / silence | rows/s | slowest 1 %: total = run queue + CPU + rest, ms | seen |",
        "|---|---|---|---|---|---|---|",
    ]
    base = None
    for name in names:
        mine = [(began, ended) for way, began, ended in spans if way == name]
        every = np.array([x for x in took if any(began <= x[0] < ended for began, ended in mine)])
        p50, p95, p99 = np.percentile(every[:, 1], [50, 95, 99])
        base = base or (p95, p99)
        worst = every[np.argsort(every[:, 1])[-max(len(every) // 100, 5) :]]
        _, total, cpu, queue = worst.mean(axis=0)
        seen = Counter(
            event for at, event in waits for w in worst if w[0] <= at <= w[0] + w[1] / 1e3
        )
        events_seen = ", ".join(f"{event} {count}" for event, count in seen.most_common(4))
        lines.append(
            f"| {name} | {p50:.2f} | {p95 / base[0]:.2f} | {p99 / base[1]:.2f} | "
            f"{rows[name] / sum(ended - began for began, ended in mine):,.0f} | "
            f"{total:.1f} = {queue:.1f} + {cpu:.1f} + {total - queue - cpu:.1f} | {events_seen} |"
        )
    return lines


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        what, url, seconds, *more = sys.argv[2:]
        if what == "foreground":
            foreground(url, float(seconds), int(more[0]) if more else None)
        else:
            events(url, float(seconds), int(more[0]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="+", choices=sorted(WAYS))
    parser.add_argument("--rate", type=float, default=30_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each way")
    parser.add_argument("--events", action="store_true", help="ask Postgres what it waits for")
    parser.add_argument("--trace", action="store_true", help="ask the kernel's scheduler (root)")
    parser.add_argument("--core", type=int, help="where the small writer and its backend run")
    asked = parser.parse_args()
    _sip()
    lines = measure(
        asked.ways,
        asked.rate,
        asked.seconds,
        asked.core,
        events=asked.events,
        trace=asked.trace,
    )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
