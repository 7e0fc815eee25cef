"""`fabric db ...`: one call a command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fabric_pipelines import named_file
from fabric_pipelines.console import WAIT_S_MAX, emit, require, settings_of
from fabric_pipelines.screen import plain

app = typer.Typer(no_args_is_help=True, help="The database that results land in.")

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command("url")
def db_url(ctx: typer.Context, as_json: Json = False) -> None:
    """The URL for psql and other clients."""
    from fabric_pipelines.dataplane.database import database_url

    url = database_url(settings_of(ctx))
    if as_json:
        emit({"url": url}, as_json)
    else:
        sys.stdout.write(url + "\n")


@app.command("init")
def db_init(ctx: typer.Context, as_json: Json = False) -> None:
    """Make database and schema where they are missing; run again, it changes nothing."""
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.dataplane.schema import prepare
    from fabric_pipelines.settings import redact

    database = Database.of(settings_of(ctx))
    done = prepare(database)
    emit({"url": redact(database.url), **plain(done)}, as_json)


@app.command("migrate")
def db_migrate(ctx: typer.Context, as_json: Json = False) -> None:
    """Bring the schema up to this program's version."""
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.dataplane.postgres import at_hand

    settings = settings_of(ctx)
    with at_hand(settings, _say):
        applied = Database.of(settings).migrate()
    emit({"applied": applied}, as_json)


@app.command("status")
def db_status(ctx: typer.Context, as_json: Json = False) -> None:
    """Server version, cluster, vector type, migrations, and how large the tables are."""
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.dataplane.schema import state
    from fabric_pipelines.settings import redact

    database = Database.of(settings_of(ctx))
    found = plain(state(database))
    answer: dict[str, Any] = {"url": redact(database.url), **plain(database.identity), **found}
    major, minor = divmod(answer["server_version"], 10_000)
    tables = [
        {**row, "rows": "unknown" if row["rows"] is None else row["rows"]}
        for row in answer["tables"]
    ]
    emit(answer, as_json, shown={**answer, "server_version": f"{major}.{minor}", "tables": tables})


@app.command("check")
def db_check(
    ctx: typer.Context,
    without_broker: Annotated[
        bool,
        typer.Option(
            "--without-broker",
            help="By the database's own list only: a dump restored too old is not seen.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Look for every task that ever landed, by the database's list and by the broker's; exit code 3 names those that are
    gone."""
    from fabric_pipelines.broker.client import BrokerClient
    from fabric_pipelines.dataplane import account
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.dataplane.postgres import at_hand

    settings = settings_of(ctx)
    settled = None
    if not without_broker:
        with BrokerClient.of(settings, role="admin") as client:
            settled = client.settled()
    with at_hand(settings, _say):
        found = account.check(Database.of(settings), settled)
    emit({"ok": found.ok, **plain(found)}, as_json)
    lost = [f"{_tasks(item.tasks)} of {item.function}" for item in found.lost]
    lost += [
        f"{_tasks(item.tasks)} of submission {item.submission_id[:12]} ({item.function}, from id {item.task_ids[0]})"
        for item in found.unrestored
    ]
    require(
        found.ok,
        f"{', '.join(lost)} landed and are gone: restore them from a dump, or submit them again with a salt",
    )


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _tasks(count: int) -> str:
    return f"{count:,} task{'s' if count != 1 else ''}"


@app.command("accept-loss")
def db_accept_loss(
    ctx: typer.Context,
    tasks: Annotated[int, typer.Argument(min=1, help="How many, as the refusal said.")],
    as_json: Json = False,
) -> None:
    """Go on without the tasks that the broker retired and a database restored from an older dump has not."""
    from fabric_pipelines.broker.client import BrokerClient
    from fabric_pipelines.dataplane import proof
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.dataplane.postgres import at_hand

    settings = settings_of(ctx)
    with BrokerClient.of(settings, role="admin") as client:
        settled = client.settled()
    with at_hand(settings, _say):
        database = Database.of(settings)
        database.migrate()
        given_up = proof.accept_loss(database, settled, tasks)
    emit({"given_up": given_up}, as_json)


@app.command("dump")
def db_dump(
    ctx: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="For pg_restore.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Take the place of a file that is there.")
    ] = False,
    lock_wait: Annotated[
        int,
        typer.Option(min=1, max=WAIT_S_MAX, help="Seconds to wait for a table that others lock."),
    ] = 60,
    as_json: Json = False,
) -> None:
    """Schema and rows of the fabric as one file, by the server's own pg_dump."""
    from fabric_pipelines.dataplane import dump
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.dataplane.postgres import at_hand

    settings = settings_of(ctx)
    named_file.require_free(out, replace=replace)  # before a server is started for it
    with at_hand(settings, _say):
        done = dump.write(
            Database.of(settings), out, replace=replace, lock_wait_s=lock_wait, say=_say
        )
    emit({"path": done.path, "bytes": done.size, "pg_dump": done.program}, as_json)
