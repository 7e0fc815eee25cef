"""The desk: answers leave only once durable, and a sync does not keep the owner from the next group."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from fabric_pipelines.broker.core import Limits
from fabric_pipelines.broker.desk import Desk, Rank
from fabric_pipelines.broker.owner import Owner
from fabric_pipelines.errors import FabricError, StorageFailed
from fabric_pipelines.testing.memory_journal import MemoryJournal
from tests.support_broker import submission_of, tasks_of

WAIT_S = 10.0


@dataclass(slots=True)
class SlowJournal(MemoryJournal):
    """A sync takes until the gate opens."""

    gate: threading.Event = field(default_factory=threading.Event)

    def sync(self) -> int:
        assert self.gate.wait(WAIT_S), "nobody opened the gate"
        return MemoryJournal.sync(self)


def open_submission(mark: int) -> Any:
    header = submission_of([tasks_of([5])], mark)
    return lambda owner: owner.open_submission(header)


def desk_over(journal: MemoryJournal, said: list[FabricError]) -> Desk:
    return Desk(Owner(journal, Limits()), said.append)


def test_the_owner_serves_the_next_request_while_an_earlier_one_is_synced() -> None:
    journal, said = SlowJournal(), list[FabricError]()
    desk = desk_over(journal, said)
    second: list[Any] = []

    def first(owner: Owner) -> int:
        second.append(desk.ask(later, Rank.ENQUEUE))
        open_submission(1)(owner)
        return owner.journal.next_lsn - 1

    def later(owner: Owner) -> tuple[bool, bool]:
        before = answer.done(), owner.journal.durable_lsn > 0
        open_submission(2)(owner)
        journal.gate.set()
        return before

    answer = desk.ask(first, Rank.ENQUEUE)
    desk.start()
    lsn = answer.result(WAIT_S)
    assert journal.durable_lsn >= lsn
    assert second[0].result(WAIT_S) == (False, False)
    desk.stop()
    assert said == []
    assert journal.durable_lsn == journal.next_lsn - 1


def test_a_sync_that_fails_beside_the_owner_answers_nobody_with_success() -> None:
    journal, said = MemoryJournal(), list[FabricError]()
    desk = desk_over(journal, said)

    def first(owner: Owner) -> None:
        desk.ask(lambda _: None, Rank.QUESTION)
        open_submission(1)(owner)
        journal.broken = True

    answer = desk.ask(first, Rank.ENQUEUE)
    desk.start()
    with pytest.raises(StorageFailed, match="before it could acknowledge"):
        answer.result(WAIT_S)
    desk.stop()
    assert "failed its fsync" in str(said[0])
    assert isinstance(said[0], StorageFailed), "the process ends with the code of its kind"
