"""The server: Arrow Flight in front of the desk. Handlers look at what arrived and hand it over, no more.

Whatever can be checked without the owner is checked here, in parallel and before anything is journaled: who calls
and what that role may do (roles.py), protocol, schema, offsets, vocabulary, CRC32C, types of every field.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow.flight as flight

from fabric_pipelines.broker import fields
from fabric_pipelines.broker.callsocket import CallStream
from fabric_pipelines.broker.desk import Desk, Rank, reason_of
from fabric_pipelines.broker.envelope import Part, as_part
from fabric_pipelines.broker.exporter import Door
from fabric_pipelines.broker.header import read_header, read_opening
from fabric_pipelines.broker.owner import Owner
from fabric_pipelines.broker.promise import (
    bounded,
    require_engine,
    require_name,
    require_proof,
)
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
from fabric_pipelines.broker.settled import PAGE_ROWS, settled_page, settled_sums
from fabric_pipelines.broker.submissions import meant
from fabric_pipelines.broker.tiering import ColdScrub
from fabric_pipelines.broker.transport import Credentials, require_strong_ciphers
from fabric_pipelines.broker.uploads import (
    MALFORMED,
    Chunk,
    Say,
    Upload,
    call_chunks,
    call_words,
    flight_chunks,
    flight_words,
)
from fabric_pipelines.broker.wire import as_flight_error, error_head, message, read_message
from fabric_pipelines.errors import (
    FabricError,
    SchemaError,
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

SCRUB_BYTES = 8 << 20
WAIT_MAX_S = 5.0
SKIPPED_MAX = 1000

Head = Mapping[str, Any]
Reply = tuple[dict[str, Any], tuple[Part, ...]]


LOG = logging.getLogger(__name__)


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
            "settled_sums": self._settled_sums,
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
        except Exception as fault:  # noqa: BLE001 - a caller must hear something, whatever it was
            return error_head(self._untyped(name, fault)), ()
        return {**answer, ACKNOWLEDGED: self._desk.acknowledged}, payload

    def _untyped(self, name: str, fault: Exception) -> FabricError:
        """An error that nobody foresaw, of one request; nothing of it reached the owner, whose own are told elsewhere."""
        LOG.error("request %r failed", name, exc_info=fault)
        typed = reason_of(fault)
        self._door.refusals.note(typed)
        return typed

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

    def _settled_sums(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        begin = fields.count(head, "begin", most=fields.NUMBER_MAX)
        tasks, marks, after = self._desk.ask(
            lambda owner: settled_sums(owner.core.state, begin), Rank.QUESTION
        ).result()
        return {"next": after, "rows": PAGE_ROWS}, (as_part(tasks), as_part(marks))

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
            tenant = who.tenant if who.bound else None
            name = meant(owner.core.state, submission_id, tenant)
            require_own(who, owner, name)
            return owner.abandon_submission(name, tenant)

        return self._ask(abandon, Rank.ENQUEUE)

    def _attach(self, head: Head, parts: list[memoryview], who: Identity) -> Reply:
        name, profile = _session(head, who), _profile(head)
        engine, device = fields.text(head, "engine"), fields.text(head, "device")
        fingerprint, held = fields.text(head, "engine_fingerprint"), _ids(parts[0]).tolist()
        require_engine(engine, fingerprint)
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
        skip = fields.names(head, "skip", most=SKIPPED_MAX)
        until = time.monotonic() + fields.seconds(head, "wait_s", most=WAIT_MAX_S)
        while True:
            batch = self._desk.ask(lambda owner: owner.pull(name, rows, skip), Rank.LEASE).result()
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
        name, some = _session(head, who), _ids(parts[0]) if parts else None
        self._desk.ask(lambda owner: owner.release_pulled(name, some), Rank.QUESTION).result()
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

    # -- uploads

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """One submission: its header is the descriptor's command, then numbered batches. The first answer is
        the submission as it stands, so that a producer can go on where an earlier one stopped."""
        fault = self._take(
            lambda: read_opening(descriptor.command),
            flight_chunks(reader),
            flight_words(writer),
            context,
        )
        if fault is not None:
            raise as_flight_error(fault) from fault

    def upload(self, parts: list[memoryview], stream: CallStream) -> None:
        """The same on the call socket; the header is the request's one part."""
        self._take(
            lambda: read_opening(bytes(parts[0])), call_chunks(stream), call_words(stream), None
        )

    def _take(
        self, opening: Callable[[], Head], chunks: Iterator[Chunk], say: Say, context: Any
    ) -> FabricError | None:
        """What ended it, which was said, too."""
        try:
            head = opening()
            who = self._identity(context, head)
            require_role(who, "submit")
            require_protocol(head)
            self._require_kept(head)
            header = read_header(head, who)

            def look_up(owner: Owner) -> SubmissionState:
                require_own(who, owner, header.submission_id)
                return owner.look_up(header)

            state = self._desk.ask(look_up, Rank.ENQUEUE).result()
            upload = Upload(header, self._desk, self._door.credits, say)
            upload.answer(state)
            if not state.closed:
                upload.take(chunks)
        except (FabricError, *MALFORMED) as found:
            fault = found if isinstance(found, FabricError) else _malformed("upload", found)
            self._door.refusals.note(fault)
            say(error_head(fault))
            return fault
        except Exception as found:  # noqa: BLE001 - as in `answer`
            fault = self._untyped("upload", found)
            say(error_head(fault))
            return fault
        return None


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
