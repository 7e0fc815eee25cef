"""Every crash state of a recorded life of a broker keeps every promise; and each sync that the source asks for is
needed for that, shown by taking them out one at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from fabric_pipelines.broker.facts import Kind
from fabric_pipelines.testing.crash_judge import (
    Broken,
    Judge,
    beginnings_of,
    cuts_of,
    states_of,
)
from fabric_pipelines.testing.crash_life import COLD, FOLDER, Life
from fabric_pipelines.testing.sim_disk import (
    CrashState,
    Create,
    PowerCut,
    Rename,
    SimDisk,
    Sync,
    Unlink,
    Write,
)
from tests.mutations import Site, sync_sites


@pytest.fixture(scope="module")
def life() -> Life:
    return Life(SimDisk()).run()


def test_the_recorded_life_holds_everything_a_broker_does(life: Life) -> None:
    assert life.kinds == set(Kind)
    made = [op.path for op in life.disk.log if isinstance(op, Create)]
    files = [path for path in made if path.suffix == ".segment" and path.parent == FOLDER]
    assert len(life.epochs) > len(files) >= 2, "no segment file was used twice"
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
    lied = Life(LyingAt(site)).run()
    tries = [(0, 0), *((seed, 4) for seed in range(8))]
    states = (states_of(lied.disk, seed=seed, subsets=few, torn=0) for seed, few in tries)
    with pytest.raises(Broken) as broken:
        Judge(lied).judge_all(chain.from_iterable(states))
    return broken.value.kind


NOT_NEEDED = {
    ("_create", "fsync"): "writes certificates, which are no part of the log",
}
SITES = sync_sites()
RED: dict[str, str] = {}


def test_every_sync_of_the_source_is_reached_by_the_life() -> None:
    disk = LyingAt()
    Life(disk).run()
    reached = {(name, call) for call, name, _ in disk.seen}
    listed = {(site.name, site.text) for site in SITES}
    assert reached <= listed, "the life syncs where the source was not looked at"
    assert listed - reached == {("_create", "fsync")}
    assert set(NOT_NEEDED) <= listed
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
