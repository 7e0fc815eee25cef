"""The model cache: pull once, convert once, then open offline for ever.

    <cache>/<model>/sources-<digest>/   verified files as they came, so that a new runtime converts offline
    <cache>/<model>/<part>-<digest>/    a conversion, published by rename; present means complete
    <cache>/<model>/.lock               one pull at a time
    <cache>/<model>/.building-*         work in progress; found under the lock, it is dead and goes

A folder's name is the digest of what made it, so nothing here is ever changed in place.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_pipelines.errors import (
    DigestMismatch,
    ModelMissing,
    SourceUnreachable,
    StorageFailed,
)
from fabric_pipelines.folders import BUILDING, published
from fabric_pipelines.ids import digest
from fabric_pipelines.models import catalogue, recipes
from fabric_pipelines.models.catalogue import ModelSpec, spec_of
from fabric_pipelines.models.description import contents, remedy
from fabric_pipelines.models.recipes import (
    CONTENTS,
    MANIFEST,
    RECIPES,
    TOKENISER,
    Recipe,
    write_part,
)
from fabric_pipelines.models.sources import acquire, sha256_file
from fabric_pipelines.models.tokenisation import Tokeniser
from fabric_pipelines.models.wholeness import examine_part, examine_sources
from fabric_pipelines.telemetry import ProgressBoard

LOCK_POLL_S = 0.2
SOURCES = "sources"
# Of files that a runtime may load from a checkpoint's folder without being told of them.
LOADED = (".safetensors", ".json", ".bin", ".pt", ".pth", ".py", ".engine")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a pulled model lies: `parts` maps "tokeniser" and each variant to its folder."""

    spec: ModelSpec
    sources: Path
    parts: Mapping[str, Path]

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def size(self) -> int:
        """Bytes on disk, sources included."""
        return sum(_folder_size(path) for path in (self.sources, *self.parts.values()))


@dataclass(frozen=True, slots=True)
class Installed:
    """One folder of the cache. current: it is what the installed runtimes would open."""

    model: str
    part: str
    folder: Path
    size: int
    current: bool


def pull(
    name: str,
    cache: Path,
    *,
    source: str | None = None,
    progress: ProgressBoard | None = None,
) -> ModelFiles:
    """Make `name` ready to open. Does nothing, offline too, when it is there and every file hashes to what it was;
    what is damaged is fetched or converted again and takes the old one's place. Raises DigestMismatch,
    SourceUnreachable, MissingDependency or StorageFailed; what is in the cache stays as it was then."""
    spec = spec_of(name)
    files = layout(spec, cache)
    if not _to_make(files):
        return files
    board = progress or ProgressBoard(quiet=True)
    try:
        with _locked(cache / name, board):
            _clear_dead_builds(cache / name)
            broken = _to_make(files)
            if broken:  # else somebody else made it meanwhile
                for sentence in (line for lines in broken.values() for line in lines):
                    board.say(f"{name}: {sentence}; it is made again")
                if files.sources in broken or not files.sources.is_dir():
                    _get_sources(files, broken.get(files.sources, ()), source, board)
            for recipe in RECIPES[spec.architecture]:
                if files.parts[recipe.part] in broken:
                    _make_part(recipe, files, board)
    except OSError as fault:
        raise StorageFailed(
            f"the model cache {cache} cannot be written ({fault.strerror or fault}): free some space, or "
            "choose another folder with FABRIC_MODELS"
        ) from fault
    return files


def located(name: str, cache: Path) -> ModelFiles:
    """The files of a pulled model, all parts; ModelMissing says how to get it."""
    files = layout(spec_of(name), cache)
    for folder in files.parts.values():
        _require_present(name, folder)
    return files


def part_folder(name: str, part: str, cache: Path) -> Path:
    """One part's folder; the runtimes of other parts need not be installed. ModelMissing as above."""
    folder = cache / name / f"{part}-{part_mark(name, part)}"
    _require_present(name, folder)
    return folder


def _require_present(name: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ModelMissing(
            f"model {name} is not in {folder.parent.parent} for the installed runtimes: "
            f"run `fabric models pull {name}`"
        )


def tokeniser(name: str, cache: Path) -> Tokeniser:
    """The tokeniser of a pulled model."""
    folder = part_folder(name, TOKENISER, cache)
    require_whole(folder)
    return Tokeniser(folder)


def require_whole(folder: Path) -> None:
    """DigestMismatch when a file of a part is not the one that was converted: a flipped bit in the weights
    would make wrong results under the right fingerprint."""
    described = contents(folder)
    for name, entry in described["files"].items():
        try:
            found = sha256_file(folder / name)
        except OSError as fault:
            raise DigestMismatch(
                f"{folder / name} cannot be read ({fault.strerror or fault}): {remedy(folder)}"
            ) from fault
        if found != entry["sha256"]:
            raise DigestMismatch(f"{folder / name} changed since it was {_made(described, folder)}")
    if "weights" in described["facts"]:  # a checkpoint: its runtime takes whatever lies there
        _require_no_more(folder, described["files"])


def _require_no_more(folder: Path, files: Mapping[str, Any]) -> None:
    known = {*files, CONTENTS, MANIFEST}
    more = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix in LOADED and not path.name.startswith(".") and path.name not in known
    )
    if more:
        raise DigestMismatch(
            f"{', '.join(more)} in {folder} came after it was described, and what is loaded may be made of it: take it away, or "
            f"run `fabric engine build {folder.name}` to make it another engine"
        )


def _made(described: Mapping[str, Any], folder: Path) -> str:
    """How a part came to be, and the way to a whole one; a checkpoint was described where it lies."""
    if "model" in described:
        return (
            "converted (sha256 differs): run "
            f"`fabric models pull {described['model']}`, which makes {folder.name} again"
        )
    return (
        f"described (sha256 differs): bring the file back, or run `fabric engine build {folder.name}` "
        "to make it another engine"
    )


def part_mark(name: str, part: str) -> str:
    """Digest of what a part is made from: source bytes, converter, runtime version."""
    return recipes.part_mark(spec_of(name), part)


def installed(cache: Path) -> list[Installed]:
    """Every folder in the cache with its size, by model and part."""
    rows = []
    for name, spec in catalogue.MODELS.items():
        home = cache / name
        current = _current_folders(spec, cache)
        folders = sorted(home.iterdir()) if home.is_dir() else []
        for folder in (path for path in folders if path.is_dir() and path.name[0] != "."):
            part = folder.name.rpartition("-")[0]
            rows.append(Installed(name, part, folder, _folder_size(folder), folder in current))
    return rows


def layout(spec: ModelSpec, cache: Path) -> ModelFiles:
    """Where everything of a model lies or would lie."""
    home = cache / spec.name
    return ModelFiles(
        spec,
        sources_folder(spec, cache),
        {
            recipe.part: home / f"{recipe.part}-{recipe.mark(spec)}"
            for recipe in RECIPES[spec.architecture]
        },
    )


def sources_folder(spec: ModelSpec, cache: Path) -> Path:
    mark = digest([file.sha256 for file in spec.files])[:24]
    return cache / spec.name / f"{SOURCES}-{mark}"


def _current_folders(spec: ModelSpec, cache: Path) -> set[Path]:
    files = layout(spec, cache)
    return {files.sources, *files.parts.values()}


def _to_make(files: ModelFiles) -> dict[Path, tuple[str, ...]]:
    """Folders that are missing or damaged, with what is wrong in them. Sources may go once all is converted."""
    found: dict[Path, tuple[str, ...]] = {}
    if files.sources.is_dir():
        differences = examine_sources(files.sources, files.spec).differences
        found |= {files.sources: differences} if differences else {}
    for recipe in RECIPES[files.spec.architecture]:
        folder = files.parts[recipe.part]
        if not folder.is_dir():
            found[folder] = ()
        elif differences := examine_part(folder, recipe, files.spec).differences:
            found[folder] = differences
    return found


def _get_sources(
    files: ModelFiles, wrong: tuple[str, ...], source: str | None, board: ProgressBoard
) -> None:
    try:
        with published(files.sources) as folder:
            acquire(files.spec, source, folder, board)
    except SourceUnreachable as fault:
        if not wrong:
            raise
        raise SourceUnreachable(f"{wrong[0]}, and it cannot be had again: {fault}") from fault


def _make_part(recipe: Recipe, files: ModelFiles, board: ProgressBoard) -> None:
    target = files.parts[recipe.part]
    started = time.monotonic()
    with published(target) as folder:
        write_part(recipe, files.spec, files.sources, folder)
    board.say(f"{files.name}: {recipe.part} ready in {time.monotonic() - started:.0f} s")
    board.heartbeat()


@contextmanager
def _locked(home: Path, board: ProgressBoard) -> Iterator[None]:
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:
        said = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not said:
                    board.say(f"{home.name}: another process is pulling it, waiting")
                said = True
                board.heartbeat()
                time.sleep(LOCK_POLL_S)
        yield


@contextmanager
def lock_if_free(home: Path) -> Iterator[bool]:
    """Whether nobody pulls this model; nobody does while it lasts, if so."""
    with (home / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _clear_dead_builds(home: Path) -> None:
    for path in home.glob(f"{BUILDING}*"):
        shutil.rmtree(path)


def _folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
