"""What a damaged frame costs is told as rows of submissions: by a broker that runs, and by a start that is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.broker.facts import Kind
from fabric_pipelines.broker.losses import told_at_start
from fabric_pipelines.broker.tiering import Water
from fabric_pipelines.broker.wire import error_head, raise_error
from fabric_pipelines.console import error_of
from fabric_pipelines.errors import ColdLost, CorruptionFound, NotFetched
from fabric_pipelines.journal import Journal, OsFileOps
from fabric_pipelines.records.batch import Budget
from fabric_pipelines.testing.damage import sections_of
from fabric_pipelines.testing.memory_store import MemoryStore
from tests.support_broker import ids_of, submission_of, tasks_of
from tests.support_broker_disk import DiskBench

ROWS = 10


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[DiskBench]:
    made = DiskBench(folder=tmp_path / "journal", segment_bytes=1 << 16)
    yield made
    made.close()


def submit(bench: DiskBench, mark: int, batches: int = 3) -> tuple[str, int]:
    """Submission id and first task id."""
    made = [tasks_of([30] * ROWS, seed=100 * mark + at) for at in range(batches)]
    header = submission_of(made, mark)
    state = bench.submit(header, made)
    assert state.first_task_id is not None
    return header.submission_id, state.first_task_id


def frame(bench: DiskBench, kind: Kind, at: int) -> tuple[Path, int, int]:
    """File, offset and LSN of the frame `at` of that kind."""
    lsn = bench.disk.lsns_of(kind)[at]
    segment = bench.disk._segment_of(lsn)
    return segment.path, segment.offsets[lsn - segment.first_lsn], lsn


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def refused(bench: DiskBench) -> CorruptionFound:
    """What the process says of a start, which finds nothing sealed whole enough to be skipped."""
    bench.close()
    with pytest.raises(CorruptionFound) as caught:
        bench._open()
    return told_at_start(caught.value, bench.folder, OsFileOps())


def sealed(bench: DiskBench) -> None:
    bench.owner.commit()
    bench.disk.roll()


def flip_behind(bench: DiskBench, path: Path, at: int) -> None:
    """In what is sealed and covered by a checkpoint, before a start that does not read it."""
    sealed(bench)
    bench.checkpoint()
    flip(path, at)
    bench.crash()


# -- a broker that runs


def test_the_first_read_of_a_damaged_frame_names_the_rows_that_it_costs(bench: DiskBench) -> None:
    submit(bench, 1)
    submission_id, first = submit(bench, 2)
    path, offset, lsn = frame(bench, Kind.ENQUEUE, 4)
    flip_behind(bench, path, offset + 200)
    with pytest.raises(CorruptionFound) as caught:
        bench.owner.payloads.tasks(np.array([3 * ROWS + 15], np.int64))
    ids = f"{first + ROWS}-{first + 2 * ROWS - 1}"
    assert str(caught.value).endswith(
        f"restore the file from a copy; 10 tasks have their row or outcome there ({ids}: rows 10-19 of submission "
        f"{submission_id[:12]})"
    )
    (place,) = caught.value.places
    assert (place["segment"], place["offset"], place["lsn"]) == (str(path), offset, lsn)
    assert (place["tasks"], place["live"], place["task_ids"]) == (10, 10, ids)
    (rows,) = place["rows"]
    assert (rows["submission_id"], rows["count"], rows["rows"]) == (submission_id, 10, "10-19")


def test_scrub_and_verify_name_the_rows_for_people_and_for_programs(bench: DiskBench) -> None:
    submit(bench, 1)
    submission_id, _ = submit(bench, 2)
    path, offset, _ = frame(bench, Kind.ENQUEUE, 5)
    flip_behind(bench, path, offset + 200)
    while not bench.owner.scrub(1 << 20):
        pass
    (bad,) = bench.owner.scrub_report().damaged
    (rows,) = bad.rows
    assert (rows.submission_id, rows.function, rows.rows) == (submission_id, "generate", "20-29")
    assert f"; rows 20-29 of submission {submission_id[:12]})" in bad.sentence
    assert "restore that file from a copy and restart the broker; without a copy" in bad.sentence
    assert "`fabric broker abandon ID` and submit these rows again under another salt" in bad.remedy
    assert bench.owner.core.fault == "", "others go on"
    report = bench.owner.verify()
    assert not report.ok
    assert report.damaged == [bad]
    assert report.differences[0] == bad.sentence


def test_a_damaged_outcome_names_the_rows_whose_outcome_it_was(bench: DiskBench) -> None:
    submission_id, first = submit(bench, 1)
    bench.attach("w")
    lease = bench.lease("w")
    assert lease is not None
    bench.finish(lease)
    path, offset, lsn = frame(bench, Kind.COMPUTED, 0)
    flip_behind(bench, path, offset + 700)
    assert bench.owner.pull("c", 1000) is None, "there is no other"
    (place,) = bench.owner.scrub_report().damaged
    assert (place.lsn, place.tasks, place.live) == (lsn, len(ids_of(lease)), len(ids_of(lease)))
    assert place.rows[0].submission_id == submission_id
    assert str(first) in place.task_ids


def test_a_lost_object_names_the_rows_in_it(tmp_path: Path) -> None:
    store = MemoryStore()
    bench = DiskBench(
        folder=tmp_path / "journal", segment_bytes=1 << 15, store=store, water=Water(0, 0)
    )
    submission_id, _ = submit(bench, 1, batches=8)
    for _ in range(3):
        sealed(bench)
        bench.checkpoint()
    bench.disk.cold.forget_below(1 << 60)
    bench.owner.payloads.forget_below(1 << 60)
    store.objects.clear()
    bench.attach("w")
    with pytest.raises(NotFetched):
        bench.lease("w")
    bench.settle(3)
    (lost, *_) = bench.owner.scrub_report().damaged
    assert lost.rows[0].submission_id == submission_id
    assert "again under another salt" in lost.remedy
    assert f"rows {lost.rows[0].rows} of submission" in lost.sentence
    with pytest.raises(ColdLost, match=rf"rows .* of submission {submission_id[:12]}"):
        bench.owner.payloads.tasks(np.array([0], np.int64))
    bench.close()


# -- a start that is refused


def test_a_damaged_stub_names_the_rows_of_its_segment(tmp_path: Path) -> None:
    bench = DiskBench(
        folder=tmp_path / "journal", segment_bytes=1 << 15, store=MemoryStore(), water=Water(0, 0)
    )
    submission_id, _ = submit(bench, 1, batches=8)
    for _ in range(3):
        sealed(bench)
        bench.checkpoint()
    flip(min(bench.folder.glob("epoch-*.cold")), 40)
    fault = refused(bench)
    (place,) = fault.places
    assert place["rows"][0]["submission_id"] == submission_id
    assert f"rows {place['rows'][0]['rows']} of submission {submission_id[:12]}" in str(fault)
    assert "LSN between 1 and " in str(fault)
    assert "without a copy begin anew" in str(fault)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("sealed_too", [False, True])
def test_a_refused_start_names_the_rows_of_a_damaged_payload(
    bench: DiskBench, checkpointed: bool, sealed_too: bool
) -> None:
    submit(bench, 1)
    submission_id, first = submit(bench, 2)
    path, offset, lsn = frame(bench, Kind.ENQUEUE, 4)
    submit(bench, 3)
    if checkpointed:
        bench.checkpoint()
    if sealed_too:
        sealed(bench)
        path.with_suffix(".index").unlink()
    bench.owner.idle()
    flip(path, offset + 64 + 400)
    fault = refused(bench)
    assert fault.exit_code == 4
    (place,) = fault.places
    assert (place["segment"], place["offset"], place["lsn"]) == (str(path), offset, lsn)
    assert (place["tasks"], place["task_ids"]) == (10, f"{first + ROWS}-{first + 2 * ROWS - 1}")
    (rows,) = place["rows"]
    assert (rows["submission_id"], rows["count"], rows["rows"]) == (submission_id, 10, "10-19")
    assert f"rows 10-19 of submission {submission_id[:12]}" in str(fault)
    assert "submit these rows again" in str(fault)


@pytest.mark.parametrize("how", ["header", "head of the fact"])
def test_where_the_frame_no_longer_says_so_the_tasks_in_the_gap_are_named(
    bench: DiskBench, how: str
) -> None:
    submit(bench, 1)
    _, first = submit(bench, 2)
    path, offset, _ = frame(bench, Kind.ENQUEUE, 4)
    submit(bench, 3)
    bench.owner.idle()
    flip(path, offset + (20 if how == "header" else 64 + 30))
    (place,) = refused(bench).places
    assert (place["tasks"], place["task_ids"]) == (10, f"{first + ROWS}-{first + 2 * ROWS - 1}")
    assert place["rows"] == []


def test_what_a_damaged_frame_says_is_not_believed_where_it_does_not_fit(bench: DiskBench) -> None:
    """A bit in the number of its first row: it does not follow the rows that are there."""
    submit(bench, 1)
    _, first = submit(bench, 2)
    path, offset, _ = frame(bench, Kind.ENQUEUE, 4)
    submit(bench, 3)
    bench.owner.idle()
    at = path.read_bytes().index(b'"first_row":10', offset) + len('"first_row":1')
    flip(path, at)
    assert path.read_bytes()[at - 13 : at + 1] == b'"first_row":14'
    (place,) = refused(bench).places
    assert (place["task_ids"], place["rows"]) == (f"{first + ROWS}-{first + 2 * ROWS - 1}", [])


def test_a_count_of_rows_that_the_header_does_not_confirm_is_not_believed(bench: DiskBench) -> None:
    """In the last batch of the log, which nothing behind it bounds."""
    submit(bench, 1)
    bench.owner.idle()
    path, offset, _ = frame(bench, Kind.ENQUEUE, 2)
    at = path.read_bytes().index(b'"rows":10', offset) + len('"rows":')
    flip(path, at)
    assert path.read_bytes()[at - 7 : at + 2] == b'"rows":50'
    fault = refused(bench)
    assert "tasks" not in fault.places[0]
    assert "have their row" not in str(fault)


@pytest.mark.parametrize("how", ["missing", "cut"])
def test_a_segment_that_is_missing_or_cut_names_its_own_rows(bench: DiskBench, how: str) -> None:
    submission_id, first = submit(bench, 1)
    here = frame(bench, Kind.ENQUEUE, 0)[0]
    sealed(bench)
    bench.checkpoint()
    submit(bench, 2)
    bench.owner.idle()
    bench.close()
    content = here.read_bytes()
    here.unlink()
    if how == "cut":
        here.write_bytes(content[: len(content) // 2])
    fault = refused(bench)
    assert ("is missing" if how == "missing" else "was cut short") in str(fault)
    (place,) = fault.places
    assert (place["tasks"], "at least" in str(fault)) == (3 * ROWS, False)
    (rows,) = place["rows"]
    assert (rows["submission_id"], rows["count"], rows["rows"]) == (submission_id, 30, "0-29")
    assert str(first) in place["task_ids"]
    here.write_bytes(content)
    with Journal.open(bench.folder, segment_bytes=1 << 16) as journal:
        assert journal.first_lsn == 1


def based(bench: DiskBench) -> Path:
    """The one checkpoint that stands for the dropped front of a log, with tasks that are open in it."""
    bench.attach("w")
    for mark in range(1, 9):
        submit(bench, mark)
        for _ in range(2):
            lease = bench.lease("w", Budget(14, 1 << 20, None))
            assert lease is not None
            bench.finish(lease)
            bench.retire(bench.pull())
        sealed(bench)
        bench.checkpoint()
        found = list(bench.folder.glob("checkpoint-0*"))
        if bench.disk.first_lsn > 1 and len(found) == 1:
            submit(bench, 20)
            bench.owner.idle()
            return found[0]
    raise AssertionError("nothing was dropped")


@pytest.mark.parametrize("how", ["column", "head", "gone"])
def test_a_start_without_the_base_of_the_log_names_what_was_open_there(
    bench: DiskBench, how: str
) -> None:
    path = based(bench)
    content = path.read_bytes()
    owner = bench.owner
    open_ = owner.core.state.total().open_tasks - 3 * ROWS
    start, sections = sections_of(content)
    (at,) = (start + part["offset"] + 5 for part in sections if part["name"] == "key")
    bench.close()
    if how == "gone":
        path.unlink()
    else:
        flip(path, 100 if how == "head" else at)
    with pytest.raises(CorruptionFound) as caught:
        bench._open()
    fault = told_at_start(caught.value, bench.folder, OsFileOps())
    (place,) = fault.places
    assert (place["segment"], place["lsn"]) == (str(path), 1)
    assert place["last_lsn"] == owner.journal.first_lsn - 1
    assert f"({path.name} is " in str(fault)
    assert "restore the checkpoint file from a copy" in str(fault)
    assert "begin anew (another FABRIC_HOME and database)" in str(fault)
    assert place["bound"] == "about"
    if how == "column":
        assert place["tasks"] == open_
        assert f"about {open_} tasks were open by what can be read of it" in str(fault)
        assert place["rows"][0]["count"] > 0
    else:
        assert place["tasks"] > 0, "by the frames that are left"
        assert "were open by what can be read of it" not in str(fault), (
            "a head is whole, or nothing"
        )
    path.write_bytes(content)
    bench.owner = bench._open()
    assert bench.owner.verify().ok


def test_where_nothing_can_be_told_the_refusal_stays_as_it_was(bench: DiskBench) -> None:
    submit(bench, 1)
    bench.owner.idle()
    path, offset, _ = frame(bench, Kind.SUBMISSION, 0)
    flip(path, offset + 80)
    bench.close()
    with pytest.raises(CorruptionFound) as caught:
        bench._open()
    assert told_at_start(caught.value, bench.folder, OsFileOps()) is caught.value
    bare = CorruptionFound("something else")
    assert told_at_start(bare, bench.folder, OsFileOps()) is bare


# -- on the wire and in answers


def test_places_travel_with_the_refusal() -> None:
    place: dict[str, Any] = {"segment": "a", "offset": 1, "end": 2, "lsn": 3, "last_lsn": 3}
    place |= {"tasks": 1, "rows": [{"submission_id": "s", "rows": "4"}]}
    head = json.loads(json.dumps(error_head(ColdLost("gone", [place]))))
    with pytest.raises(ColdLost, match="gone") as caught:
        raise_error(head)
    assert caught.value.places == (place,)
    assert error_of(caught.value)["places"] == [place]
    assert "places" not in error_head(CorruptionFound("no place is known"))


def test_a_running_broker_whose_base_is_damaged_makes_itself_another_one(bench: DiskBench) -> None:
    path = based(bench)
    flip(path, 100)
    assert "the base of the log is lost" in str(bench.owner.verify().differences)
    bench.settle(3)
    upkeep = bench.owner.upkeep
    assert upkeep is not None
    assert upkeep.base is not None
    assert upkeep.newest is not None
    assert (upkeep.base.base, upkeep.base.digest) == (upkeep.newest.lsn, upkeep.newest.digest)
    assert not path.exists()
    assert bench.owner.verify().ok, "the log begins behind the new one"
    bench.crash()
    assert bench.owner.verify().ok
