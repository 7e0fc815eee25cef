"""Every crash state of a recorded workload is recovered: acknowledged is a part of recovered, and recovered a
prefix of what was appended. Mutations show that the enumeration would notice a missing fsync or CRC."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fabric_pipelines.clock import Clock
from fabric_pipelines.errors import CorruptionFound, FabricError, StorageFailed
from fabric_pipelines.journal import FileOps, Journal
from fabric_pipelines.journal import segment as segment_module
from fabric_pipelines.journal.recovery import Recovered
from fabric_pipelines.testing.sim_disk import (
    CrashState,
    Image,
    Note,
    ProcessKilled,
    SimDisk,
    crash_states,
    torn_states,
    writes_of,
)

FOLDER = Path("/simulated/journal")
SEGMENT_BYTES = 4096
STILL = Clock(monotonic_s=lambda: 0.0, wall_us=lambda: 7)


class Broken(AssertionError):
    """An acknowledged frame was lost, or a frame recovered that nobody appended."""


def opened(ops: FileOps) -> Journal:
    return Journal.open(FOLDER, segment_bytes=SEGMENT_BYTES, clock=STILL, ops=ops)


def payload_of(lsn: int) -> bytes:
    return bytes([lsn % 251]) * (lsn * 137 % 900 + 1)


def append_group(journal: Journal, disk: SimDisk, frames: int) -> None:
    for _ in range(frames):
        lsn = journal.next_lsn
        disk.note("appended", lsn)
        assert journal.append(1, payload_of(lsn), rows=1, time_us=lsn) == lsn
    disk.note("acked", journal.commit())


def workload(disk: SimDisk, ops: FileOps | None = None) -> None:
    """Creation, groups of several sizes, rolls, a mark, recycling, a clean reopening, more groups."""
    with opened(ops or disk) as journal:
        for frames in (1, 3, 2, 5, 1):
            append_group(journal, disk, frames)
        journal.mark_durable()
        append_group(journal, disk, 4)
        disk.note("needed_from", 8)
        journal.recycle_below(8)
        append_group(journal, disk, 6)
    with opened(ops or disk) as journal:
        append_group(journal, disk, 3)
        disk.note("needed_from", 16)
        journal.recycle_below(16)
        append_group(journal, disk, 5)
        append_group(journal, disk, 2)
        journal.write()


def recorded(**options: object) -> SimDisk:
    disk = SimDisk(**options)  # type: ignore[arg-type]
    workload(disk)
    return disk


def check(state: CrashState, *, ops: SimDisk | None = None) -> SimDisk:
    """Recover the state and hold it to the law; returns the disk it was recovered on."""
    disk = ops or SimDisk(state.image)
    where = f"after {state.after_ops} operations, {state.story}: "
    acked = state.notes.get("acked", 0)
    try:
        with opened(disk) as journal:
            frames = [(frame.lsn, bytes(frame.payload)) for frame in journal.replay()]
            first, last = journal.first_lsn, journal.durable_lsn
    except CorruptionFound as fault:
        raise Broken(f"{where}{fault}") from fault
    if last < acked or first > max(state.notes.get("needed_from", 1), 1):
        raise Broken(f"{where}holds {first}..{last}, acknowledged were up to {acked}")
    if last > state.notes.get("appended", 0):
        raise Broken(f"{where}holds {last}, appended were {state.notes.get('appended', 0)}")
    if frames != [(lsn, payload_of(lsn)) for lsn in range(first, last + 1)]:
        raise Broken(f"{where}recovered frames are not the appended ones")
    return disk


def states(disk: SimDisk) -> Iterator[CrashState]:
    yield from crash_states(disk, seed=20, subsets=6)
    for after_ops in writes_of(disk)[-2:]:
        yield from torn_states(disk, after_ops=after_ops)


def check_all(disk: SimDisk) -> int:
    count = 0
    for state in states(disk):
        check(state)
        count += 1
    return count


def test_every_crash_state_keeps_what_was_acknowledged_and_invents_nothing() -> None:
    disk = recorded()
    assert check_all(disk) > 2000
    assert disk.open_descriptors == 0


def test_a_small_group_torn_at_every_byte_is_there_whole_or_not_at_all() -> None:
    disk = SimDisk()
    journal = opened(disk)
    append_group(journal, disk, 1)
    for lsn in (2, 3):
        disk.note("appended", lsn)
        journal.append(1, payload_of(lsn)[:60], rows=1, time_us=lsn)
    journal.write()
    for state in torn_states(disk, after_ops=writes_of(disk)[-1]):
        again = SimDisk(state.image)
        with opened(again) as reopened:
            assert reopened.durable_lsn in (1, 3), state.story
    journal.close()


def test_a_crash_during_recovery_loses_nothing_either() -> None:
    for state in list(crash_states(recorded(), seed=3, subsets=2))[::9]:
        recovering = check(state)
        for second in crash_states(recovering, seed=4, subsets=1):
            check(
                CrashState(
                    second.after_ops,
                    f"{state.story}, then {second.story}",
                    state.notes,
                    second.image,
                )
            )


def test_a_power_cut_after_a_killed_process_was_restarted_loses_nothing() -> None:
    for number in range(1, len(recorded().call_names), 2):
        disk = SimDisk(killed_at=number)
        with pytest.raises(ProcessKilled):
            workload(disk)
        disk.restart()
        restarted_at = len(disk.log)
        last = last_note(disk, "appended")
        with opened(disk) as journal:
            assert journal.durable_lsn <= last
            disk.note("acked", journal.durable_lsn)
        for state in crash_states(disk, seed=number, subsets=1):
            if state.after_ops > restarted_at:
                check(state)


def test_work_goes_on_after_each_recovery_and_nothing_cut_comes_back() -> None:
    for state in list(crash_states(recorded(), seed=5, subsets=2))[::5]:
        disk = check(state)
        with opened(disk) as journal:
            first = journal.next_lsn
            journal.append(2, b"after", rows=1, time_us=1)
            journal.commit()
        with opened(disk) as journal:
            assert journal.durable_lsn == first, state.story
            assert bytes(journal.read(first).payload) == b"after", state.story


def last_note(disk: SimDisk, name: str) -> int:
    return max((op.value for op in disk.log if isinstance(op, Note) and op.name == name), default=0)


@pytest.fixture
def cut_group() -> Image:
    return make_cut_group()


def make_cut_group() -> Image:
    """Group (2, 3) lost its first sector only: frame 3 and its COMMIT are readable behind the cut."""
    disk = SimDisk()
    with opened(disk) as journal:
        journal.append(1, bytes(64), rows=1, time_us=1)
        journal.commit()
        for lsn in (2, 3):
            journal.append(1, bytes([lsn]) * 448, rows=1, time_us=lsn)
        journal.write()
        group = writes_of(disk)[-1]
    states = torn_states(disk, after_ops=group)
    return next(s.image for s in states if s.story == "tail of the write cut at byte 512")


def highest_lsn_after_writing_again(image: Image, size: int) -> int:
    """Frame 2 is appended again with `size` bytes, and a crash tears that write anywhere."""
    disk = SimDisk(image)
    with opened(disk) as journal:
        assert journal.durable_lsn == 1
        journal.append(1, bytes([2]) * size, rows=1, time_us=2)
        journal.write()
        group = writes_of(disk)[-1]
    found = 0
    for state in torn_states(disk, after_ops=group):
        with opened(SimDisk(state.image)) as journal:
            found = max(found, journal.durable_lsn)
    return found


@pytest.mark.parametrize("size", [448, 320], ids=["the same frame", "up to the stale frame 3"])
def test_a_cut_group_does_not_come_back_behind_new_frames(cut_group: Image, size: int) -> None:
    assert highest_lsn_after_writing_again(cut_group, size) == 2


def test_without_the_opened_frame_a_cut_group_would_come_back(
    cut_group: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: Journal, recovered: Recovered) -> None:
        """Nor a count that says that one is missing."""
        self.life = replace(self.life, opens=recovered.report.opens)

    monkeypatch.setattr(Journal, "_start", start)
    assert highest_lsn_after_writing_again(cut_group, 448) == 3


@pytest.mark.parametrize("call", ["fdatasync", "fsync_folder", "fsync"])
def test_the_enumeration_notices_a_sync_that_does_nothing(call: str) -> None:
    disk = recorded(lying=[call])
    with pytest.raises(Broken):
        check_all(disk)


def test_the_enumeration_notices_a_missing_payload_check(monkeypatch: pytest.MonkeyPatch) -> None:
    class Anything(int):
        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = int.__hash__

    disk = recorded()
    monkeypatch.setattr(segment_module, "crc32c", lambda data: Anything())
    with pytest.raises(Broken):
        check_all(disk)


class RetryingOps:
    """The classic mistake: a failed fsync is tried again and its success believed."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Callable[..., object]:
        return getattr(self._disk, name)  # type: ignore[no-any-return]

    def fdatasync(self, fd: int) -> None:
        try:
            self._disk.fdatasync(fd)
        except OSError:
            self._disk.fdatasync(fd)


def test_the_enumeration_notices_a_retried_fsync() -> None:
    calls = recorded().call_names
    syncs = [number for number, name in enumerate(calls) if name == "fdatasync"]
    disk = SimDisk(failing={syncs[len(syncs) // 2]: errno.EIO})
    workload(disk, RetryingOps(disk))  # type: ignore[arg-type]
    with pytest.raises(Broken):
        check_all(disk)


def test_an_io_error_at_every_single_call_stops_the_journal_and_loses_nothing() -> None:
    calls = recorded().call_names
    assert {"pwritev", "fdatasync", "fsync", "fsync_folder", "rename", "fallocate"} <= set(calls)
    for number, name in enumerate(calls):
        disk = SimDisk(failing={number: errno.EIO})
        with pytest.raises(StorageFailed, match="check the disk"):
            workload(disk)
        assert disk.open_descriptors == 0, (number, name)
        for state in list(crash_states(disk, seed=number, subsets=1))[-4:]:
            check(state)


def test_after_an_error_of_a_write_or_sync_every_later_call_is_refused() -> None:
    for name in ("pwritev", "fdatasync"):
        disk = SimDisk()
        with opened(disk) as journal:
            journal.append(1, b"x", rows=1, time_us=1)
            number = disk.calls + (1 if name == "fdatasync" else 0)
            disk._failing[number] = errno.EIO
            with pytest.raises(StorageFailed):
                journal.commit()
            assert disk.call_names[number] == name
            calls: list[Callable[[], object]] = [
                journal.commit,
                journal.sync,
                journal.mark_durable,
                lambda: journal.append(1, b"y", rows=1, time_us=1),
                lambda: journal.read(1),
                lambda: list(journal.replay()),
                lambda: journal.recycle_below(1),
            ]
            for call in calls:
                with pytest.raises(FabricError, match="check the disk"):
                    call()


def test_a_full_disk_at_every_allocation_refuses_that_append_and_work_goes_on() -> None:
    calls = recorded().call_names
    allocations = [number for number, name in enumerate(calls) if name == "fallocate"]
    for number in allocations[1:]:
        disk = SimDisk(failing={number: errno.ENOSPC})
        with pytest.raises(StorageFailed, match="is full"):
            workload(disk)
        for state in list(crash_states(disk, seed=1, subsets=2))[-6:]:
            check(state)
