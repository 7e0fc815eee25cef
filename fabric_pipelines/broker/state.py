"""State: what follows from the facts, in order, and nothing else; a second one built from the log must be equal.

`apply` moves every task from the state the fact needs it in to the next one, with its account; a task that is
elsewhere is a broken balance and raises. It returns the effects that derived structures (lane orders, the
queue of computed tasks) need to know. A replay drops them and derives those structures once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.broker.accounts import (
    COMPUTED,
    DEAD,
    IN_DOUBT,
    LEASED,
    READY,
    RETIRED,
    STATE_NAMES,
    STATES,
    Accounts,
    add_counts,
    add_sums,
    distinct,
    has_repeats,
    only,
)
from fabric_pipelines.broker.facts import (
    Claimed,
    Computed,
    Dropped,
    Enqueued,
    Fact,
    GivenUp,
    LanesStepped,
    Leased,
    Moved,
    MovedComputed,
    Requeued,
    Returned,
    Settled,
    Started,
    SubmissionClosed,
    SubmissionOpened,
    Uploaded,
    Verdict,
)
from fabric_pipelines.broker.index import Growing, TaskIndex
from fabric_pipelines.broker.lanes import RULE, Lane, Step, key_of, shapes
from fabric_pipelines.broker.order import PrefixOrder
from fabric_pipelines.broker.prefix import prefix_keys
from fabric_pipelines.broker.promise import (
    OUTCOME_BYTES,
    SETTLE_BYTES,
    TOKEN_BYTES,
    VECTOR_UNKNOWN_BYTES,
    largest_metadata,
)
from fabric_pipelines.broker.recount import Recounter
from fabric_pipelines.errors import BalanceBroken
from fabric_pipelines.ids import SEQUENCE_BITS
from fabric_pipelines.journal import Life
from fabric_pipelines.ledger import Ledger
from fabric_pipelines.records.arrow import read_ipc, whole
from fabric_pipelines.records.shape import LaneKey
from fabric_pipelines.records.submission import Submission
from fabric_pipelines.records.task import token_counts

Sequences = npt.NDArray[np.int64]
ROW_LOST = "RowLost"  # what a task dies of whose row or outcome lay in damaged bytes
LIVES_KEPT = 4096
HELD = (LEASED, IN_DOUBT)
NOTHING: Sequences = np.zeros(0, np.int64)
PLAIN = (
    "sessions",
    "reasons",
    "next_lease",
    "frames",
    "lives",
    "engines",
    "computed_padded_tokens",
    "classes",
    "suspects",
    "requeues",
    "vector_bytes",
    "held_new",
    "cold",
)


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """What the index needs of a task batch: int64 [rows] each, keys uint64. metadata: bytes of the longest."""

    prompt: npt.NDArray[np.int64]
    new: npt.NDArray[np.int64]
    shape: npt.NDArray[np.int64]
    key: npt.NDArray[np.uint64]
    metadata: int = 0

    @classmethod
    def of(cls, submission: Submission, batch: pa.RecordBatch, rule: int = RULE) -> BatchColumns:
        prompt = token_counts(batch)
        new = batch.column("max_new_tokens").to_numpy().astype(np.int64)
        tokens = batch.column("tokens").flatten().to_numpy()
        shape = shapes(submission, prompt, new, rule)
        keys = prefix_keys(tokens, prompt, layout=rule)
        return cls(prompt, new, shape, keys, largest_metadata(batch))


@dataclass(slots=True)
class SubmissionRecord:
    index: int
    header: Submission
    closed: bool = False
    abandoned: bool = False
    rows: int = 0
    tokens: int = 0
    batches: list[int] = field(default_factory=list)  # ordinal of each ENQUEUE frame
    first_sequence: int | None = None
    lanes: set[int] = field(default_factory=set)


@dataclass(slots=True)
class OpenLease:
    session: str
    tasks: Sequences
    open: int


@dataclass(slots=True)
class Effects:
    """left: (lane, tasks) that are of another lane now. runs: (lane, keys, tasks), sorted by key, that became ready. pieces: tasks of one lease and lane that
    came back and go out again first, each by itself. computed: tasks that now wait to be pulled. lanes: whose
    account changed in number of tasks, so that a step of theirs may be due."""

    left: list[tuple[int, Sequences]] = field(default_factory=list)
    runs: list[tuple[int, npt.NDArray[np.uint64], Sequences]] = field(default_factory=list)
    pieces: list[tuple[int, Sequences]] = field(default_factory=list)
    computed: Sequences = field(default_factory=lambda: NOTHING)
    lanes: set[int] = field(default_factory=set)
    risen: Sequences = field(
        default_factory=lambda: NOTHING
    )  # dead tasks that are to be tried again


class State:
    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.index = TaskIndex()
        self.accounts = Accounts()
        self.recounter = Recounter(incarnation << SEQUENCE_BITS)
        self.lanes: list[Lane] = []
        self.refused: list[Lane] = []  # those with a `refused_by`
        self.submissions: list[SubmissionRecord] = []
        self.by_submission: dict[str, SubmissionRecord] = {}
        self.submission_tasks = np.zeros((STATES + 1, 16), np.int64)
        self.retired_tokens = np.zeros(16, np.int64)  # prompt tokens per submission
        self.output_tokens = np.zeros(16, np.int64)
        self.computed_padded_tokens = 0  # as engines reported it, over everything computed
        self.cold: dict[int, Uploaded] = {}  # segments in the cold tier, by epoch
        self.sessions: dict[str, int] = {}  # every name that ever held a lease
        self.leases: dict[int, OpenLease] = {}
        self.session_leases: dict[str, set[int]] = {}
        self.next_lease = 1
        self.reasons: dict[int, tuple[str, str]] = {}  # of tasks whose last attempt nobody reported
        self.engines: dict[str, int] = {}
        self.engine_ready = np.zeros(8, np.int64)
        self.lane_engine = Growing(np.int32)
        self.frames = 0
        self.lives: list[Life] = []  # the latest restarts
        self.lane_of: dict[LaneKey, int] = {}
        self.held_new = 0  # tokens that leased and doubtful tasks may generate
        self.vector_bytes: dict[str, int] = {}  # largest vector seen, by engine and sampling
        self.lane_beside = Growing(np.int64)  # bytes of an outcome beside its tokens, by lane
        self.requeues: dict[int, int] = {}  # how often, of tasks that are not retired
        self.suspects: dict[
            int, int
        ] = {}  # tasks that may have ended a worker: the piece each is in
        self.classes: dict[
            str, int
        ] = {}  # that found a task too large: the numbers in `refused_by`

    # -- applying facts

    def apply(self, fact: Fact, lsn: int, columns: BatchColumns | None = None) -> Effects:
        """`columns` spares decoding an Enqueued whose batch the caller has looked at already."""
        self.frames += 1
        effects = Effects()
        if isinstance(fact, Enqueued):
            self._enqueued(fact, lsn, columns, effects)
        elif isinstance(fact, Leased):
            self._lease(fact.lease_id, fact.session, fact.tasks, (READY,))
        elif isinstance(fact, Computed):
            self._computed(fact, lsn, effects)
        elif isinstance(fact, Settled):
            self._settled(fact)
        elif isinstance(fact, Returned):
            self._returned(fact, effects)
        elif isinstance(fact, Claimed):
            self._lease(fact.lease_id, fact.session, fact.tasks, (READY, IN_DOUBT))
        elif isinstance(fact, GivenUp):
            self._given_up(fact, effects)
        elif isinstance(fact, Requeued):
            self._requeued(fact, effects)
        elif isinstance(fact, SubmissionOpened):
            self._opened(fact)
        elif isinstance(fact, SubmissionClosed):
            self._closed(fact)
        elif isinstance(fact, Started):
            self._started(fact)
        elif isinstance(fact, LanesStepped):
            self._stepped(fact)
        elif isinstance(fact, Moved):
            self._moved(fact, lsn)
        elif isinstance(fact, MovedComputed):
            self._moved_computed(fact, lsn)
        elif isinstance(fact, Uploaded):
            self.cold[fact.epoch] = fact
        elif isinstance(fact, Dropped):
            self.cold = {at: up for at, up in self.cold.items() if up.last_lsn >= fact.below}
        return effects

    def _opened(self, fact: SubmissionOpened) -> None:
        record = SubmissionRecord(len(self.submissions), fact.header)
        self.submissions.append(record)
        self.by_submission[fact.header.submission_id] = record
        if len(self.submissions) > len(self.retired_tokens):
            self.submission_tasks = np.pad(
                self.submission_tasks, ((0, 0), (0, len(self.retired_tokens)))
            )
            self.retired_tokens = np.pad(self.retired_tokens, (0, len(self.retired_tokens)))
            self.output_tokens = np.pad(self.output_tokens, (0, len(self.output_tokens)))

    def _closed(self, fact: SubmissionClosed) -> None:
        record = self.by_submission[fact.submission_id]
        record.closed, record.abandoned = True, fact.abandoned
        for at in record.lanes:
            self.lanes[at].producers.discard(record.index)

    def _enqueued(
        self, fact: Enqueued, lsn: int, columns: BatchColumns | None, effects: Effects
    ) -> None:
        record = self.by_submission[fact.submission_id]
        columns = columns or BatchColumns.of(record.header, read_ipc(whole(fact.ipc)), fact.rule)
        if fact.base != self.index.count or len(columns.prompt) != fact.rows:
            raise BalanceBroken(
                f"an ENQUEUE of {fact.rows} tasks from sequence {fact.base} does not continue "
                f"an index of {self.index.count} tasks"
            )
        new = self.index.extend(fact.rows, lsn)
        tasks = np.arange(new.start, new.stop, dtype=np.int64)
        found, inverse = np.unique(columns.shape, return_inverse=True)
        lanes = np.array([self._feed(record, int(shape), fact.base) for shape in found], np.int32)[
            inverse
        ]
        index = self.index
        index.put("lane", new, lanes)
        index.put("submission", new, record.index)
        index.put("prompt", new, columns.prompt)
        index.put("new", new, np.minimum(columns.new, np.iinfo(np.int32).max))
        index.key[new] = columns.key
        for at in distinct(lanes).tolist() if columns.metadata else ():
            self._expect_metadata(self.lanes[at], columns.metadata)
        self.accounts.enter(lanes, self.task_ids(tasks), columns.prompt)
        add_counts(self.engine_ready, self.lane_engine.view[lanes], 1)
        self.submission_tasks[(0, READY + 1), record.index] += fact.rows
        record.rows += fact.rows
        record.tokens += int(columns.prompt.sum())
        record.batches.append(self.index.base.count - 1)
        if record.first_sequence is None:
            record.first_sequence = fact.base
        effects.runs += self.runs_of(tasks)
        self._require_balance(lanes)

    def by_lane(self, tasks: Sequences) -> list[tuple[int, Sequences]]:
        """`tasks` by lane, each in the order they came in."""
        lanes = self.index.lane[tasks]
        if (lane := only(lanes)) is not None:
            return [(lane, tasks)]
        if not len(tasks):
            return []
        order = np.argsort(lanes, kind="stable")  # a radix sort as long as lanes are 16 bits
        lanes, tasks = lanes[order], tasks[order]
        cuts = [0, *(np.flatnonzero(np.diff(lanes)) + 1).tolist(), len(tasks)]
        return [(int(lanes[a]), tasks[a:b]) for a, b in pairwise(cuts)]

    def runs_of(self, tasks: Sequences) -> list[tuple[int, npt.NDArray[np.uint64], Sequences]]:
        """`tasks` by lane, each sorted by key."""
        if not len(tasks):
            return []
        lanes, keys = self.index.lane[tasks], self.index.key[tasks]
        order = np.lexsort((keys, lanes))
        lanes, keys, tasks = lanes[order], keys[order], tasks[order]
        cuts = [0, *(np.flatnonzero(np.diff(lanes)) + 1).tolist(), len(tasks)]
        return [(int(lanes[a]), keys[a:b], tasks[a:b]) for a, b in pairwise(cuts)]

    def _feed(self, record: SubmissionRecord, shape: int, base: int) -> int:
        """The lane of `shape` for this submission, opened (again) if need be."""
        lane = self._lane_at(key_of(record.header, shape), record.header.sampling, base)
        lane.producers.add(record.index)
        record.lanes.add(lane.index)
        return lane.index

    def add_lane(self, lane: Lane) -> None:
        lane.order = PrefixOrder(self.index.keys_of)
        self.lane_beside.append(self._beside(lane))
        self.lanes.append(lane)
        if lane.key.refused_by:
            self.refused.append(lane)

    def _lane_at(self, key: LaneKey, sampling: Mapping[str, Any], opened_at: int = 0) -> Lane:
        """The lane of this key, about to be fed with new tasks from `opened_at` on, or with old ones."""
        at = self.lane_of.get(key)
        if at is None:
            at = self.lane_of[key] = len(self.lanes)
            engine = self.engines.setdefault(key.engine, len(self.engines))
            if engine == len(self.engine_ready):
                self.engine_ready = np.pad(self.engine_ready, (0, engine))
            self.lane_engine.append(engine)
            self.add_lane(Lane(at, key, dict(sampling), self.accounts))
            self.accounts.grow(len(self.lanes))
        lane = self.lanes[at]
        if lane.step is Step.RETIRED:
            lane.generation += 1
            lane.opened_at = opened_at
        lane.step = Step.ACTIVE
        return lane

    def _lease(
        self, lease_id: int, session: str, tasks: Sequences, allowed: tuple[int, ...]
    ) -> None:
        self._move(tasks, allowed, LEASED, "LEASE")
        self.index.put("lease", tasks, lease_id)
        self.index.put("holder", tasks, self.sessions.setdefault(session, len(self.sessions)))
        self.leases[lease_id] = OpenLease(session, tasks, len(tasks))
        self.session_leases.setdefault(session, set()).add(lease_id)
        self.next_lease = max(self.next_lease, lease_id + 1)

    def _computed(self, fact: Computed, lsn: int, effects: Effects) -> None:
        frame = self.index.done_frames.count
        self.index.done_frames.append(lsn)
        self.computed_padded_tokens += fact.padded_tokens
        if fact.vector_bytes:
            self._learn_vectors(fact.tasks, fact.vector_bytes)
        large = fact.verdicts == Verdict.TOO_LARGE
        again = fact.verdicts == Verdict.RETRY
        self._clear(fact.tasks)
        rows = np.flatnonzero(~(again | large))
        back, done = fact.tasks[again], fact.tasks[rows]
        self._end_lease(fact.tasks)
        self._move(done, (LEASED, IN_DOUBT, READY), COMPUTED, "COMPUTED")
        self.index.verdict[done] = fact.verdicts[rows]
        self.index.put("done", done, frame)
        self.index.put("done_row", done, rows)
        self.index.put("output", done, fact.output_tokens[rows])
        effects.computed = done
        if len(back):
            self._move(back, (LEASED, IN_DOUBT), READY, "COMPUTED")
            self.index.attempts[back] += 1
            effects.runs += self.runs_of(back)
        if fact.too_large_for:
            self._too_large(fact.too_large_for, fact.tasks[large], frame, large, effects)

    def _too_large(
        self,
        kind: str,
        tasks: Sequences,
        frame: int,
        large: npt.NDArray[np.bool_],
        effects: Effects,
    ) -> None:
        """Ready again, in the lane that this class is not served from. The refusal is kept as the outcome that
        the task dies of should nobody be left."""
        bit = 1 << self.classes.setdefault(kind, len(self.classes))
        index = self.index
        self._move(tasks, (LEASED, IN_DOUBT), READY, "COMPUTED")
        index.put("done", tasks, frame)
        index.put("done_row", tasks, np.flatnonzero(large))
        for at in distinct(index.lane[tasks]).tolist():
            old = self.lanes[at]
            mine = tasks[index.lane[tasks] == at]
            key = replace(old.key, refused_by=old.key.refused_by | bit)
            self._change_lane(mine, old, self._lane_at(key, old.sampling), effects)
        effects.runs += self.runs_of(tasks)

    def _change_lane(self, tasks: Sequences, old: Lane, new: Lane, effects: Effects) -> None:
        """Ready tasks of one lane belong to another one; both go on as long as they have tasks."""
        index = self.index
        self._expect_metadata(new, old.metadata_bytes)
        prompt = index.prompt[tasks].astype(np.int64)
        self.accounts.transfer(index.lane[tasks], self.task_ids(tasks), prompt, READY, new.index)
        index.put("lane", tasks, new.index)
        effects.lanes |= {old.index, new.index}
        effects.left.append((old.index, tasks))
        self._require_balance(np.array([old.index, new.index], np.int32))

    def _given_up(self, fact: GivenUp, effects: Effects) -> None:
        tasks = fact.tasks
        if fact.lost:
            over = self.index.state[tasks] == COMPUTED
            effects.risen, tasks = tasks[over], tasks[~over]
            self.index.put("done", fact.tasks, -1)
            self.reasons.update((int(task), (ROW_LOST, fact.reason)) for task in fact.tasks)
        self._move(tasks, (READY,), COMPUTED, "GIVE_UP")
        tasks = fact.tasks
        self.index.verdict[tasks] = Verdict.REFUSED
        self._clear(tasks)
        effects.computed = tasks

    def _requeued(self, fact: Requeued, effects: Effects) -> None:
        """Nothing of the earlier attempts counts any more: not their number, not who refused."""
        tasks, index = fact.tasks, self.index
        self._move(tasks, (DEAD,), READY, "REQUEUE")
        index.attempts[tasks] = index.verdict[tasks] = 0
        for name, value in (("output", 0), ("done", -1), ("holder", -1)):
            index.put(name, tasks, value)
        for task in tasks.tolist():
            self.requeues[task] = self.requeues.get(task, 0) + 1
        for at in distinct(index.lane[tasks]).tolist():
            old = self.lanes[at]
            new = self._lane_at(replace(old.key, refused_by=0), old.sampling)
            if new is not old:
                self._change_lane(tasks[index.lane[tasks] == at], old, new, effects)
            effects.lanes.add(at)
        effects.runs, effects.risen = self.runs_of(tasks), tasks

    def _returned(self, fact: Returned, effects: Effects) -> None:
        tasks, verdicts = fact.tasks, fact.verdicts
        leases = self.index.lease[tasks]
        self._end_lease(tasks)
        self.index.attempts[tasks[verdicts != Verdict.RETURNED]] += 1
        dead = verdicts == Verdict.FAILED
        self._move(tasks[dead], (LEASED, IN_DOUBT), COMPUTED, "EXPIRE or NACK")
        self.index.verdict[tasks[dead]] = Verdict.FAILED
        # what a class refused it for earlier is not what it died of
        self.index.put("done", tasks[dead], -1)
        code = "LeaseExpired" if fact.expired else "GivenBack"
        self.reasons.update((int(task), (code, fact.reason)) for task in tasks[dead])
        effects.computed = tasks[dead]
        self._clear(tasks[dead])
        back, leases = tasks[~dead], leases[~dead]
        self._move(back, (LEASED, IN_DOUBT), READY, "EXPIRE or NACK")
        in_doubt = leases < 0
        self._pieces(back[~in_doubt], leases[~in_doubt], fact.started, effects)
        doubtful = back[in_doubt]
        effects.pieces += self.suspect_pieces(doubtful)
        effects.runs += self.runs_of(self.unsuspected(doubtful))

    def _pieces(self, tasks: Sequences, leases: Sequences, halve: bool, effects: Effects) -> None:
        """By lease and lane, in prefix order. Work that had started may hold a task that kills its worker:
        halved each time, it is alone after log2(n) rounds and blamed only then."""
        lanes = self.index.lane[tasks]
        for lease, lane in sorted(set(zip(leases.tolist(), lanes.tolist(), strict=True))):
            piece = tasks[(leases == lease) & (lanes == lane)]
            piece = piece[np.argsort(self.index.key[piece], kind="stable")]
            middle = (len(piece) + 1) // 2 if halve else len(piece)
            parts = [part for part in (piece[:middle], piece[middle:]) if len(part)]
            effects.pieces += [(lane, part) for part in parts]
            for half, part in enumerate(parts if halve else ()):
                self.suspects.update(dict.fromkeys(part.tolist(), 2 * lease + half))

    def _clear(self, tasks: Sequences) -> None:
        """Somebody reported on these: they ended nothing, or are dead of it."""
        if self.suspects:
            for task in tasks.tolist():
                self.suspects.pop(task, None)

    def suspect_pieces(self, tasks: Sequences) -> list[tuple[int, Sequences]]:
        """Those of `tasks` under suspicion as (lane, piece), each as it is to go out: by itself."""
        pieces: dict[tuple[int, int], list[int]] = {}
        for task in tasks.tolist() if self.suspects else ():
            if task in self.suspects:
                lane = int(self.index.lane[task])
                pieces.setdefault((self.suspects[task], lane), []).append(task)
        return [(lane, np.array(pieces[at, lane], np.int64)) for at, lane in sorted(pieces)]

    def unsuspected(self, tasks: Sequences) -> Sequences:
        if not self.suspects:
            return tasks
        return tasks[~np.isin(tasks, np.fromiter(self.suspects, np.int64, len(self.suspects)))]

    def _end_lease(self, tasks: Sequences) -> None:
        leases = self.index.lease[tasks]
        self.index.put("lease", tasks, -1)
        for lease_id in distinct(leases).tolist():
            if lease_id < 0:
                continue
            lease = self.leases[lease_id]
            lease.open -= int(np.count_nonzero(leases == lease_id))
            if not lease.open:
                del self.leases[lease_id]
                self.session_leases[lease.session].discard(lease_id)

    def _settled(self, fact: Settled) -> None:
        tasks = fact.tasks
        self._move(tasks, (COMPUTED,), DEAD if fact.dead else RETIRED, "RETIRE or DEAD")
        for task in tasks if self.reasons and fact.dead else ():
            self.reasons.pop(int(task), None)
        if not fact.dead:
            for task in tasks.tolist() if self.requeues else ():
                self.requeues.pop(task, None)
            records = self.index.submission[tasks]
            add_sums(self.retired_tokens, records, self.index.prompt[tasks])
            add_sums(self.output_tokens, records, self.index.output[tasks])

    def _started(self, fact: Started) -> None:
        if fact.opens:
            life = Life(fact.opens, fact.opened_us, fact.after)
            self.lives = [*self.lives[1 - LIVES_KEPT :], life]
        leased = self.in_state(LEASED)
        self._move(leased, (LEASED,), IN_DOUBT, "STARTED")
        self.index.put("lease", leased, -1)
        self.leases.clear()
        self.session_leases.clear()

    def _stepped(self, fact: LanesStepped) -> None:
        for at, generation, step, retired, dead in fact.steps.tolist():
            lane, ledger = self.lanes[at], self.accounts.ledger(at)
            closing = (lane.generation, ledger.retired.tasks, ledger.dead.tasks)
            if closing != (generation, retired, dead):
                raise BalanceBroken(
                    f"lane {lane.name} steps with (generation, retired, dead) {closing}, "
                    f"the log says {(generation, retired, dead)}"
                )
            lane.step = Step(step)

    def _moved(self, fact: Moved, lsn: int) -> None:
        at = np.searchsorted(self.index.base.view, fact.tasks, side="right") - 1
        if not np.isin(at, fact.batches).all():
            raise BalanceBroken("a MOVE fact holds tasks of batches that it does not name")
        self.index.move(fact.batches, fact.tasks, lsn)

    def _moved_computed(self, fact: MovedComputed, lsn: int) -> None:
        index, tasks = self.index, fact.tasks
        settled = (index.state[tasks] == RETIRED) | (index.state[tasks] == DEAD)
        if settled.any() or (index.done[tasks] < 0).any():
            raise BalanceBroken("a MOVE_COMPUTED fact names a task without an outcome to land")
        index.put("done", tasks, index.done_frames.count)
        index.put("done_row", tasks, np.arange(len(tasks)))
        index.done_frames.append(lsn)

    # -- moving tasks

    def _move(self, tasks: Sequences, allowed: tuple[int, ...], target: int, fact: str) -> None:
        if not len(tasks):
            return
        index = self.index
        states = index.state[tasks]
        sources = distinct(states).tolist()
        for source in sources:
            if source not in allowed:
                at = int(tasks[int(np.argmax(states == source))])
                raise BalanceBroken(
                    f"a {fact} fact names task sequence {at}, which is {STATE_NAMES[source]}"
                )
        if has_repeats(tasks):
            raise BalanceBroken(f"a {fact} fact names a task twice")
        for source in sources:
            mine = tasks if len(sources) == 1 else tasks[states == source]
            self._move_uniform(mine, source, target)
        index.state[tasks] = target

    def _learn_vectors(self, tasks: Sequences, size: int) -> None:
        """Tasks like these were answered with vectors of so many bytes."""
        for at in distinct(self.index.lane[tasks]).tolist():
            product = self.lanes[at].key.product
            if size > self.vector_bytes.get(product, 0):
                self.vector_bytes[product] = size
                for lane in self.lanes:
                    if lane.key.product == product:
                        self.lane_beside.view[lane.index] = self._beside(lane)

    def _expect_metadata(self, lane: Lane, size: int) -> None:
        if size > lane.metadata_bytes:
            lane.metadata_bytes = size
            self.lane_beside.view[lane.index] = self._beside(lane)

    def _beside(self, lane: Lane) -> int:
        """Bytes of vector and metadata of one outcome, at most. A single pass may answer with a vector."""
        unknown = 0 if lane.sampling.get("kind") == "generate" else VECTOR_UNKNOWN_BYTES
        return lane.metadata_bytes + self.vector_bytes.get(lane.key.product, unknown)

    @property
    def reserved_bytes(self) -> int:
        """What the outcomes of all that is leased or in doubt may take in the log."""
        tasks = self.accounts.tasks[:, : len(self.lanes)]
        held = tasks[LEASED + 1] + tasks[IN_DOUBT + 1]
        fixed = int(held.sum()) * OUTCOME_BYTES + self.held_new * TOKEN_BYTES
        return fixed + int(held @ self.lane_beside.view)

    @property
    def promised_bytes(self) -> int:
        """The same, with what it takes to retire or bury them and what is computed."""
        tasks = self.accounts.tasks[:, : len(self.lanes)]
        held = tasks[LEASED + 1] + tasks[IN_DOUBT + 1]
        each, beside = OUTCOME_BYTES + SETTLE_BYTES, int(held @ self.lane_beside.view)
        settle = int(tasks[COMPUTED + 1].sum()) * SETTLE_BYTES
        return int(held.sum()) * each + self.held_new * TOKEN_BYTES + beside + settle

    @property
    def under_way(self) -> Sequences:
        """Tasks that are leased or in doubt."""
        return np.flatnonzero(np.isin(self.index.state[: self.index.count], HELD))

    def _move_uniform(self, tasks: Sequences, source: int, target: int) -> None:
        index = self.index
        lanes, counts, *_ = self.accounts.move(
            index.lane[tasks], self.task_ids(tasks), index.prompt[tasks], source, target
        )
        records = index.submission[tasks]
        one = only(records)
        for row, change in ((source + 1, -1), (target + 1, 1)):
            if one is None:
                add_counts(self.submission_tasks[row], records, change)
            else:
                self.submission_tasks[row, one] += change * len(tasks)
        if (source in HELD) is not (target in HELD):
            new = int(index.new[tasks].sum(dtype=np.int64))
            self.held_new += new if target in HELD else -new
        if READY in (source, target):
            sign, engines = (1 if target == READY else -1), self.lane_engine.view[lanes]
            if isinstance(lanes, int):
                self.engine_ready[engines] += sign * len(tasks)
            else:
                np.add.at(self.engine_ready, engines, sign * counts)
        self._require_balance(lanes)

    def _require_balance(self, lanes: npt.NDArray[np.int32] | int) -> None:
        for at in self.accounts.unbalanced(lanes):
            self.accounts.ledger(at).require_balanced(f"lane {self.lanes[at].name}")

    # -- questions

    def task_ids(self, tasks: Sequences) -> Sequences:
        return tasks + np.int64(self.incarnation << SEQUENCE_BITS)

    def refused_lanes(self, engine: str) -> list[Lane]:
        """Lanes of tasks that some class of the engine's consumers found too large."""
        return [lane for lane in self.refused if lane.key.engine == engine]

    def in_state(self, state: int) -> Sequences:
        return np.flatnonzero(self.index.state[: self.index.count] == state)

    def served_by(self, tasks: Sequences, engine: str, tenant: str | None) -> Sequences:
        """Those of `tasks` that are for this engine, and of this tenant; of all tenants for None."""
        lanes = self.index.lane[tasks]
        keys = {at: self.lanes[at].key for at in distinct(lanes).tolist()}
        its = [
            at for at, key in keys.items() if key.engine == engine and tenant in (None, key.tenant)
        ]
        return tasks if len(its) == len(keys) else tasks[np.isin(lanes, its)]

    def total(self) -> Ledger:
        return self.accounts.total()

    def audit(self) -> list[str]:
        """Differences between the accounts and a recount over the state of every task."""
        fresh = self.recounter.recount(self.index, len(self.lanes))
        return self.accounts.differences(fresh, [lane.name for lane in self.lanes])

    def differences(self, other: State) -> list[str]:
        """Everything in which this state is not the one that `other` (from the log alone) is."""
        found = self.index.differences(other.index)
        names = [lane.name for lane in max(self.lanes, other.lanes, key=len)]
        found += self.accounts.differences(other.accounts, names)
        for what in PLAIN:
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                found.append(f"{what} are {mine}, the log gives {theirs}")
        mine_open = {key: (lease.session, lease.open) for key, lease in self.leases.items()}
        if mine_open != {key: (lease.session, lease.open) for key, lease in other.leases.items()}:
            found.append("open leases differ from those of the log")
        found += _unequal_records(self.submissions, other.submissions)
        for lane, twin in zip(self.lanes, other.lanes, strict=False):
            mine, theirs = (
                (x.key, x.generation, x.step, x.opened_at, x.metadata_bytes) for x in (lane, twin)
            )
            if mine != theirs:
                found.append(
                    f"lane {lane.name} is at {lane.step.name}, the log gives {twin.step.name}"
                )
        return found


def _unequal_records(mine: list[SubmissionRecord], theirs: list[SubmissionRecord]) -> list[str]:
    if len(mine) != len(theirs):
        return [f"there are {len(mine)} submissions, the log gives {len(theirs)}"]
    return [
        f"submission {a.header.submission_id[:12]} differs from that of the log"
        for a, b in zip(mine, theirs, strict=True)
        if a != b
    ]
