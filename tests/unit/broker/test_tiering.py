"""A broker whose log is larger than its disk: what goes cold comes back in time, or is named, and nothing else waits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_pipelines import answers, screen
from fabric_pipelines.broker.facts import Uploaded, decode
from fabric_pipelines.broker.tiering import Patience, Water
from fabric_pipelines.errors import (
    ColdLost,
    CorruptionFound,
    NotFetched,
    SettingsError,
    StorageFailed,
    StoreUnreachable,
)
from fabric_pipelines.ids import sequence_of
from fabric_pipelines.journal.frame import CONTROL_FRAME_BYTES, MAGIC
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.testing.memory_store import MemoryStore
from tests.support_broker import ENGINE, ids_of, submission_of, tasks_of
from tests.support_broker_disk import DiskBench

OTHER = "other@engine"
SEGMENT_BYTES = 8 * 4096


@dataclass
class Later:
    """Helper threads that work when the test says so; until `waits` is set, at once."""

    waits: bool = False
    jobs: list[tuple[Callable[[], Any], Future[Any]]] = field(default_factory=list)

    def __call__(self, work: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        self.jobs.append((work, answer))
        if not self.waits:
            self.run()
        return answer

    def run(self) -> None:
        jobs, self.jobs = self.jobs, []
        for work, answer in jobs:
            answer.set_result(work())


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def later() -> Later:
    return Later()


@pytest.fixture
def bench(tmp_path: Path, store: MemoryStore, later: Later) -> Iterator[DiskBench]:
    """Everything goes that is sealed, covered by a checkpoint, and not read by every start."""
    made = DiskBench(
        folder=tmp_path / "journal",
        segment_bytes=SEGMENT_BYTES,
        store=store,
        water=Water(0, 0),
        porter=later,
    )
    yield made
    made.close()


def submit(bench: DiskBench, mark: int, *, engine: str = ENGINE, batches: int = 8) -> list[int]:
    """Task ids of a submission of `batches` times 10 tasks, 2.5 KB a batch; of other content for each mark."""
    made = [tasks_of([60] * 10, seed=100 * mark + at) for at in range(batches)]
    state = bench.submit(submission_of(made, mark, engine=engine), made)
    assert state.first_task_id is not None
    return list(range(state.first_task_id, state.first_task_id + 10 * batches))


def freeze(bench: DiskBench) -> None:
    """Seal what is written, cover it by checkpoints, let it go cold, and forget what is in memory."""
    for _ in range(3):
        bench.owner.commit()
        bench.disk.roll()
        bench.checkpoint()
    bench.disk.cold.forget_below(1 << 60)
    bench.owner.payloads.forget_below(1 << 60)


def cold_lanes(bench: DiskBench) -> tuple[list[int], list[int]]:
    """Tasks of one engine that are all cold, and of another that are all here."""
    away = submit(bench, 1)
    freeze(bench)
    here = submit(bench, 2, engine=OTHER, batches=2)
    assert bench.tiering.near(sequences(away)) == 0
    assert bench.tiering.near(sequences(here)) == len(here)
    bench.tiering._wanted.clear()
    return away, here


def sequences(ids: list[int]) -> Any:
    return np.array([sequence_of(at) for at in ids], np.int64)


def run_all(bench: DiskBench, engine: str = ENGINE, name: str = "w") -> list[int]:
    """Lease, report and land until nothing is ready; ids in the order of the leases."""
    done: list[int] = []
    bench.attach(name, engine=engine)
    for _ in range(200):
        try:
            lease = bench.lease(name, Budget(7, 1 << 20, None))
        except NotFetched:
            bench.settle(2)
            continue
        if lease is None:
            break
        done += ids_of(lease)
        bench.finish(lease, name=name)
    bench.retire(bench.pull())
    return done


def test_a_log_larger_than_its_disk_is_worked_through_and_leaves_nothing_behind(
    bench: DiskBench, store: MemoryStore
) -> None:
    ids = [task for mark in range(6) for task in submit(bench, mark)]
    freeze(bench)
    figures = bench.tiering.figures()
    assert figures["hot_bytes"] <= 3 * SEGMENT_BYTES < figures["cold_bytes"]
    assert figures["cold_segments"] == len(store.objects) >= 4
    assert bench.owner.verify().differences == []
    bench.crash()
    assert bench.owner.verify().differences == []
    bench.time.seconds += 31
    assert sorted(run_all(bench)) == ids
    bench.checkpoint()
    assert bench.owner.verify().differences == []
    assert bench.counts() == {"retired": len(ids)}
    assert store.objects == {}
    assert not list(bench.folder.glob("*.cold"))


def test_every_prompt_comes_back_from_the_cold_as_it_was_sent(bench: DiskBench) -> None:
    batches = [tasks_of([20 + 5 * at] * 10, seed=at) for at in range(20)]
    bench.submit(submission_of(batches), batches)
    freeze(bench)
    sent = sorted(row for batch in batches for row in batch.column("tokens").to_pylist())
    got = []
    bench.attach()
    for _ in range(100):
        try:
            lease = bench.lease(budget=Budget(9, 1 << 20, None))
        except NotFetched:
            bench.settle(1)
            continue
        if lease is None:
            break
        got += lease.tasks.column("tokens").to_pylist()
        bench.finish(lease)
    assert bench.tiering.counters["cold_fetches"] > 0
    assert sorted(got) == sent


def test_the_local_file_goes_after_the_durable_fact_and_the_fact_after_the_read_back(
    bench: DiskBench, store: MemoryStore
) -> None:
    events: list[str] = []
    log, went = bench.tiering._log, bench.disk.went_cold
    store.before = lambda call, name: events.append(call)
    bench.tiering._log = lambda facts: (events.append("fact"), log(facts))[1]

    def gone(stub: Any, lsn: int) -> None:
        assert bench.disk.durable_lsn >= lsn
        events.append("gone")
        went(stub, lsn)

    bench.disk.went_cold = gone  # type: ignore[method-assign]
    submit(bench, 1)
    freeze(bench)
    first = events[: events.index("gone") + 1]
    assert first == ["put", "size", "read", "fact", "gone"]


def test_a_lane_whose_rows_are_away_waits_and_other_lanes_go_on(
    bench: DiskBench, later: Later
) -> None:
    away, _ = cold_lanes(bench)
    later.waits = True
    bench.attach("w")
    bench.attach("o", engine=OTHER)
    with pytest.raises(NotFetched, match="on their way") as caught:
        bench.lease("w", Budget(7, 1 << 20, None), call=5)
    assert caught.value.retry_after_s < 1
    assert bench.lease("o") is not None
    bench.owner.tick()
    assert bench.lease("o", call=9) is None, "everything of the other engine is leased"
    with pytest.raises(NotFetched):
        bench.lease("w", Budget(7, 1 << 20, None), call=5)
    later.run()
    bench.owner.tick()
    lease = bench.lease("w", Budget(7, 1 << 20, None), call=5)
    assert lease is not None
    assert set(ids_of(lease)) <= set(away)
    assert bench.owner.core.stranded() == []


def test_lanes_of_one_engine_pass_each_other_over(bench: DiskBench, later: Later) -> None:
    submit(bench, 1)
    freeze(bench)
    batch = tasks_of([33] * 5, seed=9)
    warm = {"kind": "generate", "temperature": 1.0, "top_k": 4, "seed": 3}
    bench.submit(submission_of([batch], 3, sampling=warm), [batch])
    later.waits = True
    bench.attach()
    lease = bench.lease()
    assert lease is not None
    assert {len(row) for row in lease.tasks.column("tokens").to_pylist()} == {33}
    with pytest.raises(NotFetched):
        bench.lease()
    assert bench.owner.core.stranded() == []


def test_rows_are_asked_for_two_budgets_ahead(bench: DiskBench, later: Later) -> None:
    ids = submit(bench, 1, batches=12)
    freeze(bench)
    bench.attach()
    with pytest.raises(NotFetched):
        bench.lease(budget=Budget(3, 1 << 20, None))
    bench.owner.tick()
    later.waits = True
    lease = bench.lease(budget=Budget(3, 1 << 20, None))
    assert lease is not None
    bench.owner.tick()
    order = bench.owner.core.state.lanes[0].order.peek(6, "w")
    wanted = set(bench.owner.core.state.index.locate(order)[0].tolist())
    bench.owner.tick()
    later.run()
    bench.owner.tick()
    assert all(bench.disk.cold.holds(lsn) for lsn in wanted)
    assert len(ids) == 120


@pytest.mark.parametrize("how", ["missing", "changed", "short"])
def test_a_lost_object_is_named_with_its_tasks_and_only_its_lane_waits_until_it_is_back(
    bench: DiskBench, store: MemoryStore, how: str
) -> None:
    away, here = cold_lanes(bench)
    good = dict(store.objects)
    for name, content in good.items():
        spoiled = {"changed": bytes(len(content)), "short": content[: len(content) // 8]}
        store.objects[name] = spoiled.get(how, b"")
        if how == "missing":
            del store.objects[name]
    bench.attach("w")
    bench.attach("o", engine=OTHER)
    with pytest.raises(NotFetched):
        bench.lease("w")
    bench.owner.tick()
    with pytest.raises(
        NotFetched, match=r"ColdLost: object memory://cold/.*\.segment of the cold tier"
    ) as e:
        bench.lease("w")
    assert re.search(rf"\d+ tasks need it \({away[0]}-", str(e.value))
    assert re.search(r"LSN \d+", str(e.value))
    assert "restore that object" in str(e.value)
    assert bench.owner.core.fault == ""
    (lost, *_) = bench.owner.status().journal["cold_lost"]
    assert str(e.value).endswith(lost)
    with pytest.raises(ColdLost, match="restore that object"):
        bench.owner.payloads.tasks(sequences(away[:1]))
    assert sorted(run_all(bench, OTHER, "o")) == here
    store.objects = good
    bench.settle(60)
    assert sorted(run_all(bench)) == away
    assert bench.tiering.lost == {}


def test_nothing_goes_to_a_place_that_does_not_hold_what_went_before(
    bench: DiskBench, store: MemoryStore
) -> None:
    """A folder that is not mounted takes everything, and would be missed when the right one is back."""
    first = submit(bench, 1)
    freeze(bench)
    right, store.objects = store.objects, {}
    assert right
    second = submit(bench, 2)
    freeze(bench)
    assert store.objects == {}
    assert "mount it" in bench.owner.status().journal["cold_fault"]
    store.objects = right
    bench.settle(120)
    assert sorted(run_all(bench)) == sorted(first + second)
    assert bench.tiering.lost == {}


def test_a_store_that_is_away_stops_no_acknowledgement_and_is_tried_again_with_patience(
    bench: DiskBench, store: MemoryStore
) -> None:
    store.away = True
    ids = submit(bench, 1)
    freeze(bench)
    assert store.objects == {}
    assert bench.tiering.counters["cold_upload_failures"] >= 2
    assert "does not answer" in bench.owner.status().journal["cold_fault"]
    tries = bench.tiering.counters["cold_upload_failures"]
    for _ in range(20):
        bench.owner.tick()
    assert bench.tiering.counters["cold_upload_failures"] <= tries + 1
    bench.attach()
    lease = bench.lease(budget=Budget(5, 1 << 20, None))
    assert lease is not None
    bench.finish(lease)
    store.away = False
    bench.settle(200)
    assert store.objects
    assert sorted(ids_of(lease) + run_all(bench)) == ids


def test_patience_doubles_to_a_minute_and_ends_with_success() -> None:
    patience, now, waits = Patience(), 100.0, []
    for _ in range(9):
        patience.lost(now)
        waits.append(patience.due_s - now)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    patience.found()
    assert patience.due_s == 0


def test_a_store_that_goes_away_later_holds_only_what_lies_there(
    bench: DiskBench, store: MemoryStore
) -> None:
    away, here = cold_lanes(bench)
    store.away = True
    bench.attach("w")
    with pytest.raises(NotFetched):
        bench.lease("w")
    bench.settle(3)
    with pytest.raises(NotFetched, match="memory://cold does not answer"):
        bench.lease("w")
    assert sorted(run_all(bench, OTHER, "o")) == here
    with pytest.raises(StoreUnreachable):
        bench.owner.verify()
    store.away = False
    bench.settle(120)
    assert sorted(run_all(bench)) == away


def test_a_put_that_came_back_changed_leaves_the_segment_here(
    bench: DiskBench, store: MemoryStore
) -> None:
    store.spoil = lambda name, content: content[:-7] + b"\1" * 7
    ids = submit(bench, 1)
    freeze(bench)
    assert not any(holding.cold for holding in bench.disk.holdings)
    assert "the segment stays here" in bench.tiering.last_fault
    assert sorted(run_all(bench)) == ids


def test_a_disk_that_fails_under_a_copy_ends_the_process(bench: DiskBench) -> None:
    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    submit(bench, 1)
    bench.disk.cold._stub_of = broken  # type: ignore[assignment,method-assign]
    with pytest.raises(Exception, match="journal's disk failed while a segment went") as caught:
        freeze(bench)
    assert isinstance(caught.value.__cause__, StorageFailed)


def test_a_segment_with_outcomes_that_wait_to_be_landed_stays_here(bench: DiskBench) -> None:
    ids = submit(bench, 1)
    bench.attach()
    lease = bench.lease(budget=Budget(5, 1 << 20, None))
    assert lease is not None
    bench.finish(lease)
    index = bench.owner.core.state.index
    lsn = int(index.done_frames.view[0])
    freeze(bench)
    (holding,) = [h for h in bench.disk.holdings if h.first_lsn <= lsn <= h.last_lsn]
    assert not holding.cold
    assert set(bench.pull()) == set(ids_of(lease))
    assert len(ids) == 80


def test_a_restart_needs_nothing_from_the_store(bench: DiskBench, store: MemoryStore) -> None:
    submit(bench, 1)
    freeze(bench)
    assert store.objects
    store.calls.clear()
    bench.crash()
    assert [call for call, _ in store.calls if call == "read"] == []
    assert bench.tiering.figures()["cold_segments"] == len(store.objects)


def test_a_crash_between_fact_and_deletion_is_finished_at_the_next_start(
    bench: DiskBench, store: MemoryStore
) -> None:
    bench.disk.went_cold = lambda stub, lsn: None  # type: ignore[method-assign]
    submit(bench, 1)
    bench.owner.commit()
    bench.disk.roll()
    bench.checkpoint()
    bench.disk.roll()
    assert bench.owner.core.state.cold
    assert not any(holding.cold for holding in bench.disk.holdings)
    bench.crash()
    assert {h.epoch for h in bench.disk.holdings if h.cold} == set(bench.owner.core.state.cold)
    assert bench.owner.verify().differences == []


def test_a_stub_that_the_log_does_not_confirm_is_refused(
    bench: DiskBench, store: MemoryStore
) -> None:
    submit(bench, 1)
    freeze(bench)
    epoch = next(h.epoch for h in bench.disk.holdings if h.cold)
    fact = bench.owner.core.state.cold[epoch]
    lsns = bench.disk.lsns_of(18)
    frame = bench.disk.read(lsns[0])
    assert isinstance(decode(frame.kind, frame.payload, "here"), Uploaded)
    assert fact.size == bench.disk.cold.stubs[epoch].size
    del bench.owner.core.state.cold[epoch]
    bench.owner.upkeep.newest = None  # type: ignore[union-attr]
    with pytest.raises(CorruptionFound, match="does not agree with the UPLOADED fact"):
        bench.tiering._reconcile()


def test_scrub_and_verify_cover_the_cold_tier(bench: DiskBench, store: MemoryStore) -> None:
    away, _ = cold_lanes(bench)
    assert scrub(bench).ok
    assert bench.owner.verify().ok
    name = min(store.objects)
    good = store.objects[name]
    index = bench.owner.core.state.index
    lsn = int(index.frames.view[0])
    (segment,) = [s for s in bench.disk._segments if s.first_lsn <= lsn <= s.last_lsn]
    name = bench.disk.cold.object_name(segment.epoch)
    good = store.objects[name]
    at = segment.offsets[lsn - segment.first_lsn] + 300
    store.objects[name] = good[:at] + bytes([good[at] ^ 8]) + good[at + 1 :]
    (frame,) = scrub(bench).damaged
    assert (frame.lsn, frame.tasks, frame.live) == (lsn, 10, 10)
    assert frame.task_ids == f"{away[0]}-{away[9]}"
    report = bench.owner.verify()
    assert not report.ok
    (said,) = report.differences
    assert said.startswith(f"memory://cold/{name} is damaged in its ENQUEUE frame: bytes ")
    (rows,) = frame.rows
    assert rows.rows == "0-9"
    needed = f"LSN {lsn}, 10 tasks need it ({away[0]}-{away[9]}; {rows}); restore that object"
    assert needed in said
    assert bench.owner.core.fault == "", "other lanes go on"
    del store.objects[name]
    found = {frame.lsn: frame for frame in scrub(bench).damaged}
    assert found[segment.first_lsn].segment == f"memory://cold/{name}"
    assert found[segment.first_lsn].last_lsn == segment.last_lsn
    assert "is missing" in bench.owner.verify().differences[0]
    store.objects[name] = good
    assert scrub(bench).ok
    assert bench.owner.verify().ok
    assert sorted(run_all(bench)) == away


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :]


def test_verify_refuses_a_cold_object_with_any_frame_damaged_also_one_that_no_replay_reads(
    bench: DiskBench, store: MemoryStore
) -> None:
    cold_lanes(bench)
    segments = {
        bench.disk.cold.object_name(h.epoch): bench.disk.sealed_segment(h.epoch)
        for h in bench.disk.holdings
        if h.cold
    }
    assert set(segments) == set(store.objects)
    names: set[str] = set()
    for name, good in list(store.objects.items()):
        segment = segments[name]
        assert segment is not None
        seal, start = segment.end - CONTROL_FRAME_BYTES, 0
        commit = next(
            at for at in range(128, seal, 64) if good[at : at + 4] == MAGIC and good[at + 7] == 0xFF
        )
        for offset in (start, commit, seal):
            for inside in (20, 80):  # its header, its payload
                store.objects[name] = flipped(good, offset + inside)
                report = bench.owner.verify()
                assert not report.ok
                (said,) = report.differences
                assert said.startswith(f"memory://cold/{name} is damaged in its ")
                names.add(said.partition("in its ")[2].partition(" frame")[0])
                assert scrub(bench).damaged[0].offset == offset
        store.objects[name] = good
    assert names >= {"SEGMENT", "COMMIT", "SEAL", "control"}
    assert bench.owner.verify().ok
    assert bench.owner.core.fault == "", "damage in the store stops nobody's lease"


def test_a_restored_object_is_told_as_damaged_no_more_once_it_is_looked_at(
    bench: DiskBench, store: MemoryStore
) -> None:
    """Nobody scrubs and nobody leases: the broker looks again by itself."""
    cold_lanes(bench)
    good = dict(store.objects)
    (first, *_), second = sorted(good), sorted(good)[-1]
    store.objects[first] = flipped(good[first], len(good[first]) // 2)
    del store.objects[second]
    damaged = scrub(bench).damaged
    assert {frame.segment for frame in damaged} == {
        f"memory://cold/{first}",
        f"memory://cold/{second}",
    }
    figures = bench.owner.status().journal
    assert figures["damaged_frames"] == len(figures["damaged"]) == 2
    page = " ".join(" ".join(screen.page(shown(bench), 80)).split())
    assert all(sentence in page for sentence in figures["damaged"]), "as a person reads it"
    assert "is missing" in figures["cold_fault"]
    bench.settle(60)
    assert bench.owner.status().journal["damaged_frames"] == 2, "looked at, and still so"
    store.objects[second] = flipped(good[second], 200)
    bench.settle(60)
    (kept,) = [f for f in bench.owner.scrub_report().damaged if f.segment.endswith(second)]
    assert kept.lsn == kept.last_lsn, "it is back, with one frame damaged"
    store.objects = dict(good)
    reads = len([name for call, name in store.calls if call == "read"])
    bench.settle(60)
    status = bench.owner.status()
    figures = status.journal
    assert (figures["damaged_frames"], figures["damaged"]) == (0, [])
    assert (figures["cold_fault"], figures["cold_lost"]) == ("", [])
    assert not {"damaged", "cold tier"} & set(shown(bench))
    assert status.counters["frames_repaired"] >= 2
    assert len([name for call, name in store.calls if call == "read"]) - reads <= 8
    assert bench.owner.verify().ok


def shown(bench: DiskBench) -> dict[str, Any]:
    status = bench.owner.status()
    return answers.work_of({**screen.plain(status), **status.total.as_json()})


def test_a_start_that_has_to_read_a_missing_object_names_it_and_what_it_held(
    bench: DiskBench, store: MemoryStore
) -> None:
    """No checkpoint is left, so the log is read from its beginning."""
    cold_lanes(bench)
    first = min(store.objects)
    good = store.objects.pop(first)
    holding = bench.disk.holdings[0]
    for checkpoint in bench.folder.glob("checkpoint-*"):
        checkpoint.unlink()
    with pytest.raises(ColdLost) as refused:
        bench.crash()
    assert str(refused.value) == (
        f"object memory://cold/{first} of the cold tier is missing: LSN {holding.first_lsn}..{holding.last_lsn} "
        "cannot be read; restore that object from a copy"
    )
    assert refused.value.exit_code == 4
    store.objects[first] = good
    bench.owner = bench._open()
    assert bench.owner.verify().ok


def test_an_object_found_missing_by_a_lease_is_listed_and_forgotten_once_it_is_back(
    bench: DiskBench, store: MemoryStore
) -> None:
    away, _ = cold_lanes(bench)
    good, store.objects = store.objects, {}
    bench.attach("w")
    with pytest.raises(NotFetched):
        bench.lease("w")
    bench.settle(3)
    (frame, *_) = bench.owner.scrub_report().damaged
    assert (frame.live > 0, frame.what) == (True, "is missing or not the one that was put")
    assert frame.segment.removeprefix("memory://cold/") in good
    bench.owner.detach("w")
    store.objects = good
    bench.settle(60)
    assert bench.owner.scrub_report().ok
    assert bench.tiering.lost == {}
    assert sorted(run_all(bench)) == away


def test_a_fault_of_the_store_is_told_as_long_as_it_lasts(
    bench: DiskBench, store: MemoryStore
) -> None:
    store.away = True
    submit(bench, 1)
    freeze(bench)
    assert "does not answer" in bench.owner.status().journal["cold_fault"]
    store.away = False
    bench.settle(200)
    assert store.objects
    assert bench.owner.status().journal["cold_fault"] == ""


def scrub(bench: DiskBench) -> Any:
    """As the server does it."""
    while not bench.owner.scrub(1 << 20):
        pass
    bench.owner.cold_scrubbed([call() for call in bench.owner.cold_scrub()])
    return bench.owner.scrub_report()


def test_a_cold_front_is_cleared_by_fetching_what_still_lives(
    bench: DiskBench, store: MemoryStore
) -> None:
    slow = tasks_of([60] * 3, seed=77)
    bench.submit(submission_of([slow], 50, engine=OTHER), [slow])
    for mark in range(4):
        submit(bench, mark)
    freeze(bench)
    before = len(store.objects)
    run_all(bench)
    bench.checkpoint()
    bench.checkpoint()
    assert bench.owner.upkeep.counters["segments_dropped"] > 0  # type: ignore[union-attr]
    assert bench.owner.upkeep.counters["moved_tasks"] == 3  # type: ignore[union-attr]
    assert len(store.objects) < before
    assert bench.owner.verify().differences == []
    assert len(run_all(bench, OTHER, "o")) == 3


def test_a_failed_removal_is_tried_again_also_in_the_next_life(
    bench: DiskBench, store: MemoryStore
) -> None:
    for mark in range(3):
        submit(bench, mark)
    freeze(bench)
    assert store.objects
    run_all(bench)

    def refuse(call: str, name: str) -> None:
        if call == "remove":
            raise StoreUnreachable("not now")

    store.before = refuse
    bench.checkpoint()
    assert bench.tiering.counters["cold_removal_failures"] >= 1
    left = set(store.objects)
    assert left
    bench.crash()
    store.before = lambda call, name: None
    bench.settle(3)
    assert not left & set(store.objects)


def test_a_submission_closed_after_a_restart_is_not_proven_by_rows_that_are_away(
    bench: DiskBench,
) -> None:
    batches = [tasks_of([60] * 10, seed=at) for at in range(16)]
    header = submission_of(batches, 4)
    bench.owner.open_submission(header)
    for at, batch in enumerate(batches):
        bench.upload(header, 10 * at, batch)
    freeze(bench)
    assert any(holding.cold for holding in bench.disk.holdings)
    bench.crash()
    assert bench.owner.close_submission(header.submission_id).closed
    assert bench.owner.core.counters["closed_unproven"] == 1


def test_a_lease_that_is_asked_for_again_waits_for_its_rows(bench: DiskBench, later: Later) -> None:
    submit(bench, 1)
    bench.attach()
    lease = bench.lease(budget=Budget(7, 1 << 20, None), call=3)
    assert lease is not None
    freeze(bench)
    later.waits = True
    with pytest.raises(NotFetched):
        bench.lease(budget=Budget(7, 1 << 20, None), call=3)
    bench.owner.tick()
    later.run()
    bench.owner.tick()
    again = bench.lease(budget=Budget(7, 1 << 20, None), call=3)
    assert again is not None
    assert ids_of(again) == ids_of(lease)
    assert again.tasks.column("tokens").equals(lease.tasks.column("tokens"))


def test_water_marks_that_cross_are_refused() -> None:
    with pytest.raises(SettingsError, match="broker_hot_low_water_bytes is 9"):
        Water(high=8, low=9)
