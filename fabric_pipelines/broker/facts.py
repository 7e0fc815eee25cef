"""Facts: all that the broker ever writes down. State is what follows from them in order, nothing more.

A fact names tasks by sequence number (the low bits of their ids); the incarnation is the journal's. Every
decision that depends on a setting or on the time is inside the fact, so a replay under other settings gives
the same state. Facts are applied by `core.Core.apply` and by nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.envelope import Part, Piece, as_part, pack, unpack
from fabric_pipelines.errors import CorruptionFound, SchemaError, UsageError
from fabric_pipelines.records.submission import Submission

Sequences = npt.NDArray[np.int64]
Bytes8 = npt.NDArray[np.uint8]


class Kind(IntEnum):
    """Frame kinds in the journal. Numbers are for ever (FORMAT.md, "Facts")."""

    SUBMISSION = 1
    ENQUEUE = 2
    SUBMISSION_CLOSED = 3
    LEASE = 4
    COMPUTED = 5
    NACK = 6
    EXPIRE = 7
    CLAIM = 8
    RETIRE = 9
    DEAD = 10
    STARTED = 11
    LANES = 12
    CHECKPOINT = 13
    DROP = 14
    MOVE = 15
    MOVE_COMPUTED = 16
    GIVE_UP = 17
    UPLOADED = 18
    REQUEUE = 19


class Verdict(IntEnum):
    """What a report about a leased task means for it."""

    NONE = 0
    OK = 1
    REFUSED = 2  # the engine will never take it: terminal, lands as a dead letter
    FAILED = 3  # the last attempt failed: terminal, lands as a dead letter
    RETRY = 4  # an attempt failed, another one is left: ready again
    RETURNED = 5  # came back without an attempt being counted: ready again
    TOO_LARGE = (
        6  # for this class of consumers: ready again, in a lane that the others are served from
    )


@dataclass(frozen=True, slots=True)
class SubmissionOpened:
    header: Submission

    def encode(self) -> list[Piece]:
        return pack({"header": self.header.to_json()})


@dataclass(frozen=True, slots=True)
class Enqueued:
    """One batch of a submission; `ipc` is the task batch (Arrow IPC stream), its rows get the sequence
    numbers from `base` on, lanes and keys by `rule`."""

    submission_id: str
    batch: int
    first_row: int
    base: int
    rows: int
    ipc: Part
    rule: int = 1  # lanes.RULE of the broker that took it

    def encode(self) -> list[Piece]:
        head = {
            "submission_id": self.submission_id,
            "batch": self.batch,
            "first_row": self.first_row,
            "base": self.base,
            "rows": self.rows,
            "rule": self.rule,
        }
        return pack(head, [self.ipc])


@dataclass(frozen=True, slots=True)
class SubmissionClosed:
    """Nothing more comes of a submission. `abandoned`: somebody gave it up before it was what it says."""

    submission_id: str
    abandoned: bool = False

    def encode(self) -> list[Piece]:
        given_up = {"abandoned": True} if self.abandoned else {}
        return pack({"submission_id": self.submission_id, **given_up})


@dataclass(frozen=True, slots=True)
class Leased:
    """`tasks` in the order they were handed out; all of them in the shape of `lane`, though shorter ones of
    draining lanes may be among them."""

    lease_id: int
    session: str
    lane: int
    tasks: Sequences

    def encode(self) -> list[Piece]:
        head = {"lease_id": self.lease_id, "session": self.session, "lane": self.lane}
        return pack(head, [as_part(self.tasks)])


@dataclass(frozen=True, slots=True)
class Claimed:
    """A session that came back still holds `tasks`: they are leased to it, not run again."""

    lease_id: int
    session: str
    tasks: Sequences

    def encode(self) -> list[Piece]:
        return pack({"lease_id": self.lease_id, "session": self.session}, [as_part(self.tasks)])


@dataclass(frozen=True, slots=True)
class Computed:
    """Outcome per task: row i of `ipc` (a completion batch) belongs to tasks[i]. `too_large_for`: the consumer class
    that found some of them too large; empty if there are none. `vector_bytes`: the largest vector among them."""

    session: str
    tasks: Sequences
    verdicts: Bytes8
    output_tokens: npt.NDArray[np.int32]
    padded_tokens: int
    ipc: Part
    too_large_for: str = ""
    vector_bytes: int = 0

    def encode(self) -> list[Piece]:
        head: dict[str, Any] = {"session": self.session, "padded_tokens": self.padded_tokens}
        if self.too_large_for:
            head["too_large_for"] = self.too_large_for
        if self.vector_bytes:
            head["vector_bytes"] = self.vector_bytes
        return pack(
            head,
            [as_part(self.tasks), as_part(self.verdicts), as_part(self.output_tokens), self.ipc],
        )


@dataclass(frozen=True, slots=True)
class Returned:
    """Tasks that left their lease without a result, and why. `verdicts` are RETURNED, RETRY or FAILED.
    `expired` tells a lease that ran out from one that was given back, `started` that its work may be to blame."""

    session: str
    reason: str
    expired: bool
    started: bool
    tasks: Sequences
    verdicts: Bytes8

    @classmethod
    def of(
        cls,
        name: str,
        reason: str,
        tasks: Sequences,
        verdicts: Bytes8 | None = None,
        *,
        expired: bool = False,
    ) -> Returned:
        """`verdicts` are given for work that had started; without them nothing is blamed."""
        started = verdicts is not None
        if verdicts is None:
            verdicts = np.full(len(tasks), Verdict.RETURNED, np.uint8)
        return cls(name, reason[:256], expired, started, tasks, verdicts)

    def encode(self) -> list[Piece]:
        head = {"session": self.session, "reason": self.reason, "started": self.started}
        return pack(head, [as_part(self.tasks), as_part(self.verdicts)])


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Ready tasks that every known class of consumers found too large: they die of the last refusal. `lost`: ready tasks
    whose row cannot be read any more, and computed ones whose outcome cannot: they die of `reason`."""

    reason: str
    tasks: Sequences
    lost: bool = False

    def encode(self) -> list[Piece]:
        lost = {"lost": True} if self.lost else {}
        return pack({"reason": self.reason, **lost}, [as_part(self.tasks)])


@dataclass(frozen=True, slots=True)
class Requeued:
    """Dead tasks that somebody wants tried again, as if they had just arrived; `reason` is that person's."""

    reason: str
    tasks: Sequences

    def encode(self) -> list[Piece]:
        return pack({"reason": self.reason}, [as_part(self.tasks)])


@dataclass(frozen=True, slots=True)
class Settled:
    """Retired (`dead` False) or dead, with the sink's confirmation."""

    dead: bool
    tasks: Sequences
    confirmation_kind: str
    proof: Mapping[str, Any]

    def encode(self) -> list[Piece]:
        head = {"confirmation": self.confirmation_kind, "proof": dict(self.proof)}
        return pack(head, [as_part(self.tasks)])


@dataclass(frozen=True, slots=True)
class Started:
    """A broker opened the journal: whatever was leased is in doubt from here on. `opens`, `opened_us`, `after`: its
    `journal.Life`, with `opens` 0 in facts from before they said so."""

    version: str
    opens: int = 0
    opened_us: int = 0
    after: int = 0

    def encode(self) -> list[Piece]:
        life = {"opens": self.opens, "opened_us": self.opened_us, "after": self.after}
        return pack({"version": self.version, **(life if self.opens else {})})


@dataclass(frozen=True, slots=True)
class CheckpointTaken:
    """The file of the checkpoint over everything up to `lsn` is durable; `digest` is the sha256 of its head."""

    lsn: int
    digest: str
    size: int

    def encode(self) -> list[Piece]:
        return pack({"lsn": self.lsn, "digest": self.digest, "size": self.size})


@dataclass(frozen=True, slots=True)
class Dropped:
    """Frames below `below` are given up: from here on the checkpoint over `base` stands for them, and is no
    longer a cache."""

    below: int
    base: int
    digest: str

    def encode(self) -> list[Piece]:
        return pack({"below": self.below, "base": self.base, "digest": self.digest})


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The sealed segment of that epoch is in the cold tier: an object of `size` bytes with that CRC32C was read
    back. Its local file may go once this fact is durable."""

    epoch: int
    first_lsn: int
    last_lsn: int
    size: int
    crc32c: int

    def encode(self) -> list[Piece]:
        return pack(
            {
                "epoch": self.epoch,
                "first_lsn": self.first_lsn,
                "last_lsn": self.last_lsn,
                "size": self.size,
                "crc32c": self.crc32c,
            }
        )


@dataclass(frozen=True, slots=True)
class Moved:
    """Live rows of old ENQUEUE batches (`batches`: their ordinals), copied forward: row i of `ipc` is tasks[i],
    ascending. All that still lives of those batches is here."""

    tasks: Sequences
    batches: Sequences
    ipc: Part

    def encode(self) -> list[Piece]:
        return pack({}, [as_part(runs_of(self.tasks)), as_part(self.batches), self.ipc])


@dataclass(frozen=True, slots=True)
class MovedComputed:
    """Outcomes that are not landed yet, copied forward: row i of `ipc` belongs to tasks[i]."""

    tasks: Sequences
    ipc: Part

    def encode(self) -> list[Piece]:
        return pack({}, [as_part(self.tasks), self.ipc])


def runs_of(tasks: Sequences) -> npt.NDArray[np.int64]:
    """Ascending numbers as (first, count) rows, int64 [runs, 2]."""
    starts = np.flatnonzero(np.diff(tasks, prepend=tasks[0] - 2) != 1)
    counts = np.diff(starts, append=len(tasks))
    return np.stack([tasks[starts], counts], axis=1)


def numbers_of(runs: npt.NDArray[np.int64]) -> Sequences:
    """Inverse of `runs_of`."""
    first, counts = runs[:, 0], runs[:, 1]
    before = np.cumsum(counts) - counts
    numbers: Sequences = np.repeat(first - before, counts)
    return numbers + np.arange(len(numbers), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LanesStepped:
    """Life cycle of lanes: rows of (lane, generation, step, retired tasks, dead tasks), int64 [n, 5]. That a
    lane opened follows from its first ENQUEUE."""

    steps: npt.NDArray[np.int64]

    def encode(self) -> list[Piece]:
        return pack({}, [as_part(self.steps)])


Fact = (
    SubmissionOpened
    | Enqueued
    | SubmissionClosed
    | Leased
    | Claimed
    | Computed
    | Returned
    | GivenUp
    | Requeued
    | Settled
    | Started
    | LanesStepped
    | CheckpointTaken
    | Dropped
    | Moved
    | MovedComputed
    | Uploaded
)


def kind_of(fact: Fact) -> Kind:
    if isinstance(fact, Returned):
        return Kind.EXPIRE if fact.expired else Kind.NACK
    if isinstance(fact, Settled):
        return Kind.DEAD if fact.dead else Kind.RETIRE
    return _KINDS[type(fact)]


def rows_of(fact: Fact) -> int:
    """How many tasks a fact is about (the row count in its frame)."""
    if isinstance(fact, Enqueued):
        return fact.rows
    if isinstance(fact, LanesStepped):
        return len(fact.steps)
    return len(getattr(fact, "tasks", ()))


def decode(kind: int, payload: Any, where: str) -> Fact:
    """The fact in a journal frame; the bytes passed their CRC, so anything odd is corruption (or a journal
    of a newer broker) and is refused by name."""
    try:
        head, parts = unpack(payload)
        return _DECODERS[Kind(kind)](head, parts)
    except (SchemaError, UsageError, KeyError, ValueError, IndexError, TypeError) as fault:
        raise CorruptionFound(
            f"{where} holds a fact of kind {kind} that this broker cannot read ({fault}): "
            "keep the journal folder and use the broker version that wrote it"
        ) from fault


def _sequences(part: memoryview) -> Sequences:
    return np.frombuffer(part, np.int64)


def _enqueued(head: dict[str, Any], parts: list[memoryview]) -> Enqueued:
    return Enqueued(ipc=parts[0], **head)


def _computed(head: dict[str, Any], parts: list[memoryview]) -> Computed:
    return Computed(
        tasks=_sequences(parts[0]),
        verdicts=np.frombuffer(parts[1], np.uint8),
        output_tokens=np.frombuffer(parts[2], np.int32),
        ipc=parts[3],
        **head,
    )


def _returned(expired: bool) -> Callable[[dict[str, Any], list[memoryview]], Returned]:
    return lambda head, parts: Returned(
        expired=expired,
        tasks=_sequences(parts[0]),
        verdicts=np.frombuffer(parts[1], np.uint8),
        **head,
    )


def _settled(dead: bool) -> Callable[[dict[str, Any], list[memoryview]], Settled]:
    return lambda head, parts: Settled(
        dead, _sequences(parts[0]), head["confirmation"], head["proof"]
    )


_KINDS: Mapping[type, Kind] = {
    SubmissionOpened: Kind.SUBMISSION,
    Enqueued: Kind.ENQUEUE,
    SubmissionClosed: Kind.SUBMISSION_CLOSED,
    Leased: Kind.LEASE,
    Claimed: Kind.CLAIM,
    Computed: Kind.COMPUTED,
    Started: Kind.STARTED,
    LanesStepped: Kind.LANES,
    CheckpointTaken: Kind.CHECKPOINT,
    Dropped: Kind.DROP,
    Moved: Kind.MOVE,
    MovedComputed: Kind.MOVE_COMPUTED,
    GivenUp: Kind.GIVE_UP,
    Uploaded: Kind.UPLOADED,
    Requeued: Kind.REQUEUE,
}
_DECODERS: Mapping[Kind, Callable[[dict[str, Any], list[memoryview]], Fact]] = {
    Kind.SUBMISSION: lambda head, _: SubmissionOpened(Submission.from_json(head["header"])),
    Kind.ENQUEUE: _enqueued,
    Kind.SUBMISSION_CLOSED: lambda head, _: SubmissionClosed(**head),
    Kind.LEASE: lambda head, parts: Leased(tasks=_sequences(parts[0]), **head),
    Kind.CLAIM: lambda head, parts: Claimed(tasks=_sequences(parts[0]), **head),
    Kind.COMPUTED: _computed,
    Kind.NACK: _returned(expired=False),
    Kind.EXPIRE: _returned(expired=True),
    Kind.RETIRE: _settled(dead=False),
    Kind.DEAD: _settled(dead=True),
    Kind.STARTED: lambda head, _: Started(**head),
    Kind.LANES: lambda _, parts: LanesStepped(np.frombuffer(parts[0], np.int64).reshape(-1, 5)),
    Kind.CHECKPOINT: lambda head, _: CheckpointTaken(**head),
    Kind.DROP: lambda head, _: Dropped(**head),
    Kind.MOVE: lambda _, parts: Moved(
        numbers_of(_sequences(parts[0]).reshape(-1, 2)), _sequences(parts[1]), parts[2]
    ),
    Kind.MOVE_COMPUTED: lambda _, parts: MovedComputed(_sequences(parts[0]), parts[1]),
    Kind.GIVE_UP: lambda head, parts: GivenUp(tasks=_sequences(parts[0]), **head),
    Kind.UPLOADED: lambda head, _: Uploaded(**head),
    Kind.REQUEUE: lambda head, parts: Requeued(tasks=_sequences(parts[0]), **head),
}
