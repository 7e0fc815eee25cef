"""Rows straight into their table: what comes twice goes through the stage, and no byte of a reused buffer lands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from psycopg._copy import LibpqWriter, QueuedLibpqWriter

from fabric_pipelines.dataplane import results
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.encode import Column, encode_copy
from fabric_pipelines.dataplane.postgres import EmbeddedPostgres
from fabric_pipelines.dataplane.writer import Writer
from tests.support import ON_EVERY_SERVER
from tests.support_completions import pulled_batch

WRITERS: list[type[Any]] = [LibpqWriter, QueuedLibpqWriter]


@pytest.fixture
def writer(database: Database) -> Iterator[Writer]:
    made = Writer(database)
    yield made
    made.close()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The target of each COPY, in order."""
    seen: list[str] = []
    real: Callable[..., Any] = psycopg.Cursor.copy

    def noted(self: Any, statement: Any, *more: Any, **extra: Any) -> Any:
        seen.append(statement.as_string().split(" (")[0].removeprefix("copy ").replace('"', ""))
        return real(self, statement, *more, **extra)

    monkeypatch.setattr(psycopg.Cursor, "copy", noted)
    return seen


@ON_EVERY_SERVER
def test_new_rows_go_straight_and_a_replay_through_the_stage(
    writer: Writer, copies: list[str], postgres: EmbeddedPostgres
) -> None:
    batch = pulled_batch(30, function="generate")
    landed = [writer.land(item).rows for item in (batch, batch, batch)]
    assert landed == [30, 0, 0]
    table, stage = "fabric.generate", "pg_temp.stage_generate"
    assert postgres.binaries is not None
    # before 18 a backend does not count its WAL: the first landing of a table is explained, and only a merge can be
    first = table if postgres.binaries.major >= 18 else stage
    assert copies == [first, table, stage, stage], "after one conflict the stage comes first"


def test_after_a_replay_new_rows_go_straight_again(writer: Writer, copies: list[str]) -> None:
    first = pulled_batch(30, function="generate")
    writer.land(first)
    writer.land(first)
    for at in (100, 200):
        writer.land(pulled_batch(30, function="generate", first=at))
    assert copies[-2:] == ["pg_temp.stage_generate", "fabric.generate"]


@ON_EVERY_SERVER
def test_a_batch_that_is_half_there_lands_its_other_half(
    writer: Writer, database: Database
) -> None:
    writer.land(pulled_batch(20, function="embed", first=0))
    landed = writer.land(pulled_batch(30, function="embed", first=10))
    assert (landed.rows, landed.task_ids.size) == (20, 30)
    assert results.counts(database)["embed"] == 40


def test_a_unique_index_of_the_owner_costs_only_the_row_that_breaks_it(
    writer: Writer, database: Database
) -> None:
    with database.session() as connection:
        connection.execute("create unique index on fabric.generate (source_row)")
    writer.land(pulled_batch(10, function="generate"))
    batch = pulled_batch(10, function="generate", first=100)
    at = batch.schema.get_field_index("source_row")
    rows = pa.array([3, *range(101, 110)], pa.int64())  # 3 is taken
    landed = writer.land(batch.set_column(at, batch.schema.field(at), rows))
    assert landed.dead_task_ids.tolist() == [batch.column("task_id")[0].as_py()]
    assert (landed.rows, results.counts(database)["generate"]) == (9, 19)


def test_a_row_without_a_place_in_the_table_is_named_on_the_straight_way_too(
    writer: Writer, database: Database, copies: list[str]
) -> None:
    with database.session() as connection:
        connection.execute("alter table fabric.generate add check (source_row <> 13)")
    landed = writer.land(pulled_batch(40, function="generate"))
    assert (landed.rows, landed.dead_task_ids.size) == (39, 1)
    assert copies[:2] == ["fabric.generate"] * 2, "one retry"
    assert copies[2:] == ["pg_temp.stage_dead_letters"], "no halving"


class Ring:
    """One slot of memory that the next batch overwrites, as a shared-memory ring's would be."""

    def __init__(self, rows: int, dim: int) -> None:
        self.slot = np.zeros(rows * dim, np.float16)
        self._dim = dim

    def batch(self, first: int) -> pa.RecordBatch:
        """A pulled batch whose vectors lie in the slot, not in memory of their own."""
        rows = len(self.slot) // self._dim
        made = pulled_batch(rows, function="embed", first=first, dim=self._dim)
        at = made.schema.get_field_index("vector")
        self.slot[:] = made.column(at).flatten().to_numpy()
        values = pa.Array.from_buffers(
            pa.float16(), len(self.slot), [None, pa.py_buffer(self.slot)]
        )
        offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * self._dim)
        vectors = pa.ListArray.from_arrays(offsets, values)
        return made.set_column(at, made.schema.field(at), vectors)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("vector_type", ["halfvec", "bytea"])
def test_a_slot_that_is_reused_after_write_corrupts_no_row(
    writer: Writer,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Any],
    vector_type: str,
) -> None:
    """The queueing writer of psycopg keeps the very memory that it was given until its thread sends it."""
    if vector_type == "bytea":
        with database.session() as connection:
            connection.execute("alter table fabric.embed alter column vector type bytea using ''")
            connection.execute("update fabric.meta set value = 'bytea' where key = 'vector_type'")
    ring = Ring(500, 64)
    real: Callable[..., Any] = psycopg.Cursor.copy

    def by_kind(self: Any, statement: Any) -> Any:
        return real(self, statement, writer=kind(self))

    written: list[int] = []
    write = kind.write

    def then_overwritten(self: Any, data: Any) -> None:
        write(self, data)
        ring.slot.view(np.uint16)[:] = 0xFFFF
        written.append(len(data))

    monkeypatch.setattr(psycopg.Cursor, "copy", by_kind)
    monkeypatch.setattr(kind, "write", then_overwritten)
    for first in (0, 500):
        batch = ring.batch(first)
        expected = batch.column("vector").to_pylist()
        assert writer.land(batch).rows == 500
        assert not np.isfinite(ring.slot).any(), "the slot was not overwritten, nothing was shown"
        read = results.read(database, function="embed").slice(first, 500)
        assert read.column("vector").to_pylist() == expected
    assert max(written) > 500 * 64 * 2


def test_a_stream_shares_no_memory_with_what_it_was_made_of() -> None:
    ring = Ring(50, 8)
    batch = ring.batch(0)
    columns = [
        Column("vector", "halfvec", batch.column("vector")),
        Column("task_id", "int8", batch.column("task_id")),
    ]
    stream = encode_copy(columns)
    before = [bytes(piece) for piece in stream]
    ring.slot.view(np.uint16)[:] = 0xFFFF
    assert [bytes(piece) for piece in stream] == before
