"""Whether a submission is what it says: the fields it was opened with, and the content that was taken of it.

The fingerprint of what was taken is derived, lost with the process, read back if needed.

An upload stream fingerprints its own rows, outside the owner's thread. That counts only while every row of the submission
came in that one stream; of rows that two streams brought, only the journal knows what was taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields

import pyarrow as pa

from fabric_pipelines.errors import SubmissionConflict
from fabric_pipelines.records.submission import Fingerprinter, Submission

SHOWN_MAX = 80  # characters of a value in an error


class Contents:
    __slots__ = ("_running",)

    def __init__(self) -> None:
        self._running: dict[str, Fingerprinter] = {}

    def forget(self, submission_id: str) -> None:
        self._running.pop(submission_id, None)

    def of(self, submission_id: str, rows: int) -> Fingerprinter | None:
        """The content of the `rows` taken so far, for one stream to carry on; None if it is no longer known."""
        if not rows:
            return Fingerprinter()
        running = self._running.get(submission_id)
        if running is None or running.tasks != rows:
            return None
        self._running[submission_id] = running.copy()
        return self._running[submission_id]

    def take(
        self, submission_id: str, before: int, batch: pa.RecordBatch, content: Fingerprinter | None
    ) -> None:
        """`batch` was taken after `before` rows. `content`: as its stream has it, which may be ahead. None: the
        fingerprint is made here."""
        running = self._running.pop(submission_id, None)
        if content is not None:
            if content is running or not before:
                self._running[submission_id] = content
            return
        if running is None and not before:
            running = Fingerprinter()
        if running is not None and running.tasks == before:
            running.update(batch)
            self._running[submission_id] = running

    def prove(self, header: Submission, stored: Iterable[pa.RecordBatch] | None) -> bool:
        """Whether the content of this whole submission was compared with its fingerprint; `stored` gives it again,
        None if it is no longer all there. SubmissionConflict if it is something else."""
        running = self._running.get(header.submission_id)
        if running is not None and _is(running, header):
            return True
        if stored is not None:
            running = Fingerprinter()
            for batch in stored:
                running.update(batch)
            if _is(running, header):
                return True
        if running is None or running.tasks != header.tasks:
            return False
        raise SubmissionConflict(
            f"submission {header.submission_id[:12]} has other content than its fingerprint "
            f"{header.fingerprint[:12]} says: it stays open; submit the right content under another id (set the salt)"
        )


def _is(running: Fingerprinter, header: Submission) -> bool:
    return running.tasks == header.tasks and running.hexdigest() == header.fingerprint


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
