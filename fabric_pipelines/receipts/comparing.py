"""How two receipts differ: field by field, and row by row where both generations can still be read.

Files that both list under one place are compared by their digests; bucket sums are not listed one by one,
since the rows say it better. Changes nothing, and asks the database for the two receipts only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.vectors import ReceiptRow
from fabric_pipelines.errors import FabricError
from fabric_pipelines.receipts.source_check import named_moves, rows_of
from fabric_pipelines.receipts.verification import find
from fabric_pipelines.records.receipt import Receipt
from fabric_pipelines.shards.difference import Difference, field_differences
from fabric_pipelines.shards.manifest import FileEntry, file_entries
from fabric_pipelines.shards.shard import Shard, open_generation
from fabric_pipelines.shards.store import VectorStore, source_of, store_of

BETWEEN = "{expected} in the first, {found} in the second"


@dataclass(frozen=True, slots=True)
class Diff:
    same: bool
    first: str
    second: str
    differences: tuple[Difference, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def diff(db: Database | VectorStore, root: Path, first: str, second: str) -> Diff:
    """Compare two receipts, by id or unambiguous prefix. UsageError when there is no such receipt,
    SchemaError when one was changed after it was issued."""
    store = store_of(db)
    rows = find(store, first), find(store, second)
    one, two = (Receipt.from_statement(row.statement) for row in rows)
    found = (
        () if one.receipt_id == two.receipt_id else tuple(_differences(store, root, rows, one, two))
    )
    return Diff(not found, rows[0].receipt_id, rows[1].receipt_id, found)


def _differences(
    store: VectorStore, root: Path, rows: tuple[ReceiptRow, ReceiptRow], one: Receipt, two: Receipt
) -> Iterator[Difference]:
    for part in ("source", "recipe", "outputs"):
        left, right = (_plain(getattr(receipt, part)) for receipt in (one, two))
        yield from field_differences(part, left, right, BETWEEN)
    yield from field_differences("parents", list(one.parents), list(two.parents), BETWEEN)
    yield from _row_differences(store, root, rows, one, two)
    yield from _file_differences(_by_place(one), _by_place(two))
    yield from field_differences("quality", dict(one.quality), dict(two.quality), BETWEEN)


def _file_differences(
    first: Mapping[tuple[str, int], FileEntry], second: Mapping[tuple[str, int], FileEntry]
) -> Iterator[Difference]:
    for place in sorted(first.keys() | second.keys()):
        one, two = first.get(place), second.get(place)
        known = one or two
        assert known is not None
        left, right = (entry.sha256 if entry else "none" for entry in (one, two))
        if left != right:
            how = "other bytes" if one and two else f"only in the {'first' if one else 'second'}"
            yield Difference(f"files.{place[0]}[{place[1]}]", left, right, f"{known.label}: {how}")


def _plain(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in ("bucket_sums", "files")}


def _by_place(receipt: Receipt) -> dict[tuple[str, int], FileEntry]:
    return {(entry.role, entry.first_list): entry for entry in file_entries(receipt)}


def _row_differences(
    store: VectorStore, root: Path, rows: tuple[ReceiptRow, ReceiptRow], one: Receipt, two: Receipt
) -> Iterator[Difference]:
    if one.source["content_hash"] == two.source["content_hash"]:
        return
    names = sorted(
        set(source_of(one.source).hashed_columns) & set(source_of(two.source).hashed_columns)
    )
    try:
        shards = [Shard(open_generation(store, root, row.shard, row.generation)) for row in rows]
    except FabricError as fault:
        yield Difference(
            "source.rows",
            "two generations",
            "unreadable",
            f"which rows differ, nobody can say: {fault}",
        )
        return
    then, now = (rows_of(shard, names) for shard in shards)
    for kind, sentence in named_moves(then, now, one.source["id_column"]):
        yield Difference(
            f"source.rows.{kind}",
            one.source["content_hash"],
            two.source["content_hash"],
            f"from the first to the second: {sentence}",
        )
    for shard in shards:
        shard.close()
