"""How fabric_pipelines/workloads/data/verses.tsv and verse_pairs.tsv were made; not run at install or in tests.

    apt-get download bible-kjv bible-kjv-text      # Debian 12, version 4.38
    for each: dpkg-deb -x FILE.deb out
    cd out/usr/lib && ../bin/bible -p . -f gen1:1-rev22:21 > kjv.txt
    python tests/unit/workloads/make_verses.py kjv.txt fabric_pipelines/workloads/data

Eight books with known parallels (2 Kings and Isaiah tell of the same siege, Ezra and Nehemiah carry the same
list, the three Gospels share their sayings), a hundred verses each: first the verses of overlapping pairs,
strongest first, then verses at even distance through the rest of the book.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

from fabric_pipelines.workloads.overlap import Pair, overlapping_pairs, words_of

BOOKS = {
    "2Ki": "2 Kings", "Ezra": "Ezra", "Neh": "Nehemiah", "Psa": "Psalms", "Isa": "Isaiah",
    "Mat": "Matthew", "Mark": "Mark", "Luke": "Luke",
}  # fmt: skip
VERSES_PER_BOOK = 100
PAIRED_PER_BOOK_MAX = 45
WORDS_MAX = 40

Verse = tuple[str, int, int, str]


def read(path: Path) -> list[Verse]:
    verses = []
    for line in path.read_text().splitlines():
        reference, text = line.split(" ", 1)
        match = re.fullmatch(r"(.+?)(\d+):(\d+)", reference)
        assert match, reference
        book, words = match[1], len(words_of(text))
        if book in BOOKS and 6 <= words <= WORDS_MAX:
            verses.append((book, int(match[2]), int(match[3]), text.strip()))
    return verses


def choose(verses: list[Verse], pairs: list[Pair]) -> list[int]:
    order = list(BOOKS)
    paired: dict[str, list[int]] = {book: [] for book in order}
    for pair in sorted(pairs, key=lambda pair: (-pair.jaccard, pair.left, pair.right)):
        ends = [row for row in (pair.left, pair.right) if row not in paired[verses[row][0]]]
        if all(len(paired[verses[row][0]]) < PAIRED_PER_BOOK_MAX for row in ends):
            for row in ends:
                paired[verses[row][0]].append(row)
    chosen: list[int] = []
    for book in order:
        rest = [
            row for row, verse in enumerate(verses) if verse[0] == book and row not in paired[book]
        ]
        spread = np.linspace(0, len(rest) - 1, VERSES_PER_BOOK - len(paired[book])).round()
        chosen += sorted(paired[book] + [rest[int(at)] for at in spread])
    return chosen


def main(source: Path, target: Path) -> None:
    verses = read(source)
    chosen = choose(verses, overlapping_pairs([verse[3] for verse in verses]))
    kept = [verses[row] for row in chosen]
    lines = ["book\tchapter\tverse\ttext"]
    lines += [f"{BOOKS[book]}\t{chapter}\t{verse}\t{text}" for book, chapter, verse, text in kept]
    (target / "verses.tsv").write_text("\n".join(lines) + "\n")
    lines = ["left_row\tright_row\tjaccard\tkind"]
    words = [words_of(verse[3]) for verse in kept]
    lines += [
        f"{pair.left}\t{pair.right}\t{pair.jaccard:.4f}\t"
        + ("exact" if words[pair.left] == words[pair.right] else "near")
        for pair in overlapping_pairs([verse[3] for verse in kept])
    ]
    (target / "verse_pairs.tsv").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
