"""A stand-in broker in memory, for the worker loop: leases in order, keeps facts, goes away on command.

Its own ledger is the truth that tests compare with: every task is in exactly one of ready, leased, computed.
Speaks what `worker.loop.Source` asks for and nothing else; the real broker is tested with real processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from fabric_pipelines.errors import BrokerUnavailable
from fabric_pipelines.records.arrow import require_schema
from fabric_pipelines.records.completion import COMPLETION_SCHEMA
from fabric_pipelines.records.lease import LEASE_SCHEMA, Lease
from fabric_pipelines.records.profile import Profile


@dataclass(frozen=True, slots=True)
class ScriptedAttach:
    held: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScriptedRenew:
    hold: bool
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class ScriptedDelivery:
    accepted: int
    duplicates: int
    late: int
    unknown: int


@dataclass(frozen=True, slots=True)
class ScriptedTask:
    task_id: int
    tokens: tuple[int, ...]
    max_new_tokens: int = 4
    lane: str = "lane-a"
    attempts: int = 0


@dataclass
class ScriptedBroker:
    """`away`: every call raises BrokerUnavailable. `lose_answers`: so many `computed` calls are journaled and
    then go unanswered, as when a broker dies between fsync and reply. `hold`: what renew tells."""

    tasks: Sequence[ScriptedTask]
    sampling: dict[str, object] = field(default_factory=lambda: {"kind": "generate"})
    engine: str = "scripted@scripted"
    away: bool = False
    hold: bool = False
    lose_answers: int = 0
    computed_rows: dict[int, dict[str, object]] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    nacks: list[tuple[list[int], str]] = field(default_factory=list)
    blamed: set[int] = field(default_factory=set)
    claims: list[list[int]] = field(default_factory=list)
    asked: list[dict[str, int | None]] = field(default_factory=list)
    renewals: int = 0
    duplicates: int = 0
    session_known: bool = False
    hold_reason: str = ""

    def __post_init__(self) -> None:
        self._by_id = {task.task_id: task for task in self.tasks}
        self.ready: list[int] = [task.task_id for task in self.tasks]
        self.leased: set[int] = set()

    def restart(self, *, expire: bool = False) -> None:
        """Come back without sessions; with `expire` all that was leased is ready again."""
        self.session_known = False
        self.away = False
        if expire:
            self.ready = sorted(self.leased) + self.ready
            self.leased.clear()

    def require_exactly_once(self) -> None:
        """Every task is in one place only."""
        places = [*self.ready, *self.leased, *self.computed_rows]
        assert sorted(places) == sorted(self._by_id), "a task was lost or is in two places"

    # ---- worker.loop.Source

    def hello(self) -> None:
        self._answer(session=False)

    def attach(
        self,
        *,
        engine: str,
        engine_fingerprint: str,
        device: str,
        profile: Profile,
        held: Sequence[int] = (),
    ) -> ScriptedAttach:
        self._answer(session=False)
        self.claims.append(list(held))
        self.session_known = True
        return ScriptedAttach(tuple(task for task in held if task in self.leased))

    def lease(self, *, sequences: int, tokens: int, kv_tokens: int | None) -> Lease | None:
        self._answer()
        self.asked.append({"sequences": sequences, "tokens": tokens, "kv_tokens": kv_tokens})
        self.hold_reason = "at the high-water mark" if self.hold else ""
        if self.hold or not self.ready:
            return None
        picked = self._pick(sequences, tokens, kv_tokens)
        self.ready = self.ready[len(picked) :]
        self.leased.update(task.task_id for task in picked)
        lease = Lease(
            lease_id=len(self.leases),
            lane=picked[0].lane,
            engine=self.engine,
            sampling=self.sampling,
            aligned_length=0,
            deadline_us=0,
            tasks=_lease_rows(picked),
        )
        self.leases.append(lease)
        return lease

    def _pick(self, sequences: int, tokens: int, kv_tokens: int | None) -> list[ScriptedTask]:
        """The head always goes; then as many of its lane as fit."""
        picked: list[ScriptedTask] = []
        prompt = kv = 0
        for task_id in self.ready:
            task = self._by_id[task_id]
            prompt += len(task.tokens)
            kv += len(task.tokens) + task.max_new_tokens
            fits = prompt <= tokens and (kv_tokens is None or kv <= kv_tokens)
            if picked and not (fits and len(picked) < sequences and task.lane == picked[0].lane):
                break
            picked.append(task)
        return picked

    def renew(self) -> ScriptedRenew:
        self._answer()
        self.renewals += 1
        return ScriptedRenew(self.hold, 0.2 if self.hold else 0.0)

    def computed(self, batch: pa.RecordBatch) -> ScriptedDelivery:
        self._answer()
        require_schema(batch, COMPLETION_SCHEMA, "completion batch")
        accepted = duplicates = late = unknown = 0
        for row in batch.to_pylist():
            task_id = row["task_id"]
            if task_id in self.computed_rows:
                duplicates += 1
            elif task_id not in self._by_id:
                unknown += 1
            elif task_id not in self.leased:
                late += 1
            else:
                accepted += 1
                self.computed_rows[task_id] = row
                self.leased.discard(task_id)
        self.duplicates += duplicates
        if self.lose_answers > 0:
            self.lose_answers -= 1
            raise BrokerUnavailable("scripted broker died before it answered")
        return ScriptedDelivery(accepted, duplicates, late, unknown)

    def nack(self, task_ids: Sequence[int], *, reason: str, attempted: bool = False) -> int:
        self._answer()
        self.nacks.append((list(task_ids), reason))
        self.blamed.update(task_ids if attempted else ())
        mine = [task for task in task_ids if task in self.leased]
        self.leased.difference_update(mine)
        self.ready = mine + self.ready
        return len(mine)

    def detach(self) -> None:
        self._answer()
        self.session_known = False

    def _answer(self, *, session: bool = True) -> None:
        if self.away or (session and not self.session_known):
            raise BrokerUnavailable("scripted broker is away")


def _lease_rows(tasks: Sequence[ScriptedTask]) -> pa.RecordBatch:
    count = len(tasks)
    columns = {
        "task_id": [task.task_id for task in tasks],
        "tokens": [task.tokens for task in tasks],
        "max_new_tokens": [task.max_new_tokens for task in tasks],
        "source_row": [task.task_id for task in tasks],
        "metadata": [b""] * count,
        "attempts": [task.attempts for task in tasks],
        "leader": [False] * count,
    }
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[item.name], item.type) for item in LEASE_SCHEMA], schema=LEASE_SCHEMA
    )
