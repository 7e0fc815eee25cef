"""Everything that shards and receipts ask of Postgres: source rows, content hash, leases, generations, receipts.

Snapshot and rows are read in one repeatable-read transaction, so that "what has moved since" is exact. A
row's digest is sha256(int8send(id) || wire form of its vector); a set's hash is the sum of the digests' first
two 8-byte lanes modulo 2^64 plus the count, which does not depend on order and in which duplicates do
not cancel. SQL and Python give equal values. Time is the database's own, never a holder's clock.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from fabric_pipelines.dataplane.database import Connection, Database
from fabric_pipelines.dataplane.sql import compose, query, relation, trusted
from fabric_pipelines.errors import AlreadyRunning, FencingLost, SchemaError, UsageError

BUCKETS = 1024
LANE_MASK = (1 << 64) - 1

Vectors = npt.NDArray[np.float16] | npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Source:
    """Which rows a shard is made of. relation: "schema.table"; submission_id: only that submission's rows;
    filter: further SQL condition, the operator's own text (never data). columns: integer columns, without
    nulls, that are read along with the rows. Rows without a vector do not count."""

    relation: str = "fabric.embed"
    id_column: str = "task_id"
    vector_column: str = "vector"
    submission_id: str | None = None
    filter: str | None = None
    columns: tuple[str, ...] = ()

    def condition(self) -> sql.Composable:
        parts: list[sql.Composable] = [
            sql.SQL("{} is not null").format(sql.Identifier(self.vector_column))
        ]
        if self.submission_id is not None:
            parts.append(sql.SQL("submission_id = {}").format(sql.Literal(self.submission_id)))
        if self.filter:
            parts.append(trusted(f"({self.filter})"))
        return sql.SQL(" and ").join(parts)


@dataclass(frozen=True, slots=True)
class ContentHash:
    """rows, two lanes (sums modulo 2^64) and the first lane's sum per bucket (bucket = id & 1023, uint64
    [1024]): comparing bucket sums finds what moved in O(changed buckets)."""

    rows: int
    lane_0: int
    lane_1: int
    bucket_sums: tuple[int, ...]

    @property
    def hex(self) -> str:
        return f"{self.rows:x}-{self.lane_0:016x}{self.lane_1:016x}"

    def moved_buckets(self, other: ContentHash) -> list[int]:
        pairs = zip(self.bucket_sums, other.bucket_sums, strict=True)
        return [bucket for bucket, (mine, theirs) in enumerate(pairs) if mine != theirs]

    def as_json(self) -> dict[str, Any]:
        """Integers as hex strings: JSON numbers end at 2^53."""
        return {
            "rows": self.rows,
            "content_hash": self.hex,
            "bucket_sums": [f"{value:016x}" for value in self.bucket_sums],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ContentHash:
        rows, _, lanes = str(fields["content_hash"]).partition("-")
        sums = tuple(int(value, 16) for value in fields["bucket_sums"])
        if len(sums) != BUCKETS or len(lanes) != 32:
            raise SchemaError("not a content hash: it needs 1,024 bucket sums and two lanes")
        return cls(int(rows, 16), int(lanes[:16], 16), int(lanes[16:], 16), sums)


@dataclass(frozen=True, slots=True)
class SourceState:
    """A source as one transaction saw it. encoding: wire form under the digest (halfvec, vector, bytea)."""

    source: Source
    cluster_id: str
    database_id: str
    relation_oid: int
    columns: Mapping[str, str]
    encoding: str
    snapshot: str
    lsn: str
    timeline: int
    content: ContentHash

    def as_json(self) -> dict[str, Any]:
        """The `source` part of a receipt (no floats)."""
        return {
            "cluster": self.cluster_id,
            "database": self.database_id,
            "timeline": self.timeline,
            "relation": self.source.relation,
            "relation_oid": self.relation_oid,
            "id_column": self.source.id_column,
            "vector_column": self.source.vector_column,
            "columns": dict(self.columns),
            "encoding": self.encoding,
            "submission_id": self.source.submission_id,
            "filter": self.source.filter,
            "pg_snapshot": self.snapshot,
            "lsn": self.lsn,
            **self.content.as_json(),
        }


@dataclass(frozen=True, slots=True)
class SourceRows:
    """ids int64 [N] ascending; vectors [N, d], float16 for halfvec and bytea, float32 for vector; columns by
    name, int64 [N] each."""

    state: SourceState
    ids: npt.NDArray[np.int64]
    vectors: Vectors
    columns: Mapping[str, npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class ShardLease:
    name: str
    holder: str
    token: int


@dataclass(frozen=True, slots=True)
class GenerationRow:
    name: str
    generation: int
    token: int
    manifest_sha256: str
    manifest: Mapping[str, Any]
    published_at: datetime


@dataclass(frozen=True, slots=True)
class ReceiptRow:
    receipt_id: str
    shard: str
    generation: int
    statement: Mapping[str, Any]
    issued_at: datetime


def read_source(database: Database, source: Source) -> SourceRows:
    """All rows of `source` with the snapshot they were read in. The hash is computed here from the bytes
    read. Raises SchemaError for a missing relation or column, and for vectors of unequal length."""
    with database.session() as connection, _frozen(connection):
        columns, oid, encoding = _describe(connection, source)
        raw = _copy_out(connection, source)
        ids, vectors, columns_read = _decode_rows(raw, encoding, source)
        content = content_hash(ids, vectors, encoding)
        state = _state(connection, database, source, columns, oid, encoding, content)
    return SourceRows(state, ids, vectors, columns_read)


def source_state(database: Database, source: Source) -> SourceState:
    """The same facts without the rows: the hash is computed by the database (12-14 us a row of 384)."""
    with database.session() as connection, _frozen(connection):
        columns, oid, encoding = _describe(connection, source)
        content = _content_by_sql(connection, source, encoding)
        return _state(connection, database, source, columns, oid, encoding, content)


def content_hash(
    ids: npt.NDArray[np.int64], vectors: Vectors, encoding: str = "halfvec"
) -> ContentHash:
    """The hash of rows (ids int64 [N], vectors [N, d]) as the database would compute it in `encoding`."""
    lanes = np.frombuffer(_digests(ids, vectors, encoding), dtype=">u8").reshape(-1, 2)
    lanes = lanes.astype(np.uint64)
    buckets = np.zeros(BUCKETS, np.uint64)
    with np.errstate(over="ignore"):
        np.add.at(buckets, (ids & (BUCKETS - 1)).astype(np.intp), lanes[:, 0])
        totals = lanes.sum(axis=0, dtype=np.uint64)
    return ContentHash(len(ids), int(totals[0]), int(totals[1]), tuple(buckets.tolist()))


def acquire_shard(database: Database, name: str, holder: str, *, ttl_s: float = 60) -> ShardLease:
    """The exclusive right to publish generations of shard `name`, under a new token. Raises AlreadyRunning
    naming the holder while another one's lease is running."""
    with database.session() as connection:
        row = connection.execute(
            query("acquire_shard"), {"name": name, "holder": holder, "ttl_s": ttl_s}
        ).fetchone()
        if row is None:
            held = connection.execute(query("shard_holder"), {"name": name}).fetchone()
            assert held is not None
            raise AlreadyRunning(
                f"shard {name!r} is leased to {held[0]} (token {held[1]}) for another {held[2]:.0f} s; "
                "wait for it, or stop that process"
            )
    return ShardLease(name, holder, int(row[0]))


def renew_shard(database: Database, lease: ShardLease, *, ttl_s: float = 60) -> None:
    """Raises FencingLost once the lease ran out or went to someone else."""
    with database.session() as connection:
        renewed = connection.execute(
            query("renew_shard"), {**_lease_fields(lease), "ttl_s": ttl_s}
        ).rowcount
    if renewed != 1:
        raise _fencing_lost(lease)


def release_shard(database: Database, lease: ShardLease) -> bool:
    """Give the lease back; False if it was lost before. The token stays and only grows."""
    with database.session() as connection:
        return connection.execute(query("release_shard"), _lease_fields(lease)).rowcount == 1


def last_generation(database: Database, name: str) -> int:
    """Number of the newest published generation, 0 if none; the next one is this plus one."""
    with database.session() as connection:
        row = connection.execute(query("last_generation"), {"name": name}).fetchone()
    assert row is not None
    return int(row[0])


def publish_generation(
    database: Database,
    lease: ShardLease,
    *,
    generation: int,
    manifest_sha256: str,
    manifest: Mapping[str, Any],
) -> GenerationRow:
    """Make `generation` the current one, in one statement that checks the lease. Raises FencingLost when the
    lease ran out, went to someone else, or the number is taken."""
    values = {
        **_lease_fields(lease),
        "generation": generation,
        "manifest_sha256": manifest_sha256,
        "manifest": Jsonb(dict(manifest)),
    }
    with database.session() as connection:
        try:
            published = connection.execute(query("publish_generation"), values).rowcount
        except psycopg.errors.UniqueViolation as fault:
            raise FencingLost(
                f"generation {generation} of shard {lease.name!r} exists already; "
                "read last_generation again and rebuild"
            ) from fault
        if published != 1:
            raise _fencing_lost(lease)
        row = _generation(connection, lease.name, generation)
    assert row is not None
    return row


def current_generation(
    database: Database, name: str, generation: int | None = None
) -> GenerationRow | None:
    """The newest generation of shard `name`, or the given one; None if there is none."""
    with database.session() as connection:
        return _generation(connection, name, generation)


def shard_names(database: Database) -> list[str]:
    with database.session() as connection:
        return [row[0] for row in connection.execute(query("shard_names")).fetchall()]


def insert_receipt(
    database: Database,
    *,
    receipt_id: str,
    shard: str,
    generation: int,
    statement: Mapping[str, Any],
) -> bool:
    """Keep a receipt; False if that id is kept already (then nothing changes)."""
    values = {
        "receipt_id": receipt_id,
        "shard": shard,
        "generation": generation,
        "statement": Jsonb(dict(statement)),
    }
    with database.session() as connection:
        return connection.execute(query("insert_receipt"), values).rowcount == 1


def find_receipt(database: Database, receipt_id: str) -> ReceiptRow | None:
    """By full id or an unambiguous prefix of it. Raises UsageError when the prefix fits several."""
    if not receipt_id:
        raise UsageError("the receipt id is empty; `fabric receipt list` shows them")
    found = find_receipts(database, prefix=receipt_id, limit=2)
    if len(found) > 1:
        raise UsageError(f"receipt id {receipt_id!r} fits more than one receipt; give more digits")
    return found[0] if found else None


def find_receipts(
    database: Database,
    *,
    prefix: str | None = None,
    shard: str | None = None,
    generation: int | None = None,
    limit: int = 100,
) -> list[ReceiptRow]:
    """Newest first."""
    values = {"prefix": prefix, "shard": shard, "generation": generation, "limit": limit}
    with database.session() as connection:
        rows = connection.execute(query("find_receipts"), values).fetchall()
    return [ReceiptRow(*row) for row in rows]


def _lease_fields(lease: ShardLease) -> dict[str, Any]:
    return {"name": lease.name, "holder": lease.holder, "token": lease.token}


def _fencing_lost(lease: ShardLease) -> FencingLost:
    return FencingLost(
        f"{lease.holder} no longer holds shard {lease.name!r} under token {lease.token}; "
        "acquire it again and rebuild from the current generation"
    )


def _generation(connection: Connection, name: str, generation: int | None) -> GenerationRow | None:
    row = connection.execute(
        query("current_generation"), {"name": name, "generation": generation}
    ).fetchone()
    return None if row is None else GenerationRow(*row)


def _frozen(connection: Connection) -> Any:
    """A read-only repeatable-read transaction: all statements in it see one snapshot."""
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    connection.read_only = True
    return connection.transaction()


_ENCODINGS = ("halfvec", "vector", "bytea")
_INTEGERS = ("smallint", "integer", "bigint")


def _describe(connection: Connection, source: Source) -> tuple[dict[str, str], int, str]:
    rows = connection.execute(query("column_types"), {"relation": source.relation}).fetchall()
    if not rows:
        raise SchemaError(f"there is no relation {source.relation!r} in this database")
    types = {name: kind for name, kind, _ in rows}
    wanted = (source.id_column, source.vector_column, *source.columns)
    for column in wanted:
        if column not in types:
            raise SchemaError(f"relation {source.relation!r} has no column {column!r}")
    for column in source.columns:
        if types[column] not in _INTEGERS:
            raise SchemaError(
                f"column {column!r} of {source.relation} is {types[column]}; only integer columns "
                "travel with the rows of a shard"
            )
    encoding = types[source.vector_column].rpartition(".")[2]
    if encoding not in _ENCODINGS:
        raise SchemaError(
            f"column {source.vector_column!r} of {source.relation} is {encoding}; "
            f"vectors are read from {', '.join(_ENCODINGS)}"
        )
    chosen = {name: types[name] for name in wanted}
    return chosen, int(rows[0][2]), encoding


def _state(
    connection: Connection,
    database: Database,
    source: Source,
    columns: Mapping[str, str],
    oid: int,
    encoding: str,
    content: ContentHash,
) -> SourceState:
    row = connection.execute(query("snapshot")).fetchone()
    assert row is not None
    identity = database.identity
    return SourceState(
        source=source,
        cluster_id=identity.cluster_id,
        database_id=identity.database_id,
        relation_oid=oid,
        columns=columns,
        encoding=encoding,
        snapshot=row[0],
        lsn=row[1],
        timeline=int(row[2]),
        content=content,
    )


def _parts(source: Source) -> dict[str, sql.Composable]:
    return {
        "id": sql.Identifier(source.id_column),
        "vector": sql.Identifier(source.vector_column),
        "relation": relation(source.relation),
        "filter": source.condition(),
    }


def _content_by_sql(connection: Connection, source: Source, encoding: str) -> ContentHash:
    parts = _parts(source)
    vector = parts.pop("vector")
    wire = vector if encoding == "bytea" else sql.SQL(encoding + "_send({})").format(vector)
    rows = connection.execute(compose("content_sums", wire=wire, **parts)).fetchall()
    sums = [0] * BUCKETS
    for bucket, _, lane_0, _ in rows:
        sums[bucket] = int(lane_0) & LANE_MASK
    return ContentHash(
        rows=sum(row[1] for row in rows),
        lane_0=sum(int(row[2]) for row in rows) & LANE_MASK,
        lane_1=sum(int(row[3]) for row in rows) & LANE_MASK,
        bucket_sums=tuple(sums),
    )


def _column_list(source: Source) -> sql.Composable:
    """What follows the vector in the select list."""
    return sql.Composed(
        [sql.SQL(", {}::bigint").format(sql.Identifier(name)) for name in source.columns]
    )


def _copy_out(connection: Connection, source: Source) -> bytes:
    with (
        connection.cursor() as cursor,
        cursor.copy(
            compose("copy_source_rows", columns=_column_list(source), **_parts(source))
        ) as copy,
    ):
        return b"".join(bytes(piece) for piece in copy)


_COPY_HEADER = 19
_COPY_TRAILER = 2
_ROW_HEAD = struct.Struct(">hiqi")  # fields, id length, id, vector length


def _decode_rows(
    raw: bytes, encoding: str, source: Source
) -> tuple[npt.NDArray[np.int64], Vectors, dict[str, npt.NDArray[np.int64]]]:
    """Rows of equal size are one structured array: no loop, one copy to native order."""
    body = memoryview(raw)[_COPY_HEADER : len(raw) - _COPY_TRAILER]
    if not len(body):
        none = np.zeros(0, np.int64)
        return none, np.zeros((0, 0), np.float16), dict.fromkeys(source.columns, none)
    size = _ROW_HEAD.unpack_from(body)[3]
    prefix, element = _wire_layout(encoding)
    width = (size - prefix) // element.itemsize
    row = np.dtype(
        [
            ("fields", ">i2"),
            ("id_size", ">i4"),
            ("id", ">i8"),
            ("size", ">i4"),
            ("prefix", "u1", (prefix,)),
            ("values", element, (width,)),
            *(
                part
                for name in source.columns
                for part in ((f"{name} size", ">i4"), (f"{name} value", ">i8"))
            ),
        ]
    )
    unequal = SchemaError(
        f"rows of {source.relation} differ in length: a shard needs vectors of one dimension"
        + (f" and no nulls in {', '.join(source.columns)}" if source.columns else "")
    )
    if len(body) % row.itemsize:
        raise unequal
    rows = np.frombuffer(body, dtype=row)
    equal = (rows["size"] == size) & (rows["fields"] == 2 + len(source.columns))
    for name in source.columns:
        equal &= rows[f"{name} size"] == 8
    if not (equal & (rows["id_size"] == 8)).all():
        raise unequal
    native = np.dtype(np.float32 if encoding == "vector" else np.float16)
    return (
        rows["id"].astype(np.int64),
        np.ascontiguousarray(rows["values"]).astype(native),
        {name: rows[f"{name} value"].astype(np.int64) for name in source.columns},
    )


def _wire_layout(encoding: str) -> tuple[int, np.dtype[Any]]:
    """(bytes before the elements, element type) of a vector in COPY BINARY and in the digest."""
    if encoding == "bytea":
        return 0, np.dtype("<f2")
    return 4, np.dtype(">f4" if encoding == "vector" else ">f2")


def _digests(ids: npt.NDArray[np.int64], vectors: Vectors, encoding: str) -> bytes:
    """The first 16 bytes of each row's sha256, end to end."""
    if encoding not in _ENCODINGS:
        raise UsageError(f"encoding {encoding!r} is unknown; use one of {', '.join(_ENCODINGS)}")
    if not len(ids):
        return b""
    prefix, element = _wire_layout(encoding)
    head = np.frombuffer(struct.pack(">hh", vectors.shape[1], 0)[:prefix], np.uint8)
    pieces = [
        _bytes_of(ids.astype(">i8").reshape(-1, 1)),
        np.broadcast_to(head, (len(ids), prefix)),
        _bytes_of(vectors.astype(element)),
    ]
    rows = np.concatenate(pieces, axis=1)
    flat, step = memoryview(rows.tobytes()), rows.shape[1]
    sha256 = hashlib.sha256
    return b"".join(sha256(flat[at : at + step]).digest()[:16] for at in range(0, len(flat), step))


def _bytes_of(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
