"""Independent pieces of a pass side by side, each with one thread of the linear algebra library.

The library's own threads wait for each other more than they compute at matrices of a few hundred, and leave every
other array operation to one core. Pieces do not depend on how many run at once, so neither do the answers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

F64 = np.typing.NDArray[np.float64]
WORKERS_MAX = 8  # the memory of a piece is needed this often
SPAN_VALUES = 1 << 18  # of one array of a span of rows, 2 MiB: its next step finds it in the cache
Piece = TypeVar("Piece")
Answer = TypeVar("Answer")


class _OneThread:
    """The library's limit is the process's: the first user sets it, the last one restores it.

    Libraries are looked for once, which takes 0.2 ms: numpy's is loaded by then, and no pass uses another. A thread of its own
    sets and restores: OpenBLAS 0.3.31 heeds the first thread that ever set its number and ignores all others without a word, so
    a restoring thread that was not the limiting one left the process with one thread for good."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._libraries: ThreadpoolController | None = None
        self._limits: Any = None
        self._setter: ThreadPoolExecutor | None = None
        self._pid = 0

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._libraries is None:
                self._libraries = ThreadpoolController()
            if self._limits is None:
                libraries = self._libraries
                self._limits = self._set(lambda: libraries.limit(limits=1, user_api="blas"))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._limits is not None:
                self._set(self._limits.restore_original_limits)
                self._limits = None

    def _set(self, work: Callable[[], Any]) -> Any:
        if self._setter is None or self._pid != os.getpid():  # a fork takes no threads along
            self._setter, self._pid = ThreadPoolExecutor(1, "one-blas-thread"), os.getpid()
        return self._setter.submit(work).result()


ONE_THREAD = _OneThread()


def workers() -> int:
    return min(WORKERS_MAX, len(os.sched_getaffinity(0)))


def side_by_side(work: Callable[[Piece], Answer], pieces: Iterable[Piece]) -> Iterator[Answer]:
    """The answers in the order of the pieces. The first error ends it, with the pieces not begun left out."""
    with ONE_THREAD, ThreadPoolExecutor(workers()) as pool:
        try:
            yield from pool.map(work, pieces)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def run_side_by_side(work: Callable[[Piece], None], pieces: Iterable[Piece]) -> None:
    """The same for work that leaves its answer where no other piece writes."""
    for _ in side_by_side(work, pieces):
        pass


class Scratch:
    """float64 arrays that pieces of work take and give back. A fresh one of 2 MiB costs 15 times what it takes to fill it with rows,
    where the C library hands it back to the system each time: that hangs on what the process did before."""

    def __init__(self) -> None:
        self._free: list[F64] = []  # its pop and append are whole between threads

    @contextmanager
    def taken(self, count: int, width: int) -> Iterator[F64]:
        """f64 [count, width], with anything in it."""
        kept = self._free.pop() if self._free else np.empty(0)
        if kept.size < count * width:
            kept = np.empty(count * width)
        try:
            yield kept[: count * width].reshape(count, width)
        finally:
            self._free.append(kept)


def over_rows(work: Callable[[slice], None], count: int, width: int = 1) -> None:
    """`work` on spans of `count` rows of `width` values, side by side; it must write to its own rows only. Steps over all of ten
    million rows at once take fresh pages for every array between two of them. One span is done here, without a pool."""
    step = max(1, SPAN_VALUES // max(1, width))
    spans = [slice(low, min(low + step, count)) for low in range(0, count, step)]
    if len(spans) == 1:
        work(spans[0])
    else:
        run_side_by_side(work, spans)
