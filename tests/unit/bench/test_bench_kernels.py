"""The bench of kernels on the stand-in that has no time: every family is queued as its kernel takes it, and no fault of one, of its
card or of its process takes another along."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.bench import kernels, kernels_tiles
from fabric_pipelines.bench.kernels_run import (
    COPY,
    Case,
    Ceilings,
    Item,
    Line,
    Recording,
    send,
    supervised,
    timed,
    work_through,
)
from fabric_pipelines.device.gpu import MATRIX_MODES, Timing
from fabric_pipelines.errors import UsageError

FAMILIES = {
    "ceilings", "pair_tile", "centre_tile", "gauss_tile", "csr_syrk", "spectrum", "ivf_scan", "e8_codec_scan",
    "flat_select", "two_means", "csr_reduce", "csr_select", "knn_graph", "sweeps",
}  # fmt: skip


@pytest.mark.skipif(shutil.which("g++") is None, reason="kernels on the CPU need g++")
def test_a_rehearsal_has_a_line_of_every_family_and_a_broken_one_takes_nothing_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_given: Any) -> Iterator[Case]:
        raise ValueError("planted")

    monkeypatch.setattr(kernels_tiles, "gauss_tile", broken)
    path = tmp_path / "kernels.json"
    assert kernels.main(["--rehearse", "--json", str(path)]) == 1
    lines = json.loads(path.read_text())["lines"]
    assert {line["family"] for line in lines} == FAMILIES
    assert [line["what"] for line in lines if line["fault"]] == ["gauss_tile d=40"]
    assert "FAILED: ValueError: planted" in capsys.readouterr().out
    none = [line for line in lines if line["median_ms"] is None and not line["fault"]]
    assert [line["mode"] for line in none] == [*MATRIX_MODES, "3xtf32"]
    assert all("no card" in line["note"] for line in none)
    measured = {line["what"]: line for line in lines if line["median_ms"] is not None}
    assert len(measured) == 22
    assert all(line["size"] > 0 and line["launches"] == 1 for line in measured.values())
    assert all(line["flop"] > 0 for line in measured.values() if line["mode"] != COPY)

    # pair_tile, pair by pair: 3 clusters of 20 rows of 40 numbers
    pair = measured["pair_tile 3 of 20 x 40"]
    assert pair["flop"] == sum(2 * 40 for _ in range(3) for i in range(20) for _j in range(i))
    assert pair["made"] == 3 * 20 * 20 * 2 * 40
    assert pair["size"] == 60 * (40 * 4 + 4 + 8) + 60 * (8 + 8 + 4 + 10 * 8)

    # ivf_scan, list by list
    scale = kernels_tiles.TINY
    sizes, probes, _ = kernels_tiles._probed(scale)
    scan = next(line for what, line in measured.items() if what.startswith("ivf_scan"))
    assert scan["flop"] == sum(2 * 40 * sizes[number] for row in probes for number in row)
    rows = sum(int(sizes[number]) for number in {int(number) for number in probes.ravel()})
    answers = scale.queries * (10 * (4 + 8) + 8)
    assert scan["size"] == rows * (160 + 4 + 8) + scale.queries * (160 + 4) + answers


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"nothing: --only takes pair_tile, .*sweeps"):
        kernels.main(["--only", "nothing,pair_tile"])


class Clockwork:
    """A card without memory: everything takes a millisecond, a product of `mode` fails."""

    def __init__(self, refused: str = "") -> None:
        self.refused, self.lost = refused, False
        self.queued: list[str] = []

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def upload(self, host: np.ndarray) -> np.ndarray:
        return host

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        self.queued.append("copy")

    def launch(self, family: str, symbol: str, blocks: int, arguments: Sequence[Any]) -> None:
        self.queued.append(symbol)

    def matrix_product(
        self, left: Any, right: Any, out: np.ndarray, mode: str, *, add: bool = False
    ) -> None:
        factor, total = MATRIX_MODES[mode][1:]
        assert (left.dtype, right.dtype, out.dtype) == (factor, factor, total)
        if mode == self.refused:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        self.queued.append(f"{mode}+" if add else mode)

    def time(self, work: Callable[[], object], *, repeats: int, warm_up: int = 3) -> Timing:
        for _ in range(warm_up + repeats):
            work()
        return Timing((1.0,) * repeats)

    def synchronize(self) -> None:
        """Nothing waits."""

    def trim(self) -> None:
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")


def test_a_rate_is_held_to_the_ceiling_of_its_mode_and_a_floor_to_the_greater_of_both() -> None:
    card = Clockwork(refused="int8")
    ceilings = Ceilings(card, 64, 1 << 16)  # type: ignore[arg-type]
    top, copy = 2 * 64**3, 2 << 16  # a millisecond each
    queued = Recording(card)
    queued.launch("family", "kernel", 1, ())
    given = Case("one", "3xtf32", copy // 4, queued.again(), top / 2, made=top / 4)
    line = timed(card, "family", given, ceilings)  # type: ignore[arg-type]
    assert (line.share, line.floor_ms, line.times_floor) == pytest.approx((0.25, 0.5, 2.0))
    assert line.launches == 20
    assert card.queued.count("kernel") == 1 + 1 + 4 * (1 + 5)
    assert card.queued.count("tf32") == 9  # one that shows that it works, 4 rounds of one unseen
    assert card.queued.count("tf32+") == 18
    swept = timed(card, "family", Case("two", COPY, copy // 2, lambda: None), ceilings)  # type: ignore[arg-type]
    assert (swept.share, swept.floor_ms) == pytest.approx((0.5, 0.5))
    without = timed(card, "family", Case("three", "int8", 8, lambda: None, 1.0), ceilings)  # type: ignore[arg-type]
    assert (without.share, without.floor_ms) == (None, None)
    assert "NOT_SUPPORTED" in without.note


def items(*labels: str) -> list[Item]:
    return [Item(label, label, lambda _card: iter(())) for label in labels]


def test_a_lost_card_ends_the_work_of_its_process_and_names_the_item() -> None:
    card, lines, done = Clockwork(), [], []

    def draw(_card: Any) -> Iterator[Case]:
        card.lost = True
        yield Case("kernel", COPY, 8, lambda: None)

    ceilings = Ceilings(card, 32, 1 << 14)  # type: ignore[arg-type]
    given = [Item("a", "a", draw), *items("b")]
    assert not work_through(card, given, ceilings, lines.append, done.append)
    assert done == ["a"]
    assert "illegal memory access" in lines[-1].fault


class Ended:
    def kill(self) -> None:
        """It has ended."""

    def wait(self) -> int:
        return 0


def played(*lives: Sequence[tuple[str, Any]], hang: bool = False) -> tuple[Callable, list, list]:
    """Processes that said this, one after another, and then fell silent (hang) or died; what each was given, open ends."""
    given: list[list[str]] = []
    held: list[Connection] = []

    def start(labels: Sequence[str]) -> tuple[Ended, Connection]:
        ours, theirs = Pipe()
        for message in lives[len(given)]:
            send(theirs, *message)
        given.append(list(labels))
        if hang:
            held.append(theirs)
        else:
            theirs.close()
        return Ended(), ours

    return start, given, held


def supervise(start: Callable, *labels: str, item: float = 5.0, total: float = 60.0) -> list[Line]:
    lines: list[Line] = []
    supervised(
        items(*labels), start, lines.append, lambda _facts: None, item_seconds=item, total_seconds=total
    )  # fmt: skip
    return lines


def test_a_process_that_dies_costs_the_item_it_was_at_and_a_lost_card_costs_none_more() -> None:
    line = ("line", asdict(Line("a", "of a")))
    start, given, _ = played([line, ("done", "a")], [("done", "c"), ("lost", "")], [("done", "d")])
    lines = supervise(start, "a", "b", "c", "d")
    assert given == [["a", "b", "c", "d"], ["c", "d"], ["d"]]
    assert [(each.what, each.fault) for each in lines] == [
        ("of a", ""),
        ("b", "its process ended without a word"),
    ]


def test_what_hangs_is_ended_and_what_comes_too_late_is_named() -> None:
    start, given, held = played([], [("done", "b")], hang=True)
    lines = supervise(start, "a", "b", item=0.0)
    assert given == [["a", "b"], ["b"]]
    assert len(held) == 2
    assert "did not end within 0 s" in lines[0].fault
    start, given, held = played([], hang=True)
    late = supervise(start, "a", "b", total=0.0)
    assert [each.what for each in late] == ["a", "b"]
    assert len(held) == 1
    assert all("0 s of the run are over" in each.fault for each in late)


def test_without_a_card_every_item_says_so_and_no_second_process_is_begun() -> None:
    start, given, _ = played([("refused", "no CUDA device answers")])
    lines = supervise(start, "a", "b")
    assert len(given) == 1
    assert [each.fault for each in lines] == ["no card: no CUDA device answers"] * 2
