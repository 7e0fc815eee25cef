"""`fabric engine ...`: one call a command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fabric_pipelines.console import emit, settings_of

app = typer.Typer(no_args_is_help=True, help="Engines: inspect, build, fingerprint.")

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Name = Annotated[str, typer.Argument(help="model@runtime")]
Device = Annotated[str, typer.Option(help="cpu or cuda, for engines that run on either.")]


@app.command("inspect")
def engine_inspect(
    ctx: typer.Context,
    name: Name,
    opened: Annotated[
        bool, typer.Option("--open", help="Load it, and show its own word on each field.")
    ] = False,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Manifest, profile and fingerprint; refused, with exit code 4, by the field at fault."""
    from fabric_pipelines.worker.engines.inspection import inspect

    settings = settings_of(ctx)
    answer = inspect(
        name, cache=settings.models, threads=settings.threads, device=device, opened=opened
    )
    fields = [
        {
            "field": field,
            "manifest": value,
            **(
                {"engine": f"{'<= ' if told['at_most'] else ''}{told['value']}", "by": told["who"]}
                if (told := answer["told"].get(field))
                else {}
            ),
        }
        for field, value in answer["manifest"].items()
    ]
    shown = {key: answer[key] for key in ("engine", "fingerprint", "folder", "device")}
    emit(answer, as_json, shown={**shown, "profile": answer["profile"], "fields": fields})


@app.command("fingerprint")
def engine_fingerprint(ctx: typer.Context, name: Name, as_json: Json = False) -> None:
    """Digest of manifest and weights, the weights hashed again; stands on every completion."""
    from fabric_pipelines.worker.engines.inspection import fingerprint

    emit(fingerprint(name, cache=settings_of(ctx).models), as_json)


@app.command("build")
def engine_build(
    ctx: typer.Context,
    name: Name,
    weight_quantisation: Annotated[str | None, typer.Option(help="none, fp8, ...")] = None,
    kv_quantisation: Annotated[str | None, typer.Option(help="none, fp8, single_pass")] = None,
    max_batch_size: Annotated[int | None, typer.Option(help="Sequences at once.")] = None,
    max_num_tokens: Annotated[int | None, typer.Option(help="Tokens a step.")] = None,
    max_input_len: Annotated[int | None, typer.Option(help="Longest prompt.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Longest prompt and output.")] = None,
    eos: Annotated[
        list[int] | None, typer.Option(help="Token that ends a generation; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make an engine ready to open: convert a model of the catalogue, or describe a checkpoint folder."""
    from fabric_pipelines.telemetry import ProgressBoard
    from fabric_pipelines.worker.engines.building import Declared, build
    from fabric_pipelines.worker.engines.inspection import inspect

    settings = settings_of(ctx)
    declared = Declared(
        weight_quantisation,
        kv_quantisation,
        max_batch_size,
        max_num_tokens,
        max_input_len,
        max_seq_len,
    )
    with ProgressBoard(sys.stderr) as board:
        build(name, declared, cache=settings.models, eos_ids=tuple(eos or ()), progress=board)
    answer = inspect(name, cache=settings.models, threads=settings.threads)
    kept = ("engine", "fingerprint", "folder", "manifest")
    emit({key: answer[key] for key in kept}, as_json)
