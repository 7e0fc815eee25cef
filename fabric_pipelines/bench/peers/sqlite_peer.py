"""SQLite in the client's own process: WAL, synchronous=FULL, so that every commit is one fsync of the WAL.

A library, not a service: no socket is crossed, and one process at a time may write. Listed as the least that a
durable queue can cost.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np

from fabric_pipelines.bench.peers.peer import OUTCOME_TOKENS, Durable, Held, Work

TABLES = """
create table if not exists task (id integer primary key, payload blob not null, leased integer not null default 0);
create index if not exists task_ready on task (id) where leased = 0;
create table if not exists outcome (task integer primary key, output blob not null);
"""
LEASE = """update task set leased = 1 where id in (select id from task where leased = 0 order by id limit ?)
returning id, payload"""


class SqliteServer:
    name = "sqlite"
    version = sqlite3.sqlite_version
    durable = Durable(
        enqueue="WAL fsync at commit",
        lease="WAL fsync at commit",
        computed="WAL fsync at commit",
        retire="WAL fsync at commit",
    )

    def __init__(self) -> None:
        self.endpoint = ""

    def start(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.endpoint = str(folder / "queue.db")

    def stop(self) -> None:
        """Nothing runs: the client is the database."""

    @property
    def pids(self) -> list[int]:
        return []


class SqliteClient:
    def __init__(self, endpoint: str) -> None:
        self._base = sqlite3.connect(endpoint, isolation_level=None)
        self._base.execute("pragma journal_mode = wal")
        self._base.execute("pragma synchronous = full")
        self._base.executescript(TABLES)

    def prepare(self, work: Work) -> None:
        self._work = work
        self._batches = [[(row.tobytes(),) for row in batch] for batch in work.batches()]
        self._outcome = np.arange(OUTCOME_TOKENS, dtype=np.uint32).tobytes()

    def enqueue(self) -> None:
        for batch in self._batches:
            self._base.execute("begin immediate")
            self._base.executemany("insert into task (payload) values (?)", batch)
            self._base.execute("commit")

    def lease(self) -> Held | None:
        self._base.execute("begin immediate")
        rows = self._base.execute(LEASE, (self._work.lease,)).fetchall()
        self._base.execute("commit")
        if not rows:
            return None
        return Held([row[0] for row in rows], [Work.row_of(row[1]) for row in rows])

    def computed(self, held: Held) -> None:
        self._base.execute("begin immediate")
        rows = [(task, self._outcome) for task in held.handles]
        self._base.executemany("insert into outcome values (?, ?)", rows)
        self._base.execute("commit")

    def retire(self) -> int:
        self._base.execute("begin immediate")
        found = self._base.execute(
            "delete from outcome where task in (select task from outcome limit ?) returning task, output",
            (self._work.lease,),
        ).fetchall()
        self._base.executemany("delete from task where id = ?", [(row[0],) for row in found])
        self._base.execute("commit")
        return len(found)

    def close(self) -> None:
        self._base.close()


connect = SqliteClient
