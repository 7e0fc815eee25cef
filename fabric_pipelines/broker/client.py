"""The client: the broker's door for producers, workers, completion and questions.

Create it after fork or spawn, never before (gRPC threads do not survive a fork); it is for one thread. It keeps
the highest LSN that was acknowledged to it, and in which life, and presents both with every request, since a
broker that restarts on the same socket is the same connection to gRPC: a journal that lost acknowledged work is
refused. Errors have the type they were raised with on the other side; no broker is BrokerUnavailable. A session's
name outlives the broker: after BrokerUnavailable (NotAttached is one) a worker attaches again with the ids it still holds.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from fabric_pipelines.broker.callsocket import CallConnection, CallStream
from fabric_pipelines.broker.envelope import Part, as_part
from fabric_pipelines.broker.patience import Patience
from fabric_pipelines.broker.pieces import UPLOAD_BYTES, Pieces
from fabric_pipelines.broker.replies import (
    ACKNOWLEDGED,
    PROTOCOL_VERSION,
    AttachReply,
    BrokerInfo,
    BrokerStatus,
    ComputedReply,
    RenewReply,
    RequeueReply,
    ScrubReport,
    SubmissionState,
    VerifyReport,
    attach_reply,
    broker_status,
    reply_of,
    scrub_report,
    verify_report,
)
from fabric_pipelines.broker.submissions import given_up
from fabric_pipelines.broker.transport import (
    Credentials,
    call_path,
    credentials_for,
    require_reachable,
    require_strong_ciphers,
)
from fabric_pipelines.broker.uploading import (
    BROKEN,
    CallUploading,
    FlightUploading,
    Uploading,
)
from fabric_pipelines.broker.wire import (
    from_flight_error,
    message,
    raise_error,
    read_message,
)
from fabric_pipelines.errors import (
    Backpressure,
    BrokerUnavailable,
    FabricError,
    SchemaError,
    SubmissionConflict,
    UsageError,
    VersionRefused,
)
from fabric_pipelines.records.arrow import crc32c, from_ipc, require_schema, to_ipc_pieces
from fabric_pipelines.records.completion import COMPLETION_SCHEMA
from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.records.settled import Settled, Sums
from fabric_pipelines.records.submission import Submission
from fabric_pipelines.records.task import TASK_SCHEMA, column_checksums
from fabric_pipelines.settings import Settings

__all__ = [
    "AttachReply",
    "BrokerClient",
    "BrokerInfo",
    "BrokerStatus",
    "ComputedReply",
    "RenewReply",
    "ScrubReport",
    "SubmissionState",
    "VerifyReport",
]

UPLOADS_OUTSTANDING = 4
REASON_CHARACTERS = 256  # what a log keeps of one
SLOW_CALL_S = 600.0
# gRPC backs off for up to two minutes after failures, and shares that state between channels of a process.
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # An upload waits for answers without a limit; a machine that vanished must end it. Servers take a ping each five
    # minutes, and pyarrow offers no way to have them take more.
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    (
        "grpc.http2.ping_timeout_ms",
        20_000,
    ),  # this one counts where both are known, and is a minute by itself
]

# a list, a numpy or an Arrow array; pyarrow has no types, which makes any union with it no type either
TaskIds: TypeAlias = Any


class BrokerClient:
    def __init__(
        self,
        endpoint: str,
        *,
        role: str,
        session: str | None = None,
        timeout_s: float = 10,
        credentials: Credentials | None = None,
        place: str = "",
    ) -> None:
        """`role` is declared on this machine; off it the certificate of `credentials` decides. place: what this process
        holds alone (a locked device); when it attaches, the session that held the place before is over."""
        self.endpoint = require_reachable(endpoint, credentials)
        self._credentials = credentials
        self.role = role
        self.session = session or f"{role}-{uuid.uuid4().hex[:12]}"
        self.timeout_s = timeout_s
        self._place = place
        self.hold_reason = ""
        self.piece_bytes = UPLOAD_BYTES  # of an upload, at most
        self._client: flight.FlightClient | None = None
        self._pid = 0  # of the process that opened the connection
        self._calls: CallConnection | None = None
        self._call_path = call_path(self.endpoint)
        self._lease_call = 0
        self._acknowledged: list[Any] | None = None  # [journal id, LSN, life]
        self._opening: dict[str, Any] = {}  # how the upload under way began
        self._enqueued = 0  # rows of the submission under way that were answered for

    @classmethod
    def of(
        cls,
        settings: Settings,
        *,
        role: str,
        session: str | None = None,
        timeout_s: float = 10,
        place: str = "",
    ) -> BrokerClient:
        """To the broker that settings name, with their credentials where it is on another machine."""
        endpoint = settings.broker_endpoint
        made = cls(
            endpoint,
            role=role,
            session=session,
            timeout_s=timeout_s,
            credentials=credentials_for(endpoint, settings),
            place=place,
        )
        # a piece is one frame, which no segment of this home could hold if it were larger
        made.piece_bytes = min(UPLOAD_BYTES, settings.segment_bytes // 4)
        return made

    def __enter__(self) -> BrokerClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection. The session stays as it is: see `detach`."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._calls is not None:
            self._calls.close()
            self._calls = None

    # -- anyone

    def hello(self) -> BrokerInfo:
        """Who answers. Raises CorruptionFound if its journal holds less than what was acknowledged here."""
        head, _ = self._call("hello", {})
        if head.get("protocol") != PROTOCOL_VERSION:
            raise VersionRefused(
                f"the broker at {self.endpoint} speaks protocol {head.get('protocol')}, this client "
                f"{PROTOCOL_VERSION}: install the same fabric-pipelines on both sides"
            )
        return reply_of(BrokerInfo, head)

    def status(self) -> BrokerStatus:
        return broker_status(self._call("status", {})[0])

    def verify(self) -> VerifyReport:
        """The broker rebuilds its state from the log alone and compares; it serves nobody meanwhile."""
        return verify_report(self._call("verify", {}, timeout_s=SLOW_CALL_S)[0])

    def scrub(self) -> ScrubReport:
        """Read every sealed segment again and compare it with its CRCs; others are served meanwhile."""
        return scrub_report(self._call("scrub", {}, timeout_s=SLOW_CALL_S)[0])

    def drain(self, *, undo: bool = False) -> None:
        """Take and lease no tasks from now on, until the broker restarts or `undo`; what is leased is finished and
        landed."""
        self._call("drain", {"undo": undo})

    def states(self, task_ids: TaskIds) -> list[str]:
        """State of each task by name; "unknown" if it is not of the broker's journal."""
        return list(self._call("states", {}, ids_part(task_ids))[0]["states"])

    def settled(self) -> Settled:
        """Every task that is retired or dead, page by page: what the database must have landed."""
        pages: list[Settled] = []
        begin: int | None = 0
        while begin is not None:
            page, begin = self._settled_page(begin)
            pages.append(page)
        return Settled.joined(pages)

    def settled_page(self, begin: int) -> Settled:
        """Those of the page that begins at sequence number `begin`."""
        return self._settled_page(begin)[0]

    def settled_sums(self) -> Sums:
        """All pages in short: what of them is as it was need not be asked for."""
        tasks, marks = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
        begin: int | None = 0
        while begin is not None:
            head, parts = self._call("settled_sums", {"begin": begin})
            tasks.append(np.frombuffer(parts[0], np.int64))
            marks.append(np.frombuffer(parts[1], np.uint64))
            begin = head["next"]
        return Sums(int(head["rows"]), np.concatenate(tasks), np.concatenate(marks))

    def _settled_page(self, begin: int) -> tuple[Settled, int | None]:
        head, runs = self._call("settled", {"begin": begin})
        firsts, ends, owners = (np.frombuffer(run, np.int64) for run in runs)
        named = {int(at): (pair[0], pair[1]) for at, pair in head["submissions"].items()}
        return Settled(firsts, ends, owners, named), head["next"]

    def requeue(self, task_ids: TaskIds, *, reason: str) -> RequeueReply:
        """Dead tasks are ready again, under their ids and without their attempts. Durable on return; what is not dead
        any more is counted and left alone."""
        return reply_of(
            RequeueReply, self._call("requeue", {"reason": reason}, ids_part(task_ids))[0]
        )

    # -- producer

    def submit(
        self,
        submission: Submission,
        batches: Iterable[pa.RecordBatch],
        *,
        patience: Patience | None = None,
    ) -> SubmissionState:
        """Returns once every batch is durable and the submission closed. Idempotent: after any error call it
        again with the same content, cut as you like; rows that arrived before are not sent again. With
        `patience` a broker that is full, gone since it answered, or started again by a keeper, is waited for, and the
        upload goes on at the row it has got to. An error that leaves accepted rows behind, which run, says how many
        (`accepted_tasks`).

        Raises SubmissionConflict (same id, other content), SchemaError (nothing of that batch was taken),
        Backpressure (the broker is full for now), StorageFailed (its disk is), BrokerUnavailable.
        """
        pieces = Pieces(batches, self.piece_bytes)
        self._enqueued = 0
        while True:
            try:
                return self._submit(submission, pieces, patience)
            except (Backpressure, BrokerUnavailable) as fault:
                if patience is None:
                    raise self._with_account(fault, submission) from fault.__cause__
                try:
                    patience.wait(fault, answered=self._acknowledged is not None)
                except FabricError as last:
                    raise self._with_account(last, submission) from fault
            except SubmissionConflict:
                raise  # what is there is somebody else's
            except FabricError as fault:
                raise self._with_account(fault, submission) from fault.__cause__

    def _with_account(self, fault: FabricError, submission: Submission) -> FabricError:
        """`fault`, which tells what the broker has of the submission all the same, and will run."""
        accepted, least = self._enqueued, True
        if not isinstance(fault, BrokerUnavailable):
            try:
                state = self.submission(submission.submission_id)
            except FabricError:
                state = None  # what was answered before stands
            if state is not None and state.fingerprint == submission.fingerprint:
                accepted, least = state.enqueued, False
        if accepted:
            fault.leave(submission.submission_id, accepted, submission.tasks, at_least=least)
        return fault

    def _submit(
        self, submission: Submission, pieces: Pieces, patience: Patience | None
    ) -> SubmissionState:
        head = {**json.loads(submission.to_json()), **self._presented()}
        self._opening = head
        try:
            stream = self._uploading(json.dumps(head).encode())
            try:
                state = self._upload(stream, pieces, patience)
                if not state.closed:
                    stream.done()
                    while not state.closed and (more := self._read_answer(stream)) is not None:
                        state = more
            finally:
                stream.close()
        except BROKEN as fault:
            raise self._fault(fault) from fault
        if not state.closed:
            head, _ = self._call("close", {"submission_id": submission.submission_id})
            state = reply_of(SubmissionState, head)
        if state.abandoned:
            raise SubmissionConflict(given_up(state.submission_id, state.enqueued, state.tasks))
        return state

    def _uploading(self, command: bytes) -> Uploading:
        if self._call_path is None:
            return FlightUploading(self._flight(), command)
        self._require_same_process()
        return CallUploading(CallStream.opened(self._call_path, self.endpoint, command))

    def _upload(
        self, stream: Uploading, pieces: Pieces, patience: Patience | None
    ) -> SubmissionState:
        state = self._require_answer(stream)
        if state.closed:
            return state
        outstanding = 0
        for first_row, batch in pieces.from_row(state.enqueued):
            require_schema(batch, TASK_SCHEMA, "task batch")
            note = {"first_row": first_row, "crc32c": column_checksums(batch)}
            try:
                stream.send(batch, note)
            except BROKEN:
                # the other side gave up: its reason is among the answers
                while outstanding:
                    state = self._require_answer(stream)
                    outstanding -= 1
                self._read_answer(stream)
                raise
            outstanding += 1
            if outstanding == UPLOADS_OUTSTANDING:
                state = self._require_answer(stream)
                outstanding -= 1
                pieces.forget_below(state.enqueued)
                if patience is not None:
                    patience.progressed()
        for _ in range(outstanding):
            state = self._require_answer(stream)
        return state

    def abandon(self, submission_id: str) -> SubmissionState:
        """End a submission with what came of it, which runs; its id is used up. Durable on return. UsageError if the
        broker does not know it, or it is whole and closed."""
        return reply_of(SubmissionState, self._call("abandon", {"submission_id": submission_id})[0])

    def submission(
        self, submission_id: str, *, patience: Patience | None = None
    ) -> SubmissionState | None:
        """With `patience` a broker that is away is waited for, as `submit` does."""
        while True:
            try:
                state = self._call("submission", {"submission_id": submission_id})[0]["state"]
                return None if state is None else reply_of(SubmissionState, state)
            except BrokerUnavailable as fault:
                if patience is None:
                    raise
                patience.wait(fault, answered=self._acknowledged is not None)

    def wait(
        self,
        submission_id: str,
        *,
        timeout_s: float | None = None,
        on_progress: Callable[[SubmissionState], None] | None = None,
        patience: Patience | None = None,
    ) -> SubmissionState:
        """Until every task is retired or dead; after `timeout_s` the state as it is (see `finished`). A broker
        that is away meanwhile is waited for: with `patience` as `submit` does, else for the client's own timeout.
        BrokerUnavailable when it is still away after either, or after `timeout_s`."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        away = Patience(self.timeout_s) if patience is None else patience
        pause_s = 0.02
        while True:
            try:
                state = self.submission(submission_id)
            except BrokerUnavailable as fault:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise
                answered = patience is None or self._acknowledged is not None
                away.wait(fault, answered=answered, most_s=left_s)
                continue
            away.progressed()
            if state is None:
                raise SubmissionConflict(
                    f"submission {submission_id[:12]} is not known to the broker at {self.endpoint}"
                )
            if on_progress is not None:
                on_progress(state)
            left_s = until - time.monotonic()
            if state.finished or left_s <= 0:
                return state
            pause_s = min(pause_s * 1.5, 0.5)
            time.sleep(min(pause_s, left_s))

    # -- consumer

    def attach(
        self,
        *,
        engine: str,
        engine_fingerprint: str,
        device: str,
        profile: Profile,
        held: Sequence[int] = (),
    ) -> AttachReply:
        """Begin, or go on after the broker restarted. `held` is all that this session still works on: what
        it does not name comes back, what the reply does not accept is lost to it."""
        head: dict[str, Any] = {
            "engine": engine,
            "engine_fingerprint": engine_fingerprint,
            "device": device,
            "profile": profile.as_json(),
            **({"place": self._place} if self._place else {}),
        }
        self._lease_call = head["call"] = max(self._lease_call + 1, time.time_ns())
        reply, _ = self._call("attach", head, ids_part(held))
        self._lease_call += 1
        return attach_reply(reply)

    def lease(
        self, *, sequences: int, tokens: int, kv_tokens: int | None, synced: bool = False
    ) -> Lease | None:
        """Up to so much of one lane; None when nothing is ready, or on hold (`hold_reason` says why). A call
        that failed may be repeated: a lease whose answer was lost comes again, not a second one. A lease need
        not be durable, since a restart asks who holds what; with `synced` it is."""
        head: dict[str, Any] = {
            "sequences": sequences,
            "tokens": tokens,
            "kv_tokens": kv_tokens,
            "call": self._lease_call,
        }
        if synced:
            head["synced"] = True
        reply, parts = self._call("lease", head)
        self._lease_call += 1
        self.hold_reason = reply["hold"]
        return Lease.from_batch(_checked(reply, parts[0])) if parts else None

    def renew(self) -> RenewReply:
        return reply_of(RenewReply, self._call("renew", {})[0])

    def computed(self, batch: pa.RecordBatch) -> ComputedReply:
        """Durable on return. Send again what was not answered: duplicates are counted and change nothing."""
        require_schema(batch, COMPLETION_SCHEMA, "completion batch")
        ipc = to_ipc_pieces(batch)
        return reply_of(ComputedReply, self._call("computed", {"crc32c": ipc.crc32c()}, ipc)[0])

    def nack(self, task_ids: TaskIds, *, reason: str, attempted: bool = False) -> int:
        """Give tasks back. `attempted`: they had started when the engine failed; like a lease that ran out, it
        counts as an attempt for a task that was alone, and brings the others back in halves."""
        head = {"reason": reason[:REASON_CHARACTERS], "attempted": attempted}
        return int(self._call("nack", head, ids_part(task_ids))[0]["count"])

    def detach(self) -> None:
        """The session is over: what it leased or pulled is there for others at once."""
        self._call("detach", {})

    # -- completion

    def pull_computed(
        self, *, rows: int, wait_s: float = 0, skip: Sequence[str] = ()
    ) -> pa.RecordBatch | None:
        """PULLED_SCHEMA, oldest first, at most `rows`; a row comes once per session until `release_pulled`. Rows of the
        functions in `skip` stay where they are, and come first once they are not named any more."""
        head = {"rows": rows, "wait_s": wait_s}
        reply, parts = self._call("pull", {**head, "skip": list(skip)} if skip else head)
        return _checked(reply, parts[0]) if parts else None

    def retire(self, task_ids: TaskIds, confirmation: Confirmation) -> int:
        """How many were newly retired; only after the sink made them durable."""
        return self._settle(task_ids, confirmation, dead=False)

    def dead(self, task_ids: TaskIds, confirmation: Confirmation, *, requeues: Any = None) -> int:
        """How many were newly buried; only after their dead letters are durable. `requeues`: that column as it was
        pulled (left out: zeros), so that nothing is buried for what it was before somebody requeued it."""
        more = () if requeues is None else (as_part(np.asarray(requeues, np.uint8)),)
        return self._settle(task_ids, confirmation, *more, dead=True)

    def release_pulled(self, task_ids: TaskIds | None = None) -> None:
        """This session may be handed once more what it pulled: everything, or these tasks."""
        self._call("release", {}, *(() if task_ids is None else (ids_part(task_ids),)))

    def _settle(
        self, task_ids: TaskIds, confirmation: Confirmation, *more: Part, dead: bool
    ) -> int:
        head = {"dead": dead, "kind": confirmation.kind, "proof": dict(confirmation.proof)}
        return int(self._call("settle", head, ids_part(task_ids), *more)[0]["count"])

    # -- transport

    def _call(
        self, name: str, head: dict[str, Any], *parts: Part, timeout_s: float | None = None
    ) -> tuple[dict[str, Any], list[memoryview]]:
        asked = {**head, "session": self.session, **self._presented()}
        limit_s = timeout_s or self.timeout_s
        ask = self._call_local if self._call_path is not None else self._call_flight
        reply, payload = ask(name, asked, parts, limit_s)
        raise_error(reply)
        return self._note(reply, asked), payload

    def _call_local(
        self, name: str, head: dict[str, Any], parts: Sequence[Part], timeout_s: float
    ) -> tuple[dict[str, Any], list[memoryview]]:
        assert self._call_path is not None
        self._require_same_process()
        if self._calls is None:
            self._calls = CallConnection(self._call_path, self.endpoint, timeout_s)
        try:
            return self._calls.call(name, head, parts, timeout_s)
        except (
            BaseException
        ):  # Ctrl-C too: an answer that nobody took would be that of the next call
            self.close()
            raise

    def _call_flight(
        self, name: str, head: dict[str, Any], parts: Sequence[Part], timeout_s: float
    ) -> tuple[dict[str, Any], list[memoryview]]:
        options = flight.FlightCallOptions(timeout=timeout_s)
        action = flight.Action(name, message(head, *parts))
        try:
            answers = list(self._flight().do_action(action, options))
        except (flight.FlightError, pa.ArrowException, OSError) as fault:
            raise self._fault(fault) from fault
        return read_message(answers[0].body)

    def _require_same_process(self) -> None:
        """A connection that came through a fork is two processes' at once: their words mix, and gRPC hangs."""
        pid = os.getpid()
        if self._pid not in (0, pid):
            raise UsageError(
                f"this broker client was opened in process {self._pid} and is used in {pid}: make a client after the "
                "fork, in the process that uses it"
            )
        self._pid = pid

    def _presented(self) -> dict[str, Any]:
        """What every request says beside its own: protocol, role, and what was acknowledged so far."""
        said = {"protocol": PROTOCOL_VERSION, "role": self.role}
        return said if self._acknowledged is None else {**said, ACKNOWLEDGED: self._acknowledged}

    def _note(self, reply: dict[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
        """Take what an answer says of durability out of it, and remember the highest. Another life's word counts
        only if that life was shown what is remembered: else a loss between the two would never show."""
        told = reply.pop(ACKNOWLEDGED, None)
        mine = self._acknowledged
        if told is None:
            return reply
        if mine is None or mine[0] != told[0]:
            newer = True
        elif mine[2:] == told[2:]:
            newer = mine[1] < told[1]
        else:
            newer = asked.get(ACKNOWLEDGED) == mine
        if newer:
            self._acknowledged = told
        return reply

    def _flight(self) -> flight.FlightClient:
        self._require_same_process()
        if self._client is None:
            require_strong_ciphers()
            # what gRPC logs of a handshake that failed is said in one sentence by `handshake`
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")
            secrets: dict[str, Any] = {}
            if (mine := self._credentials) is not None:
                secrets = {
                    "tls_root_certs": mine.ca,
                    "cert_chain": mine.chain,
                    "private_key": mine.key,
                }
            self._client = flight.FlightClient(
                self.endpoint, generic_options=CHANNEL_OPTIONS, **secrets
            )
        return self._client

    def _read_answer(self, stream: Uploading) -> SubmissionState | None:
        head = stream.answer()
        if head is None:
            return None
        raise_error(head)
        state = reply_of(SubmissionState, self._note(head, self._opening))
        self._enqueued = state.enqueued
        return state

    def _require_answer(self, stream: Uploading) -> SubmissionState:
        state = self._read_answer(stream)
        if state is None:
            raise BrokerUnavailable(
                f"the broker at {self.endpoint} ended the upload without an answer"
            )
        return state

    def _fault(self, fault: Exception) -> FabricError:
        """The typed error; a connection that failed is dropped, so that the next call makes a new one."""
        typed = from_flight_error(fault, self.endpoint, self._credentials)
        if isinstance(typed, BrokerUnavailable):
            self.close()
        return typed


def ids_part(task_ids: TaskIds) -> memoryview:
    """Task ids from a list, a numpy or an Arrow array, as bytes."""
    if isinstance(task_ids, pa.Array):
        task_ids = task_ids.to_numpy(zero_copy_only=False)
    elif isinstance(task_ids, pa.ChunkedArray):
        task_ids = task_ids.to_numpy()
    return as_part(np.asarray(task_ids, np.int64))


def _checked(reply: dict[str, Any], part: memoryview) -> pa.RecordBatch:
    if crc32c(part) != reply["crc32c"]:
        raise SchemaError("a batch from the broker does not match its CRC32C: ask again")
    return from_ipc(part)
