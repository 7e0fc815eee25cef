"""The lake: large outputs as immutable objects named by their own digest, in a local folder or on S3.

An object is written beside and renamed (local) or read back by size (S3); a name that exists is the same
content, so putting twice is free. Digest and row count are recorded in Postgres. Refuses to hand out bytes
that do not match their digest.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from fabric_pipelines.dataplane import s3
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.sql import query
from fabric_pipelines.errors import DigestMismatch, StorageFailed, UsageError
from fabric_pipelines.settings import Settings

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Artifact:
    """size in bytes; rows where it is a table."""

    uri: str
    size: int
    sha256: str
    rows: int | None = None


class Lake:
    """`url`: a folder or s3://bucket/prefix. Credentials and endpoint of S3 come from the environment
    (AWS_*, AWS_ENDPOINT_URL)."""

    def __init__(self, url: str) -> None:
        self._store: _Folder | _Bucket = (
            _Bucket(url) if url.startswith(s3.S3) else _Folder(Path(url))
        )

    @classmethod
    def of(cls, settings: Settings) -> Lake:
        return cls(settings.lake_url)

    def put(self, name: str, content: bytes | pa.Table) -> Artifact:
        """Keep `content` as <stem of name>/<sha256><suffix>. A table is written as the suffix says, .parquet
        or .arrow. Raises StorageFailed (disk full, read-only), StoreUnreachable (object store away
        or busy) or SettingsError (credentials, endpoint)."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise UsageError(
                f"{name!r} is no name of an object; use one like hidden/layers.parquet"
            )
        rows = content.num_rows if isinstance(content, pa.Table) else None
        with (
            tempfile.TemporaryDirectory(dir=self._store.scratch()) as folder,
            _kept("keep", self._store.named(name)),
        ):
            file = Path(folder) / "object"
            _write(file, content, path.suffix)
            sha256, size = _digest_of(file), file.stat().st_size
            uri = self._store.keep(file, f"{path.with_suffix('')}/{sha256}{path.suffix}", size)
        return Artifact(uri, size, sha256, rows)

    @contextmanager
    def open(self, uri: str) -> Iterator[BinaryIO]:
        """The object as a seekable file, without a check of its digest."""
        with _kept("read", uri), self._store.opened(uri) as file:
            yield file

    def read(self, artifact: Artifact | str) -> bytes:
        """All bytes, checked against the digest. Raises DigestMismatch."""
        uri = artifact if isinstance(artifact, str) else artifact.uri
        with self.open(uri) as file:
            data = file.read()
        _require_digest(uri, hashlib.sha256(data).hexdigest(), artifact)
        return data

    def read_table(self, artifact: Artifact | str) -> pa.Table:
        """A .parquet or .arrow object as a table, checked against its digest."""
        uri = artifact if isinstance(artifact, str) else artifact.uri
        source = pa.BufferReader(self.read(artifact))
        if uri.endswith(".parquet"):
            # Not pq.read_table: its dataset's threads let go of this Python buffer when they please, and one
            # that does so while the interpreter ends aborts the process (seen in 1 of 6 quickstarts under
            # load, "terminate called without an active exception"; compare apache/arrow#34314).
            with pq.ParquetFile(source, pre_buffer=False) as file:
                return file.read(use_threads=False)
        with pa.ipc.open_file(source) as file:
            return file.read_all()


def record(database: Database, artifact: Artifact) -> None:
    """Note digest and row count in fabric.artifacts. Idempotent."""
    values = {name: getattr(artifact, name) for name in Artifact.__dataclass_fields__}
    with database.session() as connection:
        connection.execute(query("record_artifact"), values)


def recorded(database: Database, uri: str) -> Artifact | None:
    with database.session() as connection:
        row = connection.execute(query("find_artifact"), {"uri": uri}).fetchone()
    return None if row is None else Artifact(*row)


class _Folder:
    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def scratch(self) -> str:
        """Temporary files lie in the folder itself, so that a rename never crosses file systems."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise StorageFailed(
                f"the lake {self._root} cannot be made: {fault.strerror}"
            ) from fault
        return str(self._root)

    def named(self, name: str) -> str:
        return str(self._root / name)

    def keep(self, file: Path, key: str, size: int) -> str:
        target = self._root / key
        if target.exists() and target.stat().st_size == size:
            return str(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        file.rename(target)
        for folder in (target.parent, target.parent.parent):
            _sync_folder(folder)
        return str(target)

    def opened(self, uri: str) -> BinaryIO:
        return Path(uri).open("rb")


class _Bucket:
    def __init__(self, url: str) -> None:
        self._root = s3.root_of(url)
        self._files = s3.files()

    def scratch(self) -> None:
        return None

    def named(self, name: str) -> str:
        return f"{s3.S3}{self._root}/{name}"

    def keep(self, file: Path, key: str, size: int) -> str:
        target = f"{self._root}/{key}"
        if not (self._files.exists(target) and self._files.size(target) == size):
            self._files.put_file(str(file), target)
            found = self._files.size(target)
            if found != size:
                raise StorageFailed(
                    f"s3://{target} has {found} bytes after {size} were written; it is not used"
                )
        return f"s3://{target}"

    def opened(self, uri: str) -> Any:
        return self._files.open(uri, "rb")


@contextmanager
def _kept(doing: str, what: str) -> Iterator[None]:
    """Faults of file system and object store as ours."""
    with s3.asked(doing, what):
        try:
            yield
        except FileNotFoundError as fault:
            if doing != "read" or s3.lacks_bucket(fault):
                raise
            raise StorageFailed(f"{what} is not in the lake; it was moved or deleted") from fault


def _write(file: Path, content: bytes | pa.Table, suffix: str) -> None:
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif suffix == ".parquet":
        pq.write_table(content, file, compression="zstd")
    elif suffix == ".arrow":
        with pa.ipc.new_file(str(file), content.schema) as writer:
            writer.write_table(content)
    else:
        raise UsageError(f"a table is kept as .parquet or .arrow, not {suffix!r}")


def _digest_of(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _require_digest(uri: str, found: str, artifact: Artifact | str) -> None:
    named = re.search(r"([0-9a-f]{64})(\.\w+)?$", uri)
    wanted = artifact.sha256 if isinstance(artifact, Artifact) else (named and named[1])
    if wanted is not None and found != wanted:
        raise DigestMismatch(
            f"{uri} has sha256 {found}, and {wanted} was recorded: it was changed since; "
            "delete it and make it again"
        )


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
