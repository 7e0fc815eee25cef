"""The SQL of the data plane as named texts: `queries.sql` by block, `migrations/` by number.

SQL lives in .sql files, where editors and reviewers can read it. Refuses an unknown name as a bug.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from psycopg import sql

from fabric_pipelines.errors import SchemaError

_PART = r'"(?:[^"\0]|"")+"|[^".\0]+'
_RELATION = re.compile(rf"({_PART})(?:\.({_PART}))?")
_BLOCK = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Migration:
    number: int
    name: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def query(name: str) -> bytes:
    """The block `name`, ready for `execute`."""
    return _blocks()[name].encode()


def compose(name: str, **parts: sql.Composable) -> sql.Composed:
    """The block `name` with its {braces} filled in."""
    return trusted(_blocks()[name]).format(**parts)


def trusted(text: str) -> sql.SQL:
    """SQL from our own files or from the operator's configuration, never from data."""
    return sql.SQL(text)


def relation(name: str) -> sql.Identifier:
    """`schema.table` or `table` as a quoted identifier: each part as it is written, in double quotes where it holds a dot.
    fabric.relation_oid reads names the same way. Raises SchemaError for what is no such name."""
    found = _RELATION.fullmatch(name)
    if found is None:
        raise SchemaError(
            f"{name!r} names no relation: write table or schema.table as the database has it, capitals and all, and "
            'a part that holds a dot in double quotes, as in public."a.b"'
        )
    return sql.Identifier(*(_plain(part) for part in found.groups() if part is not None))


def _plain(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


@cache
def migrations() -> tuple[Migration, ...]:
    """All migrations in order; their numbers are dense from 1."""
    folder = resources.files(__package__) / "migrations"
    found = []
    for entry in folder.iterdir():
        match = re.fullmatch(r"(\d{4})_(\w+)\.sql", entry.name)
        if match:
            found.append(Migration(int(match[1]), match[2], entry.read_text()))
    found.sort(key=lambda item: item.number)
    assert [item.number for item in found] == list(range(1, len(found) + 1))
    return tuple(found)


@cache
def _blocks() -> dict[str, str]:
    text = (resources.files(__package__) / "queries.sql").read_text()
    pieces = _BLOCK.split(text)
    names, bodies = pieces[1::2], pieces[2::2]
    assert len(set(names)) == len(names), "two blocks of queries.sql share a name"
    return {name: body.strip() for name, body in zip(names, bodies, strict=True)}
