"""Submissions: whether one that is sent again is the same, what may still be done with it, what its producer is told.

An id stands for every field it was opened with and for the content that these declare. A submission ends closed, with
all that it declared, or abandoned with what had come of it by then: that runs, and the id is used up. Pure questions to
the state.
"""

from __future__ import annotations

import json
from dataclasses import fields

from fabric_pipelines.broker.accounts import STATE_NAMES
from fabric_pipelines.broker.facts import SubmissionClosed
from fabric_pipelines.broker.replies import SubmissionState
from fabric_pipelines.broker.state import State, SubmissionRecord
from fabric_pipelines.errors import SubmissionConflict, UsageError
from fabric_pipelines.ids import SEQUENCE_BITS
from fabric_pipelines.records.submission import Submission

SHOWN_MAX = 80  # characters of a value in an error


def require_same(known: Submission, sent: Submission) -> None:
    """SubmissionConflict that names the first field in which a submission sent again differs from the one that its id
    stands for. All of them count, those that decide nothing here included: whoever reads the labels of a result later
    has to be able to rely on their being those of this submission."""
    if known == sent:
        return
    mine, theirs = (json.loads(header.to_json()) for header in (known, sent))
    for name in (item.name for item in fields(Submission)):
        if mine[name] != theirs[name]:
            raise SubmissionConflict(
                f"submission {known.submission_id[:12]} is known with {name} {_shown(mine[name])}, not "
                f"{_shown(theirs[name])}: send it as it was, or under another id (set the salt)"
            )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."


def require_goes_on(record: SubmissionRecord, sent: Submission) -> None:
    """SubmissionConflict if it is another one, or was abandoned."""
    require_same(record.header, sent)
    if record.abandoned:
        raise SubmissionConflict(
            f"submission {sent.submission_id[:12]} was abandoned with {record.rows} of its {sent.tasks} tasks: send it "
            "under another id (set the salt)"
        )


def abandoned(record: SubmissionRecord) -> list[SubmissionClosed]:
    """Nothing if it is abandoned already; UsageError if it is closed and what it says."""
    name = record.header.submission_id
    if not record.closed:
        return [SubmissionClosed(name, abandoned=True)]
    if not record.abandoned:
        raise UsageError(
            f"submission {name[:12]} is closed with all its {record.rows} tasks: there is nothing to abandon"
        )
    return []


def state_of(state: State, record: SubmissionRecord) -> SubmissionState:
    tasks = state.submission_tasks[1:, record.index].tolist()
    first = record.first_sequence
    header = record.header
    return SubmissionState(
        submission_id=header.submission_id,
        function=header.function,
        engine=header.engine,
        tasks=header.tasks,
        tokens=header.tokens,
        fingerprint=header.fingerprint,
        closed=record.closed,
        enqueued=record.rows,
        **dict(zip(STATE_NAMES, tasks, strict=True)),
        retired_tokens=int(state.retired_tokens[record.index]),
        output_tokens=int(state.output_tokens[record.index]),
        first_task_id=None if first is None else first + (state.incarnation << SEQUENCE_BITS),
        batches=len(record.batches),
        abandoned=record.abandoned,
    )
