"""What shards and receipts ask of the database, as one interface: rows, lease, generations, receipts.

Shards speak no SQL. `PostgresStore` passes each question to the data plane; tests may answer from memory
(testing.vector_store). It refuses to hold state: every answer is the database's at that moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fabric_pipelines.dataplane import source as sources
from fabric_pipelines.dataplane import staleness, vectors
from fabric_pipelines.dataplane.content_hash import ContentHash, Ids
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.source import Source, SourceRows, SourceState
from fabric_pipelines.dataplane.staleness import Moved, Staleness
from fabric_pipelines.dataplane.vectors import DeviceRow, GenerationRow, ReceiptRow, ShardLease
from fabric_pipelines.errors import SchemaError


class VectorStore(Protocol):
    def identity(self) -> tuple[str, str]:
        """(cluster id, database id): which database this is, among all that there are."""

    def read_source(self, source: Source) -> SourceRows:
        """All rows with their state, in one repeatable-read transaction."""

    def source_state(self, source: Source) -> SourceState:
        """The state alone, for a check that moves no vectors."""

    def require_fixed_filter(self, source: Source) -> None:
        """SchemaError for a filter whose answer for a row changes while the row does not."""

    def watch(self, source: Source) -> None:
        """From the next snapshot on, every change of the source's rows is kept."""

    def staleness(self, name: str) -> Staleness | None:
        """The policy's verdict on the current generation, None where there is none."""

    def read_moved(self, name: str, generation: int, source: Source) -> Moved:
        """What moved since that generation was read, in one transaction with the rows themselves."""

    def read_buckets(self, source: Source, then: ContentHash) -> Moved:
        """The same by bucket sums: every row of a bucket whose sum is not the one of `then`."""

    def record_audit(
        self,
        name: str,
        generation: int,
        snapshot: str,
        *,
        relation_files: str | None,
        inserted: Ids,
        updated: Ids,
        deleted: Ids,
    ) -> None:
        """From `snapshot` on the change log counts again for that generation, beside these ids."""

    def prune_changes(self) -> int:
        """Forget what every current generation has seen; returns how many change rows went."""

    def acquire_shard(self, name: str, holder: str, *, ttl_s: float) -> ShardLease:
        """A fencing token above every earlier one. AlreadyRunning while another holder's lease runs."""

    def renew_shard(self, lease: ShardLease, *, ttl_s: float) -> None:
        """FencingLost when a newer token exists or the lease ran out."""

    def release_shard(self, lease: ShardLease) -> bool: ...

    def acquire_device(self, name: str, holder: str, *, ttl_s: float) -> ShardLease:
        """The right to hold a shard on a card, under a token above every earlier one of these. AlreadyRunning while
        another card's lease runs."""

    def renew_device(self, lease: ShardLease, *, ttl_s: float) -> None:
        """FencingLost when a newer token exists or the lease ran out."""

    def publish_device(self, lease: ShardLease, *, generation: int) -> None:
        """That generation is loaded and checked, in one statement that checks the lease. FencingLost."""

    def release_device(self, lease: ShardLease) -> bool: ...

    def devices(self, name: str | None = None) -> list[DeviceRow]:
        """Running device leases and what is loaded under them."""

    def last_generation(self, name: str) -> int: ...

    def publish_generation(
        self,
        lease: ShardLease,
        *,
        generation: int,
        manifest_sha256: str,
        manifest: Mapping[str, Any],
    ) -> GenerationRow:
        """Make it current, in one statement that checks the lease. FencingLost for an older token."""

    def current_generation(self, name: str, generation: int | None = None) -> GenerationRow | None:
        """The newest generation, or the one of that number."""

    def published(self, name: str) -> list[GenerationRow]:
        """All that were ever published, oldest first."""

    def prune_generation(self, lease: ShardLease, *, generation: int) -> bool:
        """Say that its bytes go; False for one that is needed or gone already. FencingLost."""

    def pin_generation(self, name: str, generation: int, reason: str) -> bool:
        """Keep it and what its rebuild needs; False when it is not there any more."""

    def unpin_generation(self, name: str, generation: int) -> bool: ...

    def insert_receipt(
        self, *, receipt_id: str, shard: str, generation: int, statement: Mapping[str, Any]
    ) -> bool:
        """Idempotent: the same receipt twice is one row."""

    def find_receipt(self, receipt_id: str) -> ReceiptRow | None:
        """By id or unambiguous prefix."""

    def find_receipts(
        self, *, shard: str | None = None, generation: int | None = None, limit: int = 100
    ) -> list[ReceiptRow]:
        """Newest first."""


@dataclass(frozen=True, slots=True)
class PostgresStore:
    database: Database

    def identity(self) -> tuple[str, str]:
        found = self.database.identity
        return found.cluster_id, found.database_id

    def read_source(self, source: Source) -> SourceRows:
        return sources.read_source(self.database, source)

    def source_state(self, source: Source) -> SourceState:
        return sources.source_state(self.database, source)

    def require_fixed_filter(self, source: Source) -> None:
        staleness.require_fixed_filter(self.database, source)

    def watch(self, source: Source) -> None:
        staleness.watch(self.database, source)

    def staleness(self, name: str) -> Staleness | None:
        found = staleness.staleness(self.database, name)
        return found[0] if found else None

    def read_moved(self, name: str, generation: int, source: Source) -> Moved:
        return staleness.read_moved(self.database, name, generation, source)

    def read_buckets(self, source: Source, then: ContentHash) -> Moved:
        return staleness.read_buckets(self.database, source, then)

    def record_audit(
        self,
        name: str,
        generation: int,
        snapshot: str,
        *,
        relation_files: str | None,
        inserted: Ids,
        updated: Ids,
        deleted: Ids,
    ) -> None:
        staleness.record_audit(
            self.database,
            name,
            generation,
            snapshot,
            relation_files=relation_files,
            inserted=inserted,
            updated=updated,
            deleted=deleted,
        )

    def prune_changes(self) -> int:
        return staleness.prune_changes(self.database)

    def acquire_shard(self, name: str, holder: str, *, ttl_s: float) -> ShardLease:
        return vectors.acquire_shard(self.database, name, holder, ttl_s=ttl_s)

    def renew_shard(self, lease: ShardLease, *, ttl_s: float) -> None:
        vectors.renew_shard(self.database, lease, ttl_s=ttl_s)

    def release_shard(self, lease: ShardLease) -> bool:
        return vectors.release_shard(self.database, lease)

    def acquire_device(self, name: str, holder: str, *, ttl_s: float) -> ShardLease:
        return vectors.acquire_device(self.database, name, holder, ttl_s=ttl_s)

    def renew_device(self, lease: ShardLease, *, ttl_s: float) -> None:
        vectors.renew_device(self.database, lease, ttl_s=ttl_s)

    def publish_device(self, lease: ShardLease, *, generation: int) -> None:
        vectors.publish_device(self.database, lease, generation=generation)

    def release_device(self, lease: ShardLease) -> bool:
        return vectors.release_device(self.database, lease)

    def devices(self, name: str | None = None) -> list[DeviceRow]:
        return vectors.devices(self.database, name)

    def last_generation(self, name: str) -> int:
        return vectors.last_generation(self.database, name)

    def publish_generation(
        self,
        lease: ShardLease,
        *,
        generation: int,
        manifest_sha256: str,
        manifest: Mapping[str, Any],
    ) -> GenerationRow:
        return vectors.publish_generation(
            self.database,
            lease,
            generation=generation,
            manifest_sha256=manifest_sha256,
            manifest=manifest,
        )

    def current_generation(self, name: str, generation: int | None = None) -> GenerationRow | None:
        return vectors.current_generation(self.database, name, generation)

    def published(self, name: str) -> list[GenerationRow]:
        return vectors.published(self.database, name)

    def prune_generation(self, lease: ShardLease, *, generation: int) -> bool:
        return vectors.prune_generation(self.database, lease, generation=generation)

    def pin_generation(self, name: str, generation: int, reason: str) -> bool:
        return vectors.pin_generation(self.database, name, generation, reason)

    def unpin_generation(self, name: str, generation: int) -> bool:
        return vectors.unpin_generation(self.database, name, generation)

    def insert_receipt(
        self, *, receipt_id: str, shard: str, generation: int, statement: Mapping[str, Any]
    ) -> bool:
        return vectors.insert_receipt(
            self.database,
            receipt_id=receipt_id,
            shard=shard,
            generation=generation,
            statement=statement,
        )

    def find_receipt(self, receipt_id: str) -> ReceiptRow | None:
        return vectors.find_receipt(self.database, receipt_id)

    def find_receipts(
        self, *, shard: str | None = None, generation: int | None = None, limit: int = 100
    ) -> list[ReceiptRow]:
        return vectors.find_receipts(self.database, shard=shard, generation=generation, limit=limit)


def store_of(db: Database | VectorStore) -> VectorStore:
    return PostgresStore(db) if isinstance(db, Database) else db


def source_of(fields: Mapping[str, Any]) -> Source:
    """The source that a manifest's or receipt's `source` part describes. SchemaError when it describes none."""
    try:
        own = (fields["id_column"], fields["vector_column"])
        return Source(
            relation=fields["relation"],
            id_column=own[0],
            vector_column=own[1],
            submission_id=fields["submission_id"],
            filter=fields["filter"],
            columns=tuple(set(fields["columns"]) - set(own)),
            hash_version=fields.get("hash_version", 1),
        )
    except (KeyError, TypeError) as fault:
        raise SchemaError(f"a source that lacks {fault} cannot be read again") from fault
