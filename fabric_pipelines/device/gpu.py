"""One card: its identity, memory, transfers, launches of compiled kernels, and times from its own events.

Only calls that run machine code of a shipped cubin or of a CUDA library are used: allocation, copies, launches.
CuPy's elementwise and reduction functions compile through NVRTC at first use and are not for the hot path.
"""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.device.card import Bytes, DeviceArray, Lent, Memory
from fabric_pipelines.device.cubins import architecture_for, image, read_manifest
from fabric_pipelines.errors import DeviceRefused, MissingDependency

THREADS = 256  # every kernel of cuda/ is written for this block
BLOCKS_PER_MULTIPROCESSOR = 16  # rounds of blocks a card gets to even out its work
# cudaDataType of library_types.h, by kind of number: CuPy names all of these but the last
CUDA_KINDS = {"f4": 0, "f8": 1, "f2": 2, "i1": 3, "i4": 10}
# mode -> how cuBLAS computes, kind of the factors, kind of the sums. PEDANTIC keeps TF32 away; plain f64 may go to matrix units
# where a card has some for it.
MATRIX_MODES = {
    "f32": ("CUBLAS_COMPUTE_32F_PEDANTIC", "f4", "f4"),
    "tf32": ("CUBLAS_COMPUTE_32F_FAST_TF32", "f4", "f4"),
    "f64": ("CUBLAS_COMPUTE_64F", "f8", "f8"),
    "f64 pedantic": ("CUBLAS_COMPUTE_64F_PEDANTIC", "f8", "f8"),
    "int8": ("CUBLAS_COMPUTE_32I", "i1", "i4"),
}
# Cubins stay loaded for the life of the process, by card and family: to read, hash and load the six that a silhouette takes
# cost every measurement 30 ms and more, of which the manifest is 5 ms each.
_LOADED: dict[tuple[int, str], _Module] = {}
_LOADING = threading.Lock()
# Streams of cards that were closed, for the next ones: to make and destroy one is a driver call each.
_STREAMS: dict[int, list[Any]] = {}
# The block that was last taken back, by card, of at most that share of its memory: to take memory from the driver and give it back
# makes the card wait for all that runs on it.
_KEPT: dict[int, Lent] = {}
KEPT_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """`architecture` is that of the cubins chosen for the card."""

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    architecture: str
    multiprocessors: int
    memory_bytes: int
    driver: int
    runtime: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of each repeat, by events on the stream."""

    repeats_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.repeats_ms)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.repeats_ms) - min(self.repeats_ms)) / self.median_ms


@cache
def _architectures() -> frozenset[str]:
    return frozenset(cubin.arch for cubin in read_manifest().cubins)


def import_cupy() -> ModuleType:
    try:
        import cupy
    except ImportError as fault:
        raise MissingDependency("cupy", "gpu", "the cuda backend") from fault
    module: ModuleType = cupy
    return module


def device_count() -> int:
    """Cards that answer. Raises MissingDependency without CuPy, DeviceRefused without a working driver."""
    cupy = import_cupy()
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as fault:
        raise DeviceRefused(f"no CUDA device answers ({fault}): use the cpu backend") from fault


class Gpu:
    """A card and one stream of work on it; a context manager. Copies and launches keep their order."""

    def __init__(self, ordinal: int = 0) -> None:
        found = device_count()
        if not 0 <= ordinal < found:
            raise DeviceRefused(f"there is no CUDA device {ordinal}: {found} answer")
        self._cupy = import_cupy()
        self._device = self._cupy.cuda.Device(ordinal)
        self._functions: dict[tuple[str, str], Any] = {}
        self.launches: Counter[str] = Counter()  # by symbol, since the card was opened
        self.identity = self._identify(ordinal)
        self._open = True
        with _LOADING:
            idle = _STREAMS.setdefault(ordinal, [])
            stream = idle.pop() if idle else None
        if stream is None:
            with self._device:
                stream = self._cupy.cuda.Stream(non_blocking=True)
        self._stream = stream

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the stream and hand cached memory back to the card, but for the block that is kept to be lent. Idempotent."""
        if not self._open:
            return
        self._open = False
        with self._device:
            self._stream.synchronize()
            self._cupy.get_default_memory_pool().free_all_blocks(stream=self._stream)
        with _LOADING:
            _STREAMS[self.identity.ordinal].append(self._stream)

    def _identify(self, ordinal: int) -> DeviceIdentity:
        runtime = self._cupy.cuda.runtime
        facts = runtime.getDeviceProperties(ordinal)
        capability = (int(facts["major"]), int(facts["minor"]))
        return DeviceIdentity(
            ordinal=ordinal,
            name=facts["name"].decode(),
            compute_capability=capability,
            architecture=architecture_for(capability, _architectures()),
            multiprocessors=int(facts["multiProcessorCount"]),
            memory_bytes=int(facts["totalGlobalMem"]),
            driver=int(runtime.driverGetVersion()),
            runtime=int(runtime.runtimeGetVersion()),
        )

    @property
    def name(self) -> str:
        return f"{self.identity.name} (cuda:{self.identity.ordinal})"

    @property
    def address(self) -> str:
        return str(self._device.pci_bus_id)

    def memory(self) -> Memory:
        """As the driver sees it now, so blocks cached by CuPy's pool count as taken; the one kept to be lent does not, since it goes
        back before anybody is refused."""
        with self._device:
            free, total = self._cupy.cuda.runtime.memGetInfo()
        kept = _KEPT.get(self.identity.ordinal)
        block = None if kept is None else kept.block  # another thread may be giving it up
        return Memory(int(free) + (0 if block is None else int(block.nbytes)), int(total))

    def require_memory(self, size: int, what: str, remedy: str) -> None:
        free = self.memory().free_bytes
        if size > free:
            raise too_little(size, free, what, self.name, remedy)

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """Uninitialised memory of the card. Raises DeviceRefused when there is not enough, what was kept to be lent given up."""
        try:
            with self._device, self._stream:
                return self._cupy.empty(shape, dtype=dtype)
        except self._cupy.cuda.memory.OutOfMemoryError as fault:
            if self._give_up_kept():
                return self.empty(shape, dtype)
            raise DeviceRefused(
                f"{self.identity.name} has no room for an array of shape {shape}: {fault}"
            ) from fault

    def lend(self, size: int) -> Lent:
        with _LOADING:
            kept = _KEPT.pop(self.identity.ordinal, None)
        if kept is not None and kept.block.nbytes >= size:
            return kept
        if kept is not None:  # its memory may be needed for the larger one
            self._give_up(kept)
        return Lent(self.empty(size, np.uint8))

    def take_back(self, lent: Lent) -> None:
        before: Lent | None = lent
        if lent.block.nbytes <= KEPT_SHARE * self.identity.memory_bytes:
            with _LOADING:
                before = _KEPT.get(self.identity.ordinal)
                _KEPT[self.identity.ordinal] = lent
        if before is not None:
            self._give_up(before)

    def _give_up(self, lent: Lent) -> None:
        lent.block = lent.made = None
        with self._device:
            self._cupy.get_default_memory_pool().free_all_blocks()

    def _give_up_kept(self) -> bool:
        """Whether there was some."""
        with _LOADING:
            kept = _KEPT.pop(self.identity.ordinal, None)
        if kept is not None:
            self._give_up(kept)
        return kept is not None

    def pool_bytes(self) -> int:
        """What arrays of this process hold on the card, cached blocks left out."""
        with self._device:
            return int(self._cupy.get_default_memory_pool().used_bytes())

    def trim(self) -> None:
        self.synchronize()
        self._give_up_kept()
        with self._device:
            self._cupy.get_default_memory_pool().free_all_blocks()
            self._cupy.get_default_pinned_memory_pool().free_all_blocks()

    def upload(self, host: npt.NDArray[Any]) -> DeviceArray:
        target = self.empty(host.shape, host.dtype)
        self.store(target, host)
        return target

    def store(self, target: DeviceArray, host: npt.NDArray[Any]) -> None:
        with self._device, self._stream:
            target.set(np.ascontiguousarray(host), stream=self._stream)
            self._stream.synchronize()  # the host array may go as soon as this returns

    def download(self, source: DeviceArray) -> npt.NDArray[Any]:
        with self._device, self._stream:
            host: npt.NDArray[Any] = source.get(stream=self._stream)
            self._stream.synchronize()
        return host

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        """Device to device, by the copy call of the runtime; returns before it is done."""
        assert target.nbytes == source.nbytes
        with self._device:
            target.data.copy_from_device_async(source.data, source.nbytes, self._stream)

    def channel(self, buffers: int, size: int) -> GpuChannel:
        return GpuChannel(self._cupy, self._device, buffers, size)

    def fill(self, target: DeviceArray, byte: int) -> None:
        if target.nbytes:
            with self._device:
                target.data.memset_async(byte, target.nbytes, self._stream)

    def products(
        self, left: DeviceArray, right: DeviceArray, out: DeviceArray, *, add: bool = False
    ) -> None:
        """cuBLAS, column-major: out is read as its transpose [n, q] there. PEDANTIC keeps TF32 away whatever the
        environment says; factors of two bytes are multiplied exactly and summed in float32."""
        narrow = left.dtype.itemsize == 2
        assert left.dtype == right.dtype
        self._product(left, right, out, "CUBLAS_COMPUTE_32F" + ("" if narrow else "_PEDANTIC"), add)

    def matrix_product(
        self,
        left: DeviceArray,
        right: DeviceArray,
        out: DeviceArray,
        mode: str,
        *,
        add: bool = False,
    ) -> None:
        """As `products`, in a mode of MATRIX_MODES, whose factors and sums it takes; for measuring what the card can do."""
        how, factor, total = MATRIX_MODES[mode]
        assert left.dtype == right.dtype == factor
        assert out.dtype == total
        self._product(left, right, out, how, add)

    def _product(
        self, left: DeviceArray, right: DeviceArray, out: DeviceArray, how: str, add: bool
    ) -> None:
        cublas = self._cupy.cuda.cublas
        (queries, dim), rows = left.shape, len(right)
        assert out.shape[0] >= queries
        assert out.shape[1] >= rows
        factor, total = (CUDA_KINDS[each.dtype.str[1:]] for each in (left, out))
        one, before = np.ones((), out.dtype), np.full((), int(add), out.dtype)
        with self._device, self._stream:
            handle = self._device.cublas_handle
            cublas.gemmEx(
                handle, cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, rows, queries, dim,
                one.ctypes.data, right.data.ptr, factor, dim, left.data.ptr, factor, dim,
                before.ctypes.data, out.data.ptr, total, out.shape[1], getattr(cublas, how),
                cublas.CUBLAS_GEMM_DEFAULT,
            )  # fmt: skip

    def offset_of(self, array: DeviceArray) -> int:
        return int(array.data.ptr)

    def launch(self, family: str, symbol: str, blocks: int, arguments: Sequence[Any]) -> None:
        """Queue `symbol` of `family`; integers travel as int64, floats as float64."""
        function = self._function(family, symbol)
        self.launches[symbol] += 1
        with self._device:
            function((blocks,), (THREADS,), tuple(_plain(item) for item in arguments),
                     stream=self._stream)  # fmt: skip

    def blocks_for(self, warps: int) -> int:
        """A grid for that many warps of work, at most BLOCKS_PER_MULTIPROCESSOR a multiprocessor."""
        wanted = -(-warps * 32 // THREADS)
        return max(1, min(wanted, self.identity.multiprocessors * BLOCKS_PER_MULTIPROCESSOR))

    def synchronize(self) -> None:
        with self._device:
            self._stream.synchronize()

    def time(self, work: Callable[[], object], *, repeats: int, warm_up: int = 3) -> Timing:
        """Time `work`, which only queues on this card, between two events each repeat."""
        cupy = self._cupy
        with self._device:
            for _ in range(warm_up):
                work()
            marks = []
            for _ in range(repeats):
                start, stop = cupy.cuda.Event(), cupy.cuda.Event()
                start.record(self._stream)
                work()
                stop.record(self._stream)
                marks.append((start, stop))
            self._stream.synchronize()
        return Timing(tuple(float(cupy.cuda.get_elapsed_time(*pair)) for pair in marks))

    def _function(self, family: str, symbol: str) -> Any:
        key = (family, symbol)
        found = self._functions.get(key)
        if found is None:
            with self._device:
                found = self._functions[key] = self._module(family).function(symbol)
        return found

    def _module(self, family: str) -> _Module:
        place = (self.identity.ordinal, family)
        with _LOADING:
            if place not in _LOADED:
                module = self._cupy.cuda.function.Module()
                module.load(image(family, self.identity.compute_capability))
                _LOADED[place] = _Module(module)
            return _LOADED[place]


class _Module:
    """A loaded family and the functions that were asked for."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._functions: dict[str, Any] = {}

    def function(self, symbol: str) -> Any:
        found = self._functions.get(symbol)
        if found is None:
            found = self._functions[symbol] = self._module.get_function(symbol)
        return found


class GpuChannel:
    """A stream of its own, so that copies of several channels and both directions run beside each other."""

    def __init__(self, cupy: ModuleType, device: Any, buffers: int, size: int) -> None:
        self._runtime, self._device = cupy.cuda.runtime, device
        with device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._pinned = [cupy.cuda.alloc_pinned_memory(size) for _ in range(buffers)]
            self._done = [cupy.cuda.Event(block=True, disable_timing=True) for _ in range(buffers)]
        self.buffers: list[Bytes] = [np.frombuffer(part, np.uint8, size) for part in self._pinned]

    def send(self, number: int, size: int, target: DeviceArray, offset: int) -> None:
        here, there = self.buffers[number].ctypes.data, target.data.ptr + offset
        self._queue(there, here, size, self._runtime.memcpyHostToDevice, number)

    def read_back(self, number: int, size: int, source: DeviceArray, offset: int) -> None:
        here, there = self.buffers[number].ctypes.data, source.data.ptr + offset
        self._queue(here, there, size, self._runtime.memcpyDeviceToHost, number)

    def wait(self, number: int) -> None:
        self._done[number].synchronize()

    def close(self) -> None:
        with self._device:
            self._stream.synchronize()

    def _queue(self, to: int, source: int, size: int, kind: int, number: int) -> None:
        with self._device:
            self._runtime.memcpyAsync(to, source, size, kind, self._stream.ptr)
            self._done[number].record(self._stream)


def too_little(size: int, free: int, what: str, where: str, remedy: str) -> DeviceRefused:
    return DeviceRefused(f"{what} needs {size:,} bytes on {where}, {free:,} are free: {remedy}")


def _plain(item: Any) -> Any:
    if isinstance(item, bool):
        raise TypeError("kernels take no booleans")
    if isinstance(item, int):
        return np.int64(item)
    return np.float64(item) if isinstance(item, float) else item
