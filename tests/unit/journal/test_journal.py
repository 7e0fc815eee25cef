"""The journal as its owner sees it, on a real file system."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines.errors import (
    AlreadyRunning,
    CorruptionFound,
    StorageFailed,
    UsageError,
    VersionRefused,
)
from fabric_pipelines.journal import FileOps, Journal, OsFileOps

SEGMENT_BYTES = 8192


def opened(folder: Path, ops: FileOps | None = None) -> Journal:
    return Journal.open(folder, segment_bytes=SEGMENT_BYTES, ops=ops or OsFileOps())


def append(journal: Journal, payload: bytes, **options: bool) -> int:
    return journal.append(7, payload, rows=3, time_us=11, schema_id=5, **options)


def contents(journal: Journal, from_lsn: int = 1) -> list[bytes]:
    return [bytes(frame.payload) for frame in journal.replay(from_lsn)]


def newest_segment(folder: Path) -> Path:
    """The file whose SEGMENT frame carries the highest epoch (little-endian at byte 16)."""
    return max(folder.glob("*.segment"), key=lambda path: path.read_bytes()[16:24][::-1])


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_what_was_committed_is_there_after_reopening(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        first = journal.append(7, [b"ab", memoryview(b"cd")], rows=2, time_us=9, schema_id=4)
        journal.append(8, b"", rows=0, time_us=10)
        assert journal.commit() == 2
    with opened(tmp_path) as journal:
        frame = journal.read(first)
        assert (frame.lsn, frame.kind, frame.schema_id, frame.rows, frame.time_us) == (
            1,
            7,
            4,
            2,
            9,
        )
        assert contents(journal) == [b"abcd", b""]
        assert journal.durable_lsn == 2
        assert journal.next_lsn == 3


def test_identity_is_drawn_once_and_kept(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        identity = journal.journal_id, journal.incarnation
    with opened(tmp_path) as journal:
        assert (journal.journal_id, journal.incarnation) == identity
        assert len(journal.journal_id) == 32


def test_an_uncommitted_group_is_not_kept(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        append(journal, b"kept")
        journal.commit()
        append(journal, b"dropped")
    with opened(tmp_path) as journal:
        assert contents(journal) == [b"kept"]


def test_payloads_are_aligned_to_64_bytes_in_memory_and_read_only(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        for size in (1, 63, 64, 65, 700, 3000, 3000, 3000):
            append(journal, b"x" * size)
            journal.commit()
        for frame in journal.replay():
            assert frame.payload.readonly
            assert np.frombuffer(frame.payload, np.uint8).ctypes.data % 64 == 0


def test_groups_roll_over_many_segments_and_read_by_lsn(tmp_path: Path) -> None:
    payloads = [bytes([n]) * (40 * n % 1900 + 1) for n in range(200)]
    with opened(tmp_path) as journal:
        for n, payload in enumerate(payloads):
            append(journal, payload)
            if n % 3 == 0:
                journal.commit()
        journal.commit()
        assert contents(journal) == payloads
        assert [bytes(journal.read(n + 1).payload) for n in range(200)] == payloads
    with opened(tmp_path) as journal:
        assert contents(journal) == payloads
        assert contents(journal, from_lsn=150) == payloads[149:]
        assert journal.recovered.segments > 5


def test_recycled_segments_are_used_again_and_their_old_frames_ignored(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        for n in range(120):
            append(journal, bytes([n]) * 900)
            journal.commit()
            journal.recycle_below(n - 8)
        files = len(list(tmp_path.glob("*.segment")))
        held = contents(journal, journal.first_lsn)
        assert files <= 6
    with opened(tmp_path) as journal:
        assert contents(journal) == held
        assert held[-1] == bytes([119]) * 900
        with pytest.raises(UsageError, match="LSN 1 is not in the journal"):
            journal.read(1)


def test_a_second_broker_on_the_journal_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with (
        opened(tmp_path),
        pytest.raises(AlreadyRunning, match=r"already runs on journal .*pid \d+"),
    ):
        opened(tmp_path)
    opened(tmp_path).close()


def test_a_torn_tail_is_cut_at_the_last_whole_group_even_before_valid_frames(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as journal:
        append(journal, b"one")
        journal.commit()
        journal.mark_durable()
        cut_at = journal._segments[-1].end
        append(journal, b"two")
        append(journal, b"three")
        journal.write()
        journal._stopped = "killed"
    flip(newest_segment(tmp_path), cut_at + 64)
    with opened(tmp_path) as journal:
        assert contents(journal) == [b"one"]
        assert journal.recovered.cut_frames == 2
        assert append(journal, b"other") == 2
        journal.commit()
    with opened(tmp_path) as journal:
        assert contents(journal) == [b"one", b"other"]


@pytest.mark.parametrize("closed_cleanly", [True, False])
def test_every_flipped_bit_at_or_below_the_durable_mark_is_named(
    tmp_path: Path, closed_cleanly: bool
) -> None:
    with opened(tmp_path) as journal:
        for n in range(27):
            append(journal, bytes([n]) * 300)
            journal.commit()
        journal.mark_durable()
        end = journal._segments[-1].end
        if not closed_cleanly:
            append(journal, b"unsynced")
            journal.write()
            journal._stopped = "killed"
    segments = sorted(tmp_path.glob("*.segment"))
    newest = newest_segment(tmp_path)
    for path in segments:
        good = path.read_bytes()
        if not good.startswith(b"FPJ"):
            continue  # the spare one
        # the last mark itself may be lost: then its group merely is not known to be durable
        limit = end - 128 if path == newest else good.rindex(b"FPJ\x01") + 128
        for offset in range(0, limit, 211):
            flip(path, offset)
            with pytest.raises(CorruptionFound, match=r"LSN|epoch") as caught:
                opened(tmp_path)
            assert path.name in str(caught.value) or "epoch" in str(caught.value)
            path.write_bytes(good)
    opened(tmp_path).close()


def test_a_missing_segment_is_corruption(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        for n in range(40):
            append(journal, bytes([n]) * 800)
            journal.commit()
    for path in sorted(tmp_path.glob("*.segment")):
        aside = path.with_suffix(".aside")
        path.rename(aside)
        if aside.read_bytes()[:4] == b"FPJ\x01":  # the spare one may go
            with pytest.raises(CorruptionFound, match="missing"):
                opened(tmp_path)
        aside.rename(path)


def test_a_lost_identity_is_corruption_and_another_format_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    identity = tmp_path / "identity.json"
    content = identity.read_text()
    identity.unlink()
    with pytest.raises(CorruptionFound, match=r"identity\.json is missing"):
        opened(tmp_path)
    identity.write_text(content.replace('"format": 2', '"format": 9'))
    with pytest.raises(VersionRefused, match="journal format 9"):
        opened(tmp_path)
    identity.write_text("{")
    with pytest.raises(CorruptionFound, match="not readable"):
        opened(tmp_path)


class FailingOps(OsFileOps):
    """Real files whose calls fail as told: errno by method name."""

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}

    def _fail(self, name: str) -> None:
        if name in self.faults:
            raise OSError(self.faults[name], errno.errorcode[self.faults[name]])

    def fallocate(self, fd: int, size: int) -> None:
        self._fail("fallocate")
        super().fallocate(fd, size)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        self._fail("pwritev")
        return super().pwritev(fd, buffers[:1], offset)

    def fdatasync(self, fd: int) -> None:
        self._fail("fdatasync")
        super().fdatasync(fd)


def test_a_full_disk_refuses_that_append_only_and_essential_ones_still_pass(tmp_path: Path) -> None:
    ops = FailingOps()
    with opened(tmp_path, ops) as journal:
        ops.faults["fallocate"] = errno.ENOSPC
        kept = 0
        while journal.bytes_used < SEGMENT_BYTES // 2 - 1500:
            append(journal, b"x" * 900)
            kept += 1
            journal.commit()
        with pytest.raises(StorageFailed, match=r"disk of journal .* is full"):
            append(journal, b"x" * 900)
        before = journal.bytes_used
        assert append(journal, b"ack", essential=True) == kept + 1
        journal.commit()
        assert journal.bytes_used == before + 128 + 128
        del ops.faults["fallocate"]
        append(journal, b"room again")
        journal.commit()
        assert contents(journal) == [b"x" * 900] * kept + [b"ack", b"room again"]


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_the_first_io_error_stops_the_journal(tmp_path: Path, call: str) -> None:
    ops = FailingOps()
    with opened(tmp_path, ops) as journal:
        append(journal, b"acknowledged")
        journal.commit()
        append(journal, b"never acknowledged")
        ops.faults[call] = errno.EIO
        with pytest.raises(StorageFailed, match="check the disk"):
            journal.commit()
        ops.faults.clear()
        for again in (journal.commit, journal.mark_durable, lambda: append(journal, b"x")):
            with pytest.raises(StorageFailed, match="check the disk"):
                again()
        assert journal.durable_lsn == 1
    with opened(tmp_path) as journal:
        assert contents(journal)[0] == b"acknowledged"


def test_a_read_only_folder_is_one_clear_sentence(tmp_path: Path) -> None:
    ops = FailingOps()
    ops.faults["fallocate"] = errno.EROFS
    with pytest.raises(StorageFailed, match=r"cannot be written .*FABRIC_HOME"):
        opened(tmp_path / "new", ops)


def test_a_group_larger_than_a_segment_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        with pytest.raises(UsageError, match="does not fit a segment"):
            append(journal, bytes(SEGMENT_BYTES))
        append(journal, b"still works")
        assert journal.commit() == 1
    with pytest.raises(UsageError, match="multiple of 4096"):
        Journal.open(tmp_path, segment_bytes=5000)


# -- lazy opening, index files, scrub


class CountingOps(OsFileOps):
    """How many bytes were read of each file."""

    def __init__(self) -> None:
        self.bytes_read = 0

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        count = super().preadv(fd, buffer, offset)
        self.bytes_read += count
        return count


def filled(folder: Path) -> list[bytes]:
    """About eight segments; the payloads in them."""
    payloads = [bytes([n]) * 700 for n in range(80)]
    with opened(folder) as journal:
        for n, payload in enumerate(payloads):
            journal.append(7 + n % 3, payload, rows=1, time_us=n)
            journal.commit()
    return payloads


def lazily(folder: Path, ops: FileOps | None = None) -> Journal:
    return Journal.open(folder, segment_bytes=SEGMENT_BYTES, ops=ops or OsFileOps(), lazy=True)


def test_a_lazy_open_reads_sealed_segments_once_at_their_first_read(tmp_path: Path) -> None:
    payloads = filled(tmp_path)
    eager, lazy = CountingOps(), CountingOps()
    opened(tmp_path, eager).close()
    with lazily(tmp_path, lazy) as journal:
        assert lazy.bytes_read < eager.bytes_read / 2
        assert contents(journal) == payloads
        assert [bytes(journal.view(n + 1)[0].payload) for n in range(80)] == payloads


def test_frames_of_a_kind_are_found_without_reading_them(tmp_path: Path) -> None:
    filled(tmp_path)
    for opening in (opened, lazily):
        with opening(tmp_path) as journal:
            assert journal.lsns_of(8) == list(range(2, 81, 3))
            sizes = journal.extents(np.arange(0, 82))
            assert sizes[0] == sizes[81] == 0
            assert sizes[1:81].min() >= 64 + 704


@pytest.mark.parametrize("opening", [opened, lazily])
@pytest.mark.parametrize("kept", [0, 1, 4096, 5000, SEGMENT_BYTES - 4096])
def test_a_sealed_segment_cut_short_is_damage_by_name(
    tmp_path: Path, opening: Callable[[Path], Journal], kept: int
) -> None:
    filled(tmp_path)
    second = sorted(tmp_path.glob("*.segment"))[1]
    os.truncate(second, kept)
    with pytest.raises(CorruptionFound, match=r"segment"):
        opening(tmp_path)


@pytest.mark.parametrize("reading", ["read", "view", "replay"])
def test_damage_behind_a_lazy_open_is_refused_at_the_first_read(
    tmp_path: Path, reading: str
) -> None:
    filled(tmp_path)
    with lazily(tmp_path) as journal:
        victim = journal._segments[2]
        lsn, offset = victim.first_lsn + 1, victim.offsets[1] + 100
    flip(victim.path, offset)
    reads: dict[str, Callable[[Journal], object]] = {
        "read": lambda journal: journal.read(lsn),
        "view": lambda journal: journal.view(lsn),
        "replay": contents,
    }
    with lazily(tmp_path) as journal, pytest.raises(CorruptionFound, match=f"LSN {lsn}"):
        reads[reading](journal)


@pytest.mark.parametrize("damage", ["gone", "flipped", "cut", "of an earlier use", "of another"])
def test_a_segment_whose_index_file_does_not_fit_is_read_through(
    tmp_path: Path, damage: str
) -> None:
    payloads = filled(tmp_path)
    with lazily(tmp_path) as journal:
        first, second = (segment.path.with_suffix(".index") for segment in journal._segments[:2])
    content = first.read_bytes()
    changed = {
        "flipped": content[:60] + bytes([content[60] ^ 1]) + content[61:],
        "cut": content[:-9],
        "of an earlier use": content[:8] + bytes([content[8] ^ 1]) + content[9:],
        "of another": second.read_bytes(),
    }
    first.unlink() if damage == "gone" else first.write_bytes(changed[damage])
    with lazily(tmp_path) as journal:
        assert journal._segments[0].unread is None
        assert journal._segments[1].unread is not None
        assert contents(journal) == payloads


def test_a_lost_seal_shows_in_a_lazy_open_too(tmp_path: Path) -> None:
    filled(tmp_path)
    with lazily(tmp_path) as journal:
        victim = journal._segments[1]
    flip(victim.path, victim.end - 100)
    with pytest.raises(CorruptionFound, match=victim.path.name):
        lazily(tmp_path)


def scrubbed(journal: Journal, budget: int = 3000) -> tuple[int, list[tuple[str, int]]]:
    """(frames, damage) of one whole round."""
    frames, damage = 0, []
    while True:
        found = journal.scrub(budget)
        frames += found.frames
        damage += [(item.segment, item.lsn) for item in found.damaged]
        if found.round_ended:
            return frames, damage


def test_a_scrub_sees_every_sealed_frame_and_names_a_flipped_bit_anywhere(tmp_path: Path) -> None:
    filled(tmp_path)
    with lazily(tmp_path) as journal:
        sealed = journal.holdings[:-1]
        assert scrubbed(journal) == (sealed[-1].last_lsn, [])
        victim = journal._segments[1]
        for offset in range(0, victim.end, 331):
            flip(victim.path, offset)
            frames, damage = scrubbed(journal)
            assert frames == sealed[-1].last_lsn
            assert len(damage) == 1
            name, lsn = damage[0]
            assert name == str(victim.path)
            assert victim.first_lsn <= lsn <= victim.last_lsn
            flip(victim.path, offset)


def test_a_file_is_not_written_again_while_somebody_looks_at_it(tmp_path: Path) -> None:
    filled(tmp_path)
    with lazily(tmp_path) as journal:
        frame, mapped = journal.view(1)
        assert mapped
        name = journal.holdings[0].name
        journal.recycle_below(40)
        assert name not in [path.name for path in journal._shelf.free]
        content = bytes(frame.payload)
        for n in range(40):
            append(journal, bytes([n]) * 900)
            journal.commit()
        assert bytes(frame.payload) == content
        frame.payload.release()
        del frame
        for n in range(20):
            append(journal, bytes([n]) * 900)
            journal.commit()
        assert name in [holding.name for holding in journal.holdings]


def test_a_roll_seals_a_segment_before_it_is_full(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        append(journal, b"one")
        journal.commit()
        journal.roll()
        assert [holding.sealed for holding in journal.holdings] == [True, False]
        journal.roll()
        assert len(journal.holdings) == 2
        assert journal.recycle_below(2) == 1
        append(journal, b"two")
        journal.commit()
    with opened(tmp_path) as journal:
        assert contents(journal) == [b"two"]
