"""A trial: open a shard as a service would, check every byte and its canaries, say what that took, let it go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.device.card import Card
from fabric_pipelines.errors import CorruptionFound
from fabric_pipelines.shards import canary
from fabric_pipelines.shards.opening import open_shard
from fabric_pipelines.shards.residence import DeviceShard
from fabric_pipelines.shards.scrub import damaged_files
from fabric_pipelines.shards.store import VectorStore, store_of
from fabric_pipelines.telemetry import timed


@dataclass(frozen=True, slots=True)
class Trial:
    """bytes: vectors and ids as they lie in the files. device_bytes: counted on the card, 0 on the CPU. seconds: from
    the question for the current generation to a shard that may be served."""

    shard: str
    generation: int
    device: str
    rows: int
    bytes: int
    device_bytes: int
    canaries_of_receipt: bool
    seconds: float
    gb_per_s: float


def trial(
    db: Database | VectorStore,
    root: Path,
    name: str,
    *,
    device: str | Card = "cpu",
    dtype: str = "<f4",
) -> Trial:
    """Raises what open_shard raises; CorruptionFound for the first damaged file or changed canary."""
    store = store_of(db)
    with timed() as clock:
        shard = open_shard(store, root, name, device=device, dtype=dtype)
        with shard:
            known = canary.known_answers(store, shard.generation)
            if not isinstance(shard, DeviceShard):  # a card has checked both
                for difference in damaged_files(shard.generation):
                    raise CorruptionFound(str(difference))
                for difference in canary.changed_answers(shard, known) if known else ():
                    raise CorruptionFound(str(difference))
            size = sum(block.vectors.nbytes + block.ids.nbytes for block in shard.blocks)
            on_card = shard.copy.bytes if isinstance(shard, DeviceShard) and shard.copy else 0
    return Trial(
        shard=name,
        generation=shard.generation.number,
        device=device if isinstance(device, str) else device.name,
        rows=shard.manifest.rows,
        bytes=size,
        device_bytes=on_card,
        canaries_of_receipt=known is not None,
        seconds=clock["seconds"],
        gb_per_s=size / clock["seconds"] / 1e9,
    )
