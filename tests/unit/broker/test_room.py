"""Room: what a tenant may hold on disk and in memory, and how a producer waits for more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from fabric_pipelines.broker.credits import FRAME_BYTES_MAX, Credits, require_size
from fabric_pipelines.broker.patience import AWAY_FIRST_S, AWAY_MOST_S, Patience
from fabric_pipelines.broker.pieces import UPLOAD_BYTES, Pieces
from fabric_pipelines.broker.quota import RECOUNT_S, held_bytes
from fabric_pipelines.clock import Clock
from fabric_pipelines.errors import Backpressure, BrokerUnavailable, UsageError
from tests.support_broker import Bench, ids_of, submission_of, tasks_of

MARK = 10_000


def bench_with_share() -> Bench:
    bench = Bench()
    bench.owner.quota.mark = MARK
    return bench


def fill(bench: Bench, tenant: str, marks: Iterator[int]) -> int:
    """Submissions that were taken until one was refused."""
    taken = 0
    while True:
        before = bench.journal.next_lsn
        refused = refusal(bench, tenant, next(marks))
        if refused is not None:
            assert refused.retry_after_s > 0
            assert f"tenant {tenant!r}" in str(refused)
            assert bench.journal.next_lsn == before
            return taken
        taken += 1


def refusal(bench: Bench, tenant: str, mark: int) -> Backpressure | None:
    batches = [tasks_of([100] * 5, seed=mark)]
    try:
        bench.submit(submission_of(batches, mark, tenant=tenant), batches)
    except Backpressure as refused:
        return refused
    return None


def test_a_tenant_at_its_share_is_refused_and_another_is_not() -> None:
    bench, marks = bench_with_share(), iter(range(1000))
    assert fill(bench, "acme", marks) == fill(bench, "beta", marks) > 1
    held = held_bytes(bench.owner.core.state, bench.journal)
    assert min(held.values()) >= MARK
    assert sum(held.values()) <= bench.journal.bytes_used


def test_room_comes_back_with_outcomes_not_with_time_and_is_looked_for_once_a_second() -> None:
    bench, marks = bench_with_share(), iter(range(1000))
    taken = fill(bench, "acme", marks)
    bench.time.seconds += 3600
    assert fill(bench, "acme", marks) == 0
    bench.attach()
    lease = bench.lease()
    assert lease is not None
    bench.finish(lease)
    assert fill(bench, "acme", marks) == 0  # counted a moment ago
    bench.time.seconds += RECOUNT_S
    assert fill(bench, "acme", marks) == taken


def test_after_a_restart_the_share_is_counted_from_the_log() -> None:
    bench, marks = bench_with_share(), iter(range(1000))
    fill(bench, "acme", marks)
    bench.crash()
    bench.owner.quota.mark = MARK
    assert fill(bench, "acme", marks) == 0
    assert fill(bench, "beta", marks) > 1


def test_a_refusal_leaves_the_backlog_that_filled_the_share_as_it_was() -> None:
    bench, marks = bench_with_share(), iter(range(1000))
    taken = fill(bench, "acme", marks)
    bench.attach()
    lease = bench.lease()
    assert lease is not None
    assert len(ids_of(lease)) == 5 * taken
    assert bench.owner.verify().differences == []


def test_credits_are_given_per_tenant_and_in_total_and_given_back() -> None:
    room = Credits(total=100, tenant=60, patience_s=0)
    room.take("a", 60)
    with pytest.raises(Backpressure, match="60 bytes of tenant 'a'") as refused:
        room.take("a", 1)
    assert refused.value.retry_after_s > 0
    room.take("b", 40)
    with pytest.raises(Backpressure, match="100 in all"):
        room.take("c", 1)
    assert (room.held, room.refusals) == (100, 2)
    room.give("a", 60)
    room.take("c", 60)
    room.give("c", 60)
    room.give("b", 40)
    assert room.held == 0


def test_a_stream_without_credit_goes_on_as_soon_as_some_comes_back() -> None:
    room = Credits(total=10, tenant=10, patience_s=60)
    room.take("a", 10)
    waiter = threading.Thread(target=room.take, args=("a", 5))
    waiter.start()
    room.give("a", 10)
    waiter.join(30)
    assert not waiter.is_alive()
    assert (room.held, room.refusals) == (5, 0)


def test_a_batch_that_no_credit_would_do_for_is_refused_for_good() -> None:
    require_size(FRAME_BYTES_MAX)
    with pytest.raises(UsageError, match="send fewer tasks"):
        require_size(FRAME_BYTES_MAX + 1)


@dataclass
class Slept:
    """Time that passes by sleeping only."""

    now_s: float = 0.0
    naps: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now_s += seconds

    def patience(self, limit_s: float, draw: float = 0.0) -> Patience:
        clock = Clock(lambda: self.now_s, lambda: 0)
        return Patience(limit_s, self.said.append, clock, self.sleep, lambda: draw)


def test_a_full_broker_is_asked_again_no_sooner_than_it_said_and_not_for_ever() -> None:
    time, full = Slept(), Backpressure("full", retry_after_s=5.0)
    patience = time.patience(20, draw=0.5)
    for _ in range(3):
        patience.wait(full)
    assert (
        time.naps == [6.25] * 3
    )  # what it said, and a share on top that differs between producers
    with pytest.raises(Backpressure) as refused:
        patience.wait(full)
    assert refused.value is full
    assert time.said == ["waiting for room in the broker, asking again in 6.2 s: full"] * 3


def test_the_limit_is_of_waiting_without_progress() -> None:
    time = Slept()
    patience = time.patience(6)
    for _ in range(10):
        patience.wait(Backpressure("full", retry_after_s=5.0))
        patience.progressed()
    assert time.now_s == 50


def test_a_broker_that_is_away_is_tried_at_growing_intervals() -> None:
    time = Slept()
    patience = time.patience(60)
    with pytest.raises(BrokerUnavailable):  # noqa: PT012 - any of them may be the last
        while True:
            patience.wait(BrokerUnavailable("away"))
    assert time.naps[:4] == [AWAY_FIRST_S * 2**at for at in range(4)]
    assert max(time.naps) == AWAY_MOST_S
    assert time.now_s <= 60


def test_what_was_sent_and_not_answered_is_sent_again_from_a_generator_too() -> None:
    batches = [tasks_of([10] * 4, seed=at) for at in range(5)]
    pieces = Pieces(iter(batches))
    first = pieces.from_row(0)
    sent = [next(first) for _ in range(3)]
    pieces.forget_below(6)
    again = list(pieces.from_row(6))
    assert [(row, batch.num_rows) for row, batch in again] == [(6, 2), (8, 4), (12, 4), (16, 4)]
    assert again[0][1].equals(sent[1][1].slice(2))
    whole = pa.Table.from_batches([batch for _, batch in again])
    assert whole.equals(pa.Table.from_batches(batches).slice(6))


def test_rows_that_are_there_already_are_not_kept() -> None:
    batches = [tasks_of([10] * 4, seed=at) for at in range(5)]
    assert [row for row, _ in Pieces(batches).from_row(17)] == [17]
    assert list(Pieces(batches).from_row(20)) == []


def test_large_batches_are_cut() -> None:
    pieces = list(Pieces([tasks_of([4000] * 800)]).from_row(0))
    assert len(pieces) > 2
    assert max(piece.nbytes for _, piece in pieces) <= UPLOAD_BYTES
    assert sum(piece.num_rows for _, piece in pieces) == 800
