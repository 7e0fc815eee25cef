"""Postgres as a queue: COPY in binary, SKIP LOCKED, one transaction a batch, over its Unix socket.

The embedded binaries with the settings the fabric itself runs them with. A task's outcome is a row of its own and
the task stays as it is until it is deleted, since an update more would only leave another dead row. A lease
names its tasks in a materialised CTE: as a plain subquery, a plan made before the table was analysed runs it again
for each row, and one lease took minutes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import psycopg

from fabric_pipelines.bench.peers.peer import OUTCOME_TOKENS, Durable, Held, Work
from fabric_pipelines.dataplane import libpq
from fabric_pipelines.dataplane.postgres import EmbeddedPostgres, place
from fabric_pipelines.dataplane.postgres_binaries import find_binaries
from fabric_pipelines.settings import Settings

TABLES = """
drop table if exists task, outcome;
create table task (id bigint generated always as identity primary key, payload bytea not null,
                   leased boolean not null default false);
create index task_ready on task (id) where not leased;
create table outcome (task bigint primary key, output bytea not null);
"""
LEASE = """
with next as materialized (
    select id from task where not leased order by id limit %s for update skip locked)
update task set leased = true from next where task.id = next.id returning task.id, payload
"""
RETIRE = """
with next as materialized (
    select task from outcome order by task limit %s for update skip locked),
ended as (delete from outcome using next where outcome.task = next.task returning outcome.task, output),
gone as (delete from task where id in (select task from ended))
select task, output from ended
"""


class PostgresServer:
    name = "postgres"
    durable = Durable(
        enqueue="WAL fdatasync at commit",
        lease="not synced (synchronous_commit off on the connection that leases)",
        computed="WAL fdatasync at commit",
        retire="WAL fdatasync at commit",
        lease_is_a_choice=True,
    )

    def __init__(self) -> None:
        self._binaries = find_binaries()
        self.version = self._binaries.version
        self._server: EmbeddedPostgres | None = None
        self.endpoint = ""

    def start(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        libpq.forget_shell()
        self._server = EmbeddedPostgres(place(Settings(home=folder)), self._binaries)
        self.endpoint = self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()

    @property
    def pids(self) -> list[int]:
        if self._server is None or self._server.pid is None:
            return []
        root = psutil.Process(self._server.pid)
        return [root.pid, *(child.pid for child in root.children(recursive=True))]


class PostgresClient:
    def __init__(self, endpoint: str) -> None:
        self._base = psycopg.connect(endpoint, autocommit=True)
        self._base.execute(TABLES)
        self._leaser = psycopg.connect(endpoint, autocommit=True)

    def prepare(self, work: Work) -> None:
        self._work = work
        mode = "on" if work.synced_leases else "off"
        self._leaser.execute(f"set synchronous_commit = {mode}")
        self._batches = [[row.tobytes() for row in batch] for batch in work.batches()]
        self._outcome = np.arange(OUTCOME_TOKENS, dtype=np.uint32).tobytes()

    def enqueue(self) -> None:
        for batch in self._batches:
            with (
                self._base.cursor() as cursor,
                cursor.copy("copy task (payload) from stdin (format binary)") as copy,
            ):
                copy.set_types(["bytea"])
                for payload in batch:
                    copy.write_row((payload,))

    def lease(self) -> Held | None:
        with self._leaser.cursor(binary=True) as cursor:
            rows = cursor.execute(LEASE, (self._work.lease,)).fetchall()
        if not rows:
            return None
        return Held([row[0] for row in rows], [Work.row_of(row[1]) for row in rows])

    def computed(self, held: Held) -> None:
        with (
            self._base.cursor() as cursor,
            cursor.copy("copy outcome from stdin (format binary)") as copy,
        ):
            copy.set_types(["int8", "bytea"])
            for task in held.handles:
                copy.write_row((task, self._outcome))

    def retire(self) -> int:
        with self._base.cursor(binary=True) as cursor:
            return len(cursor.execute(RETIRE, (self._work.lease,)).fetchall())

    def close(self) -> None:
        self._leaser.close()
        self._base.close()


connect = PostgresClient
