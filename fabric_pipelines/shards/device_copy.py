"""The rows of one generation on a card: copied from the maps, and believed only once they came back right.

Each block file passes through two pinned buffers of a reader: out of the map, onto the card, back from the card,
into sha256. While one buffer is hashed the other is on its way. What is hashed is what the card holds, so one digest
covers the disk, the memory between and the card; it must be the one in the manifest before anything is
served. All memory is counted before any is taken. Rows may be held as float16, if that loses nothing: the
digest is over the widened values, so a copy that lost a bit is refused by it.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics import kernels
from fabric_pipelines.analytics.resident import ResidentScan, workspace_bytes
from fabric_pipelines.analytics.search import MIN_NORM
from fabric_pipelines.device.card import Card, Channel, DeviceArray
from fabric_pipelines.errors import CorruptionFound, DeviceRefused, UsageError
from fabric_pipelines.shards.blocks import npy_header
from fabric_pipelines.shards.manifest import FileEntry
from fabric_pipelines.shards.shard import Shard

CHUNK_BYTES = 4 << 20  # of a pinned buffer; large enough that a copy runs at the bus's rate
READERS_MAX = 8
ADMIT_ROWS = 1 << 18  # rows checked at a time
ROUNDING_BYTES = 512  # what an allocator may add to an array
ARRAYS = 24  # arrays that are taken, at most
LIBRARY_BYTES = 64 << 20  # what cuBLAS takes for itself at its first product
BEAT_S = 1.0
DTYPES = ("<f4", "<f2")


def bytes_needed(shard: Shard, dtype: str = "<f4") -> int:
    """Device memory of a copy and of the searches on it, to the byte an upper bound."""
    count, dim = shard.stored, shard.manifest.dim
    a_row = np.dtype(dtype).itemsize * dim + 8 + 4
    checking = min(count, ADMIT_ROWS) * (8 + 1 + 16)
    offsets = 8 * len(shard.manifest.indptr)
    return (
        count * a_row + offsets + checking + workspace_bytes(count, dim) + ARRAYS * ROUNDING_BYTES
    )


class DeviceCopy:
    """rows [stored, d] as `dtype` and ids int64 [stored], in the order of the shard's stored rows; indptr int64: the
    lists of the blocks."""

    def __init__(
        self,
        card: Card,
        shard: Shard,
        *,
        dtype: str = "<f4",
        budget_bytes: int | None = None,
        readers: int | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """budget_bytes: what may be taken at most, for a card that something else needs too. beat is called every
        second or so, and may raise to end the copy. Raises DeviceRefused before any memory is taken, CorruptionFound
        for bytes that are not the manifest's, UsageError for values that `dtype` cannot hold."""
        if dtype not in DTYPES or (dtype == "<f2" and shard.manifest.dim % 2):
            raise UsageError(
                f"rows of dimension {shard.manifest.dim} cannot be held as {dtype!r}: use {DTYPES[0]!r}"
            )
        self._card, self._beat = card, beat
        self.bytes = bytes_needed(shard, dtype)
        _require_room(card, self.bytes, budget_bytes, shard.manifest.name)
        count, dim = shard.stored, shard.manifest.dim
        try:
            self.rows: DeviceArray = card.empty((count, dim), dtype)
            self.ids: DeviceArray = card.empty(count, np.int64)
            self.indptr: DeviceArray = card.empty(len(shard.manifest.indptr), np.int64)
            self._length_there: DeviceArray = card.empty(count, np.float32)
            self._length = np.empty(count, np.float32)
            self._copy_offsets(shard.manifest.offsets())
            self._copy_files(deque(self._files(shard)), readers or _readers())
            self._scan: ResidentScan = self._searchable(shard)
        except BaseException as fault:
            traceback.clear_frames(
                fault.__traceback__
            )  # else it would keep the memory as long as itself
            self.release()
            raise

    def release(self) -> None:
        """Give the memory back; a search that is under way keeps its own until it ends."""
        for name in ("rows", "ids", "indptr", "_length_there", "_scan"):
            self.__dict__.pop(name, None)
        self._card.trim()

    @property
    def scan(self) -> ResidentScan | None:
        """The search over the rows that count; None once the copy was released."""
        return self.__dict__.get("_scan")

    def _copy_offsets(self, offsets: npt.NDArray[np.int64]) -> None:
        self._card.store(self.indptr, offsets)
        if not np.array_equal(self._card.download(self.indptr), offsets):
            raise _changed_on("indptr", self._card)

    def _files(self, shard: Shard) -> Iterator[_File]:
        entries = [
            [*shard.manifest.of_role(role), *shard.manifest.of_role(f"layer_{role}")]
            for role in ("vectors", "ids")
        ]
        for vectors, ids, block in zip(*entries, shard.blocks, strict=True):
            yield _File(vectors, block.vectors, self.rows, block.start)
            yield _File(ids, block.ids, self.ids, block.start)

    def _copy_files(self, todo: deque[_File], readers: int) -> None:
        stop = threading.Event()
        with ThreadPoolExecutor(min(readers, max(1, len(todo)))) as pool:
            running: set[Future[None]] = {
                pool.submit(self._read, todo, stop) for _ in range(min(readers, len(todo)))
            }
            try:
                while running:
                    done, running = wait(running, timeout=BEAT_S, return_when=FIRST_EXCEPTION)
                    for reader in done:
                        reader.result()
                    self._beat()
            except BaseException:
                stop.set()
                raise

    def _read(self, todo: deque[_File], stop: threading.Event) -> None:
        channel = self._card.channel(2, CHUNK_BYTES)
        try:
            while not stop.is_set():
                try:
                    file = todo.popleft()
                except IndexError:
                    return
                self._copy_file(channel, file, stop)
        except BaseException:
            stop.set()  # the others need not go on
            raise
        finally:
            channel.close()

    def _copy_file(self, channel: Channel, file: _File, stop: threading.Event) -> None:
        digest = hashlib.sha256(npy_header(file.host.dtype, file.host.shape))
        waiting: deque[tuple[int, int]] = deque()  # buffer, values: on their way
        for number, part in enumerate(file.parts()):
            if stop.is_set():
                break
            if len(waiting) == 2:
                file.fold(channel, *waiting.popleft(), digest)
            buffer = number % 2
            file.send(channel, buffer, part)
            waiting.append((buffer, part.stop - part.start))
            if file.narrow:
                self._measure(file, part)
        while waiting:
            file.fold(channel, *waiting.popleft(), digest)
        if not stop.is_set() and digest.hexdigest() != file.entry.sha256:
            raise file.difference(self._card)

    def _measure(self, file: _File, part: slice) -> None:
        """Lengths of float16 rows, for which there is no kernel. A part may begin and end in mid row."""
        dim = file.host.shape[1]
        first, last = -(-part.start // dim), -(-part.stop // dim)
        rows = file.host[first:last]
        at = slice(file.start + first, file.start + last)
        np.sqrt(np.einsum("ij,ij->i", rows, rows), out=self._length[at])

    def _searchable(self, shard: Shard) -> ResidentScan:
        """Lengths of the rows, measured by the kernel on the card: a row that no build admits is damage."""
        count = len(self.rows)
        piece = min(count, ADMIT_ROWS)
        if self.rows.dtype.itemsize == 4 and count:
            out = tuple(
                self._card.empty(shape, kind)
                for shape, kind in ((piece, "f8"), (piece, "u1"), ((piece, 2), "u8"))
            )
            for start in range(0, count, piece):
                rows = self.rows[start : start + piece]
                # Half of it: a norm that is summed in another order must not fall below the bound.
                kernels.row_admit_into(self._card, rows, MIN_NORM / 2, (out[0], out[1], out[2]))
                norm2 = self._card.download(out[0][: len(rows)])
                flag = self._card.download(out[1][: len(rows)])
                if flag.any():
                    at = start + int(np.flatnonzero(flag)[0])
                    raise _changed_on(f"stored row {at}, which has no direction there,", self._card)
                self._length[start : start + len(rows)] = np.sqrt(norm2)
        top = float(self._length.max(initial=0.0))
        self._length[~shard.alive] = np.nan
        self._card.store(self._length_there, self._length)
        return ResidentScan(
            self._card,
            self.rows,
            self.ids,
            self._length_there,
            metric=shard.manifest.metric,  # type: ignore[arg-type]
            length_max=top if math.isfinite(top) else math.inf,
        )


@dataclass(frozen=True, slots=True)
class _File:
    """One block file on its way: `host` is its map, row `start` of `target` its first row there."""

    entry: FileEntry
    host: npt.NDArray[Any]
    target: DeviceArray
    start: int

    @property
    def narrow(self) -> bool:
        return bool(self.target.dtype.itemsize < self.host.dtype.itemsize)

    def parts(self) -> Iterator[slice]:
        """Values that fit a buffer, counted through the file."""
        step = CHUNK_BYTES // self.target.dtype.itemsize
        for start in range(0, self.host.size, step):
            yield slice(start, min(start + step, self.host.size))

    def send(self, channel: Channel, buffer: int, part: slice) -> None:
        kind, count = self.target.dtype, part.stop - part.start
        size = count * kind.itemsize
        pinned = channel.buffers[buffer][:size].view(kind)
        with np.errstate(over="ignore"):  # what float16 cannot hold is found by the digest
            np.copyto(pinned, self.host.reshape(-1)[part], casting="same_kind")
        width = self.host.size // max(1, len(self.host))
        offset = (self.start * width + part.start) * kind.itemsize
        channel.send(buffer, size, self.target, offset)
        channel.read_back(buffer, size, self.target, offset)

    def fold(self, channel: Channel, buffer: int, count: int, digest: Any) -> None:
        """Add what came back from the card to the digest."""
        channel.wait(buffer)
        kind = self.target.dtype
        back = channel.buffers[buffer][: count * kind.itemsize].view(kind)
        digest.update(back.astype(self.host.dtype) if self.narrow else back)

    def difference(self, card: Card) -> CorruptionFound | UsageError:
        """Why the digest is another: the file, its values, or the card."""
        digest = hashlib.sha256(npy_header(self.host.dtype, self.host.shape))
        digest.update(np.ascontiguousarray(self.host).reshape(-1).view(np.uint8).data)
        if digest.hexdigest() != self.entry.sha256:
            return CorruptionFound(
                f"{self.entry.label} is damaged on disk (its bytes have sha256 {digest.hexdigest()}), nothing of it "
                "is served: `fabric receipt refresh SHARD --anew` writes it again"
            )
        if self.narrow and not _held_by(self.host, self.target.dtype):
            return UsageError(
                f"{self.entry.label} has values that {self.target.dtype.name} does not hold: load it as {DTYPES[0]!r}"
            )
        return _changed_on(self.entry.label, card)


def _held_by(host: npt.NDArray[Any], kind: np.dtype[Any]) -> bool:
    with np.errstate(over="ignore"):
        return bool((host.astype(kind).astype(host.dtype) == host).all())


def _changed_on(what: str, card: Card) -> CorruptionFound:
    return CorruptionFound(
        f"{what} came back from {card.name} with other bytes than were sent, and its file is whole: nothing of "
        "it is served; open the shard again, on another card or with device='cpu' if it happens twice"
    )


def _require_room(card: Card, size: int, budget: int | None, name: str) -> None:
    what = f"shard {name!r}"
    remedy = (
        "close another one, load it as '<f2' if its values allow that, or open it with device='cpu'"
    )
    card.require_memory(size, what, remedy)
    if budget is not None and size > budget:
        raise DeviceRefused(
            f"{what} needs {size:,} bytes on {card.name}, its budget is {budget:,} "
            f"({card.memory().free_bytes:,} are free): {remedy}"
        )


def _readers() -> int:
    return min(READERS_MAX, os.cpu_count() or 1)
