"""Memory and order on a card, for an engine that moves its own tensors: pinned and device memory, streams, events.

All memory is allocated when the engine opens and none afterwards. A stream is never waited for: work is queued on it, an
event is recorded behind, and the host asks whether that event has come. `Transfers` is the port, CuPy stands behind
it; tests put host memory there (testing/host_card.py).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import DeviceRefused, EngineFailed, MissingDependency, UsageError

NEVER_WAITED_FOR = (
    "a compute stream is not waited for, since that would stop whoever feeds it: record an event behind the work "
    "and ask whether it is done"
)
Bytes = npt.NDArray[np.uint8]
PAGE = 4096


class Event(Protocol):
    def record(self) -> None:
        """Behind everything queued on its stream so far."""

    def done(self) -> bool:
        """Whether all of that has happened. EngineFailed when the card reports a fault."""


class Stream(Protocol):
    @property
    def handle(self) -> int:
        """The cudaStream_t, as CUDA libraries take it."""

    def event(self) -> Event: ...

    def to_device(self, address: int, source: Bytes) -> None:
        """Queue a copy of pinned `source`, which must stay as it is until an event behind it is done."""

    def to_host(self, target: Bytes, address: int) -> None:
        """Queue a copy into pinned `target`."""

    def synchronize(self) -> None:
        """UsageError, always."""


class Transfers(Protocol):
    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the card, e.g. (9, 0)."""

    def pinned(self, size: int) -> Bytes:
        """Page-locked host memory, touched so that its pages are there."""

    def device(self, size: int) -> int:
        """Address of device memory that lives until `close`. DeviceRefused when there is not enough."""

    def stream(self) -> Stream: ...

    def close(self) -> None: ...


class CupyTransfers:
    """The first card that this process sees (the worker hides the others)."""

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError:
            raise MissingDependency("cupy", "gpu", "moving tensors to a card") from None
        self._cupy = cupy
        self._held: list[Any] = []
        try:
            self._device = cupy.cuda.Device(0)
            major, minor = divmod(int(self._device.compute_capability), 10)
        except cupy.cuda.runtime.CUDARuntimeError as fault:
            raise DeviceRefused(f"no CUDA device answers ({fault})") from fault
        self.capability = (major, minor)

    def pinned(self, size: int) -> Bytes:
        memory = self._cupy.cuda.alloc_pinned_memory(size)
        self._held.append(memory)
        view = np.frombuffer(memory, np.uint8, size)
        view[::PAGE] = 0
        return view

    def device(self, size: int) -> int:
        try:
            # Straight from the driver: the pool would keep and split what lives as long as the engine.
            memory = self._cupy.cuda.Memory(size)
        except self._cupy.cuda.runtime.CUDARuntimeError as fault:
            raise DeviceRefused(f"the card has no {size:,} bytes left: {fault}") from fault
        self._held.append(memory)
        return int(memory.ptr)

    def stream(self) -> CupyStream:
        return CupyStream(self._cupy)

    def close(self) -> None:
        self._held.clear()


class CupyStream:
    def __init__(self, cupy: Any) -> None:
        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.handle = int(self._stream.ptr)

    def event(self) -> CupyEvent:
        return CupyEvent(self._cupy, self._stream)

    def to_device(self, address: int, source: Bytes) -> None:
        self._copy(address, source.ctypes.data, source.nbytes, self._runtime.memcpyHostToDevice)

    def to_host(self, target: Bytes, address: int) -> None:
        self._copy(target.ctypes.data, address, target.nbytes, self._runtime.memcpyDeviceToHost)

    def synchronize(self) -> None:
        raise UsageError(NEVER_WAITED_FOR)

    def _copy(self, to: int, source: int, size: int, kind: int) -> None:
        try:
            self._runtime.memcpyAsync(to, source, size, kind, self.handle)
        except self._runtime.CUDARuntimeError as fault:
            raise EngineFailed(f"the card failed at a copy: {fault}") from fault


class CupyEvent:
    def __init__(self, cupy: Any, stream: Any) -> None:
        self._fault = cupy.cuda.runtime.CUDARuntimeError
        self._stream = stream
        self._event = cupy.cuda.Event(disable_timing=True)

    def record(self) -> None:
        self._event.record(self._stream)

    def done(self) -> bool:
        try:
            return bool(self._event.done)
        except self._fault as fault:
            raise EngineFailed(f"the card failed: {fault}") from fault
