"""What the database says has moved since a generation was read: verdict by policy, and the moved rows themselves.

The change log (migrations/0003_staleness.sql) says which ids moved, exactly; the rows are read in the same
repeatable-read transaction as the log, so that the next generation has one snapshot too. Where the log does
not reach (pruned, begun later, triggers switched off) bucket sums find the rows, and what they found is kept
beside the log. Nothing here decides to rebuild: the view gives the verdict, its reader acts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
import psycopg
from psycopg import sql

from fabric_pipelines.dataplane.content_hash import BUCKETS, ContentHash, Ids
from fabric_pipelines.dataplane.database import Connection, Database, translated
from fabric_pipelines.dataplane.source import (
    COPY_HEADER,
    COPY_TRAILER,
    NO_CONDITION,
    Described,
    RowSet,
    Source,
    SourceState,
    content_by_sql,
    copy_bytes,
    copy_rows,
    describe,
    fingerprints,
    frozen,
    require_all_rows,
    require_ids,
    require_integer_ids,
    state_of,
)
from fabric_pipelines.dataplane.sql import compose, query
from fabric_pipelines.dataplane.sql import relation as quoted
from fabric_pipelines.dataplane.table_locks import READERS, WRITERS, briefly_locked
from fabric_pipelines.errors import SchemaError, SettingsError, UsageError

CHANNEL = "fabric_stale"
DEFAULTS = "*"
POLL_S = 30.0
AGE_S_MAX = 1e10  # 317 years; an interval of the database ends somewhere, too


@dataclass(frozen=True, slots=True)
class Staleness:
    """One row of fabric.shard_staleness. verdict: fresh, changed, deleted, age, quality, rebuild or audit (the
    log does not cover this generation). Counts are distinct ids since the generation was read; with a filter
    they are an upper bound. due: stale, and quiet for as long as the policy asks."""

    shard: str
    generation: int
    relation: str
    receipt_id: str | None
    log: str
    rows: int
    inserted: int
    updated: int
    deleted: int
    truncated: bool
    moved: int
    moved_fraction: float
    deleted_fraction: float
    age_s: float
    recall: float | None
    last_change_at: datetime | None
    verdict: str
    due: bool
    min_recall: float | None = None

    @property
    def why(self) -> str:
        """What the verdict comes from and what to do about it, in one sentence; empty when fresh."""
        if self.verdict == "audit":
            return WHY_AUDIT[self.log].format(shard=self.shard, relation=self.relation)
        if self.verdict == "rebuild" and self.log == "elsewhere":
            return f"{self.relation} is another relation, or in another database, than what the generation was read from"
        if self.verdict == "quality":
            return (
                f"recall {self.recall} is below min_recall {self.min_recall}: a refresh makes new lists; where that does "
                f"not reach it either, lower the bound (`fabric receipt policy {self.shard} --set min_recall=NUMBER`) or "
                "build with fewer lists"
            )
        return WHY[self.verdict].format(shard=self.shard, relation=self.relation)

    @property
    def beyond_refresh(self) -> str:
        """What a refresh may have left as it was: equal before and after one, the next one changes nothing
        either. Empty for what a refresh settles."""
        if self.verdict == "quality":
            return f"quality below {self.min_recall}"
        changed = self.last_change_at
        what = (self.verdict, self.log, changed.isoformat() if changed else "never")
        return "" if self.verdict in ("fresh", "age") else " ".join(what)


_LOOK = "`fabric receipt audit {shard}` compares the rows"
_SETTLE = "; `fabric receipt refresh {shard}` settles it"
WHY_AUDIT = {
    "row security": "row level security of {relation} applies to this role and may hide rows, so nothing that it reads is "
    "compared: let a role ask to which none applies (`alter role ... bypassrls`), with which "
    + _LOOK,
    "unwatched": "nothing watches {relation} (a view, a table of another owner, or unwatched on purpose), so no change of "
    "it is seen: " + _LOOK + ", at times of your own",
    "unlogged": "{relation}, or a part of it, is UNLOGGED (a crash empties it) or a foreign table (written elsewhere), and nothing "
    "notes that, so its log is not believed: make it LOGGED, and its parts local; until then "
    + _LOOK,
    "inherited": "{relation} is a partition or child of another table, and rows that are written by the name of that one fire no "
    "trigger here: build a shard of the whole table with a filter, or " + _LOOK,
    "moving filter": "the filter reads more than the row (a clock, a setting, another table), so rows come and go while "
    "nothing in {relation} changes: build the shard anew with a filter of fixed values; until then "
    + _LOOK,
    "disarmed": "triggers of the watch on {relation} were switched off or dropped: "
    + _LOOK
    + _SETTLE,
    "other columns": "columns of {relation} were renamed, swapped or dropped since they were read: "
    + _LOOK
    + _SETTLE,
    "begun later": "the watch on {relation} began after the generation was read: "
    + _LOOK
    + _SETTLE,
    "pruned": "changes since the generation was read are forgotten: " + _LOOK + _SETTLE,
    "rewritten": "{relation} was rewritten, or a child of it was attached or detached: "
    + _LOOK
    + _SETTLE,
    "not compared": "a statement changed {relation} in a way that the watch could not compare, so any row may have "
    "moved: " + _LOOK + _SETTLE,
}
WHY = {
    "fresh": "",
    "rebuild": "{relation} was truncated, or most of it moved" + _SETTLE,
    "deleted": "more rows were deleted than the policy allows" + _SETTLE,
    "changed": "more rows moved than the policy allows" + _SETTLE,
    "age": "the generation is older than max_age_s" + _SETTLE,
}


@dataclass(frozen=True, slots=True)
class Moved:
    """What may have moved: `ids` int64 ascending, of which `rows` are there now; the others are gone. Which of
    them really differ, the caller sees by their digests. `state` holds no content hash of its own unless it
    was computed by the database. complete: False when more moved than `ids` says."""

    state: SourceState
    ids: Ids
    rows: RowSet
    complete: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """Bounds of one shard ('*': the defaults); None takes the default, and among the defaults it means never.
    Fractions of the rows at the last build; ages and quiet period in seconds."""

    shard: str
    max_changed_fraction: float | None = None
    max_deleted_fraction: float | None = None
    rebuild_fraction: float | None = None
    min_recall: float | None = None
    max_age_s: float | None = None
    quiet_period_s: float | None = None


POLICY_FIELDS = tuple(item.name for item in fields(Policy) if item.name != "shard")


def watch(database: Database, source: Source) -> None:
    """Keep every change of the source's rows from the next snapshot on. Costs two look-ups where that is so
    already; else it waits for writers in flight, never for readers, and gives up as DatabaseUnavailable naming the
    writer that does not end. A filter whose answer changes by itself is written down for the verdict. What takes no
    triggers from this role, or is to be left alone (`unwatch`), is left unwatched. SchemaError for a relation or
    column that is not there."""
    quoted(source.relation)
    columns = [*source.columns, *(["*"] if source.filter else [])]
    with database.session() as connection:
        kind = connection.execute(query("relation_kind"), {"relation": source.relation}).fetchone()
        if kind is None:
            raise SchemaError(f"there is no relation {source.relation!r} in this database")
        _keep_verdict_of_filter(connection, source)
        if kind[0] not in ("r", "p"):
            return  # a view has no rows of its own to watch: its shard is audited instead
        require_integer_ids(connection, source)
        require_all_rows(connection, source.relation, kind[1])
        wanted = {
            "relation": source.relation,
            "id": source.id_column,
            "vector": source.vector_column,
            "columns": columns,
        }
        # A role that may read a relation need not own it; its shard is audited like that of a view.
        try:
            for number, where in connection.execute(query("watches_from_elsewhere")).fetchall():
                forget = partial(connection.execute, query("forget_watch"), {"watch": number})
                briefly_locked(connection, where, f"the table of watch {number}", READERS, forget)
            arm = partial(connection.execute, query("watch"), wanted)
            briefly_locked(connection, kind[1], source.relation, WRITERS, arm)
        except psycopg.errors.InsufficientPrivilege:
            return
        except psycopg.errors.UndefinedColumn as fault:
            missing = str(fault.diag.message_primary).rpartition(" has no column ")[2]
            raise SchemaError(
                f"relation {source.relation!r} has no column {missing!r}: if it had, give the column its name back, or "
                "build the shard anew from the columns that are there"
            ) from fault


def _keep_verdict_of_filter(connection: Connection, source: Source) -> None:
    """A role that may only read keeps none, as before there were any: who built the shard, or migrated, has."""
    if not source.filter:
        return
    asked = {"relation": source.relation, "filter": source.filter}
    try:
        with connection.transaction():
            connection.execute(query("judge_filter"), asked)
    except (*NO_CONDITION, psycopg.errors.InsufficientPrivilege):
        return


def require_fixed_filter(database: Database, source: Source) -> None:
    """SchemaError for a filter whose answer for a row may change while the row does not: by the clock, a setting,
    the role, another table, or a function that the server does not call immutable."""
    quoted(source.relation)
    with database.session() as connection:
        fault = _fault_of_filter(connection, source)
    if fault:
        raise SchemaError(
            f"the filter {source.filter!r} reads {fault}: rows would come and go while nothing in {source.relation} changes, "
            "and nobody could tell that the shard is stale; compare columns with fixed values, name the time zone "
            "(at time zone 'UTC'), or keep the answer in a column of its own"
        )


def _fault_of_filter(connection: Connection, source: Source) -> str | None:
    """None as well for a filter that is no condition: who reads the rows says that. In a transaction, so that nothing of
    the trial is left."""
    if not source.filter:
        return None
    asked = {"relation": source.relation, "filter": source.filter}
    try:
        with connection.transaction():
            row = connection.execute(query("filter_fault"), asked).fetchone()
    except psycopg.errors.InsufficientPrivilege as fault:
        raise SettingsError(
            f"role {connection.info.user!r} may not try the filter {source.filter!r} ({fault.diag.message_primary}): run "
            f'`grant temporary on database "{connection.info.dbname}" to "{connection.info.user}"` as its owner'
        ) from fault
    except NO_CONDITION:
        return None
    assert row is not None
    return None if row[0] is None else str(row[0])


@dataclass(frozen=True, slots=True)
class Unwatched:
    """watches: how many went, with four triggers and a function each; shards: whose changes nobody sees now."""

    relation: str
    watches: int
    shards: tuple[str, ...]


def unwatch(database: Database, name: str) -> Unwatched:
    """Take the fabric's triggers off a relation, given by its name or that of a shard made of it, and make none
    on it until `allow_watch`. Waits for readers and writers in flight, a moment at a time, and gives up as
    DatabaseUnavailable naming them. UsageError when there is neither."""
    with database.session() as connection:
        oid, relation = _relation_of(connection, name)
        forget = partial(connection.execute, query("unwatch"), {"relation": oid})
        row = briefly_locked(connection, oid, relation, READERS, forget).fetchone()
        assert row is not None
        return Unwatched(relation, int(row[0]), _shards_of(connection, oid))


def allow_watch(database: Database, name: str) -> tuple[str, ...]:
    """Undo `unwatch`: the next refresh or audit of a shard of that relation watches it again. Returns its
    shards."""
    with database.session() as connection:
        oid, _ = _relation_of(connection, name)
        connection.execute(query("allow_watch"), {"relation": oid})
        return _shards_of(connection, oid)


def _relation_of(connection: Connection, name: str) -> tuple[int, str]:
    require_text(name, "the name of a shard or relation")
    row = connection.execute(query("relation_of"), {"name": name}).fetchone()
    if row is None or row[0] is None:
        raise UsageError(
            f"there is neither a shard nor a relation {name!r}: `fabric receipt list` names the shards, and a relation is "
            "written schema.table as the database has it"
        )
    return int(row[0]), row[1] or name


def _shards_of(connection: Connection, oid: int) -> tuple[str, ...]:
    rows = connection.execute(query("shards_of_relation"), {"relation": oid}).fetchall()
    return tuple(row[0] for row in rows)


def require_shard(database: Database, name: str) -> None:
    """UsageError when no generation of a shard of this name was ever published."""
    require_text(name, "the name of a shard")
    with database.session() as connection:
        known = [row[0] for row in connection.execute(query("shard_names")).fetchall()]
    if name not in known:
        raise UsageError(f"there is no shard {name!r}; `fabric receipt list` names them")


def require_text(text: str, what: str) -> None:
    """UsageError for what no database text is: a NUL, or bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        raise UsageError(f"{what} is {text!r}; it must be UTF-8 text") from fault
    if "\0" in text:
        raise UsageError(f"{what} is {text!r}; it must be text without a NUL")


def staleness(database: Database, shard: str | None = None) -> list[Staleness]:
    """Verdicts on the current generations, of one shard or of all, by name."""
    with database.session() as connection:
        rows = connection.execute(query("staleness"), {"shard": shard}).fetchall()
    return [Staleness(*row) for row in rows]


def await_stale(
    database: Database, shard: str | None = None, *, within_s: float
) -> list[Staleness]:
    """`staleness`, as soon as one verdict is not fresh, or after `within_s` seconds. Rung by the doorbell, and
    the view is read at intervals all the same."""
    end = time.monotonic() + within_s
    found = staleness(database, shard)
    if not within_s > 0:  # nan neither
        return found
    with Doorbell(database) as bell:
        while True:
            found = staleness(database, shard)  # after LISTEN, so that no ring falls between
            left = end - time.monotonic()
            if left <= 0 or any(item.verdict != "fresh" for item in found):
                return found
            bell.wait(min(left, POLL_S))


def read_moved(database: Database, name: str, generation: int, source: Source) -> Moved:
    """Ids in the log since generation `generation` of shard `name` was read, and their rows as they are now.
    UsageError when that generation is not the current one."""
    with database.session() as connection, frozen(connection):
        ids = _ids_of(copy_bytes(connection, compose("copy_moved_ids", shard=sql.Literal(name))))
        chosen = compose(
            "in_moved_ids", id=sql.Identifier(source.id_column), shard=sql.Literal(name)
        )
        described = describe(connection, source)
        require_ids(connection, source, described)
        rows = copy_rows(connection, source, described.encoding, chosen)
        made_by = fingerprints(connection, source, described)
        state = state_of(connection, database, source, described, NOTHING, made_by)
        # last: from the read on the relation is locked against a rewrite, which a snapshot does not hide
        log = connection.execute(query("movement"), {"shard": name}).fetchone()
        if log is None or log[0] != generation:
            raise UsageError(
                f"generation {generation} of shard {name!r} is not the current one; read again"
            )
    return Moved(state, ids, rows, log[1] == "complete" and not log[2])


def read_buckets(database: Database, source: Source, then: ContentHash) -> Moved:
    """Compare bucket sums, computed by the database, with `then`; rows and ids are those of the buckets that
    differ. The caller adds the ids it knows in these buckets: what is gone has no row to be found by."""
    with database.session() as connection, frozen(connection):
        described = describe(connection, source)
        content = content_by_sql(connection, source, described.encoding)
        made_by = fingerprints(connection, source, described)
        state = state_of(connection, database, source, described, content, made_by)
        rows = _rows_in(connection, source, described, content.moved_buckets(then))
    return Moved(state, rows.ids, rows, True)


def record_audit(
    database: Database,
    name: str,
    generation: int,
    snapshot: str,
    *,
    relation_files: str | None,
    inserted: Ids,
    updated: Ids,
    deleted: Ids,
) -> None:
    values = {
        "shard": name,
        "generation": generation,
        "snapshot": snapshot,
        "relation_files": relation_files,
    }
    ids = {"inserted": inserted, "updated": updated, "deleted": deleted}
    with database.session() as connection:
        connection.execute(
            query("record_audit"), values | {key: item.tolist() for key, item in ids.items()}
        )


def prune_changes(database: Database) -> int:
    with database.session() as connection:
        row = connection.execute(query("prune_changes")).fetchone()
    return int(row[0]) if row else 0


def policies(database: Database) -> list[Policy]:
    with database.session() as connection:
        return [Policy(*row) for row in connection.execute(query("policies")).fetchall()]


def set_policy(database: Database, shard: str, changes: Mapping[str, float | None]) -> Policy:
    """Change bounds of a shard, or of DEFAULTS. UsageError for an unknown bound or one out of range."""
    unknown = sorted(set(changes) - set(POLICY_FIELDS))
    if unknown:
        raise UsageError(f"{unknown} is no bound of a policy; those are {', '.join(POLICY_FIELDS)}")
    for name, value in changes.items():
        top = AGE_S_MAX if name.endswith("_s") else 1.0
        if value is not None and not 0 <= value <= top:
            raise UsageError(f"{name} is {value}; it must lie between 0 and {top:g}")
        if name == "max_age_s" and value == 0:
            raise UsageError("max_age_s is 0; it must be above 0, or nothing for no bound on age")
    if shard == DEFAULTS and any(
        changes.get(name, 0) is None
        for name in POLICY_FIELDS
        if name not in ("min_recall", "max_age_s")
    ):
        raise UsageError("the defaults need a number for everything but min_recall and max_age_s")
    values = dict.fromkeys(POLICY_FIELDS) | dict(changes)
    given = {f"set_{name}": name in changes for name in POLICY_FIELDS}
    with database.session() as connection, connection.transaction():
        connection.execute(query("add_policy"), {"shard": shard})
        row = connection.execute(
            query("set_policy"), {"shard": shard, **values, **given}
        ).fetchone()
    assert row is not None
    return Policy(*row)


def ring(connection: Connection, relation: str) -> None:
    """Say that rows of `relation` moved, to whoever listens; nothing where nobody watches it. In a statement
    of its own, after the writer's commit."""
    connection.execute(query("ring"), {"relation": relation})


class Doorbell:
    """Waits for a ring; `wait` returns at the latest after `POLL_S`, because a ring may be lost and the view
    is the truth."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection = database.connect()
        with translated(database.url):
            self._connection.execute(sql.SQL("listen {}").format(sql.Identifier(CHANNEL)))

    def __enter__(self) -> Doorbell:
        return self

    def __exit__(self, *fault: object) -> None:
        self._connection.close()

    def wait(self, timeout_s: float = POLL_S) -> list[str]:
        """Relations that were rung for, each once; none when the time ran out. DatabaseUnavailable when the
        connection is gone: rings may have been missed, make a new one and read the view."""
        with translated(self._database.url):
            found = self._rung(timeout_s)
            rung = {notice.payload for notice in found}
            # what arrived while we looked
            rung |= {notice.payload for notice in self._rung(0)} if rung else set()
        return sorted(rung)

    def _rung(self, timeout_s: float) -> Iterator[Any]:
        yield from self._connection.notifies(timeout=timeout_s, stop_after=1)


NOTHING = ContentHash(0, 0, 0, (0,) * BUCKETS)


def _rows_in(
    connection: Connection, source: Source, described: Described, buckets: list[int]
) -> RowSet:
    chosen = sql.SQL("({} & {}) = any ({}::bigint[])").format(
        sql.Identifier(source.id_column), sql.Literal(BUCKETS - 1), sql.Literal(buckets)
    )
    return copy_rows(connection, source, described.encoding, chosen)


def _ids_of(raw: bytes) -> Ids:
    body = raw[COPY_HEADER : len(raw) - COPY_TRAILER]
    rows = np.frombuffer(body, np.dtype([("fields", ">i2"), ("size", ">i4"), ("id", ">i8")]))
    return rows["id"].astype(np.int64)
