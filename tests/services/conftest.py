"""Real servers for tests: one embedded Postgres a session and version, a migrated database of its own for each test."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.postgres import EmbeddedPostgres, Place
from fabric_pipelines.dataplane.postgres_binaries import find_binaries, find_servers
from tests.support import skip_or_fail

TEMPLATE = "fabric_template"
TMPFS_BYTES = 6 << 20


@pytest.fixture(scope="session")
def open_folder() -> Iterator[Path]:
    """A short folder that the server's own user can walk through; pytest's tmp_path is mode 700."""
    folder = Path(tempfile.mkdtemp(prefix="fabric-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


Servers = Callable[[int | None], EmbeddedPostgres]


@pytest.fixture(scope="session")
def servers(open_folder: Path) -> Iterator[Servers]:
    """A running server by major version (None: the one a user gets), each started once. Without fsync: these
    tests kill processes, not machines."""
    running: dict[int, EmbeddedPostgres] = {}
    found = {item.major: item for item in reversed(find_servers())}

    def of(major: int | None) -> EmbeddedPostgres:
        major = find_binaries().major if major is None else major
        if major not in found:
            skip_or_fail(f"Postgres {major} (Debian: apt-get install postgresql-{major})")
        if major not in running:
            folder = open_folder / f"pg{major}"
            folder.mkdir(mode=0o755)
            server = EmbeddedPostgres(
                Place(folder, folder / "postgres", folder / "run"),
                found[major],
                options={"fsync": "off", "shared_buffers": "64MB", "max_connections": "40"},
                log=folder / "postgres.log",
                durable_initdb=False,
            )
            server.start()
            running[major] = server
            _create(server, TEMPLATE, template="template1")
            Database(url_of(server, TEMPLATE)).migrate()
        return running[major]

    yield of
    for server in running.values():
        server.stop()


@pytest.fixture
def postgres(servers: Servers, request: pytest.FixtureRequest) -> EmbeddedPostgres:
    """The server of a test; a module that must hold on all of them says `pytestmark = ON_EVERY_SERVER`."""
    return servers(getattr(request, "param", None))


@pytest.fixture
def database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """A migrated database that no other test sees."""
    name = f"t_{uuid.uuid4().hex[:12]}"
    _create(postgres, name, template=TEMPLATE)
    yield Database(url_of(postgres, name))
    _drop(postgres, name)


@pytest.fixture(scope="module")
def shared_database(servers: Servers) -> Iterator[Database]:
    """One for all tests of a module, each of which empties what it looks at: making one costs more than a short test."""
    server, name = servers(None), f"t_{uuid.uuid4().hex[:12]}"
    _create(server, name, template=TEMPLATE)
    yield Database(url_of(server, name))
    _drop(server, name)


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
