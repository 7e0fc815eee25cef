"""What an owner adds to a table of results costs the rows it is about, and never the landing of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from fabric_pipelines.completion.receive import Receiver
from fabric_pipelines.dataplane import encode, results, writer
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.writer import CommitRefused, Landed, Writer
from fabric_pipelines.errors import FabricError, StorageFailed
from fabric_pipelines.records.arrow import from_ipc
from fabric_pipelines.testing.scripted_computed import ScriptedComputed
from tests.support import ON_EVERY_SERVER
from tests.support_completions import pulled_batch

Owner = Callable[..., None]
SEVENTH = "if new.source_row = 7 then {} end if; return new;"
DEFERRED = (
    "create constraint trigger t after insert on fabric.embed deferrable initially deferred "
    "for each row execute function owners()"
)
BEFORE = "create trigger t before insert on fabric.embed for each row execute function owners()"
AFTER = "create trigger t after insert on fabric.embed for each row execute function owners()"


@pytest.fixture
def owner(database: Database) -> Owner:
    """Runs statements as the database's owner; `body` first becomes the trigger function `owners`."""

    def run(*statements: str, body: str = "return new;") -> None:
        with database.session() as connection:
            connection.execute(
                f"create or replace function owners() returns trigger language plpgsql as "
                f"$$ begin {body} end $$".encode()
            )
            for statement in statements:
                connection.execute(statement.encode())

    return run


@pytest.fixture
def landing(database: Database) -> Iterator[Writer]:
    made = Writer(database)
    yield made
    made.close()


def _letters(database: Database) -> list[tuple[int, str, str]]:
    with database.session() as connection:
        return connection.execute(
            "select source_row, error_code, reason from fabric.dead_letters order by source_row"
        ).fetchall()


def _count(database: Database) -> int:
    return results.counts(database)["embed"]


def _step_all(broker: ScriptedComputed, database: Database, target: Writer, **more: int) -> None:
    loop = Receiver(
        broker.open,
        target,
        lambda journal, number, retired: database.register_incarnation(
            journal, number, retired=retired
        ),
        **more,  # type: ignore[arg-type]
    )
    for _ in range(6):
        loop.step(wait_s=0)
    loop.close()


def _with_sources(batch: pa.RecordBatch, sources: list[int]) -> pa.RecordBatch:
    at = batch.schema.get_field_index("source_row")
    return batch.set_column(at, batch.schema.field(at), pa.array(sources, pa.int64()))


@ON_EVERY_SERVER
def test_a_deferred_constraint_costs_the_row_that_breaks_it(
    database: Database, owner: Owner, landing: Writer
) -> None:
    owner(
        "alter table fabric.embed add unique (source_row) deferrable initially deferred",
        "create table parent (id bigint primary key)",
        "insert into parent select generate_series(0, 199) except select 7",
        "alter table fabric.embed add foreign key (source_row) references parent deferrable initially deferred",
    )
    batch = _with_sources(pulled_batch(20, function="embed"), [*range(19), 0])
    for way, rows in ("straight", 18), ("stage", 0):  # the last row's source is the first one's
        landed = landing.land(batch)
        assert (way, landed.rows, landed.task_ids.size, _count(database)) == (way, rows, 18, 18)
        assert [code for _, code, _ in _letters(database)] == ["23505", "23503"]
    more = _with_sources(pulled_batch(20, function="embed", first=100), [*range(100, 119), 1])
    assert landing.land(more).rows == 19, "the same through the stage"
    assert [row for row, _, _ in _letters(database)][1:] == [1, 7]


@pytest.mark.parametrize("when", [BEFORE, AFTER, DEFERRED], ids=["before", "after", "deferred"])
def test_whatever_a_trigger_raises_about_a_row_is_that_rows_dead_letter(
    database: Database, owner: Owner, landing: Writer, when: str
) -> None:
    states = ["P0001", "F0001", "ZZ999", "FB001", "21000", "2F005"]
    raises = " ".join(
        f"if new.source_row = {row} then raise exception 'not {row}' using errcode = '{state}'; end if;"
        for row, state in enumerate(states, 3)
    )
    owner(when, body=f"{raises} return new;")
    landed = landing.land(pulled_batch(20, function="embed"))
    assert (landed.rows, _count(database), landed.dead_task_ids.size) == (14, 14, 6)
    letters = _letters(database)
    assert [(row, code) for row, code, _ in letters] == list(enumerate(states, 3))
    assert all(f"not {row}" in reason for row, _, reason in letters)


def test_a_broken_table_stops_with_a_remedy_and_buries_nothing(
    database: Database, owner: Owner, landing: Writer
) -> None:
    raises = "raise exception 'broken' using errcode = '{}';".format
    remedy = "put that right and start completion again"
    for statement, body, says in (
        (BEFORE, "insert into nowhere values (1); return new;", f"42P01.*{remedy}"),
        (DEFERRED, "perform nothing(new.task_id); return new;", f"42883.*{remedy}"),
        (BEFORE, raises("XX001"), f"XX001.*{remedy}"),
        (BEFORE, raises("53100"), "53100"),
        (BEFORE, raises("55P03"), "55P03"),
        (BEFORE, raises("42501"), "must own the schema fabric"),
        ("alter table fabric.embed add column mine int not null", "", f"23502.*{remedy}"),
        ("alter table fabric.embed alter t_end_us type int using 0", "", f"incorrect.*{remedy}"),
        ("alter table fabric.embed alter attempts type bigint", "", f"insufficient data.*{remedy}"),
        ("alter table fabric.embed drop column attempts", "", f"42703.*{remedy}"),
    ):
        owner("drop trigger if exists t on fabric.embed", statement, body=body)
        with pytest.raises(FabricError, match=says):
            landing.land(pulled_batch(20, function="embed"))
        assert (_count(database), _letters(database)) == (0, []), says


LATER = (
    "create table log (id bigint)",
    "create function refuses() returns trigger language plpgsql as "
    "$$ begin raise exception 'not seven at all'; end $$",
    "create constraint trigger later after insert on log deferrable initially deferred "
    "for each row execute function refuses()",
)
PUT_OFF = SEVENTH.format("set constraints all deferred; insert into log values (7);")


def test_a_row_that_only_commit_itself_refuses_is_found_by_halves(
    database: Database, owner: Owner, landing: Writer
) -> None:
    """Its trigger puts the constraint off again, while it is looked at: no statement fails, COMMIT does."""
    owner(*LATER, DEFERRED, body=PUT_OFF)
    batch = pulled_batch(20, function="embed")
    with pytest.raises(CommitRefused, match="not seven at all"):
        landing.land(batch)
    assert (_count(database), _letters(database)) == (0, [])
    broker = ScriptedComputed([batch])
    _step_all(broker, database, landing)
    assert (len(broker.retired), len(broker.buried), _count(database)) == (19, 1, 19)
    assert broker.open_ids == set()
    assert [(row, code) for row, code, _ in _letters(database)] == [(7, "P0001")]


def test_a_letter_that_commit_refuses_as_well_ends_the_landing(
    database: Database, owner: Owner, landing: Writer
) -> None:
    on_letters = DEFERRED.replace("fabric.embed", "fabric.dead_letters").replace(" t ", " u ")
    owner(*LATER, DEFERRED, on_letters, body=PUT_OFF)
    with pytest.raises(StorageFailed, match="not seven at all"):
        landing.land(pulled_batch(1, function="embed", first=7))
    assert (_count(database), _letters(database)) == (0, [])


@ON_EVERY_SERVER
def test_a_row_that_a_trigger_drops_is_a_dead_letter_and_not_landed(
    database: Database, owner: Owner, landing: Writer
) -> None:
    """Rows 1 to 4: returned as NULL, renamed, deleted behind the INSERT, and deleted where COMMIT would have done it."""
    drops = """
        if tg_when = 'BEFORE' then
            if new.source_row % 20 = 1 then return null; end if;
            if new.source_row % 20 = 2 then new.task_id := -new.task_id; end if;
        elsif new.source_row % 20 = (case tg_name when 'late' then 4 else 3 end) then
            delete from fabric.embed where task_id = new.task_id;
        end if;
        return new;
    """
    late, after = DEFERRED.replace(" t ", " late "), AFTER.replace(" t ", " soon ")
    owner(BEFORE, after, late, body=drops)
    batch, more = pulled_batch(20, function="embed"), pulled_batch(20, function="embed", first=20)
    for item in (
        batch,
        batch.slice(3),
        more,
    ):  # straight, where the server can; then through the stage
        landed = landing.land(item)
        there = set(results.read(database, function="embed").column("task_id").to_pylist())
        assert set(landed.task_ids.tolist()) == there & set(item.column("task_id").to_pylist())
        assert landed.dead_task_ids.size == (2 if item.num_rows == 17 else 4)
    dropped = [(row, "RowDropped") for row in (1, 2, 3, 4, 21, 22, 23, 24)]
    assert [(row, code) for row, code, _ in _letters(database)] == dropped
    assert "a trigger or rule of its owner dropped it" in _letters(database)[0][2]


def test_rows_that_were_there_before_the_trigger_came_stay_landed(
    database: Database, owner: Owner, landing: Writer
) -> None:
    batch = pulled_batch(20, function="embed")
    landing.land(batch)
    owner(BEFORE, body="return null;")
    again = landing.land(batch)
    assert (again.rows, again.task_ids.size, again.dead_task_ids.size) == (0, 20, 0)
    assert _letters(database) == []


def test_a_dead_letter_that_is_dropped_stops_the_landing(
    database: Database, owner: Owner, landing: Writer
) -> None:
    owner(BEFORE.replace("fabric.embed", "fabric.dead_letters"), body="return null;")
    batch = pulled_batch(4, function="embed", bad={1: ("failed", "x", "y")})
    with pytest.raises(StorageFailed, match=r"kept no letter of 1 tasks.*take that away"):
        landing.land(batch)
    assert _count(database) == 0


def test_a_trigger_that_is_whole_only_at_its_end_is_let_be_in_every_piece(
    database: Database, owner: Owner, landing: Writer
) -> None:
    """A child before its parent, in one trigger: legal with a deferred key, and still so after another row was rejected."""
    refuses = SEVENTH.format("raise exception 'no';")
    owner(
        "create table parent (id bigint primary key)",
        "create table child (id bigint references parent deferrable initially deferred)",
        BEFORE,
        f"create function seventh() returns trigger language plpgsql as $$ begin {refuses} end $$",
        DEFERRED.replace("owners()", "seventh()").replace(" t ", " late "),
        body="insert into child values (new.task_id); insert into parent values (new.task_id); return new;",
    )
    landed = landing.land(pulled_batch(20, function="embed"))
    assert (landed.rows, landed.dead_task_ids.size) == (19, 1)


def _kept(landed: Landed) -> tuple[int, int]:
    return landed.rows, landed.dead_task_ids.size


@pytest.mark.parametrize("function", ["embed", "generate", "somebody_elses"])
def test_rows_beyond_one_stream_land_in_several(
    database: Database, landing: Writer, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """A stream ends below 512 MiB; here at 16 KiB instead of making so many rows, and five such landings in a row."""
    monkeypatch.setattr(encode, "STREAM_BYTES_MAX", 16 << 10)
    batches = [pulled_batch(200, function=function, first=at, dim=64) for at in range(0, 1000, 200)]
    broker = ScriptedComputed(batches)
    _step_all(broker, database, landing, rows=500)
    assert (len(broker.retired), len(broker.buried)) == (1000, 0)
    assert sum(results.counts(database).values()) == 1000


def test_a_landing_is_cut_by_bytes_before_it_is_encoded(
    database: Database, landing: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def noted(columns: list[encode.Column]) -> list[memoryview]:
        stream = encode.encode_copy(columns)
        sent.append(sum(len(piece) for piece in stream))
        return stream

    monkeypatch.setattr(writer, "encode_copy", noted)
    monkeypatch.setattr(writer, "PIECE_BYTES", 32 << 10)
    landed = landing.land(pulled_batch(200, function="embed", dim=512))
    assert _kept(landed) == (200, 0)
    assert len(sent) >= 7
    assert max(sent) < 48 << 10


def test_a_row_that_no_stream_holds_is_a_dead_letter_and_the_others_land(
    database: Database, landing: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = pulled_batch(12, function="generate")
    at = batch.schema.get_field_index("output")
    outputs = batch.column("output").to_pylist()
    outputs[5] = [1] * 8000
    batch = batch.set_column(at, batch.schema.field(at), pa.array(outputs, pa.list_(pa.uint32())))
    monkeypatch.setattr(encode, "STREAM_BYTES_MAX", 16 << 10)
    monkeypatch.setattr(writer, "RAW_BYTES_MAX", 8 << 10)
    assert _kept(landing.land(batch)) == (11, 1)
    [(row, code, reason)] = _letters(database)
    assert (row, code) == (5, "54000")
    assert "Postgres dumps no row beyond" in reason
    with database.session() as connection:
        kept = connection.execute("select raw from fabric.dead_letters").fetchone()
    assert kept is not None
    assert from_ipc(kept[0]).column("output").to_pylist() == [None], "its payload is left out"
