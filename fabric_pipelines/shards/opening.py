"""One call opens a shard: mapped on the CPU, or copied to a card, with the same answers."""

from __future__ import annotations

import re
from pathlib import Path

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.device.card import Card
from fabric_pipelines.device.gpu import Gpu
from fabric_pipelines.errors import UsageError
from fabric_pipelines.shards.residence import Residence
from fabric_pipelines.shards.shard import Shard, open_generation
from fabric_pipelines.shards.store import VectorStore

_CUDA = re.compile(r"cuda(?::(\d+))?")


def open_shard(
    db: Database | VectorStore,
    root: Path,
    name: str,
    number: int | None = None,
    *,
    device: str | Card = "cpu",
    dtype: str = "<f4",
    budget_bytes: int | None = None,
) -> Shard:
    """Generation `number` (default: the current one) of shard `name`, which the reader keeps until it closes it.

    device: "cpu" maps the files; "cuda" or "cuda:N" (or an open Card) copies them to that card under the shard's device
    lease, which closing gives back; `Residence` holds several generations under one lease. dtype and
    budget_bytes as of DeviceCopy. Raises UsageError, CorruptionFound, DeviceRefused, AlreadyRunning, FencingLost."""
    if device == "cpu":
        return Shard(open_generation(db, root, name, number))
    card = card_of(device) if isinstance(device, str) else device
    try:
        residence = Residence(db, root, name, card)
        try:
            shard = residence.open(number, dtype=dtype, budget_bytes=budget_bytes)
        except BaseException:
            residence.close()
            raise
    except BaseException:
        if isinstance(device, str):
            card.close()
        raise
    shard.also_close = [residence.close, *([card.close] if isinstance(device, str) else [])]
    return shard


def card_of(device: str) -> Card:
    """The card that `device` names. UsageError for another word, DeviceRefused where there is no such card."""
    found = _CUDA.fullmatch(device)
    if not found:
        raise UsageError(f"device {device!r} is unknown; use 'cpu', 'cuda' or 'cuda:N'")
    return Gpu(int(found[1] or 0))
