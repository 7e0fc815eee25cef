"""Where sealed segments go when they leave this disk, as a port: `dataplane` has a folder and S3 behind it.

A store keeps whole objects by name. Whatever it answers is compared with what the log says before it is believed,
so nothing here promises more than bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class ObjectStore(Protocol):
    """Any call may raise StoreUnreachable (it may answer later) or StorageFailed. Several threads may call."""

    @property
    def where(self) -> str:
        """Its address as people write it."""

    def put(self, name: str, pieces: Iterable[memoryview], size: int) -> None:
        """The pieces one after the other, `size` bytes in all: whole and durable on return. What had that name
        before is replaced."""

    def size(self, name: str) -> int | None:
        """Bytes of the object; None if there is none."""

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset`; fewer only at its end, none at all where there is no object."""

    def remove(self, name: str) -> None:
        """Nothing happens if there is none."""
