"""Recall of an index against exact search over the same rows, measured on every build and kept with it.

Questions are rows of the index, those with the smallest hashes of their ids, and each row's answer leaves out the row
itself: what it finds by looking at itself says nothing about its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_pipelines.analytics.search import Ids, recall_at_k
from fabric_pipelines.ledger import hash64

K = 10
QUESTIONS_MAX = 256


class RecallShort(UserWarning):
    """An index was built whose recall is below its aim at every effort."""


@dataclass(frozen=True, slots=True)
class Point:
    """recall@K at an effort; nprobe and rerank are 0 where the kind has none."""

    nprobe: int
    rerank: int
    recall: float


@dataclass(frozen=True, slots=True)
class Quality:
    """points: the curve, in the order measured. nprobe, rerank: the least effort on it with at least `aim`, or the
    greatest there is; recall: what it gave."""

    k: int
    questions: int
    rows: int
    aim: float
    nprobe: int
    rerank: int
    recall: float
    points: tuple[Point, ...]


def of_json(fields: Mapping[str, Any] | None) -> Quality | None:
    if fields is None:
        return None
    points = tuple(Point(**point) for point in fields["points"])
    return Quality(**{**fields, "points": points})


Search = Callable[[int, int, int], Ids]  # k, nprobe, rerank -> I [q, k]


def questions_of(ids: Ids) -> Ids:
    """Places of the rows that are asked."""
    return np.argsort(hash64(ids), kind="stable")[:QUESTIONS_MAX]


def curve(
    own: Ids, rows: int, aim: float, truth: Ids, lists: int, reranked: bool, search: Search
) -> Quality:
    """own [q]: ids of the questions; truth [q, K + 1] and `search` answer for them, themselves included."""
    true = without(own, truth)
    points: list[Point] = []

    def least(efforts: Iterable[tuple[int, int]]) -> Point:
        point = None
        for nprobe, rerank in efforts:
            found = without(own, search(K + 1, nprobe, rerank))
            point = Point(nprobe, rerank, recall_at_k(found, true))
            points.append(point)
            if point.recall >= aim:
                break
        assert point is not None, "no effort to measure"
        return point

    widest = 32 * K if reranked else 0
    chosen = least((nprobe, widest) for nprobe in doubling(1, lists))
    if reranked:
        chosen = least((chosen.nprobe, rerank) for rerank in doubling(2 * K, max(32 * K, 2 * K)))
    return Quality(
        K, len(own), rows, aim, chosen.nprobe, chosen.rerank, chosen.recall, tuple(points)
    )


def without(own: Ids, found: Ids) -> Ids:
    """Each list [q, n] less its own row, or less its last place where the row is not in it: [q, n - 1]."""
    itself = found == own[:, None]
    itself[~itself.any(axis=1), -1] = True
    others: Ids = found[~itself].reshape(len(found), -1)
    return others


def doubling(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first ... and last."""
    steps = []
    while first < last:
        steps.append(first)
        first *= 2
    return [*steps, last]
