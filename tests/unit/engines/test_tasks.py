"""Leases come apart and completions come together without losing a column or a null."""

from __future__ import annotations

import numpy as np
import pytest

from fabric_pipelines.worker.engines.tasks import (
    Outbox,
    Outcome,
    failed,
    refused,
    tasks_of,
    with_vector,
)
from tests.tiny_models import lease_of

EMBED = {"kind": "embed"}


def test_a_sliced_lease_comes_apart_by_its_own_rows() -> None:
    lease = lease_of([[1], [2, 3], [4, 5, 6]], EMBED)
    sliced = type(lease)(1, "lane", "e", EMBED, 0, 0, lease.tasks.slice(1))
    assert [task.tokens.tolist() for task in tasks_of(sliced)] == [[2, 3], [4, 5, 6]]
    assert [task.task_id for task in tasks_of(sliced)] == [1, 2]


def test_outcomes_of_every_kind_share_one_batch() -> None:
    tasks = tasks_of(lease_of([[1], [2, 3], [4], [5]], EMBED))
    outbox = Outbox("e", "f" * 64)
    outbox.outcomes = [
        Outcome(tasks[0], "ok", "stop", output=np.array([7, 8], np.uint32)),
        with_vector(tasks[1], np.array([0.5, -1.0], np.float32), padded_tokens=3),
        refused(tasks[2], "oversized", "Oversized", "too long"),
        failed(tasks[3], "EngineFailed", "é" * 200),
    ]
    (batch,) = outbox.take()
    assert batch.column("output").to_pylist() == [[7, 8], None, None, None]
    assert batch.column("vector").to_pylist() == [None, [0.5, -1.0], None, None]
    assert batch.column("status").to_pylist() == ["ok", "ok", "refused", "failed"]
    assert batch.column("prompt_tokens").to_pylist() == [1, 2, 1, 1]
    assert batch.column("padded_tokens").to_pylist() == [0, 3, 0, 0]
    assert batch.column("metadata").to_pylist() == [b"m0", b"m1", b"m2", b"m3"]
    assert batch.column("source_row").to_pylist() == [1000, 1001, 1002, 1003]
    assert len(batch.column("error_text")[3].as_py().encode()) == 256
    batch.validate(full=True)
    assert outbox.take() == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65_520.0, -1e9])
def test_a_vector_that_fp16_cannot_hold_fails_its_task_with_the_reason(value: float) -> None:
    (task,) = tasks_of(lease_of([[1]], EMBED))
    outcome = with_vector(task, np.array([1.0, value], np.float32), 0)
    assert (outcome.status, outcome.error_code) == ("failed", "VectorOverflow")
    assert "beyond the 65504" in (outcome.error_text or "")


def test_the_largest_fp16_is_still_a_vector() -> None:
    (task,) = tasks_of(lease_of([[1]], EMBED))
    outcome = with_vector(task, np.array([65_504.0, -65_504.0], np.float32), 0)
    assert outcome.status == "ok"
    assert np.isfinite(outcome.vector).all()
