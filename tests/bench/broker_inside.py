"""The broker process, telling every few seconds what its memory is made of, as JSON lines in a file.

    python -m tests.bench.broker_inside FILE        # started by memory_of_supply --inside FILE

In MB: what the kernel counts, what malloc has in use and what it holds free for later, the cache of decoded batches, the index by the size of
its columns (pages that were never written count here and nowhere else), what Arrow's own allocator has; and how many
objects Python tracks. A leak shows in what is in use beside the cache, or in the objects.
"""

from __future__ import annotations

import ctypes
import gc
import json
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from fabric_pipelines.broker.payloads import Payloads

EVERY_S = 5.0
FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")  # fmt: skip


class MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in FIELDS)


def told(payloads: Payloads, mallinfo: Any) -> dict[str, Any]:
    heap, index = mallinfo(), payloads._state.index
    parts = {
        "resident": kernel_bytes("Rss"),
        "own": kernel_bytes("Anonymous"),
        "malloc_used": heap.uordblks + heap.hblkhd,
        "malloc_free": heap.fordblks,
        "cache": payloads._cached_bytes,
        "index": sum(column.nbytes for column in index._columns.values()),
        "arrow": pa.total_allocated_bytes(),
    }
    mb = {f"{name}_mb": round(size / 1e6, 1) for name, size in parts.items()}
    return {"tasks": index.count, **mb, "objects": len(gc.get_objects())}


def kernel_bytes(name: str) -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def watch(to: Path) -> None:
    made: list[Payloads] = []
    plain = Payloads.__init__

    def kept(self: Payloads, *given: Any, **named: Any) -> None:
        plain(self, *given, **named)
        made.append(self)

    Payloads.__init__ = kept  # type: ignore[method-assign]
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallInfo

    def tell() -> None:
        with to.open("w") as file:
            while True:
                time.sleep(EVERY_S)
                if made:
                    file.write(json.dumps(told(made[-1], mallinfo)) + "\n")
                    file.flush()

    threading.Thread(target=tell, daemon=True).start()


if __name__ == "__main__":
    watch(Path(sys.argv.pop()))
    runpy.run_module("fabric_pipelines.broker.__main__", run_name="__main__")
