"""A card that is not there: device memory is host memory of a set size, kernels are their NumPy twins.

For machines without a GPU, so that loading, leases, budgets, crashes and the search's bookkeeping are tested everywhere;
real copies and kernels are tests/gpu's. Copies are queued and done at `wait`, so that reading a buffer early
gives what a real card could give. `before` is called with the name of each step (a test kills the world
there); `rot` may change the bytes that arrive on the card.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.reference import flat_select
from fabric_pipelines.analytics.reference.row_admit import row_admit
from fabric_pipelines.device.card import Bytes, DeviceArray, Lent, Memory
from fabric_pipelines.device.gpu import too_little
from fabric_pipelines.errors import DeviceRefused

STEPS = (
    "empty",
    "channel",
    "send",
    "read_back",
    "wait",
    "store",
    "download",
    "fill",
    "products",
    "launch",
)


class StandInCard:
    def __init__(
        self,
        memory_bytes: int = 1 << 30,
        *,
        address: str = "stand-in-0",
        before: Callable[[str], None] = lambda step: None,
        rot: Callable[[Bytes], None] = lambda arrived: None,
    ) -> None:
        self.name, self.address = f"stand-in card ({address})", address
        self._total, self._taken, self._lock = memory_bytes, 0, threading.Lock()
        self.before, self.rot = before, rot
        self.launched: list[str] = []
        self.peak_bytes = 0
        self.closed = False

    def memory(self) -> Memory:
        return Memory(self._total - self._taken, self._total)

    def require_memory(self, size: int, what: str, remedy: str) -> None:
        free = self.memory().free_bytes
        if size > free:
            raise too_little(size, free, what, self.name, remedy)

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        self.before("empty")
        array = np.full(shape, 0, dtype)
        array.reshape(-1).view(np.uint8)[:] = 0xA5  # what uninitialised memory may hold
        size = array.nbytes
        with self._lock:
            if size > self._total - self._taken:
                raise DeviceRefused(f"{self.name} has no room for an array of shape {shape}")
            self._taken += size
            self.peak_bytes = max(self.peak_bytes, self._taken)
        weakref.finalize(array, self._give_back, size)
        return array

    def lend(self, size: int) -> Lent:
        """Nothing is kept here: nobody who borrows runs on this card."""
        return Lent(self.empty(size, np.uint8))

    def take_back(self, lent: Lent) -> None:
        """It goes with its last reference."""

    def trim(self) -> None:
        """Memory went back with its last reference."""

    def channel(self, buffers: int, size: int) -> StandInChannel:
        self.before("channel")
        return StandInChannel(self, buffers, size)

    def store(self, target: DeviceArray, host: npt.NDArray[Any]) -> None:
        self.before("store")
        assert target.shape == host.shape
        assert target.dtype == host.dtype
        target[...] = host
        self.rot(_bytes_of(target))

    def download(self, source: DeviceArray) -> npt.NDArray[Any]:
        self.before("download")
        copied: npt.NDArray[Any] = source.copy()
        return copied

    def fill(self, target: DeviceArray, byte: int) -> None:
        self.before("fill")
        _bytes_of(target)[:] = byte

    def products(
        self, left: DeviceArray, right: DeviceArray, out: DeviceArray, *, add: bool = False
    ) -> None:
        self.before("products")
        assert left.dtype == right.dtype
        found = left.astype(np.float32) @ right.astype(np.float32).T
        part = out[: len(left), : len(right)]
        part[...] = part + found if add else found

    def launch(self, family: str, symbol: str, blocks: int, arguments: Sequence[Any]) -> None:
        self.before("launch")
        assert blocks >= 1
        self.launched.append(symbol)
        kernel = {"row_admit": _row_admit, "flat_select": _FLAT.get(symbol)}[family]
        assert kernel is not None, symbol
        kernel(*arguments)

    def blocks_for(self, warps: int) -> int:
        return max(1, warps)

    def offset_of(self, array: DeviceArray) -> int:
        return int(array.ctypes.data)

    def close(self) -> None:
        self.closed = True

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._taken -= size


class StandInChannel:
    def __init__(self, card: StandInCard, buffers: int, size: int) -> None:
        self.buffers: list[Bytes] = [np.zeros(size, np.uint8) for _ in range(buffers)]
        self._card, self._queued = card, [[] for _ in range(buffers)]  # type: ignore[var-annotated]

    def send(self, number: int, size: int, target: DeviceArray, offset: int) -> None:
        self._card.before("send")
        self._queued[number].append(partial(self._send, number, size, target, offset))

    def read_back(self, number: int, size: int, source: DeviceArray, offset: int) -> None:
        self._card.before("read_back")
        self._queued[number].append(partial(self._read_back, number, size, source, offset))

    def wait(self, number: int) -> None:
        self._card.before("wait")
        while self._queued[number]:
            self._queued[number].pop(0)()

    def close(self) -> None:
        for number in range(len(self.buffers)):
            while self._queued[number]:
                self._queued[number].pop(0)()

    def _send(self, number: int, size: int, target: DeviceArray, offset: int) -> None:
        arrived = _bytes_of(target)[offset : offset + size]
        arrived[:] = self.buffers[number][:size]
        self._card.rot(arrived)

    def _read_back(self, number: int, size: int, source: DeviceArray, offset: int) -> None:
        self.buffers[number][:size] = _bytes_of(source)[offset : offset + size]


def _bytes_of(array: DeviceArray) -> Bytes:
    assert array.flags.c_contiguous
    flat: Bytes = array.reshape(-1).view(np.uint8)
    return flat


def _row_admit(
    rows: DeviceArray, count: int, dim: int, min_norm2: float,
    norm2: DeviceArray, flag: DeviceArray, row_hash: DeviceArray,
) -> None:  # fmt: skip
    assert rows.shape == (count, dim)
    norm2[:count], flag[:count], row_hash[:count] = row_admit(rows, min_norm2**0.5)


def _scored(
    arguments: Sequence[Any], gamma: float, tiny: float, l2: bool
) -> tuple[flat_select.F32s, flat_select.F32s]:
    products, length, reach, slack, queries, rows = arguments
    return flat_select.scored(
        products[:queries, :rows],
        length[:rows],
        reach[:queries],
        slack[:queries],
        gamma,
        tiny,
        l2=l2,
    )


def _slots(l2: bool, *given: Any) -> None:
    *tile, stride, gamma, tiny, bound = given
    assert tile[0].shape[1] == stride
    score, margin = _scored(tile, gamma, tiny, l2)
    flat_select.slots(score, margin, bound[: tile[4]])


def _limit(bound: DeviceArray, queries: int, k: int, limit: DeviceArray) -> None:
    limit[:queries] = flat_select.limit(bound[:queries], k)


def _take(l2: bool, *given: Any) -> None:
    products, length, reach, slack, limit, queries, rows, stride, first, gamma, tiny, *out = given
    capacity, count, taken, lower = out
    assert products.shape[1] == stride
    tile = (products, length, reach, slack, queries, rows)
    score, margin = _scored(tile, gamma, tiny, l2)
    flat_select.take(
        score,
        margin,
        limit[:queries],
        first,
        count[:queries],
        taken[: capacity * queries].reshape(capacity, queries),
        lower[: capacity * queries].reshape(capacity, queries),
    )


def _words(
    source: DeviceArray, rows: DeviceArray, count: int, words: int, out: DeviceArray
) -> None:
    size = 4 * words * count
    _bytes_of(out)[:size] = _bytes_of(flat_select.words(source, rows[:count]))[:size]


_FLAT: dict[str, Callable[..., None]] = {
    "flat_limit": _limit,
    "flat_words": _words,
    **{f"flat_slots_{metric}": partial(_slots, metric == "l2") for metric in ("cosine", "l2")},
    **{f"flat_take_{metric}": partial(_take, metric == "l2") for metric in ("cosine", "l2")},
}
