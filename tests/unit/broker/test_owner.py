"""What the broker promises, one story each, over a journal in memory and a clock that the test turns."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.owner import Fatal, TaskUpload
from fabric_pipelines.broker.state import BatchColumns
from fabric_pipelines.errors import (
    Backpressure,
    BalanceBroken,
    NotAttached,
    SchemaError,
    StorageFailed,
    SubmissionConflict,
    UsageError,
)
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.submission import Submission
from fabric_pipelines.testing.memory_journal import MemoryJournal
from tests.support_broker import (
    BURIED,
    EMBED,
    ENGINE,
    PLENTY,
    PROFILE,
    Bench,
    completions,
    ids_of,
    ipc_of,
    submission_of,
    tasks_of,
)

BATCHES = [tasks_of([20, 30, 40], seed=1), tasks_of([50] * 5, seed=2)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def filled(bench: Bench) -> Bench:
    bench.submit(submission_of(BATCHES), BATCHES)
    bench.attach()
    return bench


# -- submissions


def test_the_same_submission_twice_gives_the_same_answer_and_nothing_twice(bench: Bench) -> None:
    header = submission_of(BATCHES)
    assert bench.submit(header, BATCHES) == bench.submit(header, BATCHES)
    assert bench.counts() == {"ready": 8}
    assert bench.owner.core.counters["duplicates"] == 8


def test_the_same_id_with_other_content_is_a_conflict(bench: Bench) -> None:
    bench.submit(submission_of(BATCHES), BATCHES)
    with pytest.raises(SubmissionConflict, match="salt"):
        bench.owner.open_submission(submission_of(BATCHES[:1]))
    with pytest.raises(SubmissionConflict, match="sampling"):
        bench.owner.open_submission(submission_of(BATCHES, sampling=EMBED, function="generate"))


def test_a_submission_goes_on_where_its_producer_died_however_it_is_cut(bench: Bench) -> None:
    header = submission_of(BATCHES)
    bench.owner.open_submission(header)
    bench.upload(header, 0, BATCHES[0])
    bench.owner.commit()
    bench.crash()
    assert bench.owner.open_submission(header).enqueued == 3
    bench.upload(header, 2, BATCHES[0].slice(2))  # one row again
    bench.upload(header, 3, BATCHES[1].slice(0, 4))
    bench.upload(header, 6, BATCHES[1].slice(3))  # one row again, one new
    assert bench.owner.close_submission(header.submission_id).closed
    assert bench.counts() == {"ready": 8}


def test_rows_may_not_be_left_out(bench: Bench) -> None:
    header = submission_of(BATCHES)
    bench.owner.open_submission(header)
    with pytest.raises(UsageError, match="row 0"):
        bench.upload(header, 3, BATCHES[1])


def test_more_than_was_declared_is_refused_before_it_is_journaled(bench: Bench) -> None:
    header = submission_of(BATCHES[:1])
    bench.owner.open_submission(header)
    before = bench.journal.next_lsn
    with pytest.raises(SubmissionConflict, match="declared 3 tasks"):
        bench.upload(header, 0, BATCHES[1])
    assert bench.journal.next_lsn == before


def test_an_incomplete_submission_does_not_close(bench: Bench) -> None:
    header = submission_of(BATCHES)
    bench.owner.open_submission(header)
    bench.upload(header, 0, BATCHES[0])
    with pytest.raises(SubmissionConflict, match="has 3"):
        bench.owner.close_submission(header.submission_id)


def test_a_fingerprint_is_checked_across_a_restart(bench: Bench) -> None:
    header = submission_of(BATCHES)
    bench.owner.open_submission(header)
    bench.upload(header, 0, BATCHES[0])
    bench.owner.commit()
    bench.crash()
    bench.upload(header, 3, BATCHES[1])
    assert bench.owner.close_submission(header.submission_id).closed


class Stream:
    """An upload stream that fingerprints its content itself, as the server's do."""

    def __init__(self, bench: Bench, header: Submission) -> None:
        self.bench, self.header = bench, header
        self.content = bench.owner.content_of(header.submission_id)

    def send(self, first_row: int, batch: pa.RecordBatch) -> None:
        if self.content is not None and self.content.tasks == first_row:
            self.content.update(batch)
        else:
            self.content = None
        columns = BatchColumns.of(self.header, batch)
        upload = TaskUpload(self.header.submission_id, first_row, batch, columns, self.content)
        self.bench.owner.enqueue(upload)


def unread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, reading stored batches is a failure of the test."""

    def read(ordinals: object) -> object:
        raise AssertionError("the content was fingerprinted already")

    monkeypatch.setattr(bench.owner.payloads, "tasks", read)


def test_a_stream_that_fingerprints_its_own_content_spares_reading_it_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = submission_of(BATCHES)
    bench.owner.open_submission(header)
    first = Stream(bench, header)
    first.send(0, BATCHES[0])
    second = Stream(bench, header)  # the producer lost its connection and goes on
    second.send(3, BATCHES[1])
    unread(bench, monkeypatch)
    assert bench.owner.close_submission(header.submission_id).closed


@pytest.mark.parametrize("honest", [True, False])
def test_rows_of_two_streams_are_fingerprinted_as_they_were_taken(
    bench: Bench, honest: bool
) -> None:
    """Each stream's own content is right or wrong by itself; what counts is the mixture that was journaled."""
    header = submission_of(BATCHES)
    bench.owner.open_submission(header)
    left, right = Stream(bench, header), Stream(bench, header)
    left.send(0, BATCHES[0])
    right.send(0, BATCHES[0])
    if not honest:
        with pytest.raises(SubmissionConflict, match="fingerprint"):
            right.send(3, tasks_of([50] * 5, seed=99))
    right.send(3, BATCHES[1])
    left.send(3, BATCHES[1])
    assert bench.owner.close_submission(header.submission_id).closed


# -- leases


def test_a_lease_brings_the_very_tokens_that_were_submitted(bench: Bench) -> None:
    lease = filled(bench).lease()
    assert lease is not None
    first_id = bench.owner.submission("0" * 64).first_task_id  # type: ignore[union-attr]
    sent = [row for batch in BATCHES for row in batch.to_pylist()]
    got = sorted(lease.tasks.to_pylist(), key=lambda row: row["task_id"])
    assert [row["task_id"] for row in got] == [first_id + i for i in range(8)]  # type: ignore[operator]
    for mine, theirs in zip(got, sent, strict=True):
        assert {name: mine[name] for name in theirs} == theirs


def test_single_pass_tasks_of_one_lease_share_one_aligned_length(bench: Bench) -> None:
    batch = tasks_of([5, 8, 9, 16, 100, 101], new=0)
    bench.submit(submission_of([batch], sampling=EMBED), [batch])
    bench.attach()
    seen = []
    while (lease := bench.lease()) is not None:
        seen.append((lease.aligned_length, lease.tasks.num_rows))
    assert sorted(seen) == [(8, 2), (16, 2), (104, 2)]


def test_a_session_gets_only_what_its_engine_can_run(bench: Bench) -> None:
    filled(bench)
    bench.attach("other", engine="another@engine")
    assert bench.lease("other") is None


def test_an_unknown_session_is_told_to_attach(bench: Bench) -> None:
    with pytest.raises(NotAttached, match="attach again"):
        bench.lease("nobody")


def test_a_repeated_lease_call_gets_the_same_lease_again(bench: Bench) -> None:
    filled(bench)
    budget = Budget(3, 1000, None)
    first, again = bench.lease(budget=budget, call=1), bench.lease(budget=budget, call=1)
    other = bench.lease(budget=budget, call=2)
    assert first is not None
    assert again is not None
    assert other is not None
    assert first.lease_id == again.lease_id
    assert ids_of(first) == ids_of(again)
    assert not set(ids_of(first)) & set(ids_of(other))


def test_a_lease_request_that_comes_late_or_twice_leases_nothing_that_nobody_hears_of() -> None:
    """Found by the simulator: the session went on renewing a lease whose answer was for nobody."""
    bench = Bench()
    batch = tasks_of([10] * 9)
    bench.submit(submission_of([batch]), [batch])
    bench.attach()
    small = Budget(2, 1 << 20, None)
    first = bench.lease(budget=small, call=5)
    assert first is not None
    bench.finish(first)
    assert bench.lease(budget=small, call=5) is None
    assert bench.lease(budget=small, call=4) is None
    assert bench.counts() == {"ready": 7, "computed": 2}
    bench.attach()
    assert bench.lease(budget=small, call=5) is None
    assert bench.lease(budget=small, call=6) is not None


def test_an_attach_that_comes_late_takes_nothing_from_its_session() -> None:
    """Found by the simulator: the ids that it named were those of before the last leases."""
    bench = Bench()
    batch = tasks_of([10] * 9)
    bench.submit(submission_of([batch]), [batch])
    attach = partial(bench.owner.attach, "w", ENGINE, "fingerprint", "cpu:0", PROFILE, ())
    attach(1)
    lease = bench.lease(call=2)
    with pytest.raises(NotAttached):
        attach(1)
    assert lease is not None
    assert bench.finish(lease).accepted == 9
    attach(3)


def test_a_lease_that_is_not_renewed_goes_back(bench: Bench) -> None:
    lease = filled(bench).lease()
    assert lease is not None
    bench.time.seconds += 29
    bench.owner.renew("w")
    bench.time.seconds += 29
    bench.owner.tick()
    assert bench.counts() == {"leased": 8}
    bench.time.seconds += 2
    bench.owner.tick()
    assert bench.counts() == {"ready": 8}
    with pytest.raises(NotAttached):
        bench.owner.renew("w")


def test_work_that_outlived_its_lease_counts_if_nobody_took_it_over(bench: Bench) -> None:
    lease = filled(bench).lease()
    assert lease is not None
    bench.time.seconds += 31
    bench.owner.tick()
    bench.attach("x")
    taken = bench.lease("x", Budget(2, 1000, None))
    assert taken is not None
    reply = bench.finish(lease)
    assert (reply.accepted, reply.late) == (6, 2)
    assert bench.finish(taken, name="x").accepted == 2
    assert bench.counts() == {"computed": 8}
    assert bench.owner.verify().differences == []


def test_nacked_tasks_come_back_first_and_cost_no_attempt(bench: Bench) -> None:
    lease = filled(bench).lease(budget=Budget(4, 1000, None))
    assert lease is not None
    ids = ids_of(lease)
    assert bench.owner.nack("w", np.array(ids), "drains", False) == 4
    again = bench.lease()
    assert again is not None
    assert ids_of(again)[:4] == ids, "and take along what a full batch needs"
    assert set(again.tasks.column("attempts").to_pylist()) == {0}


def test_attempts_that_were_given_back_run_out_too_and_say_why(bench: Bench) -> None:
    batch = tasks_of([10])
    bench.submit(submission_of([batch]), [batch])
    bench.attach()
    for _ in range(3):
        lease = bench.lease()
        assert lease is not None
        bench.owner.nack("w", np.array(ids_of(lease)), "engine fell over", True)
    row = bench.owner.pull("c", 10).to_pylist()[0]  # type: ignore[union-attr]
    assert (row["status"], row["error_code"], row["error_text"]) == (
        "failed",
        "GivenBack",
        "engine fell over, held by session w",
    )
    assert bench.owner.verify().ok


def attach_at(bench: Bench, name: str, place: str, call: int) -> None:
    bench.owner.attach(name, ENGINE, "f", "cpu:0", PROFILE, [], call, place=place)


def test_a_new_process_on_a_device_ends_the_session_of_the_one_before(bench: Bench) -> None:
    """Nobody waits for the lease time of a worker that its supervisor has already replaced."""
    bench.submit(submission_of(BATCHES), BATCHES)
    attach_at(bench, "first", "card", 100)
    mine = bench.lease("first", Budget(4, 1 << 20, None))
    attach_at(bench, "elsewhere", "other card", 101)
    theirs = bench.lease("elsewhere", Budget(1, 1 << 20, None))
    assert mine is not None
    assert theirs is not None
    assert len(ids_of(mine)) == 4
    attach_at(bench, "second", "card", 200)
    with pytest.raises(NotAttached):
        bench.owner.renew("first")
    again = bench.lease("second")
    assert again is not None
    taken = ids_of(again)
    assert 0 < len(taken) <= 2  # in halves at most, as from one that did not renew
    assert taken == ids_of(mine)[: len(taken)]
    assert bench.owner.core.counters["expired"] == 4
    bench.owner.renew("elsewhere")
    batch = completions(ids_of(theirs))
    assert bench.owner.computed("elsewhere", batch, ipc_of(batch)).accepted == 1
    assert bench.owner.verify().differences == []


def test_a_session_claims_only_what_its_engine_may_run(bench: Bench) -> None:
    bench.submit(submission_of(BATCHES), BATCHES)
    mark = bench.owner.core.state.incarnation << 40
    ids = [mark + at for at in range(8)]
    other = bench.owner.attach("other", "other@engine", "f", "cpu:0", PROFILE, ids)
    assert (other.accepted, set(other.lost)) == ((), set(ids))
    batch = completions(ids)
    assert bench.owner.computed("other", batch, ipc_of(batch)).accepted == 0
    assert bench.counts() == {"ready": 8}
    own = bench.owner.attach("own", ENGINE, "f", "cpu:0", PROFILE, ids)
    assert own.accepted == tuple(ids)


def test_a_word_from_a_dead_process_ends_nobody(bench: Bench) -> None:
    """Its attach was under way when it died, and came after that of the next one."""
    filled(bench)
    attach_at(bench, "second", "card", 200)
    taken = bench.lease("second", call=201)
    attach_at(bench, "first", "card", 100)
    bench.owner.renew("second")
    assert taken is not None
    assert bench.owner.core.counters["expired"] == 0
    attach_at(bench, "second", "card", 202)  # its own attach again, after an answer was lost
    bench.owner.renew("second")
    assert bench.owner.core.counters["expired"] == 0


def test_sessions_without_a_place_end_nobody(bench: Bench) -> None:
    filled(bench)
    attach_at(bench, "first", "", 100)
    bench.lease("first")
    attach_at(bench, "second", "", 200)
    bench.owner.renew("first")
    assert bench.owner.core.counters["expired"] == 0


def test_a_lost_lease_is_halved_until_the_killer_is_alone(bench: Bench) -> None:
    """A task that kills its worker must not take its neighbours along."""
    filled(bench)
    killer, sizes = None, []
    while (lease := bench.lease()) is not None:
        killer = killer or ids_of(lease)[0]
        if killer in ids_of(lease):
            sizes.append(len(ids_of(lease)))
            bench.time.seconds += 31
            bench.owner.tick()
            bench.attach()
        else:
            bench.finish(lease)
    assert sizes == [8, 4, 2, 1, 1, 1]
    assert bench.counts() == {"computed": 8}
    pulled = bench.owner.pull("c", 100)
    assert pulled is not None
    dead = [row for row in pulled.to_pylist() if row["status"] != "ok"]
    assert [(row["task_id"], row["error_code"], row["attempts"]) for row in dead] == [
        (killer, "LeaseExpired", 3)
    ]
    assert "did not renew" in dead[0]["error_text"]
    assert bench.bury([killer]) == 1  # type: ignore[list-item]


def test_consumers_share_the_end_of_a_backlog(bench: Bench) -> None:
    batch = tasks_of([10] * 64)
    bench.submit(submission_of([batch]), [batch])
    bench.attach("a")
    bench.attach("b")
    sizes = []
    while (lease := bench.lease("ab"[len(sizes) % 2], Budget(32, 1 << 20, None))) is not None:
        sizes.append(lease.tasks.num_rows)
    assert sizes[:4] == [16, 12, 9, 6]
    assert sum(sizes) == 64


# -- outcomes


def test_late_and_repeated_outcomes_are_counted_and_change_nothing(bench: Bench) -> None:
    lease = filled(bench).lease()
    assert lease is not None
    bench.attach("x")
    assert bench.finish(lease, name="x").late == 8
    assert bench.finish(lease).accepted == 8
    assert bench.finish(lease).duplicates == 8
    unknown = bench.report([1, 2, 3])
    assert (unknown.accepted, unknown.unknown) == (0, 3)
    twice = completions(ids_of(lease)[:1] * 2)
    assert bench.owner.computed("w", twice, ipc_of(twice)).duplicates == 2
    assert bench.counts() == {"computed": 8}


def test_a_failed_task_is_tried_again_until_attempts_run_out(bench: Bench) -> None:
    batch = tasks_of([10])
    bench.submit(submission_of([batch]), [batch])
    bench.attach()
    for attempt in range(3):
        lease = bench.lease()
        assert lease is not None
        assert lease.tasks.column("attempts").to_pylist() == [attempt]
        bench.finish(lease, "failed")
    assert bench.lease() is None
    row = bench.owner.pull("c", 10).to_pylist()[0]  # type: ignore[union-attr]
    assert (row["status"], row["error_text"], row["submission_id"]) == (
        "failed",
        "said so",
        "0" * 64,
    )
    assert row["attempts"] == 3


def test_a_failure_that_is_reported_again_is_counted_once_though_the_task_is_leased_again() -> None:
    """Found by the simulator: the copy took the task from the session that was running it for the second time."""
    bench = Bench()
    batch = tasks_of([10])
    bench.submit(submission_of([batch]), [batch])
    bench.attach()
    lease = bench.lease()
    assert lease is not None
    assert bench.finish(lease, "failed").accepted == 1
    second = bench.lease()
    assert second is not None
    assert second.tasks.column("attempts").to_pylist() == [1]
    copy = bench.report(ids_of(lease), "failed", attempts=0)
    assert (copy.accepted, copy.duplicates) == (0, 1)
    assert bench.counts() == {"leased": 1}
    assert bench.report(ids_of(second), "failed", attempts=1).accepted == 1
    assert bench.counts() == {"ready": 1}


def test_a_refused_task_is_terminal_at_once_and_only_buried(bench: Bench) -> None:
    lease = filled(bench).lease(budget=Budget(1, 1000, None))
    assert lease is not None
    bench.finish(lease, "refused")
    ids = bench.pull()
    with pytest.raises(UsageError, match="REFUSED"):
        bench.retire(ids)
    assert bench.bury(ids) == 1
    assert bench.bury(ids) == 0
    assert bench.counts() == {"ready": 7, "dead": 1}


def test_nothing_is_retired_that_was_not_computed(bench: Bench) -> None:
    lease = filled(bench).lease()
    assert lease is not None
    with pytest.raises(UsageError, match="is leased"):
        bench.retire(ids_of(lease)[:1])
    with pytest.raises(UsageError, match="not of this journal"):
        bench.retire([12345])
    bench.finish(lease)
    with pytest.raises(UsageError, match="retires nothing"):
        bench.owner.settle(np.array(ids_of(lease)), BURIED, dead=False)


def test_a_status_of_an_unknown_word_is_refused(bench: Bench) -> None:
    lease = filled(bench).lease()
    assert lease is not None
    with pytest.raises(SchemaError, match="status"):
        bench.finish(lease, "great")


def test_pulled_rows_come_once_per_session_and_oldest_first(bench: Bench) -> None:
    filled(bench)
    order = []
    for _ in range(4):
        lease = bench.lease(budget=Budget(2, 1000, None))
        assert lease is not None
        order += ids_of(lease)
        bench.finish(lease)
    assert bench.pull(3) + bench.pull(3) == order[:6]
    assert bench.pull(8, "another") == order
    bench.retire(order[:2])
    bench.owner.release_pulled("c")
    assert bench.pull(2) == order[2:4]
    assert bench.pull() == order[4:]
    assert bench.pull() == []


def test_pulled_rows_say_what_only_the_broker_knows(bench: Bench) -> None:
    lease = filled(bench).lease()
    assert lease is not None
    bench.finish(lease)
    rows = bench.owner.pull("c", 100)
    assert rows is not None
    assert set(rows.column("function").to_pylist()) == {"generate"}
    assert set(rows.column("submission_id").to_pylist()) == {"0" * 64}


def test_a_submission_ends_with_its_tokens_counted(bench: Bench) -> None:
    lease = filled(bench).lease()
    assert lease is not None
    bench.finish(lease)
    bench.retire(bench.pull())
    state = bench.owner.submission("0" * 64)
    assert state is not None
    assert state.finished
    assert (state.retired_tokens, state.output_tokens) == (state.tokens, 16)


# -- pressure


def test_leasing_holds_at_the_high_water_mark_of_computed_tasks() -> None:
    bench = filled(Bench(Limits(computed_high_water=3)))
    lease = bench.lease(budget=Budget(3, 1000, None))
    assert lease is not None
    bench.finish(lease)
    nothing, reason = bench.owner.lease("w", PLENTY, -1)
    assert nothing is None
    assert "high-water" in reason
    renewed = bench.owner.renew("w")
    assert renewed.hold
    assert renewed.retry_after_s > 0
    bench.retire(bench.pull(1))
    assert bench.lease() is not None


def test_a_full_journal_refuses_tasks_and_takes_outcomes() -> None:
    bench = filled(Bench())
    bench.owner.journal_high_water = bench.journal.bytes_used
    other = [tasks_of([4], seed=9)]
    with pytest.raises(Backpressure) as refused:
        bench.submit(submission_of(other, 1), other)
    assert refused.value.retry_after_s > 0
    lease = bench.lease()
    assert lease is not None
    assert bench.finish(lease).accepted == 8
    assert bench.retire(bench.pull()) == 8


def test_a_full_disk_refuses_tasks_and_the_broker_lives() -> None:
    bench = filled(Bench())
    bench.journal.full = True
    other = [tasks_of([4], seed=9)]
    with pytest.raises(StorageFailed, match="full"):
        bench.submit(submission_of(other, 1), other)
    lease = bench.lease()
    assert lease is not None
    assert bench.finish(lease).accepted == 8
    bench.journal.full = False
    assert bench.submit(submission_of(other, 1), other).closed
    assert bench.owner.verify().ok


def test_a_failed_fsync_is_the_end_and_nothing_is_acknowledged() -> None:
    bench = filled(Bench())
    bench.journal.broken = True
    with pytest.raises(Fatal, match="fsync"):
        bench.submit(submission_of([tasks_of([4])], 1), [tasks_of([4])])
    bench.crash()
    assert bench.counts() == {"ready": 8}


def test_a_draining_broker_gives_and_takes_nothing_and_finishes_what_runs() -> None:
    bench = filled(Bench())
    held = bench.lease(budget=Budget(3, 1 << 20, None))
    assert held is not None
    bench.owner.drain()
    with pytest.raises(Backpressure, match="drain --undo"):
        bench.owner.open_submission(submission_of([tasks_of([4])], 2))
    lease, reason = bench.owner.lease("w", PLENTY, -1)
    assert (lease, "drains" in reason) == (None, True)
    assert bench.owner.renew("w").hold
    assert bench.finish(held).accepted == 3
    assert bench.retire(bench.pull()) == 3
    assert bench.counts() == {"ready": 5, "retired": 3}
    assert bench.owner.status().draining
    bench.owner.drain(undo=True)
    assert bench.lease() is not None
    bench.submit(submission_of([tasks_of([4])], 3), [tasks_of([4])])
    bench.owner.drain()
    bench.crash()
    assert not bench.owner.draining


# -- restarts


def test_after_a_restart_leases_are_in_doubt_until_their_session_is_back(bench: Bench) -> None:
    lease = filled(bench).lease()
    assert lease is not None
    bench.owner.commit()
    ids = ids_of(lease)
    bench.crash()
    assert bench.counts() == {"in_doubt": 8}
    reply = bench.attach("w", held=[*ids[:5], 424242])
    assert reply.accepted == tuple(sorted(ids[:5]))
    assert reply.lost == (424242,)
    assert bench.counts() == {"leased": 5, "ready": 3}
    assert bench.report(ids[:5]).accepted == 5


def test_another_session_cannot_claim_what_is_in_doubt(bench: Bench) -> None:
    lease = filled(bench).lease()
    assert lease is not None
    bench.owner.commit()
    bench.crash()
    assert bench.attach("thief", held=ids_of(lease)).accepted == ()


def test_what_nobody_claims_is_ready_after_the_grace_time(bench: Bench) -> None:
    assert filled(bench).lease() is not None
    bench.owner.commit()
    bench.crash()
    bench.time.seconds += 29
    bench.owner.tick()
    assert bench.counts() == {"in_doubt": 8}
    bench.time.seconds += 2
    bench.owner.tick()
    assert bench.counts() == {"ready": 8}
    bench.attach("x")
    assert bench.lease("x") is not None


def test_a_lease_that_the_crash_forgot_is_claimed_all_the_same(bench: Bench) -> None:
    """Leases wait for no fsync: the log may not know one that a worker holds."""
    lease = filled(bench).lease()
    assert lease is not None
    bench.crash()
    assert bench.counts() == {"ready": 8}
    assert len(bench.attach("w", held=ids_of(lease)).accepted) == 8
    assert bench.lease() is None
    assert bench.finish(lease).accepted == 8


def test_computed_tasks_survive_and_are_pulled_again(bench: Bench) -> None:
    lease = filled(bench).lease()
    assert lease is not None
    bench.finish(lease)
    pulled = bench.pull()
    bench.crash()
    assert bench.pull() == pulled
    assert bench.retire(pulled) == 8
    bench.crash()
    assert bench.pull() == []
    assert bench.retire(pulled) == 0


def test_a_worker_that_attaches_anew_loses_what_it_does_not_name(bench: Bench) -> None:
    lease = filled(bench).lease()
    assert lease is not None
    bench.attach("w", held=ids_of(lease)[:1])
    assert bench.counts() == {"leased": 1, "ready": 7}


# -- audits


def test_lanes_drain_retire_and_open_again_as_the_next_generation(bench: Bench) -> None:
    filled(bench)
    lane = bench.owner.core.state.lanes[0]
    assert lane.step.name == "DRAINING"
    lease = bench.lease()
    assert lease is not None
    bench.finish(lease)
    bench.retire(bench.pull())
    assert lane.step.name == "RETIRED"
    bench.submit(submission_of(BATCHES, 2), BATCHES)
    assert (lane.generation, lane.step.name) == (2, "DRAINING")
    assert bench.owner.verify().ok


def test_verify_sees_a_task_that_changed_its_state_by_itself(bench: Bench) -> None:
    filled(bench)
    assert bench.owner.verify().ok
    bench.owner.core.state.index.state[3] = 4
    report = bench.owner.verify()
    assert not report.ok
    assert any("state" in difference for difference in report.differences)
    with pytest.raises(BalanceBroken, match="leasing has stopped"):
        bench.lease()


def test_verify_sees_a_task_that_its_lane_forgot(bench: Bench) -> None:
    filled(bench)
    order = bench.owner.core.state.lanes[0].order
    order.peek(1)
    order.advance(1)
    assert any("order holds 7" in text for text in bench.owner.verify().differences)


def test_facts_that_cannot_follow_stop_a_broker_from_starting() -> None:
    bench = filled(Bench())
    lease = bench.lease()
    assert lease is not None
    bench.finish(lease)
    frames = list(bench.journal.replay())
    doubled = MemoryJournal(_durable=[*frames, frames[-1]])
    with pytest.raises(Exception, match="cannot follow the facts before it"):
        Bench(journal=doubled)
