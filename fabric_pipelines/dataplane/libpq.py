"""Connections by libpq, held to what was said: text is UTF-8, and the embedded server hears nothing of the shell.

libpq reads PG* variables of the process that it lives in. For a server of the user's own they are how he reaches it.
The embedded server's URL says all there is to say, and one of them (a port, a service, a time zone that no server
knows) would lead past it. A process may speak to other servers too, whose variables are not ours to remove; so each
variable that a parameter can overrule is overruled for this one connection, and only the four that none can are
taken out of the environment, for the moment that the connection is made.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo

Connection = psycopg.Connection[tuple[Any, ...]]

ENCODING = "UTF8"
WITHOUT_PARAMETER = ("PGSERVICE", "PGTZ", "PGDATESTYLE", "PGGEQO")
"""Read by libpq although a connection says otherwise: an empty `service` is looked up as one, and the other three
are sent behind whatever `options` say."""


def connect(url: str, *, embedded: bool, **parameters: Any) -> Connection:
    """psycopg.connect whose text is UTF-8 in both directions: as a startup parameter it overrules database, role, URL,
    PGOPTIONS and PGCLIENTENCODING. `embedded`: `url` is of the embedded server. Raises what psycopg raises."""
    told: dict[str, Any] = {**parameters, "client_encoding": ENCODING}
    if not embedded:
        return _in_utf8(psycopg.connect(url, **told))
    with _taken_out():
        return _in_utf8(psycopg.connect(url, **(_overruling(url) | told)))


def _in_utf8(connection: Connection) -> Connection:
    """A login trigger of the database has the last word, and a proxy may know the parameter no better."""
    if connection.info.parameter_status("client_encoding") != ENCODING:
        connection.execute(f"set client_encoding to '{ENCODING}'".encode())
        if not connection.autocommit:
            connection.commit()
    return connection


def _overruling(url: str) -> dict[str, str]:
    """A word of our own for each variable of the shell that has a parameter which `url` does not give."""
    given = conninfo_to_dict(url)
    found = {}
    for item in Conninfo.get_defaults():
        name, variable = item.keyword.decode(), (item.envvar or b"").decode()
        if variable in os.environ and variable not in WITHOUT_PARAMETER and name not in given:
            found[name] = (item.compiled or b"").decode()
    return found


_changing = threading.Lock()
_inside = 0
_aside: dict[str, str] = {}


@contextmanager
def _taken_out() -> Iterator[None]:
    """The environment without WITHOUT_PARAMETER; the last of several threads puts them back."""
    global _inside
    with _changing:
        if not _inside:
            _aside.update((name, os.environ.pop(name)) for name in _set_now())
        _inside += 1
    try:
        yield
    finally:
        with _changing:
            _inside -= 1
            if not _inside:
                os.environ.update(_aside)
                _aside.clear()


def _set_now() -> list[str]:
    return [name for name in WITHOUT_PARAMETER if name in os.environ]


def forget_shell() -> None:
    """For a process that speaks to servers of its own only, as a benchmark does."""
    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]


def without_pg(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for a program that is told by its arguments where to connect."""
    return {name: value for name, value in environ.items() if not name.startswith("PG")}
