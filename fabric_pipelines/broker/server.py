"""The server: Arrow Flight in front of the desk. Handlers look at what arrived and hand it over, no more.

Whatever can be checked without the owner is checked here, in parallel and before anything is journaled: who calls
and what that role may do (roles.py), protocol, schema, offsets, vocabulary, CRC32C, types of every field.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as flight

from fabric_pipelines.broker import fields
from fabric_pipelines.broker.credits import require_size
from fabric_pipelines.broker.desk import Desk, Rank
from fabric_pipelines.broker.envelope import Part, as_part
from fabric_pipelines.broker.exporter import Door
from fabric_pipelines.broker.header import read_header, read_opening
from fabric_pipelines.broker.owner import Owner, TaskUpload
from fabric_pipelines.broker.promise import bounded, require_name, require_proof
from fabric_pipelines.broker.replies import (
    ACKNOWLEDGED,
    PROTOCOL_VERSION,
    SubmissionState,
    as_json,
)
from fabric_pipelines.broker.roles import (
    Identity,
    certified,
    declared,
    require_role,
    require_tenant,
)
from fabric_pipelines.broker.settled import settled_page
from fabric_pipelines.broker.state import BatchColumns
from fabric_pipelines.broker.submissions import goes_past
from fabric_pipelines.broker.tiering import ColdScrub
from fabric_pipelines.broker.transport import Credentials, require_strong_ciphers
from fabric_pipelines.broker.wire import as_flight_error, error_head, message, read_message
from fabric_pipelines.errors import (
    FabricError,
    SchemaError,
    SubmissionConflict,
    UsageError,
    VersionRefused,
)
from fabric_pipelines.ids import canonical_json
from fabric_pipelines.records.arrow import (
    crc32c,
    from_ipc,
    require_schema,
    to_ipc_part,
    to_ipc_pieces,
)
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.completion import COMPLETION_SCHEMA
from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.records.submission import Fingerprinter, Submission
from fabric_pipelines.records.task import column_checksums, require_task_batch

UPLOADS_AHEAD = 8
SCRUB_BYTES = 8 << 20
WAIT_MAX_S = 5.0
MALFORMED = (KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError)

Head = Mapping[str, Any]
Reply = tuple[dict[str, Any], tuple[Part, ...]]


class BrokerServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow ships no types
    def __init__(
        self,
        endpoint: str,
        desk: Desk,
        credentials: Credentials | None = None,
        door: Door | None = None,
    ) -> None:
        """With `credentials` a server of mutual TLS, which believes certificates only. Several may share a desk
        and a door."""
        require_strong_ciphers()  # also of a plain one: gRPC reads the list once in a process
        self._desk = desk
        self._door = Door() if door is None else door
        self._secured = credentials is not None
        self._actions: dict[str, Callable[[Head, list[memoryview], Identity], Reply]] = {
            "hello": self._hello,
            "submission": self._submission,
            "status": self._status,
            "verify": self._verify,
            "scrub": self._scrub,
            "close": self._close,
            "abandon": self._abandon,
            "attach": self._attach,
            "lease": self._lease,
            "renew": self._renew,
            "computed": self._computed,
            "nack": self._nack,
            "detach": self._detach,
            "pull": self._pull,
            "release": self._release,
            "settle": self._settle,
            "drain": self._drain,
            "states": self._states,
            "requeue": self._requeue,
            "settled": self._settled,
        }
        if credentials is None:
            super().__init__(endpoint)
        else:
            super().__init__(
                endpoint,
                tls_certificates=[(credentials.chain, credentials.key)],
                verify_client=True,
                root_certificates=credentials.ca,
            )

    def _identity(self, context: Any, head: Head) -> Identity:
        """`context` is that of a Flight call; there is no other way in from another machine."""
        return certified(context.peer_identity()) if self._secured else declared(head.get("role"))

    # -- DoAction

    def do_action(self, context: Any, action: flight.Action) -> Iterator[flight.Result]:
        try:
            head, parts = read_message(action.body)
        except FabricError as fault:
            self._door.refusals.note(fault)
            return iter([flight.Result(message(error_head(fault)))])
        answer, payload = self.answer(action.type, head, parts, context)
        return iter([flight.Result(message(answer, *payload))])

    def answer(
        self, name: str, head: Head, parts: list[memoryview], context: Any = None
    ) -> tuple[dict[str, Any], tuple[Part, ...]]:
        """One request, however it came; an error is an answer too."""
        try:
            answer, payload = self._dispatch(name, head, parts, self._identity(context, head))
        except FabricError as fault:
            self._door.refusals.note(fault)
            return error_head(fault), ()
        return {**answer, ACKNOWLEDGED: self._desk.acknowledged}, payload

    def _dispatch(self, name: str, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        act = self._actions.get(name)
        if act is None:
            raise UsageError(f"the broker knows no operation {name!r}")
        require_role(who, name)
        require_protocol(head)
        try:
            self._require_kept(head)
            canonical_json(head)  # what has no canonical form cannot become a fact
            return act(head, parts, who)
        except MALFORMED as fault:
            raise _malformed(name, fault) from fault

    def _require_kept(self, head: Head) -> None:
        if (told := head.get(ACKNOWLEDGED)) is not None:
            journal_id, lsn, *life = told  # two values from a client of before there were lives
            if type(lsn) is not int or not all(isinstance(one, str) for one in (journal_id, *life)):
                raise UsageError(
                    f"{ACKNOWLEDGED} is {fields.shown(told)}; it must be [text, number, text]"
                )
            self._desk.require_kept(journal_id, lsn, *life)

    def _hello(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        return self._ask(lambda owner: owner.info(), Rank.QUESTION)

    def _status(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        """A tenant sees its own lanes, and no session of anybody."""
        if who.bound:
            return self._ask(lambda owner: owner.status_of(who.tenant), Rank.QUESTION)
        return self._ask(lambda owner: owner.status(), Rank.QUESTION)

    def _verify(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        """Cold segments are read here, so that the store keeps nobody waiting; the rebuild keeps everybody waiting."""
        cold = self._read_cold()
        return self._ask(lambda owner: owner.verify(cold), Rank.QUESTION)

    def _scrub(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        """A whole round, in slices, so that others are served in between."""
        while not self._desk.ask(
            lambda owner: owner.scrub(SCRUB_BYTES), Rank.QUESTION, durable=False
        ).result():
            pass
        found = self._read_cold()
        self._desk.ask(lambda owner: owner.cold_scrubbed(found), Rank.QUESTION).result()
        return self._ask(lambda owner: owner.scrub_report(), Rank.QUESTION)

    def _read_cold(self) -> list[ColdScrub]:
        """In the caller's own thread."""
        calls = self._desk.ask(lambda owner: owner.cold_scrub(), Rank.QUESTION).result()
        return [call() for call in calls]

    def _drain(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        undo = fields.flag(head, "undo", default=False)
        self._desk.ask(lambda owner: owner.drain(undo=undo), Rank.QUESTION).result()
        return {}, ()

    def _states(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        ids = _ids(parts[0])
        found = self._desk.ask(lambda owner: owner.states(ids), Rank.QUESTION).result()
        return {"states": found}, ()

    def _settled(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        begin = fields.count(head, "begin", most=fields.NUMBER_MAX)
        page, after = self._desk.ask(
            lambda owner: settled_page(owner.core.state, begin), Rank.QUESTION
        ).result()
        named = {str(at): list(pair) for at, pair in page.submissions.items()}
        runs = (as_part(page.firsts), as_part(page.ends), as_part(page.owners))
        return {"next": after, "submissions": named}, runs

    def _requeue(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        ids, reason = _ids(parts[0]), fields.text(head, "reason", least=0)
        return self._ask(lambda owner: owner.requeue(ids, reason), Rank.ENQUEUE)

    def _submission(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        submission_id = fields.text(head, "submission_id")

        def find(owner: Owner) -> SubmissionState | None:
            require_own(who, owner, submission_id)
            return owner.submission(submission_id)

        found = self._desk.ask(find, Rank.QUESTION).result()
        return {"state": None if found is None else as_json(found)}, ()

    def _close(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        submission_id = fields.text(head, "submission_id")

        def close(owner: Owner) -> SubmissionState:
            require_own(who, owner, submission_id)
            return owner.close_submission(submission_id)

        return self._ask(close, Rank.ENQUEUE)

    def _abandon(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        submission_id = fields.text(head, "submission_id")

        def abandon(owner: Owner) -> SubmissionState:
            require_own(who, owner, submission_id)
            return owner.abandon_submission(submission_id, who.tenant if who.bound else None)

        return self._ask(abandon, Rank.ENQUEUE)

    def _attach(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        name, profile = _session(head, who), _profile(head)
        engine, device = fields.text(head, "engine"), fields.text(head, "device")
        fingerprint, held = fields.text(head, "engine_fingerprint"), _ids(parts[0]).tolist()
        call = fields.count(head, "call", most=fields.NUMBER_MAX)
        tenant = who.tenant if who.bound else None
        place = who.session(fields.text(head, "place")) if head.get("place") else ""
        return self._ask(
            lambda owner: owner.attach(
                name, engine, fingerprint, device, profile, held, call, tenant, place
            ),
            Rank.ACKNOWLEDGE,
        )

    def _lease(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        name = _session(head, who)
        call = fields.count(head, "call", most=fields.NUMBER_MAX)
        kv = None if head["kv_tokens"] is None else fields.count(head, "kv_tokens")
        budget = Budget(fields.count(head, "sequences"), fields.count(head, "tokens"), kv)
        synced = fields.flag(head, "synced", default=False)
        lease, hold = self._desk.ask(
            lambda owner: owner.lease(name, budget, call), Rank.LEASE, durable=synced
        ).result()
        if lease is None:
            return {"hold": hold}, ()
        ipc = to_ipc_pieces(lease.to_batch())
        return {"hold": hold, "crc32c": ipc.crc32c()}, (ipc,)

    def _renew(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        name = _session(head, who)
        reply = self._desk.ask(
            lambda owner: owner.renew(name), Rank.ACKNOWLEDGE, durable=False
        ).result()
        return as_json(reply), ()

    def _computed(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        name, ipc = _session(head, who), parts[0]
        if crc32c(ipc) != fields.count(head, "crc32c"):
            raise SchemaError("completion batch does not match its CRC32C: send it again")
        batch = from_ipc(ipc)
        require_schema(batch, COMPLETION_SCHEMA, "completion batch")
        for field in COMPLETION_SCHEMA:
            if not field.nullable and batch.column(field.name).null_count:
                raise SchemaError(f"completion batch has nulls in {field.name!r}")
        kept = bounded(batch)
        if kept is not batch:
            batch, ipc = kept, to_ipc_part(kept)
        return self._ask(lambda owner: owner.computed(name, batch, ipc), Rank.ACKNOWLEDGE)

    def _nack(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        name, ids = _session(head, who), _ids(parts[0])
        reason = fields.text(head, "reason", least=0, most=fields.TEXT_MAX)
        attempted = fields.flag(head, "attempted", default=False)
        count = self._desk.ask(
            lambda owner: owner.nack(name, ids, reason, attempted), Rank.ACKNOWLEDGE
        ).result()
        return {"count": count}, ()

    def _detach(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        name = _session(head, who)
        self._desk.ask(lambda owner: owner.detach(name), Rank.ACKNOWLEDGE).result()
        return {}, ()

    def _pull(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        name, rows = _session(head, who), fields.count(head, "rows", least=1)
        until = time.monotonic() + fields.seconds(head, "wait_s", most=WAIT_MAX_S)
        while True:
            batch = self._desk.ask(lambda owner: owner.pull(name, rows), Rank.LEASE).result()
            left = until - time.monotonic()
            if batch is not None or left <= 0:
                break
            with self._desk.news:
                self._desk.news.wait(min(left, 0.25))
        if batch is None:
            return {}, ()
        ipc = to_ipc_pieces(batch)
        return {"crc32c": ipc.crc32c()}, (ipc,)

    def _release(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        name = _session(head, who)
        self._desk.ask(lambda owner: owner.release_pulled(name), Rank.QUESTION).result()
        return {}, ()

    def _settle(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        ids, dead = _ids(parts[0]), fields.flag(head, "dead")
        confirmation = Confirmation(fields.text(head, "kind"), fields.mapping(head, "proof"))
        require_proof(confirmation.proof)
        requeues = np.frombuffer(parts[1], np.uint8) if len(parts) > 1 else None
        if requeues is not None and len(requeues) != len(ids):
            raise UsageError(f"{len(ids)} task ids came with {len(requeues)} requeue counts")
        count = self._desk.ask(
            lambda owner: owner.settle(ids, confirmation, dead=dead, requeues=requeues),
            Rank.ACKNOWLEDGE,
        ).result()
        return {"count": count}, ()

    def _ask(self, act: Callable[[Any], Any], rank: Rank) -> Reply:
        return as_json(self._desk.ask(act, rank).result()), ()

    # -- DoPut

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """One submission: its header is the descriptor's command, then numbered batches. The first answer is
        the submission as it stands, so that a producer can go on where an earlier one stopped."""
        try:
            head = read_opening(descriptor.command)
            who = self._identity(context, head)
            require_role(who, "submit")
            require_protocol(head)
            self._require_kept(head)
            header = read_header(head, who)

            def look_up(owner: Owner) -> SubmissionState:
                require_own(who, owner, header.submission_id)
                return owner.look_up(header)

            state = self._desk.ask(look_up, Rank.ENQUEUE).result()
            self._answer(writer, state)
            if not state.closed:
                self._receive(header, reader, writer)
        except (FabricError, *MALFORMED) as found:
            fault = found if isinstance(found, FabricError) else _malformed("upload", found)
            self._door.refusals.note(fault)
            _send(writer, error_head(fault))
            raise as_flight_error(fault) from fault

    def _receive(self, header: Submission, reader: Any, writer: Any) -> None:
        """Read ahead of the acknowledgements, which a second thread sends as they become durable."""
        answers: queue.Queue[Future[SubmissionState] | None] = queue.Queue(UPLOADS_AHEAD)
        acknowledger = _Acknowledger(answers, writer, self._answer)
        acknowledger.start()
        try:
            content = self._desk.ask(
                lambda owner: owner.content_of(header.submission_id), Rank.ENQUEUE, durable=False
            ).result()
            for upload in _uploads(header, reader, content):
                if acknowledger.fault:
                    break
                answers.put(self._enqueue(upload, header.tenant))
        finally:
            answers.put(None)
            acknowledger.join()
        if acknowledger.fault:
            raise acknowledger.fault
        state = acknowledger.last
        if state is None or state.enqueued < state.tasks:
            return
        submission_id = header.submission_id
        closed = self._desk.ask(
            lambda owner: owner.close_submission(submission_id), Rank.ENQUEUE
        ).result()
        self._answer(writer, closed)

    def _enqueue(self, upload: TaskUpload, tenant: str) -> Future[SubmissionState]:
        """Its memory is on the tenant's account until it is durable, or refused."""
        size = upload.batch.get_total_buffer_size()
        self._door.credits.take(tenant, size)
        answer = self._desk.ask(_enqueue(upload), Rank.ENQUEUE)
        answer.add_done_callback(lambda _: self._door.credits.give(tenant, size))
        return answer

    def _answer(self, writer: Any, state: SubmissionState) -> None:
        _send(writer, {**as_json(state), ACKNOWLEDGED: self._desk.acknowledged})


class _Acknowledger(threading.Thread):
    """Sends each upload's answer in order; keeps the first error for the reader to find."""

    def __init__(
        self,
        answers: queue.Queue[Future[SubmissionState] | None],
        writer: Any,
        answer: Callable[[Any, SubmissionState], None],
    ) -> None:
        super().__init__(name="broker-acknowledger", daemon=True)
        self._answers, self._writer, self._answer = answers, writer, answer
        self.fault: FabricError | None = None
        self.last: SubmissionState | None = None

    def run(self) -> None:
        while (answer := self._answers.get()) is not None:
            try:
                self.last = answer.result()
                if self.fault is None:
                    self._answer(self._writer, self.last)
            except FabricError as fault:
                if self.fault is None:
                    self.fault = fault
                    _send(self._writer, error_head(fault))


def _enqueue(upload: TaskUpload) -> Callable[[Any], SubmissionState]:
    def act(owner: Any) -> SubmissionState:
        state: SubmissionState = owner.enqueue(upload)
        return state

    return act


def _uploads(
    header: Submission, reader: Any, content: Fingerprinter | None
) -> Iterator[TaskUpload]:
    """Checked batches of one stream; nothing of a bad batch reaches the owner. `content`: of what came before."""
    while True:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return
        except (pa.ArrowException, flight.FlightError, OSError) as fault:
            raise SchemaError(
                f"the upload broke off, or is no Arrow stream ({str(fault).splitlines()[0][:160]}): send the rest "
                "again"
            ) from fault
        try:
            note = json.loads(bytes(chunk.app_metadata or b""))
            first_row, sums = note["first_row"], list(note["crc32c"])
            if any(type(number) is not int for number in (first_row, *sums)):  # 1.0 and true are 1
                raise ValueError("not whole numbers")
        except MALFORMED as fault:
            raise SchemaError(
                'a task batch needs app_metadata {"first_row": n, "crc32c": [6 numbers]}'
            ) from fault
        if first_row < 0:
            raise UsageError(f"a task batch cannot begin at row {first_row}")
        batch = chunk.data
        require_size(batch.get_total_buffer_size())
        require_task_batch(batch, vocab_size=header.vocab_size)
        if column_checksums(batch) != sums:
            raise SchemaError(
                f"the task batch at row {first_row} does not match its CRC32C: send it again"
            )
        tokens = int(pc.sum(pc.list_value_length(batch.column("tokens"))).as_py())
        if first_row + batch.num_rows > header.tasks or tokens > header.tokens:
            raise SubmissionConflict(goes_past(header, first_row + batch.num_rows - 1))
        columns = BatchColumns.of(header, batch)
        if content is not None and content.tasks == first_row:
            content.update(batch)
        else:
            content = None
        yield TaskUpload(header.submission_id, first_row, batch, columns, content, header)


def _send(writer: Any, head: Head) -> None:
    """A producer that is gone gets no answer and needs none: what it sent is safe, and it can ask again."""
    try:
        writer.write(json.dumps(head).encode())
    except (flight.FlightError, pa.ArrowException, OSError):
        return


def require_own(who: Identity, owner: Owner, submission_id: str) -> None:
    """WrongTenant if that submission is known and another tenant's."""
    if who.bound and (tenant := owner.tenant_of(submission_id)) is not None:
        require_tenant(who, tenant, f"submission {submission_id[:12]}")


def require_protocol(head: Head) -> None:
    spoken = head.get("protocol")
    if type(spoken) is not int or spoken != PROTOCOL_VERSION:  # to `==` true and 1.0 are 1
        raise VersionRefused(
            f"the request speaks protocol {fields.shown(spoken)}, this broker {PROTOCOL_VERSION}: install the same "
            f'fabric-pipelines on both sides, or say "protocol": {PROTOCOL_VERSION} in a client of your own'
        )


def _session(head: Head, who: Identity) -> str:
    name = who.session(fields.text(head, "session"))
    require_name(name)
    return name


def _malformed(name: str, fault: Exception) -> UsageError:
    return UsageError(f"request {name!r} is malformed: {type(fault).__name__} {str(fault)[:200]}")


def _profile(head: Head) -> Profile:
    given = fields.mapping(head, "profile")
    for name in given:
        fields.count(given, name)
    return Profile(**given)


def _ids(part: memoryview) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.frombuffer(part, np.int64)
