"""What shards ask of the database, as one small interface: rows, lease, current generation, receipts.

Shards speak no SQL. `PostgresStore` (postgres.py) answers from the data plane; a test may answer from memory.
The interface refuses to hold state: every answer is the database's at that moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

BUCKETS = 1024


@dataclass(frozen=True, slots=True)
class SourceMark:
    """What was read: where, which rows, at which snapshot, and the order-free sums of their content.

    `columns` are {name, type} mappings; `bucket_sums` holds BUCKETS decimal strings, bucket = id mod BUCKETS."""

    cluster: str
    relation: str
    columns: Sequence[Mapping[str, str]]
    filter: Mapping[str, Any]
    pg_snapshot: str
    rows: int
    content_hash: str
    bucket_sums: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "relation": self.relation,
            "columns": [dict(column) for column in self.columns],
            "filter": dict(self.filter),
            "pg_snapshot": self.pg_snapshot,
            "rows": self.rows,
            "content_hash": self.content_hash,
            "bucket_sums": list(self.bucket_sums),
        }


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Rows of one snapshot in ascending id: ids int64 [n], vectors float32 [n, d], columns [n] beside them."""

    mark: SourceMark
    ids: npt.NDArray[np.int64]
    vectors: npt.NDArray[np.float32]
    columns: pa.Table


@dataclass(frozen=True, slots=True)
class GenerationRow:
    """The database's word on one published generation."""

    name: str
    number: int
    token: int
    manifest_sha256: str


class VectorStore(Protocol):
    def read_rows(self, relation: str, where: Mapping[str, Any]) -> SourceRows:
        """All rows with their mark, in one repeatable-read transaction."""

    def read_mark(self, relation: str, where: Mapping[str, Any]) -> SourceMark:
        """The mark alone, for a check that moves no vectors."""

    def row_digests(
        self, ids: npt.NDArray[np.int64], vectors: npt.NDArray[np.float32], mark: SourceMark
    ) -> list[bytes]:
        """The digests behind the content hash, computed here from rows that were read earlier."""

    def acquire(self, name: str, holder: str, ttl_s: float) -> int:
        """A fencing token above every earlier one. AlreadyRunning (names the holder) while another holds it."""

    def renew(self, name: str, holder: str, token: int, ttl_s: float) -> None:
        """FencingLost when a newer token exists or the lease ran out."""

    def release(self, name: str, holder: str, token: int) -> None: ...

    def last_number(self, name: str) -> int:
        """The highest published generation number, 0 for none."""

    def publish(self, row: GenerationRow, holder: str, manifest: Mapping[str, Any]) -> None:
        """Make it current, in one statement that checks the lease. FencingLost for an older token."""

    def generation(self, name: str, number: int | None = None) -> GenerationRow | None:
        """The current generation, or the one of that number."""

    def put_receipt(
        self, receipt_id: str, row: GenerationRow, statement: Mapping[str, Any]
    ) -> None:
        """Idempotent: the same receipt twice is one row."""

    def receipt(self, receipt_id: str) -> tuple[str, Mapping[str, Any]] | None:
        """(full id, statement) of the one receipt whose id starts so; UsageError when several do."""

    def receipt_of(self, name: str, number: int) -> str | None:
        """The id of the newest receipt of that generation."""
