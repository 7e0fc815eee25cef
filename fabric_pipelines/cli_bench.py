"""`fabric bench ...`: one call a command, its figures as JSON or as the tables that stand in the docs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fabric_pipelines.console import emit, finite
from fabric_pipelines.errors import CheckFailed
from fabric_pipelines.interrupts import CTRL_C

app = typer.Typer(no_args_is_help=True, help="Figures of this machine, beside those of peers.")

EVERY_BYTE = 1 << 40
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command("supply")
def bench_supply(
    scale: Annotated[
        bool,
        typer.Option(
            "--scale", help="What backlogs of up to ten million tasks cost instead; some minutes."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Padding, prefix reuse, lane switches, idle consumers, unlike profiles and tenants by the broker's own decisions;
    about 30 s."""
    from fabric_pipelines.bench import supply_quality, supply_scale, supply_shares

    if scale:
        sized = supply_scale.measure(say=lambda line: typer.echo(line, err=True))
        _print(sized, supply_scale.table(sized), as_json)
    else:
        found = supply_quality.measure() | supply_shares.measure()
        _print(found, f"{supply_quality.table(found)}\n\n{supply_shares.table(found)}", as_json)


@app.command("broker")
def bench_broker(
    ctx: typer.Context,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks a round.")] = 10_000,
    batch: Annotated[int, typer.Option(min=1, help="Tasks of one enqueue.")] = 1000,
    lease: Annotated[
        int, typer.Option(min=1, help="Tasks of one lease, report and retirement.")
    ] = 256,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of one task, 4 bytes each.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 5,
    system: Annotated[
        list[str] | None, typer.Option(help="Only these systems; may be given more than once.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The broker beside Redis, Postgres, RabbitMQ, NATS and SQLite: same work, same durability."""
    from fabric_pipelines import settings
    from fabric_pipelines.bench.broker import Options, measure, table

    CTRL_C.begin()
    options = Options(tasks, batch, lease, tokens, rounds, tuple(system or ()))
    report = measure(settings.load(ctx.obj), options, lambda line: typer.echo(line, err=True))
    _print(report, table(report), as_json)


@app.command("crash")
def bench_crash(
    seed: Annotated[int, typer.Option(help="Of the random choices of sectors.")] = 7,
    subsets: Annotated[
        int, typer.Option(min=0, help="Random choices of sectors after each operation.")
    ] = 24,
    torn: Annotated[int, typer.Option(min=0, help="Writes that are cut at many places.")] = 30,
    every_byte: Annotated[
        bool, typer.Option("--every-byte", help="Cut them at every byte; some minutes.")
    ] = False,
    faults: Annotated[
        bool,
        typer.Option(
            "--faults", help="Let every single call fail, with EIO and with ENOSPC; some minutes."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """What a crash after any operation, or damage to anything it keeps, does to the broker's log; about 45 s."""
    from fabric_pipelines.bench.crash import Options, measure, table

    CTRL_C.begin()
    each = EVERY_BYTE if every_byte else Options().torn_each
    options = Options(seed, subsets, torn, each, faults)
    found = measure(options, lambda line: typer.echo(line, err=True))
    _print(found, table(found), as_json)
    if found["broken"]:
        raise CheckFailed(f"a promise is broken: {found['broken'][0]}")


@app.command("landing")
def bench_landing(
    ctx: typer.Context,
    rows: Annotated[int, typer.Option(min=5_000, help="Rows a round.")] = 40_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 3,
    seconds: Annotated[
        float,
        typer.Option(
            min=1,
            max=3600,
            callback=finite,
            help="Of each kind of bulk, in a run of the governor's part.",
        ),
    ] = 16.0,
    runs: Annotated[int, typer.Option(min=1, help="Runs of the governor's part.")] = 5,
    part: Annotated[
        list[str] | None,
        typer.Option(help="ways, floor, prices or governor; may be given more than once."),
    ] = None,
    as_json: Json = False,
) -> None:
    """What a row costs to land beside other ways into Postgres, what indexes add, what the governor spares."""
    from fabric_pipelines import settings
    from fabric_pipelines.bench.landing.measure import PARTS, Options, measure, table

    CTRL_C.begin()
    options = Options(rows, rounds, runs, seconds, tuple(part or PARTS))
    report = measure(settings.load(ctx.obj), options, lambda line: typer.echo(line, err=True))
    _print(report, table(report), as_json)


@app.command("health")
def bench_health(
    rows: Annotated[int, typer.Option(min=1000, help="Rows of the store.")] = 200_000,
    dim: Annotated[int, typer.Option(min=1, max=16_384, help="Dimension of a row.")] = 384,
    clusters: Annotated[int, typer.Option(min=2, help="Clusters of log-normal size.")] = 1000,
    peer: Annotated[bool, typer.Option(help="Silhouette beside scikit-learn's, a minute.")] = True,
    backend: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Where the passes of the store run.")
    ] = "cpu",
    workspace_gib: Annotated[
        int,
        typer.Option(min=1, help="What a pass may hold beyond the rows; more, and it is left out."),
    ] = 9,
    as_json: Json = False,
) -> None:
    """All health metrics of a store with time and memory a pass, and silhouette beside scikit-learn."""
    from fabric_pipelines.bench.health import Where, measure, table

    CTRL_C.begin()
    where = Where(backend, workspace_gib << 30)
    report = measure(
        rows, dim, clusters, peer=peer, say=lambda line: typer.echo(line, err=True), where=where
    )
    _print(report, table(report), as_json)


@app.command("decisions")
def bench_decisions(
    ctx: typer.Context,
    rows: Annotated[int, typer.Option(min=500, help="Rows of the drawn store.")] = 1600,
    dim: Annotated[int, typer.Option(min=8, max=4096, help="Dimension of a drawn row.")] = 128,
    clusters: Annotated[int, typer.Option(min=3, help="Clusters drawn, or lists cut.")] = 12,
    seeds: Annotated[int, typer.Option(min=1, help="Stores and faults of each kind.")] = 10,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of the seeds.")] = 100,
    vectors: Annotated[
        Path | None,
        typer.Option(help="Parquet file with a column `vector`: cut lists from it, draw nothing."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Planted faults and what the rule table says of each: clusters by verdict, false alarms beside them."""
    from fabric_pipelines import settings
    from fabric_pipelines.analytics import rules
    from fabric_pipelines.bench.decisions import Planting, measure_all, table_of

    CTRL_C.begin()
    given = settings.load(ctx.obj).health_rules
    table = rules.load(Path(given) if given else None)
    planting = Planting(rows, dim, clusters, range(first_seed, first_seed + seeds), vectors)
    report = measure_all(planting, table, say=lambda line: typer.echo(line, err=True))
    _print(report, table_of(report), as_json)


def _print(found: Mapping[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        emit(found, as_json)
    else:
        sys.stdout.write(text + "\n")
