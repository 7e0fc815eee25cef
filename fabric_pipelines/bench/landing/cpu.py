"""CPU seconds of this process and of one backend, and the WAL of a server that serves nobody else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import psycopg


@dataclass(slots=True)
class Spent:
    """Filled when the block ends: CPU seconds of this process (all threads) and of the backend, wall seconds, bytes of
    WAL of the whole server."""

    client_s: float = 0.0
    backend_s: float = 0.0
    wall_s: float = 0.0
    wal_bytes: int = 0


@contextmanager
def spent(admin: psycopg.Connection, pid: int) -> Iterator[Spent]:
    """`admin`: a connection of its own, used before and after only."""
    backend, out = psutil.Process(pid), Spent()
    lsn, cpu = _lsn(admin), _seconds(backend)
    client, wall = time.process_time(), time.perf_counter()
    yield out
    out.wall_s = time.perf_counter() - wall
    out.client_s = time.process_time() - client
    out.backend_s = _seconds(backend) - cpu
    out.wal_bytes = _lsn(admin) - lsn


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _lsn(admin: psycopg.Connection) -> int:
    row = admin.execute("select (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchone()
    assert row is not None
    return int(row[0])
