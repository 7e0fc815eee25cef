"""Which tasks a broker has settled, retired or dead, as runs of ids: what its database must have landed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
