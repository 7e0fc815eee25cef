"""Real servers for tests: one embedded Postgres a session, a migrated database of its own for each test."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.postgres import EmbeddedPostgres, Place

TEMPLATE = "fabric_template"
TMPFS_BYTES = 6 << 20


@pytest.fixture(scope="session")
def open_folder() -> Iterator[Path]:
    """A short folder that the server's own user can walk through; pytest's tmp_path is mode 700."""
    folder = Path(tempfile.mkdtemp(prefix="fabric-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgres(open_folder: Path) -> Iterator[EmbeddedPostgres]:
    """A running server. Without fsync: these tests kill processes, not machines."""
    server = EmbeddedPostgres(
        Place(open_folder, open_folder / "postgres", open_folder / "run"),
        options={"fsync": "off", "shared_buffers": "64MB", "max_connections": "40"},
        log=open_folder / "postgres.log",
        durable_initdb=False,
    )
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def _template(postgres: EmbeddedPostgres) -> str:
    _create(postgres, TEMPLATE, template="template1")
    Database(url_of(postgres, TEMPLATE)).migrate()
    return TEMPLATE


@pytest.fixture
def database(postgres: EmbeddedPostgres, _template: str) -> Iterator[Database]:
    """A migrated database that no other test sees."""
    name = f"t_{uuid.uuid4().hex[:12]}"
    _create(postgres, name, template=_template)
    yield Database(url_of(postgres, name))
    _drop(postgres, name)


@pytest.fixture
def empty_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """A database without the fabric's schema."""
    name = f"t_{uuid.uuid4().hex[:12]}"
    _create(postgres, name, template="template1")
    yield Database(url_of(postgres, name))
    _drop(postgres, name)


def url_of(server: EmbeddedPostgres, name: str) -> str:
    return server.url.replace("/fabric?", f"/{name}?")


def _create(server: EmbeddedPostgres, name: str, *, template: str) -> None:
    statement = sql.SQL("create database {} template {}").format(
        sql.Identifier(name), sql.Identifier(template)
    )
    with psycopg.connect(url_of(server, "postgres"), autocommit=True) as connection:
        connection.execute(statement)


def _drop(server: EmbeddedPostgres, name: str) -> None:
    statement = sql.SQL("drop database {} with (force)").format(sql.Identifier(name))
    with psycopg.connect(url_of(server, "postgres"), autocommit=True) as connection:
        connection.execute(statement)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of TMPFS_BYTES that a test can fill, or make read-only."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root; the simulated disk covers the rest")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this root may not mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
