"""A database restored from an older dump: refused at the start, its missing tasks named, and given up only on purpose."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from fabric_pipelines import settings as settings_module
from fabric_pipelines.cli import app
from fabric_pipelines.completion.receive import by_function
from fabric_pipelines.dataplane import account, dump, proof, results
from fabric_pipelines.dataplane.account import Unrestored
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.postgres import EmbeddedPostgres, place
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import DatabaseUnavailable, IncarnationMismatch, UsageError
from fabric_pipelines.ids import SEQUENCE_BITS
from fabric_pipelines.records.settled import Ids, Settled, Sums
from fabric_pipelines.settings import make_runtime_folder
from tests.services.test_completion_process import TASKS, Machine
from tests.support import ON_EVERY_SERVER, eventually
from tests.support_completions import pulled_batch

NAME, JOURNAL = "f" * 64, "a" * 32
OLD = 64


@pytest.fixture
def machine(open_folder: Path, database: Database) -> Iterator[Machine]:
    home = open_folder / hashlib.sha256(database.url.encode()).hexdigest()[:8]
    home.mkdir()
    made = Machine(home, database)
    yield made
    made.close()


def settled_of(ids: Ids) -> Settled:
    return Settled(ids, ids + 1, np.zeros_like(ids), {0: (NAME, "generate")})


class Told:
    """A broker that has settled `ids`; `asked` are the pages that were asked for id by id."""

    def __init__(self, ids: Ids, rows: int = 1 << 18) -> None:
        self.ids, self.rows = np.sort(ids), rows
        self.asked: list[int] = []

    def settled_sums(self) -> Sums:
        pages = int(self._page().max(initial=-1)) + 1
        return Sums.of(self.ids, self.rows, pages)

    def settled_page(self, begin: int) -> Settled:
        self.asked.append(begin // self.rows)
        return settled_of(self.ids[self._page() == begin // self.rows])

    def _page(self) -> Ids:
        return (self.ids & ((1 << SEQUENCE_BITS) - 1)) // self.rows


def proven(database: Database, told: Told) -> list[int]:
    """The pages that were asked for; all has landed."""
    told.asked.clear()
    proof.require_landed(database, told, JOURNAL)
    return told.asked


def ids_of(batch: Any) -> Ids:
    found: Ids = batch.column("task_id").to_numpy()
    return found


def restore(older: Path, program: Path, target: Database) -> None:
    restore = program.with_name("pg_restore")
    subprocess.run([restore, "--no-owner", f"--dbname={target.url}", str(older)], check=True)


def command(machine: Machine, *words: str) -> Result:
    return CliRunner().invoke(app, ["db", *words], env=machine.environment)


def test_a_database_restored_from_an_older_dump_is_refused_checked_and_taken_on_purpose_only(
    machine: Machine, database: Database, empty_database: Database, tmp_path: Path
) -> None:
    machine.start("broker")
    completion = machine.start("completion")
    submission = machine.submit()
    assert machine.compute(at_most=OLD) == OLD
    admin = machine.client("admin")

    def settled() -> int:
        return admin.settled().tasks

    eventually(lambda: settled() == OLD, within_s=60, what="the first tasks are retired")
    made = dump.write(database, tmp_path / "older.dump")
    machine.compute()
    eventually(lambda: settled() == TASKS, within_s=60, what="all tasks are retired")
    assert (admin.status().total.retired.tasks, admin.status().total.dead.tasks) == (360, 40)
    assert command(machine, "check").exit_code == 0
    completion.terminate()
    completion.communicate(timeout=90)

    restore(made.path, made.program, empty_database)
    machine.environment["FABRIC_PG_URL"] = empty_database.url
    refused = machine.start("completion", ready=False)
    _, err = refused.communicate(timeout=90)
    assert refused.returncode == 4
    lost = TASKS - OLD
    for part in (f"landed {OLD} of the {TASKS} tasks", "older state", f"accept-loss {lost}"):
        assert part in err

    checked = command(machine, "check", "--json")
    answer = json.loads(checked.stdout)
    assert (checked.exit_code, answer["ok"], answer["settled"]) == (3, False, TASKS)
    (named,) = answer["unrestored"]
    assert (named["submission_id"], named["tasks"]) == (submission, lost)
    rows = results.unaccounted(empty_database, np.array(named["task_ids"], np.int64))
    assert rows.tolist() == named["task_ids"]
    assert f"{lost} tasks of submission {submission[:12]} (generate" in checked.stderr

    assert command(machine, "accept-loss", str(lost - 1)).exit_code == 2
    assert command(machine, "accept-loss", str(lost)).exit_code == 0
    again = command(machine, "check", "--json")
    assert (again.exit_code, json.loads(again.stdout)["given_up"]) == (0, lost)
    machine.start("completion")


def test_after_a_refused_start_the_commands_reach_the_embedded_database_by_themselves(
    open_folder: Path, tmp_path: Path
) -> None:
    home = open_folder / "embedded"
    home.mkdir()
    settings = settings_module.load({"home": home}, {}, tmp_path)
    server = EmbeddedPostgres(place(settings), options={"fsync": "off"}, durable_initdb=False)
    make_runtime_folder(settings.runtime_dir)
    database = Database(server.start())
    machine = Machine(home, database)
    del machine.environment["FABRIC_PG_URL"]
    try:
        database.migrate()
        machine.start("broker")
        submission = machine.submit()
        machine.compute()
        completion, writer = machine.client("completion"), Writer(database)
        while (pulled := completion.pull_computed(rows=TASKS)) is not None and pulled.num_rows:
            for batch in by_function(pulled):
                landed = writer.land(batch)
                if landed.confirmation is not None:
                    completion.retire(landed.task_ids, landed.confirmation)
                if landed.dead_confirmation is not None:
                    completion.dead(
                        landed.dead_task_ids,
                        landed.dead_confirmation,
                        requeues=landed.dead_requeues,
                    )
        writer.close()
        with database.session() as connection:  # as an older dump would have it
            for table in ("acks", "generate", "dead_letters"):
                connection.execute(f"delete from fabric.{table}".encode())
    finally:
        server.stop()
    with pytest.raises(DatabaseUnavailable):
        database.connect()

    checked = command(machine, "check", "--json")
    (named,) = json.loads(checked.stdout)["unrestored"]
    assert (checked.exit_code, named["submission_id"], named["tasks"]) == (3, submission, TASKS)
    assert "runs for this command" in checked.stderr
    assert command(machine, "accept-loss", str(TASKS)).exit_code == 0
    dumped = command(machine, "dump", str(tmp_path / "made.dump"))
    assert dumped.exit_code == 0, dumped.stderr
    server.start()  # and nothing is left running that would be in its way
    try:
        used = command(machine, "check", "--json")
        assert (used.exit_code, json.loads(used.stdout)["given_up"]) == (0, TASKS)
        assert "runs for this command" not in used.stderr
        assert server.running
    finally:
        server.stop()
        machine.close()


@ON_EVERY_SERVER
def test_as_many_unsettled_landings_as_lost_ones_hide_nothing(database: Database) -> None:
    writer = Writer(database)
    writer.land(held := pulled_batch(30, function="generate"))
    writer.close()
    here, lost = ids_of(held), ids_of(pulled_batch(10, function="generate", first=500))
    with pytest.raises(IncarnationMismatch, match="has landed 20 of the 30 tasks"):
        proof.require_landed(database, Told(np.concatenate([here[10:], lost])), JOURNAL)
    proof.require_landed(database, Told(here[10:]), JOURNAL)  # landed and not yet settled
    proof.require_landed(database, Told(here[:0]), JOURNAL)
    with pytest.raises(UsageError, match="10 tasks that the broker retired"):
        proof.accept_loss(database, settled_of(np.concatenate([here, lost])), 11)
    assert proof.accept_loss(database, settled_of(np.concatenate([here, lost])), 10) == 10
    proof.require_landed(database, Told(np.concatenate([here, lost])), JOURNAL)


def land(database: Database, first: int, rows: int) -> Ids:
    writer = Writer(database)
    writer.land(batch := pulled_batch(rows, function="generate", first=first))
    writer.close()
    return ids_of(batch)


@ON_EVERY_SERVER
def test_a_start_asks_only_for_pages_that_moved_since_they_were_proven(database: Database) -> None:
    ids = land(database, 0, 100)
    assert proven(database, Told(ids[:70], rows=20)) == [0, 1, 2, 3]
    assert proven(database, Told(ids[:70], rows=20)) == []
    assert proven(database, Told(ids, rows=20)) == [3, 4]
    requeued = Told(np.delete(ids, 45), rows=20)  # a dead task that is open again
    assert proven(database, requeued) == [2]
    assert proven(database, Told(ids, rows=20)) == [2]
    lost = Told(np.concatenate([ids, land(database, 100, 4) + 4]), rows=20)
    for _ in range(2):  # what is missing is asked for again each time
        lost.asked.clear()
        with pytest.raises(IncarnationMismatch, match="has landed 100 of the 104 tasks"):
            proof.require_landed(database, lost, JOURNAL)
        assert lost.asked == [5]
    proof.accept_loss(database, settled_of(lost.ids), 4)
    assert proven(database, lost) == [0, 1, 2, 3, 4, 5], "what was given up counts anew"
    assert proven(database, lost) == []


@ON_EVERY_SERVER
def test_what_was_proven_rests_on_its_landings(database: Database) -> None:
    """Rows that somebody deleted, or a table that was restored by itself, beside a word that is newer."""
    ids = np.concatenate([land(database, first, 20) for first in (0, 20, 40)])
    told = Told(ids, rows=20)
    assert proven(database, told) == [0, 1, 2]
    land(database, 60, 5)  # a landing that comes later changes nothing of it
    with database.session() as connection:
        connection.execute(
            "create table kept as select * from fabric.acks where first_task = %s", (int(ids[20]),)
        )
        connection.execute("delete from fabric.acks where first_task = %s", (int(ids[20]),))
        land(database, 80, 20)  # as many as went
    with pytest.raises(IncarnationMismatch, match="has landed 40 of the 60"):
        proven(database, told)
    with database.session() as connection:
        connection.execute("insert into fabric.acks select * from kept")
    assert proven(database, told) == []


@ON_EVERY_SERVER
def test_landings_that_another_cluster_numbered_are_in_nobodys_way(database: Database) -> None:
    """Restored into a new cluster, whose transactions are counted from the beginning: the same numbers come again."""
    ids = land(database, 0, 10)
    with database.session() as connection:
        connection.execute(
            "insert into fabric.acks (xid, function, first_task, last_task, rows, inserted, dead, size, ids) "
            "select (pg_current_xact_id()::text::bigint + ahead)::text::xid8, function, first_task, last_task, rows, "
            "inserted, dead, size, ids from fabric.acks, generate_series(1, 9) as ahead"
        )
    more = [land(database, first, 5) for first in (10, 15, 20)]
    told = Told(np.concatenate([ids, *more]), rows=20)
    assert proven(database, told) == [0, 1]
    assert account.check(database, settled_of(told.ids)).ok


def test_an_older_dump_has_an_older_word_and_what_was_settled_since_is_asked_for(
    database: Database, empty_database: Database, tmp_path: Path
) -> None:
    ids = land(database, 0, 60)
    assert proven(database, Told(ids, rows=20)) == [0, 1, 2]
    made = dump.write(database, tmp_path / "older.dump")
    ids = np.concatenate([ids, land(database, 60, 5), land(database, 80, 5)])
    told = Told(ids, rows=20)
    assert proven(database, told) == [3, 4]
    restore(made.path, made.program, empty_database)
    told.asked.clear()
    with pytest.raises(IncarnationMismatch, match="has landed 60 of the 70"):
        proof.require_landed(empty_database, told, JOURNAL)
    assert told.asked == [3, 4], "what the dump has proven it holds"
    inside = Told(np.concatenate([ids[:60], ids[65:]]), rows=100)  # and a gap within a page
    with pytest.raises(IncarnationMismatch, match="has landed 60 of the 65"):
        proof.require_landed(empty_database, inside, JOURNAL)


@ON_EVERY_SERVER
def test_a_row_that_was_deleted_is_no_older_state_and_a_row_without_its_landing_no_loss(
    database: Database,
) -> None:
    writer = Writer(database)
    writer.land(first := pulled_batch(20, function="embed"))
    writer.land(other := pulled_batch(20, function="generate", first=100))
    writer.close()
    every = settled_of(np.concatenate([ids_of(first), ids_of(other)]))
    with database.session() as connection:
        connection.execute("delete from fabric.generate")
        connection.execute("delete from fabric.acks where function = 'embed'")
    found = account.check(database, every)
    assert [item.tasks for item in found.lost] == [20]
    assert (found.unrestored, found.settled) == ([], 40)
    with pytest.raises(IncarnationMismatch, match="has landed 20 of the 40"):
        proof.require_landed(database, Told(every.ids()), JOURNAL)
    with database.session() as connection:
        connection.execute(
            "delete from fabric.embed where task_id = %s", (ids_of(first)[3].item(),)
        )
    gone = [int(ids_of(first)[3])]
    assert account.check(database, every).unrestored == [Unrestored(NAME, "generate", 1, gone)]


def test_a_dump_of_an_older_program_is_migrated_before_it_is_checked(database: Database) -> None:
    with database.session() as connection:
        connection.execute("drop table fabric.given_up")
        connection.execute("delete from fabric.migrations where number = 8")
    with pytest.raises(UsageError, match="fabric db migrate"):
        account.check(database)
    database.migrate()
    assert account.check(database).ok


def test_landings_from_before_ids_were_kept_do_not_refuse_the_start(database: Database) -> None:
    writer = Writer(database)
    writer.land(held := pulled_batch(20, function="generate"))
    writer.close()
    with database.session() as connection:
        connection.execute("update fabric.acks set ids = null")
    every = settled_of(ids_of(held))
    proof.require_landed(database, Told(every.ids()), JOURNAL)
    assert account.check(database, every).ok
    with database.session() as connection:
        connection.execute("delete from fabric.generate")
    assert [item.tasks for item in account.check(database, every).unrestored] == [20]
