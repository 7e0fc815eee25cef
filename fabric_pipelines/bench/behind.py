"""What stands behind a worker in a benchmark: a broker, and where asked a Postgres and a completion, each a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg

from fabric_pipelines.dataplane import libpq
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.postgres import EmbeddedPostgres, kept_elsewhere, place
from fabric_pipelines.errors import StartFailed
from fabric_pipelines.settings import Settings


@contextmanager
def broker(home: Path, program: Sequence[str] = ("-m", "fabric_pipelines.broker")) -> Iterator[str]:
    """A broker process of its own home; its endpoint. program: what Python runs as the broker."""
    with _process(program, {"FABRIC_HOME": str(home)}):
        yield Settings(home=home).broker_endpoint


@contextmanager
def completion(home: Path, pg_url: str) -> Iterator[None]:
    """A completion process that lands what the broker of `home` has in that database."""
    with _process(
        ("-m", "fabric_pipelines.completion"), {"FABRIC_HOME": str(home), "FABRIC_PG_URL": pg_url}
    ):
        yield


@contextmanager
def postgres(home: Path) -> Iterator[EmbeddedPostgres]:
    """A server with the fabric's own settings, in a folder of this run on the disk of `home`."""
    home.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=home))
    inner = Settings(home=folder)
    server = EmbeddedPostgres(place(inner), log=folder / "postgres.log")
    libpq.forget_shell()
    try:
        server.start()
        yield server
    finally:
        server.stop()
        for left in (folder, kept_elsewhere(inner)):
            if left is not None:
                shutil.rmtree(left, ignore_errors=True)


def database(server: EmbeddedPostgres, name: str) -> str:
    """The URL of a new, migrated database."""
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute(f'create database "{name}"'.encode())
    url = server.url.replace("/fabric?", f"/{name}?")
    Database(url).migrate()
    return url


def landed_rows(pg_url: str) -> int:
    """Generated results that this database holds."""
    with psycopg.connect(pg_url) as connection:
        row = connection.execute("select count(*) from fabric.generate").fetchone()
    assert row is not None, "count(*) gives a row"
    return int(row[0])


@contextmanager
def _process(program: Sequence[str], environ: Mapping[str, str]) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, *program],
        env={**os.environ, **environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "ready" not in line:
            raise StartFailed(f"{' '.join(program)} did not start: {line.strip()!r}")
        yield
    finally:
        process.terminate()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()
