"""Land one pulled batch of one function in one transaction; return the proof that it is durable.

Rows go straight into the table by binary COPY; where a task id is there already, the savepoint is rolled back and
they go through a temporary twin, insert-or-nothing by task id. Dead letters, ack row, commit. A replay therefore
changes nothing: what was decided of a task first, landed or dead, stays until it is requeued, and both sides are told
the same of it. A row that the database rejects, at once or by a deferred constraint, or that a trigger drops, becomes
a dead letter with reason and raw bytes while the rest lands. A commit whose answer was lost is settled by the
transaction's status and its rows, never by guessing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from fabric_pipelines.dataplane.account import multirange
from fabric_pipelines.dataplane.cost import Meter
from fabric_pipelines.dataplane.cpu_slices import BackendSlice, give_way
from fabric_pipelines.dataplane.database import (
    Connection,
    Database,
    Identity,
    read_identity,
    translated,
)
from fabric_pipelines.dataplane.decided import DecidedMeanwhile, among, require_alone
from fabric_pipelines.dataplane.encode import (
    STREAM_BYTES_MAX,
    Column,
    StreamTooLarge,
    encode_copy,
    row_bytes,
    stream_size,
    task_ids_of,
)
from fabric_pipelines.dataplane.lake import Lake
from fabric_pipelines.dataplane.refusals import note, require_accepted
from fabric_pipelines.dataplane.rejection import (
    dead_before,
    dropped,
    is_rejection,
    lacks_value,
    landing_into,
    rejection,
    row_at_fault,
)
from fabric_pipelines.dataplane.sinks import (
    DEAD_LETTERS,
    Decode,
    Landing,
    Rejection,
    Sink,
    dead_letter_columns,
    foresee,
    sink_of,
)
from fabric_pipelines.dataplane.spill import spill
from fabric_pipelines.dataplane.sql import compose, query, relation
from fabric_pipelines.dataplane.staleness import ring
from fabric_pipelines.dataplane.table_trouble import TableHeld, TableRefuses, table_refuses
from fabric_pipelines.errors import (
    DatabaseUnavailable,
    IncarnationMismatch,
    SchemaError,
    StorageFailed,
)
from fabric_pipelines.records.arrow import require_schema, to_ipc
from fabric_pipelines.records.completion import PULLED_SCHEMA
from fabric_pipelines.records.confirmation import Confirmation

ROWS_PER_LANDING = 5_000
"""1,000 to 5,000 rows are the flat part of the cost curve; more only adds latency and lock time."""

PIECE_BYTES = 64 << 20
"""Of Arrow data in one COPY stream, and one row more. Text may take 32 bytes a token, eight times its id, which stays
below the bound of a stream."""
RAW_BYTES_MAX = STREAM_BYTES_MAX // 2
"""A dead letter's raw bytes; of a larger row the payload is left out, so that its letter lands."""
PAYLOAD = ("output", "vector")
EVERY_ROUND = (1 << 15) - 1
DECIDED_TRIES = 5
"""Of one landing, while others that have the same tasks in hand decide of them first."""

TaskIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Landed:
    """task_ids landed (now or before) and are proven by `confirmation`; dead_task_ids are dead letters,
    proven by `dead_confirmation`. `rows` counts what this transaction inserted, `size` the bytes sent;
    wal_bytes: what the server says it wrote for it, None where it does not; commit_ms: how long COMMIT took."""

    task_ids: TaskIds
    confirmation: Confirmation | None
    dead_task_ids: TaskIds
    dead_requeues: npt.NDArray[np.uint8]
    dead_confirmation: Confirmation | None
    rows: int
    size: int
    wal_bytes: int | None = None
    commit_ms: float | None = None


class CommitInDoubt(DatabaseUnavailable):
    """The connection was lost while COMMIT was on its way; `xid` tells what became of it."""

    def __init__(self, message: str, xid: str, cluster_id: str, landed: Landed) -> None:
        super().__init__(message)
        self.xid = xid
        self.cluster_id = cluster_id
        self.landed = landed


class CommitRefused(StorageFailed):
    """COMMIT itself failed for what some row holds, with nothing landed. Halves of the batch, each a landing of its own,
    tell which row; one that stands alone becomes a dead letter."""


class Writer:
    """Lands batches over one connection, which it opens when needed and drops after a fault."""

    def __init__(
        self,
        database: Database,
        *,
        decode: Decode | None = None,
        lake: Lake | None = None,
        elastic: bool = False,
    ) -> None:
        """decode: makes text of tokens. lake: takes vectors that no column holds; without one they die.
        elastic: the thread that lands, for good, and its backend give way for the CPU."""
        self._database = database
        self._decode = decode
        self._lake = lake
        self._elastic = elastic
        self._slice = BackendSlice()
        self._connection: Connection | None = None
        self._meter: Meter | None = None
        self._identity: Identity | None = None
        self._doubt: CommitInDoubt | None = None

    def land(self, batch: pa.RecordBatch) -> Landed:
        """See `land`. After a CommitInDoubt, the same batch handed in again is settled first."""
        if self._elastic:
            give_way()
        connection, identity = self._open()
        try:
            settled = self._settle(connection, batch, identity)
            if settled is not None:
                return settled
            if self._lake is not None and identity.vector_type == "halfvec":
                batch = spill(batch, self._lake, self._database)
            landed = land(
                connection,
                batch,
                identity=identity,
                decode=self._decode,
                meter=self._meter,
                backend=self._slice,
            )
        except CommitInDoubt as fault:
            self._doubt = fault
            self.close()
            raise
        except BaseException as fault:
            if isinstance(fault, TableRefuses):
                note(connection, fault)
            self.close()
            raise
        if landed.rows:
            self._ring(connection, sink_of(_function(batch)).table)
        return landed

    def _ring(self, connection: Connection, table: str) -> None:
        """Tell who waits for moved rows, after the commit and in a transaction of its own: NOTIFY holds a
        database-wide lock while its transaction commits. A lost ring costs its listener one poll interval;
        what landed has landed."""
        try:
            ring(connection, table)
        except psycopg.Error:
            self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = self._meter = None
            self._slice = BackendSlice()

    def _open(self) -> tuple[Connection, Identity]:
        """Raises IncarnationMismatch when another database answers at the URL than at first."""
        if (
            self._connection is not None and self._connection.broken
        ):  # found out after the last commit
            self.close()
        if self._connection is None:
            self._connection = self._database.connect()
            try:
                self._meet(self._connection)
            except BaseException:
                self.close()
                raise
        assert self._identity is not None
        return self._connection, self._identity

    def _meet(self, connection: Connection) -> None:
        with translated(self._database.url):
            connection.execute(query("durable_commits"))
            connection.execute(query("bounded_waits"))
            identity = read_identity(connection)
        known = self._identity
        if known is not None and known.database_id != identity.database_id:
            raise IncarnationMismatch(
                f"database {identity.database_id} answers where {known.database_id} was before: "
                "point FABRIC_PG_URL to the former one, or restart completion"
            )
        if self._elastic:
            self._slice = BackendSlice.of(connection)
        self._identity = identity
        self._meter = Meter(connection)

    def _settle(
        self, connection: Connection, batch: pa.RecordBatch, identity: Identity
    ) -> Landed | None:
        doubt, self._doubt = self._doubt, None
        if doubt is None:
            return None
        ids = np.sort(np.concatenate([doubt.landed.task_ids, doubt.landed.dead_task_ids]))
        if not np.array_equal(ids, np.sort(_ids(batch))) or identity.cluster_id != doubt.cluster_id:
            return None
        with translated(self._database.url):
            if transaction_status(connection, doubt.xid) != "committed":
                return None
            # A server that crashed before the id was in its log gives it to another transaction, whose end says
            # nothing of ours: only the rows themselves do, and landing them once more changes none.
            return doubt.landed if are_there(connection, doubt.landed) else None


def land(
    connection: Connection,
    batch: pa.RecordBatch,
    *,
    identity: Identity,
    decode: Decode | None = None,
    meter: Meter | None = None,
    backend: BackendSlice = BackendSlice(),  # noqa: B008 frozen
    refused: Mapping[int, Rejection] | None = None,
) -> Landed:
    """Land `batch` (PULLED_SCHEMA, one function). Rows whose status is not ok become dead letters, and so do those at
    the positions of `refused`. `meter`: the one of this connection; without one no costs are known. `backend`: is
    hurried while it commits.

    Raises SchemaError for a wrong batch, CommitInDoubt when the answer to COMMIT was lost, CommitRefused when a row
    among several made it fail, else what the database's fault translates to; then nothing of the batch is in the
    database.
    """
    require_schema(batch, PULLED_SCHEMA, "pulled batch")
    functions = batch.column("function").unique().to_pylist()
    if len(functions) != 1:
        raise SchemaError(f"a landing takes one function, this batch has {functions}")
    sink, landing = sink_of(functions[0]), Landing(identity.vector_type, decode)
    meter = meter or Meter(connection)
    with landing_into(sink.table, f"database {identity.database}", connection):
        landed = _filled(connection, sink, batch, landing, identity, meter, refused or {})
        began = time.perf_counter()
        try:
            with backend.hurried():
                _commit(connection, landed, identity)
        except psycopg.Error as fault:
            if connection.broken or refused or not is_rejection(fault, at_commit=True):
                raise
            if batch.num_rows > 1:
                raise CommitRefused(
                    f"database {identity.database} refused to commit {batch.num_rows} rows of {sink.table} "
                    f"({fault.sqlstate}: {fault.diag.message_primary}): land them in halves, a row alone is buried"
                ) from fault
            alone = {0: rejection(fault, 0)}
            return land(
                connection,
                batch,
                identity=identity,
                decode=decode,
                meter=meter,
                backend=backend,
                refused=alone,
            )
        commit_ms = (time.perf_counter() - began) * 1e3
    return replace(landed, wal_bytes=meter.seal(), commit_ms=commit_ms)


def transaction_status(connection: Connection, xid: str) -> str | None:
    """ "committed", "aborted", "in progress", or None when the server no longer remembers."""
    row = connection.execute(query("xact_status"), {"xid": xid}).fetchone()
    return None if row is None else row[0]


def are_there(connection: Connection, landed: Landed) -> bool:
    """Whether every row of `landed`, and every dead letter, can be seen."""
    for ids, proof in (
        (landed.task_ids, landed.confirmation),
        (landed.dead_task_ids, landed.dead_confirmation),
    ):
        if proof is None or not len(ids):
            continue
        wanted = np.unique(ids).tolist()
        statement = sql.SQL("select count(distinct task_id) from {} where task_id = any(%s)")
        table = relation(str(proof.proof["table"]))
        if connection.execute(statement.format(table), [wanted]).fetchone() != (len(wanted),):
            return False
    return True


def _commit(connection: Connection, landed: Landed, identity: Identity) -> None:
    try:
        connection.execute("commit")
    except psycopg.OperationalError as fault:
        if not connection.broken:
            raise
        proof = landed.confirmation or landed.dead_confirmation
        assert proof is not None
        raise CommitInDoubt(
            f"the connection to database {identity.database!r} was lost during COMMIT; "
            "the batch is kept and settled by its transaction id",
            str(proof.proof["xid"]),
            identity.cluster_id,
            landed,
        ) from fault


def _filled(
    connection: Connection,
    sink: Sink,
    batch: pa.RecordBatch,
    landing: Landing,
    identity: Identity,
    meter: Meter,
    given: Mapping[int, Rejection],
) -> Landed:
    """A transaction that wants nothing but its commit."""
    for _ in range(DECIDED_TRIES):
        connection.execute("begin isolation level read committed")
        try:
            meter.open()
            return _fill(connection, sink, batch, landing, identity, meter, given)
        except BaseException as fault:
            if not connection.broken:
                connection.execute("rollback")
            if not isinstance(fault, DecidedMeanwhile):
                raise
            stays = np.flatnonzero(np.isin(_ids(batch), fault.buried)).tolist()
            given = {**{at: dead_before(at) for at in stays}, **given}
    raise TableHeld(
        f"database {identity.database}: another completion lands the same tasks of {sink.table} at this moment; this "
        "one tries again"
    )


def _fill(
    connection: Connection,
    sink: Sink,
    batch: pa.RecordBatch,
    landing: Landing,
    identity: Identity,
    meter: Meter,
    given: Mapping[int, Rejection],
) -> Landed:
    """Everything of the transaction but its begin and commit."""
    row = connection.execute(query("current_xid")).fetchone()
    assert row is not None
    ok = pc.equal(batch.column("status"), "ok").to_numpy(zero_copy_only=False)
    good, bad = np.flatnonzero(ok), np.flatnonzero(~ok)
    refused = dict(given) | dict(_reported(batch, bad))
    foreseen = foresee(_chosen(batch, good), sink, landing)
    refused |= {int(good[at]): item for at, item in foreseen.items()}
    rows, size = 0, 0
    ids, target = _ids(batch), _Target(connection, sink.table, meter)
    rows_left = np.setdiff1d(good, np.fromiter(refused, np.int64, len(refused)))
    pending, asked, final = _pieces(batch, rows_left), False, False

    def not_there() -> npt.NDArray[np.int64]:
        """Of a row that is in the table already, the table would say just that."""
        return rows_left[
            ~among(connection, compose("in_table", table=relation(sink.table)), ids[rows_left])
        ]

    while pending:
        chosen = pending.pop()
        if not chosen.size:
            continue
        try:
            put = target.put(sink.encode(_chosen(batch, chosen), landing))
        except StreamTooLarge as fault:
            if chosen.size == 1:
                refused[int(chosen[0])] = Rejection(int(chosen[0]), "54000", str(fault))
            else:
                pending += np.array_split(chosen, 2)
            continue
        except psycopg.Error as fault:
            if not is_rejection(fault):
                raise
            if lacks_value(fault, sink.names) and not target.has_triggers():
                raise
            if not asked:
                new = not_there()

                def attempt(at: int, new: npt.NDArray[np.int64] = new) -> psycopg.Error | None:
                    return target.attempt(sink.encode(_chosen(batch, new[at : at + 1]), landing))

                if table_refuses(connection, sink.table, sink.names, fault, new.size, attempt):
                    function, where = _function(batch), f"database {identity.database}"
                    require_accepted(connection, function, sink.table, where, fault)
                    final = True
            asked = True
            if final and chosen.size > 1:  # each is refused, and alone it sends no other along
                pending += np.array_split(chosen, chosen.size)
                continue
            at = row_at_fault(fault, chosen.size)
            if at is None:
                pending += np.array_split(
                    chosen, 2
                )  # no line is named: halve until one row is left
                continue
            refused[int(chosen[at])] = rejection(fault, int(chosen[at]))
            pending.append(np.delete(chosen, at))
            continue
        for at in chosen[np.isin(ids[chosen], put.dropped)].tolist():
            refused[at] = dropped(at)
        rows, size = rows + put.inserted, size + put.size
    return _settled(connection, sink, batch, refused, rows, size, str(row[0]), identity, meter)


def _settled(
    connection: Connection,
    sink: Sink,
    batch: pa.RecordBatch,
    refused: dict[int, Rejection],
    rows: int,
    size: int,
    xid: str,
    identity: Identity,
    meter: Meter,
) -> Landed:
    """Dead letters and ack row of this transaction, and what it will have proven once committed."""
    ids, requeues = _ids(batch), batch.column("requeues").to_numpy().astype(np.int64)
    dead = np.array(sorted(refused), np.int64)
    there = among(connection, compose("in_table", table=relation(sink.table)), ids[dead])
    standing, dead = dead[there], dead[~there]  # landed before: nothing buries them any more
    if dead.size:
        rejections = [refused[int(at)] for at in dead]
        size += _bury(connection, sink, _chosen(batch, dead), rejections, meter)
    rounds = requeues.copy()
    rounds[standing] = EVERY_ROUND
    risen = np.setdiff1d(np.flatnonzero(rounds), dead)
    if risen.size:
        values = {"task_ids": ids[risen].tolist(), "requeues": rounds[risen].tolist()}
        connection.execute(query("unbury"), values)
    connection.execute(
        query("acknowledge"),
        {
            "function": _function(batch),
            "first_task": int(ids.min()),
            "last_task": int(ids.max()),
            "rows": len(ids),
            "inserted": rows,
            "dead": int(dead.size),
            "size": size,
            "ids": multirange(ids),
        },
    )
    alive = np.delete(ids, dead)
    require_alone(connection, sink.table, alive, ids[dead])

    def proof(kind: str, table: str) -> Confirmation:
        return Confirmation(kind, {"cluster": identity.cluster_id, "xid": xid, "table": table})

    return Landed(
        task_ids=alive,
        confirmation=proof("postgres", sink.table) if alive.size else None,
        dead_task_ids=ids[dead],
        dead_requeues=requeues[dead].astype(np.uint8),
        dead_confirmation=proof("dead_letter", DEAD_LETTERS) if dead.size else None,
        rows=rows,
        size=size,
    )


@dataclass(frozen=True, slots=True)
class _Put:
    """What became of rows that raised nothing. `inserted`: those new in the table; `dropped`: task ids that are not in it."""

    inserted: int
    size: int
    dropped: TaskIds


class _Target:
    """Rows into one table. Straight by COPY, or by COPY into a temporary twin and from there what is new; the twin
    lives as long as the connection and is empty outside a transaction.

    Deferred constraints are looked at before the savepoint ends, while the rows can still be told apart. What COPY or the
    merge count is compared with what was sent, and where the owner's triggers saw the rows, or some are fewer, the
    table is asked for each id: a trigger drops, moves or renames a row without a word.
    """

    def __init__(
        self,
        connection: Connection,
        table: str,
        meter: Meter,
        *,
        merge: str = "merge_stage",
        results: str | None = None,
    ) -> None:
        """merge: the statement that takes new rows out of the twin; `results`: the table it compares them with, where
        a row may be instead."""
        self._connection = connection
        self._merge, self._results = merge, results
        self._table = table
        self._meter = meter
        self._stage = "stage_" + table.partition(".")[2]
        self._looked = False

    def put(self, columns: Sequence[Column]) -> _Put:
        """After a rejection the transaction is as it was before. Raises StreamTooLarge with nothing sent."""
        stream = encode_copy(columns)
        names, ids = _names(columns), task_ids_of(columns)
        if self._meter.goes_straight(self._table):
            try:
                self._defer()
                with self._connection.transaction():
                    counted = self._copy(relation(self._table), names, stream)
                    self._look()
                absent = self._absent(ids, counted)
                return _Put(min(counted, len(ids) - len(absent)), stream_size(stream), absent)
            except psycopg.errors.UniqueViolation:
                pass  # a task id is there already, or somebody's own index objects: the twin tells which
        return self.through_stage(columns, stream)

    def attempt(self, columns: Sequence[Column]) -> psycopg.Error | None:
        """What the table says to rows that it does not keep; None where it takes them, or where no stream does."""
        try:
            stream = encode_copy(columns)
            with self._connection.transaction(force_rollback=True):
                self._defer()
                self._copy(relation(self._table), _names(columns), stream)
                self._look()
        except StreamTooLarge:
            return None
        except psycopg.Error as fault:
            if not is_rejection(fault):
                raise
            return fault
        return None

    def through_stage(self, columns: Sequence[Column], stream: Sequence[memoryview]) -> _Put:
        names, ids = _names(columns), task_ids_of(columns)
        self._connection.execute(
            compose("make_stage", table=relation(self._table), stage=sql.Identifier(self._stage))
        )
        stage = sql.Identifier("pg_temp", self._stage)
        parts = {"table": relation(self._table), "stage": stage, "columns": names}
        if self._results is not None:
            parts = {"results": relation(self._results), "stage": stage, "columns": names}
        self._defer()
        with self._connection.transaction():
            self._copy(stage, names, stream)
            counted = self._meter.merge(compose(self._merge, **parts))
            self._connection.execute(compose("empty_stage", stage=stage))
            self._look()
        absent = self._absent(ids, counted)
        # what EXPLAIN counts as inserted holds what a trigger dropped; an INSERT's own count does not
        tried = counted + len(absent) if self._meter.counts else counted
        self._meter.staged(self._table, conflicts=len(ids) - tried)
        return _Put(max(tried - len(absent), 0), stream_size(stream), absent)

    def _defer(self) -> None:
        """What an earlier look left behind would hold within one statement of an owner's trigger, too, which may
        only be whole at its end."""
        if self._looked:
            self._connection.execute(query("defer_constraints"))

    def _look(self) -> None:
        self._looked = True
        self._connection.execute(query("look_at_constraints"))

    def _absent(self, ids: TaskIds, counted: int) -> TaskIds:
        """Which of `ids` are in no table where they may be."""
        if counted == len(ids) and not self.has_triggers():
            return ids[:0]
        for table in (self._table, self._results):
            if table is not None and len(ids):
                statement = compose("not_in_table", table=relation(table))
                found = self._connection.execute(statement, {"task_ids": ids.tolist()}).fetchall()
                ids = np.array([row[0] for row in found], np.int64)
        return ids

    def has_triggers(self) -> bool:
        """Whether triggers of the owner see what is inserted."""
        row = self._connection.execute(query("owners_triggers"), {"table": self._table}).fetchone()
        assert row is not None
        return bool(row[0])

    def _copy(
        self, target: sql.Composable, names: sql.Composable, stream: Sequence[memoryview]
    ) -> int:
        """Rows that the server counted. `stream` is owned by nobody else: a writer of psycopg may keep a piece after
        write() returned."""
        with self._connection.cursor() as cursor:
            with cursor.copy(compose("copy_rows", target=target, columns=names)) as copy:
                for piece in stream:
                    copy.write(piece)
            return cursor.rowcount


def _names(columns: Sequence[Column]) -> sql.Composable:
    return sql.SQL(", ").join(sql.Identifier(column.name) for column in columns)


def _bury(
    connection: Connection,
    sink: Sink,
    batch: pa.RecordBatch,
    rejections: list[Rejection],
    meter: Meter,
) -> int:
    """Bytes sent. Raises StorageFailed where a letter is not kept: a task without one would be gone."""
    target = _Target(connection, DEAD_LETTERS, meter, merge="bury_stage", results=sink.table)
    size = 0
    for piece in _pieces(batch, np.arange(batch.num_rows)):
        raw = [_raw(batch.slice(at, 1)) for at in piece.tolist()]
        reasons = [rejections[at] for at in piece.tolist()]
        columns = dead_letter_columns(_chosen(batch, piece), reasons, raw)
        put = target.through_stage(columns, encode_copy(columns))
        if len(put.dropped):
            raise StorageFailed(
                f"{DEAD_LETTERS} kept no letter of {len(put.dropped)} tasks, task {put.dropped[0]} among them: a trigger "
                "or rule of its owner dropped it; take that away and start completion again"
            )
        size += put.size
    return size


def _raw(row: pa.RecordBatch) -> bytes:
    """One row as IPC; without its payload where that is more than a column of bytes takes."""
    if row.nbytes > RAW_BYTES_MAX:
        columns = [
            pa.nulls(1, field.type) if field.name in PAYLOAD else row.column(field.name)
            for field in row.schema
        ]
        row = pa.RecordBatch.from_arrays(columns, schema=row.schema)
    return to_ipc(row)


def _pieces(batch: pa.RecordBatch, rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """`rows`, by ascending position, in runs of PIECE_BYTES and at most one row more."""
    if batch.nbytes <= PIECE_BYTES:
        return [rows]
    ends = np.cumsum(row_bytes(batch)[rows])
    return np.split(rows, np.flatnonzero(np.diff(ends // PIECE_BYTES)) + 1)


def _reported(batch: pa.RecordBatch, rows: npt.NDArray[np.intp]) -> list[tuple[int, Rejection]]:
    """Rows that the worker itself reported as refused or failed."""
    codes = batch.column("error_code").to_pylist() if rows.size else []
    texts = batch.column("error_text").to_pylist() if rows.size else []
    status = batch.column("status").to_pylist() if rows.size else []
    return [
        (
            row,
            Rejection(row, codes[row] or status[row], texts[row] or f"the task was {status[row]}"),
        )
        for row in rows.tolist()
    ]


def _chosen(batch: pa.RecordBatch, rows: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """Rows by ascending position. A run without gaps, which is nearly every batch, is a slice: `take` costs
    2 us a row of 384 halves, more than encoding it."""
    if rows.size and int(rows[-1]) - int(rows[0]) + 1 == rows.size:
        return batch.slice(int(rows[0]), rows.size)
    return batch.take(pa.array(rows))


def _function(batch: pa.RecordBatch) -> str:
    return str(batch.column("function")[0].as_py())


def _ids(batch: pa.RecordBatch) -> TaskIds:
    ids: TaskIds = batch.column("task_id").to_numpy()
    return ids
