"""The price table: what an index or a trigger adds to a landed row, in backend CPU and in WAL.

One row form for all (a 384-dim halfvec, 64 packed tokens, a small jsonb payload, a random key), landed straight by COPY
and committed every ROWS rows into a table that has the primary key and the one thing that is priced. What an index
puts off (GIN's pending list) is paid before the clock stops.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from fabric_pipelines.bench.landing.cpu import Spent, spent
from fabric_pipelines.bench.landing.rows import DIM, OUTPUT_TOKENS
from fabric_pipelines.dataplane.encode import Column, encode_copy, packed
from fabric_pipelines.dataplane.prices import multiple

ROWS = 5_000
TABLE = """
drop table if exists priced, changes;
create table priced (id bigint primary key, key bigint not null, function text not null, submission text not null,
                     payload jsonb not null, tokens bytea not null, vector halfvec(384) not null);
create table changes (id bigint not null, at timestamptz not null default now());
create or replace function note_row() returns trigger language plpgsql as
  $$ begin insert into changes (id) values (new.id); return null; end $$;
create or replace function note_rows() returns trigger language plpgsql as
  $$ begin insert into changes (id) select id from fresh; return null; end $$;
create or replace function note_statement() returns trigger language plpgsql as
  $$ begin insert into changes (id) select count(*) from fresh; return null; end $$;
"""
TRIGGER = "create trigger noted after insert on priced referencing new table as fresh "


@dataclass(frozen=True, slots=True)
class Extra:
    """name: in the table; part: what prices.py calls it; make: SQL; after: SQL that pays what was put off; share:
    of the rows that are landed, for what is too dear for all of them."""

    name: str
    part: str
    make: str
    after: str = ""
    share: float = 1.0


EXTRAS = (
    Extra("primary key only", "", ""),
    Extra("+ btree (function)", "btree", "create index on priced (function)"),
    Extra("+ btree (submission), 64 letters", "btree", "create index on priced (submission)"),
    Extra("+ btree on a random key", "btree", "create index on priced (key)"),
    Extra(
        "+ BRIN bloom filter (submission)",
        "brin",
        "create index on priced using brin (submission text_bloom_ops (n_distinct_per_range = 100)) "
        "with (autosummarize = on)",
    ),
    Extra(
        "+ GIN (payload jsonb_path_ops)",
        "gin",
        "create index priced_gin on priced using gin (payload jsonb_path_ops)",
        "select gin_clean_pending_list('priced_gin')",
    ),
    Extra(
        "+ HNSW (m 16, ef 64)",
        "hnsw",
        "create index on priced using hnsw (vector halfvec_cosine_ops) with (m=16, ef_construction=64)",
        share=0.1,
    ),
    Extra(
        "+ row trigger that notes the row",
        "row trigger",
        "create trigger noted after insert on priced for each row execute function note_row()",
    ),
    Extra(
        "+ statement trigger that notes every row",
        "statement trigger",
        TRIGGER + "for each statement execute function note_rows()",
    ),
    Extra(
        "+ statement trigger that notes once",
        "statement trigger",
        TRIGGER + "for each statement execute function note_statement()",
    ),
)


def measure(url: str, rows: int, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """One entry an extra: medians over `rounds` interleaved rounds, `multiple` of the CPU of the bare table, and
    `assumed_multiple`, which is what the governor takes before it has measured."""
    seen: dict[str, list[tuple[float, float]]] = {extra.name: [] for extra in EXTRAS}
    size = 0
    with psycopg.connect(url, autocommit=True) as admin, psycopg.connect(url) as connection:
        for number in range(rounds + 1):
            for extra in EXTRAS:
                count = (
                    max(int(rows * extra.share) // ROWS * ROWS, 500) if extra.share < 1 else rows
                )
                took, sent = _land(connection, admin, extra, count)
                if number:  # the first round warms caches and is not kept
                    per_row = (took.backend_s / count * 1e6, took.wal_bytes / count)
                    seen[extra.name].append(per_row)
                if not extra.part:
                    size = sent // count
            say(f"prices, round {number} of {rounds}")
    medians = {name: np.median(np.array(values), axis=0) for name, values in seen.items()}
    bare = medians[EXTRAS[0].name]
    return [
        {
            "name": extra.name,
            "backend_us_per_row": round(float(medians[extra.name][0]), 2),
            "wal_bytes_per_row": round(float(medians[extra.name][1])),
            "multiple": round(float(medians[extra.name][0] / bare[0]), 2),
            "assumed_multiple": round(multiple((extra.part,), size), 2) if extra.part else 1.0,
        }
        for extra in EXTRAS
    ]


def _land(
    connection: psycopg.Connection, admin: psycopg.Connection, extra: Extra, rows: int
) -> tuple[Spent, int]:
    admin.execute(TABLE)
    if extra.make:
        admin.execute(extra.make.encode())
    step = min(ROWS, rows)
    streams = [encode_copy(_columns(step, first)) for first in range(0, rows, step)]
    with spent(admin, connection.info.backend_pid) as took:
        for stream in streams:
            with (
                connection.cursor() as cursor,
                cursor.copy("copy priced from stdin (format binary)") as copy,
            ):
                for piece in stream:
                    copy.write(piece)
            connection.commit()
        if extra.after:
            connection.execute(extra.after.encode())
            connection.commit()
    return took, sum(len(piece) for stream in streams for piece in stream)


def _columns(rows: int, first: int) -> list[Column]:
    rng = np.random.default_rng(first)
    vectors = rng.standard_normal(rows * DIM, np.float32).astype(np.float16)
    tokens = rng.integers(0, 50_000, rows * OUTPUT_TOKENS).astype(np.uint32)
    payloads = [
        json.dumps({"language": "de", "topic": f"t{n % 97}", "source": "c" * 80, "row": int(n)})
        for n in range(first, first + rows)
    ]
    return [
        Column("id", "int8", pa.array(np.arange(first, first + rows))),
        Column("key", "int8", pa.array(rng.integers(0, 1 << 62, rows))),
        Column("function", "text", pa.array(["embed"] * rows)),
        Column("submission", "text", pa.array([f"{n % 5:064d}" for n in range(rows)])),
        Column("payload", "jsonb", pa.array(payloads)),
        Column("tokens", "bytea", packed(_lists(tokens, OUTPUT_TOKENS))),
        Column("vector", "halfvec", _lists(vectors, DIM)),
    ]


def _lists(values: Any, size: int) -> pa.ListArray:
    offsets = np.arange(0, len(values) + 1, size, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
