"""A backlog that nobody has sorted yet: what a restart finds in one lane.

Sorting ten million keys takes seconds, the first lease needs the smallest few. So the rest is parted only as far
as that takes, and piece by piece as leases come (incremental quicksort, Paredes and Navarro 2006): each task is
looked at a few times in all. Knows numbers and where their keys are; what is sorted it hands on and forgets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]  # sequence numbers, uint32 as long as they fit
KeysOf = Callable[[Any], Any]  # keys of tasks, or the key of one

SAMPLES = 4096
STRIDE = 16  # a large piece is parted at so many times the size asked for, then that one again


class Unsorted:
    """Tasks with keys at or above `low`, in parts of a size that stays in the cache."""

    __slots__ = ("low", "parts")

    def __init__(self, parts: list[Numbers], low: int = 0) -> None:
        self.parts, self.low = [part for part in parts if len(part)], low

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def sorted(self, keys_of: KeysOf) -> Numbers:
        """All of it by key, those of equal keys as they came."""
        tasks = np.concatenate(self.parts)
        return tasks[np.argsort(keys_of(tasks), kind="stable")]

    def smallest(self, keys_of: KeysOf, size: int) -> list[Unsorted]:
        """Itself in pieces by ascending keys, of which the first is not much larger than `size`."""
        rest: list[Unsorted] = []
        piece = self
        while len(piece) > 2 * size:
            target = STRIDE * size if len(piece) > 2 * STRIDE * size else size
            first, *others = piece._front(keys_of, target)
            piece, rest = first, [*others, *rest]
        return [piece, *rest]

    def parted(self, keys_of: KeysOf, key: int) -> tuple[Unsorted, Unsorted]:
        """(what lies below `key`, what does not)."""
        below, above = [], []
        for part in self.parts:
            is_below = keys_of(part) < np.uint64(key)
            below.append(part[is_below])
            above.append(part[~is_below])
        return Unsorted(below, self.low), Unsorted(above, max(key, self.low))

    def cut(self, count: int) -> tuple[Unsorted, Unsorted]:
        """(the first `count` as they lie, the others), whatever their keys."""
        before, behind = [], []
        for part in self.parts:
            here = min(count, len(part))
            before.append(part[:here])
            behind.append(part[here:])
            count -= here
        return Unsorted(before, self.low), Unsorted(behind, self.low)

    def without(self, tasks: npt.NDArray[np.int64]) -> Unsorted:
        return Unsorted([part[~np.isin(part, tasks)] for part in self.parts], self.low)

    def sample(self, keys_of: KeysOf, most: int = SAMPLES) -> npt.NDArray[np.uint64]:
        """Keys of evenly spaced tasks, at most so many or one a part."""
        each = max(1, most // len(self.parts))
        picked = [part[:: len(part) // each + 1] for part in self.parts]
        keys: npt.NDArray[np.uint64] = keys_of(np.concatenate(picked))
        return keys

    def _front(self, keys_of: KeysOf, size: int) -> list[Unsorted]:
        """Two pieces or three, the first with about `size` of the smallest keys."""
        keys = np.sort(self.sample(keys_of))
        key = int(keys[len(keys) * size // len(self)])
        first, rest = self.parted(keys_of, key)
        if len(first):
            return [first, rest] if len(rest) else self._equal(size)
        if key == (1 << 64) - 1:
            return self._equal(size)
        equal, rest = self.parted(keys_of, key + 1)  # so many have the smallest key of all
        pieces = equal._equal(size) if len(equal) > 2 * size else [equal]
        return [*pieces, rest] if len(rest) else pieces

    def _equal(self, size: int) -> list[Unsorted]:
        """All keys are one, or nearly: any part of them is as good as another."""
        return [*self.cut(size)]
