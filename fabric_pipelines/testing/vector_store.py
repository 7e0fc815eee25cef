"""In-memory stand-in for the database side of shards and receipts: rows, leases on a hand-set clock, rows published.

Same answers as the real store (the content hash is the data plane's own function), no server. `now_s` is the
database's clock: tests move it to let a lease run out. `tests/services/test_shards.py` runs the same
claims against Postgres.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.dataplane.content_hash import BUCKETS, ContentHash, Ids, content_hash
from fabric_pipelines.dataplane.source import RowSet, Source, SourceRows, SourceState
from fabric_pipelines.dataplane.staleness import NOTHING, Moved, Staleness
from fabric_pipelines.dataplane.vectors import DeviceRow, GenerationRow, ReceiptRow, ShardLease
from fabric_pipelines.errors import AlreadyRunning, FencingLost, UsageError


class MemoryVectorStore:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.rows: dict[int, npt.NDArray[np.float16]] = {}
        self.leases: dict[str, tuple[str, int, float]] = {}
        self.device_leases: dict[str, DeviceRow] = {}  # `expires_in_s` is the moment it ends here
        self.generations: dict[tuple[str, int], GenerationRow] = {}
        self.receipts: dict[str, ReceiptRow] = {}
        self.columns: dict[tuple[str, int], int] = {}
        self.fingerprints: tuple[str, ...] = ()
        self.changes: list[tuple[str, npt.NDArray[np.int64]]] = []
        self.pruned = 0
        self.audits: dict[tuple[str, int], tuple[int, list[npt.NDArray[np.int64]]]] = {}
        self.reads = 0
        self.database = ("1", "memory")

    def identity(self) -> tuple[str, str]:
        return self.database

    def put(self, ids: npt.NDArray[np.int64], vectors: npt.NDArray[Any]) -> None:
        """Insert or replace rows; kept as float16, as the landing tables do."""
        known = np.isin(ids, np.fromiter(self.rows, np.int64, len(self.rows)))
        for op, moved in (("insert", ids[~known]), ("update", ids[known])):
            if len(moved):
                self.changes.append((op, moved))
        for name, vector in zip(ids.tolist(), vectors.astype(np.float16), strict=True):
            self.rows[name] = vector

    def set_column(self, name: str, row: int, value: int) -> None:
        """Overwrite one value of a column, which is id % 1000 otherwise."""
        self.columns[name, row] = value
        self.changes.append(("update", np.array([row], np.int64)))

    def remove(self, ids: npt.NDArray[np.int64]) -> None:
        for name in ids.tolist():
            del self.rows[name]
        self.changes.append(("delete", ids))

    def truncate(self) -> None:
        self.rows.clear()
        self.changes.append(("truncate", np.zeros(0, np.int64)))

    def read_source(self, source: Source) -> SourceRows:
        self.reads += 1
        rows = self._rows(source, np.array(sorted(self.rows), np.int64))
        return SourceRows(self._state(source, rows), rows.ids, rows.vectors, rows.columns)

    def source_state(self, source: Source) -> SourceState:
        return self.read_source(source).state

    def require_fixed_filter(self, source: Source) -> None:
        """No SQL here that could read a clock."""

    def watch(self, source: Source) -> None:
        """Every change is kept from the first one on."""

    def staleness(self, name: str) -> Staleness | None:
        """By the default policy; only what the log says, so neither age nor quality."""
        row = self.current_generation(name)
        if row is None:
            return None
        complete, ops = self._movement(name)
        moved = np.unique(np.concatenate(list(ops.values())))
        rows = row.manifest["source"]["rows"]
        fraction, gone = len(moved) / rows, len(ops["delete"]) / rows
        truncated = any(op == "truncate" for op, _ in self.changes[self._base(name) :])
        verdict = (
            "rebuild"
            if truncated or fraction >= 0.3
            else "audit"
            if not complete
            else "deleted"
            if gone > 0.02
            else "changed"
            if fraction > 0.05
            else "fresh"
        )
        return Staleness(
            shard=name,
            generation=row.generation,
            relation=row.manifest["source"]["relation"],
            receipt_id=None,
            log="complete" if complete else "pruned",
            rows=rows,
            inserted=len(ops["insert"]),
            updated=len(ops["update"]),
            deleted=len(ops["delete"]),
            truncated=truncated,
            moved=len(moved),
            moved_fraction=fraction,
            deleted_fraction=gone,
            age_s=0.0,
            recall=None,
            last_change_at=None,
            verdict=verdict,
            due=verdict != "fresh",
        )

    def read_moved(self, name: str, generation: int, source: Source) -> Moved:
        assert generation == self.last_generation(name)
        complete, ops = self._movement(name)
        ids = np.unique(np.concatenate(list(ops.values())))
        truncated = any(op == "truncate" for op, _ in self.changes[self._base(name) :])
        present = ids[np.isin(ids, np.fromiter(self.rows, np.int64, len(self.rows)))]
        rows = self._rows(source, present)
        state = replace(self._state(source, rows), content=NOTHING)
        return Moved(state, ids, rows, complete and not truncated)

    def read_buckets(self, source: Source, then: ContentHash) -> Moved:
        whole = self.read_source(source)
        buckets = whole.state.content.moved_buckets(then)
        ids = whole.ids[np.isin(whole.ids & (BUCKETS - 1), buckets)]
        return Moved(whole.state, ids, self._rows(source, ids), True)

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
        base = int(snapshot.partition(":")[0])
        self.audits[name, generation] = (base, [inserted, updated, deleted])

    def prune_changes(self) -> int:
        bases = [self._base(name) for name in {name for name, _ in self.generations}]
        gone = min(bases, default=0) - self.pruned
        self.pruned += max(gone, 0)
        return max(gone, 0)

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

    def acquire_device(self, name: str, holder: str, *, ttl_s: float) -> ShardLease:
        row = self.device_leases.get(name)
        if row and row.holder != holder and row.expires_in_s > self.now_s:
            raise AlreadyRunning(f"shard {name!r} is on the card {row.holder} (token {row.token})")
        token = row.token + 1 if row else 1
        self.device_leases[name] = DeviceRow(name, holder, token, self.now_s + ttl_s, None, None)
        return ShardLease(name, holder, token)

    def renew_device(self, lease: ShardLease, *, ttl_s: float) -> None:
        row = self._require_device(lease)
        self.device_leases[lease.name] = replace(row, expires_in_s=self.now_s + ttl_s)

    def publish_device(self, lease: ShardLease, *, generation: int) -> None:
        row = self._require_device(lease)
        assert (lease.name, generation) in self.generations
        self.device_leases[lease.name] = replace(row, generation=generation, loaded_at=self._time())

    def release_device(self, lease: ShardLease) -> bool:
        row = self.device_leases.get(lease.name)
        if row is None or (row.holder, row.token) != (lease.holder, lease.token):
            return False
        self.device_leases[lease.name] = replace(
            row, expires_in_s=self.now_s, generation=None, loaded_at=None
        )
        return True

    def devices(self, name: str | None = None) -> list[DeviceRow]:
        return [
            replace(row, expires_in_s=row.expires_in_s - self.now_s)
            for row in self.device_leases.values()
            if row.expires_in_s > self.now_s and name in (None, row.name)
        ]

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

    def published(self, name: str) -> list[GenerationRow]:
        return [row for key, row in sorted(self.generations.items()) if key[0] == name]

    def prune_generation(self, lease: ShardLease, *, generation: int) -> bool:
        self._require(lease)
        row = self.current_generation(lease.name, generation)
        if row is None or row.pruned_at or row.pinned_at or self._needed(lease.name, generation):
            return False
        has_receipt = bool(self.find_receipts(shard=lease.name, generation=generation))
        self.generations[lease.name, generation] = replace(
            row, pruned_at=self._time(), manifest={} if has_receipt else row.manifest
        )
        self.audits.pop((lease.name, generation), None)
        return True

    def pin_generation(self, name: str, generation: int, reason: str) -> bool:
        row = self.current_generation(name, generation)
        if row is None or row.pruned_at:
            return False
        self.generations[name, generation] = replace(row, pinned_at=self._time(), pin_reason=reason)
        return True

    def unpin_generation(self, name: str, generation: int) -> bool:
        row = self.current_generation(name, generation)
        if row is None or not row.pinned_at:
            return False
        self.generations[name, generation] = replace(row, pinned_at=None, pin_reason=None)
        return True

    def _needed(self, name: str, generation: int) -> bool:
        """The current one, the parent of it or of a pinned one, or on a card."""
        last = self.last_generation(name)
        children = [
            row
            for row in self.published(name)
            if ((row.manifest.get("increment") or {}).get("parent_generation")) == generation
        ]
        on_card = any(row.generation == generation for row in self.devices(name))
        kept = any(row.pinned_at or row.generation == last for row in children)
        return generation == last or kept or on_card

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

    def _require_device(self, lease: ShardLease) -> DeviceRow:
        row = self.device_leases.get(lease.name)
        held = row and (row.holder, row.token) == (lease.holder, lease.token)
        if row is None or not held or row.expires_in_s <= self.now_s:
            raise FencingLost(f"{lease.holder} no longer holds shard {lease.name!r} on its card")
        return row

    def _base(self, name: str) -> int:
        """How many changes the current generation of shard `name` has seen."""
        row = self.current_generation(name)
        assert row is not None
        snapshot = str(row.manifest["source"]["pg_snapshot"])
        return self.audits.get((name, row.generation), (int(snapshot.partition(":")[0]), []))[0]

    def _movement(self, name: str) -> tuple[bool, dict[str, npt.NDArray[np.int64]]]:
        base = self._base(name)
        ops: dict[str, list[npt.NDArray[np.int64]]] = {"insert": [], "update": [], "delete": []}
        found = self.audits.get((name, self.last_generation(name)))
        for op, ids in zip(ops, found[1] if found else [], strict=False):
            ops[op].append(ids)
        for op, ids in self.changes[base:]:
            if op != "truncate":
                ops[op].append(ids)
        none = np.zeros(0, np.int64)
        return base >= self.pruned, {
            op: np.unique(np.concatenate([none, *parts])) for op, parts in ops.items()
        }

    def _rows(self, source: Source, ids: npt.NDArray[np.int64]) -> RowSet:
        names = ids.tolist()
        vectors = (
            np.stack([self.rows[name] for name in names]) if names else np.zeros((0, 0), np.float16)
        )
        columns = {
            column: np.array([self.columns.get((column, n), n % 1000) for n in names], np.int64)
            for column in source.columns
        }
        return RowSet(ids, vectors, columns)

    def _state(self, source: Source, rows: RowSet) -> SourceState:
        at = len(self.changes)
        hashed = [rows.columns[name] for name in source.hashed_columns]
        kinds = {source.id_column: "bigint", source.vector_column: "halfvec"}
        return SourceState(
            source=source,
            cluster_id=self.database[0],
            database_id=self.database[1],
            relation_oid=1,
            columns={**kinds, **dict.fromkeys(source.columns, "bigint")},
            encoding="halfvec",
            snapshot=f"{at}:{at}:",
            lsn="0/0",
            timeline=1,
            content=content_hash(rows.ids, rows.vectors, "halfvec", hashed),
            engine_fingerprints=self.fingerprints,
        )

    def _time(self) -> datetime:
        return datetime.fromtimestamp(self.now_s, UTC)


def _copied(value: Mapping[str, Any]) -> dict[str, Any]:
    """What a jsonb column gives back: equal values, none of the caller's objects."""
    copied: dict[str, Any] = json.loads(json.dumps(dict(value)))
    return copied
