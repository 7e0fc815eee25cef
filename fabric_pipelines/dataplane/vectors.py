"""What shards and receipts keep in Postgres: leases with their fencing tokens, published generations, receipts.

Each question is one statement, and each answer the database's at that moment. Time is the database's own,
never a holder's clock. The rows that a shard is made of are read by source.py, what moved since by staleness.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from fabric_pipelines.dataplane.database import Connection, Database
from fabric_pipelines.dataplane.sql import query
from fabric_pipelines.errors import AlreadyRunning, FencingLost, UsageError


@dataclass(frozen=True, slots=True)
class ShardLease:
    name: str
    holder: str
    token: int


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A card that holds a shard now. generation: what it has loaded and checked, None until then."""

    name: str
    holder: str
    token: int
    expires_in_s: float
    generation: int | None
    loaded_at: datetime | None


@dataclass(frozen=True, slots=True)
class GenerationRow:
    """pruned_at: since when its bytes are gone by policy; then `manifest` is empty if a receipt says the same."""

    name: str
    generation: int
    token: int
    manifest_sha256: str
    manifest: Mapping[str, Any]
    published_at: datetime
    pruned_at: datetime | None = None
    pinned_at: datetime | None = None
    pin_reason: str | None = None

    @property
    def pruned(self) -> str | None:
        """What became of its bytes, in one sentence; None while they are kept."""
        if self.pruned_at is None:
            return None
        return (
            f"generation {self.generation} of shard {self.name!r}: its bytes were pruned by policy on "
            f"{self.pruned_at.astimezone(UTC):%Y-%m-%d} (setting shard_generations_kept); its receipt stays"
        )


@dataclass(frozen=True, slots=True)
class ReceiptRow:
    receipt_id: str
    shard: str
    generation: int
    statement: Mapping[str, Any]
    issued_at: datetime


@dataclass(frozen=True, slots=True)
class ReceiptEntry:
    """One line of the list of receipts. kept: "kept", "pinned" or "pruned", the bytes of its generation; None when this
    database has no such generation."""

    receipt_id: str
    shard: str
    generation: int
    issued_at: datetime
    kept: str | None


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


def acquire_device(database: Database, name: str, holder: str, *, ttl_s: float) -> ShardLease:
    """The exclusive right to hold shard `name` on a card, under a new token; nothing counts as loaded yet. Raises
    AlreadyRunning naming the holder while another card's lease is running."""
    with database.session() as connection:
        row = connection.execute(
            query("acquire_device"), {"name": name, "holder": holder, "ttl_s": ttl_s}
        ).fetchone()
        if row is None:
            held = connection.execute(query("device_holder"), {"name": name}).fetchone()
            assert held is not None
            raise AlreadyRunning(
                f"shard {name!r} is on the card {held[0]} (token {held[1]}) for another {held[2]:.0f} s "
                "at least; close it there, or open it here with device='cpu'"
            )
    return ShardLease(name, holder, int(row[0]))


def renew_device(database: Database, lease: ShardLease, *, ttl_s: float) -> None:
    """Raises FencingLost once the lease ran out or went to another card."""
    _device_step(database, "renew_device", lease, {"ttl_s": ttl_s})


def publish_device(database: Database, lease: ShardLease, *, generation: int) -> None:
    """`generation` is loaded and checked: said in one statement that checks the lease. Raises FencingLost."""
    _device_step(database, "publish_device", lease, {"generation": generation})


def release_device(database: Database, lease: ShardLease) -> bool:
    """Give the lease back; False if it was lost before."""
    with database.session() as connection:
        return connection.execute(query("release_device"), _lease_fields(lease)).rowcount == 1


def devices(database: Database, name: str | None = None) -> list[DeviceRow]:
    """Running device leases, of one shard or of all."""
    with database.session() as connection:
        rows = connection.execute(query("devices"), {"name": name}).fetchall()
    return [DeviceRow(*row) for row in rows]


def _device_step(
    database: Database, statement: str, lease: ShardLease, more: Mapping[str, Any]
) -> None:
    with database.session() as connection:
        done = connection.execute(query(statement), {**_lease_fields(lease), **more}).rowcount
    if done != 1:
        raise FencingLost(
            f"{lease.holder} no longer holds shard {lease.name!r} under device token {lease.token}: "
            "what it had loaded is released; open the shard again"
        )


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


def published(database: Database, name: str) -> list[GenerationRow]:
    """All that were ever published of shard `name`, oldest first."""
    with database.session() as connection:
        rows = connection.execute(query("published"), {"name": name}).fetchall()
    return [GenerationRow(*row) for row in rows]


def prune_generation(database: Database, lease: ShardLease, *, generation: int) -> bool:
    """Say that the bytes of `generation` go, under the lock that publication takes. False, and nothing changed, for one
    that is needed (current, pinned, under a pin, on a card) or pruned already. Raises FencingLost."""
    values = {**_lease_fields(lease), "generation": generation}
    with database.session() as connection, connection.transaction():
        connection.execute(query("durable_commits"))  # before the files go
        if connection.execute(query("lock_held_shard"), values).rowcount != 1:
            raise _fencing_lost(lease)
        done = connection.execute(query("prune_generation"), values).rowcount == 1
        if done:
            connection.execute(query("forget_audits"), values)
    return done


def pin_generation(database: Database, name: str, generation: int, reason: str) -> bool:
    """Keep `generation` and what its rebuild needs whatever the policy says. False when it is not there any more."""
    values = {"name": name, "generation": generation, "reason": reason}
    with database.session() as connection, connection.transaction():
        connection.execute(query("durable_commits"))
        connection.execute(query("lock_shard"), {"name": name})
        return connection.execute(query("pin_generation"), values).rowcount == 1


def unpin_generation(database: Database, name: str, generation: int) -> bool:
    """Leave `generation` to the policy again. False when it had no pin."""
    values = {"name": name, "generation": generation}
    with database.session() as connection:
        return connection.execute(query("unpin_generation"), values).rowcount == 1


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


def list_receipts(
    database: Database, *, shard: str | None = None, limit: int = 100
) -> tuple[list[ReceiptEntry], int]:
    """The newest `limit`, newest first, and how many there are."""
    with database.session() as connection:
        rows = connection.execute(
            query("list_receipts"), {"shard": shard, "limit": limit}
        ).fetchall()
    return [ReceiptEntry(*row[:-1]) for row in rows], rows[0][-1] if rows else 0


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
