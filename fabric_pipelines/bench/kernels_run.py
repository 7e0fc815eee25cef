"""What a bench of kernels times, one item after another, and beside what: the copy rate and the rate of matrix products of the
same card in the same rounds.

A time is that of the launches alone: what an item queues is recorded once and queued again, without the host's planning
between. An item that fails is a line with its fault and the next one begins; where the card is lost with it, or hangs, the
process that held it ends and another one goes on with the rest.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fabric_pipelines.device.card import DeviceArray
from fabric_pipelines.device.gpu import MATRIX_MODES, Timing

COPY, TRIPLE = "copy", "3xtf32"
ROUNDS, REPEATS = 4, 5
LINE_SECONDS = 1.5  # of launches of one line, one launch at least
PIECE_VALUES = 1 << 24  # random numbers made on the host, then repeated on the card by copies
SHORT_MS = 100.0  # launches below go once unseen, after what ran before them


class Timed(Protocol):
    """A card with a clock: device.gpu.Gpu, and the stand-in of a rehearsal."""

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray: ...

    def upload(self, host: npt.NDArray[Any]) -> DeviceArray: ...

    def copy(self, target: DeviceArray, source: DeviceArray) -> None: ...

    def matrix_product(
        self,
        left: DeviceArray,
        right: DeviceArray,
        out: DeviceArray,
        mode: str,
        *,
        add: bool = False,
    ) -> None: ...

    def time(self, work: Callable[[], object], *, repeats: int, warm_up: int = 3) -> Timing: ...

    def synchronize(self) -> None: ...

    def trim(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Case:
    """flop and size: least operations and bytes of `queue`; made: operations that it makes by its design, where that is more;
    mode: of the ceiling it is held to, COPY for what moves more than it computes."""

    what: str
    mode: str
    size: int
    queue: Callable[[], object]
    flop: float = 0.0
    made: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Item:
    """`draw` makes the data on a recording card and yields what is to be timed."""

    family: str
    label: str
    draw: Callable[[Any], Iterator[Case]]


@dataclass(frozen=True, slots=True)
class Line:
    """rate and ceiling: TFLOP/s of `made`, or GB/s where the mode is COPY; share: rate / ceiling; floor_ms: the greater of flop at
    the ceiling and of size at the copy rate. None: not measured, and `note` or `fault` says why."""

    family: str
    what: str
    mode: str = ""
    flop: float = 0.0
    made: float = 0.0
    size: int = 0
    launches: int = 0
    median_ms: float | None = None
    spread: float | None = None
    rate: float | None = None
    gb_per_s: float | None = None
    ceiling: float | None = None
    copy_gb_per_s: float | None = None
    share: float | None = None
    floor_ms: float | None = None
    times_floor: float | None = None
    note: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    family: str
    run: Callable[[], object]


class Recording:
    """Passes everything on to a card and keeps what was queued, with the arrays that it needs."""

    def __init__(self, card: Any) -> None:
        self._card = card
        self.steps: list[Step] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._card, name)

    def launch(self, family: str, symbol: str, blocks: int, arguments: Sequence[Any]) -> None:
        self._queue(family, partial(self._card.launch, family, symbol, blocks, tuple(arguments)))

    def fill(self, target: DeviceArray, byte: int) -> None:
        self._queue("", partial(self._card.fill, target, byte))

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        self._queue("", partial(self._card.copy, target, source))

    def products(
        self, left: DeviceArray, right: DeviceArray, out: DeviceArray, *, add: bool = False
    ) -> None:
        self._queue("products", partial(self._card.products, left, right, out, add=add))

    def _queue(self, family: str, run: Callable[[], object]) -> None:
        run()
        self.steps.append(Step(family, run))

    def forget(self) -> None:
        """What was queued so far made the data."""
        self.steps = []

    def again(self, *, without: str | None = None) -> Callable[[], None]:
        """Queues what was queued since `forget`, but for the steps of one family."""
        steps = tuple(step for step in self.steps if step.family != without)
        assert steps, "nothing was queued"

        def queue() -> None:
            for step in steps:
                step.run()

        return queue


def random_rows(card: Timed, count: int, dim: int, seed: int = 0) -> DeviceArray:
    """f32 [count, dim], normal; a piece repeated where that is more than PIECE_VALUES numbers."""
    piece = max(1, min(count, PIECE_VALUES // dim))
    rng = np.random.default_rng(seed)
    return repeated(card, rng.standard_normal((piece, dim), dtype=np.float32), count)


def repeated(card: Timed, piece: npt.NDArray[Any], count: int) -> DeviceArray:
    """`count` rows on the card, those of `piece` over and over."""
    one = card.upload(piece)
    if len(piece) == count:
        return one
    out = card.empty((count, *piece.shape[1:]), piece.dtype)
    for start in range(0, count, len(piece)):
        part = out[start : start + len(piece)]
        card.copy(part, one[: len(part)])
    return out


class Ceilings:
    """Rates of one card: of copies, and of matrix products of `side`^3 (f64: half the side) by cuBLAS in the modes of
    MATRIX_MODES; and in mode TRIPLE of three TF32 products of factors that lie split into two TF32 numbers, counted as one. The
    split itself is not in that time."""

    modes = (COPY, *MATRIX_MODES, TRIPLE)

    def __init__(self, card: Timed, side: int, copy_bytes: int) -> None:
        self._card, self._side, self._copy_bytes = card, side, copy_bytes
        self._held: dict[str, Case] = {}
        self._faults: dict[str, str] = {}

    def case(self, mode: str) -> Case | None:
        """None where this machine cannot: `fault` says why."""
        if mode not in self._held and mode not in self._faults:
            try:
                found = self._copies() if mode == COPY else self._product(mode)
                found.queue()
                self._card.synchronize()
                self._held[mode] = found
            except Exception as fault:  # noqa: BLE001 - whatever a library says, it is the reason of a row
                self._faults[mode] = f"{type(fault).__name__}: {fault}"
        return self._held.get(mode)

    def fault(self, mode: str) -> str:
        return self._faults[mode]

    def items(self) -> list[Item]:
        return [
            Item("ceilings", f"ceiling {mode}", partial(self._one, mode)) for mode in self.modes
        ]

    def _one(self, mode: str, _card: Any) -> Iterator[Case]:
        found = self.case(mode)
        if found is not None:
            yield found

    def _copies(self) -> Case:
        values = self._copy_bytes // 4096
        source = random_rows(self._card, values, 1024)
        target = self._card.empty(source.shape, source.dtype)
        return Case(
            f"copy {source.nbytes:,} bytes", COPY, 2 * source.nbytes,
            lambda: self._card.copy(target, source),
        )  # fmt: skip

    def _product(self, mode: str) -> Case:
        _, factor, total = MATRIX_MODES["tf32" if mode == TRIPLE else mode]
        side = self._side // 2 if factor == "f8" else self._side
        out = self._card.empty((side, side), total)
        flop, kind = 2.0 * side**3, np.dtype(factor)
        size = kind.itemsize * 2 * side**2 + out.nbytes
        what = f"product {mode} {side:,}^3"
        if mode == TRIPLE:
            high, low = zip(*(self._split(side, seed) for seed in (0, 1)), strict=True)

            def three() -> None:
                self._card.matrix_product(low[0], high[1], out, "tf32")
                self._card.matrix_product(high[0], low[1], out, "tf32", add=True)
                self._card.matrix_product(high[0], high[1], out, "tf32", add=True)

            note = "three TF32 products on factors split before, counted as one product"
            return Case(what, mode, 2 * size, three, flop, note=note)
        left, right = (self._factor(side, kind, seed) for seed in (0, 1))
        return Case(
            what, mode, size, lambda: self._card.matrix_product(left, right, out, mode), flop
        )

    def _factor(self, side: int, kind: np.dtype[Any], seed: int) -> DeviceArray:
        rng, rows = np.random.default_rng(seed), max(1, min(side, PIECE_VALUES // side))
        if kind == np.int8:
            return repeated(self._card, rng.integers(-127, 128, (rows, side), np.int8), side)
        return repeated(self._card, rng.standard_normal((rows, side)).astype(kind), side)

    def _split(self, side: int, seed: int) -> tuple[DeviceArray, DeviceArray]:
        """A TF32 number has the 10 upper bits of a float32's 23."""
        rng, rows = np.random.default_rng(seed), max(1, min(side, PIECE_VALUES // side))
        whole = rng.standard_normal((rows, side), dtype=np.float32)
        high = (whole.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        return repeated(self._card, high, side), repeated(self._card, whole - high, side)


def work_through(
    card: Any,
    items: Sequence[Item],
    ceilings: Ceilings,
    say: Callable[[Line], None],
    done: Callable[[str], None],
    *,
    line_seconds: float = LINE_SECONDS,
) -> bool:
    """False where the card was lost and another process must go on."""
    for item in items:
        try:
            _work_at(card, item, ceilings, say, line_seconds)
        except Exception as fault:  # noqa: BLE001 - the others must not be lost with one family
            say(failed(item, f"{type(fault).__name__}: {fault}"))
        try:
            card.trim()  # waits for what is queued, too
        except Exception as fault:  # noqa: BLE001 - as above
            say(failed(item, f"the card was lost: {type(fault).__name__}: {fault}"))
            done(item.label)
            return False
        done(item.label)
    return True


def _work_at(
    card: Any, item: Item, ceilings: Ceilings, say: Callable[[Line], None], line_seconds: float
) -> None:
    recording, cases = Recording(card), 0
    for case in item.draw(recording):
        say(timed(card, item.family, case, ceilings, line_seconds))
        cases += 1
    if not cases:
        mode = item.label.removeprefix("ceiling ")
        say(Line(item.family, item.label, mode, note=ceilings.fault(mode)))


def timed(
    card: Timed, family: str, case: Case, ceilings: Ceilings, line_seconds: float = LINE_SECONDS
) -> Line:
    """Medians of launches in rounds that alternate with the copy and with the product of its mode."""
    own = family == "ceilings"
    beside = {mode: None if own else ceilings.case(mode) for mode in (COPY, case.mode)}
    first_ms = card.time(case.queue, repeats=1, warm_up=0).median_ms
    launches = int(np.clip(1e3 * line_seconds / max(first_ms, 1e-3), 1, ROUNDS * REPEATS))
    rounds = min(ROUNDS, launches)
    unseen = int(first_ms < SHORT_MS and line_seconds > 0)
    taken: list[float] = []
    other: dict[str, list[float]] = {mode: [] for mode in beside}
    for _ in range(rounds):
        for mode, one in beside.items():
            if one is not None:
                other[mode] += card.time(one.queue, repeats=1, warm_up=unseen).repeats_ms
        taken += card.time(case.queue, repeats=launches // rounds, warm_up=unseen).repeats_ms
    copy, top = (_rate(beside[mode], other[mode]) for mode in (COPY, case.mode))
    median = statistics.median(taken)
    made = case.flop if case.made is None else case.made
    gb_per_s = case.size / median / 1e6
    rate = gb_per_s if case.mode == COPY else made / median / 1e9
    floor_ms = _floor_ms(case, top, copy)
    why = "" if own or beside[case.mode] is not None else f"no ceiling: {ceilings.fault(case.mode)}"
    return Line(
        family=family,
        what=case.what,
        mode=case.mode,
        flop=case.flop,
        made=made,
        size=case.size,
        launches=len(taken),
        median_ms=median,
        spread=(max(taken) - min(taken)) / median,
        rate=rate,
        gb_per_s=gb_per_s,
        ceiling=top,
        copy_gb_per_s=copy,
        share=None if top is None else rate / top,
        floor_ms=floor_ms,
        times_floor=None if floor_ms is None else median / floor_ms,
        note="; ".join(part for part in (case.note, why) if part),
    )


def _rate(case: Case | None, taken: Sequence[float]) -> float | None:
    """GB/s of a copy, TFLOP/s of a product."""
    if case is None:
        return None
    median = statistics.median(taken)
    return case.size / median / 1e6 if case.mode == COPY else case.flop / median / 1e9


def _floor_ms(case: Case, top: float | None, copy: float | None) -> float | None:
    if top is None or copy is None:
        return None
    computed = 0.0 if case.mode == COPY else case.flop / top / 1e9
    return max(computed, case.size / copy / 1e6)


def failed(item: Item, fault: str) -> Line:
    return Line(item.family, item.label, fault=fault)


class Process(Protocol):
    def kill(self) -> None: ...

    def wait(self) -> int: ...


def send(pipe: Connection, kind: str, value: Any) -> None:
    pipe.send_bytes(json.dumps([kind, value]).encode())


def supervised(
    items: Sequence[Item],
    start: Callable[[Sequence[str]], tuple[Process, Connection]],
    say: Callable[[Line], None],
    told: Callable[[dict[str, Any]], None],
    *,
    item_seconds: float,
    total_seconds: float,
) -> None:
    """`start` takes labels of items and gives a process that works through them and sends (see `send`) "line" with a Line's fields,
    "done" with a label, "told" with facts of the card, "lost" before it leaves a lost card, and "refused" with the reason where it
    has none."""
    left, end = list(items), time.monotonic() + total_seconds
    while left:
        process, pipe = start([item.label for item in left])
        try:
            why = _listen(pipe, left, say, told, end, item_seconds)
        finally:
            process.kill()
            process.wait()
            pipe.close()
        over = time.monotonic() >= end
        if left and why:
            say(
                failed(left.pop(0), f"the {total_seconds:g} s of the run are over" if over else why)
            )
        if over or why.startswith("no card: "):
            for item in left:
                reason = f"not begun: the {total_seconds:g} s of the run are over" if over else why
                say(failed(item, reason))
            return


def _listen(
    pipe: Connection,
    left: list[Item],
    say: Callable[[Line], None],
    told: Callable[[dict[str, Any]], None],
    end: float,
    item_seconds: float,
) -> str:
    """Takes from `left` what is done; why the first of it is to be given up, or nothing."""
    begun = time.monotonic()
    while left:
        wait = min(begun + item_seconds, end) - time.monotonic()
        if not pipe.poll(max(0.0, wait)):
            return f"did not end within {item_seconds:g} s: its process was ended"
        try:
            kind, value = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return "its process ended without a word"
        if kind == "line":
            say(Line(**value))
        elif kind == "told":
            told(value)
        elif kind == "done":
            assert left[0].label == value
            left.pop(0)
            begun = time.monotonic()
        elif kind == "lost":
            return ""
        else:
            return f"no card: {value}"
    return ""
