"""Landing under fire: backends killed at random and at every stage, answers lost, batches delivered twice, poison."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from fabric_pipelines.completion.receive import Receiver
from fabric_pipelines.dataplane import results
from fabric_pipelines.dataplane.database import Database, Identity
from fabric_pipelines.dataplane.governor import Limits
from fabric_pipelines.dataplane.valve import Valve
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.testing.scripted_computed import ScriptedComputed
from tests.support import eventually
from tests.support_completions import pulled_batch

BATCHES, ROWS, POISON = 30, 200, 10
KILLS_MAX = 60  # a killer that never tires lets a slow machine land nothing at all
STEPS_MAX = 5000


@contextmanager
def _assassin(database: Database, seed: int) -> Iterator[list[int]]:
    """Kills the writer's backend again and again, at moments nobody chose."""
    done, kills, rng = threading.Event(), [0], random.Random(seed)

    def hunt() -> None:
        with psycopg.connect(database.url, autocommit=True, application_name="assassin") as own:
            while kills[0] < KILLS_MAX and not done.wait(rng.uniform(0.005, 0.05)):
                killed = own.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where datname = "
                    "current_database() and application_name = 'fabric' and state <> 'idle'"
                ).fetchall()
                kills[0] += len(killed)

    thread = threading.Thread(target=hunt)
    thread.start()
    try:
        yield kills
    finally:
        done.set()
        thread.join(timeout=60)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_task_is_landed_once_or_dead_once_whatever_is_killed(
    database: Database, seed: int
) -> None:
    poisoned = {number * 3: 7 for number in range(POISON)}
    broker = ScriptedComputed(
        [
            pulled_batch(
                ROWS,
                function="embed",
                first=number * ROWS,
                poison={poisoned[number]: float("nan")} if number in poisoned else None,
            )
            for number in range(BATCHES)
        ],
        lose_retires=5,
    )
    writer = Writer(database)
    loop = Receiver(
        broker.open,
        writer,
        lambda journal, number, settled: database.register_incarnation(
            journal, number, retired=settled
        ),
        rows=ROWS,
    )
    with _assassin(database, seed) as kills:
        for _ in range(STEPS_MAX):
            loop.step(wait_s=0)
            if not broker.open_ids and kills[0]:
                break
        else:
            pytest.fail(f"{len(broker.open_ids)} tasks are open after {STEPS_MAX} steps")
    loop.close()
    ids = np.concatenate([batch.column("task_id").to_numpy() for batch in broker.batches])
    assert kills[0] > 0, "nothing was killed, nothing was shown"
    assert (len(broker.retired), len(broker.buried)) == (BATCHES * ROWS - POISON, POISON)
    assert results.unaccounted(database, ids).size == 0
    counts = results.counts(database)
    assert (counts["embed"], counts["dead_letters"]) == (BATCHES * ROWS - POISON, POISON)


STAGES = ("begin", "copy", "stage", "merge", "acknowledge", "commit", "after commit")
KILLS_LEAST = 70


class Doomed:
    """A connection whose backend is killed when it comes to `stage`."""

    def __init__(self, inner: Any, stage: str, kill: Any) -> None:
        self._inner, self._stage, self._kill = inner, stage, kill

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def cursor(self) -> Any:
        if self._stage == "copy":
            self._shoot()
        return self._inner.cursor()

    def execute(self, statement: Any, *more: Any) -> Any:
        text = statement if isinstance(statement, str | bytes) else statement.as_string()
        text = text.decode() if isinstance(text, bytes) else text
        words = {
            "begin": text.startswith("begin"),
            "stage": "temporary table" in text,
            "merge": text.startswith("insert into") and "on conflict" in text,
            "acknowledge": "fabric.acks" in text,
            "commit": text == "commit",
        }
        if words.get(self._stage):
            self._shoot()
        done = self._inner.execute(statement, *more)
        if self._stage == "after commit" and text == "commit":
            self._shoot()
        return done

    def _shoot(self) -> None:
        self._kill(self._stage, self._inner.info.backend_pid)
        self._stage = ""


class DoomedWriter(Writer):
    """Each of its landings is killed at the stage that is due, but for every eighth."""

    def __init__(self, database: Database, stages: Iterator[str], kill: Any) -> None:
        super().__init__(database)
        self._stages, self._kill = stages, kill

    def _open(self) -> tuple[Any, Identity]:
        connection, identity = super()._open()
        inner: Any = connection._inner if isinstance(connection, Doomed) else connection
        doomed: Any = Doomed(inner, next(self._stages), self._kill)
        self._connection = doomed
        assert self._meter is not None
        self._meter.connection = doomed
        return doomed, identity


def _mixed(number: int) -> pa.RecordBatch:
    """40 rows of two functions, one of them poison and one reported as failed."""
    return pa.concat_batches(
        [
            pulled_batch(20, function="embed", first=number * 40, poison={7: float("nan")}),
            pulled_batch(
                20,
                function="generate",
                first=number * 40 + 20,
                bad={5: ("failed", "EngineFailed", "boom")},
            ),
        ]
    )


def test_killed_at_every_stage_each_task_is_landed_once_or_dead_once(database: Database) -> None:
    batches = [_mixed(number) for number in range(20)]
    broker = ScriptedComputed(batches, lose_retires=15)
    shot: Counter[str] = Counter()
    lock, stages = threading.Lock(), cycle([*STAGES, ""])
    valve = Valve(Limits())
    valve._governor.writers = 2
    with psycopg.connect(database.url, autocommit=True, application_name="assassin") as own:

        def kill(stage: str, pid: int) -> None:
            with lock:
                own.execute("select pg_terminate_backend(%s)", (pid,))
                gone = Path(f"/proc/{pid}")
                eventually(lambda: not gone.exists(), within_s=60, what="a killed backend is gone")
                shot[stage] += 1

        target, *more = (DoomedWriter(database, stages, kill) for _ in range(3))
        loop = Receiver(
            broker.open,
            target,
            lambda journal, number, settled: database.register_incarnation(
                journal, number, retired=settled
            ),
            more_targets=more,
            gate=valve,
        )
        for _ in range(500):
            loop.step(wait_s=0)
            if broker.open_ids:
                continue
            if set(shot) == set(STAGES) and sum(shot.values()) >= KILLS_LEAST:
                break
            # the broker was restored from an older state: everything is delivered again
            broker.retired.clear()
            broker.buried.clear()
            broker.pulled.clear()
        loop.close()
    ids = np.concatenate([batch.column("task_id").to_numpy() for batch in batches])
    counts = results.counts(database)
    landed = counts["embed"] + counts["generate"]
    sys.stdout.write(  # shown by -rP
        f"{sum(shot.values())} kills: {', '.join(f'{n} at {stage}' for stage, n in shot.items())}; {len(ids)} submitted, "
        f"{landed} landed + {counts['dead_letters']} dead, {results.unaccounted(database, ids).size} unaccounted\n"
    )
    assert set(shot) == set(STAGES)
    assert sum(shot.values()) >= KILLS_LEAST
    assert results.unaccounted(database, ids).size == 0
    assert (counts["embed"], counts["generate"], counts["dead_letters"]) == (380, 380, 40)
    assert (len(broker.retired), len(broker.buried), broker.open_ids) == (760, 40, set())
    assert not valve.busy
