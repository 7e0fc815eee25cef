"""CUDA calls of this process that take memory or make a thread wait, ours and an engine's apart.

They are counted in the driver by a library that was preloaded (cuda/shim/cuda_calls.c); without it nothing is known, and
nothing is claimed. A call is ours unless it was made while a thread had been handed to an engine: `with engine():` around
the library's own work, `with ours():` where it calls back. So calls of threads that a library starts itself count as ours,
and those of other processes (vLLM's scheduler) are not here at all. A mark costs 1.8 us where calls are counted and 0.8
where not (one core of a busy machine), so it stands around steps and layers and not around operations.

`python -m fabric_pipelines.device.calls` prints the path of the library, for LD_PRELOAD.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fabric_pipelines.errors import UsageError

KINDS = ("device_allocations", "pinned_allocations", "synchronisations", "blocking_copies")
OURS, ENGINE = 0, 1
OWNERS = ("ours", "engine")
INTERFACE = 1  # of cuda_calls.c
LIBRARY = Path(__file__).parent / "shim" / platform.machine() / "libfabric_cuda_calls.so"
PRELOAD = "LD_PRELOAD"


@dataclass(frozen=True, slots=True)
class Calls:
    """Counts by kind. blocking_copies: copies that return when they are done. unseen: look-ups of counted functions that
    found the library full; anything but 0 means that calls are missing here."""

    ours: Mapping[str, int]
    engine: Mapping[str, int]
    unseen: int = 0

    def since(self, before: Calls) -> Calls:
        return Calls(
            {kind: self.ours[kind] - before.ours[kind] for kind in KINDS},
            {kind: self.engine[kind] - before.engine[kind] for kind in KINDS},
            self.unseen,
        )

    def as_json(self) -> dict[str, Any]:
        return {"ours": dict(self.ours), "engine": dict(self.engine), "unseen": self.unseen}


@cache
def _library() -> Any:
    """The preloaded library, None where the process was started without it or with another version of it."""
    whole = ctypes.PyDLL(None)  # a mark must not give the interpreter away to another thread
    try:
        if int(whole.fabric_calls_interface()) != INTERFACE:
            return None
    except AttributeError:
        return None
    whole.fabric_calls_read.restype = None
    return whole


def read() -> Calls | None:
    """Since the process began; None when nobody counts."""
    library = _library()
    if library is None:
        return None
    found = (ctypes.c_uint64 * (len(OWNERS) * len(KINDS) + 1))()
    library.fabric_calls_read(found)
    ours, engine = (
        dict(zip(KINDS, found[owner * len(KINDS) : (owner + 1) * len(KINDS)], strict=True))
        for owner in (OURS, ENGINE)
    )
    return Calls(ours, engine, int(found[len(OWNERS) * len(KINDS)]))


class _Marked:
    """While it is entered, calls of this thread are of one owner. One object a thread and level."""

    __slots__ = ("_before", "_owner")

    def __init__(self, owner: int) -> None:
        self._owner, self._before = owner, OURS

    def __enter__(self) -> None:
        library = _library()
        if library is not None:
            self._before = int(library.fabric_calls_owner(self._owner))

    def __exit__(self, *fault: object) -> None:
        library = _library()
        if library is not None:
            library.fabric_calls_owner(self._before)


def engine() -> _Marked:
    """This thread runs the engine's library from here on."""
    return _Marked(ENGINE)


def ours() -> _Marked:
    """This thread is back in our code, called by the library."""
    return _Marked(OURS)


def library() -> Path:
    """The library of this machine's processor. UsageError where none was built."""
    if not LIBRARY.exists():
        raise UsageError(
            f"no library that counts CUDA calls was built for {platform.machine()}: run `make -C cuda/shim install` "
            "in a checkout, or start without counting"
        )
    return LIBRARY


def environment(given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a process must be started with to have its calls counted: the library before whatever is preloaded."""
    others = [name for name in given.get(PRELOAD, "").split(":") if name and name != str(LIBRARY)]
    return {PRELOAD: ":".join([str(library()), *others])}


def main() -> None:
    sys.stdout.write(f"{library()}\n")


if __name__ == "__main__":
    main()
