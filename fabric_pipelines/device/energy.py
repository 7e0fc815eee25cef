"""What a card has used, holds and how busy it says it is, from NVIDIA's management library (NVML), without a package for it.

The energy is the card's own counter since its driver was loaded, in millijoules; a difference of two looks is exact, where
sampled power would miss what happens between. A card or driver that does not count gives None, and nothing is estimated.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Mapping
from typing import Any

from fabric_pipelines.errors import DeviceRefused

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0
UUID_BYTES = 96


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class CardMeter:
    """Of the card `which`: its number in the machine, or its UUID as CUDA_VISIBLE_DEVICES may give it. DeviceRefused when
    NVML or the card is not there."""

    def __init__(self, which: str, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        try:
            self._nvml = load(LIBRARY)
        except OSError as fault:
            raise DeviceRefused(f"NVML cannot be loaded ({fault}): no energy is counted") from fault
        self._handle = ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        self._open = True
        there = ctypes.byref(self._handle)
        try:
            if which.isdigit():
                self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(which)), there)
            else:
                self._ask("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(which.encode()), there)
        except DeviceRefused:
            self.close()
            raise

    def __enter__(self) -> CardMeter:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._open:
            self._open = False
            self._nvml.nvmlShutdown()

    def joules(self) -> float | None:
        """Since the driver was loaded; None where the card does not count."""
        used = ctypes.c_ulonglong()
        with contextlib.suppress(DeviceRefused):
            self._ask("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(used))
            return used.value / 1e3
        return None

    def uuid(self) -> str:
        text = ctypes.create_string_buffer(UUID_BYTES)
        self._ask("nvmlDeviceGetUUID", self._handle, text, ctypes.c_uint(UUID_BYTES))
        return text.value.decode()

    def busy(self) -> float | None:
        """Share of NVML's last sampling period in which a kernel ran; None where it is not told."""
        seen = _Utilisation()
        with contextlib.suppress(DeviceRefused):
            self._ask("nvmlDeviceGetUtilizationRates", self._handle, ctypes.byref(seen))
            return float(seen.gpu) / 100
        return None

    def memory_used(self) -> int | None:
        """Bytes, of all processes together; None where it is not told."""
        seen = _Memory()
        with contextlib.suppress(DeviceRefused):
            self._ask("nvmlDeviceGetMemoryInfo", self._handle, ctypes.byref(seen))
            return int(seen.used)
        return None

    def _ask(self, name: str, *given: Any) -> None:
        try:
            result = int(getattr(self._nvml, name)(*given))
        except AttributeError:
            raise DeviceRefused(f"this driver's NVML has no {name}") from None
        if result != SUCCESS:
            raise DeviceRefused(f"NVML's {name} failed with {result}")


def visible(device: str, environ: Mapping[str, str] = os.environ) -> str:
    """Which card a worker on `cuda:N` computes on: the N-th entry of CUDA_VISIBLE_DEVICES where that is set, for it says what
    there is, else the machine's card N in PCI order. A number or a UUID, as that variable and NVML take it; DeviceRefused
    when the list is shorter."""
    number = device.partition(":")[2]
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return number
    seen = [entry.strip() for entry in listed.split(",") if entry.strip()]
    hidden = [place for place, entry in enumerate(seen) if entry.startswith("-")]
    seen = seen[: hidden[0]] if hidden else seen  # CUDA itself ends the list there
    if int(number) >= len(seen):
        raise DeviceRefused(
            f"device {device} is not there: CUDA_VISIBLE_DEVICES is {listed!r}, and of its {len(seen)} cards cuda:0 is the "
            "first; choose one of them, or unset it to count all cards of the machine"
        )
    entry = seen[int(number)]
    return str(int(entry)) if entry.isascii() and entry.isdigit() else entry


def card_id(entry: str, load: Callable[[str], Any] = ctypes.CDLL) -> str:
    """The UUID of the card that `visible` gave, or `entry` itself where NVML does not work: one card must not have two ids.
    DeviceRefused when NVML knows no such card."""
    if entry.startswith("MIG-") or not _nvml_works(load):
        return entry
    try:
        with CardMeter(entry, load) as card:
            return card.uuid()
    except DeviceRefused as fault:
        raise DeviceRefused(
            f"card {entry} is not known to this machine's driver ({fault}): name it by its number or its whole UUID"
        ) from fault


def _nvml_works(load: Callable[[str], Any]) -> bool:
    try:
        nvml = load(LIBRARY)
        works = int(nvml.nvmlInit_v2()) == SUCCESS
    except (OSError, AttributeError):
        return False
    if works:
        nvml.nvmlShutdown()
    return works
