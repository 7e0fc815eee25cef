"""Landed results handed over: as Arrow, as Parquet, as counts, and as the ids that are nowhere.

Reads what has landed so far, in task order and in bounded batches. A function is read from its own table, one
without a sink from the generic table. Nothing here writes to the database.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from psycopg import sql

from fabric_pipelines import named_file
from fabric_pipelines.dataplane.database import Connection, Database
from fabric_pipelines.dataplane.sinks import GENERIC, SINKS, Sink, sink_of
from fabric_pipelines.dataplane.sql import compose, query, relation
from fabric_pipelines.errors import StorageFailed, UsageError

ROWS_PER_BATCH = 10_000
IDS_PER_PAGE = 50_000

_ARROW = {
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "text": pa.string(),
    "bytea": pa.binary(),
    "timestamptz": pa.timestamp("us", "UTC"),
}
_TOKENS = pa.list_(pa.uint32())
_VECTOR = pa.list_(pa.float16())


@dataclass(frozen=True, slots=True)
class _Field:
    """One column to read: how SQL selects it and what becomes of its values."""

    name: str
    select: sql.Composable
    arrow: pa.DataType
    packed: np.dtype[Any] | None = None
    prefix: int = 0

    def build(self, values: Sequence[Any]) -> pa.Array:
        if self.packed is None:
            return pa.array(values, self.arrow)
        return _unpack(values, self.packed, self.prefix, self.arrow)


def read(
    database: Database, *, function: str | None = None, submission_id: str | None = None
) -> pa.Table:
    """All landed rows of a function, of a submission, or of both. Tokens come as list<uint32>, vectors as
    list<halffloat>. Raises UsageError when neither is given, or when a
    submission or a function without a table of its own has no rows anywhere."""
    schema, batches = scan(database, function=function, submission_id=submission_id)
    return pa.Table.from_batches(batches, schema)


def scan(
    database: Database, *, function: str | None = None, submission_id: str | None = None
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """As `read`, in batches of at most ROWS_PER_BATCH rows, from one snapshot."""
    if function is None and submission_id is None:
        raise UsageError("say whose results: a function, a submission id, or both")
    if function:
        sink = _sink_of_function(database, function)
    else:
        sink = _sink_of_submission(database, str(submission_id))
    fields = _fields(sink, database.vector_type)
    schema = pa.schema([pa.field(field.name, field.arrow) for field in fields])
    condition = _condition(sink, function, submission_id)
    return schema, _batches(database, sink, fields, schema, condition)


def to_parquet(
    database: Database,
    path: Path,
    *,
    function: str | None = None,
    submission_id: str | None = None,
) -> int:
    """Write the rows to `path` (whole or not at all); returns how many. UsageError when `path` is there."""
    schema, batches = scan(database, function=function, submission_id=submission_id)
    rows = 0
    with named_file.beside(path) as beside:
        try:
            with pq.ParquetWriter(beside, schema, compression="zstd") as writer:
                for batch in batches:
                    writer.write_batch(batch)
                    rows += batch.num_rows
        except OSError as fault:
            raise StorageFailed(f"{path} cannot be written: {fault}") from fault
    return rows


def dead_letters(
    database: Database,
    *,
    function: str | None = None,
    submission_id: str | None = None,
    error_code: str | None = None,
    limit: int | None = None,
) -> pa.Table:
    """Dead letters with their reasons, without the raw rows, by task id; at most `limit`."""
    values: dict[str, Any] = {"function": function, "submission_id": submission_id}
    values |= {"error_code": error_code, "limit": limit}
    with database.session() as connection, connection.cursor() as cursor:
        cursor.execute(query("read_dead_letters"), values)
        assert cursor.description is not None
        names = [column.name for column in cursor.description]
        rows = cursor.fetchall()
    kinds = {"task_id": pa.int64(), "source_row": pa.int64(), "attempts": pa.int16()}
    kinds |= {"requeues": pa.int16()}
    kinds |= {"prompt_tokens": pa.int32(), "landed_at": _ARROW["timestamptz"]}
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    arrays = [
        pa.array(column, kinds.get(name, pa.string()))
        for name, column in zip(names, columns, strict=True)
    ]
    return pa.table(arrays, names)


def dead_letter_ids(
    database: Database, error_code: str, *, function: str | None = None
) -> Iterator[npt.NDArray[np.int64]]:
    """Ids of the dead letters of one reason, ascending, in pages of at most IDS_PER_PAGE."""
    after = -1
    while True:
        values = {"function": function, "error_code": error_code, "after": after}
        with database.session() as connection:
            rows = connection.execute(
                query("dead_letter_ids"), {**values, "limit": IDS_PER_PAGE}
            ).fetchall()
        if not rows:
            return
        ids = np.array([row[0] for row in rows], np.int64)
        yield ids
        after = int(ids[-1])


def dead_letter_reasons(database: Database, *, function: str | None = None) -> dict[str, int]:
    """Dead letters by error code, most frequent first."""
    with database.session() as connection:
        return dict(
            connection.execute(query("count_dead_letters"), {"function": function}).fetchall()
        )


def counts(database: Database) -> dict[str, int]:
    """Rows by table."""
    with database.session() as connection:
        return dict(connection.execute(query("count_results")).fetchall())


def unaccounted(database: Database, task_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Those of `task_ids` that neither landed nor died, ascending."""
    with database.session() as connection:
        rows = connection.execute(query("unaccounted"), {"task_ids": task_ids.tolist()}).fetchall()
    return np.array([row[0] for row in rows], np.int64)


def _sink_of_function(database: Database, function: str) -> Sink:
    """A misspelt function is no empty result."""
    sink = sink_of(function)
    if sink is GENERIC:
        with database.session() as connection:
            row = connection.execute(query("has_function"), {"function": function}).fetchone()
        if not (row and row[0]):
            raise UsageError(
                f"function {function!r} has no landed rows; {', '.join(sorted(SINKS))} have tables of their own, "
                "and `fabric status` shows where tasks are"
            )
    return sink


def _sink_of_submission(database: Database, submission_id: str) -> Sink:
    with database.session() as connection:
        for sink in (*SINKS.values(), GENERIC):
            statement = compose("has_submission", table=relation(sink.table))
            row = connection.execute(statement, {"submission_id": submission_id}).fetchone()
            if row and row[0]:
                return sink
    raise UsageError(
        f"submission {submission_id[:12]} has no landed rows; `fabric status` shows where its tasks are"
    )


def _condition(sink: Sink, function: str | None, submission_id: str | None) -> sql.Composable:
    parts: list[sql.Composable] = [sql.SQL("true")]
    if sink is GENERIC and function is not None:
        parts.append(sql.SQL("function = {}").format(sql.Literal(function)))
    if submission_id is not None:
        parts.append(sql.SQL("submission_id = {}").format(sql.Literal(submission_id)))
    return sql.SQL(" and ").join(parts)


def _fields(sink: Sink, vector_type: str) -> list[_Field]:
    fields = []
    for column in sink.columns:
        name = sql.Identifier(column.name)
        if column.name == "output":
            fields.append(_Field("output", name, _TOKENS, np.dtype("<u4")))
        elif column.kind == "vector" and vector_type == "halfvec":
            sent = sql.SQL("halfvec_send({})").format(name)
            fields.append(_Field("vector", sent, _VECTOR, np.dtype(">f2"), prefix=4))
        elif column.name == "vector":
            fields.append(_Field("vector", name, _VECTOR, np.dtype("<f2")))
        else:
            fields.append(_Field(column.name, name, _ARROW[column.kind]))
    return [*fields, _Field("landed_at", sql.Identifier("landed_at"), _ARROW["timestamptz"])]


def _batches(
    database: Database,
    sink: Sink,
    fields: list[_Field],
    schema: pa.Schema,
    condition: sql.Composable,
) -> Iterator[pa.RecordBatch]:
    statement = compose(
        "read_results",
        columns=sql.SQL(", ").join(field.select for field in fields),
        table=relation(sink.table),
        filter=condition,
    )
    with database.session() as connection, connection.transaction():
        for rows in _fetched(connection, statement):
            columns = zip(*rows, strict=True)
            arrays = [field.build(values) for field, values in zip(fields, columns, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _fetched(connection: Connection, statement: sql.Composed) -> Iterator[list[tuple[Any, ...]]]:
    with connection.cursor("results", binary=True) as cursor:
        cursor.execute(statement)
        while rows := cursor.fetchmany(ROWS_PER_BATCH):
            yield rows


def _unpack(
    values: Sequence[bytes | None], element: np.dtype[Any], prefix: int, arrow: pa.DataType
) -> pa.Array:
    """Lists out of packed bytes; the inverse of encode.packed and of halfvec's wire form."""
    bodies = [b"" if value is None else value[prefix:] for value in values]
    offsets = np.zeros(len(bodies) + 1, np.int32)
    np.cumsum([len(body) // element.itemsize for body in bodies], out=offsets[1:])
    elements = np.frombuffer(b"".join(bodies), element).astype(element.newbyteorder("="))
    missing = np.array([value is None for value in values])
    return pa.ListArray.from_arrays(
        pa.array(offsets),
        pa.array(elements, arrow.value_type),
        mask=pa.array(missing) if missing.any() else None,
    )
