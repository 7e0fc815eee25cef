"""Files that a helper's thread writes or reads back, while the owner clears the front of the log: at every system call
and every call of the store the other side gets its turn, in one thread, so that each order of events is there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.broker.checkpoint import PREFIX
from fabric_pipelines.broker.facts import Kind
from fabric_pipelines.broker.owner import Fatal
from fabric_pipelines.broker.tiering import Water
from fabric_pipelines.broker.upkeep import Upkeep
from fabric_pipelines.errors import NotFetched, StorageFailed
from fabric_pipelines.journal import OsFileOps
from fabric_pipelines.journal.stub import Stub
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.testing.memory_store import MemoryStore
from tests.support_broker import submission_of, tasks_of
from tests.support_broker_disk import DiskBench


@dataclass
class Turn:
    """Gives `other` its turn before call number `at` of what is run under it, or, by `end`, after the last one."""

    at: int
    other: Callable[[], None]
    calls: int = 0
    given: bool = False

    def step(self) -> None:
        number, self.calls = self.calls, self.calls + 1
        if number == self.at:
            self.given = True
            self.other()

    def end(self) -> bool:
        """Whether this was the last turn there is."""
        if not self.given:
            self.other()
        return not self.given


@dataclass
class Helper:
    """Runs its work when the test says so; `turn` is taken at each step of it."""

    jobs: list[tuple[Callable[[], Any], Future[Any]]] = field(default_factory=list)
    turn: Turn | None = None

    def __call__(self, work: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        self.jobs.append((work, answer))
        return answer

    def run(self, turn: Turn | None = None) -> None:
        jobs, self.jobs = self.jobs, []
        for work, answer in jobs:
            self.turn = turn
            found = work()
            self.turn = None
            answer.set_result(found)

    def step(self) -> None:
        if self.turn is not None:
            turn, self.turn = self.turn, None
            turn.step()
            self.turn = turn


class SteppedFiles:
    """The disk, which tells the helper of each call."""

    def __init__(self, helper: Helper) -> None:
        self._disk, self._helper = OsFileOps(), helper

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._disk, name)

        def stepped(*arguments: Any, **options: Any) -> Any:
            self._helper.step()
            return call(*arguments, **options)

        return stepped


@dataclass
class SteppedStore(MemoryStore):
    """The cold store, which tells the helper before each call, and once more before what was read comes back."""

    helper: Helper = field(default_factory=Helper)

    def read(self, name: str, offset: int, length: int) -> bytes:
        found = super().read(name, offset, length)
        self.helper.step()
        return found


def upkeep_of(bench: DiskBench) -> Upkeep:
    assert bench.owner.upkeep is not None
    return bench.owner.upkeep


def work_off(bench: DiskBench, mark: int) -> None:
    batches = [tasks_of([30 + at] * 10, seed=10 * mark + at) for at in range(4)]
    bench.submit(submission_of(batches, mark), batches)
    bench.attach()
    while (lease := bench.lease(budget=Budget(40, 1 << 20, None))) is not None:
        bench.finish(lease)
    bench.retire(bench.pull())


def about_to_drop(folder: Path, helper: Helper) -> DiskBench:
    """A front with a few live rows is being cleared: they are copied, and the next tick drops it."""
    bench = DiskBench(folder=folder, ops=SteppedFiles(helper), writer=helper)  # type: ignore[arg-type]
    slow = tasks_of([50] * 4, seed=77)
    bench.submit(submission_of([slow], 99, engine="slow@engine"), [slow])
    upkeep = upkeep_of(bench)
    for mark in range(10):
        work_off(bench, mark)
        bench.owner.commit()
        bench.disk.roll()
        upkeep.begin_checkpoint()
        helper.run()
        upkeep.tick()
        if upkeep._below:
            return bench
    pytest.fail("no front was cleared")


def until(bench: DiskBench, done: Callable[[], bool]) -> None:
    for _ in range(50):
        if done():
            return
        bench.settle(1)
    pytest.fail("it did not come to that")


def drop(bench: DiskBench) -> None:
    upkeep, before = upkeep_of(bench), bench.disk.first_lsn
    until(bench, lambda: not upkeep._below)
    assert bench.disk.first_lsn > before, "the front was dropped"


def checkpoint_files(bench: DiskBench) -> set[int]:
    return {int(path.name.removeprefix(PREFIX)) for path in bench.folder.glob(f"{PREFIX}0*")}


def require_named(bench: DiskBench) -> None:
    upkeep = upkeep_of(bench)
    assert upkeep.newest is not None
    assert upkeep.base is not None
    assert {upkeep.newest.lsn, upkeep.base.base} <= checkpoint_files(bench)


def test_a_checkpoint_under_way_outlives_a_drop_at_each_of_its_steps(tmp_path: Path) -> None:
    """It was asked for by the cold tier while the front was being cleared; the drop took its file away between the
    rename and the fact, and the next drop made the missing file the base of the log."""
    steps, last = 0, False
    while not last:
        helper = Helper()
        bench = about_to_drop(tmp_path / str(steps), helper)
        upkeep = upkeep_of(bench)
        upkeep.begin_checkpoint()  # as the cold tier does
        turn = Turn(steps, lambda bench=bench: drop(bench))  # type: ignore[misc]
        helper.run(turn)
        last = turn.end()
        bench.settle(1)
        require_named(bench)
        first = upkeep.newest
        for mark in range(20, 24):  # until a drop leans on it or on a later one
            work_off(bench, mark)
            bench.owner.commit()
            bench.disk.roll()
            upkeep.begin_checkpoint()
            helper.run()
            bench.settle(3)
            require_named(bench)
        assert upkeep.base is not None
        assert first is not None
        assert upkeep.base.base >= first.lsn
        assert len(checkpoint_files(bench)) <= 3
        bench.crash()
        assert bench.owner.restored.ignored == []
        assert bench.owner.verify().differences == []
        bench.close()
        steps += 1
    assert steps >= 12, "open, write, sync, rename, sync, read back"


@pytest.mark.parametrize("how", ["missing", "cut", "another"])
def test_nothing_is_dropped_without_the_checkpoint_that_stands_for_it(
    tmp_path: Path, how: str
) -> None:
    bench = about_to_drop(tmp_path / "journal", Helper())
    upkeep = upkeep_of(bench)
    assert upkeep.newest is not None
    path = bench.folder / f"{PREFIX}{upkeep.newest.lsn:016d}"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(content if how == "another" else content[: upkeep.newest.size - 1])
    drops, first = bench.disk.lsns_of(Kind.DROP), bench.disk.first_lsn
    with pytest.raises(
        Fatal, match=f"{path.name} is .*nothing that it stands for was dropped"
    ) as told:
        bench.settle(50)
    assert isinstance(told.value.__cause__, StorageFailed)
    assert (bench.disk.lsns_of(Kind.DROP), bench.disk.first_lsn) == (drops, first)
    bench.crash()
    assert bench.owner.verify().differences == []
    bench.close()


# -- the cold tier's helper


def tiered(folder: Path, helper: Helper) -> DiskBench:
    store = SteppedStore(helper=helper)
    store.before = lambda call, name: helper.step()
    return DiskBench(
        folder=folder,
        ops=SteppedFiles(helper),  # type: ignore[arg-type]
        segment_bytes=8 * 4096,
        store=store,
        water=Water(0, 0),
        porter=helper,
    )


def seal(bench: DiskBench) -> None:
    bench.owner.commit()
    bench.disk.roll()
    upkeep_of(bench).begin_checkpoint()
    bench.settle(3)


def test_a_segment_on_its_way_to_the_store_is_not_dropped_at_any_step_of_the_copy(
    tmp_path: Path,
) -> None:
    steps = 0
    while True:
        helper = Helper()
        bench = tiered(tmp_path / str(steps), helper)
        batches = [tasks_of([60] * 10, seed=at) for at in range(8)]
        bench.submit(submission_of(batches), batches)
        seal(bench)
        segment = bench.tiering._uploading
        assert segment is not None
        assert len(helper.jobs) == 1

        def clear(bench: DiskBench = bench, segment: Any = segment) -> None:
            content = segment.path.read_bytes()
            work_off(bench, 5)
            for _ in range(3):
                seal(bench)
            assert upkeep_of(bench)._below > segment.first_lsn, "its front is to be cleared"
            assert segment.path.read_bytes() == content
            assert bench.disk.sealed_segment(segment.epoch) is segment

        turn = Turn(steps, clear)
        helper.run(turn)
        if not turn.given:
            bench.close()
            break  # what is done is the owner's again
        for _ in range(10):
            bench.settle(3)
            helper.run()
        assert bench.disk.holdings[0].epoch > segment.epoch, "and then it is"
        assert segment.epoch not in bench.disk.cold.stubs
        assert bench.owner.verify().differences == []
        bench.crash()
        assert bench.owner.verify().differences == []
        bench.close()
        steps += 1
    assert steps >= 12


def test_an_object_that_is_removed_at_any_step_of_its_scrub_is_no_loss(tmp_path: Path) -> None:
    """The stub went, too, and with it the sum that the whole object was compared with: a KeyError ended the broker."""
    steps, last = 0, False
    while not last:
        helper = Helper()
        bench = tiered(tmp_path / str(steps), helper)
        batches = [tasks_of([60] * 10, seed=at) for at in range(8)]
        bench.submit(submission_of(batches), batches)
        for _ in range(6):
            seal(bench)
            helper.run()
        (cold, *_) = [holding for holding in bench.disk.holdings if holding.cold]

        def remove(
            bench: DiskBench = bench, helper: Helper = helper, epoch: int = cold.epoch
        ) -> None:
            work_through(bench, helper)
            assert epoch not in bench.disk.cold.stubs

        turn = Turn(steps, remove)
        calls = bench.owner.cold_scrub()[:1]
        helper.turn = turn
        found = [call() for call in calls]
        helper.turn = None
        last = turn.end()
        bench.owner.cold_scrubbed(found)
        assert bench.owner.scrub_report().ok
        assert bench.owner.verify().differences == []
        bench.close()
        steps += 1
    assert steps >= 4


def work_through(bench: DiskBench, helper: Helper) -> None:
    """Everything is landed, the front dropped, and the objects of it removed."""
    bench.attach()
    for _ in range(200):
        try:
            lease = bench.lease(budget=Budget(40, 1 << 20, None))
        except NotFetched:
            bench.settle(1)
            helper.run()
            continue
        if lease is None:
            break
        bench.finish(lease)
    bench.retire(bench.pull())
    for _ in range(8):
        seal(bench)
        helper.run()


def test_the_list_of_stubs_is_not_read_while_a_helper_changes_it(tmp_path: Path) -> None:
    helper = Helper()
    bench = tiered(tmp_path / "journal", helper)
    batches = [tasks_of([60] * 10, seed=at) for at in range(8)]
    bench.submit(submission_of(batches), batches)
    seal(bench)
    assert bench.tiering._uploading is not None

    class Changing(dict[int, Stub]):
        def items(self) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    bench.disk.cold.stubs = Changing(bench.disk.cold.stubs)
    bench.settle(5)
    assert bench.tiering._uploading is not None
    bench.close()
