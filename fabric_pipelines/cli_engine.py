"""`fabric engine ...`: one call a command."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from fabric_pipelines.console import emit, settings_of
from fabric_pipelines.errors import BrokerUnavailable, UsageError

if TYPE_CHECKING:
    from fabric_pipelines.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Engines: inspect, build, fingerprint, probe.")

LANE_SHAPE = re.compile(r"len(\d+)")  # of single-pass work; broker.lanes.Lane.name
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Name = Annotated[str, typer.Argument(help="model@runtime")]
Device = Annotated[
    str | None,
    typer.Option(help="cpu or cuda, for engines that run on either; refused for others."),
]


@app.command("inspect")
def engine_inspect(
    ctx: typer.Context,
    name: Name,
    opened: Annotated[
        bool, typer.Option("--open", help="Load it, and show its own word on each field.")
    ] = False,
    device: Device = None,
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


@app.command("probe")
def engine_probe(
    ctx: typer.Context,
    name: Name,
    device: Annotated[str, typer.Option(help="cpu:N or cuda:N")] = "cpu:0",
    as_json: Json = False,
) -> None:
    """Measure engine and card for some seconds; workers on this hardware declare the profile found."""
    from fabric_pipelines.worker.service import probe_engine

    probed, path = probe_engine(name, settings_of(ctx), device=device)
    answer = {**probed.as_json(), "kept": path}
    rows = [
        {
            "max_num_tokens": row.max_num_tokens,
            "tokens_per_s": f"{row.tokens_per_s:,.0f}",
            "slowest": f"{row.spread[0]:,.0f}",
            "fastest": f"{row.spread[1]:,.0f}",
            "compared by": f"{row.merit:,.0f}",
        }
        for row in probed.rows
    ]
    shown = {key: answer[key] for key in ("engine", "hardware", "profile", "kept")}
    emit(answer, as_json, shown={**shown, "budgets": rows})


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
    layer: Annotated[
        list[int] | None, typer.Option(help="TensorRT: layer to give the states of; repeatable.")
    ] = None,
    lane: Annotated[
        list[int] | None,
        typer.Option(help="TensorRT: length of a lane; repeatable. Else the broker's lanes."),
    ] = None,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(help="TensorRT: a card to build for, as 9.0; else the one at hand."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make an engine ready to open: convert a model, describe a checkpoint folder, or build a TensorRT plan."""
    from fabric_pipelines.telemetry import ProgressBoard
    from fabric_pipelines.worker.engines.building import Declared, PlanTarget, build
    from fabric_pipelines.worker.engines.inspection import built
    from fabric_pipelines.worker.engines.registry import plan_runtime

    settings = settings_of(ctx)
    declared = Declared(
        weight_quantisation,
        kv_quantisation,
        max_batch_size,
        max_num_tokens,
        max_input_len,
        max_seq_len,
    )
    capabilities = tuple(_capability(text) for text in compute_capability or ())
    lanes = tuple(lane or ())
    if not lanes and plan_runtime(name) is not None:
        lanes = _lanes_in_use(settings, name)
    target = PlanTarget(tuple(layer or ()), lanes, capabilities)
    with ProgressBoard(sys.stderr) as board:
        folder = build(
            name,
            declared,
            target,
            cache=settings.models,
            eos_ids=tuple(eos or ()),
            progress=board,
        )
    emit(built(name, folder), as_json)


def _capability(text: str) -> tuple[int, int]:
    major, dot, minor = text.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise UsageError(f"--compute-capability takes a number as 9.0, not {text!r}")
    return int(major), int(minor)


def _lanes_in_use(settings: Settings, name: str) -> tuple[int, ...]:
    """Lengths of the broker's lanes of single-pass work for this model, whichever engine they were submitted to."""
    from fabric_pipelines.broker.client import BrokerClient

    try:
        with BrokerClient.of(settings, role="admin") as client:
            lanes = client.status().lanes
    except BrokerUnavailable as fault:
        raise UsageError(
            f"say with --lane for which lengths {name} is built, or start the broker whose lanes are meant ({fault})"
        ) from fault
    return lane_lengths((str(row["lane"]) for row in lanes), name.partition("@")[0])


def lane_lengths(lanes: Iterable[str], model: str) -> tuple[int, ...]:
    """From lane names, tenant/engine/sampling/len<length>, those of `model`'s single-pass work."""
    found = set()
    for lane in lanes:
        parts = lane.split("/")
        shape = LANE_SHAPE.match(parts[-1])
        if shape and "/".join(parts[1:-2]).partition("@")[0] == model:
            found.add(int(shape[1]))
    return tuple(sorted(found))
