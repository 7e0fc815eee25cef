"""`fabric broker ...`: one call a command."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fabric_pipelines.console import emit, require, settings_of
from fabric_pipelines.errors import UsageError
from fabric_pipelines.screen import plain

if TYPE_CHECKING:
    from fabric_pipelines.broker.replies import DamagedFrame
    from fabric_pipelines.settings import Settings

app = typer.Typer(no_args_is_help=True, help="The broker and its journal.")
dead_app = typer.Typer(no_args_is_help=True, help="Tasks that died: why, and try them again.")
app.add_typer(dead_app, name="dead")
PARTIAL = 5

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def account(settings: Settings) -> dict[str, Any]:
    from fabric_pipelines.broker.client import BrokerClient

    with BrokerClient.of(settings, role="admin") as client:
        found = client.status()
    answer: dict[str, Any] = {**plain(found), "total": found.total.as_json()}
    return answer


@app.command("status")
def broker_status(
    ctx: typer.Context,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show progress in tokens until nothing is open.")
    ] = False,
    as_json: Json = False,
) -> None:
    """The broker's own account, and how far it is in tokens."""
    from fabric_pipelines import answers

    settings = settings_of(ctx)
    if watch:
        from fabric_pipelines.broker import draining
        from fabric_pipelines.broker.client import BrokerClient
        from fabric_pipelines.telemetry import ProgressBoard

        with BrokerClient.of(settings, role="admin") as client, ProgressBoard(sys.stderr) as board:
            draining.watch(client, board)
    answer = account(settings)
    answer |= answer.pop("total")
    more = {"consumers": answer["consumers"], "counters": answer["counters"]}
    emit(answer, as_json, shown=answers.work_of(answer) | more)


@app.command("drain")
def broker_drain(
    ctx: typer.Context,
    undo: Annotated[bool, typer.Option("--undo", help="Lease and take tasks again.")] = False,
    wait: Annotated[bool, typer.Option(help="Until what runs is finished and landed.")] = True,
    as_json: Json = False,
) -> None:
    """Lease nothing more and take no new tasks; what runs is finished and landed, what is ready stays."""
    from fabric_pipelines.broker import draining
    from fabric_pipelines.broker.client import BrokerClient
    from fabric_pipelines.telemetry import ProgressBoard

    settings = settings_of(ctx)
    with BrokerClient.of(settings, role="admin") as client, ProgressBoard(sys.stderr) as board:
        report = draining.drain(client, undo=undo, wait=time.sleep if wait else None, board=board)
    emit(plain(report), as_json)


@app.command("abandon")
def broker_abandon(
    ctx: typer.Context,
    submission_id: Annotated[str, typer.Argument(help="Its id, or the first 12 digits of it.")],
    as_json: Json = False,
) -> None:
    """End a submission that will never be whole: what came of it runs, nothing more is taken, its id is used up. Tasks
    that cannot be read any more become dead letters, also those of a submission that is closed."""
    from fabric_pipelines.broker.client import BrokerClient

    with BrokerClient.of(settings_of(ctx), role="admin") as client:
        found = client.abandon(submission_id)
    emit(plain(found), as_json)


@dead_app.command("list")
def dead_list(
    ctx: typer.Context,
    reason: Annotated[str | None, typer.Option(help="Only this error code.")] = None,
    function: Annotated[str | None, typer.Option(help="Only this function's.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Letters to show; all are counted.")] = 100,
    as_json: Json = False,
) -> None:
    """Dead letters with their reasons, and whether each is still dead."""
    from fabric_pipelines.broker.client import BrokerClient
    from fabric_pipelines.completion import dead_letters
    from fabric_pipelines.dataplane.database import Database

    settings = settings_of(ctx)
    with BrokerClient.of(settings, role="admin") as client:
        found = dead_letters.listed(
            Database.of(settings), client, reason=reason, function=function, limit=limit
        )
    emit(plain(found), as_json)


@dead_app.command("requeue")
def dead_requeue(
    ctx: typer.Context,
    reason: Annotated[str | None, typer.Option(help="All that died of this error code.")] = None,
    function: Annotated[str | None, typer.Option(help="With --reason: of this function.")] = None,
    task_id: Annotated[
        list[int] | None, typer.Option("--id", help="This task; may be given more than once.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Try dead tasks again, with all their attempts; exit code 5 if the prompts of some are gone."""
    import numpy as np

    from fabric_pipelines.broker.client import BrokerClient
    from fabric_pipelines.completion import dead_letters
    from fabric_pipelines.dataplane.database import Database

    if (reason is None) == (not task_id) or (function is not None and reason is None):
        raise UsageError(
            "say which: --reason CODE (as `fabric broker dead list` shows them), or --id TASK"
        )
    settings = settings_of(ctx)
    with BrokerClient.of(settings, role="admin") as client:
        if reason is None:
            ids = np.array(task_id, np.int64)
            reply = dead_letters.requeue_ids(client, [ids], why="named by id")
        else:
            database = Database.of(settings)
            reply = dead_letters.requeue(database, client, reason=reason, function=function)
    emit(plain(reply), as_json)
    if reply.gone or reply.unknown:
        raise typer.Exit(PARTIAL)


@dead_app.command("accept")
def dead_accept(
    ctx: typer.Context,
    function: Annotated[str, typer.Argument(help="As `fabric status` names it.")],
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="What was accepted counts no more.")
    ] = False,
    as_json: Json = False,
) -> None:
    """A function whose table refuses every row alike waits no more: what is refused in those words becomes a dead letter."""
    from fabric_pipelines.completion import dead_letters
    from fabric_pipelines.dataplane import refusals
    from fabric_pipelines.dataplane.database import Database

    database = Database.of(settings_of(ctx))
    if withdraw:
        emit({"function": function, "withdrawn": refusals.withdraw(database, function)}, as_json)
    else:
        emit(dead_letters.as_json(refusals.accept(database, function)), as_json)


@app.command("verify")
def broker_verify(ctx: typer.Context, as_json: Json = False) -> None:
    """Read all of the log, also what lies in the cold tier, rebuild the state from it alone and compare; exit code 3 if
    anything differs."""
    from fabric_pipelines.broker.client import BrokerClient

    with BrokerClient.of(settings_of(ctx), role="admin", timeout_s=600) as client:
        report = client.verify()
    emit({**plain(report), "damaged": _shown(report.damaged)}, as_json)
    require(
        report.ok,
        f"{_first_of(report.differences)}: keep the journal folder and do what they say",
    )


@app.command("scrub")
def broker_scrub(ctx: typer.Context, as_json: Json = False) -> None:
    """Read the sealed journal again, also what lies in the cold tier, and compare every frame with its CRCs; exit code 3
    names what is damaged."""
    from fabric_pipelines.broker.client import BrokerClient

    with BrokerClient.of(settings_of(ctx), role="admin", timeout_s=600) as client:
        report = client.scrub()
    emit({**plain(report), "damaged": _shown(report.damaged)}, as_json)
    require(report.ok, _first_of([frame.sentence for frame in report.damaged]))


def _shown(damaged: list[DamagedFrame]) -> list[dict[str, Any]]:
    return [{**plain(frame), "sentence": frame.sentence} for frame in damaged]


def _first_of(sentences: list[str]) -> str:
    """One sentence for all of them; the answer has each."""
    count = len(sentences)
    return f"{count} differences, the first: {sentences[0]}" if count > 1 else "".join(sentences)


@app.command("serve")
def broker_serve(
    ctx: typer.Context,
    metrics_port: Annotated[
        int | None, typer.Option(help="Loopback port of its Prometheus counters.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The broker in the foreground, for a supervisor of your own; SIGTERM ends it cleanly. One line on stdout once it
    answers, with --json an object."""
    from fabric_pipelines.broker.__main__ import run

    if metrics_port is not None:
        ctx.obj = {**(ctx.obj or {}), "metrics_port": metrics_port}
    raise typer.Exit(run(settings_of(ctx), as_json=as_json))


@app.command("certificates")
def broker_certificates(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder; what is there is kept.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address of the broker; may be given again.")
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(help="TENANT/ROLE[+ROLE], or ROLE for every tenant; may be given again."),
    ] = None,
    days: Annotated[int, typer.Option(help="How long they hold.")] = 365,
    as_json: Json = False,
) -> None:
    """A private CA, the broker's certificate and one a client role, for mutual TLS between machines."""
    from fabric_pipelines.broker.certificates import EVERYWHERE, make

    clients = client or [*EVERYWHERE, f"{settings_of(ctx).tenant}/producer"]
    issued = make(out, hosts=host or [], clients=clients, days=days)
    answer = {"folder": out.resolve(), "certificates": issued}
    rows = [
        {
            "certificate": item.certificate.name,
            "for": ", ".join(item.names) or "signing",
            "made": item.made,
        }
        for item in issued
    ]
    emit(answer, as_json, shown={"folder": out.resolve(), "certificates": rows})
