"""What a machine must have before `fabric up` can work: one line a check, each fault with its remedy.

Looks only; changes nothing and downloads nothing. A warning works with a loss, a failure does not work.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fabric_pipelines.errors import FabricError
from fabric_pipelines.settings import Settings
from fabric_pipelines.supervise.table import free_port

PYTHON_LEAST, PYTHON_BELOW = (3, 11), (3, 13)
DISK_FAIL_BYTES = 1 << 30
DISK_WARN_BYTES = 5 << 30  # models 1.2 GB, journal segments 256 MiB each, a database
EMBEDDED_PACKAGES = ("ctranslate2", "onnxruntime", "onnx", "gguf", "tokenizers", "safetensors")


@dataclass(frozen=True, slots=True)
class Finding:
    """status: "ok", "warn" or "fail"; fix: what to do about it, empty when ok."""

    check: str
    status: str
    found: str
    fix: str = ""


def examine(settings: Settings) -> list[Finding]:
    return [
        check_python(),
        check_home(settings.home),
        check_disk(settings.home),
        *check_packages(),
        check_postgres(settings),
        check_port(settings.ui_host, settings.ui_port),
        *check_models(settings.models),
    ]


def check_python(version: tuple[int, int] | None = None) -> Finding:
    seen = sys.version_info[:2] if version is None else version
    text = f"{platform.python_implementation()} {seen[0]}.{seen[1]}"
    if PYTHON_LEAST <= seen < PYTHON_BELOW:
        return Finding("python", "ok", text)
    return Finding("python", "fail", text, "use Python 3.11 or 3.12")


def check_home(home: Path) -> Finding:
    there = _nearest(home)
    if os.access(there, os.W_OK | os.X_OK):
        return Finding("home", "ok", str(home))
    return Finding(
        "home", "fail", f"{there} cannot be written", "point FABRIC_HOME to a folder of yours"
    )


def check_disk(home: Path) -> Finding:
    free = shutil.disk_usage(_nearest(home)).free
    found = f"{free / (1 << 30):.1f} GiB free at {home}"
    if free >= DISK_WARN_BYTES:
        return Finding("disk", "ok", found)
    status = "warn" if free >= DISK_FAIL_BYTES else "fail"
    return Finding("disk", status, found, "free some space or point FABRIC_HOME to another disk")


def check_packages() -> Iterator[Finding]:
    missing = [name for name in EMBEDDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding(
            "packages",
            "warn",
            f"not installed: {', '.join(missing)}",
            'run `pip install "fabric-pipelines[embedded]"` to run the embedded engines',
        )
    else:
        yield Finding("packages", "ok", "embedded engines can be loaded")


def check_postgres(settings: Settings) -> Finding:
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.dataplane.postgres_binaries import find_binaries

    try:
        if settings.pg_url:
            Database.of(settings).connect().close()
            return Finding("postgres", "ok", "FABRIC_PG_URL answers")
        binaries = find_binaries()
    except FabricError as fault:
        return Finding("postgres", "fail", type(fault).__name__, str(fault))
    return Finding("postgres", "ok", f"{binaries.version} in {binaries.bin}")


def check_port(host: str, first: int) -> Finding:
    try:
        port = free_port(host, first)
    except FabricError as fault:
        return Finding("port", "fail", "none is free", str(fault))
    if port == first:
        return Finding("port", "ok", f"{host}:{port} is free for the UI")
    return Finding("port", "ok", f"{first} is taken; the UI will use {port}")


def check_models(cache: Path) -> Iterator[Finding]:
    from fabric_pipelines import models

    return (check_model(name, cache) for name in models.MODELS)


def check_model(name: str, cache: Path) -> Finding:
    """Every file is hashed: a damaged one is what nobody sees until a worker refuses it."""
    from fabric_pipelines import models

    check, pull = f"model {name}", f"run `fabric models pull {name}`"
    if name not in models.pulled(cache):
        return Finding(check, "warn", "not pulled", pull)
    found = models.verify(name, cache)
    if found.differences:
        said = "; ".join((*found.differences, *found.missing))
        return Finding(check, "fail", said, f"{pull}, which makes again what is damaged")
    if found.missing:
        return Finding(check, "warn", "; ".join(found.missing), pull)
    try:
        models.located(name, cache)
    except FabricError as fault:  # a runtime is not installed
        return Finding(check, "warn", "not for the installed runtimes", str(fault))
    return Finding(check, "ok", f"in {cache}")


def _nearest(folder: Path) -> Path:
    """The folder itself, or the first parent that exists."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())
