"""Landing: one transaction a batch, replays that change nothing, poison that costs one row; on every server."""

from __future__ import annotations

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from fabric_pipelines.dataplane import results
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.writer import CommitInDoubt, Landed, Writer
from fabric_pipelines.errors import (
    DatabaseUnavailable,
    FabricError,
    IncarnationMismatch,
    SchemaError,
    StorageFailed,
)
from fabric_pipelines.records.arrow import from_ipc
from tests.services.cut_wire import WireCutter
from tests.support import ON_EVERY_SERVER
from tests.support_completions import pulled_batch

pytestmark = ON_EVERY_SERVER


def _land(database: Database, batch: pa.RecordBatch, **more: object) -> Landed:
    writer = Writer(database, **more)  # type: ignore[arg-type]
    try:
        return writer.land(batch)
    finally:
        writer.close()


def _count(database: Database, table: str) -> int:
    with database.session() as connection:
        row = connection.execute(f"select count(*) from fabric.{table}".encode()).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("function", ["generate", "embed", "hidden_states", "somebody_elses"])
def test_a_batch_lands_and_its_replay_changes_nothing(database: Database, function: str) -> None:
    table = "results" if function == "somebody_elses" else function
    batch = pulled_batch(50, function=function)
    first, again = _land(database, batch), _land(database, batch)
    assert (first.rows, again.rows, _count(database, table)) == (50, 0, 50)
    assert np.array_equal(first.task_ids, batch.column("task_id").to_numpy())
    assert np.array_equal(again.task_ids, first.task_ids)
    assert first.confirmation is not None
    assert first.confirmation.proof["table"] == f"fabric.{table}"
    assert first.confirmation.proof["cluster"] == database.cluster_id
    assert first.dead_confirmation is None


def test_generated_tokens_and_text_are_what_was_sent(database: Database) -> None:
    batch = pulled_batch(3, function="generate")

    def decode(engine: str, outputs: pa.Array) -> pa.Array:
        return pa.array([f"{engine}:{ids}\x00" for ids in outputs.to_pylist()])

    _land(database, batch, decode=decode)
    with database.session() as connection:
        rows = connection.execute(
            "select output, output_tokens, text from fabric.generate order by task_id"
        ).fetchall()
    for (output, count, text), ids in zip(rows, batch.column("output").to_pylist(), strict=True):
        assert np.frombuffer(output, "<u4").tolist() == ids
        assert count == len(ids)
        assert text.endswith(f"{ids}\ufffd")


def test_refused_and_failed_tasks_become_dead_letters_with_their_reason(database: Database) -> None:
    batch = pulled_batch(
        4,
        function="generate",
        bad={1: ("refused", "oversized", "too long"), 3: ("failed", None, None)},
    )
    landed = _land(database, batch)
    assert landed.task_ids.tolist() == batch.column("task_id").to_pylist()[::2]
    assert landed.dead_confirmation is not None
    assert landed.dead_confirmation.kind == "dead_letter"
    with database.session() as connection:
        rows = connection.execute(
            "select task_id, error_code, reason from fabric.dead_letters order by task_id"
        ).fetchall()
    assert [row[0] for row in rows] == landed.dead_task_ids.tolist()
    assert [row[1:] for row in rows] == [
        ("oversized", "too long"),
        ("failed", "the task was failed"),
    ]


def test_a_poison_vector_is_found_before_it_is_sent_and_the_rest_lands(database: Database) -> None:
    batch = pulled_batch(20, function="embed", poison={7: float("nan"), 12: float("inf")})
    landed = _land(database, batch)
    assert (landed.rows, landed.dead_task_ids.size) == (18, 2)
    with database.session() as connection:
        raw = connection.execute(
            "select raw from fabric.dead_letters where error_code = '22000' order by task_id"
        ).fetchall()
    kept = from_ipc(raw[0][0])
    assert kept.column("task_id").to_pylist() == [landed.dead_task_ids[0]]
    assert kept.num_rows == 1


def test_a_row_that_only_the_database_can_reject_is_named_and_buried(database: Database) -> None:
    with database.session() as connection:
        connection.execute("alter table fabric.generate add check (source_row <> 13)")
    batch = pulled_batch(40, function="generate")
    landed = _land(database, batch)
    assert landed.rows == 39
    with database.session() as connection:
        row = connection.execute(
            "select source_row, error_code, reason from fabric.dead_letters"
        ).fetchone()
    assert row is not None
    assert row[:2] == (13, "23514")
    assert "check constraint" in row[2]


def test_a_line_that_copy_names_costs_one_retry(database: Database) -> None:
    with database.session() as connection:
        connection.execute("create domain short_text as text check (length(value) < 20)")
        connection.execute("alter table fabric.generate alter column finish_reason type short_text")
    batch = pulled_batch(40, function="generate")
    reasons = ["x" * 30 if row == 25 else "stop" for row in range(40)]
    at = batch.schema.get_field_index("finish_reason")
    batch = batch.set_column(at, batch.schema.field(at), pa.array(reasons))
    landed = _land(database, batch)
    assert landed.dead_task_ids.tolist() == [batch.column("task_id")[25].as_py()]
    with database.session() as connection:
        row = connection.execute("select reason from fabric.dead_letters").fetchone()
    assert row is not None
    assert "line 26" in row[0]


def test_a_batch_of_nothing_but_poison_still_ends(database: Database) -> None:
    batch = pulled_batch(8, function="embed", poison=dict.fromkeys(range(8), float("nan")))
    landed = _land(database, batch)
    assert (landed.rows, landed.confirmation, landed.dead_task_ids.size) == (0, None, 8)


def test_a_fault_that_is_nobodys_row_lands_nothing(database: Database) -> None:
    with database.session() as connection:
        connection.execute("alter table fabric.generate drop column finish_reason")
    with pytest.raises(StorageFailed, match="finish_reason"):
        _land(database, pulled_batch(5, function="generate"))
    assert _count(database, "generate") + _count(database, "dead_letters") == 0


def test_two_functions_in_one_landing_are_refused(database: Database) -> None:
    mixed = pa.concat_batches(
        [pulled_batch(1, function="embed"), pulled_batch(1, function="generate")]
    )
    with pytest.raises(SchemaError, match="one function"):
        _land(database, mixed)


@pytest.mark.parametrize("reached", [True, False])
def test_a_lost_answer_to_commit_is_settled_by_the_transactions_status(
    database: Database, tmp_path: object, reached: bool
) -> None:
    batch = pulled_batch(10, function="generate")
    database.identity  # noqa: B018 the wire is cut on the first commit it sees
    with WireCutter(database.url, deliver_commit=reached) as wire:
        writer = Writer(Database(wire.url))
        with pytest.raises(CommitInDoubt) as caught:
            writer.land(batch)
        wire.heal()
        landed = writer.land(batch)
        writer.close()
    assert _count(database, "generate") == 10
    same = landed is caught.value.landed
    assert same == reached


def test_nothing_is_confirmed_before_its_commit(database: Database) -> None:
    """A constraint that is looked at in COMMIT itself: until it has returned there is no word for the broker."""
    with database.session() as connection:
        connection.execute(
            "create function late() returns trigger language plpgsql as "
            "$$ begin raise exception 'not this one' using errcode = '40001'; end $$"
        )
        connection.execute(
            "create constraint trigger late after insert on fabric.generate "
            "deferrable initially deferred for each row execute function late()"
        )
    batch = pulled_batch(5, function="generate")
    writer = Writer(database)
    with pytest.raises(FabricError, match="not this one"):
        writer.land(batch)
    assert _count(database, "generate") == _count(database, "acks") == 0
    with database.session() as connection:
        connection.execute("drop trigger late on fabric.generate")
    landed = writer.land(batch)
    writer.close()
    assert landed.confirmation is not None
    with database.session() as connection:
        row = connection.execute(
            "select pg_xact_status(%(xid)s::xid8)", {"xid": landed.confirmation.proof["xid"]}
        ).fetchone()
    assert row == ("committed",)


def test_landing_goes_on_after_the_backend_was_killed(database: Database) -> None:
    writer = Writer(database)
    writer.land(pulled_batch(5, function="generate"))
    with database.session() as connection:
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )
    with pytest.raises(DatabaseUnavailable):
        writer.land(pulled_batch(5, function="generate", first=100))
    assert writer.land(pulled_batch(5, function="generate", first=100)).rows == 5
    writer.close()


def test_the_staging_table_keeps_nothing_between_landings(database: Database) -> None:
    writer = Writer(database)
    writer.land(pulled_batch(5, function="generate"))
    with psycopg.connect(database.url):
        landed = writer.land(pulled_batch(3, function="generate", first=100))
    writer.close()
    assert landed.rows == 3


def test_another_database_at_the_same_url_is_refused(
    database: Database, empty_database: Database
) -> None:
    empty_database.migrate()
    writer = Writer(database)
    writer.land(pulled_batch(3, function="generate"))
    writer.close()
    database.url = empty_database.url  # as if the server behind the URL had been exchanged
    with pytest.raises(IncarnationMismatch, match="answers where"):
        writer.land(pulled_batch(3, function="generate", first=10))


def test_scattered_poison_leaves_the_rows_between_it_exact(database: Database) -> None:
    poison = dict.fromkeys(range(0, 40, 3), float("nan"))
    batch = pulled_batch(40, function="embed", poison=poison)
    landed = _land(database, batch)
    alive = [row for row in range(40) if row % 3]
    assert landed.task_ids.tolist() == batch.column("task_id").take(pa.array(alive)).to_pylist()
    read = results.read(database, function="embed")
    assert (
        read.column("vector").to_pylist()
        == batch.column("vector").take(pa.array(alive)).to_pylist()
    )


def test_a_transaction_id_that_a_crash_gave_to_another_proves_nothing(database: Database) -> None:
    """A server killed before an id reached its log hands it out again; that transaction's commit is not ours."""
    writer = Writer(database)
    batch = pulled_batch(5, function="embed", dim=8)
    landed = writer.land(batch)
    assert landed.confirmation is not None
    with database.session() as connection:
        connection.execute("truncate fabric.embed")
    proof = landed.confirmation.proof
    writer._doubt = CommitInDoubt("lost", str(proof["xid"]), str(proof["cluster"]), landed)
    again = writer.land(batch)
    assert again.rows == 5
    with database.session() as connection:
        row = connection.execute("select count(*) from fabric.embed").fetchone()
    assert row == (5,)
    writer._doubt = CommitInDoubt("lost", str(proof["xid"]), str(proof["cluster"]), again)
    assert writer.land(batch).rows == again.rows  # there: settled, nothing is sent again
    writer.close()
