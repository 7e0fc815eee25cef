"""Recovery: a state from the frames of a journal, and nothing else. `verify` is the same act, then a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from fabric_pipelines.broker.facts import decode
from fabric_pipelines.broker.state import State
from fabric_pipelines.errors import BalanceBroken, CorruptionFound
from fabric_pipelines.journal import Frame


class Log(Protocol):
    """What the broker asks of `journal.Journal`."""

    @property
    def journal_id(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def durable_lsn(self) -> int: ...
    @property
    def next_lsn(self) -> int: ...
    @property
    def bytes_used(self) -> int: ...
    def append(
        self,
        kind: int,
        payload: list[bytes | bytearray | memoryview],
        *,
        rows: int,
        time_us: int,
        schema_id: int = 0,
        essential: bool = False,
    ) -> int: ...
    def commit(self) -> int: ...
    def mark_durable(self) -> int: ...
    def replay(self, from_lsn: int = 1) -> Iterator[Frame]: ...
    def read(self, lsn: int) -> Frame: ...
    def view(self, lsn: int) -> tuple[Frame, bool]: ...
    def close(self) -> None: ...


def rebuild(incarnation: int, frames: Iterable[Frame]) -> State:
    """Raises CorruptionFound naming the LSN of a fact that cannot be read or cannot have happened."""
    state = State(incarnation)
    for frame in frames:
        fact = decode(frame.kind, frame.payload, f"LSN {frame.lsn}")
        try:
            state.apply(fact, frame.lsn)
        except (BalanceBroken, KeyError, IndexError) as fault:
            raise CorruptionFound(
                f"LSN {frame.lsn} cannot follow the facts before it ({fault}): keep the journal folder "
                "and report it"
            ) from fault
    return state
