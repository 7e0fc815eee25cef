"""Uploads: the batches of one submission as they arrive, by either door, and what is answered.

Whatever can be checked without the owner is checked here, before anything is journaled: schema, offsets, vocabulary,
CRC32C. Three threads share the work, since it is what an upload costs: the stream's own reads and checks, one hashes
behind it, one answers as batches become durable.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as flight

from fabric_pipelines.broker.callsocket import CallStream
from fabric_pipelines.broker.contents import StreamContent
from fabric_pipelines.broker.credits import Credits, require_size
from fabric_pipelines.broker.desk import Desk, Rank
from fabric_pipelines.broker.owner import TaskUpload
from fabric_pipelines.broker.replies import ACKNOWLEDGED, SubmissionState, as_json
from fabric_pipelines.broker.state import BatchColumns
from fabric_pipelines.broker.submissions import goes_past
from fabric_pipelines.broker.wire import error_head
from fabric_pipelines.errors import FabricError, SchemaError, SubmissionConflict, UsageError
from fabric_pipelines.records.arrow import from_ipc
from fabric_pipelines.records.submission import Submission
from fabric_pipelines.records.task import column_checksums, require_task_batch

UPLOADS_AHEAD = 8
MALFORMED = (KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError)

Chunk = tuple[Any, pa.RecordBatch]  # its note, as JSON or read already, and the rows
Say = Callable[[Mapping[str, Any]], None]  # to a producer that may be gone


class Upload:
    """One stream of a submission whose header was accepted."""

    def __init__(self, header: Submission, desk: Desk, credits: Credits, say: Say) -> None:
        self._header, self._desk, self._credits, self._say = header, desk, credits, say

    def answer(self, state: SubmissionState) -> None:
        self._say({**as_json(state), ACKNOWLEDGED: self._desk.acknowledged})

    def take(self, chunks: Iterator[Chunk]) -> None:
        """Read ahead of the acknowledgements, which a second thread sends as they become durable."""
        header = self._header
        answers: queue.Queue[Future[SubmissionState] | None] = queue.Queue(UPLOADS_AHEAD)
        acknowledger = _Acknowledger(answers, self.answer, self._say)
        acknowledger.start()
        try:
            content = self._desk.ask(
                lambda owner: owner.content_of(header.submission_id), Rank.ENQUEUE, durable=False
            ).result()
            with ThreadPoolExecutor(1, "broker-hasher") as hasher:
                for upload in checked(header, chunks, content, hasher):
                    if acknowledger.fault:
                        break
                    answers.put(self._enqueue(upload))
        finally:
            answers.put(None)
            acknowledger.join()
        if acknowledger.fault:
            raise acknowledger.fault
        state = acknowledger.last
        if state is None or state.enqueued < state.tasks:
            return
        closed = self._desk.ask(
            lambda owner: owner.close_submission(header.submission_id), Rank.ENQUEUE
        ).result()
        self.answer(closed)

    def _enqueue(self, upload: TaskUpload) -> Future[SubmissionState]:
        """Its memory is on the tenant's account until it is durable, or refused."""
        size, tenant = upload.batch.get_total_buffer_size(), self._header.tenant
        self._credits.take(tenant, size)
        answer: Future[SubmissionState] = self._desk.ask(
            lambda owner: owner.enqueue(upload), Rank.ENQUEUE
        )
        answer.add_done_callback(lambda _: self._credits.give(tenant, size))
        return answer


class _Acknowledger(threading.Thread):
    """Sends each upload's answer in order; keeps the first error for the reader to find."""

    def __init__(
        self,
        answers: queue.Queue[Future[SubmissionState] | None],
        answer: Callable[[SubmissionState], None],
        say: Say,
    ) -> None:
        super().__init__(name="broker-acknowledger", daemon=True)
        self._answers, self._answer, self._say = answers, answer, say
        self.fault: FabricError | None = None
        self.last: SubmissionState | None = None

    def run(self) -> None:
        while (answer := self._answers.get()) is not None:
            try:
                self.last = answer.result()
                if self.fault is None:
                    self._answer(self.last)
            except FabricError as fault:
                if self.fault is None:
                    self.fault = fault
                    self._say(error_head(fault))


def checked(
    header: Submission, chunks: Iterator[Chunk], content: StreamContent | None, hasher: Executor
) -> Iterator[TaskUpload]:
    """Good batches of one stream; nothing of a bad batch reaches the owner. `content`: of what came before, carried
    on by `hasher`, a thread."""
    for noted, batch in chunks:
        try:
            note = json.loads(noted) if isinstance(noted, bytes) else noted
            first_row, sums = note["first_row"], list(note["crc32c"])
            if any(type(number) is not int for number in (first_row, *sums)):  # 1.0 and true are 1
                raise ValueError("not whole numbers")
        except MALFORMED as fault:
            raise SchemaError(
                'a task batch needs the note {"first_row": n, "crc32c": [6 numbers]} (its app_metadata in Flight)'
            ) from fault
        if first_row < 0:
            raise UsageError(f"a task batch cannot begin at row {first_row}")
        require_size(batch.get_total_buffer_size())
        require_task_batch(batch, vocab_size=header.vocab_size)
        if column_checksums(batch) != sums:
            raise SchemaError(
                f"the task batch at row {first_row} does not match its CRC32C: send it again"
            )
        tokens = int(pc.sum(pc.list_value_length(batch.column("tokens"))).as_py())
        if first_row + batch.num_rows > header.tasks or tokens > header.tokens:
            raise SubmissionConflict(goes_past(header, first_row + batch.num_rows - 1))
        if content is not None and content.tasks == first_row:
            content.update_behind(hasher, batch)
        else:
            content = None
        columns = BatchColumns.of(header, batch)
        if content is not None and content.tasks == header.tasks:
            content.catch_up()  # here: the owner is about to compare it
        yield TaskUpload(header.submission_id, first_row, batch, columns, content, header)


# -- the two doors


def flight_chunks(reader: Any) -> Iterator[Chunk]:
    while True:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return
        except (pa.ArrowException, flight.FlightError, OSError) as fault:
            raise _broken_off(fault) from fault
        yield bytes(chunk.app_metadata or b""), chunk.data


def flight_words(writer: Any) -> Say:
    """A producer that is gone gets no answer and needs none: what it sent is safe, and it can ask again."""

    def say(head: Mapping[str, Any]) -> None:
        try:
            writer.write(json.dumps(head).encode())
        except (flight.FlightError, pa.ArrowException, OSError):
            return

    return say


def call_chunks(stream: CallStream) -> Iterator[Chunk]:
    """Frames `batch`, each with one Arrow IPC stream of one batch, then one `end`."""
    while True:
        try:
            found = stream.read()
            if found is None:
                raise ConnectionResetError("it ended before its end was said")
            head, parts = found
            name = head.pop("do", None)
            if name == "end":
                return
            if name != "batch" or len(parts) != 1:
                raise SchemaError(f"an upload takes batches and an end, not {name!r}")
            batch = from_ipc(parts[0], validate=False)  # that follows, with all else
        except OSError as fault:
            raise _broken_off(fault) from fault
        yield head, batch


def call_words(stream: CallStream) -> Say:
    """As `flight_words`."""

    def say(head: Mapping[str, Any]) -> None:
        try:
            stream.send(head)
        except OSError:
            return

    return say


def _broken_off(fault: BaseException) -> SchemaError:
    said = (str(fault).splitlines() or [type(fault).__name__])[0][:160]
    return SchemaError(f"the upload broke off, or is no Arrow stream ({said}): send the rest again")
