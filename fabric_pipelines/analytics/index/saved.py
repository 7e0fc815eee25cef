"""An index on disk: what cannot be derived, as arrays with their digests, and a manifest that names them.

    index.json     kind, metric, dimension, seed, measured recall; sha256 of every file and of the content
    ids.npy vectors.npy list_of.npy centroids.npy centre.npy
    places.npy index.cuvs      of cuVS's kinds: the row of each of its places (-1: dead), and its own bytes

Rows lie by id without tombstones, so the same live rows have the same bytes whatever their history. Scan copies and codes
follow from them and are made again at loading. A folder is written beside its place, synced and renamed: it is there
whole or not at all. cuVS's bytes hold its rows once more and are read by the version that wrote them alone (recipe: library). Reading hashes every file, and refuses a folder that is not what its manifest says.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import CorruptionFound, StorageFailed, UsageError, VersionRefused
from fabric_pipelines.folders import OS_FOLDERS
from fabric_pipelines.ids import canonical_json

FORMAT = "fabric-index-1"
MANIFEST = "index.json"
Arrays = Mapping[str, npt.NDArray[Any]]


def write(
    folder: Path,
    recipe: Mapping[str, Any],
    arrays: Arrays,
    others: Mapping[str, Callable[[Path], None]] | None = None,
) -> str:
    """sha256 of the manifest: the name of this state. others: file -> what writes it at the path it is given.
    UsageError where something is there already."""
    if folder.exists():
        raise UsageError(f"{folder} is there already: name another folder, or remove it")
    temp = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir(parents=True)
        files = {}
        for name, array in arrays.items():
            content = _npy(array)
            files[f"{name}.npy"] = {"sha256": _sha256(content), "bytes": len(content)}
            _put(temp / f"{name}.npy", content)
        for name, put in (others or {}).items():
            put(temp / name)
            files[name] = _settled(temp / name)
        manifest = canonical_json(
            {
                "format": FORMAT,
                "recipe": dict(recipe),
                "rows": len(arrays["ids"]),
                "content_sha256": content_sha256(arrays["ids"], arrays["vectors"]),
                "files": files,
            }
        )
        _put(temp / MANIFEST, manifest)
        OS_FOLDERS.fsync_folder(temp)
        temp.rename(folder)
        OS_FOLDERS.fsync_folder(folder.parent)
    except OSError as fault:
        raise StorageFailed(f"{folder} could not be written: {fault.strerror}") from fault
    return _sha256(manifest)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The manifest and the arrays. UsageError where there is none, VersionRefused for another format,
    CorruptionFound for a file that is not what the manifest says."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise UsageError(f"there is no index in {folder}: build one first") from None
    except ValueError as fault:
        raise CorruptionFound(f"{folder / MANIFEST} is no JSON ({fault}): build it anew") from fault
    if manifest.get("format") != FORMAT:
        raise VersionRefused(
            f"{folder} has format {manifest.get('format')!r}; this program reads {FORMAT}: build it anew"
        )
    arrays = {}
    for name, entry in manifest["files"].items():
        path = folder / name
        array = path.suffix == ".npy"  # another library reads its own from the file
        try:
            content = path.read_bytes() if array else b""
            found = _sha256(content) if array else _file_sha256(path)
        except FileNotFoundError:
            raise CorruptionFound(f"{path} is missing: build the index anew") from None
        if found != entry["sha256"]:
            raise CorruptionFound(f"{path} is not what {MANIFEST} says: build the index anew")
        if array:
            arrays[path.stem] = np.load(io.BytesIO(content), allow_pickle=False)
    if content_sha256(arrays["ids"], arrays["vectors"]) != manifest["content_sha256"]:
        raise CorruptionFound(f"the rows in {folder} are not those of {MANIFEST}: build it anew")
    return manifest, arrays


def content_sha256(ids: npt.NDArray[np.int64], vectors: npt.NDArray[np.float32]) -> str:
    """Of rows by id: equal for equal rows, however they came together."""
    digest = hashlib.sha256(np.array(vectors.shape, "<i8").tobytes())
    digest.update(ids.astype("<i8").tobytes())
    digest.update(np.ascontiguousarray(vectors, "<f4").data)
    return digest.hexdigest()


def _npy(array: npt.NDArray[Any]) -> bytes:
    into = io.BytesIO()
    np.lib.format.write_array(into, np.ascontiguousarray(array), (1, 0), allow_pickle=False)
    return into.getvalue()


def _settled(path: Path) -> dict[str, Any]:
    """Of a file that another library wrote: synced, its digest and size."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"sha256": _file_sha256(path), "bytes": path.stat().st_size}


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _put(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
