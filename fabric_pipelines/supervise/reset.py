"""Empties a home: what the fabric keeps there, how large it is, and its removal.

Removes only what the fabric itself makes, by name: a FABRIC_HOME that was pointed to somebody's folder by
mistake loses nothing else. Never touches a database of FABRIC_PG_URL, an s3:// lake or the model cache. Refuses
while anything runs on the home: an emptied home under a running broker is neither kept nor gone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.dataplane.postgres import place
from fabric_pipelines.errors import AlreadyRunning, StorageFailed
from fabric_pipelines.settings import Settings
from fabric_pipelines.supervise.control import down
from fabric_pipelines.supervise.ground import forget_words
from fabric_pipelines.supervise.place import Place

OWN_NAMES = (
    "dagster",
    "journal",
    "lake",
    "logs",
    "postgres",
    "postgres.lock",
    "postgres.users",
    "run",
    "shards",
)


@dataclass(frozen=True, slots=True)
class Contents:
    """folders: what a reset removes; size: bytes in them; foreign: names in the home that stay."""

    folders: tuple[Path, ...]
    size: int
    foreign: tuple[str, ...]


def require_idle(settings: Settings) -> None:
    """AlreadyRunning when a supervisor runs on the home."""
    found = Place.of(settings).read_state()
    if found.running:
        raise AlreadyRunning(
            f"the fabric of {settings.home} runs, pid {found.pid or 'unknown'}: stop it with `fabric down` "
            "before you reset it"
        )


def empty(settings: Settings) -> Contents:
    """Remove what the fabric made; returns what that was."""
    down(settings)  # what a killed supervisor left behind
    with _alone(settings):
        found = contents(settings)
        remove(found)
        forget_words(Place.of(settings))
    return found


@contextmanager
def _alone(settings: Settings) -> Iterator[None]:
    """While it lasts no `fabric up` can start on the home; AlreadyRunning if a process that somebody started by
    hand holds anything in it."""
    supervisor = Place.of(settings)
    made = supervisor.runtime_dir.is_dir()
    lock = supervisor.take_lock(patience_s=0.3) if made else None
    try:
        if lock is None:
            require_idle(settings)
        for path in _locks(settings):
            _require_free(path)
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _locks(settings: Settings) -> list[Path]:
    devices = sorted(settings.runtime_dir.glob("device-*.lock"))
    return [settings.journal_dir / "lock", place(settings).data.parent / "postgres.lock", *devices]


def _require_free(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning(
                f"{path} is held by a process that runs ({lock.read().strip()}): stop it before you reset"
            ) from None


def contents(settings: Settings) -> Contents:
    home = settings.home
    inside = sorted(home.iterdir()) if home.is_dir() else []
    where = place(settings)
    folders = {path for path in inside if path.name in OWN_NAMES}
    server = (where.data.parent,) if where.elsewhere else (where.data, where.sockets)
    folders |= {path for path in (settings.runtime_dir, *server) if path.exists()}
    tops = tuple(
        sorted(
            (path for path in folders if not folders & set(path.parents)),
            key=lambda path: (path == settings.runtime_dir, path),  # the lock goes last
        )
    )
    foreign = tuple(path.name for path in inside if path.name not in OWN_NAMES)
    return Contents(tops, sum(folder_size(path) for path in tops), foreign)


def remove(found: Contents) -> None:
    for folder in found.folders:
        try:
            if folder.is_symlink() or folder.is_file():
                folder.unlink()
            elif folder.exists():
                shutil.rmtree(folder)
        except OSError as fault:
            raise StorageFailed(
                f"{fault.filename or folder} cannot be removed: {fault.strerror}"
            ) from fault


def folder_size(folder: Path) -> int:
    """Bytes of all files below; what vanishes while we look counts nothing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).lstat().st_size
            except FileNotFoundError:
                continue
    return total
