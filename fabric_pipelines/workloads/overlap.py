"""Word overlap of short texts: exact repeats and 4-gram Jaccard, the ground truth for near-duplicates.

It looks at words only, so it can judge an embedding without sharing its blind spots. Candidates come from an
inverted index over 4-grams; only texts of at least WORDS_MIN words take part, since short formulas ("And it
came to pass") repeat everywhere and mean nothing.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

GRAM = 4
WORDS_MIN = 8
JACCARD_MIN = 0.5


@dataclass(frozen=True, slots=True)
class Pair:
    """Rows `left` < `right`, and the Jaccard similarity of their 4-gram sets (1.0 for an exact repeat)."""

    left: int
    right: int
    jaccard: float


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def grams_of(text: str) -> frozenset[tuple[str, ...]]:
    words = words_of(text)
    return frozenset(zip(*(words[at:] for at in range(GRAM)), strict=False))


def overlapping_pairs(texts: Sequence[str], *, jaccard_min: float = JACCARD_MIN) -> list[Pair]:
    """Every pair of rows whose 4-gram Jaccard is at least `jaccard_min`, ordered by (left, right)."""
    grams = [
        grams_of(text) if len(words_of(text)) >= WORDS_MIN else frozenset[tuple[str, ...]]()
        for text in texts
    ]
    rows_with: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row, own in enumerate(grams):
        for gram in own:
            rows_with[gram].append(row)
    shared: Counter[tuple[int, int]] = Counter()
    for rows in rows_with.values():
        shared.update(combinations(rows, 2))
    found = []
    for (left, right), count in sorted(shared.items()):
        jaccard = count / (len(grams[left]) + len(grams[right]) - count)
        if jaccard >= jaccard_min:
            found.append(Pair(left, right, jaccard))
    return found
