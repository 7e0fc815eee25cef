"""What has been fingerprinted of submissions that are still open: derived, lost with the process, read back if needed.

An upload stream fingerprints its own rows, outside the owner's thread. That counts only while every row of the submission
came in that one stream; of rows that two streams brought, only the journal knows what was taken.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from fabric_pipelines.errors import SubmissionConflict
from fabric_pipelines.records.submission import Fingerprinter, Submission


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
