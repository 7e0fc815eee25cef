"""Every crash state of a recorded life of a broker keeps every promise; and each sync that the source asks for is
needed for that, shown by taking them out one at a time."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import pytest

from fabric_pipelines.broker.facts import Kind
from fabric_pipelines.folders import FolderOps
from fabric_pipelines.testing.crash_judge import (
    LOST,
    UNBALANCED,
    Broken,
    Judge,
    beginnings_of,
    cuts_of,
    lived,
    states_of,
)
from fabric_pipelines.testing.crash_life import COLD, FOLDER, Life
from fabric_pipelines.testing.disk_bench import DiskBench
from fabric_pipelines.testing.sim_disk import (
    CrashState,
    Create,
    MakeFolder,
    PowerCut,
    Rename,
    SimDisk,
    Sync,
    SyncFolder,
    Unlink,
    Write,
    crash_states,
)
from tests.mutations import Site, sync_sites


@pytest.fixture(scope="module")
def life() -> Life:
    return Life(SimDisk()).run()


def test_the_recorded_life_holds_everything_a_broker_does(life: Life) -> None:
    assert life.kinds == set(Kind)
    made = [op for op in life.disk.log if isinstance(op, Create)]
    files = {op.inode for op in made if op.path.suffix == ".segment" and op.path.parent == FOLDER}
    begun = [op.inode for op in life.disk.log if isinstance(op, Write) and not op.offset]
    uses = [begun.count(file) for file in files]
    assert len(files) >= 2
    assert max(uses) >= 2, "no segment file was used twice"
    for what in ("checkpoints", "segments_dropped", "moved_tasks", "moved_outcomes"):
        assert life.counters[what], what
    for what in ("cold_uploads", "cold_fetches", "cold_removals"):
        assert life.counters[what], what
    assert life.counters["segments_dropped"] >= 2
    objects = [op for op in life.disk.log if isinstance(op, Rename) and COLD in op.target.parents]
    gone = [op for op in life.disk.log if isinstance(op, Unlink) and COLD in op.path.parents]
    assert objects
    assert gone
    assert groups_that_piled_up(life.disk) >= 3
    assert any(isinstance(op, PowerCut) for op in life.disk.log), "no crash comes after a crash"
    assert life.counters["killed_before_fdatasync"] == 1, (
        "the roll was over before it was cut short"
    )
    assert life.counters["killed_before_fsync_folder"] == 2, "folders were synced before that"


def test_a_folder_that_was_made_stands_unsynced_until_the_next_process(life: Life) -> None:
    log = life.disk.log
    levels = {FOLDER, FOLDER.parent, COLD, COLD.parent}
    assert {op.path for op in log[:4] if isinstance(op, MakeFolder)} == levels
    assert not any(isinstance(op, PowerCut) for op in log[: log.index(SyncFolder(COLD.parent))])
    seen: set[Path] = set()
    for state in islice(crash_states(life.disk, seed=0, subsets=0), 2000):
        lost = levels - state.image.folders if state.after_ops >= 4 else set()
        below = {level for level in lost for path in state.image.entries if level in path.parents}
        assert not below, f"{state.story}: files without a folder"
        seen |= lost
    assert seen == levels, "no crash loses one of them"


def before_every_level_was_synced(folder: Path, ops: FolderOps, **how: int) -> None:
    """Syncs the parents of what this process made itself, and trusts what it finds."""
    for level in reversed((folder, *folder.parents)):
        if ops.make_folder(level, **how):
            ops.fsync_folder(level.parent)


@pytest.mark.parametrize(
    ("user", "kind", "said"),
    [
        ("journal.faults", LOST, "is gone"),
        ("dataplane.cold_store", UNBALANCED, f"{COLD}/.* is missing"),
    ],
)
def test_folders_found_after_a_kill_are_not_trusted(
    user: str, kind: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"fabric_pipelines.{user}")
    monkeypatch.setattr(module, "make_folders", before_every_level_was_synced)
    trusting = Life(SimDisk()).run()
    with pytest.raises(Broken, match=said) as broken:
        Judge(trusting).judge_all(states_of(trusting.disk, seed=0, subsets=0, torn=0))
    assert broken.value.kind == kind


def test_a_seal_that_is_not_even_asked_to_be_synced_gets_a_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fdatasync(disk: SimDisk, fd: int) -> None:
        if sys._getframe(1).f_code.co_name != "_seal":
            call(disk, fd)

    call = SimDisk.fdatasync
    monkeypatch.setattr(SimDisk, "fdatasync", fdatasync)
    judge = Judge(Life(SimDisk()))
    judge.live()
    judge.count(crash_states(judge.life.disk, seed=0, subsets=0))
    assert judge.broken[LOST] + judge.broken[UNBALANCED] >= 1


def test_a_life_that_meets_with_a_fault_of_its_own_gets_a_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def settle(*_: object) -> None:
        raise AssertionError("a task was counted twice")

    monkeypatch.setattr(DiskBench, "settle", settle)
    judge = Judge(Life(SimDisk()))
    assert judge.live() == ["in the recorded life itself: a task was counted twice"]
    assert judge.broken == {UNBALANCED: 1}
    with pytest.raises(Broken) as broken:
        lived(Life(SimDisk()))
    assert broken.value.kind == UNBALANCED


def groups_that_piled_up(disk: SimDisk) -> int:
    """The most writes that one file had in front of a sync."""
    most, waiting = 0, {}
    for op in disk.log:
        if isinstance(op, Write):
            waiting[op.inode] = waiting.get(op.inode, 0) + 1
            most = max(most, waiting[op.inode])
        elif isinstance(op, Sync):
            waiting[op.inode] = 0
    return most


@pytest.mark.timeout(1800)  # minutes of CPU: each distinct log is verified and lived on
def test_ten_thousand_crash_states_keep_every_promise(life: Life) -> None:
    judge = Judge(life)
    judge.judge_all(states_of(life.disk, seed=7, subsets=24, torn=30))
    assert len(judge.states) >= 10_000
    assert len(judge.logs) >= 120


# -- a sync that does nothing


class LyingAt(SimDisk):
    """Reports success and does nothing where the source asks for this sync; `seen` has all that were asked for."""

    def __init__(self, site: Site | None = None) -> None:
        super().__init__()
        self._place = (site.text, site.name, site.line) if site is not None else None
        self.seen: set[tuple[str, str, int]] = set()

    def _lies(self, call: str) -> bool:
        frame = sys._getframe(2)
        place = call, frame.f_code.co_qualname, frame.f_lineno
        self.seen.add(place)
        if place == self._place:
            self._call(call)
        return place == self._place

    def fsync(self, fd: int) -> None:
        if not self._lies("fsync"):
            super().fsync(fd)

    def fdatasync(self, fd: int) -> None:
        if not self._lies("fdatasync"):
            super().fdatasync(fd)

    def fsync_folder(self, folder: Path) -> None:
        if not self._lies("fsync_folder"):
            super().fsync_folder(folder)


def broken_in_the_life(site: Site) -> str:
    """Which promise some crash state of a life with that lie breaks: first without chance, then seeds until one does."""
    life = Life(LyingAt(site))
    tries = [(0, 0), *((seed, 4) for seed in range(8))]
    states = (states_of(life.disk, seed=seed, subsets=few, torn=0) for seed, few in tries)
    with pytest.raises(Broken) as broken:
        Judge(lived(life)).judge_all(chain.from_iterable(states))
    return broken.value.kind


NOT_NEEDED = {
    ("OsFolders.fsync_folder", "fsync"): "the call itself, for which the simulated disk stands in",
    ("_create", "fsync"): "writes certificates, which are no part of the log",
    ("published", "fsync_folder"): "puts models and engines in place; test_folders holds it",
}
SITES = sync_sites()
RED: dict[str, str] = {}


def test_every_sync_of_the_source_is_reached_by_the_life() -> None:
    disk = LyingAt()
    Life(disk).run()
    reached = {(name, call) for call, name, _ in disk.seen}
    listed = {(site.name, site.text) for site in SITES}
    assert reached <= listed, "the life syncs where the source was not looked at"
    assert listed - reached == set(NOT_NEEDED)
    assert len(SITES) - len(NOT_NEEDED) >= 18


@pytest.mark.parametrize("site", SITES, ids=str)
def test_without_any_one_sync_a_promise_is_broken(site: Site) -> None:
    key = site.name, site.text
    if key in NOT_NEEDED:
        RED[str(site)] = f"green, and may be: {NOT_NEEDED[key]}"
        assert len(NOT_NEEDED[key]) > 20
        return
    RED[str(site)] = f"red: {broken_in_the_life(site)}"


def test_every_site_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The list for the reader of a log; complete whenever this file ran whole."""
    with capsys.disabled():
        for name, verdict in sorted(RED.items()):
            print(f"\n  {name}: {verdict}", end="")  # noqa: T201
    assert set(RED) <= set(map(str, SITES))
    assert not RED or set(RED) == set(map(str, SITES))


def torn_index_files(disk: SimDisk) -> Iterator[CrashState]:
    """Never fsynced, so a half-written one over that of an earlier use is an everyday thing."""
    for after_ops in beginnings_of(disk, ".index"):
        yield from cuts_of(disk, after_ops)


def test_a_torn_index_file_is_never_believed(life: Life) -> None:
    judge = Judge(life)
    judge.judge_all(torn_index_files(life.disk))
    assert len(judge.states) > 100
