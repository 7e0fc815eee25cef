"""What is written is what is read: text goes to a database of UTF-8, in UTF-8, whoever wants it otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fabric_pipelines.dataplane import results, schema
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.postgres import EmbeddedPostgres
from fabric_pipelines.dataplane.writer import Writer
from fabric_pipelines.errors import SettingsError
from tests.support_completions import pulled_batch

WORDS = "grüße 日本 €"


@pytest.fixture
def admin(postgres: EmbeddedPostgres) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        yield connection


def _text(database: Database) -> str:
    writer = Writer(database, decode=lambda engine, outputs: pa.array([WORDS] * len(outputs)))
    writer.land(pulled_batch(3, function="generate"))
    writer.close()
    with database.session() as connection:
        [(kept,)] = connection.execute("select distinct text::bytea from fabric.generate")
    return bytes(kept).decode()


@pytest.mark.parametrize("wish", ["url", "options", "database", "role", "shell", "trigger"])
def test_text_lands_as_it_was_written_whatever_encoding_a_client_is_wished_to_have(
    database: Database, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    with database.session() as connection:
        name = sql.Identifier(connection.info.dbname)
    url = database.url
    if wish == "url":
        url = make_conninfo(url, client_encoding="latin1")
    elif wish == "options":
        url = make_conninfo(url, options="-c client_encoding=latin1")
    elif wish == "shell":
        monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    elif wish == "database":
        admin.execute(sql.SQL("alter database {} set client_encoding = latin1").format(name))
    elif wish == "role":
        admin.execute("create role latin superuser login")
        admin.execute("alter role latin set client_encoding = latin1")
        url = make_conninfo(url, user="latin")
    else:
        with database.session() as connection:
            connection.execute(
                "create function public.latin() returns event_trigger language plpgsql as "
                "'begin perform set_config(''client_encoding'', ''LATIN1'', false); end'"
            )
            connection.execute(
                "create event trigger latin on login execute function public.latin()"
            )
    try:
        with Database(url).session() as connection:
            assert connection.execute("show client_encoding").fetchone() == ("UTF8",)
            assert connection.execute("select 'ü日'").fetchone() == ("ü日",)
        assert _text(Database(url)) == WORDS
    finally:
        if wish == "role":
            admin.execute("drop role latin")


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII", "EUC_JP"])
def test_a_database_that_cannot_hold_all_text_is_refused_before_anything_is_written(
    postgres: EmbeddedPostgres, admin: psycopg.Connection[Any], encoding: str
) -> None:
    name = f"t_{encoding.lower()}"
    admin.execute(
        f"create database {name} encoding '{encoding}' template template0 locale 'C'".encode()
    )
    database = Database(postgres.url.replace("/fabric?", f"/{name}?"))
    remedy = f"'{name}' .* in {encoding}, .*encoding 'UTF8' template template0"
    try:
        for work in (schema.prepare, Database.migrate, results.counts, schema.state):
            with pytest.raises(SettingsError, match=remedy):
                work(database)
        with psycopg.connect(database.url, client_encoding="UTF8") as connection:
            found = connection.execute("select to_regnamespace('fabric')").fetchone()
        assert found == (None,)
    finally:
        admin.execute(f"drop database {name} with (force)".encode())


def test_init_on_a_server_whose_template_is_of_another_encoding_makes_one_of_utf8(
    postgres: EmbeddedPostgres, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = {**schema.query.__globals__["_blocks"](), "template_encoding": "select 'LATIN1'"}
    monkeypatch.setattr(schema, "query", lambda name: blocks[name].encode())
    database = Database(postgres.url.replace("/fabric?", f"/{quote('ünï made')}?"))
    try:
        assert schema.prepare(database).created_database
        found = admin.execute(
            "select pg_encoding_to_char(encoding), datcollate from pg_database where datname = 'ünï made'"
        ).fetchone()
    finally:
        admin.execute('drop database "ünï made" with (force)')
    assert found == ("UTF8", "C")


def test_the_databases_that_others_are_made_from_are_refused_by_name(
    postgres: EmbeddedPostgres,
) -> None:
    for name, why in (("template1", "is a template"), ("template0", "takes no connections")):
        database = Database(postgres.url.replace("/fabric?", f"/{name}?"))
        with pytest.raises(SettingsError, match=f"{name}.*{why}|{why}.*{name}"):
            schema.prepare(database)
    with psycopg.connect(postgres.url.replace("/fabric?", "/template1?")) as connection:
        found = connection.execute("select to_regnamespace('fabric')").fetchone()
    assert found == (None,)
