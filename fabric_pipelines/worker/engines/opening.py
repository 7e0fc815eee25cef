"""Opening an engine from its cache folder: read what it says, compare with what is installed, before loading.

The nine fields come from `manifest.json` alone; nothing is filled in. A contradiction between manifest,
contents and runtime is refused with the names of the fields at fault.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_pipelines import models
from fabric_pipelines.errors import ManifestRefused, StorageFailed
from fabric_pipelines.models import contents
from fabric_pipelines.models.description import TwiceNamed, checked, json_object, remedy
from fabric_pipelines.models.recipes import CONTENTS, MANIFEST
from fabric_pipelines.models.sources import sha256_file
from fabric_pipelines.records.manifest import EngineManifest

DRAFT = ".draft-"


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """A converted model as an engine sees it; facts: shape and special ids, see models.recipes."""

    path: Path
    manifest: EngineManifest
    fingerprint: str
    facts: Mapping[str, Any]


def read_folder(path: Path) -> EngineFolder:
    """Manifest, fingerprint and facts of a part; checks them against each other, the files' sizes and what the small ones
    say."""
    return _judged(path, EngineManifest.from_json(_nine_fields(path)), contents(path))


def publish(
    path: Path,
    manifest: EngineManifest,
    described: Mapping[str, Any],
    judge: Callable[[EngineFolder], object] = lambda folder: None,
) -> None:
    """Write both files of an engine folder, or refuse and leave what is there. judge: refuses what would not open, by
    constructing the engine. Each file takes its place whole; between the two an engine is what both say together."""
    judge(_judged(path, manifest, checked(path, {**described})))
    for name, value, sort in ((CONTENTS, described, True), (MANIFEST, manifest.as_json(), False)):
        draft = path / f"{DRAFT}{name}.{os.getpid()}"
        try:
            with draft.open("w") as stream:
                stream.write(json.dumps(value, indent=2, sort_keys=sort))
                stream.flush()
                os.fsync(stream.fileno())
            draft.replace(path / name)
        except OSError as fault:
            draft.unlink(missing_ok=True)
            raise StorageFailed(
                f"{path / name} cannot be written ({fault.strerror or fault}): free some space, or see whether the folder "
                "may be written"
            ) from fault


def files_of(path: Path) -> dict[str, dict[str, Any]]:
    """Name to size and sha256 of the files that a description speaks of: all but itself."""
    return {
        file.name: {"size": file.stat().st_size, "sha256": sha256_file(file)}
        for file in sorted(path.iterdir())
        if file.is_file() and file.name not in (MANIFEST, CONTENTS) and not is_draft(file.name)
    }


def is_draft(name: str) -> bool:
    """Of a description that a killed build left."""
    return name.startswith(DRAFT)


def _judged(path: Path, manifest: EngineManifest, described: Mapping[str, Any]) -> EngineFolder:
    facts = described["facts"]
    too_long = [
        name
        for name in ("max_input_len", "max_seq_len")
        if getattr(manifest, name) > facts["context"]
    ]
    if too_long:
        raise ManifestRefused(
            f"engine manifest refused: {', '.join(too_long)} above the model's context of "
            f"{facts['context']} tokens",
            tuple(too_long),
        )
    for name, entry in described["files"].items():
        try:
            size = (path / name).stat().st_size
        except OSError as fault:
            raise ManifestRefused(
                f"{path / name} cannot be read ({fault.strerror or fault}): {remedy(path)}"
            ) from fault
        if size != entry["size"]:
            raise ManifestRefused(
                f"{path / name} has not the size it was written with: {remedy(path)}"
            )
    models.require_facts(path, described)
    fingerprint = manifest.fingerprint(described["weights_sha256"], facts)
    return EngineFolder(path, manifest, fingerprint, facts)


def _nine_fields(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        return json_object(file.read_bytes())
    except TwiceNamed as fault:
        raise ManifestRefused(
            f"engine manifest refused: {fault.key} is there twice in {file}", (fault.key,)
        ) from fault
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as fault:
        raise ManifestRefused(f"{path} is not a readable engine folder ({fault})") from fault
    except ValueError as fault:
        raise ManifestRefused(f"{file} is not an object of nine fields") from fault


def require(manifest: EngineManifest, field: str, found: Any, where: str) -> None:
    """Refuse unless the manifest's field equals what `where` reports."""
    declared = getattr(manifest, field)
    if declared != found:
        raise ManifestRefused(
            f"engine manifest refused: {field} is {declared!r}, but {where} says {found!r}",
            (field,),
        )
