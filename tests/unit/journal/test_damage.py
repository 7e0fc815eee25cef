"""One changed byte of what was acknowledged is told as the frame that it lies in, not as all that follows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.journal import Journal

SEGMENT_BYTES = 1 << 16
GROUPS, FRAMES = 12, 5
TOLD = re.compile(
    r"is damaged at offset (\d+): bytes (\d+)\.\.(\d+), the (.+?)(?: and (\d+) places more)? "
    r"were acknowledged and cannot be read; restore the file"
)


def payload(lsn: int) -> bytes:
    return bytes([lsn % 251]) * (100 + 7 * lsn)


def opened(folder: Path) -> Journal:
    return Journal.open(folder, segment_bytes=SEGMENT_BYTES, lazy=True)


def written(folder: Path, *, sealed: bool) -> tuple[Path, list[int], int]:
    """The segment's path, where each frame begins, and where the last group ends."""
    with opened(folder) as journal:
        for _ in range(GROUPS):
            for _ in range(FRAMES):
                journal.append(3, payload(journal.next_lsn), rows=1, time_us=1)
            journal.commit()
        segment = journal._segments[0]
        end = segment.end
        if sealed:
            journal.roll()
            Path(f"{segment.path}".replace(".segment", ".index")).unlink(missing_ok=True)
        return segment.path, list(segment.offsets), end


def flipped(path: Path, *places: int) -> None:
    content = bytearray(path.read_bytes())
    for at in places:
        content[at] ^= 1 << at % 8
    path.write_bytes(content)


def sentence_of(folder: Path) -> str:
    with (
        pytest.raises(CorruptionFound) as caught,
        Journal.open(folder, segment_bytes=SEGMENT_BYTES),
    ):
        pass
    return str(caught.value)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_changed_byte_names_its_frame_wherever_it_lies(tmp_path: Path, sealed: bool) -> None:
    path, offsets, end = written(tmp_path, sealed=sealed)
    seen = set()
    for at in range(256, end, 61):
        flipped(path, at)
        said = sentence_of(tmp_path)
        found = TOLD.search(said)
        assert found, said
        offset, begin, stop = (int(found[number]) for number in (1, 2, 3))
        assert offset == begin <= at < stop
        assert stop - begin <= 64 + 64 * 10
        data = [lsn for lsn, where in enumerate(offsets, 1) if where == begin]
        if data:
            assert re.fullmatch(rf"frame(?: of kind 3)? with LSN {data[0]}", found[4]), said
            seen.add("of kind 3" in found[4])
        else:
            last = sum(where < begin for where in offsets)
            assert re.fullmatch(rf"(COMMIT|control) frame behind LSN {last}", found[4]), said
            seen.add(found[4].split()[0])
        assert found[5] is None
        flipped(path, at)
    assert seen == {True, False, "COMMIT", "control"}
    with opened(tmp_path) as journal:
        assert [bytes(frame.payload) for frame in journal.replay()] == [
            payload(lsn) for lsn in range(1, GROUPS * FRAMES + 1)
        ]


def test_several_damaged_frames_are_counted_and_neighbours_told_as_one_range(
    tmp_path: Path,
) -> None:
    path, offsets, _ = written(tmp_path, sealed=False)
    flipped(path, offsets[7] + 20, offsets[8] + 20, offsets[20] + 80, offsets[40] + 3)
    found = TOLD.search(sentence_of(tmp_path))
    assert found
    assert (int(found[2]), int(found[3])) == (offsets[7], offsets[9])
    assert (found[4], found[5]) == ("frames of LSN 8..9", "2")


def test_a_torn_group_behind_what_was_recorded_is_no_damage(tmp_path: Path) -> None:
    path, offsets, _ = written(tmp_path, sealed=False)
    with opened(tmp_path) as journal:
        journal.append(3, b"x" * 500, rows=1, time_us=1)
        journal.write()
        torn = journal._segments[0].offsets[-1]
        journal._stopped = "killed"
    flipped(path, torn + 80)
    with opened(tmp_path) as journal:
        assert journal.durable_lsn == len(offsets)
    flipped(path, offsets[30] + 80)
    found = TOLD.search(sentence_of(tmp_path))
    assert found
    assert (found[4], found[5]) == ("frame of kind 3 with LSN 31", None)
