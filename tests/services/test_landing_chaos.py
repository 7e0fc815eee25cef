"""Landing under fire: backends killed at random, answers lost, batches delivered twice, poison among them."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psycopg
import pytest

from fabric_pipelines.completion.receive import Receiver
from fabric_pipelines.dataplane import results
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.testing.scripted_computed import ScriptedComputed
from tests.support_completions import pulled_batch

BATCHES, ROWS, POISON = 30, 200, 10


@contextmanager
def _assassin(database: Database, seed: int) -> Iterator[list[int]]:
    """Kills the writer's backend again and again, at moments nobody chose."""
    done, kills, rng = threading.Event(), [0], random.Random(seed)

    def hunt() -> None:
        with psycopg.connect(database.url, autocommit=True, application_name="assassin") as own:
            while not done.wait(rng.uniform(0.005, 0.05)):
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
        for _ in range(500):
            loop.step(wait_s=0)
            if not broker.open_ids and kills[0]:
                break
    loop.close()
    ids = np.concatenate([batch.column("task_id").to_numpy() for batch in broker.batches])
    assert kills[0] > 0, "nothing was killed, nothing was shown"
    assert (len(broker.retired), len(broker.buried)) == (BATCHES * ROWS - POISON, POISON)
    assert results.unaccounted(database, ids).size == 0
    counts = results.counts(database)
    assert (counts["embed"], counts["dead_letters"]) == (BATCHES * ROWS - POISON, POISON)
