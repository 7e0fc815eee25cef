"""The door without a card behind it: typed errors that say what to do. Real cards: tests/gpu."""

import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from fabric_pipelines.analytics.health import measure
from fabric_pipelines.device import gpu
from fabric_pipelines.device.cubins import image
from fabric_pipelines.device.gpu import Gpu, Timing, device_count
from fabric_pipelines.errors import DeviceRefused, MissingDependency


class NoDriver(RuntimeError):
    pass


def without_driver() -> int:
    raise NoDriver("cudaErrorInsufficientDriver")


def cupy_that(count: object) -> SimpleNamespace:
    runtime = SimpleNamespace(getDeviceCount=count, CUDARuntimeError=NoDriver)
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))


def test_without_cupy_the_cuda_backend_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    rows = np.ones((1, 1), np.float32)
    with pytest.raises(MissingDependency, match=r"fabric-pipelines\[gpu\]"):
        measure(rows, np.array([0, 1]), np.array([0]), metric="l2", backend="cuda")


def test_without_a_driver_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy_that(without_driver))
    with pytest.raises(DeviceRefused, match=r"InsufficientDriver.*cpu backend"):
        device_count()


def test_an_ordinal_past_the_last_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy_that(lambda: 1))
    with pytest.raises(DeviceRefused, match="no CUDA device 1: 1 answer"):
        Gpu(1)


class Loaded:
    """A module; `images` holds the size of every one that was loaded."""

    images: ClassVar[list[int]] = []

    def load(self, image: bytes) -> None:
        self.images.append(len(image))

    def get_function(self, symbol: str) -> Callable[..., None]:
        return lambda *_, **__: None


def two_cards() -> SimpleNamespace:
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 2, CUDARuntimeError=NoDriver, driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000,
        getDeviceProperties=lambda _: {
            "major": 9, "minor": 0, "name": b"none", "multiProcessorCount": 1, "totalGlobalMem": 1,
        },
    )  # fmt: skip
    stream = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(
        runtime=runtime, Device=lambda _: nullcontext(), Stream=lambda **_: stream,
        function=SimpleNamespace(Module=Loaded),
    )  # fmt: skip
    pool = SimpleNamespace(free_all_blocks=lambda **_: None)
    return SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool)


def test_a_cubin_is_loaded_once_a_card_however_often_the_card_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", two_cards())
    monkeypatch.setattr(gpu, "_LOADED", {})
    monkeypatch.setattr(Loaded, "images", [])
    for ordinal in (0, 0, 1, 0):
        with Gpu(ordinal) as card:
            for symbol in ("csr_reduce_words", "csr_reduce_fold", "csr_reduce_words"):
                card.launch("csr_reduce", symbol, 1, ())
        assert card.launches == {"csr_reduce_words": 2, "csr_reduce_fold": 1}
    assert Loaded.images == [len(image("csr_reduce", (9, 0)))] * 2


class Shortage(Exception):
    pass


class Pool:
    """Device memory of 1,600 bytes: what is held by no array goes back when blocks are freed."""

    def __init__(self) -> None:
        self.taken, self.handed_out, self.live = 0, 0, weakref.WeakSet[np.ndarray]()

    def empty(self, shape: int, dtype: object) -> np.ndarray:
        if self.taken + shape > 1600:
            raise Shortage
        block = np.zeros(shape, np.uint8).view(Block)
        self.taken, self.handed_out = self.taken + shape, self.handed_out + 1
        self.live.add(block)
        return block

    def free_all_blocks(self, **_: object) -> None:
        self.taken = sum(block.nbytes for block in self.live)


class Block(np.ndarray):
    """Hashed by itself."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return self is other


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    found, cupy = Pool(), two_cards()
    cupy.cuda.runtime.getDeviceProperties = lambda _: {
        "major": 9, "minor": 0, "name": b"none", "multiProcessorCount": 1, "totalGlobalMem": 1600,
    }  # fmt: skip
    cupy.cuda.runtime.memGetInfo = lambda: (1600 - found.taken, 1600)
    cupy.cuda.Stream = lambda **_: Stream()
    cupy.cuda.memory = SimpleNamespace(OutOfMemoryError=Shortage)
    cupy.empty, cupy.get_default_memory_pool = found.empty, lambda: found
    cupy.get_default_pinned_memory_pool = lambda: Pool()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(gpu, "_KEPT", {})
    monkeypatch.setattr(gpu, "_STREAMS", {})
    monkeypatch.setattr(gpu, "KEPT_SHARE", 0.5)
    return found


class Stream:
    made = 0

    def __init__(self) -> None:
        Stream.made += 1

    def synchronize(self) -> None:
        """Nothing runs."""

    def __enter__(self) -> None:
        """As CuPy's, so that calls go to it."""

    def __exit__(self, *_: object) -> None:
        """As above."""


def lent_once(size: int) -> None:
    with Gpu() as card:
        lent = card.lend(size)
        lent.made = "what was laid out"
    card.take_back(lent)


def test_a_block_is_kept_between_openings_of_a_card_with_what_was_laid_out_in_it(
    pool: Pool,
) -> None:
    before = Stream.made
    lent_once(700)
    with Gpu() as card:
        lent = card.lend(600)
        assert (lent.made, lent.block.nbytes, pool.handed_out) == ("what was laid out", 700, 1)
        other = card.lend(300)  # by a thread beside
        assert (other.made, pool.handed_out) == (None, 2)
    assert Stream.made == before + 1  # streams are kept as well


def test_more_than_its_share_of_a_card_is_not_kept_and_a_larger_block_takes_the_place(
    pool: Pool,
) -> None:
    lent_once(801)
    assert pool.taken == 0
    lent_once(700)
    lent_once(790)
    assert (pool.taken, pool.handed_out) == (790, 3)
    Gpu().trim()
    assert pool.taken == 0


def test_what_is_kept_counts_as_free_and_goes_before_anybody_is_refused(pool: Pool) -> None:
    lent_once(700)
    card = Gpu()
    assert (pool.taken, card.memory().free_bytes) == (700, 1600)
    card.require_memory(1500, "a store", "a smaller one")
    held = card.empty(1500, np.uint8)
    assert (held.nbytes, pool.taken, card.memory().free_bytes) == (1500, 1500, 100)
    with pytest.raises(DeviceRefused, match="no room for an array of shape 200"):
        card.empty(200, np.uint8)


def test_timings_report_median_and_spread() -> None:
    timing = Timing((2.0, 1.0, 3.0))
    assert (timing.median_ms, timing.spread) == (2.0, 1.0)
