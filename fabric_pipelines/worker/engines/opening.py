"""Opening an engine from its cache folder: read what it says, compare with what is installed, before loading.

The nine fields come from `manifest.json` alone; nothing is filled in. A contradiction between manifest,
contents and runtime is refused with the names of the fields at fault.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_pipelines.errors import ManifestRefused
from fabric_pipelines.models import contents
from fabric_pipelines.models.description import TwiceNamed, json_object, remedy
from fabric_pipelines.models.recipes import MANIFEST
from fabric_pipelines.records.manifest import EngineManifest


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """A converted model as an engine sees it; facts: shape and special ids, see models.recipes."""

    path: Path
    manifest: EngineManifest
    fingerprint: str
    facts: Mapping[str, Any]


def read_folder(path: Path) -> EngineFolder:
    """Manifest, fingerprint and facts of a part; checks them against each other and the files' sizes."""
    manifest = EngineManifest.from_json(_nine_fields(path))
    described = contents(path)
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
    return EngineFolder(path, manifest, manifest.fingerprint(described["weights_sha256"]), facts)


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
