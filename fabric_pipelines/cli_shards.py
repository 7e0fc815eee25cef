"""`fabric shard ...`: one call a command. A shard opened on the CPU or on a card, searched, who holds it, what is kept."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fabric_pipelines.console import GENERATION_MAX, emit, settings_of
from fabric_pipelines.screen import plain

app = typer.Typer(
    no_args_is_help=True, help="Vector shards: open on a card, search, who holds them, prune."
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


@app.command("prune")
def shard_prune(
    ctx: typer.Context,
    shard: Annotated[
        str | None, typer.Argument(metavar="[SHARD]", help="Name of a shard; default: all.")
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Newest generations to keep; default: shard_generations_kept."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")
    ] = False,
    copy: Annotated[
        str | None,
        typer.Option(help="s3://bucket/prefix: prune the copy there, not the folder here."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove the bytes of old generations that nobody has open, no card holds and no pin keeps; rows and receipts stay."""
    from fabric_pipelines import shards
    from fabric_pipelines.dataplane import vectors
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.dataplane.objects import Objects
    from fabric_pipelines.shards import remote

    settings = settings_of(ctx)
    database = Database.of(settings)
    names = [shard] if shard else vectors.shard_names(database)
    many, root = keep or settings.shard_generations_kept, settings.shards_dir
    done: list[Any]
    if copy:
        there = Objects(copy)
        done = [
            remote.prune(database, root, name, there, keep=many, dry_run=dry_run) for name in names
        ]
    else:
        done = [shards.prune(database, root, name, keep=many, dry_run=dry_run) for name in names]
    rows = [plain(item) for item in done]
    shown = {"copies": rows} if copy else {"generations": _fates(rows, dry_run)}
    size = sum(row["bytes" if copy else "bytes_freed"] for row in rows)
    total = {"would free bytes" if dry_run else "freed bytes": size}
    emit({"shards": rows, "dry_run": dry_run}, as_json, shown=shown | total)


def _fates(rows: list[dict[str, Any]], dry_run: bool) -> list[dict[str, Any]]:
    """A line a generation."""
    gone = "would go" if dry_run else "gone"
    found = [
        {"shard": row["shard"], "generation": each["generation"], "what": what, "why": why}
        for row in rows
        for each, what, why in (
            *((kept, "stays", "; ".join(kept["why"])) for kept in row["kept"]),
            *((pruned, gone, f"{pruned['bytes']:,} bytes") for pruned in row["pruned"]),
        )
    ]
    return sorted(found, key=lambda line: (line["shard"], line["generation"]))


@app.command("pin")
def shard_pin(
    ctx: typer.Context,
    shard: Name,
    generation: Annotated[int, typer.Option(min=1, max=GENERATION_MAX, help="Its number.")],
    reason: Annotated[str, typer.Option(help="Why it is kept; shown by prune.")] = "by hand",
    as_json: Json = False,
) -> None:
    """Keep a generation, and what a rebuild of it needs, whatever the policy says."""
    from fabric_pipelines import shards
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.dataplane.staleness import require_text

    require_text(reason, "--reason")
    lacking = shards.pin(Database.of(settings_of(ctx)), shard, generation, reason)
    answer = {"shard": shard, "generation": generation, "pinned": True, "reason": reason}
    emit(answer | {"lacking": list(lacking)}, as_json)


@app.command("unpin")
def shard_unpin(
    ctx: typer.Context,
    shard: Name,
    generation: Annotated[int, typer.Option(min=1, max=GENERATION_MAX, help="Its number.")],
    as_json: Json = False,
) -> None:
    """Leave a generation to the policy again."""
    from fabric_pipelines import shards
    from fabric_pipelines.dataplane.database import Database

    shards.unpin(Database.of(settings_of(ctx)), shard, generation)
    emit({"shard": shard, "generation": generation, "pinned": False}, as_json)


@app.command("devices")
def shard_devices(ctx: typer.Context, as_json: Json = False) -> None:
    """Which card holds which shard now, and what it has loaded."""
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.dataplane.vectors import devices

    rows = [plain(row) for row in devices(Database.of(settings_of(ctx)))]
    emit({"devices": rows}, as_json)
