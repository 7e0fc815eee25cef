"""Database: migrations, identity, journals, as a real server sees them."""

from __future__ import annotations

import psycopg
import pytest

from fabric_pipelines.dataplane import database as database_module
from fabric_pipelines.dataplane import sql
from fabric_pipelines.dataplane.database import Database, translate
from fabric_pipelines.errors import (
    DatabaseUnavailable,
    IncarnationMismatch,
    SettingsError,
    UsageError,
    VersionRefused,
)
from tests.support import ON_EVERY_SERVER


def test_migrating_twice_applies_everything_once(empty_database: Database) -> None:
    assert empty_database.migrate()[0] == "fabric"
    assert empty_database.migrate() == []


@ON_EVERY_SERVER
def test_a_database_in_use_is_brought_up_from_each_older_version(
    empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that a table gets a new key or column for are there already."""
    every = sql.migrations()
    with monkeypatch.context() as patch:
        patch.setattr(database_module, "migrations", lambda: every[:9])
        assert len(empty_database.migrate()) == 9
    with empty_database.session() as connection:
        for task in (1, 2):
            connection.execute(
                "insert into fabric.acks (function, first_task, last_task, rows, inserted, dead, size) "
                "values ('embed', %s, %s, 1, 1, 0, 9)",
                (task, task),
            )
        connection.execute("insert into fabric.shard_generation values ('a', 1, 1, 'x', '{}')")
        connection.execute(
            "insert into fabric.watched (relation, id_column, vector_column) "
            "values ('fabric.embed'::regclass, 'task_id', 'vector')"
        )
    for upto in range(10, len(every) + 1):
        with monkeypatch.context() as patch:
            patch.setattr(database_module, "migrations", lambda upto=upto: every[:upto])
            assert empty_database.migrate() == [every[upto - 1].name]
    with empty_database.session() as connection:
        keys = connection.execute("select ack_id from fabric.acks order by first_task").fetchall()
        kept = connection.execute("select pruned_at, pinned_at from fabric.shard_generation")
        assert (keys, kept.fetchall()) == ([(1,), (2,)], [(None, None)])
        own = connection.execute("select bool_and(cluster = fabric.cluster()) from fabric.watched")
        assert own.fetchone() == (True,)
        row = connection.execute("select landings from fabric.landings_below('9000000')").fetchone()
    assert row == (2,)


def test_every_table_says_what_attempts_counts(database: Database) -> None:
    with database.connect() as connection:
        rows = connection.execute(
            "select c.relname, col_description(c.oid, a.attnum) from pg_class c "
            "join pg_attribute a on a.attrelid = c.oid and a.attname = 'attempts' "
            "where c.relnamespace = 'fabric'::regnamespace and c.relkind = 'r'"
        ).fetchall()
    assert {"embed", "generate", "hidden_states", "results", "dead_letters"} <= {n for n, _ in rows}
    assert all(text and "alone in it" in text for _, text in rows), rows


def test_a_database_without_the_schema_says_what_to_do(empty_database: Database) -> None:
    with pytest.raises(UsageError, match="fabric up"):
        _ = empty_database.identity


def test_identity_names_cluster_database_and_vector_type(database: Database) -> None:
    identity = database.identity
    assert int(identity.cluster_id) > 0
    assert identity.vector_type == "halfvec"
    assert len(identity.database_id) == 32


def test_a_database_migrated_by_a_newer_program_is_refused(database: Database) -> None:
    with database.session() as connection:
        connection.execute("insert into fabric.migrations values (9999, 'future', 'x')")
    with pytest.raises(VersionRefused, match="newer"):
        database.migrate()


def test_no_server_is_transient(tmp_path: object) -> None:
    with pytest.raises(DatabaseUnavailable):
        Database("postgresql://postgres@/fabric?host=/nonexistent-folder").connect()


def test_a_database_that_does_not_exist_is_a_settings_error(database: Database) -> None:
    head, _, tail = database.url.partition("?")
    with pytest.raises(
        SettingsError, match=r"has no database '.*_missing': make it with `fabric db init`"
    ):
        Database(head + "_missing?" + tail).connect()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:secret@no-such-host.invalid/x",
        f"postgresql://u@{'a' * 70}.example/x",
        "postgresql://u@127.0.0.1:99999/x",
        "postgresql://u@127.0.0.1:abc/x",
        "postgresql://u@127.0.0.1/x?sslmode=never",
        "postgresql://u@127.0.0.1:1/x?target_session_attrs=foo",
    ],
)
def test_a_url_that_no_wait_can_heal_is_a_settings_error(url: str) -> None:
    with pytest.raises(SettingsError) as said:
        Database(url).connect()
    assert "secret" not in str(said.value)


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        ("failed to resolve host 'h': [Errno -2] Name or service not known", SettingsError, "leads to no Postgres"),
        ("failed to resolve host 'h': [Errno -3] Temporary failure in name resolution", DatabaseUnavailable, "start that"),
        ('connection failed: FATAL: database "d b" does not exist', SettingsError, "no database 'd b'"),
        ('connection failed: FATAL: role "u" does not exist', SettingsError, "refuses the login"),
        ('FATAL: role "u" is not permitted to log in', SettingsError, "refuses the login"),
        ("fe_sendauth: no password supplied", SettingsError, "refuses the login"),
        ("server does not support SSL, but SSL was required", SettingsError, "leads to no Postgres"),
        ("connection failed: Connection refused", DatabaseUnavailable, "start that server"),
    ],
)  # fmt: skip
def test_what_fails_to_connect_is_told_by_whether_a_wait_may_heal_it(
    words: str, kind: type[Exception], says: str
) -> None:
    fault = translate(psycopg.OperationalError(words), "postgresql://u@h/d")
    assert type(fault) is kind
    assert says in str(fault)


def test_an_unreadable_url_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        Database("postgresql://[::1").connect()


@pytest.mark.parametrize("state", ["57P01", "57P03", "40001", "53100", "08006"])
def test_what_may_pass_is_transient(state: str) -> None:
    assert isinstance(translate(psycopg.errors.lookup(state)("x"), "u"), DatabaseUnavailable)


def test_the_first_journal_registers_and_is_known_from_then_on(database: Database) -> None:
    assert database.register_incarnation("a" * 32, 7) is True
    assert database.register_incarnation("a" * 32, 7, retired=5) is False


def test_a_new_journal_on_a_database_with_results_is_refused(database: Database) -> None:
    database.register_incarnation("a" * 32, 7)
    with database.session() as connection:
        connection.execute(
            "insert into fabric.acks (function, first_task, last_task, rows, inserted, dead, size) "
            "values ('generate', 1, 1, 1, 1, 0, 1)"
        )
    with pytest.raises(IncarnationMismatch, match="admit"):
        database.register_incarnation("b" * 32, 8)
    database.admit_journal("b" * 32, 8)
    assert database.register_incarnation("b" * 32, 8) is False


def test_an_old_journal_on_a_new_database_is_refused(database: Database) -> None:
    with pytest.raises(IncarnationMismatch, match="already retired 3 tasks"):
        database.register_incarnation("a" * 32, 7, retired=3)


def test_a_journal_copied_under_another_incarnation_is_refused(database: Database) -> None:
    database.register_incarnation("a" * 32, 7)
    with pytest.raises(IncarnationMismatch, match="copied or edited"):
        database.register_incarnation("a" * 32, 8)
    with pytest.raises(IncarnationMismatch, match="copied or edited"):
        database.register_incarnation("b" * 32, 7)
