"""What writing a row costs the database, in bytes of WAL.

One unit for everything: a byte of WAL is one, and a microsecond of backend CPU is CPU_US_BYTES of them, so that an
index that burns CPU and logs little (HNSW) is not cheap. Before a table was written to, its price is the
catalogue's word: row size, indexes and triggers, each with the surcharge that `fabric bench landing` measured. From
the first landing on the WAL part is what the server said the rows really cost. Pure; refuses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CPU_US_BYTES = 100.0
"""10 us of backend CPU weigh as much as 1 kB of WAL: a core and a disk of 100 MB/s are full at the same rate."""
ROW_HEAD_BYTES = 28
"""Tuple header and line pointer: what a row takes in the WAL beside its own bytes."""
MEMORY = 0.25
"""Weight of the newest landing in the moving average: four landings and an old price is half forgotten."""
TRUSTED_ROWS = 50
"""A landing of fewer rows says more about its transaction than about its rows."""


@dataclass(frozen=True, slots=True)
class Surcharge:
    """One row's share: backend CPU in microseconds, WAL in bytes."""

    cpu_us: float
    wal_bytes: float


# Measured by `fabric bench landing` (docs/benchmarks/landing.md), rounded; the heap with its primary key is the base.
# gist, spgist, ivfflat and hash were not: they stand between their measured kin, on the dear side.
BASE = Surcharge(6.0, 0.0)
SURCHARGES = {
    "btree": Surcharge(2.0, 90.0),
    "hash": Surcharge(4.0, 120.0),
    "brin": Surcharge(0.5, 1.0),
    "gin": Surcharge(4.0, 360.0),
    "gist": Surcharge(40.0, 400.0),
    "spgist": Surcharge(40.0, 400.0),
    "ivfflat": Surcharge(100.0, 1_000.0),
    "hnsw": Surcharge(690.0, 2_800.0),
    "row trigger": Surcharge(3.0, 75.0),
    "statement trigger": Surcharge(4.0, 75.0),
}
UNKNOWN = Surcharge(100.0, 500.0)
"""An access method that nobody measured is taken for an expensive one."""


def cost_bytes(wal_bytes: float, cpu_us: float) -> float:
    return wal_bytes + cpu_us * CPU_US_BYTES


def multiple(parts: Sequence[str], row_bytes: float) -> float:
    """How many times the price of a table without `parts` a row costs; `parts` are names of SURCHARGES."""
    return prior(parts).row_cost(row_bytes) / prior(()).row_cost(row_bytes)


@dataclass(slots=True)
class Price:
    """Of one sink's table. `wal_bytes` is WAL per byte sent once a landing was measured, None before."""

    cpu_us: float
    extra_wal_bytes: float
    parts: tuple[str, ...] = ()
    wal_per_byte: float | None = None
    measured: int = 0

    def row_cost(self, row_bytes: float) -> float:
        """Cost of a row of `row_bytes` on the wire."""
        if self.wal_per_byte is None:
            wal = row_bytes + ROW_HEAD_BYTES + self.extra_wal_bytes
        else:
            wal = row_bytes * self.wal_per_byte
        return cost_bytes(wal, self.cpu_us)

    def actual_cost(self, rows: int, wal_bytes: int) -> float:
        return cost_bytes(wal_bytes, self.cpu_us * rows)

    def learn(self, rows: int, sent_bytes: int, wal_bytes: int) -> None:
        """A landing of `rows` new rows, sent as `sent_bytes`, wrote `wal_bytes`."""
        if rows < TRUSTED_ROWS or sent_bytes <= 0:
            return
        seen = wal_bytes / sent_bytes
        known = self.wal_per_byte
        self.wal_per_byte = seen if known is None else known + MEMORY * (seen - known)
        self.measured += 1


def prior(parts: Sequence[str]) -> Price:
    """The price of a table with a primary key and `parts`, before anything was measured."""
    extra = [SURCHARGES.get(part, UNKNOWN) for part in parts]
    return Price(
        BASE.cpu_us + sum(item.cpu_us for item in extra),
        BASE.wal_bytes + sum(item.wal_bytes for item in extra),
        tuple(parts),
    )
