"""Does the database still hold the rows that a receipt speaks of? If not: which rows moved.

The content hash answers in one pass of SQL. When it differs, the bucket sums say in which 1,024th of the ids to
look, and only there today's rows are compared with the rows that the generation holds, quarantined ones
included: each moved row is named, not merely counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.dataplane.content_hash import BUCKETS, ContentHash
from fabric_pipelines.dataplane.source import SourceRows, SourceState
from fabric_pipelines.errors import SchemaError
from fabric_pipelines.shards.difference import Difference, field_differences
from fabric_pipelines.shards.shard import Shard
from fabric_pipelines.shards.store import VectorStore, source_of

NAMED_MAX = 10
WHERE_FIELDS = ("cluster", "database", "relation_oid", "columns", "encoding")
SINCE_VERSION_2 = ("engine_fingerprints",)


def source_differences(
    store: VectorStore, fields: Mapping[str, Any], shard: Shard | None
) -> Iterator[Difference]:
    """`fields` is a receipt's source; `shard` the generation built from it, None when it cannot be read."""
    try:
        source, then = source_of(fields), content_then(fields)
        state = store.source_state(source)
    except SchemaError as fault:
        yield Difference("source", str(fields.get("relation")), "unreadable", str(fault))
        return
    yield from place_differences(fields, state)
    if state.content == then:
        return
    try:
        rows = store.read_source(source)
    except SchemaError as fault:  # such as a null where there was none
        yield Difference("source.rows", then.hex, state.content.hex, str(fault))
        return
    yield from moved_rows(rows, fields, shard)


def content_then(fields: Mapping[str, Any]) -> ContentHash:
    """The content hash that was written down. SchemaError when it is none."""
    try:
        return ContentHash.from_json(fields)
    except (KeyError, TypeError, ValueError) as fault:
        raise SchemaError(f"the source's content hash cannot be read: {fault}") from fault


def place_differences(fields: Mapping[str, Any], state: SourceState) -> Iterator[Difference]:
    """Another cluster, another relation under the same name, other column types, rows of another engine."""
    now = state.as_json()
    for name in (*WHERE_FIELDS, *(SINCE_VERSION_2 if state.source.hash_version >= 2 else ())):
        yield from field_differences(
            f"source.{name}",
            fields.get(name),
            now[name],
            "{expected} in the receipt, {found} in the database",
        )


def moved_rows(
    rows: SourceRows, fields: Mapping[str, Any], shard: Shard | None
) -> Iterator[Difference]:
    """Compare what was read now with what the receipt says, by bucket, then by row."""
    then = content_then(fields)
    buckets = then.moved_buckets(rows.state.content)
    relation = fields["relation"]
    if shard is None:
        yield Difference(
            "source.content_hash",
            then.hex,
            rows.state.content.hex,
            f"source {relation} moved in {len(buckets)} of {BUCKETS} buckets ({_named(buckets)}); the "
            "generation that would tell which rows is not readable",
        )
        return
    found = False
    names = source_of(fields).hashed_columns
    columns = {name: rows.columns[name] for name in names}
    now = Rows(rows.ids, np.asarray(rows.vectors, np.float32), columns)
    kept = _in_buckets(rows_of(shard, names), buckets)
    for kind, sentence in named_moves(kept, _in_buckets(now, buckets), fields["id_column"]):
        found = True
        yield Difference(
            f"source.rows.{kind}",
            then.hex,
            rows.state.content.hex,
            f"source {relation} moved: {sentence}",
        )
    if not found:  # the rows are those of the generation: then the receipt's numbers are not
        yield from field_differences(
            "source",
            {"content_hash": then.hex, "bucket_sums": list(fields["bucket_sums"])},
            {
                key: value
                for key, value in rows.state.content.as_json().items()
                if key in ("content_hash", "bucket_sums")
            },
            "{expected} in the receipt, {found} in the database",
        )


@dataclass(frozen=True, slots=True)
class Rows:
    ids: npt.NDArray[np.int64]
    vectors: npt.NDArray[np.float32]
    columns: Mapping[str, npt.NDArray[np.int64]]

    def at(self, rows: npt.NDArray[np.intp]) -> Rows:
        columns = {name: values[rows] for name, values in self.columns.items()}
        return Rows(self.ids[rows], self.vectors[rows], columns)


def rows_of(shard: Shard, names: Sequence[str]) -> Rows:
    """Indexed and quarantined rows, with the columns that the content hash covers."""
    out = shard.quarantined()
    columns, kept_out = shard.columns(), out.columns
    return Rows(
        np.concatenate([shard.ids(), out.ids]),
        np.concatenate([shard.vectors(), out.vectors]),
        {
            name: np.concatenate(
                [
                    columns.column(name).to_numpy(),
                    *([kept_out.column(name).to_numpy()] if len(out.ids) else []),
                ]
            )
            for name in names
        },
    )


def _in_buckets(rows: Rows, buckets: list[int]) -> Rows:
    chosen = np.flatnonzero(np.isin(rows.ids & (BUCKETS - 1), buckets))
    return rows.at(chosen[np.argsort(rows.ids[chosen])])


def named_moves(then: Rows, now: Rows, id_column: str) -> Iterator[tuple[str, str]]:
    """(kind, sentence) for each kind of move: added, removed, changed, or the column that changed."""
    for kind, ids in _compared(then, now):
        if len(ids):
            where = f"changed in {kind}" if kind in then.columns else kind
            yield (
                kind,
                f"{len(ids)} row{'s' if len(ids) > 1 else ''} {where} ({id_column} {_named(ids.tolist())})",
            )


def _compared(then: Rows, now: Rows) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """Vectors are compared by bits, so that a NaN equals itself and 0.0 is not -0.0."""
    yield "added", np.setdiff1d(now.ids, then.ids)
    yield "removed", np.setdiff1d(then.ids, now.ids)
    both, left, right = np.intersect1d(then.ids, now.ids, return_indices=True)
    if not len(both) or then.vectors.shape[1] != now.vectors.shape[1]:
        yield "changed", both
        return
    then, now = then.at(left), now.at(right)
    bits = [np.ascontiguousarray(rows.vectors).view(np.uint32) for rows in (then, now)]
    yield "changed", both[(bits[0] != bits[1]).any(axis=1)]
    for name, values in then.columns.items():
        yield name, both[values != now.columns[name]]


def _named(numbers: list[int]) -> str:
    more = len(numbers) - NAMED_MAX
    text = ", ".join(map(str, numbers[:NAMED_MAX]))
    return f"{text} and {more} more" if more > 0 else text
