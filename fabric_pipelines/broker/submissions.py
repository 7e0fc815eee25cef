"""Submissions: whether one that is sent again is the same, what may still be done with it, what its producer is told.

An id stands for every field it was opened with and for the content that these declare. A submission ends closed, with
all that it declared, or abandoned with what had come of it by then: that runs, and the id is used up. Pure questions to
the state.
"""

from __future__ import annotations

import json
from dataclasses import fields

from fabric_pipelines.broker.accounts import STATE_NAMES
from fabric_pipelines.broker.contents import ABANDON
from fabric_pipelines.broker.facts import SubmissionClosed
from fabric_pipelines.broker.replies import SubmissionState
from fabric_pipelines.broker.state import State, SubmissionRecord
from fabric_pipelines.errors import SubmissionConflict, UsageError
from fabric_pipelines.ids import SEQUENCE_BITS
from fabric_pipelines.records.submission import Submission

SHOWN_DIGITS = 12  # of an id in a sentence
LISTED_MAX = 10
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
    require_kept_up(record)


def require_kept_up(record: SubmissionRecord) -> None:
    """SubmissionConflict if somebody abandoned it: who still sends it, or closes it, would take it for whole."""
    if record.abandoned:
        raise SubmissionConflict(
            given_up(record.header.submission_id, record.rows, record.header.tasks)
        )


def given_up(submission_id: str, rows: int, tasks: int) -> str:
    """Why nothing more comes of an abandoned submission, and what to do."""
    return (
        f"submission {submission_id[:12]} was abandoned with {rows} of its {tasks} tasks: send it under another id "
        "(set the salt)"
    )


def goes_past(header: Submission, row: int) -> str:
    """Why a batch with `row` as its last is not of the submission that its header declared, and what to do."""
    name = header.submission_id
    return (
        f"submission {name[:12]} declared {header.tasks} tasks and {header.tokens} tokens; row {row} goes past that: "
        f"send it with the right header under another id (set the salt), and end this one with `{ABANDON} {name}` if "
        "some of it was taken"
    )


def meant(state: State, given: str, tenant: str | None = None) -> str:
    """The whole id of the one submission (of that tenant) whose id begins so, as sentences show it; `given` where there
    is none. UsageError if there are several."""
    if given in state.by_submission or len(given) < SHOWN_DIGITS:
        return given
    found = [
        one
        for one, record in state.by_submission.items()
        if one.startswith(given) and tenant in (None, record.header.tenant)
    ]
    if len(found) > 1:
        raise UsageError(f"{len(found)} submissions begin with {given}: give all 64 digits")
    return found[0] if found else given


def abandoned(
    state: State, submission_id: str, tenant: str | None = None
) -> list[SubmissionClosed]:
    """Nothing if it is abandoned already; UsageError if it is closed and what it says, or not known: then those that
    could be meant are named, as far as they are that tenant's."""
    name, record = submission_id, state.by_submission.get(submission_id)
    if record is None:
        raise UsageError(
            f"no submission {name[:12]} is known to this broker: {_open_ones(state, tenant)}"
        )
    if not record.closed:
        return [SubmissionClosed(name, abandoned=True)]
    if not record.abandoned:
        raise UsageError(
            f"submission {name[:12]} is closed with all its {record.rows} tasks: there is nothing to abandon"
        )
    return []


def _open_ones(state: State, tenant: str | None) -> str:
    headers = [record.header for record in state.submissions if not record.closed]
    found = [one.submission_id for one in headers if tenant in (None, one.tenant)]
    if not found:
        return "none is open, so there is nothing to abandon"
    more = f" and {len(found) - LISTED_MAX} more" if len(found) > LISTED_MAX else ""
    return f"give all 64 digits of one that is open: {', '.join(found[-LISTED_MAX:])}{more}"


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
