"""The verses that ship with the project: texts, the books they come from, and which of them nearly repeat.

Row numbers are global over the corpus and never change: they are the ids of vectors. A book is a partition.
Provenance and licence: data/README.md.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from fabric_pipelines.errors import UsageError
from fabric_pipelines.workloads.overlap import Pair

BOOKS = ("2 Kings", "Ezra", "Nehemiah", "Psalms", "Isaiah", "Matthew", "Mark", "Luke")


@dataclass(frozen=True, slots=True)
class Verse:
    row: int
    book: str
    chapter: int
    verse: int
    text: str

    @property
    def reference(self) -> str:
        return f"{self.book} {self.chapter}:{self.verse}"


def read_table(name: str) -> list[list[str]]:
    """Rows below the header of a tab-separated file of package data."""
    text = files("fabric_pipelines.workloads").joinpath("data", name).read_text(encoding="utf-8")
    return list(csv.reader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))[1:]


@lru_cache(maxsize=1)
def verses() -> tuple[Verse, ...]:
    return tuple(
        Verse(row, book, int(chapter), int(verse), text)
        for row, (book, chapter, verse, text) in enumerate(read_table("verses.tsv"))
    )


@lru_cache(maxsize=1)
def known_pairs() -> tuple[Pair, ...]:
    """Near-duplicates by word overlap, computed when the corpus was made (overlap.overlapping_pairs)."""
    return tuple(
        Pair(int(left), int(right), float(jaccard))
        for left, right, jaccard, _ in read_table("verse_pairs.tsv")
    )


def book_verses(book: str, limit: int = 0) -> tuple[Verse, ...]:
    """Verses of one book in order; with a limit, that many at even distance."""
    if book not in BOOKS:
        raise UsageError(f"the corpus has no book {book!r}; it has {', '.join(BOOKS)}")
    found = [verse for verse in verses() if verse.book == book]
    if not 0 < limit < len(found):
        return tuple(found)
    return tuple(found[at * len(found) // limit] for at in range(limit))
