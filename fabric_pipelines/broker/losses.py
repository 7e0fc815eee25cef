"""Losses: which rows of which submissions lie in bytes of the log that cannot be read, told from what is left.

A running broker knows by its index which tasks have their row or outcome in a frame. A start that is refused has no
state: then the newest whole checkpoint stands in for it, and behind that the frames in front of and behind the damage
say where the numbers of tasks go on. Of a damaged frame itself only that is taken which they confirm. Tells only:
what it finds decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker import snapshot, space
from fabric_pipelines.broker.accounts import DEAD, RETIRED
from fabric_pipelines.broker.checkpoint import PREFIX, Checkpoints
from fabric_pipelines.broker.envelope import unpack
from fabric_pipelines.broker.facts import CheckpointTaken, Kind, decode
from fabric_pipelines.broker.replies import LostRows
from fabric_pipelines.broker.snapshot import Snapshot
from fabric_pipelines.broker.state import State
from fabric_pipelines.errors import CorruptionFound, FabricError, SchemaError
from fabric_pipelines.ids import SEQUENCE_BITS
from fabric_pipelines.journal.files import FileOps
from fabric_pipelines.journal.identity import Identity, read_identity
from fabric_pipelines.journal.salvage import Salvaged, salvage
from fabric_pipelines.records.submission import Submission

Sequences = npt.NDArray[np.int64]
SPANS_MAX = 16
SUBMISSIONS_MAX = 8
EXACT, LEAST, ABOUT = "exact", "at least", "about"
LIE_THERE = "have their row or outcome there"
WERE_OPEN = "were open by what can be read of it"
NOTHING: Sequences = np.zeros(0, np.int64)
AGAIN = "restore that file from a copy and start the broker again"
WITHOUT_A_COPY = (
    "without a copy begin anew (another FABRIC_HOME and database) and submit these rows again"
)


@dataclass(frozen=True, slots=True)
class Batch:
    """An ENQUEUE frame: `rows` tasks from sequence number `base` on, which are those from `first_row` on of their
    submission."""

    lsn: int
    base: int
    rows: int
    submission_id: str
    first_row: int


# -- of a broker that runs


def tasks_at(state: State, first_lsn: int, lsn: int) -> tuple[Sequences, int]:
    """The tasks whose row or outcome lies in the frame `lsn`, and how many of them still need it. `first_lsn`: where
    the log begins."""
    index = state.index
    need = space.needed(state, first_lsn, pin_dead=False)
    moved = index.moved.get(lsn)
    if moved is not None:
        return moved, int(need.tasks[moved].sum())
    batches = np.flatnonzero(index.frames.view == lsn)
    if len(batches):
        rows = np.concatenate([index.rows_of(int(batch)) for batch in batches])
        return rows, int(need.tasks[rows].sum())
    reports = np.flatnonzero(index.done_frames.view == lsn)
    rows = np.flatnonzero(np.isin(index.done[: index.count], reports))
    return rows, int(np.isin(rows, need.outcomes).sum())


def rows_of(state: State, tasks: Sequences) -> list[LostRows]:
    """Ascending tasks as rows of their submissions, the first few of these."""
    index, found = state.index, []
    for record in np.unique(index.submission[tasks]).tolist()[:SUBMISSIONS_MAX]:
        mine = tasks[index.submission[tasks] == record]
        rows = _rows_within(state, record, mine)
        header = state.submissions[record].header
        found.append(LostRows(header.submission_id, header.function, len(rows), spans_of(rows)))
    return found


def rows_in_submission(state: State, tasks: Sequences) -> Sequences:
    """Which row of its submission each task is, in any order."""
    records, rows = state.index.submission[tasks], np.zeros(len(tasks), np.int64)
    for record in np.unique(records).tolist():
        mine = records == record
        rows[mine] = _rows_within(state, record, tasks[mine])
    return rows


def _rows_within(state: State, record: int, tasks: Sequences) -> Sequences:
    """The same of tasks of one submission."""
    batches = np.array(state.submissions[record].batches, np.int64)
    counts, bases = _counts_of(state, batches), state.index.base.view[batches]
    before = np.cumsum(counts) - counts
    at = np.searchsorted(bases, tasks, side="right") - 1
    rows: Sequences = tasks - bases[at] + before[at]
    return rows


def _counts_of(state: State, batches: Sequences) -> Sequences:
    """Rows of each ENQUEUE batch."""
    counts: Sequences = np.diff(state.index.base.view, append=state.index.count)[batches]
    return counts


def spans_of(numbers: Sequences) -> str:
    """Ascending numbers as "3, 5-9"; a long list ends with how many spans more there are."""
    if not len(numbers):
        return "none"
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    parts = np.split(numbers, breaks)
    shown = [f"{p[0]}" if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts[:SPANS_MAX]]
    more = len(parts) - len(shown)
    return ", ".join(shown) + (f" and {more} spans more" if more else "")


def told(fault: CorruptionFound, state: State, first_lsn: int, lsn: int) -> CorruptionFound:
    """The same refusal of the frame `lsn`, with the tasks that it costs."""
    tasks, live = tasks_at(state, first_lsn, lsn)
    ids, rows = spans_of(state.task_ids(tasks)), rows_of(state, tasks)
    place = {"lsn": lsn, "last_lsn": lsn, "tasks": len(tasks), "live": live, "task_ids": ids}
    place |= {"rows": [asdict(part) for part in rows]}
    known = next(iter(fault.places), {})
    sentence = f"{fault}; {_cost(len(tasks), ids, rows)}"
    return type(fault)(sentence, [{**known, **place}])


def _cost(
    tasks: int, ids: str, rows: Sequence[LostRows], bound: str = EXACT, why: str = LIE_THERE
) -> str:
    if not tasks:
        return "no task has its row or outcome there"
    named = ", ".join(str(part) for part in rows[:3])
    more = f" and {len(rows) - 3} submissions more" if len(rows) > 3 else ""
    count = f"{'' if bound == EXACT else f'{bound} '}{tasks} tasks"
    return f"{count} {why} ({ids}{': ' if named else ''}{named}{more})"


# -- of a start that is refused


def told_at_start(fault: CorruptionFound, folder: Path, ops: FileOps) -> CorruptionFound:
    """The same refusal of the journal in `folder`, with the tasks in each place that it names, as far as they can be
    told. Whatever goes wrong in finding them leaves it as it is."""
    if not fault.places:
        return fault
    try:
        identity = read_identity(ops, folder)
        if identity is None:
            return fault
        left = _left(salvage(ops, folder, identity.uuid_bytes))
        checkpoints = Checkpoints(folder, identity.journal_id, ops)
        covered, state = _newest(checkpoints, left, identity)
        remains = [_remains_of(place, checkpoints) for place in fault.places]
    except (FabricError, OSError):
        return fault
    newer = [batch for batch in left.batches if batch.lsn > covered]
    known = sorted([*_batches_of(state), *newer], key=lambda batch: batch.base)
    places = [
        _place_of(place, state, covered, known, left.said)
        if found is None
        else _stood_for(place, found, identity)
        for place, found in zip(fault.places, remains, strict=True)
    ]
    cost = "; ".join(
        _cost(
            p["tasks"],
            p["task_ids"],
            [LostRows(**part) for part in p["rows"]],
            p["bound"],
            LIE_THERE if found is None else WERE_OPEN,
        )
        for p, found in zip(places[:3], remains, strict=False)
        if "tasks" in p
    )
    if not cost:
        return fault
    return type(fault)(f"{fault}; {cost}; {WITHOUT_A_COPY}", places)


def _remains_of(place: Mapping[str, Any], checkpoints: Checkpoints) -> Snapshot | None:
    """Of the checkpoint that the log begins behind, if that is what is damaged."""
    path = Path(place["segment"])
    return checkpoints.remains(path) if path.name.startswith(PREFIX) else None


def _stood_for(place: Mapping[str, Any], found: Snapshot, identity: Identity) -> dict[str, Any]:
    """The tasks that were open at that checkpoint, by its whole columns: what came of them later the log tells. Without
    those columns all tasks of its submissions."""
    records, columns = json.loads(found.head)["submissions"], found.columns
    known = "state" in columns and "submission" in columns
    states = columns["state"] if known else np.zeros(0, np.uint8)
    owners = columns["submission"] if known else np.zeros(0, np.int32)
    rows: list[LostRows] = []
    count, parts = 0, [NOTHING]
    for at, record in enumerate(records):
        header = Submission.from_json(record["header"])
        if known:
            tasks = np.flatnonzero(owners == at)
            mine = np.flatnonzero(~np.isin(states[tasks], (RETIRED, DEAD)))
            parts.append(tasks[mine])
        else:
            mine = np.arange(record["rows"])
        count += len(mine)
        if len(mine) and len(rows) < SUBMISSIONS_MAX:
            span = spans_of(mine)
            rows.append(LostRows(header.submission_id, header.function, len(mine), span))
    ids = np.sort(np.concatenate(parts)) + np.int64(identity.incarnation << SEQUENCE_BITS)
    return {
        **place,
        "tasks": count,
        "live": count,
        "task_ids": spans_of(ids) if known else "not known",
        "rows": [asdict(part) for part in rows],
        "remedy": f"{AGAIN}; {WITHOUT_A_COPY}",
        "bound": ABOUT,
    }


@dataclass(frozen=True, slots=True)
class _Left:
    """What whole frames say, and what damaged ones `said`."""

    batches: list[Batch]
    checkpoints: list[CheckpointTaken]
    said: list[Batch]


def _left(frames: Iterable[Salvaged]) -> _Left:
    left = _Left([], [], [])
    for frame in frames:
        if frame.kind == Kind.ENQUEUE:
            batch = _batch_in(frame.lsn, frame.payload)
            if batch is not None and batch.rows == frame.rows:  # said twice, payload and header
                (left.batches if frame.whole else left.said).append(batch)
        elif frame.kind == Kind.CHECKPOINT and frame.whole:
            fact = decode(frame.kind, frame.payload, f"LSN {frame.lsn}")
            assert isinstance(fact, CheckpointTaken)
            left.checkpoints.append(fact)
    return left


def _newest(checkpoints: Checkpoints, left: _Left, identity: Identity) -> tuple[int, State]:
    """(LSN, state) of the newest whole checkpoint that a fact tells of; without one, of the beginning."""
    for fact in reversed(left.checkpoints):
        found = checkpoints.load(fact)
        if not isinstance(found, str):
            return fact.lsn, snapshot.restore(found)
    return 0, State(identity.incarnation)


def _batches_of(state: State) -> Iterator[Batch]:
    """What the index knows, by the place of each batch's own ENQUEUE frame or of the frame that it was moved to."""
    for record in state.submissions:
        row, counts = 0, _counts_of(state, np.array(record.batches, np.int64))
        for at, rows in zip(record.batches, counts.tolist(), strict=True):
            lsn, base = int(state.index.frames.view[at]), int(state.index.base.view[at])
            yield Batch(lsn, base, rows, record.header.submission_id, row)
            row += rows


def _batch_in(lsn: int, payload: memoryview) -> Batch | None:
    try:
        head, _ = unpack(payload)
        numbers = int(head["base"]), int(head["rows"])
        return Batch(lsn, *numbers, str(head["submission_id"]), int(head["first_row"]))
    except (SchemaError, KeyError, ValueError, TypeError):
        return None


def _place_of(
    place: Mapping[str, Any],
    state: State,
    covered: int,
    known: Sequence[Batch],
    said: Sequence[Batch],
) -> dict[str, Any]:
    """The place with what lay there, as far as that can be told."""
    first, last = place["lsn"], place["last_lsn"]
    if last is None:
        last = max([first, covered, *(batch.lsn for batch in known)])
    old, new = _tasks_between(state, first, min(last, covered)), NOTHING
    rows, states = rows_of(state, old), state.index.state[old]
    live = int((~np.isin(states, (RETIRED, DEAD))).sum())
    tail = max(first, covered + 1)
    batch = _behind_checkpoint(tail, last, known, said) if last >= tail else None
    if batch is not None:
        new = np.arange(batch.base, batch.base + batch.rows)
        if batch.submission_id:
            span = spans_of(np.arange(batch.first_row, batch.first_row + batch.rows))
            rows.append(LostRows(batch.submission_id, "", batch.rows, span))
    tasks = np.concatenate([old, new])
    if not len(tasks) and (last > covered or place["last_lsn"] is None):
        return dict(place)  # of another kind, or not to be told
    bound = EXACT if last <= covered or first == last else LEAST
    if batch is not None and not batch.submission_id and first < last:
        bound = ABOUT  # outcomes lay there as well, and some of these may be moved or given up
    return {
        **place,
        "tasks": len(tasks),
        "live": live + len(new),
        "task_ids": spans_of(state.task_ids(tasks)),
        "rows": [asdict(part) for part in rows],
        "remedy": f"{AGAIN}; {WITHOUT_A_COPY}",
        "bound": LEAST if place["last_lsn"] is None and bound == EXACT else bound,
    }


def _tasks_between(state: State, first: int, last: int) -> Sequences:
    """Those with their row or outcome in a frame of these LSNs, by the index."""
    index = state.index
    frames, reports = index.frames.view, index.done_frames.view
    moved = [lsn for lsn in index.moved if first <= lsn <= last]
    batches = np.flatnonzero((frames >= first) & (frames <= last) & ~np.isin(frames, moved))
    done = np.flatnonzero((reports >= first) & (reports <= last))
    parts = [index.rows_of(at) for at in batches.tolist()] + [index.moved[lsn] for lsn in moved]
    outcomes = np.flatnonzero(np.isin(index.done[: index.count], done))
    return np.unique(np.concatenate([NOTHING, *parts, outcomes]))


def _behind_checkpoint(
    first: int, last: int, known: Sequence[Batch], said: Sequence[Batch]
) -> Batch | None:
    """What was enqueued there: the numbers between the batches in front (`known`, by base) and behind. What a damaged
    frame says of itself is taken where it fills that gap just so; else its submission is "", and only the tasks are
    known. None if there is no gap."""
    behind = [batch.base for batch in known if batch.lsn > last]
    begin = max((batch.base + batch.rows for batch in known if batch.lsn < first), default=0)
    mine = [batch for batch in said if first <= batch.lsn <= last]
    if len(mine) == 1 and mine[0].base == begin and mine[0].rows > 0:
        (batch,) = mine
        same = [other for other in known if other.submission_id == batch.submission_id]
        taken = sum(other.rows for other in same if other.base < begin)
        end = begin + batch.rows
        if taken == batch.first_row and min(behind, default=end) == end:
            return batch
    if behind and min(behind) > begin:
        return Batch(first, begin, min(behind) - begin, "", 0)
    return None
