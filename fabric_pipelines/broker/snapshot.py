"""Snapshot: a whole State as one JSON head and named columns, and back.

The columns are the canonical form of a state: two states are equal bit for bit when these are. Rows that never
change again are handed out as views and stretches of one value as that value, so that taking a snapshot costs
a copy of what is under way only. Derived structures (lane orders, the queue of computed tasks) are left out; they follow from the state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.broker.accounts import RETIRED, STATES, only
from fabric_pipelines.broker.facts import Uploaded
from fabric_pipelines.broker.index import FACTS, Growing, TaskIndex
from fabric_pipelines.broker.lanes import Lane, Step
from fabric_pipelines.broker.state import HELD, OpenLease, State, SubmissionRecord
from fabric_pipelines.ids import canonical_json
from fabric_pipelines.journal import Life
from fabric_pipelines.records.shape import LaneKey
from fabric_pipelines.records.submission import Submission

Column = npt.NDArray[Any]

WRITTEN_ONCE = frozenset({"submission", "prompt", "new", "key"})
SPARE_ROWS = 1024
BLOCK_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`head`: canonical JSON; `columns` by name, in a fixed order."""

    head: bytes
    columns: Mapping[str, Column]

    def drained(self) -> Iterator[tuple[str, Column]]:
        """Each column, which is forgotten before the next one: a snapshot that was taken may be half of an index."""
        assert isinstance(self.columns, _Pieces)
        return self.columns.drained()

    def differences(self, other: Snapshot) -> list[str]:
        """Names of the parts in which two snapshots are not the same bytes."""
        found = ["head"] if self.head != other.head else []
        return found + [
            name
            for name, column in self.columns.items()
            if not np.array_equal(column, other.columns[name])
        ]


class _Pieces(Mapping[str, Column]):
    """Columns in pieces, put together when somebody asks for one."""

    def __init__(self, pieces: dict[str, list[Column]]) -> None:
        self._pieces = pieces

    def __getitem__(self, name: str) -> Column:
        return _whole(self._pieces[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def drained(self) -> Iterator[tuple[str, Column]]:
        while self._pieces:
            name = next(iter(self._pieces))
            yield name, _whole(self._pieces.pop(name))


def _whole(pieces: list[Column]) -> Column:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _pieces_of(index: TaskIndex) -> dict[str, list[Column]]:
    """The index, block by block. What is retired stays as it is for ever."""
    count = index.count
    changing = {name: getattr(index, name)[:count] for name in FACTS if name not in WRITTEN_ONCE}
    pieces: dict[str, list[Column]] = {name: [] for name in changing}
    for begin in range(0, max(count, 1), BLOCK_ROWS):
        block = slice(begin, begin + BLOCK_ROWS)
        final = only(changing["state"][block]) == RETIRED
        for name, column in changing.items():
            rows = column[block]
            pieces[name].append(rows if final else _kept(rows))
    # these come last: copies are let go before the large columns that never change are packed
    return pieces | {name: [getattr(index, name)[:count]] for name in FACTS if name not in pieces}


def _kept(rows: Column) -> Column:
    """The same rows, whatever becomes of them."""
    one = only(rows)
    return rows.copy() if one is None else np.broadcast_to(rows.dtype.type(one), rows.shape)


def take(state: State) -> Snapshot:
    index, accounts = state.index, state.accounts
    columns: dict[str, Column] = {}
    for name in ("base", "frames", "done_frames"):
        columns[name] = getattr(index, name).view.copy()
    columns |= _ragged("moved", index.moved)
    for name in ("tasks", "tokens", "marks"):
        columns[f"account_{name}"] = getattr(accounts, name)[:, : accounts.groups].copy()
    records = len(state.submissions)
    columns["submission_tasks"] = state.submission_tasks[:, :records].copy()
    columns["retired_tokens"] = state.retired_tokens[:records].copy()
    columns["output_tokens"] = state.output_tokens[:records].copy()
    columns["engine_ready"] = state.engine_ready[: len(state.engines)].copy()
    columns["lane_engine"] = state.lane_engine.view.copy()
    columns |= _ragged("lease", {key: lease.tasks for key, lease in state.leases.items()})
    columns["lease_open"] = np.array([lease.open for lease in state.leases.values()], np.int64)
    batches = {record.index: np.array(record.batches, np.int64) for record in state.submissions}
    columns |= _ragged("batch", batches)
    pieces = _pieces_of(index) | {name: [column] for name, column in columns.items()}
    return Snapshot(_head(state), _Pieces(pieces))


def _head(state: State) -> bytes:
    # what is empty in nearly every journal is left out, as it was before it existed
    rare = {
        "classes": list(state.classes),
        "suspects": sorted(state.suspects.items()),
        "requeues": sorted(state.requeues.items()),
        "vector_bytes": state.vector_bytes,
        "lives": [astuple(life) for life in state.lives],
    }
    return canonical_json(
        {name: value for name, value in rare.items() if value}
        | {
            "incarnation": state.incarnation,
            "count": state.index.count,
            "frames": state.frames,
            "next_lease": state.next_lease,
            "computed_padded_tokens": state.computed_padded_tokens,
            "sessions": list(state.sessions),
            "engines": list(state.engines),
            "leases": [lease.session for lease in state.leases.values()],
            **_cold(state),
            "reasons": [[task, *reason] for task, reason in sorted(state.reasons.items())],
            "lanes": [
                {
                    "key": lane.key.as_json(),
                    "sampling": lane.sampling,
                    "generation": lane.generation,
                    **({"opened_at": lane.opened_at} if lane.opened_at else {}),
                    **({"metadata_bytes": lane.metadata_bytes} if lane.metadata_bytes else {}),
                    "step": int(lane.step),
                    "producers": sorted(lane.producers),
                }
                for lane in state.lanes
            ],
            "submissions": [
                {
                    "header": record.header.to_json(),
                    "closed": record.closed,
                    **({"abandoned": True} if record.abandoned else {}),
                    "rows": record.rows,
                    "tokens": record.tokens,
                    "first_sequence": record.first_sequence,
                    "lanes": sorted(record.lanes),
                }
                for record in state.submissions
            ],
        }
    )


def _cold(state: State) -> dict[str, Any]:
    """Left out where nothing is cold, as in heads from before there was a cold tier."""
    return {"cold": [astuple(state.cold[at]) for at in sorted(state.cold)]} if state.cold else {}


def restore(snapshot: Snapshot) -> State:
    """The state that `take` was given. KeyError, ValueError or TypeError for what is no snapshot."""
    head, columns = json.loads(snapshot.head), snapshot.columns
    state = State(head["incarnation"])
    _restore_index(state.index, head["count"], columns)
    _restore_accounts(state, columns, len(head["lanes"]))
    state.frames, state.next_lease = head["frames"], head["next_lease"]
    state.computed_padded_tokens = head["computed_padded_tokens"]
    state.sessions = {name: at for at, name in enumerate(head["sessions"])}
    state.engines = {name: at for at, name in enumerate(head["engines"])}
    state.cold = {fact[0]: Uploaded(*fact) for fact in head.get("cold", ())}
    state.reasons = {task: (code, text) for task, code, text in head["reasons"]}
    state.classes = {name: at for at, name in enumerate(head.get("classes", ()))}
    state.suspects = dict(head.get("suspects", ()))
    state.requeues = dict(head.get("requeues", ()))
    state.vector_bytes = dict(head.get("vector_bytes", ()))
    state.lives = [Life(*life) for life in head.get("lives", ())]
    held = np.isin(state.index.state[: state.index.count], HELD)
    state.held_new = int(state.index.new[: state.index.count][held].sum(dtype=np.int64))
    _restore_submissions(state, head["submissions"], columns)
    for at, lane in enumerate(head["lanes"]):
        key = LaneKey(**lane["key"])
        state.add_lane(
            Lane(
                at,
                key,
                lane["sampling"],
                state.accounts,
                generation=lane["generation"],
                opened_at=lane.get("opened_at", 0),
                metadata_bytes=lane.get("metadata_bytes", 0),
                step=Step(lane["step"]),
                producers=set(lane["producers"]),
            )
        )
        state.lane_of[key] = at
    leases = _unragged("lease", columns)
    for (lease_id, tasks), session, open_ in zip(
        leases.items(), head["leases"], columns["lease_open"].tolist(), strict=True
    ):
        state.leases[lease_id] = OpenLease(session, tasks, open_)
        state.session_leases.setdefault(session, set()).add(lease_id)
    return state


def _restore_index(index: TaskIndex, count: int, columns: Mapping[str, Column]) -> None:
    index.reserve(count + SPARE_ROWS)
    index.count = count
    for name in FACTS:
        index.load(name, columns[name])
    index.base = Growing.of(columns["base"])
    index.frames = Growing.of(columns["frames"])
    index.done_frames = Growing.of(columns["done_frames"])
    index.moved = _unragged("moved", columns)


def _restore_accounts(state: State, columns: Mapping[str, Column], lanes: int) -> None:
    accounts = state.accounts
    accounts.grow(lanes)
    for name in ("tasks", "tokens", "marks"):
        getattr(accounts, name)[:, :lanes] = columns[f"account_{name}"]
    state.lane_engine = Growing.of(columns["lane_engine"])
    ready = columns["engine_ready"]
    state.engine_ready = np.pad(ready, (0, max(8 - len(ready), 0)))


def _restore_submissions(
    state: State, records: list[dict[str, Any]], columns: Mapping[str, Column]
) -> None:
    batches = _unragged("batch", columns)
    for at, record in enumerate(records):
        header = Submission.from_json(record["header"])
        made = SubmissionRecord(
            at,
            header,
            closed=record["closed"],
            abandoned=record.get("abandoned", False),
            rows=record["rows"],
            tokens=record["tokens"],
            batches=batches[at].tolist(),
            first_sequence=record["first_sequence"],
            lanes=set(record["lanes"]),
        )
        state.submissions.append(made)
        state.by_submission[header.submission_id] = made
    spare = max(16 - len(records), 1)
    tasks = columns["submission_tasks"]
    assert tasks.shape == (STATES + 1, len(records)), "submissions and their tasks differ in number"
    state.submission_tasks = np.pad(tasks, ((0, 0), (0, spare)))
    state.retired_tokens = np.pad(columns["retired_tokens"], (0, spare))
    state.output_tokens = np.pad(columns["output_tokens"], (0, spare))


def _ragged(name: str, arrays: dict[int, Column]) -> dict[str, Column]:
    parts = [np.zeros(0, np.int64), *arrays.values()]
    return {
        f"{name}_ids": np.array(list(arrays), np.int64),
        f"{name}_counts": np.array([len(part) for part in arrays.values()], np.int64),
        f"{name}_rows": np.concatenate(parts).astype(np.int64, copy=False),
    }


def _unragged(name: str, columns: Mapping[str, Column]) -> dict[int, Column]:
    cuts = np.cumsum(columns[f"{name}_counts"])[:-1]
    ids = columns[f"{name}_ids"].tolist()
    parts = np.split(columns[f"{name}_rows"], cuts) if ids else []
    return dict(zip(ids, parts, strict=True))
