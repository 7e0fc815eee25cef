"""What a server says of itself and of one landing, on every version: this is what the governor goes by."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import psycopg

from fabric_pipelines.dataplane.cost import BACKEND_WAL_SINCE, Meter
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.governor import Limits
from fabric_pipelines.dataplane.valve import Valve
from fabric_pipelines.dataplane.watch import TABLES, Gauge
from fabric_pipelines.dataplane.writer import Writer
from tests.support import ON_EVERY_SERVER, eventually
from tests.support_completions import pulled_batch

APPLICATION = "fabric"

pytestmark = ON_EVERY_SERVER


def test_a_server_gives_every_signal_but_the_standby_it_does_not_have(database: Database) -> None:
    with database.session() as connection:
        seen = Gauge(connection).read(APPLICATION)
    assert seen.wal_since_redo is not None
    assert 0 <= seen.wal_since_redo < 2
    assert seen.checkpoints_requested is not None
    assert seen.wal_buffers_full is not None
    assert (seen.replication_lag_bytes, seen.lock_waiters) == (None, 0)


def test_a_statement_that_waits_for_a_lock_is_seen_unless_it_is_ours(database: Database) -> None:
    with ExitStack() as stack:
        holder = stack.enter_context(psycopg.connect(database.url))
        holder.execute("lock table fabric.embed in share mode")
        waiting = []
        for name in ("somebody", APPLICATION):
            connection = psycopg.connect(database.url, application_name=name)
            stack.callback(connection.close)
            thread = threading.Thread(target=_blocked, args=(connection,))
            thread.start()
            waiting.append(thread)
        with database.session() as own:
            gauge = Gauge(own)
            eventually(
                lambda: gauge.read("nobody").lock_waiters == 2, within_s=60, what="two that wait"
            )
            assert gauge.read(APPLICATION).lock_waiters == 1
        holder.rollback()
        for thread in waiting:
            thread.join()


def _blocked(connection: psycopg.Connection) -> None:
    connection.execute("lock table fabric.embed in row exclusive mode")
    connection.rollback()


def test_a_role_that_may_not_see_a_signal_still_gives_the_others(database: Database) -> None:
    with database.session() as connection:
        connection.execute("create role watcher")
        try:
            connection.execute("revoke execute on function pg_control_checkpoint from public")
            connection.execute("set role watcher")
            gauge = Gauge(connection)
            seen = [gauge.read(APPLICATION) for _ in range(2)]
        finally:
            connection.execute("reset role")
            connection.execute("grant execute on function pg_control_checkpoint to public")
            connection.execute("drop role watcher")
    assert [item.wal_since_redo for item in seen] == [None, None]
    assert seen[1].wal_buffers_full is not None


def test_a_probe_measures_the_server_and_not_the_threads_beside_it(database: Database) -> None:
    """Its transaction ends on the disk, its answer is taken late: that is nobody's wait but ours."""
    with database.session() as connection:

        class Late:
            info = connection.info

            def execute(self, text: bytes) -> psycopg.Cursor:
                answer = connection.execute(text)
                time.sleep(0.2)
                return answer

        flushed = "select pg_current_wal_flush_lsn() - %s::pg_lsn"
        begin = connection.execute("select pg_current_wal_insert_lsn()").fetchone()
        assert begin is not None
        taken = min(Gauge(Late()).probe_ms() for _ in range(3))  # type: ignore[arg-type]
        assert 0 < taken < 200
        written = connection.execute(flushed, begin).fetchone()
        assert written is not None
        assert written[0] > 0
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_indexes_and_triggers_make_a_table_dearer_before_it_is_written_to(
    database: Database,
) -> None:
    with database.session() as connection:
        connection.execute("create index on fabric.embed using brin (landed_at)")
        connection.execute("create index on fabric.embed (source_row)")
        connection.execute(
            "create function fabric.noted() returns trigger language plpgsql as 'begin return null; end'"
        )
        connection.execute(
            "create trigger noted after insert on fabric.embed execute function fabric.noted()"
        )
        parts = Gauge(connection).parts(TABLES)
    assert parts["fabric.embed"] == ["brin", "brin", "btree", "statement trigger"]
    assert parts["fabric.generate"] == ["brin"], "the one of the schema itself"
    valve = Valve(Limits())
    valve.built_of(parts)
    assert valve.as_json()["prices"]["fabric.embed"]["parts"] == parts["fabric.embed"]


def test_the_server_says_what_a_landing_wrote(database: Database) -> None:
    """Postgres 18 of every landing, the others of the one that is measured."""
    writer = Writer(database)
    try:
        landed = [
            writer.land(pulled_batch(400, function="embed", dim=384, first=400 * at))
            for at in range(3)
        ]
    finally:
        writer.close()
    assert [item.rows for item in landed] == [400, 400, 400]
    assert all(item.commit_ms is not None for item in landed)
    if database.identity.server_version >= BACKEND_WAL_SINCE:
        told = landed[1:]
    else:
        told = landed[:1]
        assert [item.wal_bytes for item in landed[1:]] == [None, None]
    for item in told:
        assert item.wal_bytes is not None
        assert 0.9 < item.wal_bytes / item.size < 1.6


def test_what_comes_twice_is_counted_where_a_merge_is_explained(database: Database) -> None:
    writer = Writer(database)
    batch = pulled_batch(60, function="generate")
    try:
        rows = [writer.land(item).rows for item in (batch, batch)]
        half = writer.land(pulled_batch(60, function="generate", first=30))
    finally:
        writer.close()
    assert (rows, half.rows) == ([60, 0], 30)


def test_before_18_every_sixteenth_landing_of_a_table_is_measured(database: Database) -> None:
    with database.session() as connection:
        meter = Meter(connection)
        ways = [meter.goes_straight("fabric.embed") for _ in range(33)]
    staged = [at for at, straight in enumerate(ways) if not straight]
    counts = database.identity.server_version >= BACKEND_WAL_SINCE
    assert staged == ([] if counts else [0, 16, 32])
