"""Memory and order of a torch engine's steps: what goes in, what comes out, and when, without taking memory or waiting.

Inputs and results pass through pinned memory that is taken and touched when the engine opens. Work is queued on a stream of
its own; its end is an event that is asked, and never waited for. One step at a time: a step's inputs may be overwritten
as soon as its results are there. On a processor the same calls copy at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import UsageError
from fabric_pipelines.worker.engines.transfers import NEVER_WAITED_FOR
from fabric_pipelines.worker.gaps import Gaps

ALIGNMENT = 16
POLL_S = 50e-6  # between two looks at an event


class Staging:
    """input_bytes, result_bytes: of pinned memory. Inputs must fit (each array begins at a multiple of ALIGNMENT); results may
    be larger and then come in pieces, of which one row must fit."""

    def __init__(self, torch: Any, device: str, input_bytes: int, result_bytes: int) -> None:
        self._torch, self._cuda = torch, device == "cuda"
        self._here = self._pinned(input_bytes)
        self._there = torch.empty(input_bytes, dtype=torch.uint8, device=device)
        self._results = self._pinned(result_bytes)
        self._stream = torch.cuda.Stream() if self._cuda else None
        self._marks = [self._event(), self._event()]  # begin and end of a step
        self._end_before: Any = None
        self._spare: Any = self._event()
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
        self.device_s, self.gaps, self._end_before = 0.0, Gaps(), None

    def stream(self) -> AbstractContextManager[Any]:
        """What is queued inside goes to the stream of this engine."""
        return self._torch.cuda.stream(self._stream) if self._cuda else nullcontext()

    def synchronize(self) -> None:
        """UsageError, always."""
        raise UsageError(NEVER_WAITED_FOR)

    def put(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Any]:
        """Begin a step: the arrays as tensors on the device, valid for work that is queued until the next `put`."""
        spans, at = [], 0
        for array in arrays:
            spans.append((at, at + array.nbytes))
            at += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        assert at <= len(self._here), f"a step of {at:,} bytes was not foreseen"
        held = self._here.numpy()
        for array, (start, end) in zip(arrays, spans, strict=True):
            held[start:end].view(array.dtype).reshape(array.shape)[...] = array
        self._mark(0)
        self._there[:at].copy_(self._here[:at], non_blocking=True)
        return [
            self._there[start:end].view(getattr(self._torch, array.dtype.name)).view(array.shape)
            for array, (start, end) in zip(arrays, spans, strict=True)
        ]

    def fetch(self, made: Any) -> npt.NDArray[Any]:
        """End the step: `made` [n, width] on this machine, once it is there. RuntimeError when the card failed."""
        row_bytes = made.shape[1] * made.element_size()
        rows = len(self._results) // max(row_bytes, 1)
        assert rows, f"a row of {row_bytes:,} bytes was not foreseen"
        pieces = []
        for first in range(0, len(made), rows):
            part = made[first : first + rows]
            place = self._results[: len(part) * row_bytes].view(made.dtype).view(part.shape)
            place.copy_(part, non_blocking=True)
            self._mark(1)
            self._until_done()
            pieces.append(place.numpy().copy())
        self._account()
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _mark(self, which: int) -> None:
        if self._cuda:
            self._marks[which].record(self._stream)

    def _until_done(self) -> None:
        while self._cuda and not self._marks[1].query():
            time.sleep(POLL_S)

    def _account(self) -> None:
        """By the card's own clock: from a step's first copy to its last, and from the last of the step before."""
        if not self._cuda:
            return
        begin, end = self._marks
        self.device_s += begin.elapsed_time(end) / 1e3
        if self._end_before is not None:
            self.gaps.add(max(self._end_before.elapsed_time(begin), 0.0) / 1e3)
        self._end_before, self._marks[1], self._spare = end, self._spare, self._end_before
        if self._spare is None:
            self._spare = self._event()
