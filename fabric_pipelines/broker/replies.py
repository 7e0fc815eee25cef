"""What the broker answers: plain values with a JSON form, shared by server and client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from fabric_pipelines.broker import fields
from fabric_pipelines.errors import VersionRefused
from fabric_pipelines.given import value_of
from fabric_pipelines.ledger import Amount, Ledger
from fabric_pipelines.records.submission import Submission

T = TypeVar("T")

PROTOCOL_VERSION = 1
ACKNOWLEDGED = "acknowledged"  # key of [journal id, LSN, life] in answers and in requests


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    protocol: int
    version: str
    journal_id: str
    incarnation: int
    durable_lsn: int
    lease_ms: int
    pid: int


@dataclass(frozen=True, slots=True)
class SubmissionState:
    """Tasks by state, then tokens. `first_task_id` is None until a task was enqueued. `abandoned`: it was given up
    with the tasks it had, `enqueued` of them, which run."""

    submission_id: str
    function: str
    engine: str
    tasks: int
    tokens: int
    fingerprint: str
    closed: bool
    enqueued: int
    ready: int
    leased: int
    computed: int
    in_doubt: int
    retired: int
    dead: int
    retired_tokens: int
    output_tokens: int
    first_task_id: int | None
    batches: int
    abandoned: bool = False

    @property
    def finished(self) -> bool:
        return self.closed and self.enqueued == self.retired + self.dead


def unopened(header: Submission) -> SubmissionState:
    """The state of a submission that nothing has arrived of."""
    return SubmissionState(
        submission_id=header.submission_id,
        function=header.function,
        engine=header.engine,
        tasks=header.tasks,
        tokens=header.tokens,
        fingerprint=header.fingerprint,
        closed=False,
        enqueued=0,
        ready=0,
        leased=0,
        computed=0,
        in_doubt=0,
        retired=0,
        dead=0,
        retired_tokens=0,
        output_tokens=0,
        first_task_id=None,
        batches=0,
    )


@dataclass(frozen=True, slots=True)
class AttachReply:
    """accepted: held ids that stay leased to the session. lost: held ids that do not; drop their work."""

    session: str
    accepted: tuple[int, ...]
    lost: tuple[int, ...]
    lease_ms: int

    @property
    def held(self) -> tuple[int, ...]:
        return self.accepted


@dataclass(frozen=True, slots=True)
class RenewReply:
    """hold: the high-water mark of computed tasks is reached; ask for no lease before `retry_after_s`."""

    hold: bool
    retry_after_s: float
    deadline_us: int
    leased: int
    ready: int


@dataclass(frozen=True, slots=True)
class ComputedReply:
    """accepted: taken as they are. duplicates: were computed, retired or dead before. late: taken over by
    another session meanwhile. unknown: not of this journal. Only accepted ones changed anything."""

    accepted: int
    duplicates: int
    late: int
    unknown: int


@dataclass(frozen=True, slots=True)
class RequeueReply:
    """Tasks. requeued: ready again. not_dead: were not dead (any more). gone: dead, but their prompts had to make
    room; submit them again. unknown: not of this journal."""

    requeued: int = 0
    not_dead: int = 0
    gone: int = 0
    unknown: int = 0

    def __add__(self, other: RequeueReply) -> RequeueReply:
        return RequeueReply(
            *(
                getattr(self, name) + getattr(other, name)
                for name in RequeueReply.__dataclass_fields__
            )
        )


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """lanes: list of {"lane", "step", "generation", "refused_by", "parked", **Ledger.as_json()}; `refused_by` names the
    classes of consumers that found the lane's tasks too large, `parked` says why nobody who is here takes them.
    progress: tokens_total, tokens_done, tokens_per_s, eta_s (None while nothing moves); a tenant is told its own
    tokens, and no rate."""

    lanes: list[dict[str, Any]]
    total: Ledger
    counters: dict[str, int]
    journal: dict[str, Any]
    submissions: int
    consumers: list[dict[str, Any]]
    hold: bool
    draining: bool
    fault: str
    progress: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LostRows:
    """Rows of one submission: how many, and which, as spans. `function` is empty where only the log was left to ask."""

    submission_id: str
    function: str
    count: int
    rows: str

    def __str__(self) -> str:
        return f"rows {self.rows} of submission {self.submission_id[:12]}"


@dataclass(frozen=True, slots=True)
class DamagedFrame:
    """Bytes `offset`..`end` of `segment` (the path of a file, the address of an object) are not what was written: what
    is wrong with them, in words, and the LSNs `lsn`..`last_lsn` that this is about. tasks: how many have their row or
    outcome there; live: how many of them still need it; task_ids: which, as spans; rows: the same as rows of their
    submissions, of the first few. remedy: what to do. `lsn` is 0 where `segment` is a file that holds none of the log."""

    segment: str
    offset: int
    end: int
    lsn: int
    last_lsn: int
    what: str
    tasks: int
    live: int
    task_ids: str
    remedy: str
    rows: list[LostRows] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        if not self.lsn:
            return f"{self.segment} {self.what}; {self.remedy}"
        lsns = f"LSN {self.lsn}" + (f"..{self.last_lsn}" if self.last_lsn > self.lsn else "")
        named = "".join(f"; {part}" for part in self.rows[:3])
        tasks = f"{self.live} tasks need it ({self.task_ids}{named})"
        tasks = tasks if self.live else "no task needs it"
        return f"{self.segment} {self.what}: bytes {self.offset}..{self.end}, {lsns}, {tasks}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """differences: a sentence each; damaged: those of them that are about bytes of the log, as `ScrubReport` has them."""

    ok: bool
    tasks: int
    frames: int
    differences: list[str] = field(default_factory=list)
    damaged: list[DamagedFrame] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """segments, data frames and bytes are those of the sealed part of the log."""

    ok: bool
    segments: int
    frames: int
    bytes: int
    damaged: list[DamagedFrame] = field(default_factory=list)


SAME = "install the same fabric-pipelines on both sides, and start the broker again"


def reply_of(cls: type[T], head: object) -> T:
    """A broker's answer. VersionRefused where it is not what this program knows."""
    what, where = cls.__name__, "the broker's answer"
    return value_of(cls, head, where, what=what, remedy=SAME, newer=SAME, error=VersionRefused)


def scrub_report(head: Mapping[str, Any]) -> ScrubReport:
    return reply_of(ScrubReport, {**head, "damaged": _damaged(head)})


def verify_report(head: Mapping[str, Any]) -> VerifyReport:
    return reply_of(VerifyReport, {**head, "damaged": _damaged(head)})


def _damaged(head: Mapping[str, Any]) -> list[DamagedFrame]:
    return [
        reply_of(
            DamagedFrame,
            {**frame, "rows": [reply_of(LostRows, part) for part in frame.get("rows", ())]},
        )
        for frame in head.get("damaged", ())
    ]


def as_json(reply: Any) -> dict[str, Any]:
    return asdict(reply)


def broker_status(head: Mapping[str, Any]) -> BrokerStatus:
    amounts = {
        name: reply_of(Amount, amount) for name, amount in fields.mapping(head, "total").items()
    }
    return reply_of(BrokerStatus, {**head, "total": reply_of(Ledger, amounts)})


def attach_reply(head: Mapping[str, Any]) -> AttachReply:
    ids = {name: tuple(head.get(name) or ()) for name in ("accepted", "lost")}
    return reply_of(AttachReply, {**head, **ids})
