"""A file that went away under an open journal is noticed before anything more is called durable in it, or within a look."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines.errors import HomeGone
from fabric_pipelines.journal import Journal
from fabric_pipelines.testing.memory_store import MemoryStore

SEGMENT_BYTES = 1 << 16


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """Two sealed segments and the one that is written to."""
    made = Journal.open(tmp_path / "journal", segment_bytes=SEGMENT_BYTES, store=MemoryStore())
    for _ in range(2):
        put(made)
        made.roll()
    put(made)
    made.watch()
    yield made
    made._stopped = made._stopped or "over"
    made.close()


def put(journal: Journal) -> int:
    journal.append(1, b"x" * 500, rows=1, time_us=0)
    return journal.commit()


def move(path: Path) -> None:
    path.rename(path.with_suffix(".aside"))


def replace(path: Path) -> None:
    shutil.copyfile(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").rename(path)


def cut(path: Path) -> None:
    os.truncate(path, SEGMENT_BYTES - 1)


HOW: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (Path.unlink, "was deleted"),
    "cut": (cut, f"was cut short to {SEGMENT_BYTES - 1} of its {SEGMENT_BYTES} bytes"),
    "replaced": (replace, "was replaced by another"),
    "moved": (move, "was moved or deleted"),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_look_finds_any_file_that_went_and_ends_the_journal(
    journal: Journal, how: str, at: int
) -> None:
    act, word = HOW[how]
    path = journal._segments[at].path
    act(path)
    with pytest.raises(HomeGone) as told:
        journal.watch()
    assert str(told.value).startswith(
        f"{path} {word} while the broker ran, so it stopped: LSN {at + 1}.."
    )
    assert "nothing was acknowledged since all files were last seen whole" in str(told.value)
    for again in (journal.watch, journal.commit, journal.close):
        if again != journal.close:
            with pytest.raises(HomeGone, match="so it stopped"):
                again()


@pytest.mark.parametrize("how", ["deleted", "cut", "replaced"])
def test_nothing_is_called_durable_in_a_file_that_was_deleted_or_cut(
    journal: Journal, how: str
) -> None:
    put(journal)
    before = journal.durable_lsn
    HOW[how][0](journal._segments[-1].path)
    with pytest.raises(
        HomeGone, match=f"LSN 3..{before}, which are acknowledged, lie in it"
    ) as told:
        put(journal)
    assert journal.durable_lsn == before == 4
    assert "LSN 4..4 were acknowledged since all files were last seen whole" in str(told.value)


@pytest.mark.parametrize("way", [Journal.roll, Journal.close])
def test_a_file_that_was_moved_away_is_missed_at_the_next_roll_and_at_the_end(
    journal: Journal, way: Callable[[Journal], None]
) -> None:
    put(journal)
    move(journal._segments[-1].path)
    put(journal)
    with pytest.raises(HomeGone, match=r"moved or deleted.*LSN 4\.\.5 were acknowledged since"):
        way(journal)


def test_a_file_that_the_journal_itself_gave_up_is_not_missed(journal: Journal) -> None:
    first = journal._segments[0]
    journal.recycle_below(2)
    put(journal)
    journal.roll()
    journal.watch()
    assert first.path in {segment.path for segment in journal._segments}, "it was used again"
    second = next(segment for segment in journal._segments if segment.sealed)
    stub = journal.cold.copy_out(second)
    path = second.path
    journal.went_cold(stub, journal.durable_lsn)
    path.unlink(missing_ok=True)
    journal.watch()
    second.path.unlink()
    with pytest.raises(HomeGone, match=r"\.cold was moved or deleted"):
        journal.watch()
    assert np.array_equal(second.offsets, stub.offsets)
