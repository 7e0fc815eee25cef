"""In-memory stand-in for the database side of shards and receipts: rows, leases on a hand-set clock, rows published.

Same answers as the real store (the content hash is the data plane's own function), no server. `now_s` is the
database's clock: tests move it to let a lease run out. `tests/services/test_shards.py` runs the same
claims against Postgres.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.dataplane.content_hash import content_hash
from fabric_pipelines.dataplane.source import Source, SourceRows, SourceState
from fabric_pipelines.dataplane.vectors import GenerationRow, ReceiptRow, ShardLease
from fabric_pipelines.errors import AlreadyRunning, FencingLost, UsageError


class MemoryVectorStore:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.rows: dict[int, npt.NDArray[np.float16]] = {}
        self.leases: dict[str, tuple[str, int, float]] = {}
        self.generations: dict[tuple[str, int], GenerationRow] = {}
        self.receipts: dict[str, ReceiptRow] = {}
        self.reads = 0

    def put(self, ids: npt.NDArray[np.int64], vectors: npt.NDArray[Any]) -> None:
        """Insert or replace rows; kept as float16, as the landing tables do."""
        for name, vector in zip(ids.tolist(), vectors.astype(np.float16), strict=True):
            self.rows[name] = vector

    def read_source(self, source: Source) -> SourceRows:
        ids = np.array(sorted(self.rows), np.int64)
        vectors = np.stack([self.rows[name] for name in ids.tolist()])
        columns = {name: ids % 1000 for name in source.columns}
        return SourceRows(self._state(source, ids, vectors), ids, vectors, columns)

    def source_state(self, source: Source) -> SourceState:
        return self.read_source(source).state

    def acquire_shard(self, name: str, holder: str, *, ttl_s: float) -> ShardLease:
        other, token, expires = self.leases.get(name, (holder, 0, 0.0))
        if other != holder and expires > self.now_s:
            raise AlreadyRunning(f"shard {name!r} is leased to {other} (token {token})")
        self.leases[name] = (holder, token + 1, self.now_s + ttl_s)
        return ShardLease(name, holder, token + 1)

    def renew_shard(self, lease: ShardLease, *, ttl_s: float) -> None:
        self._require(lease)
        self.leases[lease.name] = (lease.holder, lease.token, self.now_s + ttl_s)

    def release_shard(self, lease: ShardLease) -> bool:
        if self.leases.get(lease.name, ("", 0, 0.0))[:2] != (lease.holder, lease.token):
            return False
        self.leases[lease.name] = (lease.holder, lease.token, self.now_s)
        return True

    def last_generation(self, name: str) -> int:
        return max((number for shard, number in self.generations if shard == name), default=0)

    def publish_generation(
        self,
        lease: ShardLease,
        *,
        generation: int,
        manifest_sha256: str,
        manifest: Mapping[str, Any],
    ) -> GenerationRow:
        self._require(lease)
        key = (lease.name, generation)
        if key in self.generations:
            raise FencingLost(f"generation {generation} of shard {lease.name!r} exists already")
        row = GenerationRow(
            lease.name, generation, lease.token, manifest_sha256, _copied(manifest), self._time()
        )
        self.generations[key] = row
        return row

    def current_generation(self, name: str, generation: int | None = None) -> GenerationRow | None:
        number = self.last_generation(name) if generation is None else generation
        return self.generations.get((name, number))

    def insert_receipt(
        self, *, receipt_id: str, shard: str, generation: int, statement: Mapping[str, Any]
    ) -> bool:
        if receipt_id in self.receipts:
            return False
        self.receipts[receipt_id] = ReceiptRow(
            receipt_id, shard, generation, _copied(statement), self._time()
        )
        return True

    def find_receipt(self, receipt_id: str) -> ReceiptRow | None:
        found = [row for name, row in self.receipts.items() if name.startswith(receipt_id)]
        if len(found) > 1:
            raise UsageError(f"receipt id {receipt_id!r} fits more than one receipt")
        return found[0] if found else None

    def find_receipts(
        self, *, shard: str | None = None, generation: int | None = None, limit: int = 100
    ) -> list[ReceiptRow]:
        found = [
            row
            for row in self.receipts.values()
            if shard in (None, row.shard) and generation in (None, row.generation)
        ]
        return found[::-1][:limit]

    def _require(self, lease: ShardLease) -> None:
        holder, token, expires = self.leases.get(lease.name, ("", 0, 0.0))
        if (holder, token) != (lease.holder, lease.token) or expires <= self.now_s:
            raise FencingLost(f"{lease.holder} no longer holds shard {lease.name!r}")

    def _state(
        self, source: Source, ids: npt.NDArray[np.int64], vectors: npt.NDArray[np.float16]
    ) -> SourceState:
        self.reads += 1
        kinds = {source.id_column: "bigint", source.vector_column: "halfvec"}
        return SourceState(
            source=source,
            cluster_id="1",
            database_id="memory",
            relation_oid=1,
            columns={**kinds, **dict.fromkeys(source.columns, "bigint")},
            encoding="halfvec",
            snapshot=f"{self.reads}:{self.reads}:",
            lsn="0/0",
            timeline=1,
            content=content_hash(ids, vectors, "halfvec"),
        )

    def _time(self) -> datetime:
        return datetime.fromtimestamp(self.now_s, UTC)


def _copied(value: Mapping[str, Any]) -> dict[str, Any]:
    """What a jsonb column gives back: equal values, none of the caller's objects."""
    copied: dict[str, Any] = json.loads(json.dumps(dict(value)))
    return copied
