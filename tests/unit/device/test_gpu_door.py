"""The door without a card behind it: typed errors that say what to do. Real cards: tests/gpu."""

import sys
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


def test_timings_report_median_and_spread() -> None:
    timing = Timing((2.0, 1.0, 3.0))
    assert (timing.median_ms, timing.spread) == (2.0, 1.0)
