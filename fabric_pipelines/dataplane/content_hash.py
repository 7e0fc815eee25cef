"""The hash of a set of rows that SQL and Python compute alike, in any order, and that can be added up.

A row's digest is sha256(int8send(id) || wire form of its vector || int8send of each column that travels with
it, by name). A set's hash is its count and the sums of the digests' first two 8-byte lanes modulo 2^64:
order does not matter, duplicates do not cancel, and a moved row is its old digest taken away and its new one
added. Version 1 left the columns out; what was written under it is still checked under it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import SchemaError, UsageError

BUCKETS = 1024
LANE_MASK = (1 << 64) - 1
HASH_VERSION = 2
ENCODINGS = ("halfvec", "vector", "bytea")

Ids = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float16] | npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ContentHash:
    """rows, two lanes (sums modulo 2^64) and the first lane's sum per bucket (bucket = id & 1023, uint64
    [1024]): comparing bucket sums finds what moved in O(changed buckets)."""

    rows: int
    lane_0: int
    lane_1: int
    bucket_sums: tuple[int, ...]

    @property
    def hex(self) -> str:
        return f"{self.rows:x}-{self.lane_0:016x}{self.lane_1:016x}"

    def moved_buckets(self, other: ContentHash) -> list[int]:
        pairs = zip(self.bucket_sums, other.bucket_sums, strict=True)
        return [bucket for bucket, (mine, theirs) in enumerate(pairs) if mine != theirs]

    def moved(self, *, gone: ContentHash, come: ContentHash) -> ContentHash:
        """The hash of this set without the rows of `gone` and with those of `come`."""
        return ContentHash(
            self.rows - gone.rows + come.rows,
            (self.lane_0 - gone.lane_0 + come.lane_0) & LANE_MASK,
            (self.lane_1 - gone.lane_1 + come.lane_1) & LANE_MASK,
            tuple(
                (mine - left + new) & LANE_MASK
                for mine, left, new in zip(
                    self.bucket_sums, gone.bucket_sums, come.bucket_sums, strict=True
                )
            ),
        )

    def as_json(self) -> dict[str, Any]:
        """Integers as hex strings: JSON numbers end at 2^53."""
        return {
            "rows": self.rows,
            "content_hash": self.hex,
            "bucket_sums": [f"{value:016x}" for value in self.bucket_sums],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ContentHash:
        rows, _, lanes = str(fields["content_hash"]).partition("-")
        sums = tuple(int(value, 16) for value in fields["bucket_sums"])
        if len(sums) != BUCKETS or len(lanes) != 32:
            raise SchemaError("not a content hash: it needs 1,024 bucket sums and two lanes")
        return cls(int(rows, 16), int(lanes[:16], 16), int(lanes[16:], 16), sums)


def content_hash(
    ids: Ids, vectors: Vectors, encoding: str = "halfvec", columns: Sequence[Ids] = ()
) -> ContentHash:
    """The hash of rows (ids int64 [N], vectors [N, d], columns int64 [N] each in the order of their names) as
    the database would compute it in `encoding`."""
    lanes = row_lanes(ids, vectors, encoding, columns)
    buckets = np.zeros(BUCKETS, np.uint64)
    with np.errstate(over="ignore"):
        np.add.at(buckets, (ids & (BUCKETS - 1)).astype(np.intp), lanes[:, 0])
        totals = lanes.sum(axis=0, dtype=np.uint64)
    return ContentHash(len(ids), int(totals[0]), int(totals[1]), tuple(buckets.tolist()))


def row_lanes(
    ids: Ids, vectors: Vectors, encoding: str, columns: Sequence[Ids] = ()
) -> npt.NDArray[np.uint64]:
    """The two lanes [N, 2] of each row's digest."""
    digests = _digests(ids, vectors, encoding, columns)
    return np.frombuffer(digests, dtype=">u8").reshape(-1, 2).astype(np.uint64)


def wire_layout(encoding: str) -> tuple[int, np.dtype[Any]]:
    """(bytes before the elements, element type) of a vector in COPY BINARY and in the digest."""
    if encoding == "bytea":
        return 0, np.dtype("<f2")
    return 4, np.dtype(">f4" if encoding == "vector" else ">f2")


ROWS_AT_ONCE = 1 << 14


def _digests(ids: Ids, vectors: Vectors, encoding: str, columns: Sequence[Ids]) -> bytes:
    """The first 16 bytes of each row's sha256, end to end."""
    if encoding not in ENCODINGS:
        raise UsageError(f"encoding {encoding!r} is unknown; use one of {', '.join(ENCODINGS)}")
    parts = (slice(at, at + ROWS_AT_ONCE) for at in range(0, len(ids), ROWS_AT_ONCE))
    return b"".join(
        _digests_of_part(ids[part], vectors[part], encoding, [column[part] for column in columns])
        for part in parts
    )


def _digests_of_part(ids: Ids, vectors: Vectors, encoding: str, columns: Sequence[Ids]) -> bytes:
    prefix, element = wire_layout(encoding)
    head = np.frombuffer(struct.pack(">hh", vectors.shape[1], 0)[:prefix], np.uint8)
    pieces = [
        _bytes_of(ids.astype(">i8").reshape(-1, 1)),
        np.broadcast_to(head, (len(ids), prefix)),
        _bytes_of(vectors.astype(element)),
        *(_bytes_of(column.astype(">i8").reshape(-1, 1)) for column in columns),
    ]
    rows = np.concatenate(pieces, axis=1)
    flat, step = memoryview(rows.tobytes()), rows.shape[1]
    sha256 = hashlib.sha256
    return b"".join(sha256(flat[at : at + step]).digest()[:16] for at in range(0, len(flat), step))


def _bytes_of(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
