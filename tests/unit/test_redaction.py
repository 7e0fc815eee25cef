"""No secret of a URL or a connection string is shown, however it is written, and everything else is."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fabric_pipelines import settings
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.errors import FabricError
from fabric_pipelines.redaction import SECRET, redact

SHOWN = [
    ("postgresql://me:secret@db/x", "postgresql://me:***@db/x"),
    ("postgresql://me@db/x", "postgresql://me@db/x"),
    ("postgresql://me:p@ss@db/x", "postgresql://me:***@db/x"),
    ("postgresql://me:p/a?s=s@db/x", "postgresql://me:***@db/x"),
    ("postgresql://me:secret/x", "postgresql://me:***/x"),
    ("postgresql://db:5432,[::1]:5433/x", "postgresql://db:5432,[::1]:5433/x"),
    ("postgresql://db/x?password=a@b&port=1", "postgresql://db/x?password=***&port=1"),
    ("postgresql://db/x?pass%77ord=a", "postgresql://db/x?pass%77ord=***"),
    (
        "postgresql://me:a@db/x?sslpassword=b&sslkey=/k&password=c",
        "postgresql://me:***@db/x?sslpassword=***&sslkey=/k&password=***",
    ),
    ("postgresql://db/x?password=a&b", "postgresql://db/x?password=***"),
    ("s3://bucket/password", "s3://bucket/password"),
    ("grpc+tls://broker.lan:8471", "grpc+tls://broker.lan:8471"),
    ("/plain/folder", "/plain/folder"),
    ("/plain/pass word=1/x", "/plain/pass word=1/x"),
    ("", ""),
    ("host=db password=secret dbname=x", "host=db password=*** dbname=x"),
    ("password='a b' host=db", "password=*** host=db"),
    ("password = 'a\\' b' host=db", "password = *** host=db"),
    ("password=a\\ b host=db", "password=*** host=db"),
    ("password= a host=db", "password= *** host=db"),
    ("host=db sslpassword=a sslkey=/k", "host=db sslpassword=*** sslkey=/k"),
    ("passfile=/p oauth_client_secret=a", "passfile=/p oauth_client_secret=***"),
    ("scram_client_key=a host='b c'", "scram_client_key=*** host='b c'"),
    ("user=a password='se''cret pw' host=db", "user=a password=***"),
    ("host=db password='open end", "host=db password=***"),
    ("host=db password=se'cret pw", "host=db password=***"),
    ("host=db password=a\\", "host=db password=***"),
]


@pytest.mark.parametrize(("text", "shown"), SHOWN)
def test_everything_but_the_secrets_is_shown(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize("value", ["a", "a b", "it's", "b\\s", "a=b c", "'", "\\'", " x ", "é\n"])
def test_what_libpq_writes_and_reads_is_hidden_as_libpq_reads_it(value: str) -> None:
    text = make_conninfo(host="db", sslpassword=value, password=value, user="me")
    told = conninfo_to_dict(redact(text))
    assert told == {"host": "db", "user": "me", "password": "***", "sslpassword": "***"}


def test_every_parameter_of_libpq_that_is_a_secret_is_known_as_one() -> None:
    from psycopg.pq import Conninfo

    secret = {item.keyword.decode() for item in Conninfo.get_defaults() if b"*" in item.dispchar}
    known = {name for name in secret if SECRET.search(name)}
    assert known == secret >= {"password", "sslpassword"}


@pytest.mark.parametrize(
    "url",
    [
        "host=/nowhere password='se''kret pw'",
        "host=/nowhere password=se'kret kret2",
        "postgresql://me:kret/x",
        "postgresql://me:a/kret:b@db/x",
        "postgresql:///x?host=/nowhere&password=se&kret",
        "postgresql:///x?host=/nowhere&sslpassword=kret&port=y",
    ],
)
def test_no_error_about_a_url_quotes_a_secret_of_it(url: str, tmp_path: Path) -> None:
    with pytest.raises(FabricError) as refused:
        Database(url).connect()
    assert "kret" not in str(refused.value)
    described = settings.load({"home": tmp_path, "pg_url": url}, {}, tmp_path).described()
    assert not [row for row in described if "kret" in row["value"]]
