"""Words and figures on a terminal: fitted to its width, aligned, with units.

A word that is too wide for its column is cut with an ellipsis, so that a table keeps one row a line on 80 columns; a
sentence never is: it goes below its row, wrapped. What must be copied whole (a path, a URL, an id) stands alone at
the end of a line and is never cut, and where there is no terminal nothing is.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, TypeGuard

GAP = "  "
COLUMN_LEAST = 8  # a column cut further says nothing
UNCUT = 1 << 20  # columns where nobody looks at a terminal
NAMES_NOT_AMOUNTS = {
    *(
        "id",
        "ids",
        "pid",
        "oid",
        "lsn",
        "xid",
        "version",
        "seed",
        "port",
        "row",
        "offset",
        "generation",
    ),
    *("incarnation", "fingerprint", "number"),
}  # a number whose name ends with one of these words is copied, not read: no separators in it
WORDS_MAX = 40  # of a longer list only the length is shown
SENTENCE_LEAST = 40  # a longer text in a list is a sentence, not a word


def width() -> int:
    """Columns of the terminal; 80 where there is none."""
    return max(shutil.get_terminal_size((80, 40)).columns, 40)


def room() -> int:
    """Columns that an answer on stdout may take: those of the terminal, or as many as it needs."""
    return width() if sys.stdout.isatty() else UNCUT


def clip(text: str, most: int) -> str:
    """One line of at most `most` characters; an ellipsis stands for what was cut."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: max(most - 1, 0)].rstrip() + "…"


def size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} GiB"


def value(item: Any, name: str = "") -> str:
    """Numbers with separators and four digits, nothing for None, the rest as it is."""
    if item is None:
        return ""
    if is_name(name):
        return str(item)
    if isinstance(item, bool):
        return "yes" if item else "no"
    if isinstance(item, int):
        return f"{item:,}"
    if isinstance(item, float):
        return f"{item:.3e}" if item and abs(item) < 1e-3 else f"{item:,.4g}"
    return str(item)


def is_name(name: str) -> bool:
    """Whether numbers under this name tell which one, not how many."""
    return name.replace(" ", "_").rpartition("_")[2] in NAMES_NOT_AMOUNTS


def pairs(facts: Mapping[str, str], *, indent: str = "") -> list[str]:
    """One fact a line, names aligned; values are never cut."""
    longest = max((len(name) for name in facts), default=0)
    return [f"{indent}{name:<{longest}}{GAP}{fact}".rstrip() for name, fact in facts.items()]


def grid(facts: Sequence[Sequence[tuple[str, str]]], *, indent: str = "") -> list[str]:
    """Columns of (name, figure) beside each other, figures to the right."""
    columns = []
    for column in facts:
        names = max(len(name) for name, _ in column)
        figures = max(len(figure) for _, figure in column)
        columns.append([f"{name:<{names}}{GAP}{figure:>{figures}}" for name, figure in column])
    rows = max(len(column) for column in columns)
    padded = [column + [" " * len(column[0])] * (rows - len(column)) for column in columns]
    return [(indent + (GAP * 2).join(row)).rstrip() for row in zip(*padded, strict=True)]


def table(rows: Sequence[Mapping[str, Any]], names: Iterable[str], most: int) -> list[str]:
    """Rows under their names: numbers to the right; of what is too wide, columns of sentences go below their rows, then
    the widest words are cut."""
    names = list(names)
    below: list[str] = []
    while (prose := _widest_prose(rows, names)) and _wide(rows, names) > most:
        names.remove(prose)
        below.append(prose)
    lines = _grid_of(rows, names, most)
    if not below:
        return lines
    found = lines[:2]
    for row, line in zip(rows, lines[2:], strict=True):
        found += [line, *(part for name in below for part in _note(row.get(name), most))]
    return found


def _widest_prose(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    """The column whose longest sentence is the longest; None if there is no sentence."""
    longest = {
        name: max((len(text) for row in rows if _is_sentence(text := row.get(name))), default=0)
        for name in names
    }
    name = max(longest, key=lambda name: longest[name], default=None)
    return name if name is not None and longest[name] else None


def _is_sentence(item: Any) -> TypeGuard[str]:
    return isinstance(item, str) and len(item) > SENTENCE_LEAST and " " in item.strip()


def _wide(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> int:
    """Columns that the table would take uncut."""
    cells = [max(len(name), *(len(value(row.get(name), name)) for row in rows)) for name in names]
    return sum(cells) + len(GAP) * (len(names) - 1)


def _note(text: Any, most: int) -> list[str]:
    """Below its row, indented."""
    margin = GAP * 2
    shown = " ".join(value(text).split())
    return textwrap.wrap(shown, most, initial_indent=margin, subsequent_indent=margin)


def _grid_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str], most: int) -> list[str]:
    cells = [[" ".join(value(row.get(name), name).split()) for name in names] for row in rows]
    numeric = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in names]
    titles = [name.replace("_", " ") for name in names]
    widths = [max(len(titles[at]), *(len(line[at]) for line in cells)) for at in range(len(names))]
    room = most - len(GAP) * (len(names) - 1)
    while sum(widths) > room:
        at = max(
            (at for at in range(len(names)) if not numeric[at]),
            key=lambda at: widths[at],
            default=None,
        )
        if at is None or widths[at] <= COLUMN_LEAST:
            break
        widths[at] -= 1
    lines = [titles, ["─" * wide for wide in widths], *cells]
    return [
        GAP.join(
            f"{clip(cell, wide):>{wide}}" if right else f"{clip(cell, wide):<{wide}}"
            for cell, wide, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    ]


def page(answer: Mapping[str, Any], most: int, *, indent: str = "") -> list[str]:
    """A whole answer: plain facts first and aligned, then what has parts, each under its name."""
    plain = {name: item for name, item in answer.items() if not _has_parts(item)}
    margin = len(indent) + max((len(name) for name in plain), default=0) + len(GAP)
    facts = {
        name.replace("_", " "): _fact(name, item, most - margin, "\n" + " " * margin)
        for name, item in plain.items()
    }
    lines = pairs(facts, indent=indent)
    for name, item in answer.items():
        if _has_parts(item):
            inner = indent + GAP
            lines += ["", indent + name.replace("_", " ")] if lines else [indent + name]
            lines += _parts(item, most, inner)
    return lines


def _has_parts(item: Any) -> bool:
    if isinstance(item, Mapping):
        return bool(item)
    return (
        isinstance(item, list) and bool(item) and (isinstance(item[0], Mapping) or _is_prose(item))
    )


def _is_prose(item: Any) -> bool:
    """Sentences that must be read whole: what a check found."""
    return all(isinstance(part, str) for part in item) and any(
        len(part) > SENTENCE_LEAST for part in item
    )


def _prose(sentences: Iterable[str], most: int, indent: str) -> list[str]:
    """Each wrapped between words and never cut: it may end in the one id that matters."""
    lines: list[str] = []
    for sentence in sentences:
        lines += textwrap.wrap(
            sentence,
            most,
            initial_indent=f"{indent}- ",
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _parts(item: Any, most: int, indent: str) -> list[str]:
    if isinstance(item, list) and isinstance(item[0], str):
        return _prose(item, most, indent)
    if isinstance(item, list) and all("sentence" in row for row in item):
        return _prose((str(row["sentence"]) for row in item), most, indent)
    rows = item if isinstance(item, list) else _as_rows(item)
    if rows is None:
        return page(item, most, indent=indent)
    return [indent + line for line in table(rows, rows[0], most - len(indent))]


def _as_rows(item: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """A mapping of equal flat mappings reads better as a table."""
    kept = list(item.values())
    if len(kept) < 2 or not all(isinstance(part, Mapping) for part in kept):
        return None
    if any(set(part) != set(kept[0]) or any(map(_has_parts, part.values())) for part in kept):
        return None
    return [{"name": name, **part} for name, part in item.items()]


def _fact(name: str, item: Any, room: int, margin: str) -> str:
    """A list of words is wrapped between them; a long one, or one of numbers, is only counted."""
    if isinstance(item, list) and item:
        if len(item) > WORDS_MAX:
            return f"{len(item):,} values"
        joined = ", ".join(value(part, name) for part in item)
        return margin.join(textwrap.wrap(joined, max(room, 20), break_long_words=False))
    return value(item, name) if item not in (None, "", [], {}) else "-"


def plain(value: Any) -> Any:
    """Dataclasses, paths and numpy scalars as JSON knows them."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.item() if hasattr(value, "item") else str(value)
