"""The rows that a shard is made of, as one transaction sees them: what they are, how many, their content hash.

Snapshot and rows are read in one repeatable-read transaction, so that "what has moved since" is exact. The hash
over them (content_hash.py) is the same whether SQL or Python computes it. Rows cross as binary COPY, decoded in
columns.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import sql

from fabric_pipelines.dataplane.content_hash import (
    BUCKETS,
    ENCODINGS,
    HASH_VERSION,
    LANE_MASK,
    ContentHash,
    Vectors,
    content_hash,
    wire_layout,
)
from fabric_pipelines.dataplane.database import Connection, Database
from fabric_pipelines.dataplane.sql import compose, query, relation, trusted
from fabric_pipelines.errors import SchemaError

NO_CONDITION = (psycopg.ProgrammingError, psycopg.DataError, psycopg.NotSupportedError)
"""What a server says to a filter that is no condition on a row."""

EVERY_ROW = sql.SQL("true")


@dataclass(frozen=True, slots=True)
class Source:
    """Which rows a shard is made of. relation: "schema.table", each part as it is written; submission_id: only that submission's rows;
    filter: further SQL condition, the operator's own text (never data). columns: integer columns, without
    nulls, that are read along with the rows, in the order of their names. Rows without a vector do not count.
    hash_version: how its content hash is made; older receipts are checked under theirs."""

    relation: str = "fabric.embed"
    id_column: str = "task_id"
    vector_column: str = "vector"
    submission_id: str | None = None
    filter: str | None = None
    columns: tuple[str, ...] = ()
    hash_version: int = HASH_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(sorted(set(self.columns))))
        for column in {self.id_column, self.vector_column} & set(self.columns):
            raise SchemaError(
                f"column {column!r} of {self.relation} is in every shard already, as its id or its vector: leave it out of "
                "the columns that travel with the rows"
            )
        if self.hash_version not in (1, HASH_VERSION):
            raise SchemaError(
                f"content hash version {self.hash_version} is unknown; this program knows 1 to "
                f"{HASH_VERSION}: use the version that wrote it"
            )

    @property
    def hashed_columns(self) -> tuple[str, ...]:
        return self.columns if self.hash_version >= 2 else ()

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
class SourceState:
    """A source as one transaction saw it. encoding: wire form under the digest (halfvec, vector, bytea).
    engine_fingerprints: every one that made a row of it, sorted; none where the relation does not say.
    relation_files: the files that the rows lay in, and the numbers of the columns; others may hold other rows, though no
    trigger fired."""

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
    engine_fingerprints: tuple[str, ...] = ()
    relation_files: str | None = None

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
            **self._since_version_2(),
            **self.content.as_json(),
        }

    def with_content(self, content: ContentHash) -> SourceState:
        """The same moment, with a hash that was added up."""
        return replace(self, content=content)

    def _since_version_2(self) -> dict[str, Any]:
        version = self.source.hash_version
        if version < 2:
            return {}
        return {
            "hash_version": version,
            "engine_fingerprints": list(self.engine_fingerprints),
            "relation_files": self.relation_files,
        }


@dataclass(frozen=True, slots=True)
class RowSet:
    """ids int64 [N] ascending; vectors [N, d], float16 for halfvec and bytea, float32 for vector; columns by
    name, int64 [N] each."""

    ids: npt.NDArray[np.int64]
    vectors: Vectors
    columns: Mapping[str, npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class SourceRows:
    """All rows of a source as one transaction saw them, laid out as in RowSet."""

    state: SourceState
    ids: npt.NDArray[np.int64]
    vectors: Vectors
    columns: Mapping[str, npt.NDArray[np.int64]]


def read_source(database: Database, source: Source) -> SourceRows:
    """All rows of `source` with the snapshot they were read in. The hash is computed here from the bytes
    read. Raises SchemaError for a missing relation or column, and for vectors of unequal length."""
    with database.session() as connection, frozen(connection):
        described = describe(connection, source)
        rows = copy_rows(connection, source, described.encoding)
        hashed = [rows.columns[name] for name in source.hashed_columns]
        content = content_hash(rows.ids, rows.vectors, described.encoding, hashed)
        made_by = fingerprints(connection, source, described)
        state = state_of(connection, database, source, described, content, made_by)
    return SourceRows(state, rows.ids, rows.vectors, rows.columns)


def source_state(database: Database, source: Source) -> SourceState:
    """The same facts without the rows: the hash is computed by the database (12-14 us a row of 384)."""
    with database.session() as connection, frozen(connection):
        described = describe(connection, source)
        content = content_by_sql(connection, source, described.encoding)
        made_by = fingerprints(connection, source, described)
        return state_of(connection, database, source, described, content, made_by)


def frozen(connection: Connection) -> Any:
    """A read-only repeatable-read transaction: all statements in it see one snapshot."""
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    connection.read_only = True
    return connection.transaction()


_INTEGERS = ("smallint", "integer", "bigint")


@dataclass(frozen=True, slots=True)
class Described:
    """What the catalogue says of a source's relation. columns: type of each column that is read. every_id: whether the
    relation refuses a row without an id."""

    columns: Mapping[str, str]
    oid: int
    encoding: str
    has_fingerprints: bool
    every_id: bool = True


def require_integer_ids(connection: Connection, source: Source) -> None:
    """SchemaError where the ids are no integers, before anything is put on the relation; quiet where it has no such
    column, which others name."""
    rows = connection.execute(query("column_types"), {"relation": source.relation}).fetchall()
    for name, kind, _, under, _ in rows:
        if name == source.id_column:
            _require_integers(source, kind, under)


def _require_integers(source: Source, kind: str, under: str) -> None:
    """No other type is compared as an integer without loss: 3.5 would be found as 4, and "7" not at all."""
    if under in _INTEGERS:
        return
    said = kind if kind == under else f"{kind} (over {under})"
    raise SchemaError(
        f"the id column {source.id_column!r} of {source.relation} is {said}; a shard knows its rows by smallint, integer or "
        "bigint, and casts nothing to them: add a column `row_id bigint generated always as identity`, and build from a "
        f"view that names it {source.id_column}"
    )


def describe(connection: Connection, source: Source) -> Described:
    """Raises SchemaError for a missing relation or column, for types that no shard is made of, and for a filter that
    is no condition on the relation. From here on the relation keeps its name and columns until the transaction ends."""
    hold = {"relation": relation(source.relation)}
    try:
        connection.execute(compose("hold_relation", filter=EVERY_ROW, **hold))
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as fault:
        raise SchemaError(f"there is no relation {source.relation!r} in this database") from fault
    rows = connection.execute(query("column_types"), {"relation": source.relation}).fetchall()
    types = {name: kind for name, kind, *_ in rows}
    wanted = (source.id_column, source.vector_column, *source.columns)
    for column in wanted:
        if column not in types:
            raise SchemaError(f"relation {source.relation!r} has no column {column!r}")
    (ids,) = (row for row in rows if row[0] == source.id_column)
    _require_integers(source, ids[1], ids[3])
    for column in source.columns:
        if types[column] not in _INTEGERS:
            raise SchemaError(
                f"column {column!r} of {source.relation} is {types[column]}; only integer columns "
                "travel with the rows of a shard"
            )
    encoding = types[source.vector_column].rpartition(".")[2]
    if encoding not in ENCODINGS:
        raise SchemaError(
            f"column {source.vector_column!r} of {source.relation} is {encoding}; "
            f"vectors are read from {', '.join(ENCODINGS)}"
        )
    require_all_rows(connection, source.relation, int(rows[0][2]))
    chosen = {name: types[name] for name in wanted}
    if source.submission_id is not None and "submission_id" not in types:
        raise SchemaError(
            f"relation {source.relation!r} has no column 'submission_id' to choose rows by: leave the submission out, or "
            "give a filter"
        )
    if source.filter or source.submission_id is not None:
        try:
            # prepared, since only that protocol takes one statement and no second one out of the filter
            connection.execute(
                compose("hold_relation", filter=source.condition(), **hold), prepare=True
            )
        except NO_CONDITION as fault:
            why = " ".join(str(fault).split())
            if not source.filter:
                raise SchemaError(
                    f"submission_id of {source.relation} is compared with no text such as {source.submission_id!r} ({why}): "
                    "leave the submission out, or give a filter"
                ) from fault
            raise SchemaError(
                f"the filter {source.filter!r} is no condition on a row of {source.relation} ({why}); write it as after "
                "WHERE"
            ) from fault
    has_fingerprints = types.get("engine_fingerprint") in ("text", "varchar")
    return Described(chosen, int(rows[0][2]), encoding, has_fingerprints, bool(ids[4]))


def require_all_rows(connection: Connection, relation: str, oid: int) -> None:
    """SchemaError where row level security may hide rows from this role: a shard of the others would count as whole."""
    row = connection.execute(query("row_security"), {"oid": oid}).fetchone()
    assert row is not None
    if row[0]:
        raise SchemaError(
            f"row level security of {relation} applies to role {row[1]!r}, so rows may be hidden from it without a word: let "
            f'a role read it to which none applies (`alter role "{row[1]}" bypassrls`, or the owner of a table without FORCE), '
            "or build from a view of the rows that are meant"
        )


def state_of(
    connection: Connection,
    database: Database,
    source: Source,
    described: Described,
    content: ContentHash,
    engine_fingerprints: Sequence[str],
) -> SourceState:
    """The state with the snapshot of the connection's transaction."""
    names = [*described.columns, *(["submission_id"] if source.submission_id is not None else [])]
    read = {"oid": described.oid, "names": [*names, *(["*"] if source.filter else [])]}
    row = connection.execute(query("snapshot"), read).fetchone()
    assert row is not None
    identity = database.identity
    return SourceState(
        source=source,
        cluster_id=identity.cluster_id,
        database_id=identity.database_id,
        relation_oid=described.oid,
        columns=described.columns,
        encoding=described.encoding,
        snapshot=row[0],
        lsn=row[1],
        timeline=int(row[2]),
        content=content,
        engine_fingerprints=tuple(engine_fingerprints),
        relation_files=row[3],
    )


def fingerprints(connection: Connection, source: Source, described: Described) -> list[str]:
    """Engine fingerprints of the source's rows, where the relation has them."""
    if source.hash_version < 2 or not described.has_fingerprints:
        return []
    parts = _parts(source)
    statement = compose("engine_fingerprints", relation=parts["relation"], filter=parts["filter"])
    return [row[0] for row in connection.execute(statement).fetchall() if row[0] is not None]


def _parts(source: Source) -> dict[str, sql.Composable]:
    return {
        "id": sql.Identifier(source.id_column),
        "vector": sql.Identifier(source.vector_column),
        "relation": relation(source.relation),
        "filter": source.condition(),
    }


def content_by_sql(connection: Connection, source: Source, encoding: str) -> ContentHash:
    parts = _parts(source)
    vector = parts.pop("vector")
    wire = vector if encoding == "bytea" else sql.SQL(encoding + "_send({})").format(vector)
    for name in source.hashed_columns:
        # A null is refused where rows are read; here it must not make the row invisible.
        piece = sql.SQL(" || coalesce(int8send({}::bigint), ''::bytea)")
        wire = sql.Composed([wire, piece.format(sql.Identifier(name))])
    rows = connection.execute(compose("content_sums", wire=wire, **parts)).fetchall()
    sums = [0] * BUCKETS
    for bucket, count, lane_0, _ in rows:
        if bucket is None:
            raise _missing(source, source.id_column, count)
        sums[bucket] = int(lane_0) & LANE_MASK
    return ContentHash(
        rows=sum(row[1] for row in rows),
        lane_0=sum(int(row[2]) for row in rows) & LANE_MASK,
        lane_1=sum(int(row[3]) for row in rows) & LANE_MASK,
        bucket_sums=tuple(sums),
    )


def copy_rows(
    connection: Connection,
    source: Source,
    encoding: str,
    only: sql.Composable = EVERY_ROW,
) -> RowSet:
    """Rows of `source` for which `only` holds, by id."""
    columns = sql.Composed(
        [sql.SQL(", {}::bigint").format(sql.Identifier(name)) for name in source.columns]
    )
    statement = compose("copy_source_rows", columns=columns, only=only, **_parts(source))
    try:
        rows = _decode_rows(copy_bytes(connection, statement), encoding, source)
    except SchemaError:
        require_values(connection, source, only)
        raise
    _require_unique(rows.ids, source)
    return rows


def require_values(
    connection: Connection, source: Source, only: sql.Composable = EVERY_ROW
) -> None:
    """SchemaError that names the first column, id or one that travels, in which rows have no value, and counts them."""
    names = (source.id_column, *source.columns)
    counts = [sql.SQL("count(*) - count({})").format(sql.Identifier(name)) for name in names]
    parts = _parts(source)
    found = connection.execute(
        compose(
            "count_missing",
            counts=sql.SQL(", ").join(counts),
            relation=parts["relation"],
            filter=parts["filter"],
            only=only,
        )
    ).fetchone()
    assert found is not None
    for name, count in zip(names, found, strict=True):
        if count:
            raise _missing(source, name, count)


def require_ids(connection: Connection, source: Source, described: Described) -> None:
    """SchemaError where rows have no id: no change log speaks of them. Asked only of a column that may be null."""
    if not described.every_id:
        missing = sql.SQL("{} is null").format(sql.Identifier(source.id_column))
        require_values(connection, replace(source, columns=()), missing)


def _missing(source: Source, column: str, count: int) -> SchemaError:
    rows = f"{count} row{'s' if count > 1 else ''}"
    what = (
        "a row is known by its id"
        if column == source.id_column
        else "columns that travel hold integers"
    )
    return SchemaError(
        f"{column!r} is null in {rows} of {source.relation}: {what}; give each a value, or leave them out with the filter "
        f"`{column} is not null`"
    )


NAMED = 10


def _require_unique(ids: npt.NDArray[np.int64], source: Source) -> None:
    """A shard knows a row by its id: of two with one id, a change of either would be laid over both."""
    found, counts = np.unique(ids, return_counts=True)
    twice = found[counts > 1]
    if len(twice):
        named = ", ".join(str(item) for item in twice[:NAMED]) + (", ..." * (len(twice) > NAMED))
        raise SchemaError(
            f"{len(twice)} ids of {source.relation} are those of more than one row ({named}): a shard needs one row an id; "
            f"remove the others, keep {source.id_column!r} unique with an index, or name another id column"
        )


def copy_bytes(connection: Connection, statement: sql.Composed) -> bytes:
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        return b"".join(bytes(piece) for piece in copy)


COPY_HEADER = 19
COPY_TRAILER = 2
_ROW_HEAD = struct.Struct(">hiqi")  # fields, id length, id, vector length


def _decode_rows(raw: bytes, encoding: str, source: Source) -> RowSet:
    """Rows of equal size are one structured array: no loop, one copy to native order."""
    body = memoryview(raw)[COPY_HEADER : len(raw) - COPY_TRAILER]
    if not len(body):
        none = np.zeros(0, np.int64)
        return RowSet(none, np.zeros((0, 0), np.float16), dict.fromkeys(source.columns, none))
    unequal = SchemaError(
        f"rows of {source.relation} differ in length: a shard needs vectors of one dimension"
    )
    _, id_size, _, size = _ROW_HEAD.unpack_from(bytes(body[: _ROW_HEAD.size]).ljust(_ROW_HEAD.size))
    if id_size != 8:
        raise unequal
    prefix, element = wire_layout(encoding)
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
    if len(body) % row.itemsize:
        raise unequal
    rows = np.frombuffer(body, dtype=row)
    equal = (rows["size"] == size) & (rows["fields"] == 2 + len(source.columns))
    for name in source.columns:
        equal &= rows[f"{name} size"] == 8
    if not (equal & (rows["id_size"] == 8)).all():
        raise unequal
    native = np.dtype(np.float32 if encoding == "vector" else np.float16)
    return RowSet(
        rows["id"].astype(np.int64),
        np.ascontiguousarray(rows["values"]).astype(native),
        {name: rows[f"{name} value"].astype(np.int64) for name in source.columns},
    )
