"""A stand-in for a card's memory and streams, in host memory: what is queued happens later, in order, or never.

Nothing runs when it is queued: copies and steps wait on their stream until somebody asks an event behind them, and then
until it was asked `patience` times. So a buffer that is written too early, or read too early, gives wrong results here
as it would on a card.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import EngineFailed, UsageError

Bytes = npt.NDArray[np.uint8]


@dataclass
class HostCard:
    """capability: what it says it is; patience: how often an event is asked before it has come; lost: every event
    fails from now on; allocations: sizes of all memory, pinned and of the device."""

    capability: tuple[int, int] = (9, 0)
    patience: int = 2
    lost: bool = False
    allocations: list[int] = field(default_factory=list)
    streams: list[HostStream] = field(default_factory=list)
    memory: dict[int, Bytes] = field(default_factory=dict)
    closed: bool = False

    def pinned(self, size: int) -> Bytes:
        self.allocations.append(size)
        return np.zeros(size, np.uint8)

    def device(self, size: int) -> int:
        self.allocations.append(size)
        held = np.full(size, 0xFF, np.uint8)  # not a number, until something was copied there
        self.memory[held.ctypes.data] = held
        return int(held.ctypes.data)

    def stream(self) -> HostStream:
        self.streams.append(HostStream(self, len(self.streams) + 1))
        return self.streams[-1]

    def at(self, address: int, size: int) -> Bytes:
        """Device memory from `address` on."""
        return self.memory[address][:size]

    def queue(self, handle: int, work: Callable[[], None]) -> None:
        """For what runs on a stream that it knows by its handle only."""
        self.streams[handle - 1].queued.append(work)

    def close(self) -> None:
        self.closed = True


@dataclass
class HostStream:
    card: HostCard
    handle: int
    queued: list[Callable[[], None]] = field(default_factory=list)

    def event(self) -> HostEvent:
        return HostEvent(self)

    def to_device(self, address: int, source: Bytes) -> None:
        def copy() -> None:
            self.card.at(address, source.nbytes)[:] = source

        self.queued.append(copy)

    def to_host(self, target: Bytes, address: int) -> None:
        def copy() -> None:
            target[:] = self.card.at(address, target.nbytes)

        self.queued.append(copy)

    def synchronize(self) -> None:
        raise UsageError("a compute stream is not waited for")


@dataclass
class HostEvent:
    stream: HostStream
    behind: int = 0
    asked: int = 0

    def record(self) -> None:
        self.behind, self.asked = len(self.stream.queued), 0

    def done(self) -> bool:
        if self.stream.card.lost:
            raise EngineFailed("the card failed: unspecified launch failure")
        self.asked += 1
        if self.asked <= self.stream.card.patience:
            return False
        while self.behind:
            self.stream.queued.pop(0)()
            self.behind -= 1
        return True
