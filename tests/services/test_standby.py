"""A real standby that falls behind: the signal says by how much, and bulk slows down until it has caught up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.governor import Governor, limits_of
from fabric_pipelines.dataplane.postgres import EmbeddedPostgres, Place
from fabric_pipelines.dataplane.watch import Gauge
from fabric_pipelines.dataplane.writer import Writer
from tests.support import eventually
from tests.support_completions import pulled_batch

LAG_BYTES = 200_000


@pytest.fixture
def standby(postgres: EmbeddedPostgres, open_folder: Path) -> Iterator[EmbeddedPostgres]:
    """A copy of the test server that follows it over its socket."""
    assert postgres.binaries is not None
    folder = open_folder / "standby"
    folder.mkdir(mode=0o755)
    data = folder / "postgres"
    program = postgres.binaries.bin / "pg_basebackup"
    source = postgres.url.replace("/fabric?", "/postgres?")
    subprocess.run(
        [program, "-D", data, "-d", source, "-R", "--checkpoint=fast", "--no-sync"], check=True
    )
    owner = postgres.place.data.stat()
    for path in [data, *data.rglob("*")]:
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
    server = EmbeddedPostgres(
        Place(folder, data, folder / "run"),
        postgres.binaries,
        options={**postgres.options},
        log=folder / "postgres.log",
    )
    server.start()
    yield server
    server.stop()


def test_a_standby_that_falls_behind_is_seen_and_slows_bulk_down(
    database: Database, standby: EmbeddedPostgres
) -> None:
    url = standby.url.replace("/fabric?", "/postgres?")
    writer = Writer(database)
    with database.session() as own, psycopg.connect(url, autocommit=True) as follower:
        gauge = Gauge(own)

        def lag() -> int | None:
            return gauge.read("fabric").replication_lag_bytes

        eventually(lambda: lag() == 0, within_s=60, what="a standby that follows")
        follower.execute("select pg_wal_replay_pause()")
        eventually(
            lambda: (
                follower.execute("select pg_get_wal_replay_pause_state()").fetchone() == ("paused",)
            ),
            within_s=60,
            what="a paused standby",
        )
        writer.land(pulled_batch(500, function="embed", dim=384))
        behind = lag()
        assert behind is not None
        assert behind > LAG_BYTES
        governor = Governor(limits_of(floor=1_000, most=0, lag_bytes=LAG_BYTES), 0.0)
        rate = governor.rate
        governor.observe(gauge.read("fabric"), 0.5)
        assert governor.pressed_by == ("replication_lag",)
        assert governor.rate == pytest.approx(rate * governor.limits.backoff)
        follower.execute("select pg_wal_replay_resume()")
        eventually(lambda: lag() == 0, within_s=60, what="a standby that has caught up")
        governor.observe(gauge.read("fabric"), 1.0)
        assert governor.pressed_by == ()
    writer.close()
