"""Those around a simulated broker: producers, workers and completion, as they behave over a bad network.

Each sends one message at a time of a kind, retries what was not answered, and forgets everything when killed,
as its real counterpart does: a producer starts again with its first submission, a worker comes back under a new
session, completion pulls again. They tell the auditor what they send and hear, never what they think.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.broker.owner import Owner, TaskUpload
from fabric_pipelines.broker.replies import AttachReply, ComputedReply, SubmissionState
from fabric_pipelines.broker.state import BatchColumns
from fabric_pipelines.errors import FabricError, NotAttached
from fabric_pipelines.records.arrow import to_ipc
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.records.completion import STATUSES, completion_batch
from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.records.lease import Lease
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.records.task import task_batch, token_counts
from fabric_pipelines.testing.auditor import Auditor

Rows = npt.NDArray[np.int64]
ENGINE = "simulated@engine"
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"kind": "generate", "temperature": 0.0, "top_k": 1, "seed": 0},
    {"kind": "embed", "pooling": "mean", "normalise": True},
)
PROFILES = (Profile(256, 16_384, 0, 16_384), Profile(64, 2048, 8192, 2048))
FAMILIES, HEAD = 64, 32
FAILED, REFUSED = 0.01, 0.004
TOKENS_PER_S = 60_000
LANDED = Confirmation("postgres", {"cluster": "c", "xid": 1, "table": "fabric.generate"})
BURIED = Confirmation("dead_letter", {"cluster": "c", "xid": 2, "table": "fabric.dead_letters"})


class Terms(Protocol):
    """What the actors need to know of the plan."""

    @property
    def seed(self) -> int: ...
    @property
    def upload_rows(self) -> int: ...
    @property
    def submission_tasks(self) -> int: ...
    @property
    def lease_s(self) -> float: ...


class Surroundings(Protocol):
    """The world, as an actor sees it."""

    now_s: float
    auditor: Auditor
    draw: np.random.Generator

    @property
    def plan(self) -> Terms: ...
    def after(self, seconds: float, act: Callable[[], None]) -> None: ...
    def send(
        self,
        actor: Actor,
        act: Callable[[Owner], Any],
        then: Callable[[Any], None],
        fail: Callable[[FabricError | None], None],
        *,
        durable: bool = True,
    ) -> None: ...


class Actor(ABC):
    def __init__(self, world: Surroundings, name: str) -> None:
        self.world, self.name, self.life = world, name, 0

    @abstractmethod
    def start(self) -> None: ...

    def kill(self, away_s: float) -> None:
        """Whatever was on its way to this life reaches nobody."""
        self.life += 1
        self.later(away_s, self.start)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        life = self.life
        self.world.after(seconds, lambda: act() if self.life == life else None)


# -- producers


class Producer(Actor):
    """Sends its share of rows as submissions, one after the other; the next when the last has ended."""

    def __init__(self, world: Surroundings, name: str, rows: Rows) -> None:
        super().__init__(world, name)
        size = world.plan.submission_tasks
        self._parts = [rows[at : at + size] for at in range(0, len(rows), size)]
        self._heads = np.random.default_rng(7).integers(0, 30_000, (FAMILIES, HEAD), np.uint32)
        self._at = 0
        self._made = -1  # which submission `_batches` and `_header` are of
        self._batches: list[pa.RecordBatch] = []
        self._header: Submission | None = None

    @property
    def finished(self) -> bool:
        return self._at == len(self._parts)

    def start(self) -> None:
        self._at = 0
        self._open()

    def _open(self) -> None:
        if not self.finished:
            header = self._make()
            self.world.send(
                self, lambda owner: owner.open_submission(header), self._opened, self._again
            )

    def _again(self, _: FabricError | None) -> None:
        self.later(1.0, self._open)

    def _opened(self, state: SubmissionState) -> None:
        if state.finished:
            self._at += 1
            self._open()
        elif state.closed:
            self.later(4.0, self._ask)
        elif state.enqueued < state.tasks:
            self._upload(state.enqueued)
        else:
            self.world.send(
                self,
                lambda owner: owner.close_submission(state.submission_id),
                self._opened,
                self._again,
            )

    def _ask(self) -> None:
        submission_id = self._make().submission_id
        self.world.send(
            self, lambda owner: owner.submission(submission_id), self._opened, self._again
        )

    def _upload(self, first: int) -> None:
        header, batch = self._make(), self._batches[first // self.world.plan.upload_rows]
        rows = batch.column("source_row").to_numpy()
        lengths = token_counts(batch)
        tokens = batch.column("tokens").flatten().to_numpy()
        self.world.auditor.submitted(rows, lengths, tokens[np.cumsum(lengths) - lengths])
        upload = TaskUpload(header.submission_id, first, batch, BatchColumns.of(header, batch))

        def then(state: SubmissionState) -> None:
            self.world.auditor.enqueued(rows)
            self._opened(state)

        self.world.send(self, lambda owner: owner.enqueue(upload), then, self._again)

    def _make(self) -> Submission:
        """The submission at hand: always the same content for the same rows and seed."""
        if self._made != self._at:
            rows, step = self._parts[self._at], self.world.plan.upload_rows
            cuts = [rows[at : at + step] for at in range(0, len(rows), step)]
            self._batches = [self._batch(cut) for cut in cuts]
            tasks, tokens, fingerprint = fingerprint_of(self._batches)
            self._header = Submission(
                submission_id=f"{int(rows[0]):064x}",
                function="generate",
                engine=ENGINE,
                sampling=SAMPLINGS[self._at % len(SAMPLINGS)],
                vocab_size=30_000,
                tasks=tasks,
                tokens=tokens,
                fingerprint=fingerprint,
                tenant=self.name,
            )
            self._made = self._at
        assert self._header is not None
        return self._header

    def _batch(self, rows: Rows) -> pa.RecordBatch:
        draw = np.random.default_rng((self.world.plan.seed, int(rows[0])))
        lengths = np.clip(draw.lognormal(3.0, 0.6, len(rows)), 1, 400).astype(np.int64)
        ends = np.cumsum(lengths)
        tokens = draw.integers(0, 30_000, int(ends[-1]), np.uint32)
        family = draw.integers(0, FAMILIES, len(rows))
        for at in range(HEAD):
            long = lengths > at
            tokens[(ends - lengths)[long] + at] = self._heads[family[long], at]
        lists = pa.ListArray.from_arrays(np.concatenate([[0], ends]).astype(np.int32), tokens)
        caps = draw.integers(1, 64, len(rows)).tolist()
        return task_batch(lists, max_new_tokens=caps, source_rows=rows.tolist())


# -- workers


@dataclass(slots=True)
class Piece:
    """Tasks of one lease, and once they ran, their outcomes."""

    ids: Rows
    rows: Rows
    lengths: Rows
    attempts: npt.NDArray[np.uint8]
    report: pa.RecordBatch | None = None
    failed: npt.NDArray[np.bool_] | None = None

    def kept(self, lost: Rows) -> Piece:
        keep = ~np.isin(self.ids, lost)
        return Piece(self.ids[keep], self.rows[keep], self.lengths[keep], self.attempts[keep])


class Worker(Actor):
    """Leases ahead, runs one piece after the other, reports, one request at a time but for renewals; when an
    answer is missing it attaches again with all it holds, as the worker's loop does."""

    def __init__(self, world: Surroundings, name: str, number: int) -> None:
        super().__init__(world, name)
        self._profile = PROFILES[number % len(PROFILES)]
        self._place = name if number % 2 else ""  # the others' leases run out when they are killed

    def start(self) -> None:
        self._session = f"{self.name}.{self.life}"
        self._call = self.life << 32  # as the time at which a process began
        self._attached = self._busy = self._attaching = False
        self._waiting: deque[Piece] = deque()
        self._running: Piece | None = None
        self._outbox: deque[Piece] = deque()
        self._attach()
        self.later(self.world.plan.lease_s / 4, self._renew)

    def _held(self) -> list[Piece]:
        return [*self._waiting, *([self._running] if self._running else []), *self._outbox]

    def _attach(self) -> None:
        if self._attaching or self._busy:
            return
        self._attached, self._attaching = False, True
        nothing = np.zeros(0, np.int64)
        held = self._held()
        ids = np.concatenate([nothing, *(piece.ids for piece in held)]).tolist()
        rows = np.concatenate([nothing, *(piece.rows for piece in held)])
        self.world.auditor.attaching(self._session, rows, self._place)
        self._call += 1
        name, profile, call, place = self._session, self._profile, self._call, self._place
        self.world.send(
            self,
            lambda owner: owner.attach(name, ENGINE, "f", name, profile, ids, call, place=place),
            self._is_attached,
            self._not_attached,
        )

    def _is_attached(self, reply: AttachReply) -> None:
        self.world.auditor.heard(self._session, self.world.now_s)
        self._attached, self._attaching = True, False
        self._call += 1
        lost = np.array(reply.lost, np.int64)
        pieces = [piece.kept(lost) for piece in self._waiting]
        self._waiting = deque(piece for piece in pieces if len(piece.ids))
        self._deliver()
        self._lease()

    def _not_attached(self, _: FabricError | None) -> None:
        self._attaching = False
        self.later(0.5, self._attach)

    def _lease(self) -> None:
        tokens = sum(int(piece.lengths.sum()) for piece in self._waiting)
        if self._busy or not self._attached or tokens >= self._profile.window_tokens:
            return
        self._busy = True
        profile, name, call = self._profile, self._session, self._call
        budget = Budget(
            profile.max_batch_size, profile.max_num_tokens, profile.kv_cache_tokens or None
        )
        self.world.send(
            self,
            lambda owner: owner.lease(name, budget, call),
            self._leased,
            self._unanswered,
            durable=False,
        )

    def _leased(self, answer: tuple[Lease | None, str]) -> None:
        self._busy = False
        self._call += 1
        lease, _ = answer
        if lease is None:
            self.later(0.5, self._lease)
            self._deliver()
            return
        tasks = lease.tasks
        ids, rows = tasks.column("task_id").to_numpy(), tasks.column("source_row").to_numpy()
        fresh = ~np.isin(ids, np.concatenate([[-1], *(piece.ids for piece in self._held())]))
        given_s = lease.deadline_us / 1e6 - self.world.plan.lease_s
        self.world.auditor.leased(self._session, tasks, self.world.now_s, given_s)
        if fresh.any():
            attempts = tasks.column("attempts").to_numpy()[fresh]
            piece = Piece(ids[fresh], rows[fresh], token_counts(tasks)[fresh], attempts)
            self._waiting.append(piece)
        self._run()
        self._deliver()
        self._lease()

    def _unanswered(self, _: FabricError | None) -> None:
        self._busy = False
        self._attach()

    def _run(self) -> None:
        if self._running is None and self._waiting:
            self._running = piece = self._waiting.popleft()
            jitter = float(self.world.draw.lognormal(0, 0.3))
            self.later(0.02 + piece.lengths.sum() / TOKENS_PER_S * jitter, self._ran)

    def _ran(self) -> None:
        piece, self._running = self._running, None
        assert piece is not None
        chance = self.world.draw.random(len(piece.ids))
        codes = np.where(chance < FAILED, 2, np.where(chance < FAILED + REFUSED, 1, 0))
        piece.failed = codes == STATUSES.index("failed")
        piece.report = _report(piece, codes)
        self._outbox.append(piece)
        self._run()
        self._deliver()
        self._lease()

    def _deliver(self) -> None:
        if self._busy or not self._attached or not self._outbox:
            return
        self._busy = True
        piece, name = self._outbox[0], self._session
        assert piece.report is not None
        assert piece.failed is not None
        batch, ipc = piece.report, to_ipc(piece.report)
        self.world.auditor.reporting(piece.rows, piece.failed)
        self.world.send(
            self, lambda owner: owner.computed(name, batch, ipc), self._delivered, self._unanswered
        )

    def _delivered(self, reply: ComputedReply) -> None:
        self._busy = False
        piece = self._outbox.popleft()
        assert piece.failed is not None
        assert not reply.unknown
        self.world.auditor.reported(piece.rows, piece.failed, reply.late)
        self._deliver()
        self._lease()

    def _renew(self) -> None:
        self.later(self.world.plan.lease_s / 4, self._renew)
        if self._attached:
            name = self._session
            self.world.send(
                self, lambda owner: owner.renew(name), self._renewed, self._unrenewed, durable=False
            )

    def _renewed(self, _: Any) -> None:
        self.world.auditor.heard(self._session, self.world.now_s)

    def _unrenewed(self, refusal: FabricError | None) -> None:
        if isinstance(refusal, NotAttached):
            self._attach()


def _report(piece: Piece, codes: npt.NDArray[np.int64]) -> pa.RecordBatch:
    count = len(codes)

    def same(value: Any, kind: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, kind), count)

    zero, text = same(0, pa.int64()), pa.string()
    offsets = np.arange(count + 1, dtype=np.int32) * 2
    return completion_batch(
        {
            "task_id": pa.array(piece.ids),
            "source_row": pa.array(piece.rows),
            "status": pa.array(STATUSES).take(pa.array(codes)),
            "finish_reason": same("stop", text),
            "output": pa.ListArray.from_arrays(offsets, np.zeros(2 * count, np.uint32)),
            "prompt_tokens": pa.array(piece.lengths.astype(np.uint32)),
            "padded_tokens": same(0, pa.uint32()),
            "attempts": pa.array(piece.attempts),
            "engine": same(ENGINE, text),
            "engine_fingerprint": same("f", text),
            "t_start_us": zero,
            "t_end_us": zero,
            "metadata": same(b"", pa.binary()),
        }
    )


# -- completion


class Completion(Actor):
    """Pulls, lands, settles; the sink keeps what landed through every kill."""

    def start(self) -> None:
        self._session = f"{self.name}.{self.life}"
        self._pull()

    def _pull(self) -> None:
        name = self._session
        self.world.send(self, lambda owner: owner.pull(name, 2000), self._pulled, self._unpulled)

    def _unpulled(self, _: FabricError | None) -> None:
        name = self._session
        self.world.send(
            self,
            lambda owner: owner.release_pulled(name),
            lambda _: self._pull(),
            lambda _: self.later(0.5, self._pull),
        )

    def _pulled(self, batch: pa.RecordBatch | None) -> None:
        if batch is None:
            self.later(0.3, self._pull)
            return
        rows, ids = (batch.column(name).to_numpy() for name in ("source_row", "task_id"))
        dead = pc.not_equal(batch.column("status"), "ok").to_numpy(zero_copy_only=False)
        self.world.auditor.pulled(rows, ids)
        self.later(float(self.world.draw.uniform(0.01, 0.1)), lambda: self._land(rows, ids, dead))

    def _land(self, rows: Rows, ids: Rows, dead: npt.NDArray[np.bool_]) -> None:
        self.world.auditor.landing(rows, dead)
        self.world.auditor.settling(rows)
        self._settle([(ids[~dead], False), (ids[dead], True)])

    def _settle(self, parts: list[tuple[Rows, bool]]) -> None:
        while parts and not len(parts[0][0]):
            parts = parts[1:]
        if not parts:
            self._pull()
            return
        (ids, dead), rest = parts[0], parts[1:]
        proof = BURIED if dead else LANDED

        def settled(count: int) -> None:
            self.world.auditor.settled(count)
            self._settle(rest)

        self.world.send(
            self,
            lambda owner: owner.settle(ids, proof, dead=dead),
            settled,
            lambda _: self.later(0.5, lambda: self._settle(parts)),
        )
