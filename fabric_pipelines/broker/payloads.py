"""Payloads: the tokens of leased tasks and the outcomes of computed ones, gathered from journal frames.

Frames are decoded once and kept for a while, bounded in bytes; a decoded batch is a view of its frame, which
costs next to nothing where the frame lies in a sealed segment. There the file may change behind it: what is copied of
rows is compared with what they were (`gather`), and outcomes are decoded each time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fabric_pipelines.broker.envelope import Part
from fabric_pipelines.broker.facts import (
    Computed,
    Enqueued,
    Moved,
    MovedComputed,
    Verdict,
    decode,
)
from fabric_pipelines.broker.gather import RowChanged, TaskMemory, gathered
from fabric_pipelines.broker.losses import rows_in_submission, told
from fabric_pipelines.broker.state import ROW_LOST, State
from fabric_pipelines.broker.supply import Grant
from fabric_pipelines.broker.withheld import Withheld
from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.journal import Frame
from fabric_pipelines.records.arrow import read_ipc, whole
from fabric_pipelines.records.completion import COMPLETION_SCHEMA, PULLED_SCHEMA, clip_error_text
from fabric_pipelines.records.lease import LEASE_SCHEMA, Lease

Sequences = npt.NDArray[np.int64]
CACHE_BYTES = 256 << 20
WITH_ROWS = (Enqueued, Computed, Moved, MovedComputed)
VIEW_BYTES = 8192  # of Python and Arrow objects around a mapped batch
ROW_BYTES = 64  # of what is kept of each of its rows


class FrameReader(Protocol):
    @property
    def first_lsn(self) -> int: ...
    def view(self, lsn: int) -> tuple[Frame, bool]: ...


class Payloads:
    def __init__(self, journal: FrameReader, state: State) -> None:
        self._journal, self._state = journal, state
        self._cache: OrderedDict[int, tuple[pa.RecordBatch, int]] = OrderedDict()
        self._cached_bytes = 0
        self._memories: dict[int, TaskMemory] = {}  # of batches in the cache
        self._mapped: set[int] = set()  # those in the cache whose bytes are the file's
        self.withheld = Withheld(state)

    def lease(self, grant: Grant, deadline_us: int, rows: pa.RecordBatch | None = None) -> Lease:
        """The lease as a worker receives it. `rows`: its tasks, if they were read already."""
        index, lane = self._state.index, grant.lane
        rows = self.tasks(grant.tasks) if rows is None else rows
        tasks = pa.RecordBatch.from_arrays(
            [
                pa.array(self._state.task_ids(grant.tasks)),
                *rows.columns,
                pa.array(index.attempts[grant.tasks]),
                pa.array(grant.leader),
            ],
            schema=LEASE_SCHEMA,
        )
        return Lease(
            lease_id=grant.lease_id,
            lane=lane.name,
            engine=lane.key.engine,
            sampling=lane.sampling,
            aligned_length=lane.key.length,
            deadline_us=deadline_us,
            tasks=tasks,
        )

    def pulled(self, tasks: Sequences) -> pa.RecordBatch:
        """Completions of `tasks` in that order, as PULLED_SCHEMA."""
        index, state = self._state.index, self._state
        frames = index.done[tasks]
        reported = np.flatnonzero(frames >= 0)
        silent = np.flatnonzero(frames < 0)
        parts = []
        if len(reported):
            parts.append(self.outcomes(tasks[reported]))
        if len(silent):
            parts.append(self._unreported(tasks[silent], parts[0].schema if parts else None))
        rows = parts[0]
        if len(parts) == 2:
            places = np.argsort(np.concatenate([reported, silent]), kind="stable")
            rows = pa.concat_batches(parts).take(pa.array(places))
        rows = self._with_counted_attempts(rows, tasks)
        records, which = np.unique(index.submission[tasks], return_inverse=True)
        headers = [state.submissions[at].header for at in records.tolist()]
        functions = pa.array([header.function for header in headers], pa.string())
        names = pa.array([header.submission_id for header in headers], pa.string())
        which = pa.array(which)
        added = [functions.take(which), names.take(which), self._requeues(tasks)]
        return pa.RecordBatch.from_arrays(
            [*added, self._consumers(tasks), *rows.columns],
            schema=PULLED_SCHEMA,
        )

    def batches(self, ordinals: list[int]) -> Iterator[pa.RecordBatch]:
        """Whole task batches, one by one, wherever their rows lie by now."""
        return (self.tasks(self._state.index.rows_of(at)) for at in ordinals)

    def tasks(self, tasks: Sequences) -> pa.RecordBatch:
        """Rows as they were submitted."""
        lsns, rows = self._state.index.locate(tasks)
        runs = _runs(lsns, rows)
        if len(runs) == 1:
            ((lsn, begin, end),) = runs
            batch = self._decoded(lsn)
            if lsn not in self._mapped:
                return batch.slice(begin, end - begin)
        lengths = self._state.index.prompt[tasks]
        while True:
            held = {lsn: self._memory(lsn) for lsn in {lsn for lsn, _, _ in runs}}
            try:
                return gathered([(held[lsn], begin, end) for lsn, begin, end in runs], lengths)
            except RowChanged as changed:
                lsn, _, _ = runs[changed.args[0]]
                self.forget_between(lsn, lsn)  # it is compared with its CRCs again

    def outcomes(self, tasks: Sequences) -> pa.RecordBatch:
        """Rows as they were reported."""
        index = self._state.index
        lsns = index.done_frames.view[index.done[tasks]]
        return self._gather(lsns, index.done_row[tasks].astype(np.int64))

    def holds(self, lsn: int) -> bool:
        """Whether that frame's batch is in memory."""
        return lsn in self._cache

    def forget_below(self, lsn: int) -> None:
        """Those frames are about to be recycled: let go of every view of them."""
        self.forget_between(0, lsn - 1)

    def forget_between(self, first_lsn: int, last_lsn: int) -> None:
        """The file under those frames is about to go: let go of every view of it."""
        for old in [at for at in self._cache if first_lsn <= at <= last_lsn]:
            self._cached_bytes -= self._cache.pop(old)[1]
            self._let_go(old)

    def _let_go(self, lsn: int) -> None:
        self._memories.pop(lsn, None)
        self._mapped.discard(lsn)

    def _with_counted_attempts(self, rows: pa.RecordBatch, tasks: Sequences) -> pa.RecordBatch:
        """`attempts` as the broker counted them: it alone sees all of them. The index counts a reported failure
        when the task is ready again, so that of one that never is again comes on top."""
        index = self._state.index
        last = (index.verdict[tasks] == Verdict.FAILED) & (index.done[tasks] >= 0)
        counted = (index.attempts[tasks] + last).astype(np.uint8)
        at = rows.schema.get_field_index("attempts")
        return rows.set_column(at, rows.schema.field(at), pa.array(counted))

    def _consumers(self, tasks: Sequences) -> pa.Array:
        """Names of the sessions that held these last; empty where nobody ever did."""
        sessions = list(self._state.sessions)
        found, which = np.unique(self._state.index.holder[tasks], return_inverse=True)
        names = ["" if at < 0 else sessions[at] for at in found.tolist()]
        return pa.array(names, pa.string()).take(pa.array(which))

    def _requeues(self, tasks: Sequences) -> pa.Array:
        counted = self._state.requeues
        if not counted:
            return pa.array(np.zeros(len(tasks), np.uint8))
        return pa.array([min(counted.get(task, 0), 255) for task in tasks.tolist()], pa.uint8())

    def _unreported(self, tasks: Sequences, schema: pa.Schema | None) -> pa.RecordBatch:
        """Tasks whose last attempt nobody reported: the broker itself says why they are dead."""
        index, count = self._state.index, len(tasks)
        source_rows, metadata = self._given(tasks)
        engines = [
            self._state.submissions[at].header.engine for at in index.submission[tasks].tolist()
        ]
        reasons = [self._state.reasons[task] for task in tasks.tolist()]
        columns: dict[str, Any] = {
            "task_id": self._state.task_ids(tasks),
            "source_row": source_rows,
            "status": ["failed"] * count,
            "finish_reason": ["error"] * count,
            "prompt_tokens": index.prompt[tasks].astype(np.uint32),
            "padded_tokens": np.zeros(count, np.uint32),
            "error_code": [code for code, _ in reasons],
            "error_text": [clip_error_text(text) for _, text in reasons],
            "attempts": index.attempts[tasks],
            "engine": engines,
            "engine_fingerprint": [""] * count,
            "t_start_us": np.zeros(count, np.int64),
            "t_end_us": np.zeros(count, np.int64),
            "metadata": metadata,
        }
        fields = [field for field in COMPLETION_SCHEMA]
        arrays = [
            pa.nulls(count, field.type)
            if field.name not in columns
            else columns[field.name]
            if isinstance(columns[field.name], pa.Array)
            else pa.array(columns[field.name], field.type)
            for field in fields
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema or pa.schema(fields))

    def _given(self, tasks: Sequences) -> tuple[pa.Array, pa.Array]:
        """What their producer gave along: source rows and metadata. Of those whose row cannot be read any more, the place
        in their submission and nothing."""
        gone = np.array([self._state.reasons[task][0] == ROW_LOST for task in tasks.tolist()])
        damaged = self.withheld.rows(tasks)
        gone = gone if damaged is None else gone | damaged
        if not gone.any():
            given = self.tasks(tasks)
            return given.column("source_row"), given.column("metadata")
        source_rows = np.zeros(len(tasks), np.int64)
        metadata = np.full(len(tasks), b"", object)
        source_rows[gone] = rows_in_submission(self._state, tasks[gone])
        if not gone.all():
            given = self.tasks(tasks[~gone])
            source_rows[~gone] = given.column("source_row").to_numpy()
            metadata[~gone] = given.column("metadata").to_pylist()
        return pa.array(source_rows), pa.array(metadata.tolist(), pa.binary())

    def keep(self, lsn: int, ipc: Part, batch: pa.RecordBatch | None = None) -> None:
        """A batch that was just journaled is in memory already. `batch`: what `ipc` decodes to, if that was done."""
        self._remember(lsn, read_ipc(whole(ipc)) if batch is None else batch, len(ipc))

    def _gather(self, lsns: Sequences, rows: Sequences) -> pa.RecordBatch:
        """Row rows[i] of frame lsns[i], in that order: runs of neighbours are sliced and put together. A mapped frame is
        compared with its CRCs each time: outcomes are read once, in large pieces."""
        for lsn in self._mapped.intersection(lsns.tolist()) if self._mapped else ():
            self.forget_between(lsn, lsn)
        parts = [self._decoded(lsn).slice(a, b - a) for lsn, a, b in _runs(lsns, rows)]
        return parts[0] if len(parts) == 1 else pa.concat_batches(parts)

    def _memory(self, lsn: int) -> TaskMemory:
        batch = self._decoded(lsn)
        found = self._memories.get(lsn)
        if found is None or found.batch is not batch:
            found = self._memories[lsn] = TaskMemory(batch, mapped=lsn in self._mapped)
        return found

    def _decoded(self, lsn: int) -> pa.RecordBatch:
        found = self._cache.get(lsn)
        if found is not None:
            self._cache.move_to_end(lsn)
            return found[0]
        try:
            frame, mapped = self._journal.view(lsn)
        except CorruptionFound as fault:
            raise told(fault, self._state, self._journal.first_lsn, lsn) from fault
        fact = decode(frame.kind, frame.payload, f"LSN {lsn}")
        assert isinstance(fact, WITH_ROWS), f"LSN {lsn} holds no batch"
        batch = read_ipc(whole(fact.ipc))
        size = VIEW_BYTES + ROW_BYTES * batch.num_rows if mapped else len(fact.ipc)
        self._remember(lsn, batch, size)
        if mapped:
            self._mapped.add(lsn)
            if isinstance(fact, Enqueued | Moved):
                self._memory(lsn)  # while it is what was just compared
        return batch

    def _remember(self, lsn: int, batch: pa.RecordBatch, size: int) -> None:
        self._cache[lsn] = (batch, size)
        self._cached_bytes += size
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            old, (_, dropped) = self._cache.popitem(last=False)
            self._let_go(old)
            self._cached_bytes -= dropped


def _runs(lsns: Sequences, rows: Sequences) -> list[tuple[int, int, int]]:
    """(lsn, first row, row after the last) of neighbours that lie side by side in one frame."""
    breaks = (lsns[1:] != lsns[:-1]) | (rows[1:] != rows[:-1] + 1)
    firsts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    lengths = np.diff(np.append(firsts, len(rows)))
    begins = rows[firsts]
    ends = begins + lengths
    return list(zip(lsns[firsts].tolist(), begins.tolist(), ends.tolist(), strict=True))
