"""Which rows may enter a shard: finite, with a direction. The rest is quarantined: counted, kept, never scored.

A NaN that reaches training poisons every centroid it touches, and a zero vector has no cosine. Neither is
repaired here. Quarantined rows stay beside the shard, so that rows read = rows indexed + rows
quarantined can be checked, and so that the source can be compared row by row later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.search import scorable


@dataclass(frozen=True, slots=True)
class Admission:
    """Row masks [n]: `admitted`, and why the others are not (`nan` includes infinities)."""

    admitted: npt.NDArray[np.bool_]
    nan: npt.NDArray[np.bool_]
    zero: npt.NDArray[np.bool_]

    def as_json(self) -> dict[str, int]:
        return {"nan": int(self.nan.sum()), "zero": int(self.zero.sum())}


def admit(vectors: npt.NDArray[np.floating[Any]]) -> Admission:
    """The same rule under both metrics: a row without a direction is damage, not data."""
    admitted = scorable(vectors, "cosine")
    nan = ~np.isfinite(vectors).all(axis=1)
    return Admission(admitted & ~nan, nan, ~admitted & ~nan)
