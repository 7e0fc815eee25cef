"""Canary vectors: a few questions whose answers were written down when the generation was new, asked again later.

A scrub proves that the bytes on disk are right. It says nothing about what a search makes of them: a copy in
memory or on a device that rotted, a kernel or a library that computes otherwise. Exact search is defined to the
last bit of its float64 distances, so an answer that differs in any bit is damage and not noise. Questions
depend on the dimension alone: rows that rot cannot take them along.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.ledger import hash64
from fabric_pipelines.shards.difference import Difference
from fabric_pipelines.shards.generation import Generation
from fabric_pipelines.shards.shard import Shard
from fabric_pipelines.shards.store import VectorStore

QUESTIONS = 8
K = 10

Answers = Sequence[Mapping[str, Sequence[str]]]


def questions(dim: int) -> npt.NDArray[np.float32]:
    """[QUESTIONS, dim] in -1..1, from a hash of the place: no random stream that a library could change."""
    mixed = hash64(np.arange(QUESTIONS * dim, dtype=np.int64)).astype(np.uint64)
    unit = (mixed >> np.uint64(40)).astype(np.float64) / 2.0**24
    return (2 * unit - 1).astype(np.float32).reshape(QUESTIONS, dim)


def answers(shard: Shard) -> list[dict[str, list[str]]]:
    """ids as decimal and distances as hexadecimal strings, nearest first: JSON keeps both exactly."""
    ranked = shard.search(questions(shard.manifest.dim), K)
    return [
        {
            "ids": [str(name) for name in ids[:found].tolist()],
            "distances": [value.hex() for value in distances[:found].tolist()],
        }
        for ids, distances, found in zip(ranked.I, ranked.D, ranked.found.tolist(), strict=True)
    ]


def known_answers(store: VectorStore, generation: Generation) -> Answers | None:
    """What the newest receipt of a generation says its canaries were answered; None if no receipt says it."""
    for row in store.find_receipts(shard=generation.name, generation=generation.number, limit=1):
        found: Any = row.statement
        for part in ("predicate", "quality", "canaries", "answers"):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is not None:
            return found  # type: ignore[no-any-return]
    return None


def changed_answers(shard: Shard, known: Answers) -> Iterator[Difference]:
    """One difference a question that is answered otherwise than it was."""
    for number, (then, now) in enumerate(zip(known, answers(shard), strict=True)):
        for part in ("ids", "distances"):
            left, right = list(then[part]), now[part]
            if left != right:
                place = _first_difference(left, right)
                yield Difference(
                    f"canary[{number}].{part}",
                    _at(left, place),
                    _at(right, place),
                    f"canary {number} is answered otherwise than when the generation was new: place {place} "
                    f"of its {part} was {_at(left, place)} and is {_at(right, place)}; the files may be whole, "
                    "then what was loaded from them is not",
                )
                break


def _first_difference(left: Sequence[Any], right: Sequence[Any]) -> int:
    pairs = zip(left, right, strict=False)
    return next(
        (at for at, (one, two) in enumerate(pairs) if one != two), min(len(left), len(right))
    )


def _at(values: Sequence[str], place: int) -> str:
    return values[place] if place < len(values) else "nothing"
