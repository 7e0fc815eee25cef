"""A segment file that somebody shortened is refused by name, whatever it lost: to a journal that does not know how long
its files are, a missing end looks like a torn tail, and acknowledged work would vanish without a word."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.journal import Journal

SEGMENT_BYTES = 8192
OLD = Path(__file__).parent / "fixtures" / "journal-2"  # written before SEGMENT frames named a size
OLD_SEGMENT_BYTES = 4096
Opening = Callable[[Path], Journal]


def opened(folder: Path, segment_bytes: int = SEGMENT_BYTES) -> Journal:
    return Journal.open(folder, segment_bytes=segment_bytes)


def lazily(folder: Path) -> Journal:
    return Journal.open(folder, segment_bytes=SEGMENT_BYTES, lazy=True)


def append(journal: Journal, count: int) -> None:
    for _ in range(count):
        journal.append(7, bytes([journal.next_lsn % 251]) * 300, rows=1, time_us=1)
        journal.commit()


def contents(journal: Journal) -> dict[int, bytes]:
    return {frame.lsn: bytes(frame.payload) for frame in journal.replay()}


def written(folder: Path, groups: int) -> tuple[list[Path], list[int]]:
    """A journal of so many groups, its segment files in order, and where frames begin and end in the newest."""
    with opened(folder) as journal:
        append(journal, groups)
        paths = [segment.path for segment in journal._segments]
        newest = journal._segments[-1]
        borders = [128, *newest.offsets, newest.end]
    return paths, borders


def sizes_around(borders: list[int]) -> list[int]:
    """To nothing, within and at the borders of the first frames, the last, and in the tail that nobody wrote."""
    chosen = {0, 1, 63, 64, 127, SEGMENT_BYTES - 4096, SEGMENT_BYTES - 64, SEGMENT_BYTES - 1}
    for border in borders:
        chosen |= {border - 1, border, border + 1, border + 64, border + 100}
    return sorted(size for size in chosen if size < SEGMENT_BYTES)


def require_refused(folder: Path, cut: Path, opening: Opening) -> None:
    """By the file's name, its size and the one it had, with nothing written anywhere."""
    size, before = cut.stat().st_size, bytes_in(folder)
    with pytest.raises(CorruptionFound) as refused:
        opening(folder)
    said = str(refused.value)
    assert "restore" in said
    expected = (str(cut), f"cut short to {size} bytes", f"its size is {SEGMENT_BYTES}")
    if size < 128:  # even the frame that names its size is gone
        expected = (f"no first frame can be read in {cut.name} of {size} bytes",)
    assert all(words in said for words in expected), said
    assert bytes_in(folder) == before


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


@pytest.mark.parametrize("opening", [opened, lazily])
@pytest.mark.parametrize("groups", [3, 40], ids=["the only segment", "one of several"])
def test_the_segment_being_written_is_refused_at_every_shorter_size(
    tmp_path: Path, opening: Opening, groups: int
) -> None:
    paths, borders = written(tmp_path, groups)
    assert len(paths) == {3: 1, 40: 3}[groups]
    whole = paths[-1].read_bytes()
    sizes = sizes_around(borders)
    assert len(sizes) >= 25
    for size in sizes:
        os.truncate(paths[-1], size)
        require_refused(tmp_path, paths[-1], opening)
        paths[-1].write_bytes(whole)
    with opening(tmp_path) as journal:
        assert len(contents(journal)) == groups


@pytest.mark.parametrize("opening", [opened, lazily])
def test_a_sealed_segment_is_refused_at_every_shorter_size(
    tmp_path: Path, opening: Opening
) -> None:
    paths, _ = written(tmp_path, 40)
    with opened(tmp_path) as journal:
        sealed = journal._segments[1]
        borders = [128, *sealed.offsets[:2], sealed.end - 128, sealed.end]
    whole = sealed.path.read_bytes()
    for size in sizes_around(borders):
        os.truncate(sealed.path, size)
        require_refused(tmp_path, paths[1], opening)
        sealed.path.write_bytes(whole)
    opening(tmp_path).close()


def recycled(folder: Path) -> Path:
    """The newest segment lies in a file that had an earlier life; that file."""
    with opened(folder) as journal:
        append(journal, 20)
        first = journal._segments[0].path
        journal.recycle_below(journal._segments[-1].first_lsn)
        while journal._segments[-1].path != first:
            append(journal, 1)
    return first


def test_a_recycled_file_is_refused_when_shorter_though_old_frames_fill_it(tmp_path: Path) -> None:
    path = recycled(tmp_path)
    whole = path.read_bytes()
    assert whole.rstrip(b"\0")[4096:], "nothing is left of its earlier life"
    for size in (0, 128, 300, 512, 1000, 4096, SEGMENT_BYTES - 1):
        os.truncate(path, size)
        require_refused(tmp_path, path, opened)
        path.write_bytes(whole)
    opened(tmp_path).close()


@pytest.mark.parametrize("size", [0, 100, 128, 4096, 5000])
def test_a_file_that_holds_nothing_live_may_have_any_size(tmp_path: Path, size: int) -> None:
    with opened(tmp_path) as journal:
        append(journal, 20)
        free = journal._segments[0].path
        journal.recycle_below(journal._segments[-1].first_lsn)
        kept = contents(journal)
    os.truncate(free, size)
    with opened(tmp_path) as journal:
        assert contents(journal) == kept
        append(journal, 20)
        assert free in [segment.path for segment in journal._segments]
        kept = contents(journal)
    assert free.stat().st_size == SEGMENT_BYTES
    with opened(tmp_path) as journal:
        assert contents(journal) == kept


def test_a_file_that_grew_is_read_as_it_is(tmp_path: Path) -> None:
    paths, _ = written(tmp_path, 3)
    os.truncate(paths[0], 3 * SEGMENT_BYTES)
    with opened(tmp_path) as journal:
        assert len(contents(journal)) == 3


@pytest.mark.parametrize("other", [4096, 4 * SEGMENT_BYTES])
def test_each_segment_answers_for_the_size_it_was_made_with(tmp_path: Path, other: int) -> None:
    written(tmp_path, 40)
    with opened(tmp_path, other) as journal:
        append(journal, 120)
        newest, kept = journal._segments[-1], contents(journal)
        assert newest.epoch > 3
    with opened(tmp_path, other) as journal:
        assert contents(journal) == kept
    os.truncate(newest.path, newest.end)
    with pytest.raises(CorruptionFound, match=f"to {newest.end} bytes, its size is {other}"):
        opened(tmp_path, other)


def old_journal(folder: Path) -> list[Path]:
    shutil.copytree(OLD, folder)
    return sorted(folder.glob("*.segment"))


@pytest.mark.parametrize("lazy", [False, True])
def test_frames_from_before_there_was_a_size_are_read_and_gone_on_with(
    tmp_path: Path, lazy: bool
) -> None:
    paths = old_journal(tmp_path / "old")
    with Journal.open(tmp_path / "old", segment_bytes=OLD_SEGMENT_BYTES, lazy=lazy) as journal:
        expected = {n + 1: bytes([n]) * (n * 37 % 400 + 1) for n in range(12)}
        assert contents(journal) == expected | {13: b"last, not marked"}
        append(journal, 9)
        assert len(journal._segments) > len(paths)
        newest = journal._segments[-1].path
    os.truncate(newest, 1024)  # from the first roll on a size is named
    with pytest.raises(CorruptionFound, match=f"is {OLD_SEGMENT_BYTES}"):
        opened(tmp_path / "old", OLD_SEGMENT_BYTES)


def test_a_segment_of_unknown_size_is_held_to_its_frames_alone(tmp_path: Path) -> None:
    """As before there was a size: what ends behind the last frame is believed, what ends before it is cut."""
    paths = old_journal(tmp_path / "old")
    with opened(tmp_path / "old", OLD_SEGMENT_BYTES) as journal:
        end = journal._segments[-1].end
    os.truncate(paths[-1], end)
    with opened(tmp_path / "old", OLD_SEGMENT_BYTES) as journal:
        assert len(contents(journal)) == 13
