"""A stand-in broker in memory, seen from completion: computed tasks, who pulled them, what was retired.

Its own sets are the truth that tests compare with: each task is computed, retired or dead, and retires once.
Speaks what `completion.receive.Source` asks for; the real broker is tested with real processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from fabric_pipelines.errors import BrokerUnavailable
from fabric_pipelines.ledger import Amount, Ledger
from fabric_pipelines.records.confirmation import Confirmation
from fabric_pipelines.records.settled import Ids, Settled, Sums


@dataclass(frozen=True, slots=True)
class ScriptedInfo:
    journal_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ScriptedStatus:
    total: Ledger


@dataclass
class ScriptedComputed:
    """`away`: calls raise BrokerUnavailable. `lose_retires`: so many retire calls take effect unanswered."""

    batches: list[pa.RecordBatch]
    info: ScriptedInfo = field(default_factory=lambda: ScriptedInfo("a" * 32, 7))
    away: bool = False
    lose_retires: int = 0
    sessions: int = 0
    pulled: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)
    retired: dict[int, Confirmation] = field(default_factory=dict)
    buried: dict[int, Confirmation] = field(default_factory=dict)
    duplicates: int = 0

    def open(self) -> ScriptedComputed:
        """A new session: what an earlier one pulled is handed out again."""
        self._answer()
        self.sessions += 1
        self.pulled.clear()
        self.passed.clear()
        return self

    @property
    def open_ids(self) -> set[int]:
        every = {task for batch in self.batches for task in batch.column("task_id").to_pylist()}
        return every - set(self.retired) - set(self.buried)

    # ---- completion.receive.Source

    def hello(self) -> ScriptedInfo:
        self._answer()
        return self.info

    def status(self) -> ScriptedStatus:
        self._answer()
        settled = Ledger(retired=Amount(len(self.retired)), dead=Amount(len(self.buried)))
        return ScriptedStatus(settled)

    def settled_sums(self) -> Sums:
        return Sums.of(self._settled(), 1 << 18, 1)

    def settled_page(self, begin: int) -> Settled:
        assert begin == 0, "a script is shorter than a page"
        ids = self._settled()
        return Settled(ids, ids + 1, np.zeros_like(ids), {0: ("f" * 64, "generate")})

    def _settled(self) -> Ids:
        return np.array(sorted(self.retired.keys() | self.buried.keys()), np.int64)

    def pull_computed(
        self, *, rows: int, wait_s: float = 0, skip: Sequence[str] = ()
    ) -> pa.RecordBatch | None:
        self._answer()
        waiting = self.open_ids - self.pulled
        for wanted in (waiting & self.passed, waiting):
            for batch in self.batches:
                ids = batch.column("task_id").to_pylist()
                names = batch.column("function").to_pylist()
                self.passed |= {task for task, name in zip(ids, names, strict=True) if name in skip}
                at = [
                    row for row, task in enumerate(ids) if task in wanted and names[row] not in skip
                ]
                if at:
                    self.pulled.update(ids[row] for row in at[:rows])
                    return batch.take(pa.array(at[:rows]))
        return None

    def retire(self, task_ids: Any, confirmation: Confirmation) -> int:
        return self._settle(self.retired, task_ids, confirmation)

    def dead(self, task_ids: Any, confirmation: Confirmation, *, requeues: Any = None) -> int:
        return self._settle(self.buried, task_ids, confirmation)

    def release_pulled(self, task_ids: Any = None) -> None:
        self._answer()
        back = self.pulled if task_ids is None else set(_integers(task_ids))
        assert back <= self.pulled, "what was not pulled is not given back"
        self.pulled = self.pulled - back
        self.passed = self.passed | back if task_ids is not None else set()

    def close(self) -> None:
        self.pulled.clear()

    def _settle(
        self, place: dict[int, Confirmation], task_ids: Any, confirmation: Confirmation
    ) -> int:
        self._answer()
        settled = self.retired.keys() | self.buried.keys()
        new = [task for task in _integers(task_ids) if task not in settled]
        self.duplicates += len(task_ids) - len(new)
        place.update(dict.fromkeys(new, confirmation))
        if self.lose_retires > 0:
            self.lose_retires -= 1
            raise BrokerUnavailable("scripted broker died before it answered")
        return len(new)

    def _answer(self) -> None:
        if self.away:
            raise BrokerUnavailable("scripted broker is away")


def _integers(task_ids: Any) -> Iterable[int]:
    numbers: list[int] = np.asarray(task_ids).tolist()
    return numbers
