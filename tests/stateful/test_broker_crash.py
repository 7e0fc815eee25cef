"""Every crash state of a recorded life of a broker keeps every promise; and each fsync, folder fsync and CRC test
is needed for that, shown by taking them away one at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from fabric_pipelines.broker import checkpoint as checkpoint_module
from fabric_pipelines.broker.facts import Kind
from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.journal import Journal
from fabric_pipelines.journal import index as index_module
from fabric_pipelines.journal import segment as segment_module
from fabric_pipelines.testing.sim_disk import (
    CrashState,
    Create,
    ProcessKilled,
    SimDisk,
    Write,
    crash_states,
    writes_of,
)
from tests.support_broker_crash import (
    FOLDER,
    SEGMENT_BYTES,
    Broken,
    Judge,
    Recording,
    cuts_of,
    recorded,
    states_of,
)


@pytest.fixture(scope="module")
def life() -> Recording:
    return recorded()


def test_the_recorded_life_holds_everything_a_broker_does(life: Recording) -> None:
    assert life.kinds == set(Kind)
    assert life.dropped >= 2
    assert len(life.epochs) > len(segments_of(life.disk)), "no segment file was used twice"
    for what in ("checkpoints", "segments_dropped", "moved_tasks", "moved_outcomes"):
        assert life.counters[what], what
    for what in ("cold_uploads", "cold_fetches", "cold_removals"):
        assert life.counters[what], what


def segments_of(disk: SimDisk) -> list[Path]:
    return [op.path for op in disk.log if isinstance(op, Create) and op.path.suffix == ".segment"]


def test_ten_thousand_crash_states_keep_every_promise(life: Recording) -> None:
    judge = Judge(life)
    judge.judge_all(states_of(life.disk, seed=7, subsets=48, torn=40))
    assert len(judge.states) >= 10_000
    assert len(judge.logs) >= 120


class LyingAt(SimDisk):
    """Reports success and does nothing when this function asks for this kind of sync; `seen` has them all."""

    def __init__(self, site: tuple[str, str] = ("", "")) -> None:
        super().__init__()
        self._site = site
        self.seen: set[tuple[str, str]] = set()

    def _lies(self, call: str) -> bool:
        site = call, sys._getframe(2).f_code.co_qualname
        self.seen.add(site)
        if site == self._site:
            self._call(call)
        return site == self._site

    def fsync(self, fd: int) -> None:
        if not self._lies("fsync"):
            super().fsync(fd)

    def fdatasync(self, fd: int) -> None:
        if not self._lies("fdatasync"):
            super().fdatasync(fd)

    def fsync_folder(self, folder: Path) -> None:
        if not self._lies("fsync_folder"):
            super().fsync_folder(folder)


SITES = [
    ("fdatasync", "Journal._roll"),
    ("fdatasync", "Journal._seal"),
    ("fdatasync", "Journal.sync"),
    ("fsync", "Checkpoints.write"),
    ("fsync", "create"),
    ("fsync", "write_identity"),
    ("fsync_folder", "Checkpoints.write"),
    ("fsync_folder", "Journal._allocate"),
    ("fsync_folder", "create"),
    ("fsync_folder", "write_identity"),
]
ELSEWHERE = {
    ("fdatasync", "Journal._mark"): "below: what a mark is for",
    ("fdatasync", "_candidates"): "below: what a killed process left in the cache",
    (
        "fsync",
        "Journal._allocate",
    ): "not for safety: the first fdatasync of a segment has no blocks to find",
}


def test_every_sync_there_is_has_its_mutation() -> None:
    disk = LyingAt()
    Recording(disk)
    assert disk.seen == {*SITES, *ELSEWHERE}


@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site[0]} in {site[1]}")
def test_without_any_one_sync_a_promise_is_broken(site: tuple[str, str]) -> None:
    recording = Recording(LyingAt(site))
    states = (states_of(recording.disk, seed=seed, subsets=4, torn=0) for seed in range(8))
    with pytest.raises(Broken):
        Judge(recording).judge_all(chain.from_iterable(states))


def test_without_the_sync_of_a_mark_damage_to_the_last_group_passes_for_a_torn_tail() -> None:
    def unseen(site: tuple[str, str]) -> int:
        """States after a returned `mark_durable` in which a flipped bit below it is cut, not refused."""
        disk = LyingAt(site)
        with opened(disk) as journal:
            journal.append(1, b"acknowledged", rows=1, time_us=1)
            journal.commit()
            offset = journal._segments[-1].offsets[0] + 70
            journal.mark_durable()
            disk.note("marked", 1)
        found = 0
        for state in crash_states(disk, seed=1, subsets=8):
            if state.notes.get("marked"):
                inode = state.image.entries[FOLDER / "00000001.segment"]
                content = bytearray(state.image.contents[inode])
                content[offset] ^= 1
                state.image.contents[inode] = bytes(content)
                found += opens(state)
        return found

    assert unseen(("", "")) == 0
    assert unseen(("fdatasync", "Journal._mark")) > 0


def opened(disk: SimDisk) -> Journal:
    return Journal.open(FOLDER, segment_bytes=SEGMENT_BYTES, ops=disk, lazy=True)


def opens(state: CrashState) -> bool:
    try:
        opened(SimDisk(state.image)).close()
    except CorruptionFound:
        return False
    return True


def test_without_the_sync_at_the_open_a_seal_that_a_killed_process_left_in_the_cache_is_lost() -> (
    None
):
    def work(disk: SimDisk) -> None:
        with opened(disk) as journal:
            journal.append(1, b"first", rows=1, time_us=1)
            journal.commit()
            journal.roll()

    def broken(site: tuple[str, str]) -> int:
        plain = SimDisk()
        work(plain)
        synced = [at for at, name in enumerate(plain.call_names) if name == "fdatasync"]
        disk = LyingAt(site)
        disk._killed_at = synced[-1]  # that of the SEAL
        with pytest.raises(ProcessKilled):
            work(disk)
        disk.restart()
        with opened(disk) as journal:
            journal.append(1, b"second", rows=1, time_us=2)
            journal.commit()
        return sum(not opens(state) for state in crash_states(disk, seed=1, subsets=8))

    assert broken(("", "")) == 0
    assert broken(("fdatasync", "_candidates")) > 0


class Anything(int):
    """Equal to whatever it is compared with: a CRC test that was taken out."""

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__

    def to_bytes(self, *how: object, **more: object) -> bytes:
        return AnyBytes()


class AnyBytes(bytes):
    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


def test_without_the_payload_crc_a_promise_is_broken(
    life: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_module, "crc32c", lambda data: Anything())
    with pytest.raises(Broken):
        Judge(life).judge_all(states_of(life.disk, seed=7, subsets=6, torn=0))


def test_without_the_crc_of_an_index_file_a_promise_is_broken(
    life: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never fsynced, so a half-written one over that of an earlier use is an everyday thing."""
    Judge(life).judge_all(torn_index_files(life.disk))
    plain = index_module.crc32c
    monkeypatch.setattr(index_module, "crc32c", lambda data: Anything(plain(data)))
    with pytest.raises(Broken):
        Judge(life).judge_all(torn_index_files(life.disk))


def torn_index_files(disk: SimDisk) -> Iterator[CrashState]:
    made = {op.inode: op.path for op in disk.log if isinstance(op, Create)}
    for after_ops in writes_of(disk):
        write = disk.log[after_ops - 1]
        assert isinstance(write, Write)
        if made[write.inode].suffix == ".index":
            yield from cuts_of(disk, after_ops)


def test_without_the_crc_of_a_column_a_flipped_bit_in_a_checkpoint_is_believed(
    life: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytearray(last_checkpoint(life.disk))
    length = int.from_bytes(content[8:16], "little")
    head = json.loads(content[64 : 64 + length])
    start = (64 + length + 63) // 64 * 64
    keys = next(section for section in head["sections"] if section["name"] == "key")
    digest = hashlib.sha256(content[:start]).hexdigest()

    def believed() -> int:
        found = 0
        for at in range(keys["stored"] - 1, keys["stored"] - 65, -1):
            content[start + keys["offset"] + at] ^= 1
            bad = memoryview(content)
            with contextlib.suppress(OSError):  # zstd itself notices some
                decoded = checkpoint_module.decode(bad, head["lsn"], head["journal_id"], digest)
                found += not isinstance(decoded, str)
            content[start + keys["offset"] + at] ^= 1
        return found

    assert believed() == 0
    monkeypatch.setattr(checkpoint_module, "crc32c", lambda data: Anything())
    assert believed() > 0


def last_checkpoint(disk: SimDisk) -> bytes:
    *_, last = crash_states(disk, seed=1, subsets=0)
    names = [path for path in last.image.entries if path.name.startswith("checkpoint-")]
    return last.image.contents[last.image.entries[max(names)]]
