"""What was decided of a task first, landed or dead, stays until it is requeued; tables and broker say the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pyarrow as pa
import pytest

from fabric_pipelines.dataplane import results, writer
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.decided import DecidedMeanwhile
from fabric_pipelines.dataplane.writer import Landed, Writer
from fabric_pipelines.errors import DatabaseUnavailable
from tests.support import ON_EVERY_SERVER
from tests.support_completions import pulled_batch

ROWS, SEVENTH = 20, 7
REFUSES = "alter table fabric.embed add constraint no check (source_row <> 7) not valid"
ALTER = (
    "do $$ begin execute format('alter database %I set default_transaction_isolation = %L', "
    "current_database(), '{}'); end $$"
)
TAKES = "alter table fabric.embed drop constraint no"


@pytest.fixture
def landing(database: Database) -> Iterator[Writer]:
    made = Writer(database)
    yield made
    made.close()


another = landing


def run(database: Database, statement: str) -> None:
    with database.session() as connection:
        connection.execute(statement.encode())


def split(database: Database) -> tuple[set[int], set[int]]:
    """Source rows that landed, and those that are dead."""
    landed = results.read(database, function="embed").column("source_row").to_pylist()
    dead = results.dead_letters(database).column("source_row").to_pylist()
    assert not set(landed) & set(dead)
    return set(landed), set(dead)


def told(batch: pa.RecordBatch, landed: Landed) -> tuple[set[int], set[int]]:
    """The same, as the broker is told it."""
    rows = dict(
        zip(
            batch.column("task_id").to_pylist(), batch.column("source_row").to_pylist(), strict=True
        )
    )
    alive, dead = (
        {rows[item] for item in ids.tolist()} for ids in (landed.task_ids, landed.dead_task_ids)
    )
    assert (landed.confirmation is not None, landed.dead_confirmation is not None) == (
        bool(alive),
        bool(dead),
    )
    return alive, dead


@ON_EVERY_SERVER
def test_a_row_that_was_buried_stays_dead_when_it_is_delivered_again_to_a_table_that_takes_it(
    database: Database, landing: Writer, another: Writer
) -> None:
    run(database, REFUSES)
    batch = pulled_batch(ROWS, function="embed")
    first = told(batch, landing.land(batch))
    run(database, TAKES)
    assert first == (set(range(ROWS)) - {SEVENTH}, {SEVENTH})
    alone = batch.slice(SEVENTH, 1)
    assert told(alone, another.land(alone)) == (set(), {SEVENTH})
    assert told(batch, another.land(batch)) == first == split(database)
    [letter] = results.dead_letters(database).to_pylist()
    assert (letter["error_code"], letter["requeues"]) == ("23514", 0), "as it was first"
    again = pulled_batch(ROWS, function="embed", requeues=1).slice(SEVENTH, 1)
    assert told(again, landing.land(again)) == ({SEVENTH}, set())
    assert split(database) == (set(range(ROWS)), set())


def test_a_row_that_landed_stays_landed_when_the_table_would_refuse_it_now(
    database: Database, landing: Writer
) -> None:
    batch = pulled_batch(ROWS, function="embed")
    landing.land(batch)
    run(database, REFUSES)
    failed = pulled_batch(ROWS, function="embed", bad={3: ("failed", "X", "late")})
    for item in (batch, batch.slice(SEVENTH, 1), failed):
        landed = landing.land(item)
        assert (landed.rows, landed.dead_task_ids.size) == (0, 0)
        assert landed.task_ids.tolist() == item.column("task_id").to_pylist()
    assert split(database) == (set(range(ROWS)), set())


def test_every_order_of_refusal_lost_word_and_requeue_leaves_one_account(
    database: Database, landing: Writer
) -> None:
    """Three deliveries of one task each: the table refuses or takes it, in the same round or the next."""
    for at, (refused, raised) in enumerate(
        product(product([True, False], repeat=3), product([0, 1], repeat=2))
    ):
        rounds = [0, raised[0], sum(raised)]
        state, state_round = "", 0
        for refuses, requeues in zip(refused, rounds, strict=True):
            if state == "landed":
                requeues = min(requeues, state_round)  # what landed is not requeued
            fresh = not state or (state == "dead" and requeues > state_round)
            batch = pulled_batch(
                1,
                function="embed",
                first=at,
                requeues=requeues,
                bad={0: ("refused", "X", "no")} if refuses else None,
            )
            landed = landing.land(batch)
            if fresh:
                state, state_round = ("dead" if refuses else "landed"), requeues
            expected = ({at}, set()) if state == "landed" else (set(), {at})
            assert told(batch, landed) == expected, (refused, rounds)
            assert tuple(rows & {at} for rows in split(database)) == expected
            assert landed.dead_requeues.tolist() == [requeues] * len(landed.dead_task_ids)


def test_an_account_that_says_both_since_older_days_is_put_right_for_what_landed(
    database: Database, landing: Writer
) -> None:
    batch = pulled_batch(ROWS, function="embed", bad={3: ("failed", "X", "y")})
    landing.land(batch)
    run(database, "create table kept as table fabric.dead_letters")
    run(database, "delete from fabric.dead_letters")
    whole = pulled_batch(ROWS, function="embed")
    landing.land(whole)
    run(database, "insert into fabric.dead_letters select * from kept")
    assert told(whole, landing.land(whole)) == (set(range(ROWS)), set())
    assert split(database) == (set(range(ROWS)), set())


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
@pytest.mark.parametrize("buries", [True, False], ids=["buries first", "lands first"])
def test_two_completions_with_the_same_task_at_one_moment_decide_once(
    database: Database,
    landing: Writer,
    another: Writer,
    monkeypatch: pytest.MonkeyPatch,
    buries: bool,
    isolation: str,
) -> None:
    """The first decides and commits when the second has its rows in already, whatever isolation is the database's default."""
    run(database, ALTER.format(isolation))
    good = pulled_batch(ROWS, function="embed").slice(SEVENTH, 1)
    bad = pulled_batch(ROWS, function="embed", bad={SEVENTH: ("failed", "X", "y")}).slice(
        SEVENTH, 1
    )
    first, second = (bad, good) if buries else (good, bad)
    decided: list[Landed] = []
    real: Callable[..., Landed] = writer._settled
    again = [0]

    def late(*given: Any) -> Landed:
        again[0] += 1
        if again[0] == 1:
            decided.append(another.land(first))
        return real(*given)

    monkeypatch.setattr(writer, "_settled", late)
    mine = landing.land(second)
    expected = (set(), {SEVENTH}) if buries else ({SEVENTH}, set())
    assert told(first, decided[0]) == told(second, mine) == split(database) == expected
    assert again == [3 if buries else 2], (
        "what had landed was rolled back; what was not buried yet need not be"
    )


def test_a_landing_that_never_comes_to_decide_waits(
    landing: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: Any) -> None:
        raise DecidedMeanwhile([])

    monkeypatch.setattr(writer, "require_alone", never)
    with pytest.raises(DatabaseUnavailable, match="another completion lands the same tasks"):
        landing.land(pulled_batch(3, function="embed"))
