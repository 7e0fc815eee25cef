"""Is a folder of the cache still what was pulled or converted: every file hashed again, every difference named.

Sources are held against the catalogue, a conversion against what it wrote about itself, and its manifest, which is not
among those files, against the recipe. Reads only. Hashing all of both models of the catalogue takes a second, so
it is done whenever somebody asks; sizes alone would not see a flipped bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.errors import ManifestRefused
from fabric_pipelines.models.catalogue import ModelSpec
from fabric_pipelines.models.description import contents as described_by
from fabric_pipelines.models.facts import contradictions
from fabric_pipelines.models.recipes import CONTENTS, MANIFEST, Recipe, manifest_bytes, origin_of
from fabric_pipelines.models.sources import sha256_file


@dataclass(frozen=True, slots=True)
class Examined:
    """files, size: what was read, in bytes; differences: one sentence each, empty when all is as written."""

    files: int
    size: int
    differences: tuple[str, ...]


def examine_sources(folder: Path, spec: ModelSpec) -> Examined:
    return _examine(folder, {file.name: file.sha256 for file in spec.files}, [])


def examine_part(folder: Path, recipe: Recipe, spec: ModelSpec) -> Examined:
    """A conversion that cannot say what it holds is a difference itself. What it says of the shape (`facts`) comes out
    of the source's own header; what its files deny of it is a difference, and the rest is believed."""
    contents = folder / CONTENTS
    current = folder.name == f"{recipe.part}-{recipe.mark_if_installed(spec)}"
    found = _manifest_differences(folder / MANIFEST, recipe, spec) if current else []
    try:
        described = json.loads(contents.read_bytes())
        files = described["files"]
        expected = {str(name): str(entry["sha256"]) for name, entry in files.items()}
        origin = origin_of(recipe, spec, files) if current else {}
        wrong = [name for name, value in origin.items() if described[name] != value]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Examined(0, 0, (f"{contents} cannot be read", *found))
    if wrong:
        found.append(f"{contents} changed: {', '.join(wrong)} cannot be what was written")
    examined = _examine(folder, expected, found)
    if examined.differences:
        return examined
    # Every file is the one that was written, so what they say of the facts is right, and the graph can be read.
    try:
        denied = contradictions(folder, described_by(folder), graph=current)
    except ManifestRefused as fault:
        return Examined(examined.files, examined.size, (str(fault),))
    said = tuple(f"{contents} changed: {name} {why}" for name, why in denied.items())
    return Examined(examined.files, examined.size, said)


def _manifest_differences(path: Path, recipe: Recipe, spec: ModelSpec) -> list[str]:
    expected = manifest_bytes(recipe, spec)
    if expected is None:
        return []
    try:
        same = json.loads(path.read_bytes()) == json.loads(expected)
    except OSError:
        return [f"{path} is missing"]
    except ValueError:
        return [f"{path} cannot be read"]
    return [] if same else [f"{path} changed: it is not the manifest of this conversion"]


def _examine(folder: Path, expected: Mapping[str, str], found: list[str]) -> Examined:
    size = 0
    for name, digest in expected.items():
        path = folder / name
        try:
            size += path.stat().st_size
            if sha256_file(path) != digest:
                found.append(f"{path} changed: its sha256 is another one")
        except FileNotFoundError:
            found.append(f"{path} is missing")
        except OSError as fault:  # a disk that cannot read it, or a folder in its place
            found.append(f"{path} cannot be read ({fault.strerror})")
    return Examined(len(expected), size, tuple(found))
