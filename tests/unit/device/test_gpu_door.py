"""The door without a card behind it: typed errors that say what to do. Real cards: tests/gpu."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fabric_pipelines.analytics.health import measure
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


def test_timings_report_median_and_spread() -> None:
    timing = Timing((2.0, 1.0, 3.0))
    assert (timing.median_ms, timing.spread) == (2.0, 1.0)
