"""Finished work leaves only after it was confirmed."""

from __future__ import annotations

import pyarrow as pa

from fabric_pipelines.worker.outbox import SEND_ROWS_MAX, Outbox


def done(*tasks: int) -> pa.RecordBatch:
    return pa.record_batch({"task_id": pa.array(tasks, pa.int64())})


def test_what_was_sent_and_not_answered_is_sent_again_with_what_came_since() -> None:
    outbox = Outbox()
    outbox.put(done(1, 2), 0.0)
    assert outbox.head()[0].column("task_id").to_pylist() == [1, 2]
    outbox.put(done(3), 1.0)
    batch, spans = outbox.head()
    assert (batch.column("task_id").to_pylist(), spans) == ([1, 2, 3], 2)
    outbox.confirm(spans, 2.0)
    assert (outbox.tasks, outbox.size, outbox.oldest_s) == (0, 0, None)


def test_one_message_is_bounded_and_a_larger_batch_still_goes_alone() -> None:
    outbox = Outbox()
    outbox.put(done(*range(SEND_ROWS_MAX + 1)), 0.0)
    outbox.put(done(-1), 0.0)
    _, spans = outbox.head()
    assert spans == 1
    outbox.confirm(spans, 0.0)
    assert outbox.task_ids() == [-1]


def test_the_share_is_that_of_the_bound_which_fills_first() -> None:
    outbox = Outbox(tasks_max=10, bytes_max=16)
    outbox.put(done(1), 0.0)
    assert outbox.share == 0.5
    outbox.put(done(), 0.0)
    assert outbox.tasks == 1
