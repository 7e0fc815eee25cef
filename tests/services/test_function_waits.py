"""One function's table is locked or refuses everything: the other functions land and retire, over many pulls, as if it were not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.broker.accounts import DEAD, RETIRED
from fabric_pipelines.broker.core import Limits
from fabric_pipelines.completion.receive import Receiver
from fabric_pipelines.completion.waiting import PAUSE_MOST_S
from fabric_pipelines.dataplane import results
from fabric_pipelines.dataplane.database import Connection, Database
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.ledger import Amount
from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.records.settled import Settled, Sums
from fabric_pipelines.testing.broker_bench import (
    LARGE,
    Bench,
    TurnedClock,
    ids_of,
    submission_of,
    tasks_of,
)
from tests.support import eventually

PULL_ROWS = 50
TASKS = {"hidden_states": 400, "generate": 120, "own": 90}
WAITS = "hidden_states"
REFUSES = (
    "create function closed() returns trigger language plpgsql as "
    "$$ begin raise exception 'closed for the holidays'; end $$"
)
CLOSED = f"create trigger t before insert on fabric.{WAITS} for each row execute function closed()"


class Source:
    """The broker's own owner and queue, without a socket."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._owner = bench, bench.owner

    def hello(self) -> Any:
        return SimpleNamespace(journal_id="a" * 32, incarnation=self._owner.core.state.incarnation)

    def status(self) -> Any:
        return SimpleNamespace(total=self._owner.core.state.total())

    def settled_sums(self) -> Sums:
        return Sums.of(Settled.joined([]).ids(), 1, 0)

    def settled_page(self, begin: int) -> Settled:
        return Settled.joined([])

    def pull_computed(
        self, *, rows: int, wait_s: float = 0, skip: Sequence[str] = ()
    ) -> pa.RecordBatch | None:
        return self._owner.pull("c", rows, skip)

    def retire(self, task_ids: Any, confirmation: Confirmation) -> int:
        return self._owner.settle(np.asarray(task_ids), confirmation, dead=False)

    def dead(self, task_ids: Any, confirmation: Confirmation, *, requeues: Any = None) -> int:
        return self._owner.settle(np.asarray(task_ids), confirmation, dead=True, requeues=requeues)

    def release_pulled(self, task_ids: Any = None) -> None:
        self._owner.release_pulled("c", task_ids)

    def close(self) -> None:
        return None


@pytest.fixture
def broker() -> Bench:
    """Everything of the function that will wait was computed first: it lies before all others."""
    made = Bench(Limits(lease_s=1e6, attempts_max=3))
    made.attach(profile=LARGE)
    for mark, (function, count) in enumerate(TASKS.items()):
        batch = tasks_of([8] * count, seed=mark)
        made.submit(submission_of([batch], mark, function=function), [batch])
        while (lease := made.lease()) is not None:
            made.report(ids_of(lease))
    return made


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


@pytest.fixture
def loop(database: Database, broker: Bench, clock: TurnedClock) -> Iterator[Receiver]:
    source = Source(broker)
    writers = [Short(database) for _ in range(3)]
    made = Receiver(
        lambda: source,
        writers[0],
        lambda journal, number, settled: database.register_incarnation(
            journal, number, retired=settled
        ),
        more_targets=writers[1:],
        rows=PULL_ROWS,
        clock_s=lambda: clock.seconds,
    )
    yield made
    made.close()


class Short(Writer):
    """Waits for a lock as long as a test may."""

    def _meet(self, connection: Connection) -> None:
        super()._meet(connection)
        connection.execute("set lock_timeout = '100ms'")


def done(broker: Bench) -> dict[str, int]:
    """Tasks that are retired or dead, by function."""
    state = broker.owner.core.state
    settled = [record.header.function for record in state.submissions]
    submission = state.index.submission[: state.index.count]
    out = np.isin(state.index.state[: state.index.count], [RETIRED, DEAD])
    return {name: int(out[submission == at].sum()) for at, name in enumerate(settled)}


@pytest.mark.parametrize("trouble", ["locked", "refuses"])
def test_two_functions_land_and_retire_while_a_backlog_of_the_third_waits_before_them(
    database: Database, broker: Bench, loop: Receiver, clock: TurnedClock, trouble: str
) -> None:
    with database.connect() as owner:
        if trouble == "locked":
            owner.execute("begin")
            owner.execute(f"lock table fabric.{WAITS} in access exclusive mode".encode())
        else:
            owner.execute(REFUSES.encode())
            owner.execute(CLOSED.encode())

        def others_are_done() -> bool:
            """In steps, of which one ends while a trial waits for its lock."""
            assert loop.step(wait_s=0) == 0
            clock.seconds += 0.1
            return sum(done(broker).values()) >= 210 and WAITS in loop.waiting

        eventually(others_are_done, within_s=60, what="two functions to land")
        assert done(broker) == {WAITS: 0, "generate": 120, "own": 90}
        assert set(loop.waiting) == {WAITS}
        holder = f"held by pid {owner.info.backend_pid} (fabric"
        said = holder if trouble == "locked" else "refuses every row alike (P0001: closed for"
        assert said in loop.waits_for
        assert loop.holds <= 2 * PULL_ROWS
        owner.execute(
            "commit" if trouble == "locked" else f"drop trigger t on fabric.{WAITS}".encode()
        )
    clock.seconds += PAUSE_MOST_S

    def all_is_done() -> bool:
        loop.step(wait_s=0)
        return done(broker) == TASKS and not loop.waits_for

    eventually(all_is_done, within_s=60, what="the function that waited to land")
    counts = results.counts(database)
    assert (counts[WAITS], counts["generate"], counts["results"]) == tuple(TASKS.values())
    assert broker.owner.core.counters["duplicates"] == 0
    assert broker.owner.core.state.total().balance == Amount()
