"""The core: decides. Requests and the time come in, facts and answers go out; it writes and sends nothing.

Every decision is a pure question to the state plus the sessions alive now. The caller journals the facts and
hands each to `apply`, in the same order, before the next request. What a restart forgets (who is attached,
what was pulled, how far a lane has been handed out) is derived or declared again, never trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.broker.accounts import (
    COMPUTED,
    DEAD,
    IN_DOUBT,
    LEASED,
    READY,
    RETIRED,
    STATE_NAMES,
    distinct,
    has_repeats,
)
from fabric_pipelines.broker.classes import PATIENCE_LEASES, Roster, bit_of
from fabric_pipelines.broker.contents import Contents, StreamContent
from fabric_pipelines.broker.deaths import requeued
from fabric_pipelines.broker.envelope import Part
from fabric_pipelines.broker.facts import (
    Claimed,
    Computed,
    Enqueued,
    Fact,
    GivenUp,
    Leased,
    Requeued,
    Returned,
    Settled,
    SubmissionClosed,
    SubmissionOpened,
    Verdict,
)
from fabric_pipelines.broker.landing import settled_by
from fabric_pipelines.broker.lanes import RULE
from fabric_pipelines.broker.lifecycle import of_old_generations, steps_due
from fabric_pipelines.broker.pulls import ComputedQueue
from fabric_pipelines.broker.refusals import given_up, pass_on
from fabric_pipelines.broker.replies import (
    AttachReply,
    ComputedReply,
    RenewReply,
    RequeueReply,
    SubmissionState,
)
from fabric_pipelines.broker.room import NO_ROOM, Room
from fabric_pipelines.broker.sessions import Limits as Limits
from fabric_pipelines.broker.sessions import Session as Session
from fabric_pipelines.broker.state import BatchColumns, Effects, State, SubmissionRecord
from fabric_pipelines.broker.submissions import (
    abandoned,
    goes_past,
    require_goes_on,
    require_kept_up,
    state_of,
)
from fabric_pipelines.broker.supply import SUSPECTS_ALONE, Asker, Grant, Supply
from fabric_pipelines.errors import (
    BalanceBroken,
    NotAttached,
    SchemaError,
    SubmissionConflict,
    UsageError,
)
from fabric_pipelines.ids import SEQUENCE_BITS, SEQUENCE_MAX
from fabric_pipelines.records.arrow import to_ipc_part, to_ipc_pieces
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.completion import STATUSES, largest_vector
from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.records.submission import Fingerprinter, Submission
from fabric_pipelines.records.task import token_counts

Sequences = npt.NDArray[np.int64]
NOTHING: Sequences = np.zeros(0, np.int64)
HOLD_RETRY_S = 0.5
COUNTERS = (
    "enqueued",
    "leases",
    "leased_tasks",
    "lane_switches",
    "duplicates",
    "late_acks",
    "old_generation_acks",
    "expired",
    "nacked",
    "claimed",
    "reusable_tokens",
    "offered_tokens",
    "padded_tokens",
    "closed_unproven",
    "abandoned",
    "too_large",
    "given_up",
    "requeued",
    "held_for_room",
)


class Core:
    def __init__(self, state: State, limits: Limits, *, now_s: float = 0.0) -> None:
        """Takes a state that facts have built; leases of an earlier life stay in doubt for one lease time."""
        self.state = state
        self.limits = limits
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.sessions: dict[str, Session] = {}
        self.fault = ""
        self.draining = False
        self._grace_s = now_s + limits.lease_s
        self._resuming = state.frames > 0  # sessions of an earlier life may still come back
        self.roster = Roster(PATIENCE_LEASES * limits.lease_s)
        self.room = Room(state)
        self._supply = Supply(state, limits.merge_waste, self.room)
        self._computed = ComputedQueue(state)
        self._contents = Contents()
        self._stepping: set[int] = set()
        self._derive()

    def _derive(self) -> None:
        state = self.state
        self._supply.begin()
        waiting = state.in_state(COMPUTED)
        done = np.where(
            state.index.done[waiting] < 0, np.iinfo(np.int32).max, state.index.done[waiting]
        )
        self._computed.append(waiting[np.lexsort((state.index.done_row[waiting], done))])
        self._stepping.update(range(len(state.lanes)))

    # -- applying

    def apply(self, fact: Fact, lsn: int, columns: BatchColumns | None = None) -> None:
        """The fact is in the journal at `lsn`: make it so. A broken balance stops all leasing."""
        try:
            effects = self.state.apply(fact, lsn, columns)
        except BalanceBroken as broken:
            self.fault = str(broken)
            raise
        self._absorb(effects)
        self._count(fact)

    def _absorb(self, effects: Effects) -> None:
        self._supply.absorb(effects)
        self._computed.forget(effects.risen)
        self._computed.append(effects.computed)
        self._stepping |= effects.lanes

    def _count(self, fact: Fact) -> None:
        counters = self.counters
        if isinstance(fact, Enqueued):
            counters["enqueued"] += fact.rows
        elif isinstance(fact, Leased):
            counters["leases"] += 1
            counters["leased_tasks"] += len(fact.tasks)
        elif isinstance(fact, Returned):
            counters["expired" if fact.expired else "nacked"] += len(fact.tasks)
        elif isinstance(fact, Claimed):
            counters["claimed"] += len(fact.tasks)
        elif isinstance(fact, Computed) and fact.too_large_for:
            counters["too_large"] += int((fact.verdicts == Verdict.TOO_LARGE).sum())
        elif isinstance(fact, GivenUp):
            counters["given_up"] += len(fact.tasks)
        elif isinstance(fact, Requeued):
            counters["requeued"] += len(fact.tasks)
        elif isinstance(fact, SubmissionClosed):
            counters["abandoned"] += fact.abandoned
            self._contents.forget(fact.submission_id)
            self._stepping |= self.state.by_submission[fact.submission_id].lanes
        elif isinstance(fact, Settled):
            self._stepping.update(distinct(self.state.index.lane[fact.tasks]).tolist())

    # -- producers

    def open(self, header: Submission) -> list[Fact]:
        """Nothing if this submission is known already; SubmissionConflict if its id means something else."""
        record = self.state.by_submission.get(header.submission_id)
        if record is None:
            return [SubmissionOpened(header)]
        require_goes_on(record, header)
        return []

    def known(self, submission_id: str) -> SubmissionRecord:
        record = self.state.by_submission.get(submission_id)
        if record is None:
            raise UsageError(
                f"submission {submission_id[:12]} is not known: what is new begins with its header"
            )
        return record

    def enqueue(
        self, submission_id: str, first_row: int, batch: pa.RecordBatch, tokens: int
    ) -> tuple[list[Fact], pa.RecordBatch | None]:
        """The fact for the rows of `batch` that are new, and those rows. `first_row` is the batch's place in
        the submission; rows that arrived before are counted as duplicates and not taken again."""
        record = self.known(submission_id)
        require_kept_up(record)
        name = submission_id[:12]
        skip = record.rows - first_row
        if skip < 0:
            raise UsageError(
                f"submission {name} continues at row {record.rows}, not at {first_row}: send the rows between"
            )
        if skip >= batch.num_rows:
            self.counters["duplicates"] += batch.num_rows
            return [], None
        if record.closed:
            raise SubmissionConflict(f"submission {name} is closed with {record.rows} tasks")
        if skip:
            self.counters["duplicates"] += skip
            batch = batch.slice(skip)
        rows = batch.num_rows
        if record.rows + rows > record.header.tasks or (
            not skip and record.tokens + tokens > record.header.tokens
        ):
            raise SubmissionConflict(goes_past(record.header, record.rows + rows - 1))
        base = self.state.index.count
        if base + rows > SEQUENCE_MAX:
            raise UsageError("this journal has used up its task ids: start a new one")
        ordinal = len(record.batches)
        fact = Enqueued(submission_id, ordinal, record.rows, base, rows, to_ipc_pieces(batch), RULE)
        return [fact], batch

    def close(self, submission_id: str, stored: Iterable[pa.RecordBatch] | None) -> list[Fact]:
        """Totals and fingerprint are compared now; `stored` gives the batches again, should the running
        fingerprint have been lost with an earlier process. None: they are no longer all there (their space
        was needed); totals and the CRCs of each batch at its upload must do, and that is counted."""
        record = self.known(submission_id)
        require_kept_up(record)
        if record.closed:
            return []
        name, header = submission_id[:12], record.header
        if (record.rows, record.tokens) != (header.tasks, header.tokens):
            raise SubmissionConflict(
                f"submission {name} declared {header.tasks} tasks and {header.tokens} tokens but has "
                f"{record.rows} and {record.tokens}"
            )
        if not self._contents.prove(header, stored):
            self.counters["closed_unproven"] += 1
        return [SubmissionClosed(submission_id)]

    def abandon(self, submission_id: str, tenant: str | None = None) -> list[Fact]:
        """See `abandoned`; `tenant`: whose submissions the caller may hear of, None for all."""
        return list(abandoned(self.state, submission_id, tenant))

    def proven(
        self,
        header: Submission,
        batch: pa.RecordBatch,
        content: Fingerprinter | None,
        stored: Callable[[], Iterable[pa.RecordBatch] | None],
    ) -> Fingerprinter | None:
        """`content`, or what is known of it; SubmissionConflict if with `batch` the submission is whole and not what
        its fingerprint says. `stored` gives the batches before it again, None if they are no longer all there."""
        record = self.state.by_submission.get(header.submission_id)
        before = 0 if record is None else record.rows
        if before + batch.num_rows < header.tasks:
            return content
        tokens = int(token_counts(batch).sum()) + (0 if record is None else record.tokens)
        return self._contents.proven(header, before, tokens, batch, content, stored)

    def content_of(self, submission_id: str) -> StreamContent | None:
        """Fingerprint of what was taken so far, for one stream to carry on."""
        record = self.state.by_submission.get(submission_id)
        return self._contents.of(submission_id, 0 if record is None else record.rows)

    def remember_content(
        self, submission_id: str, batch: pa.RecordBatch, content: Fingerprinter | None
    ) -> None:
        """The rows of `batch` were taken, see `Contents.take`."""
        before = self.known(submission_id).rows - batch.num_rows
        self._contents.take(submission_id, before, batch, content)

    def submission(self, submission_id: str) -> SubmissionState | None:
        record = self.state.by_submission.get(submission_id)
        return None if record is None else state_of(self.state, record)

    # -- consumers

    def attach(self, session: Session, held: Sequence[int]) -> tuple[list[Fact], AttachReply]:
        """The session says what it holds, and that is all it holds: ids in doubt or ready are claimed, leases
        it does not name come back."""
        name = session.name
        before = self.sessions.get(name)
        if before is not None and 0 <= session.call <= before.call:
            raise NotAttached(f"session {name!r} has asked for more since it sent this attach")
        session.call = max(session.call, before.call if before is not None else -1)
        self.sessions[name] = session
        self.roster.came(name, session.kind, session.engine, session.tenant)
        tasks, known = self._sequences(np.array(held, np.int64))
        tasks = self.state.served_by(np.unique(tasks[known]), session.engine, session.tenant)
        index, mine = self.state.index, self.state.sessions.get(name, -1)
        states, own = index.state[tasks], index.holder[tasks] == mine
        kept = tasks[(states == LEASED) & own]
        claimed = tasks[((states == IN_DOUBT) & own) | self.room.takes(tasks, states == READY)]
        facts: list[Fact] = []
        if len(claimed):
            facts.append(Claimed(self.state.next_lease, name, claimed))
        dropped = np.setdiff1d(self._held_by(name), tasks, assume_unique=True)
        if len(dropped):
            facts.append(Returned.of(name, "not held any more at attach", dropped))
        accepted = self.state.task_ids(np.sort(np.concatenate([kept, claimed]))).tolist()
        lost = sorted(set(map(int, held)) - set(accepted))
        return facts, AttachReply(
            name, tuple(accepted), tuple(lost), round(self.limits.lease_s * 1000)
        )

    def _held_by(self, name: str) -> Sequences:
        """Tasks leased to, or in doubt with, this session."""
        state, index = self.state, self.state.index
        leases = [state.leases[at] for at in state.session_leases.get(name, ())]
        leased = np.concatenate([NOTHING, *(lease.tasks for lease in leases)])
        mine = state.sessions.get(name, -1)
        leased = leased[(index.state[leased] == LEASED) & (index.holder[leased] == mine)]
        if not state.accounts.in_state(IN_DOUBT):
            return np.unique(leased)
        doubtful = state.in_state(IN_DOUBT)
        return np.unique(np.concatenate([leased, doubtful[index.holder[doubtful] == mine]]))

    def attached(self, name: str) -> Session:
        session = self.sessions.get(name)
        if session is None:
            raise NotAttached(
                f"session {name!r} is not attached to this broker: attach again with the ids it holds"
            )
        return session

    @property
    def hold_reason(self) -> str:
        if self.draining:
            return "the broker drains: it leases nothing"
        computed = self.state.accounts.in_state(COMPUTED)
        if computed >= self.limits.computed_high_water:
            return f"{computed} computed tasks wait to be landed (high-water mark {self.limits.computed_high_water})"
        return ""

    def lease(
        self, name: str, budget: Budget, now_s: float, call: int = -1
    ) -> tuple[list[Fact], Grant | None]:
        """None when nothing is ready for the session's engine, or on hold (see `hold_reason`)."""
        if self.fault:
            raise BalanceBroken(self.fault)
        session = self.attached(name)
        self._extend(session, now_s)
        if 0 <= call <= session.call:
            # Asked before: a request that came late, or twice, must not lease what nobody would hear of.
            again = call == session.call and session.last_lease in self.state.leases
            return [], self._supply.again(session.last_lease) if again else None
        before, session.call = session.call, call
        session.held_back = ""
        if budget.sequences < 1 or budget.tokens < 1 or self.hold_reason:
            return [], None
        leases = self.state.session_leases.get(name, ())
        if self.state.suspects and self._holds_suspects(leases):
            session.held_back = SUSPECTS_ALONE
            return [], None
        asker = self._asker(session, busy=bool(leases))
        grant = self._supply.grant(asker, session.lanes, budget)
        if grant is None:
            session.held_back = self._supply.held_back
            self.counters["held_for_room"] += session.held_back == NO_ROOM
            if self._supply.withheld:
                session.call = before  # it may be asked again: its rows are on their way
            return [], None
        self._account(session, grant)
        self._supply.ahead(name, grant.lane, 2 * budget.sequences)
        return [Leased(grant.lease_id, name, grant.lane.index, grant.tasks)], grant

    def _asker(self, session: Session, *, busy: bool) -> Asker:
        profiles = [
            other.profile for other in self.sessions.values() if other.engine == session.engine
        ]
        mine = session.profile.max_num_tokens
        largest = max(profiles, key=lambda profile: profile.max_num_tokens)
        return Asker(
            session.name,
            session.engine,
            bit_of(session.kind, self.state.classes),
            len(profiles),
            busy=busy,
            tenant=session.tenant,
            share=(mine, sum(profile.max_num_tokens for profile in profiles)),
            larger=largest.batch if largest.max_num_tokens > mine else None,
        )

    def _holds_suspects(self, leases: Iterable[int]) -> bool:
        state = self.state
        open_ = (state.leases[at].tasks for at in leases)
        return any(task in state.suspects for tasks in open_ for task in tasks.tolist())

    def why_held(self, name: str) -> str:
        """Why a session got nothing though work may be ready: the broker's reason, or one of its own, which ends
        at the latest when it holds nothing."""
        session = self.sessions.get(name)
        own = session.held_back if session else ""
        if own and not (
            self.room.is_tight if own == NO_ROOM else self.state.session_leases.get(name)
        ):
            own = ""
        return self.hold_reason or own

    def _account(self, session: Session, grant: Grant, sign: int = 1) -> None:
        tokens, counters = sign * grant.tokens, self.counters
        if session.lane is not None and session.lane is not grant.lane:
            counters["lane_switches"] += 1
        session.lane, session.last_lease = grant.lane, grant.lease_id
        session.lanes[grant.lane.key.tenant] = grant.lane
        counters["offered_tokens"] += tokens
        counters["reusable_tokens"] += sign * int(grant.shared.sum())
        if grant.lane.key.length:
            longest = int(self.state.index.prompt[grant.tasks].max())
            counters["padded_tokens"] += sign * longest * len(grant.tasks) - tokens

    def renew(self, name: str, now_s: float, wall_us: int) -> RenewReply:
        session = self.attached(name)
        self._extend(session, now_s)
        hold = bool(self.why_held(name))
        refuser = bit_of(session.kind, self.state.classes)
        leases = self.state.session_leases.get(name, ())
        return RenewReply(
            hold=hold,
            retry_after_s=HOLD_RETRY_S if hold else 0.0,
            deadline_us=wall_us + round(self.limits.lease_s * 1e6),
            leased=sum(self.state.leases[at].open for at in leases),
            ready=self._supply.ready_for(session.engine, refuser, session.tenant),
        )

    def forgive(self, seconds: float) -> None:
        """The broker itself was busy for so long: that is no session's fault."""
        for session in self.sessions.values():
            session.deadline_s += seconds

    def _extend(self, session: Session, now_s: float) -> None:
        session.deadline_s = now_s + self.limits.lease_s

    def computed(
        self, name: str, batch: pa.RecordBatch, ipc: Part
    ) -> tuple[list[Fact], ComputedReply]:
        """Takes the rows whose task is, or last was, with this session; the first of a pair. Late is what
        another session took over meanwhile; a failure of an attempt that is counted already is a duplicate."""
        statuses = pc.index_in(batch.column("status"), pa.array(STATUSES))
        if statuses.null_count:
            raise SchemaError(
                f"completion batch has a status that is not one of {', '.join(STATUSES)}"
            )
        tasks, known = self._sequences(batch.column("task_id").to_numpy())
        rows = np.flatnonzero(known)
        once = np.ones(len(rows), np.bool_)
        if has_repeats(tasks[rows]):
            _, first = np.unique(tasks[rows], return_index=True)
            once[:] = False
            once[first] = True
        index, mine = self.state.index, self.state.sessions.get(name, -2)
        states = index.state[tasks[rows]]
        # A lease that ran out while its work went on is honoured as long as nobody else took the task:
        # otherwise a batch that takes longer than a lease would be run again for ever.
        open_ = (states == LEASED) | (states == IN_DOUBT)
        codes = statuses.to_numpy()[rows]
        attempts = batch.column("attempts").to_numpy()[rows]
        counted = (codes == STATUSES.index("failed")) & (attempts < index.attempts[tasks[rows]])
        fresh = once & ~counted
        finished = codes == STATUSES.index("ok")
        ours = open_ | ((states == READY) & finished)
        ours &= (index.holder[tasks[rows]] == mine) & fresh
        ours &= open_ | self.room.takes(tasks[rows], ours & ~open_)  # these were promised no space
        past = (states == COMPUTED) | (states == RETIRED) | (states == DEAD) | ~fresh
        duplicates, late = int(past.sum()), int((~ours & ~past).sum())
        self.counters["duplicates"] += duplicates
        self.counters["late_acks"] += late
        if duplicates:
            old = of_old_generations(self.state, tasks[rows[past]])
            self.counters["old_generation_acks"] += old
        taken = rows[ours]
        reply = ComputedReply(len(taken), duplicates, late, int((~known).sum()))
        if not len(taken):
            return [], reply
        if len(taken) < batch.num_rows:
            batch = batch.take(pa.array(taken))
            ipc = to_ipc_part(batch)
        codes = statuses.to_numpy()[taken]
        verdicts = self._verdicts(tasks[taken], codes)
        kind = self._pass_on(name, tasks[taken], verdicts, batch) if codes.any() else ""
        output = pc.fill_null(pc.list_value_length(batch.column("output")), 0)
        fact = Computed(
            session=name,
            tasks=tasks[taken],
            verdicts=verdicts,
            output_tokens=output.to_numpy().astype(np.int32),
            padded_tokens=int(pc.sum(batch.column("padded_tokens")).as_py() or 0),
            ipc=ipc,
            too_large_for=kind,
            vector_bytes=largest_vector(batch),
        )
        return [fact], reply

    def _pass_on(
        self,
        name: str,
        tasks: Sequences,
        verdicts: npt.NDArray[np.uint8],
        batch: pa.RecordBatch,
    ) -> str:
        """The class for which some of these tasks were too large and which others may take; else ""."""
        session = self.sessions.get(name)
        if session is None:
            return ""
        kind, engine = session.kind, session.engine
        passed = pass_on(
            self.state,
            tasks,
            verdicts,
            batch.column("finish_reason"),
            others=lambda tenant: self.roster.known(engine, tenant) - {kind},
            anybody=self._resuming,
        )
        return session.kind if passed else ""

    def _verdicts(self, tasks: Sequences, codes: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        """ok and refused are final; failed is final with the last attempt."""
        if not codes.any():
            return np.full(len(tasks), Verdict.OK, np.uint8)
        last = self.state.index.attempts[tasks] + 1 >= self.limits.attempts_max
        failed = np.where(last, Verdict.FAILED, Verdict.RETRY)
        verdicts = np.array([Verdict.OK, Verdict.REFUSED, Verdict.NONE])[codes]
        return np.where(codes == STATUSES.index("failed"), failed, verdicts).astype(np.uint8)

    def nack(
        self, name: str, task_ids: npt.NDArray[np.int64], reason: str, *, attempted: bool = False
    ) -> tuple[list[Fact], int]:
        """What the session did not start goes back without an attempt being counted. `attempted`: it had
        started when the engine failed, so it is treated as a lease that ran out, blame and halves alike."""
        tasks, known = self._sequences(task_ids)
        tasks = np.unique(tasks[known])
        index, mine = self.state.index, self.state.sessions.get(name, -2)
        ours = tasks[(index.state[tasks] == LEASED) & (index.holder[tasks] == mine)]
        self.counters["late_acks"] += len(tasks) - len(ours)
        if not len(ours):
            return [], 0
        if not attempted:
            return [Returned.of(name, reason, ours)], len(ours)
        reason = f"{reason}, held by session {name}"
        return [Returned.of(name, reason, ours, self._blamed(ours))], len(ours)

    def detach(self, name: str) -> list[Fact]:
        """The session is over: its leases come back, its pulls are forgotten."""
        self.sessions.pop(name, None)
        self._supply.release(name)
        self.roster.left(name)
        self._computed.release(name)
        held = self._held_by(name)
        return [Returned.of(name, "session detached", held)] if len(held) else []

    def tick(self, now_s: float) -> list[Fact]:
        """Leases of sessions that did not renew run out; what nobody claimed after a restart is ready again."""
        silent = [s for s in self.sessions.values() if s.deadline_s < now_s]
        facts = self._ended(silent, "did not renew its lease", now_s)
        if now_s >= self._grace_s and self.state.accounts.in_state(IN_DOUBT):
            doubtful = self.state.in_state(IN_DOUBT)
            reason = "not claimed within the lease time after a restart"
            facts.append(Returned.of("", reason, doubtful, expired=True))
        self._resuming = self._resuming and now_s < self._grace_s
        self.roster.forget(now_s)
        if self.state.refused and not self._resuming:
            facts += given_up(self.state, self.roster.known, self.room.settlements)
        return facts

    def displaced(self, by: Session, now_s: float) -> list[Fact]:
        """One process holds a place at a time: whoever called from it before `by` did has ended."""
        sessions = self.sessions.values() if by.place else ()
        before = [
            s for s in sessions if s.place == by.place and s.name != by.name and s.call < by.call
        ]
        return self._ended(before, f"has ended: {by.name} runs in its place", now_s)

    def _ended(self, sessions: Iterable[Session], why: str, now_s: float) -> list[Fact]:
        facts: list[Fact] = []
        for name in [session.name for session in sessions]:
            del self.sessions[name]
            self._supply.release(name)
            self.roster.lost(name, now_s)
            if len(held := self._held_by(name)):
                blamed = self._blamed(held)
                facts.append(Returned.of(name, f"session {name} {why}", held, blamed, expired=True))
        return facts

    def _blamed(self, held: Sequences) -> npt.NDArray[np.uint8]:
        """An attempt is counted only for a task that was all its session held: anything beside it may be what
        ended the worker. More than one come back in halves, and go out one by one."""
        if len(held) == 1 and self.state.index.lease[held[0]] >= 0:
            return self._verdicts(held, np.full(1, STATUSES.index("failed"), np.int32))
        return np.full(len(held), Verdict.RETURNED, np.uint8)

    # -- completion

    def pull(self, name: str, rows: int, skip: Collection[str] = ()) -> Sequences:
        """Up to `rows` computed tasks, oldest first, that this session has not pulled yet; none of the functions in `skip`."""
        return self._computed.pull(name, rows, skip)

    def release_pulled(self, name: str, task_ids: npt.NDArray[np.int64] | None = None) -> None:
        self._computed.release(name, task_ids)

    def settle(
        self,
        task_ids: npt.NDArray[np.int64],
        confirmation: Confirmation,
        *,
        dead: bool,
        requeues: npt.NDArray[np.uint8] | None = None,
    ) -> tuple[list[Fact], int]:
        """Retire, or bury as dead letters, what the sink has confirmed; a sink may refuse even what was computed
        well. Repeats are counted and change nothing, and so is the burial of an outcome from before a task was
        requeued (`requeues`: as they were pulled; none: 0)."""
        if not dead and confirmation.kind == "dead_letter":
            raise UsageError("a dead letter's confirmation retires nothing: call dead")
        tasks, known = self._sequences(task_ids)
        if not known.all():
            at = int(task_ids[int(np.argmin(known))])
            raise UsageError(f"task {at} is not of this journal: nothing was retired")
        fresh = settled_by(self.state, tasks, requeues, dead=dead)
        self.counters["duplicates"] += len(task_ids) - len(fresh)
        if not len(fresh):
            return [], 0
        return [Settled(dead, fresh, confirmation.kind, confirmation.proof)], len(fresh)

    def requeue(
        self,
        task_ids: npt.NDArray[np.int64],
        reason: str,
        first_lsn: int,
        gone: Callable[[Sequences], npt.NDArray[np.bool_] | None] = lambda tasks: None,
    ) -> tuple[list[Fact], RequeueReply]:
        """Dead tasks become ready, as far as their rows are still in a log that begins at `first_lsn`, and not `gone`."""
        tasks, known = self._sequences(task_ids)
        unknown = int((~known).sum())
        return requeued(self.state, np.unique(tasks[known]), unknown, reason, first_lsn, gone)

    def states(self, task_ids: npt.NDArray[np.int64]) -> list[str]:
        tasks, known = self._sequences(task_ids)
        found = self.state.index.state[tasks].tolist()
        return [
            STATE_NAMES[state] if mine else "unknown"
            for state, mine in zip(found, known.tolist(), strict=True)
        ]

    # -- lanes

    def lane_steps(self) -> list[Fact]:
        """Life cycle facts that have become due."""
        facts = steps_due(self.state, self._stepping)
        self._stepping.clear()
        return facts

    # -- audits

    def look_ahead(
        self,
        near: Callable[[Sequences], int],
        out_of_reach: Callable[[Sequences], npt.NDArray[np.bool_] | None],
        damaged: Callable[[Sequences], npt.NDArray[np.bool_] | None] | None = None,
    ) -> None:
        """Some rows may be away: `near` says how many of those tasks, from the first on, can be read now, and asks for the
        others; `out_of_reach` which of them nobody can read now, None for none; `damaged` which of those are damaged."""
        self._supply.near, self._supply.out_of_reach = near, out_of_reach
        self._supply.damaged = damaged

    def take_back(self, name: str, grant: Grant, call: int) -> None:
        """What `lease` gave was not logged and not sent: the same call may be made again."""
        session = self.attached(name)
        session.call = min(session.call, call - 1) if call >= 0 else session.call
        self._account(session, grant, -1)
        self._supply.take_back(grant, session.tenant)

    def set_aside(self, tasks: Sequences) -> None:
        """Their rows cannot be read: they are in nobody's way."""
        self._supply.set_aside(tasks)

    @property
    def withheld(self) -> bool:
        """Whether the last lease passed lanes over whose next rows are away."""
        return bool(self._supply.withheld)

    def stranded(self) -> list[str]:
        return self._supply.stranded()

    def _sequences(
        self, task_ids: npt.NDArray[np.int64]
    ) -> tuple[Sequences, npt.NDArray[np.bool_]]:
        """(sequence numbers, whether each is known); unknown ones come out as 0."""
        tasks = task_ids - np.int64(self.state.incarnation << SEQUENCE_BITS)
        known = (tasks >= 0) & (tasks < self.state.index.count)
        return np.where(known, tasks, 0), known
