"""What no row could help is the table's trouble: nothing is buried, landing waits with a reason and goes on by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fabric_pipelines.completion.receive import Receiver
from fabric_pipelines.completion.waiting import PAUSE_MOST_S
from fabric_pipelines.dataplane import refusals, results, writer
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.table_trouble import TableRefuses
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import UsageError
from fabric_pipelines.testing.scripted_computed import ScriptedComputed
from tests.support import ON_EVERY_SERVER
from tests.support_completions import pulled_batch

ROWS = 20
FREEZES = (
    "create or replace function owners() returns trigger language plpgsql as "
    "$$ begin raise exception 'maintenance until 18:00'; end $$"
)
EACH = "create trigger t {} insert on fabric.embed for each {} execute function owners()"
DEFERRED = (
    "create constraint trigger t after insert on fabric.embed deferrable initially deferred "
    "for each row execute function owners()"
)
HEALED = "drop trigger t on fabric.embed"
TROUBLES = {
    "sequence": (
        [
            "create sequence few maxvalue 10",
            "alter table fabric.embed add n bigint default nextval('few')",
        ],
        "2200H.*maximum value of sequence",
        "alter sequence few maxvalue 1000",
    ),
    "default": (
        [
            "create function never() returns int language plpgsql as $$ begin return 1 / (now() is null)::int; end $$",
            "alter table fabric.embed add n int",
            "alter table fabric.embed alter n set default never()",
        ],
        "22012.*division by zero",
        "alter table fabric.embed alter n drop default",
    ),
    "statement before": (
        [FREEZES, EACH.format("before", "statement")],
        "P0001.*until 18:00",
        HEALED,
    ),
    "statement after": ([FREEZES, EACH.format("after", "statement")], "P0001.*until 18:00", HEALED),
    "row before": ([FREEZES, EACH.format("before", "row")], "P0001.*until 18:00", HEALED),
    "row after": ([FREEZES, EACH.format("after", "row")], "P0001.*until 18:00", HEALED),
    "row deferred": ([FREEZES, DEFERRED], "P0001.*until 18:00", HEALED),
}


@pytest.fixture
def landing(database: Database) -> Iterator[Writer]:
    made = Writer(database)
    yield made
    made.close()


def run(database: Database, *statements: str) -> None:
    with database.session() as connection:
        for statement in statements:
            connection.execute(statement.encode())


def letters(database: Database) -> list[tuple[int, str]]:
    rows = results.dead_letters(database).to_pylist()
    return [(row["source_row"], row["error_code"]) for row in rows]


@ON_EVERY_SERVER
@pytest.mark.parametrize("which", list(TROUBLES))
def test_a_table_that_takes_no_row_buries_none_and_takes_them_once_it_heals(
    database: Database, landing: Writer, which: str
) -> None:
    statements, says, heals = TROUBLES[which]
    run(database, *statements)
    batch = pulled_batch(ROWS, function="embed")
    with pytest.raises(TableRefuses, match=rf"fabric\.embed .* refuses every row alike \({says}"):
        landing.land(batch)
    assert (results.counts(database)["embed"], letters(database)) == (0, [])
    run(database, heals)
    landed = landing.land(batch)
    assert (landed.rows, landed.dead_task_ids.size) == (ROWS, 0)


def test_completion_says_what_it_waits_for_and_goes_on(database: Database, landing: Writer) -> None:
    statements, _, heals = TROUBLES["statement before"]
    run(database, *statements)
    broker = ScriptedComputed([pulled_batch(ROWS, function="embed")])
    said, now_s = list[str](), [0.0]
    loop = Receiver(
        broker.open,
        landing,
        lambda journal, number, retired: database.register_incarnation(
            journal, number, retired=retired
        ),
        say=said.append,
        clock_s=lambda: now_s[0],
    )
    now_s[0] += 1
    assert [loop.step(wait_s=0) for _ in range(3)] == [0, 0, 0], "only this function waits"
    assert "refuses every row alike (P0001: maintenance until 18:00)" in loop.waits_for
    assert (broker.retired, broker.buried, len(said)) == ({}, {}, 1)
    run(database, heals)
    now_s[0] += PAUSE_MOST_S
    loop.step(wait_s=0)
    assert (loop.waits_for, said[1:]) == ("", ["function embed goes on"])
    loop.close()
    assert (len(broker.retired), len(broker.buried)) == (ROWS, 0)


@pytest.mark.parametrize("which", ["sequence", "default", "statement before"])
def test_a_row_that_comes_alone_waits_as_well_for_what_needs_no_row_to_fail(
    database: Database, landing: Writer, which: str
) -> None:
    run(database, *TROUBLES[which][0])
    if which == "sequence":
        run(database, "select setval('few', 10)")
    with pytest.raises(TableRefuses):
        landing.land(pulled_batch(1, function="embed"))
    assert letters(database) == []


def test_a_row_that_comes_alone_to_a_trigger_of_rows_is_buried_and_does_not_wait_for_ever(
    database: Database, landing: Writer
) -> None:
    run(database, *TROUBLES["row before"][0])
    assert landing.land(pulled_batch(1, function="embed")).dead_task_ids.size == 1
    assert letters(database) == [(0, "P0001")]


@pytest.mark.parametrize(
    ("statements", "dead"),
    [
        (["alter table fabric.embed add constraint c check (source_row < 0)"], {"23514": ROWS}),
        (
            [
                FREEZES.replace(
                    "raise exception 'maintenance until 18:00';",
                    "raise exception 'not %', new.source_row;",
                ),
                EACH.format("before", "row"),
            ],
            {"P0001": ROWS},
        ),
        (
            [
                FREEZES.replace("raise", "if new.source_row <> 13 then raise").replace(
                    "end $$", "end if; return new; end $$"
                ),
                EACH.format("before", "row"),
            ],
            {"P0001": ROWS - 1},
        ),
    ],
    ids=["a value", "words of their own", "all but one that was tried"],
)
def test_rows_that_are_refused_for_what_they_hold_are_dead_letters_however_many(
    database: Database, landing: Writer, statements: list[str], dead: dict[str, int]
) -> None:
    run(database, *statements)
    landed = landing.land(pulled_batch(ROWS, function="embed"))
    assert results.dead_letter_reasons(database) == dead
    assert landed.rows == ROWS - sum(dead.values())


def test_the_trial_leaves_nothing_and_is_made_once_a_landing(
    database: Database, landing: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(database, "alter table fabric.embed add constraint c check (source_row % 4 <> 1)")
    asked: list[int] = []
    real = writer.table_refuses
    monkeypatch.setattr(
        writer, "table_refuses", lambda *given: asked.append(given[4]) or real(*given)
    )
    landed = landing.land(pulled_batch(ROWS, function="embed"))
    assert (landed.rows, landed.dead_task_ids.size, asked) == (15, 5, [ROWS])
    assert results.counts(database)["embed"] == 15


def refusing(rows: str) -> list[str]:
    words = f"if new.source_row in ({rows}) then raise exception 'not allowed'; end if; return new;"
    return [
        FREEZES.replace("raise exception 'maintenance until 18:00';", words),
        EACH.format("before", "row"),
    ]


@pytest.mark.parametrize("few", [2, 7])
def test_a_few_bad_rows_alone_in_a_landing_are_dead_letters_and_hold_up_nobody(
    database: Database, landing: Writer, few: int
) -> None:
    run(database, *refusing("3, 4, 5, 6, 7, 8, 9"))
    landed = landing.land(pulled_batch(ROWS, function="embed").slice(3, few))
    assert (landed.rows, landed.dead_task_ids.size) == (0, few)
    assert letters(database) == [(row, "P0001") for row in range(3, 3 + few)]


def test_rows_that_landed_before_do_not_hide_a_table_that_takes_no_more(
    database: Database, landing: Writer
) -> None:
    batch = pulled_batch(ROWS, function="embed")
    landing.land(batch.slice(0, 10))
    run(database, *TROUBLES["row after"][0])
    with pytest.raises(TableRefuses, match="until 18:00"):
        landing.land(batch)
    assert letters(database) == []
    run(database, HEALED)
    assert (landing.land(batch).rows, letters(database)) == (10, [])


@ON_EVERY_SERVER
def test_rows_without_a_partition_wait_for_one_and_a_check_of_it_still_buries(
    database: Database, landing: Writer
) -> None:
    batch = pulled_batch(ROWS, function="embed")
    ids = sorted(batch.column("task_id").to_pylist())
    part = "create table fabric.embed_{} partition of fabric.embed for values from ({}) to ({})"
    run(
        database,
        "alter table fabric.embed rename to before",
        "create table fabric.embed (like fabric.before including defaults, primary key (task_id)) partition by range (task_id)",
        part.format(1, "minvalue", ids[2]),
        "alter table fabric.embed add constraint c check (source_row <> 7)",
    )
    with pytest.raises(TableRefuses, match="23514: no partition of relation"):
        landing.land(batch)
    assert letters(database) == []
    run(database, part.format(2, ids[2], "maxvalue"))
    landed = landing.land(batch)
    assert (landed.rows, letters(database)) == (ROWS - 1, [(7, "23514")])


def test_what_an_operator_accepts_becomes_dead_letters_in_those_words_alone(
    database: Database, landing: Writer
) -> None:
    run(database, *TROUBLES["row before"][0])
    batch = pulled_batch(60, function="embed")
    with pytest.raises(UsageError, match="no table refused the rows of function 'embed' alike"):
        refusals.accept(database, "embed")
    for _ in range(2):
        with pytest.raises(
            TableRefuses, match="`fabric broker dead accept embed` makes dead letters"
        ):
            landing.land(batch)
    (said,) = refusals.listed(database)
    assert (said.function, said.sqlstate, said.message) == (
        "embed",
        "P0001",
        "maintenance until 18:00",
    )
    assert (said.accepted_at, said.since < said.last_said) == (None, True)
    assert refusals.accept(database, "embed").accepted_at is not None
    landed = landing.land(batch)
    assert (landed.rows, landed.dead_task_ids.size) == (0, 60)
    assert results.dead_letter_reasons(database) == {"P0001": 60}
    run(database, FREEZES.replace("18:00", "20:00"))
    other = pulled_batch(ROWS, function="embed", first=1000)
    with pytest.raises(TableRefuses, match="20:00"):
        landing.land(other)
    assert [each.message[-5:] for each in refusals.listed(database)] == ["20:00", "18:00"]
    run(database, FREEZES)
    assert refusals.withdraw(database, "embed") == 1
    with pytest.raises(TableRefuses, match="18:00"):
        landing.land(other)
    assert [each.message[-5:] for each in refusals.listed(database)] == ["18:00"]


def test_what_no_row_is_to_blame_for_is_nothing_to_accept(
    database: Database, landing: Writer
) -> None:
    run(database, *TROUBLES["sequence"][0])
    with pytest.raises(TableRefuses) as caught:
        landing.land(pulled_batch(ROWS, function="embed"))
    assert "accept" not in str(caught.value)
    assert refusals.listed(database) == []
