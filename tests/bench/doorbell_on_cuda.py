"""What starts a step on a card soonest: a host that polls and launches, or work that waits behind a doorbell in pinned memory.

    python -m tests.bench.doorbell_on_cuda --json OUT/doorbell.json

A step is a copy of its inputs from pinned memory, a chain of bfloat16 products, and a word written to pinned memory at its
end; the host learns of the end by looking at that word. Three ways:
  polling   the host sees the end of a step, then its inputs are there, then it launches the step
  doorbell  the step was launched while the one before ran, behind cuStreamWaitValue32; the host sees the end, the inputs
            are there, the host rings
  ahead     the step was launched while the one before ran, its inputs being there already: no bell is needed
Ways in turn, five rounds. A launch queue has an end: with a chain longer than it, whoever would ring is stuck in a launch,
so the bell is rung by a second thread should the first not come (counted as `rescued`).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ
WIDTH, ROUNDS = 3584, 5
SHAPES = ((1, 1, 2000), (16, 40, 300), (1024, 40, 150), (8192, 280, 12))  # rows, products, steps
RESCUE_S = 2.0


class Bells:
    """Words in pinned memory: `rung` is waited for by the stream, `ended` is written by it."""

    def __init__(self, torch: Any, stream: Any) -> None:
        self._driver, self._stream = (
            ctypes.CDLL("libcuda.so.1"),
            ctypes.c_void_p(stream.cuda_stream),
        )
        memory = torch.zeros(2048, dtype=torch.uint8, pin_memory=True)
        self._memory, self.words = memory, memory.numpy().view(np.uint32)
        self._rung, self._ended = memory.data_ptr(), memory.data_ptr() + 1024  # lines of their own

    def ring(self, number: int) -> None:
        self.words[0] = number

    @property
    def ended(self) -> int:
        return int(self.words[256])

    def wait(self, number: int) -> None:
        self._ask("cuStreamWaitValue32_v2", self._rung, number, GEQ)

    def write(self, number: int) -> None:
        self._ask("cuStreamWriteValue32_v2", self._ended, number, 0)

    def _ask(self, name: str, address: int, value: int, flags: int) -> None:
        result = getattr(self._driver, name)(
            self._stream, ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(flags)
        )
        assert result == 0, f"{name} failed with {result}"


class Steps:
    def __init__(self, torch: Any, rows: int, products: int) -> None:
        self._torch, self._products = torch, products
        self.stream = torch.cuda.Stream()
        self.bells = Bells(torch, self.stream)
        self._inputs = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, pin_memory=True)
        self._here = torch.empty(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
        self._other = torch.empty_like(self._here)
        self._weights = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda") / WIDTH**0.5
        self._view = self._inputs.view(torch.int16).numpy()
        self.number = 0
        self.rescued = 0

    def arrive(self) -> None:
        """The inputs of the next step come to be: one line of each row is written. `ahead` may overwrite what a copy has
        still to take, where an engine would have two buffers; what the numbers are makes no difference here."""
        self._view[:, :32] = self.number & 0xFF

    def launch(self, number: int, *, behind_bell: bool) -> None:
        with self._torch.cuda.stream(self.stream):
            if behind_bell:
                self.bells.wait(number)
            self._here.copy_(self._inputs, non_blocking=True)
            one, other = self._here, self._other
            for _ in range(self._products):
                self._torch.mm(one, self._weights, out=other)
                one, other = other, one
            self.bells.write(number)

    def until_ended(self, number: int) -> None:
        while self.bells.ended < number:
            pass

    def polling(self, steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            self.number += 1
            self.arrive()
            self.launch(self.number, behind_bell=False)
            self.until_ended(self.number)
        return (time.perf_counter() - start) / steps

    def doorbell(self, steps: int) -> float:
        first = self.number + 1
        rescue = threading.Timer(RESCUE_S, self._rescue, [first + steps])
        rescue.daemon = True
        rescue.start()
        start = time.perf_counter()
        self.launch(first, behind_bell=True)
        for number in range(first, first + steps):
            self.number = number
            self.arrive()
            self.bells.ring(number)
            if number + 1 < first + steps:
                self.launch(number + 1, behind_bell=True)  # while this one runs
            self.until_ended(number)
        took = (time.perf_counter() - start) / steps
        rescue.cancel()
        return took

    def ahead(self, steps: int) -> float:
        first = self.number + 1
        start = time.perf_counter()
        self.arrive()
        self.launch(first, behind_bell=False)
        for number in range(first, first + steps):
            self.number = number
            if number + 1 < first + steps:
                self.arrive()
                self.launch(number + 1, behind_bell=False)
            self.until_ended(number)
        return (time.perf_counter() - start) / steps

    def card_s(self, steps: int) -> float:
        """A step by the card's clock, launched without a pause between: what no way can be faster than."""
        cuda = self._torch.cuda
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record(self.stream)
        for _ in range(steps):
            self.number += 1
            self.launch(self.number, behind_bell=False)
        end.record(self.stream)
        self.until_ended(self.number)
        while not end.query():
            pass
        return float(begin.elapsed_time(end)) / 1e3 / steps

    def _rescue(self, number: int) -> None:
        self.rescued += 1
        self.bells.ring(number)


def measure(torch: Any, rows: int, products: int, steps: int) -> dict[str, Any]:
    one = Steps(torch, rows, products)
    ways: dict[str, Callable[[int], float]] = {
        "polling": one.polling, "doorbell": one.doorbell, "ahead": one.ahead, "card": one.card_s,
    }  # fmt: skip
    for way in ways.values():
        way(max(steps // 10, 3))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            found[name].append(1e6 * way(steps))
    return {"rows": rows, "products": products, "steps": steps, "rescued": one.rescued,
            "us_a_step": found}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    import torch

    told = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "shapes": []}
    sys.stdout.write(
        f"{'rows':>6}{'products':>9}{'polling us':>18}{'doorbell us':>18}{'ahead us':>18}{'card us':>12}  rescued\n"
    )
    for shape in SHAPES:
        found = measure(torch, *shape)
        told["shapes"].append(found)
        shown = [
            f"{statistics.median(found['us_a_step'][way]):,.1f} "
            f"({min(found['us_a_step'][way]):,.1f}-{max(found['us_a_step'][way]):,.1f})"
            for way in ("polling", "doorbell", "ahead")
        ]
        card = statistics.median(found["us_a_step"]["card"])
        sys.stdout.write(
            f"{shape[0]:6}{shape[1]:9}  "
            + "  ".join(f"{s:>24}" for s in shown)
            + f"{card:12,.1f}  {found['rescued']}\n"
        )
        sys.stdout.flush()
    given.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
