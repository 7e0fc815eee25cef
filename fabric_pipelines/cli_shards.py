"""`fabric shard ...`: one call a command. A shard opened on the CPU or on a card, searched, and who holds it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fabric_pipelines.console import emit, settings_of
from fabric_pipelines.screen import plain

app = typer.Typer(
    no_args_is_help=True, help="Vector shards: open on a card, search, who holds them."
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Name = Annotated[str, typer.Argument(metavar="SHARD", help="Name of a shard.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Half = Annotated[
    bool, typer.Option("--half", help="Hold rows as float16 on the card, if that loses nothing.")
]


@app.command("load")
def shard_load(
    ctx: typer.Context,
    shard: Name,
    device: Device = "cpu",
    half: Half = False,
    as_json: Json = False,
) -> None:
    """Open the current generation, check every byte and its canaries, say what it took, and let it go."""
    from fabric_pipelines import shards
    from fabric_pipelines.dataplane.database import Database

    settings = settings_of(ctx)
    found = shards.trial(
        Database.of(settings),
        settings.shards_dir,
        shard,
        device=device,
        dtype="<f2" if half else "<f4",
    )
    emit(plain(found), as_json)


@app.command("search")
def shard_search(
    ctx: typer.Context,
    shard: Name,
    like: Annotated[list[int], typer.Option(help="Id of a row of the shard; may be repeated.")],
    k: Annotated[
        int, typer.Option("--k", "-k", help="How many neighbours, the row itself among them.")
    ] = 10,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """The exact nearest rows of rows of the shard, nearest first."""
    from fabric_pipelines import shards
    from fabric_pipelines.dataplane.database import Database

    settings = settings_of(ctx)
    with shards.open_shard(
        Database.of(settings), settings.shards_dir, shard, device=device
    ) as opened:
        answer = shards.neighbours(opened, like, k)
        generation = opened.generation.number
    rows: list[dict[str, Any]] = [
        {"like": name, "id": near.id, "distance": near.distance}
        for name, found in answer.items()
        for near in found
    ]
    emit({"shard": shard, "generation": generation, "rows": rows}, as_json)


@app.command("devices")
def shard_devices(ctx: typer.Context, as_json: Json = False) -> None:
    """Which card holds which shard now, and what it has loaded."""
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.dataplane.vectors import devices

    rows = [plain(row) for row in devices(Database.of(settings_of(ctx)))]
    emit({"devices": rows}, as_json)
