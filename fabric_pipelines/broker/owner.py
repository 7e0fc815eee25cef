"""The owner: the one hand that decides, journals and applies. Everything here runs in a single thread.

Each operation asks the core, appends the facts and applies them; its answer may leave only once `commit`
returned (leases and questions excepted: a lease that a crash forgets is claimed again at reattach). A disk that
is full refuses new tasks and nothing else; any other failure of the journal is the end of the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import fabric_pipelines
from fabric_pipelines.broker.checkpoint import Checkpoints
from fabric_pipelines.broker.contents import StreamContent
from fabric_pipelines.broker.core import Core, Limits, Session
from fabric_pipelines.broker.envelope import Part
from fabric_pipelines.broker.facts import (
    Computed,
    Enqueued,
    Fact,
    Moved,
    MovedComputed,
    Requeued,
    Started,
    SubmissionClosed,
    SubmissionOpened,
    kind_of,
    rows_of,
)
from fabric_pipelines.broker.frames import in_frames
from fabric_pipelines.broker.gather import is_plain
from fabric_pipelines.broker.lives import require_kept
from fabric_pipelines.broker.overview import (
    consumer_row,
    lane_row,
    progress_of,
    tenant_status,
)
from fabric_pipelines.broker.payloads import Payloads
from fabric_pipelines.broker.quota import Quota, held_bytes
from fabric_pipelines.broker.reach import Reach
from fabric_pipelines.broker.recovery import Log, restore
from fabric_pipelines.broker.replies import (
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
    unopened,
)
from fabric_pipelines.broker.scrubbing import Scrubbing
from fabric_pipelines.broker.state import BatchColumns, SubmissionRecord
from fabric_pipelines.broker.statefiles import StateFiles
from fabric_pipelines.broker.tiering import ColdScrub, Tiering, Water
from fabric_pipelines.broker.upkeep import Background, Rhythm, Upkeep, Words, at_once
from fabric_pipelines.broker.verification import verify
from fabric_pipelines.clock import SYSTEM_CLOCK, Clock, ForwardWall
from fabric_pipelines.errors import (
    Backpressure,
    BalanceBroken,
    ColdLost,
    CorruptionFound,
    FabricError,
    HomeGone,
    NotFetched,
    StorageFailed,
    UsageError,
)
from fabric_pipelines.journal import Journal
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.records.submission import Fingerprinter, Submission
from fabric_pipelines.telemetry import TokenRate

GROUP_BYTES = 8 << 20
FRAME_MARGIN_BYTES = 4096  # heads, schema and padding of a submission's first two frames
AUDIT_EVERY_S = 10.0
RATE_EVERY_S = 1.0
LOOK_EVERY_S = 0.25  # at the disk
ENDS = (StorageFailed, HomeGone)


@dataclass(frozen=True, slots=True)
class TaskUpload:
    """A checked batch on its way in; `columns` were computed outside the owner's thread. With `header` it opens
    its submission, should that not be known yet."""

    submission_id: str
    first_row: int
    batch: pa.RecordBatch
    columns: BatchColumns
    content: Fingerprinter | None = None  # of the submission up to and with this batch
    header: Submission | None = None


class Fatal(Exception):
    """The journal failed: nothing may be acknowledged any more. `__cause__` says why."""


class Owner:
    def __init__(
        self,
        journal: Log,
        limits: Limits,
        *,
        journal_high_water: int = 8 << 30,
        tenant_high_water: int = 0,
        clock: Clock = SYSTEM_CLOCK,
        checkpoints: Checkpoints | None = None,
        checkpoint_bytes: int = 256 << 20,
        background: Background = at_once,
        water: Water | None = None,
        cold_background: Background = at_once,
    ) -> None:
        """Newest checkpoint, then the tail of the journal. Whatever was leased in an earlier life is in doubt
        from here on. Without `checkpoints` the log is replayed whole and no space in it is ever freed."""
        self.journal, self.clock, self.limits = journal, clock, limits
        self.journal_high_water = journal_high_water
        self._wall = ForwardWall(clock)
        self._checkpoints = checkpoints
        self.restored = restored = restore(journal, checkpoints)
        state = restored.state
        life = journal.life
        self.core = Core(state, limits, now_s=clock.monotonic_s())
        self.core.room.of(journal)
        self._looked_s = clock.monotonic_s()
        self.payloads = Payloads(journal, state)
        self.withheld = self.payloads.withheld
        self.reach = Reach(self.core, self.payloads, Words(self._log, self.commit), journal)
        self.quota = Quota(tenant_high_water, self._held_by_tenant)
        self.upkeep: Upkeep | None = None
        self.scrubbing: Scrubbing | None = None
        self._rate = TokenRate(0)
        self.tiering: Tiering | None = None
        self.fsyncs = 0
        self._group_bytes = 0
        self._audit_s = clock.monotonic_s()
        if checkpoints is not None:
            assert isinstance(journal, Journal), "checkpoints lie beside a journal on disk"
            self.upkeep = Upkeep(
                journal,
                self.core,
                self.payloads,
                checkpoints,
                restored,
                Words(self._log, self.commit),
                rhythm=Rhythm(checkpoint_bytes, journal_high_water),
                clock=clock,
                background=background,
            )
            self.scrubbing = Scrubbing(journal, self.core, clock)
            self.scrubbing.look_at_files = StateFiles(journal, checkpoints, self.upkeep).look
            self.reach.join(journal, self.scrubbing, self.upkeep)
            if journal.cold.store is not None:
                self.tiering = Tiering(
                    journal,
                    self.core,
                    self.payloads,
                    self._log,
                    self.commit,
                    water=water or Water(),
                    clock=clock,
                    background=cold_background,
                )
                self.tiering.scrubbing = self.scrubbing
                self.reach.tiering = self.tiering
                self.reach.look_ahead()
                self.upkeep.join(self.tiering)
        if life.opens > 1:
            self._log(
                [Started(fabric_pipelines.__version__, life.opens, life.opened_us, life.after)]
            )
            self.commit()

    # -- journal

    @property
    def dirty(self) -> bool:
        """Facts were appended that are not durable yet."""
        return self._group_bytes > 0

    @property
    def _unsynced(self) -> bool:
        """Facts were handed to the kernel that are not durable yet."""
        return self.journal.durable_lsn < self.journal.next_lsn - 1

    def commit(self) -> None:
        """Everything that was logged is durable on return."""
        self.write()
        self.sync()

    def write(self) -> None:
        """First half of `commit`: close the group. Nothing of it may be acknowledged before `sync`."""
        if not self.dirty:
            return
        try:
            self.journal.write()
        except ENDS as fault:
            raise Fatal(str(fault)) from fault
        self._group_bytes = 0

    def sync(self) -> None:
        """Second half of `commit`, for all that was written before this call. The one thing here that another
        thread may do, while the owner goes on."""
        if not self._unsynced:
            return
        try:
            self.journal.sync()
        except ENDS as fault:
            raise Fatal(str(fault)) from fault
        self.fsyncs += 1

    def idle(self) -> None:
        """Nothing is waiting: make the last leases durable, and record that they are."""
        self.commit()
        try:
            self.journal.mark_durable()
        except ENDS as fault:
            raise Fatal(str(fault)) from fault

    def _log(
        self,
        facts: list[Fact],
        columns: BatchColumns | None = None,
        batch: pa.RecordBatch | None = None,
    ) -> None:
        """`columns` and `batch` are what is known already of the one fact that carries rows."""
        for fact in facts:
            pieces = fact.encode()
            size = sum(map(len, pieces)) + 128
            if self.dirty and self._group_bytes + size > GROUP_BYTES:
                self.commit()
            lsn = self._append(fact, pieces)
            if self.upkeep is not None and isinstance(fact, Enqueued):
                self.upkeep.disk_full = False
            self._group_bytes += size
            if self.upkeep is not None:
                self.upkeep.grew(size)
            try:
                self.core.apply(fact, lsn, columns)
            except BalanceBroken as broken:
                raise Fatal(str(broken)) from broken
            if isinstance(fact, Enqueued | Computed | Moved | MovedComputed):
                self.payloads.keep(lsn, fact.ipc, batch)

    def _append(self, fact: Fact, pieces: list[Any]) -> int:
        """New tasks, copies and words about what is over may be refused for want of space: they are still where they
        came from. What was promised its space is not; a broker that cannot write that down must not go on."""
        keep = self.core.room.keeps(fact)
        arguments: dict[str, Any] = {
            "rows": rows_of(fact),
            "time_us": self._wall.us(),
            "essential": keep is None,
            "keep": keep,
        }
        kind = int(kind_of(fact))
        try:
            try:
                return self.journal.append(kind, pieces, **arguments)
            except UsageError:
                if not self.dirty:
                    raise  # does not fit a segment even alone: the caller's batch is too large
                self.commit()
                return self.journal.append(kind, pieces, **arguments)
        except ENDS as fault:
            if keep is None or not self._is_full():
                raise Fatal(str(fault)) from fault
            if isinstance(fact, Computed | Requeued | SubmissionClosed):
                raise Backpressure(
                    f"{fault}; this waits until results have landed", retry_after_s=2.0
                ) from fault
            if isinstance(fact, Enqueued | SubmissionOpened):
                self.core.room.require_end(sum(map(len, pieces)))
            raise

    def _is_full(self) -> bool:
        """Whether that is all: the journal works, and refused for want of space."""
        try:
            self.journal.commit()
        except ENDS:
            return False
        self._group_bytes = 0
        if self.upkeep is not None:
            self.upkeep.disk_full = True
        return True

    # -- anyone

    def info(self) -> BrokerInfo:
        journal = self.journal
        return BrokerInfo(
            protocol=PROTOCOL_VERSION,
            version=fabric_pipelines.__version__,
            journal_id=journal.journal_id,
            incarnation=journal.incarnation,
            durable_lsn=journal.durable_lsn,
            lease_ms=round(self.limits.lease_s * 1000),
            pid=os.getpid(),
        )

    def require_kept(self, journal_id: str, lsn: int, life: str = "") -> None:
        """(journal id, highest LSN, life) that a caller was told is durable. A journal that holds less has lost some
        of it, whatever its own CRCs say. Safe in any thread."""
        if journal_id == self.journal.journal_id:
            require_kept(self.journal, self.core.state.lives, lsn, life)

    def status_of(self, tenant: str) -> BrokerStatus:
        """What that tenant may know: its own lanes, nobody's sessions, not how the broker is doing."""
        return tenant_status(self.core, self.journal.journal_id, tenant)

    def status(self) -> BrokerStatus:
        core, state = self.core, self.core.state
        total = state.total()
        damaged = self.scrub_report().damaged
        return BrokerStatus(
            lanes=[lane_row(core, lane, state.accounts.ledger(lane.index)) for lane in state.lanes],
            total=total,
            counters={
                **core.counters,
                "computed_padded_tokens": state.computed_padded_tokens,
                "fsyncs": self.fsyncs,
                "clock_steps_back": self._wall.steps_back,
                **(self.upkeep.counters if self.upkeep is not None else {}),
                **(self.scrubbing.counters if self.scrubbing is not None else {}),
                **(self.tiering.counters if self.tiering is not None else {}),
            },
            journal={
                "journal_id": self.journal.journal_id,
                "incarnation": self.journal.incarnation,
                "bytes": self.journal.bytes_used,
                "durable_lsn": self.journal.durable_lsn,
                "reserved_bytes": state.reserved_bytes,
                "room_bytes": core.room.left,
                **(self.upkeep.figures() if self.upkeep is not None else {}),
                **(self.tiering.figures() if self.tiering is not None else {}),
                "withheld_tasks": self.withheld.waiting(),
                "damaged_frames": len(damaged),
                "damaged": [frame.sentence for frame in damaged],
            },
            progress=progress_of(total, self._rate.rate, flows=not (self.draining or core.fault)),
            submissions=len(state.submissions),
            consumers=[consumer_row(state, session) for session in core.sessions.values()],
            hold=bool(core.hold_reason),
            draining=self.draining,
            fault=core.fault,
        )

    def verify(self, cold: Sequence[ColdScrub] | None = None) -> VerifyReport:
        """Every byte of every sealed segment must be what was written, here and in the cold tier, those that a replay
        has no need of included; a second state from the log alone must equal the live one bit for bit; accounts, orders
        and index must agree. `cold`: what came of `cold_scrub`, if that was done already."""
        self.commit()
        base = self.upkeep.base if self.upkeep is not None else None
        if self.scrubbing is not None:
            self.scrubbing.whole()
        self.cold_scrubbed([call() for call in self.cold_scrub()] if cold is None else cold)
        damaged = self.scrub_report().damaged
        try:
            return verify(self.core, self.journal, self._checkpoints, base, damaged)
        except CorruptionFound as fault:
            self.reach.note(fault)
            damaged = self.scrub_report().damaged
            said = [frame.sentence for frame in damaged] or [str(fault)]
            index, frames = self.core.state.index, self.core.state.frames
            return VerifyReport(False, index.count, frames, said, damaged)

    def scrub(self, budget_bytes: int) -> bool:
        """Look at so much more of the sealed log; whether that ended a round."""
        return self.scrubbing is None or self.scrubbing.slice(budget_bytes)

    def scrub_report(self) -> ScrubReport:
        if self.scrubbing is None:
            return ScrubReport(True, 0, 0, 0)
        return self.scrubbing.report()

    def cold_scrub(self) -> list[Callable[[], ColdScrub]]:
        """One call for each cold segment that reads all of it; they may run in any thread."""
        return self.tiering.scrub_calls() if self.tiering is not None else []

    def cold_scrubbed(self, found: Sequence[ColdScrub]) -> None:
        """Name what they found."""
        if self.tiering is not None and self.scrubbing is not None:
            self.tiering.scrubbed(found)

    def finish(self) -> None:
        """The end of this life: write down what is under way."""
        if self.upkeep is not None:
            self.upkeep.settle()
        if self.tiering is not None:
            self.tiering.settle()
        self.idle()

    def drain(self, *, undo: bool = False) -> None:
        """Take no new tasks from now on; what is here goes on."""
        self.core.draining = not undo

    @property
    def draining(self) -> bool:
        return self.core.draining

    # -- producers

    def open_submission(self, header: Submission) -> SubmissionState:
        facts = self.core.open(header)
        if facts:
            self._require_room(header.tenant)
        self._log(facts)
        return self._state_of(header.submission_id)

    def look_up(self, header: Submission) -> SubmissionState:
        """The submission as it stands, or as it would begin: nothing is written until a good batch of it is here.
        SubmissionConflict if its id means something else, Backpressure if it is new and there is no room."""
        if not self.core.open(header):
            return self._state_of(header.submission_id)
        self._require_room(header.tenant)
        return unopened(header)

    def _open_with(self, upload: TaskUpload, header: Submission) -> None:
        """Open its submission, once it is sure that the batch will follow."""
        opening = self.core.open(header)
        if upload.first_row:
            raise UsageError(
                f"submission {upload.submission_id[:12]} begins at row 0, not at {upload.first_row}"
            )
        self._require_room(header.tenant)
        size = sum(len(part) for fact in opening for part in fact.encode())
        size += pa.ipc.get_record_batch_size(upload.batch) + FRAME_MARGIN_BYTES
        if self.dirty and self._group_bytes + size > GROUP_BYTES:
            self.commit()
        try:
            try:
                self.journal.require_room(size, self.core.room.keep)
            except UsageError:
                self.commit()
                self.journal.require_room(size, self.core.room.keep)
        except ENDS as fault:
            if self._is_full():
                self.core.room.require_end(size)
                raise
            raise Fatal(str(fault)) from fault
        self._log(opening)

    def enqueue(self, upload: TaskUpload) -> SubmissionState:
        if (header := upload.header) is not None and self.core.open(header):
            self.core.proven(header, upload.batch, upload.content, lambda: None)
            self._open_with(upload, header)
        tokens = int(upload.columns.prompt.sum())
        facts, fresh = self.core.enqueue(
            upload.submission_id, upload.first_row, upload.batch, tokens
        )
        if fresh is not None:
            record = self.core.known(upload.submission_id)
            tenant = record.header.tenant
            self._require_room(tenant, fresh.nbytes)
            whole = fresh.num_rows == upload.batch.num_rows
            given = upload.content if whole else None
            content = self.reach.reading(
                lambda: self.core.proven(record.header, fresh, given, lambda: self._stored(record))
            )
            self._log(facts, upload.columns if whole else None, fresh if is_plain(fresh) else None)
            self.quota.charge(tenant, fresh.nbytes)
            self.core.remember_content(upload.submission_id, fresh, content)
        return self._state_of(upload.submission_id)

    def content_of(self, submission_id: str) -> StreamContent | None:
        """For a stream that goes on with this submission, to be carried along outside the owner's thread."""
        return self.core.content_of(submission_id)

    def close_submission(self, submission_id: str) -> SubmissionState:
        record = self.core.known(submission_id)
        facts = self.reach.reading(lambda: self.core.close(submission_id, self._stored(record)))
        return self._end_submission(submission_id, facts)

    def abandon_submission(self, submission_id: str, tenant: str | None = None) -> SubmissionState:
        """End a submission with what came of it, which runs: its lanes no longer wait for more. Those of its tasks that
        nobody can read become dead letters, of one that is closed as well."""
        record = self.core.state.by_submission.get(submission_id)
        lost: list[Fact] = []
        if record is not None:
            lost += self.reach.given_up(record)
        if not lost or record is None or not record.closed:
            lost = [*self.core.abandon(submission_id, tenant), *lost]
        return self._end_submission(submission_id, lost)

    def _end_submission(self, submission_id: str, facts: list[Fact]) -> SubmissionState:
        self._log(facts)
        self._log(self.core.lane_steps())
        return self._state_of(submission_id)

    def _stored(self, record: SubmissionRecord) -> Iterable[pa.RecordBatch] | None:
        """All that was taken of it, from the log; None if it is no longer all there, or not here."""
        index = self.core.state.index
        self._require_written(index.frames.view[record.batches].tolist())
        whole = index.holds_whole(record.batches, self.journal.first_lsn) and (
            self.tiering is None or self.tiering.all_near(record.batches)
        )
        whole = whole and not self.withheld.holds(record.batches)
        return self.payloads.batches(record.batches) if whole else None

    def submission(self, submission_id: str) -> SubmissionState | None:
        return self.core.submission(submission_id)

    def tenant_of(self, submission_id: str) -> str | None:
        """None when that submission is not known."""
        record = self.core.state.by_submission.get(submission_id)
        return None if record is None else record.header.tenant

    def _state_of(self, submission_id: str) -> SubmissionState:
        found = self.core.submission(submission_id)
        assert found is not None
        return found

    def _held_by_tenant(self) -> dict[str, int]:
        self.write()  # a frame of the open group has no size yet
        return held_bytes(self.core.state, self.journal)

    def _require_room(self, tenant: str, size: int = 0) -> None:
        self.core.room.require(size)
        if self.upkeep is not None:
            self.upkeep.require_checkpoint_room()
        self.quota.require(tenant, self.clock.monotonic_s())
        if self.draining:
            raise Backpressure(
                "the broker drains: it takes no new tasks until it restarts, or until "
                "`fabric broker drain --undo`",
                retry_after_s=30.0,
            )
        used, mark = self.journal.bytes_used, self.journal_high_water
        if used >= mark:
            raise Backpressure(
                f"the journal holds {used} bytes, at or above its high-water mark of {mark}: "
                "tasks are taken again when results have landed",
                retry_after_s=5.0,
            )

    def _require_written(self, lsns: Sequence[int]) -> None:
        """A frame of the open group cannot be read back."""
        if lsns and max(lsns) > self.journal.durable_lsn:
            self.commit()

    # -- consumers

    def attach(
        self,
        name: str,
        engine: str,
        engine_fingerprint: str,
        device: str,
        profile: Profile,
        held: Sequence[int],
        call: int = -1,
        tenant: str | None = None,
        place: str = "",
    ) -> AttachReply:
        now_s = self.clock.monotonic_s()
        session = Session(
            name, engine, engine_fingerprint, device, profile, now_s + self.limits.lease_s
        )
        session.call, session.tenant, session.place = call, tenant, place
        self._log(self.core.displaced(session, now_s))
        facts, reply = self.core.attach(session, held)
        self._log(facts)
        return reply

    def lease(self, name: str, budget: Budget, call: int) -> tuple[Lease | None, str]:
        """The lease or, without one, the reason to hold ("" when nothing is ready)."""
        now_s = self.clock.monotonic_s()
        facts, grant, rows, newest = self.reach.granted(name, budget, call, now_s)
        self._log(facts)
        if grant is None:
            if self.core.withheld:
                raise self.reach.why()
            return None, self.core.why_held(name)
        self._require_written([newest])  # what a crash could forget is not worked on
        deadline_us = self.clock.wall_us() + round(self.limits.lease_s * 1e6)
        return self.payloads.lease(grant, deadline_us, rows), ""

    def renew(self, name: str) -> RenewReply:
        return self.core.renew(name, self.clock.monotonic_s(), self.clock.wall_us())

    def computed(self, name: str, batch: pa.RecordBatch, ipc: Part) -> ComputedReply:
        facts, reply = self.core.computed(name, batch, ipc)
        whole = reply.accepted == batch.num_rows
        frames = [part for fact in facts for part in in_frames(fact, self.journal)]
        self._log(frames, batch=batch if whole and len(frames) == 1 else None)
        self._log(self.core.lane_steps())
        return reply

    def nack(self, name: str, task_ids: npt.NDArray[np.int64], reason: str, attempted: bool) -> int:
        facts, count = self.core.nack(name, task_ids, reason, attempted=attempted)
        self._log(facts)
        return count

    def detach(self, name: str) -> None:
        self._log(self.core.detach(name))

    def tick(self) -> None:
        """Time passed: expire what is due, and look now and then whether the accounts still hold."""
        now_s = self.clock.monotonic_s()
        self._log(self.core.tick(now_s))
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self.core.room.look()
        if now_s - (self._rate.seen_s or 0.0) >= RATE_EVERY_S:
            total = self.core.state.total()
            self._rate.total = total.enqueued.tokens
            self._rate.update(total.retired.tokens + total.dead.tokens, now_s)
        self._keep_up()
        if now_s - self._audit_s >= AUDIT_EVERY_S and not self.core.fault:
            self._audit_s = now_s
            if differences := self.core.state.audit():
                raise Fatal(f"the accounts do not match the tasks: {differences[0]}")

    def _keep_up(self) -> None:
        if self.upkeep is None or self.scrubbing is None:
            return
        try:
            self.upkeep.tick()
            self.scrubbing.tick()
            if self.tiering is not None:
                self.tiering.tick()
        except ENDS as fault:
            raise Fatal(str(fault)) from fault

    # -- completion

    def pull(self, name: str, rows: int, skip: Collection[str] = ()) -> pa.RecordBatch | None:
        try:
            return self._pulled(name, rows, skip)
        except FabricError as fault:
            self.core.release_pulled(name)  # rows of a dead letter lie in a store that is away
            if isinstance(
                fault, ColdLost
            ):  # it may be restored: whoever lands waits for it, as workers do
                raise NotFetched(f"ColdLost: {fault}", retry_after_s=5.0) from fault
            raise

    def _pulled(self, name: str, rows: int, skip: Collection[str]) -> pa.RecordBatch | None:
        """Of those whose outcome can be read."""
        while len(tasks := self.core.pull(name, rows, skip)):
            self._require_written([self.journal.next_lsn - 1] if self.dirty else [])
            if (found := self.reach.outcomes(tasks)) is not None:
                return found
        return None

    def release_pulled(self, name: str, task_ids: npt.NDArray[np.int64] | None = None) -> None:
        self.core.release_pulled(name, task_ids)

    def settle(
        self,
        task_ids: npt.NDArray[np.int64],
        confirmation: Confirmation,
        *,
        dead: bool,
        requeues: npt.NDArray[np.uint8] | None = None,
    ) -> int:
        facts, count = self.core.settle(task_ids, confirmation, dead=dead, requeues=requeues)
        self._log(facts)
        self._log(self.core.lane_steps())
        return count

    # -- dead letters

    def requeue(self, task_ids: npt.NDArray[np.int64], reason: str) -> RequeueReply:
        """Dead tasks are ready again. Idempotent: what is not dead any more is counted and left alone."""
        first_lsn = self.journal.first_lsn
        facts, reply = self.core.requeue(task_ids, reason, first_lsn, self.withheld.rows)
        self._log(facts)
        self._log(self.core.lane_steps())
        return reply

    def states(self, task_ids: npt.NDArray[np.int64]) -> list[str]:
        """The state of each task by name; "unknown" if it is not of this journal."""
        return self.core.states(task_ids)
