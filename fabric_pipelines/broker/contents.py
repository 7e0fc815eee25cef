"""Whether a submission's content is what its fingerprint says: derived, lost with the process, read back if needed.

The batch that would make a submission whole and other than declared is refused before it is journaled, so that what was
taken so far stays open for the right one. Only where that cannot be known then, since earlier rows are no longer all
there, does it come out at the close or not at all.

An upload stream fingerprints its own rows, outside the owner's thread and behind its own. That counts only while every row of the submission
came in that one stream; of rows that two streams brought, only the journal knows what was taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future

import pyarrow as pa

from fabric_pipelines.errors import SubmissionConflict
from fabric_pipelines.records.submission import Fingerprinter, Submission

ABANDON = "fabric broker abandon"


BATCHES_BEHIND = (
    4  # of an upload, each a few MiB at most: what waits to be hashed is held in memory
)


class StreamContent(Fingerprinter):
    """The content of a stream, hashed behind it: `tasks` and `tokens` are those of every batch it was given, what needs
    the hash waits for it. Its stream and the owner may use it at the same time.

    Hashing is half of what an upload costs before the owner has it, and lets other threads run."""

    __slots__ = ("_behind", "_turn")

    def __init__(self, begun: Fingerprinter | None = None) -> None:
        super().__init__(begun)
        self._behind: deque[Future[None]] = deque()
        self._turn = threading.Lock()

    def update_behind(self, thread: Executor, batch: pa.RecordBatch) -> None:
        """`thread` runs one at a time, in order. Waits while BATCHES_BEHIND are to be hashed."""
        with self._turn:
            if len(self._behind) == BATCHES_BEHIND:
                self._behind.popleft().result()
            self.count(batch)
            self._behind.append(thread.submit(self.hash, batch))

    def update(self, batch: pa.RecordBatch) -> None:
        with self._turn:
            self._catch_up()
            super().update(batch)

    def copy(self) -> Fingerprinter:
        with self._turn:
            self._catch_up()
            return super().copy()

    def hexdigest(self) -> str:
        with self._turn:
            self._catch_up()
            return super().hexdigest()

    def catch_up(self) -> None:
        """Wait until every batch is hashed."""
        with self._turn:
            self._catch_up()

    def _catch_up(self) -> None:
        while self._behind:
            self._behind.popleft().result()


class Contents:
    __slots__ = ("_running",)

    def __init__(self) -> None:
        self._running: dict[str, Fingerprinter] = {}

    def forget(self, submission_id: str) -> None:
        self._running.pop(submission_id, None)

    def of(self, submission_id: str, rows: int) -> StreamContent | None:
        """The content of the `rows` taken so far, for one stream to carry on; None if it is no longer known."""
        if not rows:
            return StreamContent()
        running = self._running.get(submission_id)
        if running is None or running.tasks != rows:
            return None
        carried = StreamContent(running.copy())
        self._running[submission_id] = carried
        return carried

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

    def proven(
        self,
        header: Submission,
        before: int,
        tokens: int,
        batch: pa.RecordBatch,
        content: Fingerprinter | None,
        stored: Callable[[], Iterable[pa.RecordBatch] | None],
    ) -> Fingerprinter | None:
        """The content with `batch`, which comes after `before` rows and is the last, and makes it `tokens` in all; None
        if nobody can know it. SubmissionConflict if it is something else. Arguments as for `take` and `prove`."""
        name, running = header.submission_id, self._running.get(header.submission_id)
        if content is None or (before and content is not running):
            whole = self._before(running, before, stored)
            if whole is not None:
                whole.update(batch)
        else:
            whole = content
        if tokens != header.tokens:
            what = f"{tokens} tokens, not the {header.tokens} that it declared"
        elif whole is None or _is(whole, header):
            if whole is not None:
                self._running[name] = whole
            return whole
        else:
            what = f"other content than its fingerprint {header.fingerprint[:12]} says"
        remedy = (
            f"with its last rows, from {before} on: they were not taken; send the right ones, or, should the fault lie "
            f"before them or in the header, all of it under another id (set the salt), and `{ABANDON} {name}`"
            if before
            else "and nothing of it was taken: send it with the right header"
        )
        raise SubmissionConflict(f"submission {name[:12]} would have {what}, {remedy}")

    @staticmethod
    def _before(
        running: Fingerprinter | None,
        before: int,
        stored: Callable[[], Iterable[pa.RecordBatch] | None],
    ) -> Fingerprinter | None:
        """The content of the `before` rows that were taken, to be carried on."""
        if not before:
            return Fingerprinter()
        if running is not None and running.tasks == before:
            return running.copy()
        batches = stored()
        if batches is None:
            return None
        found = Fingerprinter()
        for batch in batches:
            found.update(batch)
        return found

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
            f"{header.fingerprint[:12]} says: it stays open; submit the right content under another id (set the salt), "
            f"and `{ABANDON} {header.submission_id}`"
        )


def _is(running: Fingerprinter, header: Submission) -> bool:
    return running.tasks == header.tasks and running.hexdigest() == header.fingerprint
