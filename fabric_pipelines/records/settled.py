"""Which tasks a broker has settled, retired or dead, as runs of ids: what its database must have landed.

And the same in short, by page of so many sequence numbers: two that agree need not be told id by id again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fabric_pipelines.ids import SEQUENCE_BITS
from fabric_pipelines.ledger import hash64

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Settled:
    """Run i is the task ids [firsts[i], ends[i]), ascending, all of submission owners[i]. submissions: (id, function) by
    that number."""

    firsts: Ids
    ends: Ids
    owners: Ids
    submissions: Mapping[int, tuple[str, str]]

    @property
    def tasks(self) -> int:
        return int((self.ends - self.firsts).sum())

    def ids(self) -> Ids:
        """Every id, in order."""
        sizes = self.ends - self.firsts
        starts = np.cumsum(sizes) - sizes
        found: Ids = np.repeat(self.firsts - starts, sizes) + np.arange(self.tasks)
        return found

    @classmethod
    def joined(cls, parts: Sequence[Settled]) -> Settled:
        """One after the other."""
        none = np.zeros(0, np.int64)
        return cls(
            np.concatenate([none, *(part.firsts for part in parts)]),
            np.concatenate([none, *(part.ends for part in parts)]),
            np.concatenate([none, *(part.owners for part in parts)]),
            {at: named for part in parts for at, named in part.submissions.items()},
        )

    def owner(self, task_ids: Ids) -> Ids:
        """The submission number of each, which must be settled."""
        return self.owners[np.searchsorted(self.ends, task_ids, side="right")]


@dataclass(frozen=True, slots=True)
class Sums:
    """Of page p, sequence numbers [p * rows, (p + 1) * rows): tasks[p] int64 are settled, and marks[p] uint64 is the sum of
    hash64 of their ids modulo 2^64."""

    rows: int
    tasks: Ids
    marks: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, ids: Ids, rows: int, pages: int) -> Sums:
        """Of these settled ids, for pages [0, pages)."""
        page = (ids & ((1 << SEQUENCE_BITS) - 1)) // rows
        marks = np.zeros(pages, np.uint64)
        np.add.at(marks, page, hash64(ids))
        return cls(rows, np.bincount(page, minlength=pages).astype(np.int64), marks)
