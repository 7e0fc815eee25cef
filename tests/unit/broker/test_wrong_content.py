"""Content that is not what was declared: the batch that would make it so is refused, and there is a way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fabric_pipelines.broker import snapshot
from fabric_pipelines.broker.facts import SubmissionClosed
from fabric_pipelines.broker.owner import TaskUpload
from fabric_pipelines.broker.state import BatchColumns
from fabric_pipelines.broker.submissions import meant
from fabric_pipelines.errors import SubmissionConflict, UsageError
from fabric_pipelines.records.submission import Fingerprinter, Submission
from tests.support_broker import Bench, submission_of, tasks_of

BATCHES = [tasks_of([10] * 3), tasks_of([20] * 5, seed=1)]
HEADER = submission_of(BATCHES)
OTHER = tasks_of([20] * 5, seed=99)
LONGER = tasks_of([21] * 5, seed=99)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def begun(bench: Bench, header: Submission = HEADER) -> Bench:
    """The first batch is here."""
    bench.owner.open_submission(header)
    bench.upload(header, 0, BATCHES[0])
    bench.owner.commit()
    return bench


def streamed(bench: Bench, header: Submission, first_row: int, batch: Any) -> None:
    """As the server sends it: with the header, and the content fingerprinted by the stream."""
    content = bench.owner.content_of(header.submission_id)
    if content is not None:
        content.update(batch)
    columns = BatchColumns.of(header, batch)
    upload = TaskUpload(header.submission_id, first_row, batch, columns, content, header)
    bench.owner.enqueue(upload)


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wrong", [OTHER, LONGER], ids=["other tokens", "more tokens"])
def test_last_rows_that_are_not_as_declared_are_refused_and_the_right_ones_complete_it(
    bench: Bench, crashed: bool, stream: bool, wrong: Any
) -> None:
    header = HEADER if wrong is OTHER else replace(HEADER, tokens=HEADER.tokens + 5)
    begun(bench, header)
    if crashed:
        bench.crash()
    before = bench.journal.next_lsn
    send = streamed if stream else lambda b, h, at, rows: b.upload(h, at, rows)
    with pytest.raises(SubmissionConflict, match=r"not taken; send the right ones.*abandon 0{64}"):
        send(bench, header, 3, wrong)
    assert bench.journal.next_lsn == before
    assert bench.counts() == {"ready": 3}
    if header is HEADER:
        send(bench, header, 3, BATCHES[1])
        assert bench.owner.close_submission(header.submission_id).closed
        assert bench.counts() == {"ready": 8}
        bench.crash()
        assert bench.owner.verify().differences == []


@pytest.mark.parametrize(
    "wrong",
    [{"fingerprint": "ab" * 32}, {"tokens": HEADER.tokens + 1}],
    ids=["fingerprint", "tokens"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_header_of_one_batch_leaves_nothing_behind(
    bench: Bench, wrong: dict[str, Any], stream: bool
) -> None:
    whole = tasks_of([10] * 8)
    header = replace(submission_of([whole]), **({"tokens": 81} if "tokens" in wrong else wrong))
    before = bench.journal.next_lsn
    content = Fingerprinter() if stream else None
    if content is not None:
        content.update(whole)
    columns = BatchColumns.of(header, whole)
    upload = TaskUpload(header.submission_id, 0, whole, columns, content, header)
    with pytest.raises(SubmissionConflict, match="nothing of it was taken"):
        bench.owner.enqueue(upload)
    assert bench.journal.next_lsn == before
    assert bench.owner.submission(header.submission_id) is None
    right = submission_of([whole])
    assert bench.submit(right, [whole]).closed, "its id is free for the right header"


def test_a_submission_with_a_wrong_fingerprint_can_be_abandoned_and_what_came_of_it_runs(
    bench: Bench,
) -> None:
    header = replace(HEADER, fingerprint="ab" * 32)
    begun(bench, header)
    with pytest.raises(SubmissionConflict, match="fingerprint ababababab"):
        bench.upload(header, 3, BATCHES[1])
    state = bench.owner.abandon_submission(header.submission_id)
    assert (state.closed, state.abandoned, state.enqueued, state.tasks) == (True, True, 3, 8)
    assert not state.finished
    before = bench.journal.next_lsn
    assert bench.owner.abandon_submission(header.submission_id) == state
    assert bench.journal.next_lsn == before
    assert {lane.step.name for lane in bench.owner.core.state.lanes} == {"DRAINING"}
    bench.owner.commit()
    bench.crash()
    bench.attach()
    lease = bench.lease()
    assert lease is not None
    bench.finish(lease)
    bench.retire(bench.pull())
    found = bench.owner.submission(header.submission_id)
    assert found is not None
    assert (found.finished, found.retired, found.abandoned) == (True, 3, True)
    assert {lane.step.name for lane in bench.owner.core.state.lanes} == {"RETIRED"}
    assert bench.owner.verify().differences == []
    assert bench.owner.core.counters["abandoned"] == 0, "it was in an earlier life"


ASKS: dict[str, Callable[[Bench], object]] = {
    "open": lambda bench: bench.owner.open_submission(HEADER),
    "look up": lambda bench: bench.owner.look_up(HEADER),
    "upload": lambda bench: streamed(bench, HEADER, 3, BATCHES[1]),
    "upload of what came before": lambda bench: bench.upload(HEADER, 0, BATCHES[0]),
    "close": lambda bench: bench.owner.close_submission(HEADER.submission_id),
}


@pytest.mark.parametrize("ask", ASKS)
def test_the_id_of_an_abandoned_submission_is_used_up(bench: Bench, ask: str) -> None:
    begun(bench).owner.abandon_submission(HEADER.submission_id)
    assert bench.owner.core.counters["abandoned"] == 1
    before = bench.journal.next_lsn
    with pytest.raises(SubmissionConflict, match=r"abandoned with 3 of its 8 tasks.*salt"):
        ASKS[ask](bench)
    assert bench.journal.next_lsn == before


def test_a_checkpoint_knows_what_was_abandoned(bench: Bench) -> None:
    begun(bench).owner.abandon_submission(HEADER.submission_id)
    state = bench.owner.core.state
    again = snapshot.restore(snapshot.take(state))
    assert again.by_submission[HEADER.submission_id].abandoned
    assert state.differences(again) == []


def test_only_what_is_open_can_be_abandoned(bench: Bench) -> None:
    with pytest.raises(UsageError, match="is known to this broker: none is open"):
        bench.owner.abandon_submission(HEADER.submission_id)
    bench.submit(HEADER, BATCHES)
    with pytest.raises(UsageError, match="closed with all its 8 tasks"):
        bench.owner.abandon_submission(HEADER.submission_id)


def test_who_abandons_what_is_not_known_is_told_what_is_open_and_his(bench: Bench) -> None:
    for mark, tenant in ((1, "acme"), (2, "other"), (3, "acme")):
        begun(bench, submission_of(BATCHES, mark, tenant=tenant))
    bench.owner.abandon_submission(f"{3:064x}")
    with pytest.raises(UsageError, match=rf"64 digits of one that is open: {1:064x}, {2:064x}$"):
        bench.owner.abandon_submission("1")
    with pytest.raises(UsageError, match=rf"that is open: {1:064x}$"):
        bench.owner.abandon_submission("1", "acme")


def test_the_digits_that_a_sentence_shows_are_enough_to_name_it(bench: Bench) -> None:
    state, mine, other = bench.owner.core.state, "ab" * 32, "ab" * 6 + "cd" * 26
    begun(bench, replace(submission_of(BATCHES, 1, tenant="acme"), submission_id=mine))
    assert meant(state, mine[:12]) == mine
    assert meant(state, mine[:12], "acme") == mine
    assert meant(state, mine[:12], "other") == mine[:12], "not told of another tenant's"
    assert meant(state, mine[:11]) == mine[:11]
    begun(bench, replace(submission_of(BATCHES, 2, tenant="acme"), submission_id=other))
    with pytest.raises(
        UsageError, match="2 submissions begin with abababababab: give all 64 digits"
    ):
        meant(state, mine[:12])
    assert meant(state, mine) == mine


def test_rows_past_what_the_header_declares_name_the_way_out(bench: Bench) -> None:
    begun(bench, header := replace(HEADER, tasks=5, tokens=1000))
    with pytest.raises(SubmissionConflict, match=r"row 7 goes past that: .*salt.*abandon 0{64}"):
        bench.upload(header, 3, BATCHES[1])


def test_a_closed_fact_from_before_there_was_abandoning_reads_as_it_was() -> None:
    assert b"abandoned" not in b"".join(map(bytes, SubmissionClosed("a" * 64).encode()))
