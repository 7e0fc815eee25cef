"""`fabric`: one call per command, and the one place where an error becomes a sentence and an exit code.

With --json there is exactly one JSON object on stdout, however the command ends; everything else that is said goes
to stderr.
Imports wait inside the commands, so that `fabric --help` stays instant. docs/operations.md is the reference.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from fabric_pipelines.cli_bench import app as bench_app
from fabric_pipelines.cli_broker import account as _broker_status
from fabric_pipelines.cli_broker import app as broker_app
from fabric_pipelines.cli_db import app as db_app
from fabric_pipelines.cli_engine import app as engine_app
from fabric_pipelines.cli_index import app as index_app
from fabric_pipelines.cli_index import search as search_command
from fabric_pipelines.cli_models import app as models_app
from fabric_pipelines.cli_receipts import app as receipt_app
from fabric_pipelines.cli_shards import app as shard_app
from fabric_pipelines.console import ANSWER
from fabric_pipelines.console import emit as _emit
from fabric_pipelines.console import require as _require
from fabric_pipelines.console import settings_of as _settings
from fabric_pipelines.errors import (
    BrokerUnavailable,
    FabricError,
    Interrupted,
    StorageFailed,
    UsageError,
    storage_failed,
)
from fabric_pipelines.interrupts import CTRL_C
from fabric_pipelines.screen import pairs, plain

if TYPE_CHECKING:
    from fabric_pipelines.shards import Judged
    from fabric_pipelines.telemetry import ProgressBoard

PARTIAL = 5  # it worked, and dead letters exist


class OneSentence(TyperGroup):
    """Turns whatever a command raises into one sentence on stderr and the exit code of its class."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        ANSWER.begin(args)
        for text in args:
            try:
                text.encode()
            except (
                UnicodeEncodeError
            ):  # bytes that Python keeps as lone surrogates, which no text can hold further on
                _leave(UsageError(f"the argument {text!a} is not UTF-8: write it in UTF-8"))
        try:
            return super().make_context(info_name, args, *rest, **extra)
        except Exception as fault:
            _leave_if_misused(fault)
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            answer = self._invoke(ctx)
            ANSWER.hand_over()
        except OSError as fault:  # whoever reads our stdout went away
            _leave(fault)
        return answer

    def _invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _leave(
                Interrupted(
                    "interrupted: all that was acknowledged is kept; "
                    "run the same command again to go on where it stopped"
                )
            )
        except typer.Abort:  # Ctrl-C or a closed stdin at a question, whose line has no end
            sys.stderr.write("\n")
            _leave(Interrupted("not answered, so nothing was changed"))
        except (FabricError, OSError) as fault:
            _leave(fault)
        except Exception as fault:
            _leave_if_misused(fault)
            if isinstance(fault, typer.Exit) or hasattr(fault, "format_message"):
                ANSWER.hand_over()
                raise  # typer's own way to end, or to show its help
            _leave(
                FabricError(
                    f"this is a fault of fabric itself ({type(fault).__name__}: {fault}): "
                    "run again with FABRIC_DEBUG=1 and report the trace"
                ),
                cause=fault,
            )


def _leave_if_misused(fault: Exception) -> None:
    """A command line that typer cannot read: its reason, and where to look, in one sentence."""
    words = getattr(fault, "format_message", None)
    if words is None or type(fault).__name__ == "NoArgsIsHelpError":
        return
    ctx = getattr(fault, "ctx", None)
    path = " ".join(["fabric", *(ctx.command_path.split()[1:] if ctx is not None else ())])
    _leave(
        UsageError(f"{' '.join(words().split()).rstrip('.')}: `{path} --help` shows what it takes")
    )


def _leave(fault: FabricError | OSError, *, cause: Exception | None = None) -> NoReturn:
    if os.environ.get("FABRIC_DEBUG") == "1":
        raise cause or fault
    if isinstance(fault, BrokenPipeError):
        # The reader of our stdout went away, as `| head` does; Python must not flush into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1)
    if isinstance(fault, OSError):
        fault = storage_failed(fault)
    CTRL_C.told()
    sys.stderr.write(f"{fault}\n")
    ANSWER.failed(fault)
    with suppress(BrokenPipeError):
        ANSWER.hand_over()
    raise typer.Exit(fault.exit_code)


app = typer.Typer(
    cls=OneSentence,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Offline inference fabric: durable supply, stock engines, results in Postgres.",
)


def _group(name: str, text: str) -> typer.Typer:
    group = typer.Typer(no_args_is_help=True, help=text)
    app.add_typer(group, name=name)
    return group


config_app = _group("config", "Settings, and where each came from.")
kernels_app = _group("kernels", "Compiled CUDA kernels.")
worker_app = _group("worker", "One engine on one device.")
app.add_typer(db_app, name="db")
app.add_typer(models_app, name="models")
app.add_typer(engine_app, name="engine")
app.add_typer(broker_app, name="broker")
app.add_typer(receipt_app, name="receipt")
app.add_typer(shard_app, name="shard")
app.add_typer(bench_app, name="bench")
app.add_typer(index_app, name="index")
app.command("search")(search_command)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.callback()
def start(
    ctx: typer.Context,
    home: Annotated[
        Path | None, typer.Option(help="Folder that holds everything; before FABRIC_HOME.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any setting of `fabric config show`."),
    ] = None,
) -> None:
    flags: dict[str, Any] = dict(_assignment(text) for text in settings or [])
    if home is not None:
        flags["home"] = home
    ctx.obj = flags


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set takes NAME=VALUE, not {text!r}")
    return name, value


GIVEN = "  (from {})"


def _board() -> ProgressBoard:
    from fabric_pipelines.telemetry import ProgressBoard

    return ProgressBoard(sys.stderr)


def _size(count: int) -> str:
    from fabric_pipelines import screen

    return screen.size(count)


# ---- the whole fabric


@app.command()
def quickstart(ctx: typer.Context, as_json: Json = False) -> None:
    """From nothing to results, vectors and a verified receipt, on this machine."""
    from fabric_pipelines import screen
    from fabric_pipelines.quickstart import run

    with _board() as board:
        report = run(_settings(ctx), progress=board)
    if as_json:
        _emit(report.as_json(), as_json)
    else:
        sys.stdout.write(report.summary(screen.width()) + "\n")
    if report.dead:
        raise typer.Exit(PARTIAL)


@app.command()
def up(
    ctx: typer.Context,
    foreground: Annotated[bool, typer.Option(help="Stay attached; Ctrl-C stops all.")] = False,
    ui: Annotated[bool, typer.Option("--ui/--no-ui", help="Dagster webserver and daemon.")] = True,
    engine: Annotated[
        list[str] | None, typer.Option(help="Engine to run; may be given more than once.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Start Postgres, broker, completion, workers and the Dagster UI under one supervisor."""
    from fabric_pipelines import supervise

    settings = _settings(ctx)
    engines = tuple(engine) if engine else supervise.DEFAULT_ENGINES
    report = supervise.up(settings, ui=ui, engines=engines, foreground=foreground)
    _emit(plain(report), as_json)


@app.command()
def down(ctx: typer.Context) -> None:
    """Stop everything: what runs is finished or handed back, nothing is lost."""
    from fabric_pipelines import supervise

    settings = _settings(ctx)
    if supervise.down(settings):
        sys.stderr.write(f"stopped; everything is kept in {settings.home}\n")
    else:
        sys.stderr.write(f"nothing of {settings.home} was running\n")


@app.command()
def status(ctx: typer.Context, as_json: Json = False) -> None:
    """Tasks by state, per lane and in total, the balance, the processes, and what they wait for."""
    from fabric_pipelines import answers, supervise, waits
    from fabric_pipelines.completion import account
    from fabric_pipelines.ledger import Ledger
    from fabric_pipelines.telemetry import account_in_words
    from fabric_pipelines.worker import account as workers

    settings = _settings(ctx)
    state = plain(supervise.state(settings))
    completion = account.read(settings)
    processes = {name: state[name] for name in ("processes", "ui_url")} | {"completion": completion}
    waiting = answers.waiting(waits.read(settings.waits_dir), state["processes"])
    processes["waits"] = waiting
    running = processes["workers"] = workers.read(settings)
    shown_waits = {"waits": answers.waits_for_a_person(waiting)}
    try:
        broker = _broker_status(settings)
    except BrokerUnavailable:
        # what the broker alone knows is unknown, not zero; its processes are there to be seen
        unknown = dict.fromkeys(Ledger().as_json())
        shown = {"balance": "unknown"} | shown_waits | {"processes": state["processes"]}
        _emit({**unknown, "lanes": [], **processes}, as_json, shown=shown)
        if why := supervise.fallen(settings):
            raise StorageFailed(why) from None
        raise
    broker |= broker.pop("total")
    ui = {"ui": state["ui_url"] or "not running"}
    if completion is not None:
        ui["bulk writes"] = account_in_words(completion, account.summary)
    ui |= {workers.name(row): account_in_words(row, workers.summary) for row in running}
    shown = ui | answers.work_of(broker) | shown_waits | {"processes": state["processes"]}
    _emit({**broker, **processes}, as_json, shown=shown)


@app.command()
def submit(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(help=".jsonl with text or tokens, else one text a line.")],
    function: Annotated[str, typer.Option(help="Where results go: generate, embed, ...")],
    engine: Annotated[str, typer.Option(help="model@runtime")],
    max_new_tokens: Annotated[int | None, typer.Option(help="Cap of each output.")] = None,
    sampling: Annotated[str | None, typer.Option(help="JSON; see records/shape.py.")] = None,
    chat: Annotated[bool, typer.Option(help="Each text is one user turn.")] = False,
    salt: Annotated[str, typer.Option(help="Another salt computes the same again.")] = "",
    wait: Annotated[bool, typer.Option(help="Until all of it is settled.")] = False,
    as_json: Json = False,
) -> None:
    """Make a file of prompts durable in the broker; with --wait, watch it to its end."""
    from fabric_pipelines.api import Fabric, read_prompts

    prompts = read_prompts(file)
    fabric = Fabric(_settings(ctx), on_wait=lambda line: typer.echo(line, err=True))
    work = fabric.submit(
        function=function,
        engine=engine,
        sampling=_json_option("--sampling", sampling),
        chat=chat,
        salt=salt,
        **prompts.columns(max_new_tokens),
    )
    state = work.progress()
    if wait:
        with _board() as board:
            board.add(function, work.tokens)
            # tokens of dead letters count at the end: they are settled too
            state = work.wait(
                on_progress=lambda seen: board.advance_to(
                    function, work.tokens if seen.finished else seen.retired_tokens
                ),
                on_wait=board.say,
            )
    _emit({"submission_id": work.id, **plain(state)}, as_json)
    if state.dead:
        raise typer.Exit(PARTIAL)


def _json_option(name: str, text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise UsageError(f"{name} is not JSON: {fault}") from fault
    if not isinstance(value, dict):
        raise UsageError(f'{name} must be a JSON object, for example {{"kind": "generate"}}')
    return value


@app.command()
def results(
    ctx: typer.Context,
    what: Annotated[str, typer.Argument(metavar="FUNCTION", help="A function or submission id.")],
    out: Annotated[Path | None, typer.Option(help=".parquet, .arrow, .csv or .jsonl")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take the place of a file that is there.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Hand over results as a file; without --out, their count and columns."""
    from fabric_pipelines.api import Fabric, require_target, write_table

    if out is not None:
        require_target(out, replace=replace)
    table = Fabric(_settings(ctx)).results(what)
    answer: dict[str, Any] = {"rows": table.num_rows, "columns": table.column_names}
    if out is not None:
        answer |= {"path": out, "bytes": write_table(table, out, replace=replace)}
    _emit(answer, as_json)


@app.command()
def reset(
    ctx: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Empty the home after asking: journal, embedded database, lake, shards, logs; and its lines in .env."""
    from fabric_pipelines.dagster_home import clear_env_file
    from fabric_pipelines.supervise import reset as resetting

    settings = _settings(ctx)
    resetting.require_idle(settings)
    found = resetting.contents(settings)
    sys.stderr.write(f"{settings.home} holds {_size(found.size)}\n")
    if found.folders and not yes and not typer.confirm("Delete all of it?", err=True):
        raise Interrupted("nothing was deleted")
    gone = resetting.empty(settings)
    # where quickstart writes them: the folder it is run in, usually the one that the home is in
    folders = dict.fromkeys((Path.cwd(), settings.home.parent))
    cleared = [path for folder in folders if (path := clear_env_file(settings, folder))]
    _emit(
        {"removed": gone.folders, "bytes": gone.size, "kept": gone.foreign, "env": cleared}, as_json
    )


@app.command()
def doctor(ctx: typer.Context, as_json: Json = False) -> None:
    """What this machine lacks before the fabric can run on it, each with its remedy."""
    from fabric_pipelines.supervise.doctor import examine

    findings = examine(_settings(ctx))
    failed = [item.check for item in findings if item.status == "fail"]
    shown = {
        f"{item.status} {item.check}": ": ".join(filter(None, (item.found, item.fix)))
        for item in findings
    }
    _emit({"ok": not failed, "findings": findings}, as_json, shown=shown)
    _require(not failed, f"{', '.join(failed)}: see the remedies above")


@app.command()
def health(
    ctx: typer.Context,
    shard: Annotated[str, typer.Argument(help="Name of a shard.")],
    record: Annotated[
        bool, typer.Option(help="Keep the verdicts beside the generation, for those after it.")
    ] = False,
    probes: Annotated[
        bool,
        typer.Option("--probes", help="Ask it for its own rows: which lists are probed in vain."),
    ] = False,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for SVG pictures of rows, margins and clusters.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Parquet file: a row a cluster, values with statuses.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Health metrics of every cluster of a shard, and what the rules make of them."""
    from fabric_pipelines import shards
    from fabric_pipelines.analytics import rules
    from fabric_pipelines.analytics.rules import Verdict
    from fabric_pipelines.dataplane.database import Database
    from fabric_pipelines.telemetry import timed

    settings = _settings(ctx)
    table = rules.load(Path(settings.health_rules) if settings.health_rules else None)
    database = Database.of(settings)
    with timed() as clock, shards.open_shard(database, settings.shards_dir, shard) as opened:
        judged = shards.judge(database, settings.shards_dir, opened, table, ask=probes)
        if record:
            shards.record(opened.generation, judged)
    found = judged.health
    summary = [
        {"name": name, "value": _mean(reading.value), "known": int((reading.status == 0).sum())}
        for name, reading in found.readings.items()
    ]
    passes = [{"name": name, "seconds": spent} for name, spent in found.pass_seconds.items()]
    answer = {
        "clusters": found.clusters,
        "metrics": summary,
        "passes": passes,
        "seconds": clock["seconds"],
        "recorded": record,
        **judged.to_json(),
    }
    if plots:
        answer["plots"] = _drawn(judged, plots)
    if out:
        from fabric_pipelines.api import write_table

        write_table(judged.to_arrow(), out)
        answer["out"] = str(out)
    noted = [each for each in judged.decisions if each.pending or each.verdict is not Verdict.KEEP]
    verdicts = {name: count for name, count in judged.verdicts().items() if count}
    _emit(
        answer, as_json, shown={**answer, "verdicts": verdicts, "decisions": list(map(str, noted))}
    )


def _drawn(judged: Judged, folder: Path) -> list[str]:
    from fabric_pipelines.workloads import health_figures

    paths = []
    for name, svg in health_figures.drawn(judged.health, judged.odd()).items():
        paths.append(str(folder / f"{name}.svg"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            Path(paths[-1]).write_text(svg, encoding="utf-8")
        except OSError as fault:
            raise UsageError(f"{paths[-1]} cannot be written: {fault.strerror}") from fault
    return paths


def _mean(values: Any) -> float | None:
    """Mean of what is finite, None when nothing is."""
    finite = values[values == values]  # NaN differs from itself
    return float(finite.mean()) if len(finite) else None


# ---- settings, broker, receipts, kernels, worker


@config_app.command("show")
def config_show(ctx: typer.Context, as_json: Json = False) -> None:
    """Every setting, its value and which source won."""
    settings = _settings(ctx)
    rows = settings.described()
    if as_json:
        _emit({"home": settings.home, "settings": rows}, as_json)
        return
    # the names as they are typed, and values uncut, since they may be copied: what they mean stands in the docs
    shown = {
        row["name"]: (row["value"] or "-")
        + ("" if row["origin"] == "default" else GIVEN.format(row["origin"]))
        for row in rows
    }
    sys.stdout.write("\n".join(pairs(shown)) + "\n")


@kernels_app.command("list")
def kernels_list(as_json: Json = False) -> None:
    """Compiled kernels by family and architecture."""
    from fabric_pipelines.device.cubins import kernels_list as listed

    _emit(listed(), as_json)


@worker_app.command("run")
def worker_run(
    ctx: typer.Context,
    engine: Annotated[str, typer.Option(help="model@runtime")],
    device: Annotated[str, typer.Option(help="cpu:N or cuda:N")] = "cpu:0",
    until_idle: Annotated[bool, typer.Option(help="End once nothing is ready.")] = False,
    steps_ahead: Annotated[
        int | None,
        typer.Option(help="Of a vLLM engine: steps its scheduler runs ahead; else as set."),
    ] = None,
) -> None:
    """Run one engine on one device until SIGTERM; prints its counters as JSON at the end."""
    from fabric_pipelines.worker.service import log_to_stderr, run_engine

    log_to_stderr()
    report = run_engine(
        engine, _settings(ctx), device=device, until_idle=until_idle, steps_ahead=steps_ahead
    )
    _emit(report, True)
    _require(not report["undelivered"], f"{report['undelivered']} results could not be delivered")


def main() -> None:
    CTRL_C.install()
    try:
        app(prog_name="fabric")
    except KeyboardInterrupt:  # between a command's end and ours
        CTRL_C.leave()
    finally:
        CTRL_C.over()


if __name__ == "__main__":
    main()
