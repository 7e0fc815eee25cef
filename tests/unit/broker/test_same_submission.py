"""A submission sent again is the same in every field, or refused by the name of the one that is not."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from fabric_pipelines.broker.owner import TaskUpload
from fabric_pipelines.broker.state import BatchColumns
from fabric_pipelines.errors import SubmissionConflict
from fabric_pipelines.records.submission import Submission
from tests.support_broker import GENERATE, Bench, submission_of, tasks_of

BATCHES = [tasks_of([10] * 3), tasks_of([20] * 5, seed=1)]
HEADER = replace(submission_of(BATCHES), labels={"corpus": "demo", "kept": "for ever"})
OTHERS: dict[str, Any] = {
    "function": "answers",
    "engine": "other@engine",
    "sampling": GENERATE | {"seed": 7},
    "vocab_size": 2000,
    "tasks": 9,
    "tokens": 999,
    "fingerprint": "ab" * 32,
    "tenant": "acme",
    "labels": {"corpus": "demo", "kept": "for a day"},
}


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.owner.open_submission(HEADER)
    made.upload(HEADER, 0, BATCHES[0])
    made.owner.commit()
    return made


def test_every_field_of_a_submission_is_tried() -> None:
    assert {item.name for item in fields(Submission)} == {"submission_id", *OTHERS}


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_the_same_id_with_another_field_is_refused_by_its_name_and_nothing_is_written(
    bench: Bench, name: str, crashed: bool
) -> None:
    if crashed:
        bench.crash()
    other, before = replace(HEADER, **{name: OTHERS[name]}), bench.journal.next_lsn
    upload = TaskUpload(
        other.submission_id, 3, BATCHES[1], BatchColumns.of(HEADER, BATCHES[1]), header=other
    )
    for ask in (
        lambda: bench.owner.open_submission(other),
        lambda: bench.owner.look_up(other),
        lambda: bench.owner.enqueue(upload),  # of a stream that began when the id was not known yet
    ):
        with pytest.raises(SubmissionConflict, match=f"known with {name} .*set the salt"):
            ask()
    assert bench.journal.next_lsn == before
    assert bench.counts() == {"ready": 3}
    assert bench.owner.look_up(HEADER).enqueued == 3


def test_labels_left_out_are_other_labels(bench: Bench) -> None:
    with pytest.raises(SubmissionConflict, match="labels"):
        bench.owner.look_up(replace(HEADER, labels={}))


def test_a_long_value_is_cut_in_the_message(bench: Bench) -> None:
    with pytest.raises(SubmissionConflict) as caught:
        bench.owner.look_up(replace(HEADER, labels={"text": "x" * 100_000}))
    assert len(str(caught.value)) < 400
