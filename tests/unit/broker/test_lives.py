"""What a client was told is durable is asked of the life that told it: the LSN alone is taken again after a restart."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fabric_pipelines.broker import snapshot, state
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.broker.facts import Started
from fabric_pipelines.broker.lives import require_kept
from fabric_pipelines.broker.replies import ACKNOWLEDGED
from fabric_pipelines.broker.state import State
from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.journal import Life
from fabric_pipelines.testing.crash_life import bench_on
from fabric_pipelines.testing.disk_bench import DiskBench
from fabric_pipelines.testing.memory_journal import MemoryJournal
from fabric_pipelines.testing.sim_disk import Image, SimDisk, all_kept
from tests.support_broker import submission_of, tasks_of

LOST = "acknowledged work was lost"
Proof = tuple[str, int, str]


def proof_of(bench: DiskBench) -> Proof:
    """What an answer says at this moment."""
    return bench.disk.journal_id, bench.disk.durable_lsn, bench.disk.life.name


def upload(bench: DiskBench) -> int:
    """The second batch of a submission: one frame, one group. Returns, as those below do, the LSN in front of it."""
    batches = [tasks_of([3, 4], seed=1), tasks_of([2], seed=2)]
    header = submission_of(batches, 1)
    bench.owner.open_submission(header)
    bench.upload(header, 0, batches[0])
    bench.owner.commit()
    before = bench.disk.durable_lsn
    bench.upload(header, 2, batches[1])
    bench.owner.commit()
    return before


def computed(bench: DiskBench) -> int:
    bench.submit(submission_of([tasks_of([3])], 2), [tasks_of([3])])
    bench.attach()
    lease = bench.lease()
    assert lease is not None
    bench.owner.commit()
    before = bench.disk.durable_lsn
    bench.finish(lease)
    return before


def retire(bench: DiskBench) -> int:
    computed(bench)
    before = bench.disk.durable_lsn
    assert bench.retire(bench.pull()) == 1
    return before


def behind(bench: DiskBench, lsn: int) -> tuple[Path, range]:
    segment = bench.disk._segments[-1]
    return segment.path, range(segment.offsets[lsn + 1 - segment.first_lsn], segment.end)


def flipped(image: Image, path: Path, at: int, bit: int = 0) -> Image:
    made = image.copy()
    inode = made.entries[path]
    content = bytearray(made.contents[inode])
    content[at] ^= 1 << bit
    made.contents[inode] = bytes(content)
    return made


def others(bench: DiskBench, mark: int) -> None:
    """What other clients do first, which goes far over any LSN that was lost."""
    for at in range(4):
        batch = tasks_of([5], seed=mark)
        bench.submit(submission_of([batch], mark * 10 + at), [batch])


@pytest.mark.parametrize("last", [upload, computed, retire])
@pytest.mark.parametrize("earlier", [0, 2])
def test_each_byte_of_the_last_acknowledged_group_that_flips_is_told(
    last: Callable[[DiskBench], int], earlier: int
) -> None:
    disk, chance = SimDisk(), random.Random(5)
    bench = bench_on(disk)
    for _ in range(earlier):
        bench.crash()
    before = last(bench)
    proof, (path, places) = proof_of(bench), behind(bench, before)
    assert (proof[1] - before == 1) == (last is not retire)
    image = all_kept(disk).image
    for at in places[:: 11 if earlier else 5 if last is computed else 1]:
        again = bench_on(SimDisk(flipped(image, path, at, chance.randrange(8))))
        assert (again.disk.life.after, again.disk.durable_lsn) == (before, before + 1)
        with pytest.raises(CorruptionFound, match=LOST):
            again.owner.require_kept(*proof)
        if at % 64 == 0:
            for mark in range(1, 4):
                others(again, mark)
                again.crash()
                with pytest.raises(CorruptionFound, match=LOST):
                    again.owner.require_kept(*proof)
            assert again.owner.verify().differences == []
        again.close()


def test_the_opening_of_a_life_that_acknowledged_something_is_no_torn_tail() -> None:
    """Its OPENED frame was durable before anything else of it: with it all of that life would pass for a tail."""
    disk = SimDisk()
    bench = bench_on(disk)
    segment = bench.disk._segments[-1]
    opened = range(segment.end - 128, segment.end)
    bench.submit(submission_of([tasks_of([3])]), [tasks_of([3])])
    for life in (1, 2):
        image = all_kept(disk).image
        for at in opened:
            with pytest.raises(
                CorruptionFound, match=rf"OPENED frame of start {life}|cannot be read"
            ):
                bench_on(SimDisk(flipped(image, segment.path, at)))
        begin = bench.disk._segments[-1].end
        bench.crash()
        opened = range(begin, begin + 128)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[DiskBench]:
    made = DiskBench(folder=tmp_path / "journal")
    yield made
    made.close()


def rounds(bench: DiskBench, first: int, count: int) -> None:
    for mark in range(first, first + count):
        batch = tasks_of([40] * 60, seed=mark)
        bench.submit(submission_of([batch], mark), [batch])
        bench.attach()
        while (lease := bench.lease()) is not None:
            bench.finish(lease)
        bench.retire(bench.pull())


def test_a_kept_proof_is_never_refused_and_a_lost_one_always_over_checkpoints_and_drops(
    bench: DiskBench,
) -> None:
    honest = [proof_of(bench)]
    lost: list[Proof] = []
    for life in range(5):
        upload(bench) if life == 0 else rounds(bench, life * 100, 2)
        if life in (0, 2):
            path, places = behind(bench, bench.disk.durable_lsn - 1)
            lost.append(proof_of(bench))
            bench.disk._stopped = "killed"
            with path.open("r+b") as file:
                file.seek(places[80])
                byte = file.read(1)[0]
                file.seek(places[80])
                file.write(bytes([byte ^ 4]))
        else:
            honest.append(proof_of(bench))
        bench.crash()
        honest.append(proof_of(bench))
        rounds(bench, life * 100 + 10, 3)
        bench.checkpoint()
    assert bench.disk.first_lsn > lost[0][1], "the place of the first loss was dropped"
    for _ in range(2):
        for proof in honest:
            bench.owner.require_kept(*proof)
        for proof in lost:
            with pytest.raises(CorruptionFound, match=LOST):
                bench.owner.require_kept(*proof)
        assert bench.owner.verify().differences == []
        bench.crash()
    journal_id, lsn, name = proof_of(bench)
    with pytest.raises(CorruptionFound, match=LOST):  # and of the life at hand
        bench.owner.require_kept(journal_id, lsn + 1, name)


def test_a_life_that_an_older_copy_never_had_is_told(bench: DiskBench) -> None:
    bench.crash()
    journal_id, lsn, _ = proof_of(bench)
    life = bench.disk.life
    for other in (
        replace(life, opened_us=life.opened_us - 1),
        replace(life, opens=life.opens + 1),
    ):
        with pytest.raises(CorruptionFound, match=f"not had the life {other.name}.*{LOST}"):
            bench.owner.require_kept(journal_id, 1, other.name)
    bench.owner.require_kept(journal_id, lsn)  # a client of before there were lives
    bench.owner.require_kept("of another", lsn + 9, "7-7")
    for odd in ("7", "a-b", "1-2-3", "-1-5"):
        with pytest.raises(ValueError, match=r"unpack|invalid literal"):
            bench.owner.require_kept(journal_id, lsn, odd)


def test_lives_are_kept_by_the_thousand_and_the_oldest_are_held_to_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "LIVES_KEPT", 3)
    made = State(7)
    for opens in range(2, 9):
        made.apply(Started("0.1.0", opens, opens, opens * 10), opens)
    assert made.lives == [Life(opens, opens, opens * 10) for opens in (6, 7, 8)]
    assert snapshot.restore(snapshot.take(made)).lives == made.lives
    journal = MemoryJournal(life=made.lives[-1])
    require_kept(journal, made.lives, 0, "2-2")
    with pytest.raises(CorruptionFound, match=LOST):
        require_kept(journal, made.lives, 61, "2-2")


def test_a_started_fact_of_before_there_were_lives_is_the_bytes_it_was() -> None:
    assert b"".join(Started("0.1.0").encode()).rstrip(b"\0").endswith(b'{"version":"0.1.0"}')
    made = State(7)
    made.apply(Started("0.1.0"), 1)
    assert made.lives == []


def test_a_client_forgets_a_proof_only_once_the_new_life_was_shown_it() -> None:
    client = BrokerClient("grpc+unix:///nowhere.sock", role="producer")

    def told(lsn: int, life: str, shown: object) -> object:
        client._note({ACKNOWLEDGED: ["j", lsn, life]}, {ACKNOWLEDGED: shown})
        return client._presented()[ACKNOWLEDGED]

    assert told(3, "1-1", None) == ["j", 3, "1-1"]
    assert told(2, "1-1", None) == ["j", 3, "1-1"]
    assert told(9, "2-2", None) == ["j", 3, "1-1"]
    assert told(9, "2-2", ["j", 2, "1-1"]) == ["j", 3, "1-1"]
    assert told(8, "2-2", ["j", 3, "1-1"]) == ["j", 8, "2-2"]
    assert told(9, "2-2", ["j", 3, "1-1"]) == ["j", 9, "2-2"]
