"""Empties a home: what the fabric keeps there, how large it is, and its removal.

Removes only what the fabric itself makes, by name: a FABRIC_HOME that was pointed to somebody's folder by
mistake loses nothing else. Never touches a database of FABRIC_PG_URL, an s3:// lake or the model cache.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.dataplane.postgres import place
from fabric_pipelines.errors import StorageFailed
from fabric_pipelines.settings import Settings

OWN_NAMES = (
    "dagster",
    "journal",
    "lake",
    "logs",
    "postgres",
    "postgres.lock",
    "run",
    "shards",
)


@dataclass(frozen=True, slots=True)
class Contents:
    """folders: what a reset removes; size: bytes in them; foreign: names in the home that stay."""

    folders: tuple[Path, ...]
    size: int
    foreign: tuple[str, ...]


def contents(settings: Settings) -> Contents:
    home = settings.home
    inside = sorted(home.iterdir()) if home.is_dir() else []
    where = place(settings)
    folders = {path for path in inside if path.name in OWN_NAMES}
    server = (where.data.parent,) if where.elsewhere else (where.data, where.sockets)
    folders |= {path for path in (settings.runtime_dir, *server) if path.exists()}
    tops = tuple(sorted(path for path in folders if not folders & set(path.parents)))
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
