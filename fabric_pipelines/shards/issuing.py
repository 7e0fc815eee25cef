"""Issue the receipt of a published generation: the row in Postgres is the truth, receipt.json a copy beside it.

Everything in the identity comes from the generation's manifest, so a receipt can be issued at any time after
publishing, by anyone, and twice is once. Only quality is measured here. It lies beside building, since whoever lays an
increment over a generation first issues the receipt that its publisher, killed after the row, did not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.vectors import GenerationRow
from fabric_pipelines.errors import CorruptionFound, StorageFailed
from fabric_pipelines.records.receipt import Receipt
from fabric_pipelines.shards import canary
from fabric_pipelines.shards.disk import DISK, Disk
from fabric_pipelines.shards.generation import Generation, published_folder
from fabric_pipelines.shards.manifest import Increment, ShardManifest
from fabric_pipelines.shards.quality import measure
from fabric_pipelines.shards.scrub import damaged_files
from fabric_pipelines.shards.shard import Shard, open_generation
from fabric_pipelines.shards.store import VectorStore, store_of

RECEIPT_FILE = "receipt.json"


def issue(
    db: Database | VectorStore,
    root: Path,
    name: str,
    *,
    number: int | None = None,
    parents: Sequence[str] = (),
    quality: Mapping[str, Any] | None = None,
    disk: Disk = DISK,
) -> Receipt:
    """The receipt of generation `number` (default: the current one) of shard `name`, stored. quality: measured
    here unless given; answers to the canaries come with it. parents: receipts beside those the build recorded."""
    store = store_of(db)
    generation = open_generation(store, root, name, number)
    receipt = receipt_of(generation, (*parents, *_left_out(store, generation)), quality)
    statement: Mapping[str, Any] = receipt.to_statement()
    added = store.insert_receipt(
        receipt_id=receipt.receipt_id,
        shard=name,
        generation=generation.number,
        statement=statement,
    )
    if not added:  # the row stays as it is, and the copy is a copy of it
        kept = store.find_receipt(receipt.receipt_id)
        assert kept is not None
        statement, receipt = kept.statement, Receipt.from_statement(kept.statement)
    content = json.dumps(statement, sort_keys=True, indent=1, ensure_ascii=False)
    try:
        disk.replace_file(generation.folder / RECEIPT_FILE, content.encode() + b"\n")
    except StorageFailed as fault:
        raise StorageFailed(
            f"receipt {receipt.receipt_id[:12]} is in the database, its copy beside the generation is not: {fault}. `fabric "
            f"receipt issue {name} --generation {generation.number}` writes the copy once {generation.folder} can be written"
        ) from fault
    return receipt


def issue_late(
    db: Database | VectorStore,
    root: Path,
    name: str,
    *,
    number: int | None = None,
    disk: Disk = DISK,
) -> Receipt:
    """As issue, for files that have lain a while: they are hashed first, so that no quality and no canary is
    measured on rot. CorruptionFound names what is damaged, and no receipt is issued."""
    damage = next(damaged_files(open_generation(db, root, name, number)), None)
    if damage is not None:
        raise CorruptionFound(f"no receipt is issued over damaged files: {damage}")
    return issue(db, root, name, number=number, disk=disk)


def receipt_for_child(
    store: VectorStore, root: Path, row: GenerationRow, disk: Disk = DISK
) -> list[str]:
    """Id of the receipt that a generation laid over `row` has as its parent; issued now, with its copy, where a kill
    after publishing left none. Call it under the shard's lease. Raises what issue_late raises."""
    found = store.find_receipts(shard=row.name, generation=row.generation, limit=1)
    if found and (published_folder(root, row) / RECEIPT_FILE).is_file():
        return [found[0].receipt_id]
    return [issue_late(store, root, row.name, number=row.generation, disk=disk).receipt_id]


def _left_out(store: VectorStore, generation: Generation) -> list[str]:
    """The parent's receipt for an increment that was laid before its parent had one."""
    manifest = generation.manifest
    if manifest.increment is None or manifest.parents:
        return []
    number = manifest.increment.parent_generation
    found = store.find_receipts(shard=manifest.name, generation=number, limit=1)
    return [row.receipt_id for row in found]


def receipt_of(
    generation: Generation, parents: Sequence[str] = (), quality: Mapping[str, Any] | None = None
) -> Receipt:
    with Shard(generation) as shard:
        measured = measure(shard) if quality is None else dict(quality)
        known = {"k": canary.K, "answers": canary.answers(shard)}
    manifest = generation.manifest
    return Receipt(
        source=manifest.source,
        recipe=manifest.recipe,
        outputs=outputs(manifest, generation.manifest_sha256),
        parents=tuple(sorted({*manifest.parents, *parents})),
        quality={**measured, "canaries": known},
    )


def outputs(manifest: ShardManifest, manifest_sha256: str) -> dict[str, Any]:
    """The `outputs` part: which generation, and every file with its two digests."""
    fields = manifest.as_json()
    return {
        "shard": manifest.name,
        "manifest_sha256": manifest_sha256,
        **{
            key: fields[key]
            for key in (
                "generation",
                "token",
                "dim",
                "dtype",
                "metric",
                "rows",
                "quarantined",
                "files",
            )
        },
        "lists": manifest.lists,
        **({"increment": _summary(manifest.increment)} if manifest.increment else {}),
    }


def _summary(increment: Increment) -> dict[str, Any]:
    """What the layers are, without their offsets: those stand in the manifest, whose digest is here too."""
    return {
        "parent_generation": increment.parent_generation,
        "base_generation": increment.base_generation,
        "layers": len(increment.layers),
        "tombstones": increment.tombstones,
        "base_recall": increment.base_recall,
    }
