"""What the loader and the search of a shard ask of a device, as one interface; `Gpu` is the real one.

Memory is taken by `empty` and goes back when the last reference does. A `Channel` moves bytes between pinned
buffers and the device in the order in which they were queued. A machine without a card runs the same code
over a named stand-in (testing.standin_card); nothing here falls back to a CPU by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

DeviceArray = Any  # cupy.ndarray, which ships no types; the stand-in's is a numpy array
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Memory:
    free_bytes: int
    total_bytes: int


@dataclass(slots=True)
class Lent:
    """One block of bytes of a card, kept for the next who needs as much. made: what its last user laid out in it, which goes
    when it goes; its bytes mean nothing."""

    block: DeviceArray
    made: Any = None


class Channel(Protocol):
    """Pinned buffers of one size and one stream of copies. Each buffer is reused only after `wait`."""

    @property
    def buffers(self) -> Sequence[Bytes]: ...

    def send(self, number: int, size: int, target: DeviceArray, offset: int) -> None:
        """Queue the first `size` bytes of buffer `number` into `target` from byte `offset` on."""

    def read_back(self, number: int, size: int, source: DeviceArray, offset: int) -> None:
        """Queue the same the other way round; it runs after what was queued before."""

    def wait(self, number: int) -> None:
        """Everything queued with buffer `number` is done."""

    def close(self) -> None: ...


class Card(Protocol):
    @property
    def name(self) -> str:
        """What a message calls it."""

    @property
    def address(self) -> str:
        """Where it sits in its machine: the same for every process there, whatever they can see of it."""

    def memory(self) -> Memory: ...

    def require_memory(self, size: int, what: str, remedy: str) -> None:
        """DeviceRefused, with the bytes needed and free, before anything is taken."""

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """Uninitialised memory. DeviceRefused when there is not enough."""

    def lend(self, size: int) -> Lent:
        """A block of `size` bytes or more, the last one that was taken back if it is large enough. DeviceRefused as `empty`."""

    def take_back(self, lent: Lent) -> None:
        """Nothing queued uses it any more. It is kept up to a bound, and until memory runs short."""

    def trim(self) -> None:
        """What is no longer used goes back to the device now."""

    def channel(self, buffers: int, size: int) -> Channel: ...

    def store(self, target: DeviceArray, host: npt.NDArray[Any]) -> None:
        """Host to device; the host array may go as soon as this returns."""

    def download(self, source: DeviceArray) -> npt.NDArray[Any]: ...

    def fill(self, target: DeviceArray, byte: int) -> None:
        """Queue: every byte of `target` is `byte`."""

    def products(
        self, left: DeviceArray, right: DeviceArray, out: DeviceArray, *, add: bool = False
    ) -> None:
        """Queue: out[:q, :n] float32 becomes left [q, d] times right [n, d] transposed, or that is added to it.
        Both factors are float32, or both float16; sums are in float32, and TF32 is never used."""

    def launch(self, family: str, symbol: str, blocks: int, arguments: Sequence[Any]) -> None: ...

    def blocks_for(self, warps: int) -> int: ...

    def offset_of(self, array: DeviceArray) -> int:
        """Where its memory starts, for alignment."""

    def close(self) -> None: ...
