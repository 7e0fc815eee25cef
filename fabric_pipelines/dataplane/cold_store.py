"""Where cold segments of the journal lie: a folder (another disk, a mount) or a bucket on S3.

The port is `journal.ObjectStore`. A folder is written beside, fsynced, renamed, its folder fsynced, through the same
file operations as the journal itself, so that the same simulated disk can crash under it. Promises only what the
store promises; the journal reads every object back before it relies on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from fabric_pipelines.dataplane import s3
from fabric_pipelines.errors import StorageFailed, StoreUnreachable, storage_failed
from fabric_pipelines.folders import make_folders
from fabric_pipelines.journal import FileOps, ObjectStore, OsFileOps
from fabric_pipelines.journal.files import read_exactly, write_all

BLOCK_BYTES = 16 << 20


def cold_store(url: str) -> ObjectStore | None:
    """`url`: a folder, s3://bucket/prefix, or empty for none."""
    if not url:
        return None
    return (
        BucketStore(url)
        if url.startswith(s3.S3)
        else FolderStore(Path(url).expanduser().absolute())
    )


class FolderStore:
    def __init__(self, root: Path, ops: FileOps | None = None) -> None:
        self._root, self._ops = root, ops or OsFileOps()

    @property
    def where(self) -> str:
        return str(self._root)

    def put(self, name: str, pieces: Iterable[memoryview], size: int) -> None:
        path = self._root / name
        beside = path.with_name(f"{path.name}.new")
        with self._asked("keep", name):
            make_folders(path.parent, self._ops)
            if beside.name in self._ops.names(path.parent):
                self._ops.unlink(beside)
            fd, at = self._ops.open(beside, create=True), 0
            try:
                for piece in pieces:
                    at = write_all(self._ops, fd, [piece], at)
                self._ops.fsync(fd)
            finally:
                self._ops.close(fd)
            self._ops.rename(beside, path)
            self._ops.fsync_folder(path.parent)
        if at != size:
            raise StorageFailed(f"{path} was to get {size} bytes and got {at}")

    def size(self, name: str) -> int | None:
        with self._asked("look at", name):
            fd = self._opened(name)
            if fd is None:
                return None
            try:
                return self._ops.size(fd)
            finally:
                self._ops.close(fd)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """From the device: what is cached may be more than the device has."""
        with self._asked("read", name):
            fd = self._opened(name)
            if fd is None:
                return b""
            try:
                self._ops.forget_cache(fd)
                return bytes(read_exactly(self._ops, fd, length, offset))
            finally:
                self._ops.close(fd)

    def remove(self, name: str) -> None:
        path = self._root / name
        with self._asked("remove", name):
            try:
                if path.name in self._ops.names(path.parent):
                    self._ops.unlink(path)
            except FileNotFoundError:
                return
            self._ops.fsync_folder(
                path.parent
            )  # also where an earlier call removed it and failed here

    def _opened(self, name: str) -> int | None:
        path = self._root / name
        return self._ops.open(path) if self._has(path) else None

    def _has(self, path: Path) -> bool:
        try:
            return path.name in self._ops.names(path.parent)
        except FileNotFoundError:
            return False

    @contextmanager
    def _asked(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as fault:
            failed = storage_failed(fault)
            raise StorageFailed(f"cannot {doing} {self._root / name}: {failed}") from fault


class BucketStore:
    """Credentials and endpoint come from the environment (AWS_*, AWS_ENDPOINT_URL)."""

    def __init__(self, url: str) -> None:
        self._root = s3.root_of(url)
        self._files = s3.files()

    @property
    def where(self) -> str:
        return f"{s3.S3}{self._root}"

    def put(self, name: str, pieces: Iterable[memoryview], size: int) -> None:
        with self._asked("keep", name):
            file = self._files.open(self._key(name), "wb", block_size=BLOCK_BYTES)
            try:
                for piece in pieces:
                    file.write(piece)
                file.close()
            except BaseException:
                # neither leaving a `with` nor the collector may complete half an object
                file.closed = True
                file.discard()
                raise

    def size(self, name: str) -> int | None:
        with self._asked("look at", name):
            try:
                return int(self._files.info(self._key(name))["size"])
            except FileNotFoundError:
                return None

    def read(self, name: str, offset: int, length: int) -> bytes:
        size = self.size(name) if offset else length  # a range behind the end is an error on S3
        if size is None or offset >= size:
            return b""
        with self._asked("read", name):
            try:
                found = self._files.cat_file(self._key(name), start=offset, end=offset + length)
                return bytes(found)
            except FileNotFoundError:
                return b""

    def remove(self, name: str) -> None:
        with self._asked("remove", name):
            try:
                self._files.rm_file(self._key(name))
            except FileNotFoundError:
                return

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _asked(self, doing: str, name: str) -> AbstractContextManager[None]:
        """A fault of which nothing is known may heal: the journal keeps its segment and asks again."""
        return s3.asked(doing, f"{self.where}/{name}", otherwise=StoreUnreachable)
