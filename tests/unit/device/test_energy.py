"""The card's own counters through NVML's calls, on a stand-in that knows those calls and no others."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest

from fabric_pipelines.device.energy import LIBRARY, CardMeter, card_id, visible
from fabric_pipelines.errors import DeviceRefused

NOT_SUPPORTED, NOT_FOUND = 3, 6


@dataclass
class Nvml:
    """Two cards by number and UUID; millijoules of each, None where it does not count."""

    millijoules: dict[int, int | None] = field(default_factory=lambda: {0: 5_000, 1: 70_500})
    gpu: int = 37
    opened: int = 0

    def load(self, name: str) -> Nvml:
        assert name == LIBRARY
        return self

    def nvmlInit_v2(self) -> int:
        self.opened += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.opened -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, to: Any) -> int:
        if index.value not in self.millijoules:
            return NOT_FOUND
        to._obj.value = 100 + index.value
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, to: Any) -> int:
        if uuid.value != b"GPU-1":
            return NOT_FOUND
        to._obj.value = 101
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:
        assert size.value == len(text) == 96
        text.value = b"GPU-%d" % (handle.value - 100)
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, to: Any) -> int:
        counted = self.millijoules[handle.value - 100]
        if counted is None:
            return NOT_SUPPORTED
        assert isinstance(to._obj, ctypes.c_ulonglong)
        to._obj.value = counted
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, to: Any) -> int:
        assert ctypes.sizeof(to._obj) == 8
        to._obj.gpu, to._obj.memory = self.gpu, 99
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, to: Any) -> int:
        assert ctypes.sizeof(to._obj) == 24
        to._obj.total, to._obj.free, to._obj.used = 100, 93, 7
        return 0


@pytest.mark.parametrize("which", ["1", "GPU-1"])
def test_joules_busy_share_and_memory_are_the_cards_own(which: str) -> None:
    nvml = Nvml()
    with CardMeter(which, nvml.load) as card:
        assert (card.joules(), card.busy(), card.memory_used()) == (70.5, 0.37, 7)
        nvml.millijoules[1] = 70_750
        assert card.joules() == 70.75
    card.close()
    assert nvml.opened == 0


def test_a_card_that_does_not_count_is_unknown_and_not_zero() -> None:
    with CardMeter("0", Nvml({0: None}).load) as card:
        assert card.joules() is None


@pytest.mark.parametrize("which", ["7", "GPU-none"])
def test_a_card_that_is_not_there_is_refused_and_the_library_left(which: str) -> None:
    nvml = Nvml()
    with pytest.raises(DeviceRefused, match=r"nvmlDeviceGetHandleBy.* failed with 6"):
        CardMeter(which, nvml.load)
    assert nvml.opened == 0


def test_without_the_library_or_with_an_old_one_it_is_said() -> None:
    def gone(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(DeviceRefused, match=r"libnvidia-ml\.so\.1.*no energy is counted"):
        CardMeter("0", gone)
    with pytest.raises(DeviceRefused, match="has no nvmlInit_v2"):
        CardMeter("0", lambda name: object())


@pytest.mark.parametrize(
    ("device", "seen", "which"),
    [
        ("cuda:2", None, "2"),
        ("cuda:0", "5", "5"),
        ("cuda:1", "0,1", "1"),
        ("cuda:1", "3, 02", "2"),
        ("cuda:0", "GPU-1,GPU-2", "GPU-1"),
        ("cuda:1", "GPU-1,GPU-2", "GPU-2"),
    ],
)
def test_the_card_of_a_worker_is_that_of_its_number_among_those_it_may_see(
    device: str, seen: str | None, which: str
) -> None:
    environ = {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}
    assert visible(device, environ) == which


@pytest.mark.parametrize(
    ("device", "seen"), [("cuda:0", ""), ("cuda:0", "-1"), ("cuda:1", "5"), ("cuda:1", "0,-1,1")]
)
def test_a_number_beyond_what_may_be_seen_is_refused(device: str, seen: str) -> None:
    with pytest.raises(DeviceRefused, match=f"device {device} is not there: CUDA_VISIBLE_DEVICES"):
        visible(device, {"CUDA_VISIBLE_DEVICES": seen})


def test_one_card_has_one_id_by_its_number_and_by_its_uuid() -> None:
    nvml = Nvml()
    assert card_id("1", nvml.load) == card_id("GPU-1", nvml.load) == "GPU-1"
    assert card_id("MIG-7", nvml.load) == "MIG-7"
    assert nvml.opened == 0


@pytest.mark.parametrize("which", ["7", "GPU-none"])
def test_a_card_that_the_driver_does_not_know_has_no_id(which: str) -> None:
    with pytest.raises(DeviceRefused, match=f"card {which} is not known to this machine's driver"):
        card_id(which, Nvml().load)


def test_without_nvml_a_card_is_known_by_what_the_caller_says() -> None:
    def gone(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert card_id("3", gone) == "3"
    assert card_id("3", lambda name: object()) == "3"
