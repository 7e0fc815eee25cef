"""A disk that fails under a living broker, at every call, and bits that flip in everything it keeps.

After an error nothing is acknowledged any more, and what was before is there after the restart; a store that fails
is not a disk that fails. A flipped bit is refused by name where it means something, and never believed.
"""

from __future__ import annotations

import errno
from collections import Counter

import pytest

from fabric_pipelines.errors import FabricError
from fabric_pipelines.testing.crash_faults import (
    ENDS,
    FATAL,
    REFUSED,
    WHOLE,
    FaultJudge,
    calls_of,
    recorded,
)
from fabric_pipelines.testing.crash_judge import Judge, flips_of
from fabric_pipelines.testing.crash_life import FOLDER, Life
from fabric_pipelines.testing.sim_disk import CrashState, SimDisk, all_kept

CHANGES = {"pwritev", "fdatasync", "fsync", "fsync_folder", "rename", "unlink", "fallocate", "open"}
OFTEN = {"pwritev", "fdatasync"}
SPACE = {"pwritev", "fallocate", "open", "rename", "fsync", "fsync_folder", "fdatasync"}


@pytest.fixture(scope="module")
def life() -> Life:
    return recorded()


def numbers(life: Life, names: set[str], every: int) -> list[int]:
    return [at for at in calls_of(life) if life.disk.call_names[at] in names][::every]


@pytest.mark.timeout(1800)  # some hundred lives, minutes of CPU
def test_an_io_error_at_any_call_ends_the_broker_and_what_was_acknowledged_is_kept(
    life: Life,
) -> None:
    """All calls: `fabric bench crash --faults`."""
    names = set(life.disk.call_names)
    assert names > CHANGES
    others = names - CHANGES - {"make_folder"}
    chosen = sorted(
        {
            *numbers(life, CHANGES - OFTEN, 1),
            *numbers(life, OFTEN, 5),  # all of them take a minute of CPU more
            *numbers(life, others, 12),
        }
    )
    judge = FaultJudge(life)
    for at in chosen:
        often = life.disk.call_names[at] in OFTEN
        judge.judge(at, errno.EIO, states=not often or not at % 8)
    assert judge.ends[errno.EIO, FATAL] > 80
    assert judge.ends[errno.EIO, WHOLE] > 5, "no call of the store was among them"


def test_a_full_disk_at_any_call_loses_nothing_and_ends_only_what_cannot_go_on(life: Life) -> None:
    judge = FaultJudge(life)
    for at in numbers(life, SPACE, 5):
        judge.judge(at, errno.ENOSPC)
    ends = {end: judge.ends[errno.ENOSPC, end] for end in ENDS}
    assert ends[WHOLE] > 5, "checkpoints, index files and copies can wait"
    assert ends[FATAL] + ends[REFUSED] > 50


@pytest.mark.parametrize(
    ("suffixes", "every", "refused"),
    [
        ((".segment",), 499, 20),
        ((".cold",), 3, 20),
        ((".json",), 3, 20),
        ((".index",), 29, 0),
    ],
    ids=["segments and objects", "stubs", "identity", "index files"],
)
def test_a_flipped_bit_anywhere_is_refused_by_name_or_costs_nothing(
    suffixes: tuple[str, ...], every: int, refused: int
) -> None:
    frozen = cold_life()
    judge, found = Judge(frozen), Counter[bool]()
    for state in flips_of(all_kept(frozen.disk), suffixes=suffixes, every=every):
        found[judge.judge_flip(state)] += 1
    assert found[True] >= refused
    assert sum(found.values()) >= 20


def test_a_flipped_bit_in_the_checkpoint_that_stands_for_a_dropped_front_is_refused(
    life: Life,
) -> None:
    """Any other checkpoint is a cache: with a newer one, or the log, the broker starts without it."""
    state = all_kept(life.disk)
    names = sorted(path for path in state.image.entries if path.name.startswith("checkpoint-0"))
    assert names
    judge = Judge(life)
    for path in names:
        inode = state.image.entries[path]
        content = state.image.contents[inode]
        for at in range(0, len(content.rstrip(b"\0")), 211):
            image = state.image.copy()
            image.contents[inode] = content[:at] + bytes([content[at] ^ 2]) + content[at + 1 :]
            judge.judge_flip(CrashState(0, f"{path.name} at {at}", state.notes, image))
    image = state.image.copy()
    for path in names:
        del image.entries[path]
    assert judge.judge_flip(CrashState(0, "no checkpoint at all", state.notes, image))


def cold_life() -> Life:
    """A life that ends while live tasks lie in the cold tier."""
    life = Life(SimDisk()).run()
    life.bench = life.bench_again()
    for mark in range(26, 32):
        life.submit(mark, [4, 4])
        life.freeze()
        if life.bench.tiering.figures()["cold_segments"]:
            break
    for mark in range(32, 44):  # over the files that segments left when they went cold
        life.submit(mark, [3])
        life.bench.disk.roll()
        if not life.bench.disk._shelf.free:
            break
    life.bench.close()
    with life.bench_again().disk as journal:
        assert any(holding.cold for holding in journal.holdings)
    return life


def test_a_client_that_was_acknowledged_more_than_the_disk_kept_is_told(life: Life) -> None:
    """The last group is durable but nothing recorded that: only who was acknowledged can tell its loss."""
    disk = SimDisk()
    short = Life(disk)
    short.bench = short.bench_again()
    short.promise()
    short.submit(1, [3])
    journal = short.bench.disk
    acknowledged, identity = journal.durable_lsn, journal.journal_id
    offset = journal._segments[-1].offsets[-1]
    state = all_kept(disk)
    inode = state.image.entries[FOLDER / "00000001.segment"]
    content = bytearray(state.image.contents[inode])
    content[offset + 80] ^= 1
    state.image.contents[inode] = bytes(content)
    again = Life(SimDisk(state.image))
    again.bench = again.bench_again()
    assert again.bench.disk.durable_lsn < acknowledged
    with pytest.raises(FabricError, match="acknowledged work was lost"):
        again.bench.owner.require_kept(identity, acknowledged)
    journal.mark_durable()
    state = all_kept(disk)
    content = bytearray(state.image.contents[inode])
    content[offset + 80] ^= 1
    state.image.contents[inode] = bytes(content)
    with pytest.raises(FabricError, match="were acknowledged and cannot be read"):
        Life(SimDisk(state.image)).bench_again()
