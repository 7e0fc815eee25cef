"""An object store in memory: it loses, changes and refuses objects on command, and tells the disk's log what it did.

`objects` outlives any crash of the broker, as S3 does. With a SimDisk its puts and removals stand in that disk's
log, so that the enumeration of crashes knows what the store held at each moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fabric_pipelines.errors import StoreUnreachable

Fault = Callable[[str, str], None]


@dataclass
class MemoryStore:
    """`before(call, name)` runs first in each call and may raise. `spoil(name, content)` is what is kept of a put."""

    objects: dict[str, bytes] = field(default_factory=dict)
    where: str = "memory://cold"
    before: Fault = field(default=lambda call, name: None)
    spoil: Callable[[str, bytes], bytes] = field(default=lambda name, content: content)
    told: Callable[[str, bytes | None], None] = field(default=lambda name, content: None)
    away: bool = False
    calls: list[tuple[str, str]] = field(default_factory=list)
    read_bytes: int = 0

    def put(self, name: str, pieces: Iterable[memoryview], size: int) -> None:
        self._call("put", name)
        content = b"".join(pieces)
        assert len(content) == size, "a put says how much it brings"
        self.objects[name] = self.spoil(name, content)
        self.told(name, self.objects[name])

    def size(self, name: str) -> int | None:
        self._call("size", name)
        found = self.objects.get(name)
        return None if found is None else len(found)

    def read(self, name: str, offset: int, length: int) -> bytes:
        self._call("read", name)
        self.read_bytes += length
        return self.objects.get(name, b"")[offset : offset + length]

    def remove(self, name: str) -> None:
        self._call("remove", name)
        self.objects.pop(name, None)
        self.told(name, None)

    def _call(self, call: str, name: str) -> None:
        self.calls.append((call, name))
        if self.away:
            raise StoreUnreachable(f"{self.where} does not answer")
        self.before(call, name)
