"""Agreement: the nine fields of a manifest against what the engine itself says of them.

Two looks. `require_served` reads the manifest alone, when the engine is constructed: a runtime or an architecture
that this engine does not know is refused before anything is imported. `require_agreement` compares every field with
the opened engine's own word, after loading and before the first lease. All faults are named at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fabric_pipelines.errors import ManifestRefused
from fabric_pipelines.records.manifest import EngineManifest


@dataclass(frozen=True, slots=True)
class Told:
    """What an opened engine says of one field: it is `value`, or with `at_most` it cannot be more than `value`.
    who: whose word that is, as a sentence needs it ("the runtime", "the graph's table of positions")."""

    value: Any
    who: str
    at_most: bool = False

    def denies(self, declared: Any) -> bool:
        return bool(declared > self.value) if self.at_most else bool(declared != self.value)


def require_served(
    manifest: EngineManifest, engine: str, *, runtime: str, architectures: Collection[str] = ()
) -> None:
    """ManifestRefused when the manifest is one of another runtime, or of a model class that this engine cannot
    run; architectures empty: whatever the runtime itself knows."""
    faults: dict[str, str] = {}
    if manifest.version.partition(" ")[0] != runtime:
        faults["version"] = f"is {manifest.version!r}, but this engine runs on {runtime}"
    if architectures and manifest.architecture not in architectures:
        known = ", ".join(sorted(architectures))
        faults["architecture"] = f"is {manifest.architecture!r}, but this engine runs {known}"
    _refuse(engine, faults)


def require_agreement(manifest: EngineManifest, engine: str, told: Mapping[str, Told]) -> None:
    """ManifestRefused naming every field in which the opened engine contradicts its manifest."""
    fields = manifest.as_json()
    assert set(told) == set(fields), "an engine speaks of all nine fields"
    _refuse(
        engine,
        {
            name: f"is {declared!r}, but {_word(told[name])}"
            for name, declared in fields.items()
            if told[name].denies(declared)
        },
    )


def _word(told: Told) -> str:
    return f"{told.who} says {'at most ' if told.at_most else ''}{told.value!r}"


def _refuse(engine: str, faults: Mapping[str, str]) -> None:
    if faults:
        raise ManifestRefused(
            f"engine manifest of {engine} refused: "
            + "; ".join(f"{name} {why}" for name, why in faults.items()),
            tuple(faults),
        )
