"""Upkeep of the model cache: is every file still the one that was pulled or converted, and what does nobody open any more.

Reads and deletes, never mends: what differs or lacks is named, and the remedy is to pull again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.errors import ModelMissing, StorageFailed
from fabric_pipelines.models import catalogue
from fabric_pipelines.models.cache import Installed, installed, lock_if_free, sources_folder
from fabric_pipelines.models.recipes import RECIPES
from fabric_pipelines.models.wholeness import Examined, examine_part, examine_sources


@dataclass(frozen=True, slots=True)
class Verified:
    """files, size: what was read, in bytes; differences: one sentence each, empty when all is as written; missing: one
    for each part that the installed runtimes would open and that is not there."""

    name: str
    files: int
    size: int
    differences: tuple[str, ...]
    missing: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.differences and not self.missing


def verify(name: str, cache: Path) -> Verified:
    """Hash every file of a pulled model again, whatever else of it is missing. ModelMissing when nothing is there."""
    spec = catalogue.spec_of(name)
    if not _visible(cache / name):
        raise ModelMissing(
            f"nothing of model {name} is in {cache}: run `fabric models pull {name}`"
        )
    found: list[Examined] = []
    sources = sources_folder(spec, cache)
    if sources.is_dir():  # they may go once everything is converted
        found.append(examine_sources(sources, spec))
    missing: list[str] = []
    for recipe in RECIPES[spec.architecture]:
        mark = recipe.mark_if_installed(spec)
        folders = list(_folders(cache / name, recipe.part, mark))
        found += [examine_part(folder, recipe, spec) for folder in folders]
        if mark is not None and not folders:
            missing.append(f"{cache / name / f'{recipe.part}-{mark}'} is missing")
    return Verified(
        name,
        sum(item.files for item in found),
        sum(item.size for item in found),
        tuple(line for item in found for line in item.differences),
        tuple(missing),
    )


def pulled(cache: Path) -> list[str]:
    """Models of which anything is there."""
    return [name for name in catalogue.MODELS if _visible(cache / name)]


def _folders(home: Path, part: str, mark: str | None) -> Iterator[Path]:
    """The folder that the installed runtime would open; all of that part where it is not installed."""
    pattern = f"{part}-{mark}" if mark else f"{part}-*"
    return (folder for folder in sorted(home.glob(pattern)) if folder.is_dir())


def _visible(home: Path) -> list[Path]:
    return [path for path in home.glob("[!.]*") if path.is_dir()]


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
