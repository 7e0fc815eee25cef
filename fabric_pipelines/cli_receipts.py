"""`fabric receipt ...`: one call a command. What a generation was made from, whether that still holds, what moved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from fabric_pipelines.console import (
    GENERATION_MAX,
    WAIT_S_MAX,
    emit,
    finite,
    require,
    settings_of,
)
from fabric_pipelines.errors import UsageError
from fabric_pipelines.screen import plain

app = typer.Typer(no_args_is_help=True, help="Receipts of index generations, and what moved since.")

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
PREFIX = 16
Verdict = Literal["identical", "logical", "equivalent"]


@app.command("show")
def receipt_show(
    ctx: typer.Context,
    receipt_id: Annotated[str, typer.Argument(metavar="ID", help="Full id or unique prefix.")],
    as_json: Json = False,
) -> None:
    """The receipt's in-toto statement."""
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.dataplane.vectors import find_receipt

    found = find_receipt(Database.of(settings_of(ctx)), receipt_id)
    if found is None:
        raise UsageError(f"there is no receipt {receipt_id}")
    answer = plain(found)
    facts = {name: item for name, item in answer.items() if name != "statement"}
    emit(answer, as_json, shown=facts | answer["statement"]["predicate"])


@app.command("verify")
def receipt_verify(
    ctx: typer.Context,
    receipt_id: Annotated[str, typer.Argument(metavar="ID", help="Full id or unique prefix.")],
    as_json: Json = False,
) -> None:
    """Compare files and database with the receipt; exit code 3 if anything differs."""
    from fabric_pipelines import receipts
    from fabric_pipelines.dataplane.database import Database

    settings = settings_of(ctx)
    verdict = receipts.verify(Database.of(settings), settings.shards_dir, receipt_id)
    emit(plain(verdict), as_json)
    require(verdict.ok, f"receipt {receipt_id} does not hold any more: see the differences")


@app.command("issue")
def receipt_issue(
    ctx: typer.Context,
    shard: Annotated[str, typer.Argument(help="Name of a shard.")],
    generation: Annotated[
        int | None,
        typer.Option(min=1, max=GENERATION_MAX, help="Its number; default: the current one."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Issue the receipt of a published generation that lacks one, or its copy; every file is hashed first."""
    from fabric_pipelines import receipts
    from fabric_pipelines.dataplane.database import Database

    settings = settings_of(ctx)
    receipt = receipts.issue_late(
        Database.of(settings), settings.shards_dir, shard, number=generation
    )
    answer = {"shard": shard, "generation": receipt.outputs["generation"]}
    emit(answer | {"receipt_id": receipt.receipt_id, "parents": list(receipt.parents)}, as_json)


@app.command("list")
def receipt_list(
    ctx: typer.Context,
    shard: Annotated[str | None, typer.Option(help="Only receipts of this shard.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 100,
    as_json: Json = False,
) -> None:
    """Receipts, newest first, and whether the bytes of their generations are kept, pinned or pruned."""
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.dataplane.vectors import list_receipts

    found, total = list_receipts(Database.of(settings_of(ctx)), shard=shard, limit=limit)
    rows: list[dict[str, Any]] = [
        {
            "receipt_id": row.receipt_id,
            "shard": row.shard,
            "generation": row.generation,
            "bytes": row.kept,
            "issued_at": row.issued_at.isoformat(),
        }
        for row in found
    ]
    # a prefix is what the other commands take, and it can be copied
    shown: dict[str, Any] = {
        "receipts": [{**row, "receipt_id": row["receipt_id"][:PREFIX]} for row in rows]
    }
    if total > len(rows):
        shown["older"] = f"{total - len(rows):,} more; --limit {total} shows them"
    emit({"receipts": rows, "total": total}, as_json, shown=shown)


@app.command("diff")
def receipt_diff(
    ctx: typer.Context,
    first: Annotated[str, typer.Argument(metavar="A", help="Full id or unique prefix.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Full id or unique prefix.")],
    as_json: Json = False,
) -> None:
    """How two receipts differ, field by field and row by row; exit code 3 if they do."""
    from fabric_pipelines import receipts
    from fabric_pipelines.dataplane.database import Database

    settings = settings_of(ctx)
    found = receipts.diff(Database.of(settings), settings.shards_dir, first, second)
    shown = {"first": found.first[:PREFIX], "second": found.second[:PREFIX]}
    sentences = [str(item) for item in found.differences]
    emit(found.as_json(), as_json, shown=shown | {"differences": sentences or "none"})
    require(found.same, f"the two receipts differ in {len(found.differences)} things")


@app.command("rebuild")
def receipt_rebuild(
    ctx: typer.Context,
    receipt_id: Annotated[str, typer.Argument(metavar="ID", help="Full id or unique prefix.")],
    least: Annotated[
        str, typer.Option(help="Verdict that is good enough: identical, logical or equivalent.")
    ] = "equivalent",
    parameter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Change an index parameter, to see what it does."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Build the generation again and give a verdict: identical, logical, equivalent or different. Exit code 3 if it
    is not as good as --least, and whatever the verdict if files of the generation are damaged or gone."""
    from fabric_pipelines import receipts
    from fabric_pipelines.dataplane.database import Database

    grades = get_args(Verdict)
    if least not in grades:
        raise UsageError(f"--least is {least!r}; it must be one of {', '.join(grades)}")
    settings = settings_of(ctx)
    overrides = dict(_parameter(text) for text in parameter or [])
    done = receipts.rebuild(
        Database.of(settings), settings.shards_dir, receipt_id, overrides=overrides
    )
    emit(plain(done), as_json)
    require(
        done.verdict in grades[: grades.index(least) + 1],
        f"the rebuild of receipt {receipt_id} is {done.verdict}: see the differences",
    )
    require(
        not done.damage,
        f"the rebuild of receipt {receipt_id} is {done.verdict}, but the generation itself is not whole: see the "
        "differences; `fabric receipt refresh SHARD --anew` builds a whole one",
    )


def _parameter(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--parameter takes NAME=VALUE, not {text!r}")
    try:
        return name, value if name == "metric" else int(value)
    except ValueError as fault:
        raise UsageError(f"--parameter {name} takes a whole number, not {value!r}") from fault


@app.command("stale")
def receipt_stale(
    ctx: typer.Context,
    shard: Annotated[str | None, typer.Option(help="Only this shard.")] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0,
            max=WAIT_S_MAX,
            callback=finite,
            help="Seconds to wait for a shard to become stale; rung by the database.",
        ),
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """The database's verdict on every shard, and the numbers behind it; exit code 3 while one is stale."""
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.dataplane.staleness import await_stale, require_shard

    database = Database.of(settings_of(ctx))
    if shard is not None:
        require_shard(database, shard)
    found = await_stale(database, shard, within_s=wait)
    rows = [plain(item) for item in found]
    why = [f"{item.shard}: {item.why}" for item in found if item.why]
    told = [row | {"why": item.why} for row, item in zip(rows, found, strict=True)]
    emit({"shards": told}, as_json, shown={"stale": rows, **({"why": why} if why else {})})
    stale = [f"{item.shard} ({item.verdict})" for item in found if item.verdict != "fresh"]
    require(
        not stale,
        f"stale: {', '.join(stale)}; `fabric receipt refresh SHARD` brings one up to date, unless its `why` says otherwise",
    )


@app.command("refresh")
def receipt_refresh(
    ctx: typer.Context,
    shard: Annotated[str, typer.Argument(help="Name of a shard.")],
    anew: Annotated[
        bool,
        typer.Option("--anew", help="Build in full whatever moved: the remedy for damaged files."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Bring a shard up to date: lay over it what moved, or build it anew where a rule says so; with a receipt."""
    from fabric_pipelines import receipts, shards
    from fabric_pipelines.dataplane.database import Database

    settings = settings_of(ctx)
    database = Database.of(settings)
    done = shards.refresh(database, settings.shards_dir, shard, anew=anew)
    # one that stands since long is hashed before it is measured
    issue = receipts.issue_late if done.how == "none" else receipts.issue
    receipt = issue(database, settings.shards_dir, shard)
    answer = {
        "shard": shard,
        "generation": done.generation.number,
        "how": done.how,
        "why": done.why,
        "moved": done.moved,
        "bytes_written": done.written,
        "receipt_id": receipt.receipt_id,
    }
    emit(answer, as_json)


@app.command("audit")
def receipt_audit(
    ctx: typer.Context,
    shard: Annotated[str, typer.Argument(help="Name of a shard.")],
    as_json: Json = False,
) -> None:
    """Compare the rows themselves with the generation, where the change log cannot tell; exit code 3 if some moved."""
    from fabric_pipelines import shards
    from fabric_pipelines.dataplane.database import Database

    settings = settings_of(ctx)
    found = shards.audit(Database.of(settings), settings.shards_dir, shard)
    emit(plain(found), as_json)
    require(
        not found.moved,
        f"{found.moved} rows moved; `fabric receipt refresh {shard}` brings it up to date",
    )


@app.command("unwatch")
def receipt_unwatch(
    ctx: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="SHARD|RELATION", help="Name of a shard, or schema.table.")
    ],
    undo: Annotated[
        bool, typer.Option("--undo", help="Let the next refresh or audit watch it again.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Take the fabric's triggers and their functions off a relation and keep them off; its shards are audited."""
    from fabric_pipelines.dataplane import staleness
    from fabric_pipelines.dataplane.database import Database

    database = Database.of(settings_of(ctx))
    if undo:
        shards = staleness.allow_watch(database, name)
        emit({"name": name, "watched_from_the_next_refresh": list(shards)}, as_json)
    else:
        emit(plain(staleness.unwatch(database, name)), as_json)


@app.command("push")
def receipt_push(
    ctx: typer.Context,
    shard: Annotated[str, typer.Argument(help="Name of a shard.")],
    to: Annotated[str, typer.Option(help="s3://bucket/prefix")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read back every object that is there already.")
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over", help="Replace the copy of another database, or one that counts as newer."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Copy the current generation of a shard to an object store, or heal its copy: what is missing there or differs is sent."""
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.dataplane.objects import Objects
    from fabric_pipelines.shards import remote

    settings = settings_of(ctx)
    done = remote.push(
        Database.of(settings),
        settings.shards_dir,
        shard,
        Objects(to),
        verify=verify,
        take_over=take_over,
    )
    answer = {"shard": shard, "generation": done.pointer.generation, "token": done.pointer.token}
    answer |= {"files_sent": done.files, "bytes_sent": done.bytes}
    emit(answer | ({"adopted": done.adopted} if done.adopted else {}), as_json)


@app.command("fetch")
def receipt_fetch(
    ctx: typer.Context,
    shard: Annotated[str, typer.Argument(help="Name of a shard.")],
    source: Annotated[str, typer.Option("--from", help="s3://bucket/prefix")],
    out: Annotated[Path, typer.Option(help="Folder to put it in.")],
    as_json: Json = False,
) -> None:
    """Bring the newest copy of a shard into a folder, every file checked by its digest; those that are there as well."""
    from fabric_pipelines.dataplane.objects import Objects
    from fabric_pipelines.shards import remote

    settings_of(ctx)
    found = remote.fetch(Objects(source), out, shard)
    answer = {"shard": shard, "generation": found.number, "token": found.token}
    emit(answer | {"folder": str(found.folder), "rows": found.manifest.rows}, as_json)


@app.command("policy")
def receipt_policy(
    ctx: typer.Context,
    shard: Annotated[str, typer.Argument(help="Name of a shard, or '*' for the defaults.")] = "*",
    bound: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="BOUND=NUMBER", help="BOUND= takes the default again."),
    ] = None,
    as_json: Json = False,
) -> None:
    """When a shard counts as stale: bounds of one shard, or of all."""
    from fabric_pipelines.dataplane import staleness
    from fabric_pipelines.dataplane.database import Database

    database = Database.of(settings_of(ctx))
    if bound:
        if shard != staleness.DEFAULTS:
            staleness.require_shard(database, shard)
        staleness.set_policy(database, shard, dict(_bound(text) for text in bound))
    emit({"policies": [plain(item) for item in staleness.policies(database)]}, as_json)


def _bound(text: str) -> tuple[str, float | None]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set takes BOUND=NUMBER, not {text!r}")
    try:
        return name, float(value) if value else None
    except ValueError as fault:
        raise UsageError(f"{name} takes a number, not {value!r}") from fault
