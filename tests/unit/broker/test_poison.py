"""A task that ends its worker is found by halving, in log2 of the batch, and nothing beside it pays for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import ceil, log2

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fabric_pipelines.broker.core import Limits
from fabric_pipelines.ids import sequence_of
from fabric_pipelines.records.batch import Budget
from tests.support_broker import EMBED, Bench, ids_of, submission_of, tasks_of

ATTEMPTS_MAX = 3
BATCH = 1 << 20


@dataclass
class Line:
    """A line of workers, one after the other: each asks for all it may hold, runs that at once, and is gone when
    a poison is in it. `held`: what each lost worker had."""

    bench: Bench
    poison: Collection[int]  # sequence numbers
    sequences: int
    leases: int = 1
    held: list[list[int]] = field(default_factory=list)
    clean: list[list[int]] = field(default_factory=list)

    def run(self) -> None:
        name = "w0"
        self.bench.attach(name)
        while taken := self._take(name):
            if any(sequence_of(at) in self.poison for at in taken):
                self.held.append(taken)
                self.bench.owner.core.sessions[name].deadline_s = 0.0
                self.bench.owner.tick()
                name = f"w{len(self.held)}"
                self.bench.attach(name)
            else:
                self.clean.append(taken)
                self.bench.report(taken, "ok", name)
            assert len(self.held) < 200, "the poison is not found"

    def _take(self, name: str) -> list[int]:
        taken: list[int] = []
        for _ in range(self.leases):
            lease = self.bench.lease(name, Budget(self.sequences, BATCH, None))
            taken += [] if lease is None else ids_of(lease)
        return taken


def line(
    tasks: int,
    poison: Collection[int],
    *,
    sequences: int,
    leases: int = 1,
    sampling: dict[str, object] | None = None,
) -> Line:
    bench = Bench(Limits(lease_s=10.0, attempts_max=ATTEMPTS_MAX))
    batch = tasks_of([20] * tasks)
    kinds = {} if sampling is None else {"sampling": sampling}
    bench.submit(submission_of([batch], **kinds), [batch])  # type: ignore[arg-type]
    made = Line(bench, poison, sequences, leases)
    made.run()
    return made


def require_only_the_poison_died(found: Line, tasks: int) -> None:
    index = found.bench.owner.core.state.index
    attempts = index.attempts[:tasks]
    assert set(np.flatnonzero(attempts)) == set(found.poison)
    assert (attempts[list(found.poison)] == ATTEMPTS_MAX).all()
    pulled = found.bench.owner.pull("c", 1 << 20)
    assert pulled is not None
    rows = {sequence_of(row["task_id"]): row for row in pulled.to_pylist()}
    assert len(rows) == tasks
    for at, row in rows.items():
        assert row["status"] == ("failed" if at in found.poison else "ok")
    for at in found.poison:
        assert rows[at]["error_code"] == "LeaseExpired"
        assert rows[at]["consumer"] == f"w{len(found.held) - 1}" or len(found.poison) > 1
        assert "session w" in rows[at]["error_text"]
        assert len(rows[at]["error_text"].encode()) <= 256
    dead = [rows[at]["task_id"] for at in found.poison]
    assert found.bench.bury(dead) == len(dead)
    assert found.bench.owner.core.state.suspects == {}
    assert found.bench.owner.verify().differences == []


@pytest.mark.parametrize("tasks", range(1, 65))
def test_a_poison_anywhere_in_a_batch_is_alone_after_log2_crashes(tasks: int) -> None:
    places = range(tasks) if tasks <= 9 else sorted({0, 1, tasks // 3, tasks // 2, tasks - 1})
    for place in places:
        found = line(tasks, {place}, sequences=tasks)
        sizes = [len(held) for held in found.held]
        until_alone = sizes.index(1)
        assert until_alone <= ceil(log2(tasks))
        assert sizes[until_alone:] == [1] * ATTEMPTS_MAX
        require_only_the_poison_died(found, tasks)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), tasks=st.integers(2, 64))
def test_two_poisons_cost_two_searches_and_nobody_else(data: st.DataObject, tasks: int) -> None:
    pair = data.draw(st.sets(st.integers(0, tasks - 1), min_size=2, max_size=2))
    found = line(tasks, pair, sequences=tasks)
    assert len(found.held) <= 2 * (ceil(log2(tasks)) + ATTEMPTS_MAX)
    require_only_the_poison_died(found, tasks)


@settings(max_examples=40, deadline=None)
@given(
    tasks=st.integers(8, 120),
    sequences=st.integers(1, 16),
    leases=st.integers(2, 16),
    place=st.integers(0, 119),
    sampling=st.sampled_from([None, EMBED]),
)
def test_a_worker_that_fetches_ahead_runs_suspects_one_piece_at_a_time(
    tasks: int, sequences: int, leases: int, place: int, sampling: dict[str, object] | None
) -> None:
    """Or all the pieces would run side by side again, and it would take a crash a task."""
    place %= tasks
    found = line(tasks, {place}, sequences=sequences, leases=leases, sampling=sampling)
    assert len(found.held) <= 1 + ceil(log2(max(sequences, 2))) + ATTEMPTS_MAX
    require_only_the_poison_died(found, tasks)


def test_a_broker_that_restarts_in_the_search_goes_on_where_it_was() -> None:
    bench = Bench(Limits(lease_s=10.0, attempts_max=ATTEMPTS_MAX))
    batch = tasks_of([20] * 64)
    bench.submit(submission_of([batch]), [batch])
    sizes = []
    for crash in range(6):
        name = f"w{crash}"
        bench.attach(name)
        while (lease := bench.lease(name, Budget(64, BATCH, None))) is not None:
            ids = ids_of(lease)
            if any(sequence_of(at) == 41 for at in ids):
                break
            bench.report(ids, "ok", name)
        sizes.append(len(ids))
        bench.owner.core.sessions[name].deadline_s = 0.0
        bench.owner.tick()
        bench.owner.commit()
        bench.crash()
    assert sizes == [64, 32, 16, 8, 4, 2]
    assert bench.owner.verify().differences == []


def test_busy_sessions_pass_suspects_over_and_one_that_holds_nothing_takes_them() -> None:
    bench = Bench(Limits(lease_s=10.0, attempts_max=ATTEMPTS_MAX))
    batch = tasks_of([20] * 400)
    bench.submit(submission_of([batch]), [batch])
    for name in ("gone", "busy"):
        bench.attach(name)
        assert bench.lease(name, Budget(8, BATCH, None)) is not None
    bench.owner.core.sessions["gone"].deadline_s = 0.0
    bench.owner.tick()
    suspects = set(bench.owner.core.state.suspects)
    assert len(suspects) == 8
    past = bench.lease("busy", Budget(8, BATCH, None))
    assert past is not None
    assert not set(map(sequence_of, ids_of(past))) & suspects
    bench.attach("fresh")
    piece = bench.lease("fresh", Budget(8, BATCH, None))
    assert piece is not None
    assert set(map(sequence_of, ids_of(piece))) < suspects
    assert bench.owner.lease("fresh", Budget(8, BATCH, None), -1)[1]
    assert bench.owner.renew("fresh").hold
    bench.report(ids_of(piece), "ok", "fresh")
    assert not bench.owner.renew("fresh").hold
    assert bench.lease("fresh", Budget(8, BATCH, None)) is not None


def test_a_suspect_that_was_claimed_out_of_the_order_is_not_given_from_its_old_place() -> None:
    bench = Bench(Limits(lease_s=10.0, attempts_max=ATTEMPTS_MAX))
    batch = tasks_of([20] * 6)
    state = bench.submit(submission_of([batch]), [batch])
    assert state.first_task_id is not None
    bench.attach("claims", held=[state.first_task_id + 2, state.first_task_id + 3])
    bench.owner.core.sessions["claims"].deadline_s = 0.0
    bench.owner.tick()
    bench.attach("w")
    first = bench.lease("w", Budget(3, BATCH, None))
    assert first is not None
    assert ids_of(first) == [state.first_task_id + 2]
    assert bench.owner.core.stranded() == []


def test_suspects_are_not_passed_over_for_ever() -> None:
    bench = Bench(Limits(lease_s=1e6, attempts_max=ATTEMPTS_MAX))
    batch = tasks_of([20] * 1000)
    bench.submit(submission_of([batch]), [batch])
    bench.attach("gone")
    bench.lease("gone", Budget(4, BATCH, None))
    bench.owner.core.sessions["gone"].deadline_s = 0.0
    bench.owner.tick()
    bench.attach("busy")
    first = bench.lease("busy", Budget(1, BATCH, None))
    assert first is not None
    bench.report(ids_of(first), "ok", "busy")
    held = None
    for _ in range(200):
        before, held = held, bench.lease("busy", Budget(2, BATCH, None))
        if before is not None:
            bench.report(ids_of(before), "ok", "busy")
    assert bench.owner.core.state.suspects == {}


def test_a_failure_that_the_engine_survived_clears_what_was_beside_it() -> None:
    bench = Bench(Limits(lease_s=10.0, attempts_max=ATTEMPTS_MAX))
    batch = tasks_of([20] * 4)
    bench.submit(submission_of([batch]), [batch])
    bench.attach("w")
    lease = bench.lease("w")
    assert lease is not None
    bench.owner.nack("w", np.array(ids_of(lease)), "engine failed", True)
    assert len(bench.owner.core.state.suspects) == 4
    piece = bench.lease("w")
    assert piece is not None
    bench.report(ids_of(piece), "failed", "w")
    assert len(bench.owner.core.state.suspects) == 2
