"""Verify a receipt: is everything it says still so? Reads all, changes nothing, names each difference.

From the receipt outwards: its own hash, its parents, its copy beside the shard, the generation's row, the manifest, every
file to the last byte, and the rows in the database. A missing thing ends the checks that need it and no
others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.vectors import GenerationRow, ReceiptRow
from fabric_pipelines.errors import FabricError, SchemaError, UsageError
from fabric_pipelines.ids import digest
from fabric_pipelines.receipts.source_check import source_differences
from fabric_pipelines.records.receipt import Receipt
from fabric_pipelines.shards.blocks import map_array, map_columns
from fabric_pipelines.shards.canary import changed_answers
from fabric_pipelines.shards.difference import Difference, field_differences
from fabric_pipelines.shards.generation import Generation, published_folder
from fabric_pipelines.shards.issuing import RECEIPT_FILE, outputs
from fabric_pipelines.shards.logical import array_sha256, table_sha256
from fabric_pipelines.shards.manifest import FileEntry, ShardManifest, read_manifest
from fabric_pipelines.shards.scrub import damaged_files
from fabric_pipelines.shards.shard import Shard
from fabric_pipelines.shards.store import VectorStore, store_of

ID_LENGTH = 64
IDENTITY = ("source", "recipe", "outputs", "parents")


@dataclass(frozen=True, slots=True)
class Verification:
    """pruned: the sentence on the bytes that were pruned by policy, which are not compared then; all else is."""

    ok: bool
    receipt_id: str
    shard: str
    generation: int
    differences: tuple[Difference, ...]
    pruned: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def verify(db: Database | VectorStore, root: Path, receipt_id: str) -> Verification:
    """Check receipt `receipt_id` (or an unambiguous prefix). UsageError when there is none."""
    store = store_of(db)
    row = find(store, receipt_id)
    published = store.current_generation(row.shard, row.generation)
    differences = tuple(_differences(store, root, row, published))
    now = store.current_generation(row.shard, row.generation)
    if now is not None and now.pruned and not (published and published.pruned):
        published = now  # pruned while it was read
        differences = tuple(_differences(store, root, row, published))
    return Verification(
        not differences,
        row.receipt_id,
        row.shard,
        row.generation,
        differences,
        published.pruned if published else None,
    )


def find(store: VectorStore, receipt_id: str) -> ReceiptRow:
    row = store.find_receipt(receipt_id)
    if row is None:
        raise UsageError(
            f"there is no receipt {receipt_id!r} in this database; `fabric receipt list` shows them"
        )
    return row


def _differences(
    store: VectorStore, root: Path, row: ReceiptRow, published: GenerationRow | None
) -> Iterator[Difference]:
    predicate = _mapping(row.statement.get("predicate"))
    changed = list(_self_differences(row, predicate))
    yield from changed
    yield from _parent_differences(store, row, predicate)
    generation = None
    if published is None:
        yield Difference(
            "generation",
            str(row.generation),
            "none",
            f"generation {row.generation} of shard {row.shard!r} is not published in this database",
        )
    else:
        yield from _row_differences(predicate, published)
        try:
            generation = None if published.pruned else _open(root, published)
        except FabricError as fault:
            yield Difference("manifest.json", published.manifest_sha256, "unreadable", str(fault))
    shard = None
    if generation is not None:
        yield from _copy_differences(generation.folder / RECEIPT_FILE, row.statement)
        yield from _manifest_differences(predicate, generation)
        damage = list(damaged_files(generation))
        yield from damage
        yield from _logical_differences(generation, {found.what for found in damage})
        shard = None if damage else Shard(generation)
    if shard is not None:
        yield from _canary_differences(predicate, shard)
    # A receipt that was changed says nothing about the source; the published manifest still does.
    intact = not any(found.what == "receipt_id" for found in changed)
    fields = predicate.get("source") if intact else generation and generation.manifest.source
    try:
        yield from source_differences(store, _mapping(fields), shard)
    finally:
        if shard is not None:
            shard.close()


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _self_differences(row: ReceiptRow, predicate: Mapping[str, Any]) -> Iterator[Difference]:
    """The id is the hash of the identity; the statement's head repeats what the identity says."""
    found = digest({name: predicate.get(name) for name in IDENTITY})
    if found != row.receipt_id:
        yield Difference(
            "receipt_id",
            row.receipt_id,
            found,
            f"receipt {row.receipt_id[:12]} was changed after it was issued: its content hashes to "
            f"{found[:12]}",
        )
        return
    try:
        expected = Receipt.from_statement(row.statement).to_statement()
    except SchemaError as fault:
        yield Difference("receipt", row.receipt_id, "unreadable", str(fault))
        return
    yield from field_differences(
        "statement", expected, dict(row.statement), "{expected} by its content, {found} written"
    )


def _parent_differences(
    store: VectorStore, row: ReceiptRow, predicate: Mapping[str, Any]
) -> Iterator[Difference]:
    """Each parent is a receipt of this database, and one of them is that of the generation laid under this one."""
    parents = predicate.get("parents")
    named = [str(parent) for parent in parents] if isinstance(parents, list) else []
    # a shorter one would be looked up as a prefix
    found = {name: store.find_receipt(name) if len(name) == ID_LENGTH else None for name in named}
    for parent, held in found.items():
        if held is None:
            yield Difference(
                "parents", parent, "none", f"parent receipt {parent[:12]} is not in this database"
            )
    increment = _mapping(_mapping(predicate.get("outputs")).get("increment"))
    number = increment.get("parent_generation")
    laid_over = [held for held in found.values() if held and held.generation == number]
    if number is not None and not any(held.shard == row.shard for held in laid_over):
        yield Difference(
            "parents",
            f"a receipt of generation {number}",
            "none",
            f"generation {row.generation} was laid over generation {number}, and no parent is a receipt of that: "
            f"`fabric receipt issue {row.shard} --generation {number}`, then the same with {row.generation}, "
            "issues a receipt that has it",
        )


def _row_differences(predicate: Mapping[str, Any], row: GenerationRow) -> Iterator[Difference]:
    said = _mapping(predicate.get("outputs"))
    for name in ("generation", "token", "manifest_sha256"):
        yield from field_differences(
            f"outputs.{name}",
            said.get(name),
            getattr(row, name),
            "{expected} in the receipt, {found} in the generation's row",
        )


def _open(root: Path, row: GenerationRow) -> Generation:
    folder = published_folder(root, row)
    return Generation(folder, read_manifest(folder, row.manifest_sha256), row.manifest_sha256)


def _copy_differences(path: Path, statement: Mapping[str, Any]) -> Iterator[Difference]:
    try:
        copy = json.loads(path.read_bytes())
    except FileNotFoundError:
        yield Difference(RECEIPT_FILE, "a copy", "missing", f"{path} is missing")
        return
    except ValueError as fault:
        yield Difference(RECEIPT_FILE, "a copy", "unreadable", f"{path} is not JSON: {fault}")
        return
    yield from field_differences(
        RECEIPT_FILE, dict(statement), copy, "{expected} in the database, {found} in the file"
    )


def _manifest_differences(
    predicate: Mapping[str, Any], generation: Generation
) -> Iterator[Difference]:
    manifest = generation.manifest
    expected = {
        "source": manifest.source,
        "recipe": manifest.recipe,
        "outputs": outputs(manifest, generation.manifest_sha256),
    }
    for name, value in expected.items():
        yield from field_differences(
            name, predicate.get(name), value, "{expected} in the receipt, {found} in the manifest"
        )


def _logical_differences(generation: Generation, damaged: set[str]) -> Iterator[Difference]:
    """Files whose bytes are right must also mean what the manifest says."""
    for entry in generation.manifest.files:
        if entry.path in damaged:
            continue
        found = logical_of(generation.folder, generation.manifest, entry)
        if found != entry.logical_sha256:
            yield Difference(
                entry.path,
                entry.logical_sha256,
                found,
                f"{entry.label} holds other values than its logical digest says",
            )


def _canary_differences(predicate: Mapping[str, Any], shard: Shard) -> Iterator[Difference]:
    """Whole files must also be searched as they were; a receipt of older days has no canaries."""
    known = _mapping(_mapping(predicate.get("quality")).get("canaries")).get("answers")
    if known is None:
        return
    try:
        yield from changed_answers(shard, known)
    except (KeyError, TypeError, ValueError) as fault:
        yield Difference(
            "quality.canaries", "answers", "unreadable", f"the canaries' answers: {fault}"
        )


def logical_of(folder: Path, manifest: ShardManifest, entry: FileEntry) -> str:
    path = folder / entry.path
    if entry.role.endswith("columns"):
        return table_sha256(map_columns(path))
    dtype, shape = {
        "vectors": (manifest.dtype, (entry.rows, manifest.dim)),
        "ids": ("<i8", (entry.rows,)),
        "layer_vectors": (manifest.dtype, (entry.rows, manifest.dim)),
        "layer_ids": ("<i8", (entry.rows,)),
        "tombstones": ("<i8", (entry.rows,)),
        "centroids": ("<f8", (entry.lists, manifest.dim)),
        "marks": ("<u8", (entry.lists, 2)),
        "quarantine_ids": ("<i8", (entry.rows,)),
        "quarantine_vectors": (manifest.dtype, (entry.rows, manifest.dim)),
    }[entry.role]
    return array_sha256(map_array(path, dtype, shape))
