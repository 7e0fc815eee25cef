"""Memory and order of a torch engine's steps: what goes in, what comes out, and when, without taking memory or waiting.

Inputs and results pass through pinned memory that is taken and touched when the engine opens. Work is queued on a stream of
its own; its end is an event that is asked, and never waited for. Two slots: a step may be launched while the one before
still runs, which closes the gap between them as no bell could (docs/rejected.md). On a processor the same calls copy at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import UsageError
from fabric_pipelines.worker.engines.transfers import NEVER_WAITED_FOR
from fabric_pipelines.worker.gaps import Gaps

SLOTS = 2
POLL_S = 50e-6  # between two looks at an event


@dataclass(slots=True, eq=False)
class Slot:
    """Pinned memory of one step, one block an input, and the events before and behind it (None on a processor)."""

    inputs: list[Any]
    results: Any
    begin: Any
    end: Any
    taken: bool = False


class Staging:
    """input_bytes: most of each input; result_bytes: of a slot's pinned memory for results, which may be larger and then come
    in pieces, of which one row must fit. `put`, then `launched` in the thread that queues the work; `fetch` in any, steps
    in order."""

    def __init__(
        self, torch: Any, device: str, input_bytes: Sequence[int], result_bytes: int
    ) -> None:
        self._torch, self._cuda = torch, device == "cuda"
        # One each is enough: on one stream a step's inputs are overwritten after its work. Not one for all of them: what is
        # compiled is compiled again for a tensor that begins elsewhere in its memory than the one before.
        self._there = [torch.empty(size, dtype=torch.uint8, device=device) for size in input_bytes]
        self._slots = [
            Slot(
                [self._pinned(size) for size in input_bytes],
                self._pinned(result_bytes),
                self._event(),
                self._event(),
            )
            for _ in range(SLOTS)
        ]
        self._stream = torch.cuda.Stream() if self._cuda else None
        self._turn = 0
        # An event of its own: the slot's is recorded again before the gap behind it can be told.
        self._end_before: Any = None
        self._spare = self._event()
        self.device_s = 0.0
        self.gaps = Gaps()

    def _pinned(self, size: int) -> Any:
        memory = self._torch.empty(size, dtype=self._torch.uint8, pin_memory=self._cuda)
        memory.zero_()  # its pages are there from now on
        return memory

    def _event(self) -> Any:
        return self._torch.cuda.Event(enable_timing=True) if self._cuda else None

    def forget(self) -> None:
        """Steps so far do not count: they were there to warm up."""
        self.device_s, self.gaps = 0.0, Gaps()
        if self._end_before is not None:
            self._end_before, self._spare = None, self._end_before

    def stream(self) -> AbstractContextManager[Any]:
        """What is queued inside goes to the stream of this engine."""
        return self._torch.cuda.stream(self._stream) if self._cuda else nullcontext()

    def synchronize(self) -> None:
        """UsageError, always."""
        raise UsageError(NEVER_WAITED_FOR)

    def put(self, arrays: Sequence[npt.NDArray[Any]]) -> tuple[Slot, list[Any]]:
        """Begin a step: the arrays as tensors on the device, valid for work that is queued until the next `put`."""
        slot = self._slots[self._turn % SLOTS]
        assert not slot.taken, f"{SLOTS} steps are under way"
        for array, here in zip(arrays, slot.inputs, strict=True):
            size = array.nbytes
            assert size <= len(here), f"an input of {size:,} bytes was not foreseen"
            here.numpy()[:size].view(array.dtype).reshape(array.shape)[...] = array
        slot.taken = True
        self._turn += 1
        self._mark(slot.begin)
        return slot, [
            self._sent(array, here, there)
            for array, here, there in zip(arrays, slot.inputs, self._there, strict=True)
        ]

    def _sent(self, array: npt.NDArray[Any], here: Any, there: Any) -> Any:
        size = array.nbytes
        there[:size].copy_(here[:size], non_blocking=True)
        return there[:size].view(getattr(self._torch, array.dtype.name)).view(array.shape)

    def launched(self, slot: Slot, made: Any) -> None:
        """Behind the work of a step: its results [n, width], or the first piece of them, are on their way."""
        self._copy(slot, made[: self._rows(slot, made)])

    def withdraw(self, slot: Slot) -> None:
        """The step could not be launched. A copy of its inputs may still run: what it reads later is overwritten again."""
        slot.taken = False

    def fetch(self, slot: Slot, made: Any) -> npt.NDArray[Any]:
        """End the step: `made` on this machine, once it is there. RuntimeError when the card failed."""
        try:
            pieces = list(self._pieces(slot, made))
            self._account(slot)
        finally:
            slot.taken = False
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _pieces(self, slot: Slot, made: Any) -> Iterator[npt.NDArray[Any]]:
        rows = self._rows(slot, made)
        for first in range(0, len(made), rows):
            part = made[first : first + rows]
            if first:
                with self._torch.inference_mode(), self.stream():
                    self._copy(slot, part)
            while self._cuda and not slot.end.query():
                time.sleep(POLL_S)
            yield self._place(slot, part).numpy().copy()

    def _rows(self, slot: Slot, made: Any) -> int:
        row_bytes = made.shape[1] * made.element_size()
        rows = len(slot.results) // max(int(row_bytes), 1)
        assert rows, f"a row of {row_bytes:,} bytes was not foreseen"
        return rows

    def _place(self, slot: Slot, part: Any) -> Any:
        size = part.shape[0] * part.shape[1] * part.element_size()
        return slot.results[:size].view(part.dtype).view(part.shape)

    def _copy(self, slot: Slot, part: Any) -> None:
        self._place(slot, part).copy_(part, non_blocking=True)
        self._mark(slot.end)

    def _mark(self, event: Any) -> None:
        if self._cuda:
            event.record(self._stream)

    def _account(self, slot: Slot) -> None:
        """By the card's own clock: from a step's first copy to its last, and from the last of the step before."""
        if not self._cuda:
            return
        self.device_s += slot.begin.elapsed_time(slot.end) / 1e3
        if self._end_before is not None:
            self.gaps.add(max(self._end_before.elapsed_time(slot.begin), 0.0) / 1e3)
        before = self._end_before if self._end_before is not None else self._spare
        self._end_before, slot.end = slot.end, before
