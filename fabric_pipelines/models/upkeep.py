"""Upkeep of the model cache: is every file still the one that was pulled or converted, and what does nobody open any more.

Reads and deletes, never mends: what differs is named, and the remedy is to delete that folder and pull again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.errors import StorageFailed
from fabric_pipelines.models import catalogue
from fabric_pipelines.models.cache import (
    Installed,
    ModelFiles,
    contents,
    installed,
    layout,
    lock_if_free,
    require_present,
)
from fabric_pipelines.models.recipes import CONTENTS
from fabric_pipelines.models.sources import sha256_file


@dataclass(frozen=True, slots=True)
class Verified:
    """files, size: what was read, in bytes; differences: one sentence each, empty when all is as written."""

    name: str
    files: int
    size: int
    differences: tuple[str, ...]


def verify(name: str, cache: Path) -> Verified:
    """Hash every file of a pulled model again: sources against the catalogue, conversions against what they wrote
    about themselves. ModelMissing when it is not there."""
    spec = catalogue.spec_of(name)
    files = layout(spec, cache)
    require_present(files)
    found: list[str] = []
    count = size = 0
    for folder, expected in _expected(files, found):
        for file, digest in expected.items():
            path = folder / file
            count += 1
            if not path.is_file():
                found.append(f"{path} is missing")
            elif sha256_file(path) != digest:
                found.append(f"{path} changed: its sha256 is another one")
            size += path.stat().st_size if path.is_file() else 0
    return Verified(name, count, size, tuple(found))


def pulled(cache: Path) -> list[str]:
    """Models that can be opened: all their parts are there."""
    return [
        name
        for name, spec in catalogue.MODELS.items()
        if all(folder.is_dir() for folder in layout(spec, cache).parts.values())
    ]


def _expected(files: ModelFiles, found: list[str]) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """Folder and digest by file name; a conversion that cannot say what it holds is a difference itself."""
    if files.sources.is_dir():  # they may go once everything is converted
        yield files.sources, {file.name: file.sha256 for file in files.spec.files}
    for folder in files.parts.values():
        try:
            described = contents(folder)["files"]
            yield folder, {name: entry["sha256"] for name, entry in described.items()}
        except (OSError, json.JSONDecodeError, KeyError, TypeError):
            found.append(f"{folder / CONTENTS} cannot be read")


def outdated(cache: Path) -> list[Installed]:
    """Folders that nothing here would open: conversions for other versions of the runtimes, sources of another
    version of the model, and what a killed pull left."""
    rows = [row for row in installed(cache) if not row.current]
    for name in catalogue.MODELS:
        home = cache / name
        if not home.is_dir():
            continue
        with lock_if_free(home) as free:
            if free:  # else somebody is building in there right now
                rows += [
                    Installed(name, "unfinished", folder, _size(folder), False)
                    for folder in sorted(home.glob(".building-*"))
                ]
    return rows


def prune(rows: Sequence[Installed]) -> int:
    """Delete what `outdated` found; bytes freed."""
    for row in rows:
        try:
            shutil.rmtree(row.folder)
        except OSError as fault:
            raise StorageFailed(
                f"{fault.filename or row.folder} cannot be removed: {fault.strerror}"
            ) from fault
    return sum(row.size for row in rows)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
