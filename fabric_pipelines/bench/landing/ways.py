"""Ways to land one pulled batch in a table of the fabric, each exactly once by task id and committed.

Ours is the writer that completion runs, its dead-letter check, ack row and cost measurement included. The others get the
same Arrow batch and the same table, with token lists packed for them, and do what their documentation shows: into a
temporary table and from there what is new. Where a driver cannot write halfvec, it sends float4 lists (or text) and
the merge casts. Uses what is installed, installs nothing.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any, Protocol

import psycopg
import pyarrow as pa

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.encode import Column
from fabric_pipelines.dataplane.sinks import Landing, Sink, sink_of
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import MissingDependency

_ARROW = {
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "text": pa.string(),
    "bytea": pa.binary(),
    "vector": pa.list_(pa.float32()),
}
_STAGED = {"vector": "real[]"}


class Way(Protocol):
    """name: in the table; slow: gets fewer rows; pid: of the backend that works for it."""

    name: str
    slow: bool

    @property
    def pid(self) -> int: ...
    def land(self, batch: pa.RecordBatch) -> int | None:
        """Bytes of the COPY stream, None where the way has none."""

    def close(self) -> None: ...


class OurWay:
    name = "fabric, straight"
    slow = False

    def __init__(self, url: str) -> None:
        self._writer = Writer(Database(url))
        self._connection, _ = self._writer._open()

    @property
    def pid(self) -> int:
        return self._connection.info.backend_pid

    def land(self, batch: pa.RecordBatch) -> int | None:
        landed = self._writer.land(batch)
        assert landed.rows == batch.num_rows
        return landed.size

    def close(self) -> None:
        self._writer.close()


class OurStagedWay(OurWay):
    """The way of a replay: what our writer does while task ids come a second time."""

    name = "fabric, through the stage"

    def land(self, batch: pa.RecordBatch) -> int | None:
        table = sink_of(batch.column("function")[0].as_py()).table
        assert self._writer._meter is not None
        self._writer._meter.staged(table, conflicts=1)
        return super().land(batch)


class _Staged:
    """What the other ways share: a temporary table and the merge out of it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._made: set[str] = set()

    def _stage(self, sink: Sink, kinds: dict[str, str]) -> str:
        columns = ", ".join(f"{c.name} {kinds.get(c.kind, c.kind)}" for c in sink.columns)
        return f"create temporary table stage_{_plain(sink)} ({columns}) on commit delete rows"

    def _merge(self, sink: Sink) -> str:
        names = ", ".join(column.name for column in sink.columns)
        chosen = ", ".join(
            f"{column.name}::halfvec" if column.kind == "vector" else column.name
            for column in sink.columns
        )
        return (
            f"insert into {sink.table} ({names}) select {chosen} from stage_{_plain(sink)} "
            "on conflict (task_id) do nothing"
        )


class _Psycopg(_Staged, ABC):
    kinds: dict[str, str] = _STAGED

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._connection = psycopg.connect(url)

    @property
    def pid(self) -> int:
        return self._connection.info.backend_pid

    def close(self) -> None:
        self._connection.close()

    def land(self, batch: pa.RecordBatch) -> int | None:
        sink = sink_of(batch.column("function")[0].as_py())
        if sink.table not in self._made:
            self._connection.execute(self._stage(sink, self.kinds).encode())
            self._connection.commit()
            self._made.add(sink.table)
        with self._connection.cursor() as cursor:
            sent = self._send(cursor, sink, batch)
            cursor.execute(self._merge(sink).encode())
            assert cursor.rowcount in (batch.num_rows, 0)
        self._connection.commit()
        return sent

    @abstractmethod
    def _send(self, cursor: psycopg.Cursor, sink: Sink, batch: pa.RecordBatch) -> int | None:
        """Bring the rows to the stage; bytes of the COPY stream, if there is one."""


class ExecuteMany(_Psycopg):
    name = "psycopg executemany"
    slow = True

    def _merge(self, sink: Sink) -> str:
        return "select 0 limit 0"  # its rows are in the table already

    def _send(self, cursor: psycopg.Cursor, sink: Sink, batch: pa.RecordBatch) -> None:
        names = ", ".join(column.name for column in sink.columns)
        marks = ", ".join(
            "%s::real[]::halfvec" if column.kind == "vector" else "%s" for column in sink.columns
        )
        cursor.executemany(
            f"insert into {sink.table} ({names}) values ({marks}) on conflict (task_id) do nothing".encode(),
            _python_rows(sink, batch),
        )


class WriteRow(_Psycopg):
    name = "psycopg COPY BINARY, write_row"
    slow = True

    def _send(self, cursor: psycopg.Cursor, sink: Sink, batch: pa.RecordBatch) -> None:
        statement = f"copy stage_{_plain(sink)} from stdin (format binary)".encode()
        with cursor.copy(statement) as copy:
            copy.set_types([_STAGED.get(column.kind, column.kind) for column in sink.columns])
            for row in _python_rows(sink, batch):
                copy.write_row(row)


class Pgpq(_Psycopg):
    name = "pgpq"
    slow = False

    def __init__(self, url: str) -> None:
        self._pgpq = _installed("pgpq", "pgpq", self.name)
        super().__init__(url)

    def _send(self, cursor: psycopg.Cursor, sink: Sink, batch: pa.RecordBatch) -> int:
        rows = _plain_columns(sink, batch)
        encoder = self._pgpq.ArrowToPostgresBinaryEncoder(rows.schema)
        sent = 0
        statement = f"copy stage_{_plain(sink)} from stdin (format binary)".encode()
        with cursor.copy(statement) as copy:
            for piece in (encoder.write_header(), encoder.write_batch(rows), encoder.finish()):
                copy.write(piece)
                sent += len(piece)
        return sent


class AdbcIngest(_Staged):
    name = "adbc_ingest"
    slow = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        dbapi = _installed("adbc_driver_postgresql.dbapi", "adbc-driver-postgresql", self.name)
        self._connection: Any = dbapi.connect(url)
        self._cursor: Any = self._connection.cursor()
        self._cursor.execute("select pg_backend_pid()")
        self._pid = int(self._cursor.fetchone()[0])

    @property
    def pid(self) -> int:
        return self._pid

    def land(self, batch: pa.RecordBatch) -> None:
        sink = sink_of(batch.column("function")[0].as_py())
        stage = f"stage_{_plain(sink)}"
        self._cursor.adbc_ingest(
            stage, _plain_columns(sink, batch), mode="create_append", temporary=True
        )
        self._cursor.execute(self._merge(sink))
        self._cursor.execute(f"truncate {stage}")
        self._connection.commit()

    def close(self) -> None:
        self._cursor.close()
        self._connection.close()


WAYS: tuple[type[Any], ...] = (OurWay, OurStagedWay, Pgpq, AdbcIngest, WriteRow, ExecuteMany)


def _installed(module: str, package: str, way: str) -> Any:
    """The module, or MissingDependency with the package's own name: no extra of ours brings a peer."""
    try:
        return importlib.import_module(module)
    except ImportError as fault:
        raise MissingDependency(package, "dev", f"the way {way}") from fault


def _plain(sink: Sink) -> str:
    return sink.table.partition(".")[2]


def _columns(sink: Sink, batch: pa.RecordBatch) -> list[Column]:
    """As our sink encodes them, but for the vector, which stays a list of halves."""
    halves = sink.encode(batch, Landing("halfvec"))
    return [
        Column(item.name, column.kind, item.values)
        for item, column in zip(halves, sink.columns, strict=True)
    ]


def _plain_columns(sink: Sink, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Columns of the table in Arrow types that other drivers take."""
    columns = _columns(sink, batch)
    arrays = [column.values.cast(_ARROW[column.kind]) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, [column.name for column in columns])


def _python_rows(sink: Sink, batch: pa.RecordBatch) -> Any:
    columns = _plain_columns(sink, batch)
    return zip(*(column.to_pylist() for column in columns.columns), strict=True)
