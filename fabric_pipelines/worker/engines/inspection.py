"""Inspection: what an engine says of itself, for a person or a script that decides whether to run it.

`inspect` reads files only; with `opened` it loads the engine, as a worker would, and adds the engine's own word
on each field. `fingerprint` hashes the weights again, so its answer is about the bytes that are there now.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabric_pipelines import models
from fabric_pipelines.errors import DeviceRefused, UsageError
from fabric_pipelines.screen import plain
from fabric_pipelines.worker.engines.agreement import Told
from fabric_pipelines.worker.engines.door import Engine
from fabric_pipelines.worker.engines.opening import read_folder
from fabric_pipelines.worker.engines.registry import construct_engine, engine_folder

KINDS = ("cpu", "cuda")


def inspect(
    name: str, *, cache: Path, threads: int, device: str | None = None, opened: bool = False
) -> dict[str, Any]:
    """device: "cpu" or "cuda", None = the engine's own; DeviceRefused for one that it does not run on. Keys engine, fingerprint, folder, device, kinds, continuous, packed, manifest, profile, told (empty unless
    `opened`). Raises what constructing and opening raise: ManifestRefused by field, MissingDependency, ..."""
    if device not in (None, *KINDS):
        raise UsageError(f"device {device!r} is no kind of device; it is {' or '.join(KINDS)}")
    engine = construct_engine(name, cache=cache, threads=threads, device=device or "cpu")
    runs_on = engine.capabilities.device
    if device not in (None, runs_on):
        raise DeviceRefused(
            f"engine {name} runs on {runs_on} only, not on {device}: leave --device out, or choose another engine"
        )
    told: Mapping[str, Told] = {}
    if opened:
        engine.open()
        try:
            told = engine.introspect()
            return _said(engine, engine_folder(name, cache), told)
        finally:
            engine.close()
    return _said(engine, engine_folder(name, cache), told)


def _said(engine: Engine, folder: Path, told: Mapping[str, Told]) -> dict[str, Any]:
    able = engine.capabilities
    return {
        "engine": engine.name,
        "fingerprint": engine.fingerprint,
        "folder": str(folder),
        "device": able.device,
        "kinds": sorted(able.kinds),
        "continuous": able.continuous,
        "packed": able.packed,
        "manifest": engine.manifest.as_json(),
        "profile": plain(engine.profile),
        "told": {
            field: {"value": word.value, "at_most": word.at_most, "who": word.who}
            for field, word in told.items()
        },
    }


def built(name: str, folder: Path) -> dict[str, Any]:
    """Keys engine, fingerprint, folder, manifest of a folder that was just made."""
    read = read_folder(folder)
    return {
        "engine": name,
        "fingerprint": read.fingerprint,
        "folder": str(folder),
        "manifest": read.manifest.as_json(),
    }


def fingerprint(name: str, *, cache: Path, device: str = "cpu") -> dict[str, Any]:
    """Keys engine, fingerprint, earlier_fingerprint (as programs before December 2026 wrote it on completions, profiles and
    receipts), weights_sha256, files. DigestMismatch names a file that is not the one described."""
    engine = construct_engine(name, cache=cache, threads=1, device=device)
    folder = engine_folder(name, cache)
    models.require_whole(folder)
    described = models.contents(folder)
    return {
        "engine": name,
        "fingerprint": engine.fingerprint,
        "earlier_fingerprint": engine.manifest.earlier_fingerprint(described["weights_sha256"]),
        "weights_sha256": described["weights_sha256"],
        "files": len(described["files"]),
    }
