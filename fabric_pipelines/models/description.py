"""What a folder of the model cache says of itself in `contents.json`: its files, their digest, and facts of the model's shape.

Read here and nowhere else, so that a description that is gone, cut, written twice over or of wrong types is one sentence
that names the file and the way to a whole one, whoever asks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabric_pipelines.errors import ManifestRefused
from fabric_pipelines.ids import canonical_json
from fabric_pipelines.models import catalogue
from fabric_pipelines.models.facts import contradictions, roots
from fabric_pipelines.models.recipes import CONTENTS

CHECKPOINTS = (
    "checkpoints"  # <model cache>/checkpoints/<engine name>/, where its owner put the files
)
SHA256 = re.compile(r"[0-9a-f]{64}")
NUMBERS = ("context", "vocab_size", "dim", "eos_id")
LISTS_OF_NUMBERS = ("eos_ids", "profile_ends")
LAYERS = "layers"  # a plan's are a list, of others the number of the last one


class Facts(dict[str, Any]):
    """A fact that an engine needs and that is not there is refused by its name."""

    def __init__(self, facts: Mapping[str, Any], folder: Path) -> None:
        super().__init__(facts)
        self._folder = folder

    def __missing__(self, name: str) -> Any:
        raise _refused(self._folder, f"says nothing of {name} among its facts", name)


def contents(folder: Path) -> dict[str, Any]:
    """The description of a part: weights_sha256, files (name to size and sha256), facts, and what it was made from. Raises
    ManifestRefused naming the file, what is wrong with it, and the remedy."""
    path = folder / CONTENTS
    try:
        described = json_object(path.read_bytes())
    except OSError as fault:
        raise _refused(folder, f"cannot be read ({fault.strerror or fault})") from fault
    except ValueError as fault:
        raise _refused(folder, f"is no description of a folder ({fault})") from fault
    return checked(folder, described)


def checked(folder: Path, described: dict[str, Any]) -> dict[str, Any]:
    """As `contents`, of a description that is not written yet."""
    if not _is_digest(described.get("weights_sha256")):
        raise _refused(folder, "has no weights_sha256 of 64 hex digits", "weights_sha256")
    for name in ("files", "facts"):
        if not isinstance(described.get(name), dict):
            raise _refused(folder, f"has no object {name}", name)
    for name, entry in described["files"].items():
        if not _is_entry(name, entry):
            raise _refused(
                folder, f"says of {name!r} no size and sha256, or it is no file beside it", "files"
            )
    for name, value in described["facts"].items():
        if not _is_fact(name, value):
            raise _refused(folder, f"says {value!r} of {name}, which is none", name)
    try:
        canonical_json(described["facts"])
    except ValueError as fault:  # NaN, or half of a pair of UTF-16: no digest can be made of it
        raise _refused(folder, f"has facts that are no JSON ({fault})", "facts") from fault
    if described["weights_sha256"] not in roots(described):
        raise _refused(
            folder, "has a weights_sha256 that is not the digest of its files", "weights_sha256"
        )
    described["facts"] = Facts(described["facts"], folder)
    return described


def require_facts(folder: Path, described: Mapping[str, Any], *, graph: bool = False) -> None:
    """ManifestRefused naming each fact that a file of the folder denies. graph: a trunk's own word too; RuntimeError when
    it is no trunk of ours."""
    wrong = contradictions(folder, described, graph=graph)
    if wrong:
        said = "; ".join(f"{name} {why}" for name, why in wrong.items())
        raise _refused(folder, f"contradicts its files: {said}", *wrong)


def json_object(given: bytes) -> dict[str, Any]:
    """The JSON object in `given`; ValueError when it is none, or names a key twice: which of the two was meant is anyone's
    guess, and json takes the last."""
    try:
        found = json.loads(given, object_pairs_hook=_once)
    except RecursionError as fault:
        raise ValueError("it is nested too deep") from fault
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    return found


class TwiceNamed(ValueError):
    """key: the name that stands there twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} is there twice")
        self.key = key


def remedy(folder: Path) -> str:
    """The way to a whole description: a conversion is made again by a pull, what was described or built by a build. Nothing is
    deleted but what a pull makes again: a described folder may hold its owner's only weights."""
    if folder.parent.name == CHECKPOINTS:
        return f"run `fabric engine build {folder.name}` again, with the sizes it had"
    if folder.parent.parent.name == "plans":
        return f"run `fabric engine build {folder.parent.name}` again, with the sizes it had"
    if folder.parent.name in catalogue.MODELS:
        return f"delete {folder} and run `fabric models pull {folder.parent.name}` again"
    return f"describe {folder} again, as it was described before"


def remedy_of_files(folder: Path) -> str:
    """The same where every file is the one that was described, and the runtime still cannot load them."""
    if folder.parent.name == CHECKPOINTS:
        return (
            f"its files are those that were described, so where they are at fault put good ones into {folder} and "
            f"{remedy(folder)}"
        )
    return remedy(folder)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise TwiceNamed(key)
        found[key] = value
    return found


def _refused(folder: Path, why: str, *fields: str) -> ManifestRefused:
    return ManifestRefused(f"{folder / CONTENTS} {why}: {remedy(folder)}", fields)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and SHA256.fullmatch(value) is not None


def _is_entry(name: str, entry: Any) -> bool:
    plain = bool(name) and name not in (".", "..") and not set(name) & {"/", "\\", "\0"}
    return (
        plain
        and isinstance(entry, dict)
        and _is_number(entry.get("size"))
        and _is_digest(entry.get("sha256"))
    )


def _is_fact(name: str, value: Any) -> bool:
    if name in NUMBERS:
        return _is_number(value)
    if name in LISTS_OF_NUMBERS:
        return _are_numbers(value)
    return name != LAYERS or _is_number(value) or (_are_numbers(value) and bool(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))
