"""Issue the receipt of a published generation: the row in Postgres is the truth, receipt.json a copy beside it.

Everything in the identity comes from the generation's manifest, so a receipt can be issued at any time after
publishing, by anyone, and twice is once. Only quality is measured here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.receipts.quality import measure
from fabric_pipelines.records.receipt import Receipt
from fabric_pipelines.shards import canary
from fabric_pipelines.shards.disk import DISK, Disk
from fabric_pipelines.shards.generation import Generation
from fabric_pipelines.shards.manifest import Increment, ShardManifest
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
    receipt = receipt_of(generation, parents, quality)
    statement = receipt.to_statement()
    store.insert_receipt(
        receipt_id=receipt.receipt_id,
        shard=name,
        generation=generation.number,
        statement=statement,
    )
    content = json.dumps(statement, sort_keys=True, indent=1, ensure_ascii=False)
    disk.replace_file(generation.folder / RECEIPT_FILE, content.encode() + b"\n")
    return receipt


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
