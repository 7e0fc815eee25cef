"""Objects under conditions: made only if the name is free, replaced only if nobody replaced them meanwhile.

What the pointer of a copied shard needs, and all that is asked of S3 beyond reading and writing: If-None-Match and
If-Match on PUT. A store that ignores the conditions is found out by `require_conditions` before anything
relies on it (some that call themselves S3 do: 16 winners of 16).
"""

from __future__ import annotations

import hashlib
import uuid
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_pipelines.dataplane import s3
from fabric_pipelines.errors import Refused

PART_BYTES = 50 << 20  # from twice that on, a file goes up in parts of this size
_READ_BYTES = 8 << 20
_FAILED_CONDITION = ("PreconditionFailed", "412", "At least one of the pre-conditions")


@dataclass(frozen=True, slots=True)
class Kept:
    """One object as the store speaks of it. etag: in most stores the MD5 of what was put, or of the MD5s of its parts; it
    proves nothing where it is something else."""

    size: int
    etag: str


class Objects:
    """`url`: s3://bucket/prefix. Credentials and endpoint come from the environment (AWS_*, AWS_ENDPOINT_URL). Any call may raise
    StoreUnreachable (the store is away or busy), StorageFailed or SettingsError, as s3.py tells them apart."""

    def __init__(self, url: str) -> None:
        self.root = s3.root_of(url)
        self._files = s3.files()

    def create(self, key: str, content: bytes) -> bool:
        """False if the name is taken; then nothing changed."""
        return self._put(key, content, IfNoneMatch="*")

    def replace(self, key: str, content: bytes, etag: str) -> bool:
        """False if the object is no longer the one of `etag`; then nothing changed."""
        return self._put(key, content, IfMatch=etag)

    def read(self, key: str) -> tuple[bytes, str] | None:
        """Content and etag of one version, None when there is none."""
        bucket, path = self._split(key)
        with self._asked("read", key):
            try:
                found = self._files.call_s3("get_object", Bucket=bucket, Key=path)
                return self._body(found), str(found["ETag"])
            except FileNotFoundError as fault:
                if s3.lacks_bucket(fault):
                    raise
                return None

    def look(self, key: str) -> Kept | None:
        with self._asked("look at", key):
            try:
                return _kept(self._files.info(f"{self.root}/{key}"))
            except FileNotFoundError as fault:
                if s3.lacks_bucket(fault):
                    raise
                return None

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of every object below `prefix`, by key."""
        return {key: kept.size for key, kept in self.listed(prefix).items()}

    def listed(self, prefix: str) -> dict[str, Kept]:
        """Every object below `prefix`, by key; one question a thousand of them."""
        with self._asked("list", prefix):
            try:
                found = self._files.find(f"{self.root}/{prefix}", detail=True)
            except FileNotFoundError:
                return {}
        head = f"{self.root}/"
        return {name.removeprefix(head): _kept(item) for name, item in found.items()}

    def remove(self, key: str) -> None:
        """Unconditional; one that is gone already is no fault."""
        with self._asked("remove", key), suppress(FileNotFoundError):
            self._files.rm_file(f"{self.root}/{key}")

    def put_file(self, key: str, path: Path) -> None:
        """Unconditional: for objects that are named by their own digest."""
        with self._asked("keep", key):
            self._files.put_file(str(path), f"{self.root}/{key}", chunksize=PART_BYTES)

    def get_file(self, key: str, path: Path) -> None:
        with self._asked("read", key):
            self._files.get_file(f"{self.root}/{key}", str(path))

    def sha256(self, key: str) -> str:
        """Hex digest of the object, which is read from end to end."""
        digest = hashlib.sha256()
        with (
            self._asked("read", key),
            self._files.open(f"{self.root}/{key}", block_size=_READ_BYTES) as content,
        ):
            while chunk := content.read(_READ_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def require_conditions(self) -> None:
        """Refused when the store lets a second writer create what exists."""
        key = f".conditions-{uuid.uuid4().hex}"
        try:
            if not self.create(key, b"1") or self.create(key, b"2"):
                raise Refused(
                    f"the object store at s3://{self.root} ignores If-None-Match, so two writers could both "
                    "switch a shard: use one that keeps conditional writes"
                )
        finally:
            self.remove(key)

    def _put(self, key: str, content: bytes, **condition: str) -> bool:
        bucket, path = self._split(key)
        with self._asked("keep", key):
            try:
                self._files.call_s3(
                    "put_object", Bucket=bucket, Key=path, Body=content, **condition
                )
            except FileExistsError:  # how s3fs names a failed condition of some servers
                return False
            except OSError as fault:
                if any(word in str(fault) for word in _FAILED_CONDITION):
                    return False
                raise
        return True

    def _body(self, found: Any) -> bytes:
        from fsspec.asyn import sync

        async def drained() -> bytes:
            async with found["Body"] as stream:
                content: bytes = await stream.read()
                return content

        content: bytes = sync(self._files.loop, drained)
        return content

    def _split(self, key: str) -> tuple[str, str]:
        bucket, _, prefix = self.root.partition("/")
        return bucket, f"{prefix}/{key}" if prefix else key

    def _asked(self, doing: str, key: str) -> AbstractContextManager[None]:
        return s3.asked(doing, f"{s3.S3}{self.root}/{key}")


def _kept(item: dict[str, Any]) -> Kept:
    return Kept(int(item["size"]), str(item.get("ETag") or "").strip('"'))
