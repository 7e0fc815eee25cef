"""Where the lists of an index lie on a card: one after another, each with room to grow.

A list that changed is written anew in its place, which is a few hundred rows; only where one has outgrown its room is
everything laid out again. Lists never change in place on the CPU (lists.py, lattice.py make new arrays), so whether one
did is whether its array is another. Places are int64 throughout: rows times dimensions pass 2^31 early.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.index.store import F64
from fabric_pipelines.analytics.search import Ids
from fabric_pipelines.device.card import Card

WORK_BYTES = 1 << 28  # what one launch may leave on the card for the next one
REMEDY = "search fewer rows, use another card, or use the cpu backend"


class Proposed(NamedTuple):
    """query (numbers in asked.open) and slot of rows that may be among the k nearest; limit [o]: a row that was left
    out is no nearer (inf: none was; -inf: the scan did not settle this query). pair and near: number of a probe (query
    times probes plus place) and slot of the rows of which one is the nearest of that list, where that was asked for."""

    query: Ids
    slot: Ids
    limit: F64
    pair: Ids
    near: Ids


def nothing(count: int) -> Proposed:
    """No query was settled."""
    none = np.empty(0, np.int64)
    return Proposed(none, none, np.full(count, -np.inf), none, none)


class Places(ABC):
    """A copy on `card` of lists that change. `start` [lists + 1]: first place of each; a place is a row."""

    def __init__(self, card: Card, lists: Any) -> None:
        self.card, self.lists = card, lists
        self.start = np.zeros(1, np.int64)
        self.slot_of = np.empty(0, np.int64)  # -1: no row
        self._held: list[Any] = []
        self._version = -1

    def follow(self) -> None:
        """Bring the copy up to the lists. DeviceRefused where the card has no room."""
        if self.lists.version == self._version:
            return
        sizes = self.lists.sizes()
        room = np.diff(self.start)[: len(sizes)]
        if len(room) < len(sizes) or (sizes > room).any():
            rooms = self.rooms(sizes)
            self.start = np.concatenate([[0], np.cumsum(rooms)]).astype(np.int64)
            self._held = [None] * len(rooms)
            try:
                self.lay_out()
            except BaseException:
                self.start, self._version = (
                    np.zeros(1, np.int64),
                    -1,
                )  # nothing lies there, so the next search asks again
                raise
        self.slot_of = np.full(int(self.start[-1]), -1, np.int64)
        for number, size in enumerate(sizes.tolist()):
            one, first = self.lists[number], int(self.start[number])
            self.slot_of[first : first + size] = one.slots
            if self.content(one) is not self._held[number]:
                self.write(number)
                self._held[number] = self.content(one)
        self.settle(sizes)
        self._version = self.lists.version

    @abstractmethod
    def rooms(self, sizes: Ids) -> Ids:
        """Places for each list, and for lists to come."""

    @abstractmethod
    def lay_out(self) -> None:
        """Take memory for `start`."""

    @abstractmethod
    def content(self, one: Any) -> npt.NDArray[Any]:
        """What of a list lies on the card."""

    @abstractmethod
    def write(self, number: int) -> None:
        """Put one list into its place."""

    @abstractmethod
    def settle(self, sizes: Ids) -> None:
        """What follows from all lists together."""


def parts(cost: Ids, most: int) -> Iterator[slice]:
    """Queries in turn: at most `most` of them, of WORK_BYTES together unless one alone costs more."""
    ends, start = np.cumsum(cost), 0
    while start < len(cost):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + WORK_BYTES, "right"))
        stop = min(max(stop, start + 1), start + most)
        yield slice(start, stop)
        start = stop
