"""`fabric broker ...`: one call a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fabric_pipelines.console import emit, require, settings_of
from fabric_pipelines.screen import plain

if TYPE_CHECKING:
    from fabric_pipelines.settings import Settings

app = typer.Typer(no_args_is_help=True, help="The broker and its journal.")

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def account(settings: Settings) -> dict[str, Any]:
    from fabric_pipelines.broker.client import BrokerClient

    with BrokerClient.of(settings, role="admin") as client:
        found = client.status()
    answer: dict[str, Any] = {**plain(found), "total": found.total.as_json()}
    return answer


@app.command("status")
def broker_status(ctx: typer.Context, as_json: Json = False) -> None:
    """The broker's own account."""
    from fabric_pipelines import answers

    answer = account(settings_of(ctx))
    answer |= answer.pop("total")
    more = {"consumers": answer["consumers"], "counters": answer["counters"]}
    emit(answer, as_json, shown=answers.work_of(answer) | more)


@app.command("verify")
def broker_verify(ctx: typer.Context, as_json: Json = False) -> None:
    """Rebuild the state from the log alone and compare; exit code 3 if anything differs."""
    from fabric_pipelines.broker.client import BrokerClient

    with BrokerClient.of(settings_of(ctx), role="admin", timeout_s=600) as client:
        report = client.verify()
    emit(plain(report), as_json)
    require(report.ok, "the journal and the broker's state differ: keep the journal folder")


@app.command("scrub")
def broker_scrub(ctx: typer.Context, as_json: Json = False) -> None:
    """Read the sealed journal again and compare every frame with its CRCs; exit code 3 names what is damaged."""
    from fabric_pipelines.broker.client import BrokerClient

    with BrokerClient.of(settings_of(ctx), role="admin", timeout_s=600) as client:
        report = client.scrub()
    emit(plain(report), as_json)
    places = [f"{f.segment} LSN {f.lsn} (tasks {f.task_ids})" for f in report.damaged]
    require(report.ok, f"damaged: {'; '.join(places)}; restore these files from a copy")


@app.command("serve")
def broker_serve(
    ctx: typer.Context,
    metrics_port: Annotated[
        int | None, typer.Option(help="Loopback port of its Prometheus counters.")
    ] = None,
) -> None:
    """The broker in the foreground, for a supervisor of your own; SIGTERM ends it cleanly."""
    from fabric_pipelines.broker.__main__ import run

    if metrics_port is not None:
        ctx.obj = {**(ctx.obj or {}), "metrics_port": metrics_port}
    raise typer.Exit(run(settings_of(ctx)))


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
