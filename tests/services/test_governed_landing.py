"""The governor at work: signals of a real server, a loop that waits at the gate, two writers, an account of it all."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pytest

from fabric_pipelines import telemetry
from fabric_pipelines.completion import account
from fabric_pipelines.completion.receive import Receiver
from fabric_pipelines.dataplane import results
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.governor import HUSH_STEP_S, Limits, limits_of
from fabric_pipelines.dataplane.pressure import Signals
from fabric_pipelines.dataplane.valve import Valve
from fabric_pipelines.dataplane.watch import FIRST_PROBES, SILENCE_PROBES, Watch
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import DatabaseUnavailable, StorageFailed
from fabric_pipelines.settings import Settings, make_runtime_folder
from fabric_pipelines.testing.scripted_computed import ScriptedComputed
from tests.support import eventually
from tests.support_completions import pulled_batch

APPLICATION = "fabric"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def _loop(
    database: Database, broker: ScriptedComputed, gate: Any, stack: ExitStack, *targets: Any
) -> Receiver:
    target, *more = targets or (Writer(database), Writer(database), Writer(database))
    loop = Receiver(
        broker.open,
        target,
        lambda journal, number, settled: database.register_incarnation(
            journal, number, retired=settled
        ),
        more_targets=more,
        gate=gate,
    )
    stack.callback(loop.close)
    return loop


# ---- the watcher


def test_the_watcher_reports_and_says_when_nobody_answers(database: Database) -> None:
    clock = Clock()
    valve = Valve(Limits(), clock_s=clock)
    watch = Watch(database, valve)
    watch.look()
    seen = valve.as_json()
    assert seen["signals"]["wal_since_redo"] is not None
    assert seen["commit_p90_ms"]["idle"] > 0
    assert len(valve._governor.latencies.idle) == FIRST_PROBES + 1
    url, database.url = database.url, "postgresql://postgres@/fabric?host=/nonexistent"
    watch._forget()
    clock.now_s = 6.0
    watch.look()
    assert valve.as_json()["blind"]
    database.url = url
    watch._looked_s = float("-inf")
    watch.look()
    assert not valve.as_json()["blind"]
    watch.close()


def test_bulk_without_a_gap_is_held_back_for_a_few_probes(database: Database) -> None:
    valve = Valve(Limits())
    watch = Watch(database, valve)
    watch.look()
    idle = valve._governor.latencies.idle
    idle.clear()
    leave = valve.admit(pulled_batch(5, function="embed"), bulk=True)
    waits: list[float] = []

    def ends() -> None:
        waits.append(
            eventually(lambda: valve.wait_s() or None, within_s=60, what="the gate is closed")
        )
        valve.withdraw(leave)

    thread = threading.Thread(target=ends)
    thread.start()
    eventually(_turned(watch, idle), within_s=60, what="probes in silence")
    thread.join()
    assert 0 < waits[0] <= HUSH_STEP_S
    assert len(idle) >= SILENCE_PROBES
    assert valve.wait_s() == 0, "the gate is open again"
    watch.close()


def _turned(watch: Watch, idle: deque[float]) -> Callable[[], bool]:
    def turn() -> bool:
        watch._silence_s = float("-inf")
        watch.look()
        return len(idle) >= SILENCE_PROBES

    return turn


def test_a_probe_beside_bulk_is_told_from_one_in_silence(database: Database) -> None:
    valve = Valve(Limits())
    watch = Watch(database, valve)
    watch.look()
    leave = valve.admit(pulled_batch(5, function="embed"), bulk=True)
    watch.look()
    valve.withdraw(leave)
    watch.close()
    latencies = valve._governor.latencies
    assert (len(latencies.idle), len(latencies.loaded)) == (FIRST_PROBES + 1, 1)


# ---- the loop at the gate


def test_bulk_waits_at_the_gate_and_dead_letters_do_not(
    database: Database, stack: ExitStack
) -> None:
    clock = Clock()
    valve = Valve(
        limits_of(floor=1_000, most=100_000, lag_bytes=1 << 30),
        clock_s=clock,
    )
    first = pulled_batch(900, function="generate")
    later = pulled_batch(
        20, function="generate", first=900, bad={n: ("failed", "E", "x") for n in range(20)}
    )
    broker = ScriptedComputed([first])
    loop = _loop(database, broker, valve, stack)
    valve._governor.rows = 500
    assert loop.step(wait_s=0) > 0
    assert len(broker.retired) == 500, "the bucket was full once"
    broker.batches.append(later)
    assert loop.step(wait_s=0) > 0
    assert (len(broker.buried), len(broker.retired)) == (20, 500)
    assert loop.holds == 400
    seen = valve.as_json()["classes"]
    assert (seen["bulk"]["rows"], seen["regular"]["rows"]) == (500, 20)
    assert seen["bulk"]["waited_s"] > 0
    while valve.wait_s():
        clock.now_s += 0.5
        valve.observe(Signals(wal_since_redo=0.0))
    loop.step(wait_s=0)
    assert (len(broker.retired), broker.open_ids, loop.holds) == (900, set(), 0)


def test_each_transaction_is_as_large_as_the_governor_says_and_all_retire(
    database: Database, stack: ExitStack
) -> None:
    valve = Valve(Limits(rows_start=500))
    broker = ScriptedComputed([pulled_batch(1_200, function="generate")])
    loop = _loop(database, broker, valve, stack)
    loop.step(wait_s=0)
    with database.session() as connection:
        sizes = connection.execute("select rows from fabric.acks order by rows").fetchall()
    assert [row[0] for row in sizes] == [200, 500, 500]
    assert (len(broker.retired), loop.counters.landings) == (1_200, 3)


class Gated:
    """A writer that waits for its fellow before it lands, so that two are provably inside at once."""

    def __init__(self, inner: Writer, meet: threading.Barrier, broker: ScriptedComputed) -> None:
        self.inner, self.meet, self.broker = inner, meet, broker
        self.retired_meanwhile: set[int] = set()

    def land(self, batch: pa.RecordBatch) -> Any:
        self.meet.wait(20)
        landed = self.inner.land(batch)
        self.retired_meanwhile |= set(self.broker.retired) & set(
            batch.column("task_id").to_pylist()
        )
        return landed

    def close(self) -> None:
        self.inner.close()


def test_two_writers_land_at_once_and_each_row_retires_after_its_own_commit(
    database: Database, stack: ExitStack
) -> None:
    valve = Valve(Limits(rows_start=500))
    valve._governor.writers = 2
    broker = ScriptedComputed([pulled_batch(1_000, function="generate")])
    meet = threading.Barrier(2)
    pair = [Gated(Writer(database), meet, broker) for _ in range(2)]
    loop = _loop(database, broker, valve, stack, *pair, Writer(database))
    loop.step(wait_s=0)
    assert [writer.retired_meanwhile for writer in pair] == [set(), set()]
    assert len(broker.retired) == 1_000
    xids = {str(proof.proof["xid"]) for proof in broker.retired.values()}
    assert len(xids) == 2, "each half is proven by its own transaction"
    assert results.counts(database)["generate"] == 1_000


class Failing:
    """A writer that fails as told, once."""

    def __init__(self, inner: Writer, fault: Exception) -> None:
        self.inner, self.fault = inner, [fault]

    def land(self, batch: pa.RecordBatch) -> Any:
        if self.fault:
            raise self.fault.pop()
        return self.inner.land(batch)

    def close(self) -> None:
        self.inner.close()


def test_the_fault_of_one_writer_keeps_its_rows_and_lets_the_other_retire(
    database: Database, stack: ExitStack
) -> None:
    valve = Valve(Limits(rows_start=500))
    valve._governor.writers = 2
    broker = ScriptedComputed([pulled_batch(1_000, function="generate")])
    failing = Failing(Writer(database), DatabaseUnavailable("cut"))
    loop = _loop(database, broker, valve, stack, failing, Writer(database), Writer(database))
    assert loop.step(wait_s=0) > 0
    assert loop.holds >= 500
    assert loop.step(wait_s=0) == 0
    assert (len(broker.retired), broker.duplicates, loop.holds) == (1_000, 0, 0)
    assert not valve.busy


def test_a_terminal_fault_ends_the_loop_and_leaves_nothing_running(
    database: Database, stack: ExitStack
) -> None:
    valve = Valve(Limits(rows_start=500))
    broker = ScriptedComputed([pulled_batch(1_000, function="generate")])
    failing = Failing(Writer(database), StorageFailed("no column"))
    loop = _loop(database, broker, valve, stack, failing, Writer(database), Writer(database))
    with pytest.raises(StorageFailed):
        loop.step(wait_s=0)
    assert not valve.busy
    loop.close()
    assert (len(broker.open_ids), broker.pulled) == (1_000, set())


# ---- the account


def test_the_account_is_read_while_its_process_lives_and_not_later(
    database: Database, stack: ExitStack, home_settings: Settings
) -> None:
    settings = home_settings
    settings.home.mkdir()
    make_runtime_folder(settings.runtime_dir)
    assert account.read(settings) is None
    valve = Valve(Limits())
    broker = ScriptedComputed([pulled_batch(30, function="generate")])
    loop = _loop(database, broker, valve, stack)
    loop.step(wait_s=0)
    kept = account.Account(settings, loop, valve)
    kept.keep()
    seen = account.read(settings)
    assert seen is not None
    assert (seen["pid"], seen["counters"]["retired"], seen["held"]) == (os.getpid(), 30, 0)
    assert seen["governor"]["classes"]["bulk"]["rows"] == 30
    assert account.summary(seen).startswith("up to 32.0 MB/s of write cost, 1,000 rows")
    text = account.path_of(settings).with_suffix(".prom").read_text()
    assert "fabric_completion_governor_classes_bulk_rows 30.0\n" in text
    assert json.loads(account.path_of(settings).read_text())["counters"]["landings"] == 1
    account.path_of(settings).write_text(json.dumps({**seen, "pid": 2**22 + 1}))
    assert account.read(settings) is None, "the account of a process that is gone"
    kept._kept._written_s = float("-inf")
    kept.keep()
    assert account.read(settings) is not None
    old_s = time.time() - telemetry.ACCOUNT_STALE_S - 1
    os.utime(account.path_of(settings), (old_s, old_s))
    assert account.read(settings) is None
    kept.close()
    assert not account.path_of(settings).exists()


def test_a_disk_that_takes_no_account_is_said_once_and_landing_goes_on(
    database: Database, stack: ExitStack, home_settings: Settings
) -> None:
    broker = ScriptedComputed([pulled_batch(30, function="generate")])
    valve, said = Valve(Limits()), []
    loop = _loop(database, broker, valve, stack)
    kept = account.Account(home_settings, loop, valve, said.append)  # its folder was never made
    for _ in range(2):
        kept._kept._written_s = float("-inf")
        kept.keep()
    loop.step(wait_s=0)
    assert [line.rpartition("; ")[2] for line in said] == ["the work goes on"]
    assert len(broker.retired) == 30
    kept.close()
