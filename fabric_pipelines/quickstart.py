"""`fabric quickstart`: the whole loop once, on this machine, and what came of it on one screen.

Models, then services (only if none run; what it started it stops), then one Dagster run on the persistent
instance that submits every workload before it waits for any, then the receipt verified once more from
outside. Running it again submits nothing twice: ids follow from content, so the broker already has all of it.

Sizes: 48 generations of at most 32 tokens, 160 probe statements, 48 verses for hidden states (6 of each of 8
books), 800 verses for embeddings. They are the defaults of the workloads' requests, so the same run is what
the UI offers.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.instance.ref import InstanceRef

from assets import lineage, upkeep
from assets.automation import RANGE_END, RANGE_START
from assets.flow import WAIT_TAG
from assets.indexes import RECALL_AT, RECEIPT_KEY, SHARD_KEY
from fabric_pipelines import models, receipts, screen, supervise
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.broker.replies import BrokerStatus, SubmissionState
from fabric_pipelines.dagster_home import ensure_dagster_home, write_env_file
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.lake import Lake
from fabric_pipelines.definitions import build_defs
from fabric_pipelines.errors import (
    AlreadyRunning,
    CheckFailed,
    FabricError,
    Interrupted,
    StorageFailed,
    UsageError,
    storage_failed,
)
from fabric_pipelines.interrupts import CTRL_C
from fabric_pipelines.settings import Settings, make_runtime_folder
from fabric_pipelines.telemetry import ProgressBoard
from fabric_pipelines.worker.engines.registry import engine_spec
from fabric_pipelines.workloads.catalogue import WORKLOADS, Workload
from fabric_pipelines.workloads.corpus import BOOKS
from fabric_pipelines.workloads.request import EngineChoice, Prepared
from fabric_pipelines.workloads.synthetic import INSTRUCTION
from resources.broker import BrokerResource
from resources.completion import CompletionResource
from resources.database import DatabaseResource
from resources.gpu_worker import GpuWorkerResource

POLL_S = 0.5
RECEIPT_SHOWN = 12  # characters: a prefix is enough for every command
SQL = 'psql "$(fabric db url)" -c "select text from fabric.generate"'
SAMPLES = 10
ENGINES = tuple(dict.fromkeys(workload.engine for workload in WORKLOADS.values()))
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
NAME = "quickstart"
BY_TAG = "fabric/by"  # on every run of this process, also on the one that only reports a generation
ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
UNENDED = [status for status in dg.DagsterRunStatus if status not in ENDED]
BEGUN = (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING)
KILLED = (
    "the quickstart that ran this was ended from outside (killed, or the machine went down): the next quickstart "
    "found it, ended it here and goes on where the work was"
)
RUN_TAGS = {
    WAIT_TAG: "true",
    RANGE_START: BOOKS[0],
    RANGE_END: BOOKS[-1],
    "fabric/run": NAME,
    BY_TAG: NAME,
}


@dataclass(frozen=True, slots=True)
class QuickstartReport:
    """What happened. tasks_ran: retired by this run, the others had been before it. tokens_per_s: prompt and
    output of retired tasks over the time in which tasks ran, as their rows record it, so a run that found its
    work done reports the speed of when it was done. padding_waste: share of padding among all tokens that the
    engines computed on. seconds: wall time of this run without model_pull_seconds."""

    tasks: int
    tasks_ran: int
    retired: int
    dead: int
    balance: int
    tokens_in: int
    tokens_out: int
    rows_landed: int
    vectors: int
    receipt_id: str
    receipt_ok: bool
    recall_at_10: float
    seconds: float
    tokens_per_s: float
    padding_waste: float
    model_pull_seconds: float
    verifier_pass_rate: float
    probe_accuracy: float
    samples: Sequence[Mapping[str, str]]
    paths: Mapping[str, str]
    run_id: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self, width: int) -> str:
        """One screen of `width` columns: what happened, ten of the texts, where things are, what to do next."""
        return "\n".join(
            [
                screen.clip(self._headline(), width),
                "",
                *screen.grid(self._figures(), indent="  "),
                "",
                screen.clip(
                    f"What the model said (its verifiers accept {self.verifier_pass_rate:.0%} of all):",
                    width,
                ),
                *(_sample_line(item, width) for item in self.samples),
                "",
                "Where things are:",
                *screen.pairs(self.paths, indent="  "),
                "",
                "What to do next; the first starts what the others read from:",
                *screen.pairs(self._next(), indent="  "),
                *([f"  {SQL}"] if shutil.which("psql") else []),
            ]
        )

    def _headline(self) -> str:
        if self.tasks_ran == 0:
            return f"Nothing ran again: all {self.tasks:,} tasks had been done, landed and proven before."
        again = self.tasks - self.tasks_ran - self.dead
        before = f"; {again:,} had been done before" if again > 0 else ""
        return f"{self.tasks_ran:,} tasks ran, landed and are in a proven index{before}."

    def _figures(self) -> list[list[tuple[str, str]]]:
        speed = "tokens/s then" if self.tasks_ran == 0 else "tokens/s"
        verified = "verified" if self.receipt_ok else "DOES NOT VERIFY"
        return [
            [
                ("tasks", f"{self.tasks:,}"),
                ("retired", f"{self.retired:,}"),
                ("dead", f"{self.dead:,}"),
                ("balance", f"{self.balance:,}"),
                ("seconds", f"{self.seconds:,.0f}"),
            ],
            [
                ("tokens in", f"{self.tokens_in:,}"),
                ("tokens out", f"{self.tokens_out:,}"),
                (speed, f"{self.tokens_per_s:,.0f}"),
                ("padding", f"{self.padding_waste:.1%}"),
                ("model pull s", f"{self.model_pull_seconds:,.0f}"),
            ],
            [
                ("rows landed", f"{self.rows_landed:,}"),
                ("vectors", f"{self.vectors:,}"),
                ("recall@10", f"{self.recall_at_10:.3f}"),
                ("best probe", f"{self.probe_accuracy:.0%}"),
                ("receipt", f"{self.receipt_id[:RECEIPT_SHOWN]} {verified}"),
            ],
        ]

    def _next(self) -> dict[str, str]:
        # elsewhere it would need `-w`: it takes the location from the folder it starts in
        dev = {"dagster dev": "the UI from this folder, by its .env"}
        return {
            "fabric up": "services and the UI with this run",
            "fabric results generate --out x.parquet": "all rows of one function as a file",
            f"fabric receipt verify {self.receipt_id[:RECEIPT_SHOWN]}": "the index against its rows",
            "fabric status": "tasks by state, balance, processes",
            **(dev if Path("workspace.yaml").exists() else {}),
        }


def _sample_line(item: Mapping[str, str], width: int) -> str:
    """Prompt and reply on one line; of the prompt's share what it does not need goes to the reply."""
    tick = "✓" if item["passed"] == "True" else "✗"
    room = width - len(f"  {tick}  → ")
    prompt = screen.clip(_asked(item["prompt"]), max(room * 3 // 5, room - len(item["reply"])))
    return f"  {tick} {prompt} → {screen.clip(item['reply'], room - len(prompt))}"


def _asked(prompt: str) -> str:
    """The question without the instruction that every prompt ends with."""
    return prompt.removesuffix(INSTRUCTION)


def run(settings: Settings, *, progress: ProgressBoard) -> QuickstartReport:
    """Raises a FabricError of what went wrong; on Ctrl-C Interrupted, which says what is kept."""
    with _environment(settings), _interruptible(settings):
        ensure_dagster_home(settings)  # first: a home that takes no file is no reason to download
        pull_s = _pull_models(settings, progress)
        started_s = time.monotonic()
        _write_env_file(settings, progress)
        prepared = _prepare(settings)
        with (
            _standing(settings),
            _alone(settings),
            _services(settings, progress),
            _instance(settings) as instance,
        ):
            _end_dead_runs(instance, progress)
            before = _settled(settings, prepared)
            with _watched(settings, prepared, progress):
                run_id = _materialise(instance)
            return _report(settings, instance, prepared, run_id, before, started_s, pull_s)


@contextmanager
def _alone(settings: Settings) -> Iterator[None]:
    """One quickstart at a time in a home: the end of one would stop the services under another."""
    try:
        make_runtime_folder(settings.runtime_dir)
        lock = (settings.runtime_dir / "quickstart.lock").open("a")
    except OSError as fault:
        raise storage_failed(fault) from fault
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as fault:
            raise AlreadyRunning(
                f"another quickstart is at work in {settings.home}: wait for its end, or give this one a "
                "home of its own with FABRIC_HOME"
            ) from fault
        yield


@contextmanager
def _standing(settings: Settings) -> Iterator[None]:
    """Whatever fails in a home that was deleted meanwhile failed for that."""
    try:
        yield
    except Exception as fault:
        if settings.home.exists():
            raise
        raise StorageFailed(
            f"{settings.home} was deleted while quickstart ran, so it and its services were stopped: run "
            "`fabric quickstart` again for a new one"
        ) from fault


@contextmanager
def _interruptible(settings: Settings) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError) as fault:
        raise Interrupted(
            f"stopped; what was submitted and landed is kept in {settings.home}: "
            "run `fabric quickstart` again and it goes on where it was"
        ) from fault


def _instance(settings: Settings) -> dg.DagsterInstance:
    """The persistent instance, without capture of what steps print: it would put `tail` between our bars and
    the terminal, and its helper processes answer a Ctrl-C with tracebacks."""
    silent = {
        "module": "dagster._core.storage.noop_compute_log_manager",
        "class": "NoOpComputeLogManager",
    }
    ref = InstanceRef.from_dir(str(settings.dagster_home), overrides={"compute_logs": silent})
    return dg.DagsterInstance.from_ref(ref)


def _write_env_file(settings: Settings, progress: ProgressBoard) -> None:
    """A convenience for `dagster dev`: a working folder that takes no file is no reason to stop."""
    try:
        write_env_file(settings, Path.cwd())
    except StorageFailed as fault:
        progress.say(f"{fault}, if you want to run `dagster dev` here")


@contextmanager
def _environment(settings: Settings) -> Iterator[None]:
    """Settings as variables while it lasts: resources load theirs from the environment, in this process and in
    its children, so that a flag given to the command reaches all of them."""
    before = dict(os.environ)
    os.environ.update(settings.as_environment())
    os.environ["DAGSTER_HOME"] = str(settings.dagster_home)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _pull_models(settings: Settings, progress: ProgressBoard) -> float:
    started_s = time.monotonic()
    for name in sorted({engine_spec(item.engine).model for item in WORKLOADS.values()}):
        progress.say(f"model {name}")
        models.pull(name, settings.models, progress=progress)
    return time.monotonic() - started_s


@contextmanager
def _services(settings: Settings, progress: ProgressBoard) -> Iterator[None]:
    """Broker, workers, completion and Postgres: those that run, else started here and stopped at the end. So are those
    of a quickstart that was killed: this one holds the lock, so nobody else will."""
    found = supervise.state(settings)
    left = found.running and found.started_by == NAME
    if found.running and not left:
        progress.say("using the services that run already")
        _require_workers(settings)
        yield
        return
    if left:
        progress.say(
            "using the services that a killed quickstart left; they are stopped at the end"
        )
    else:
        progress.say("starting Postgres, broker, completion and three workers")
        # the twelve lines of what starts and runs are `fabric up`'s; here a failed one names itself
        supervise.up(
            settings,
            ui=False,
            engines=ENGINES,
            say=lambda line: None,
            on_wait=progress.say,
            started_by=NAME,
        )
    with CTRL_C.letting_go(lambda: supervise.let_go(settings)):
        try:
            if left:
                supervise.join(settings, on_wait=progress.say)
            yield
        finally:
            supervise.down(settings)


def _end_dead_runs(instance: dg.DagsterInstance, progress: ProgressBoard) -> None:
    """Runs that a killed quickstart left open, which would look busy for ever. What somebody started again from the UI
    has its tags, and a process of its own: the origin tells it."""
    records = instance.get_run_records(dg.RunsFilter(tags={BY_TAG: NAME}, statuses=UNENDED))
    dead = [item.dagster_run for item in records if item.dagster_run.remote_job_origin is None]
    for run in dead:
        if run.status in BEGUN:
            instance.report_run_failed(run, KILLED)
        else:
            instance.report_run_canceled(run, KILLED)
    if dead:
        runs = (
            "a run that a killed quickstart"
            if len(dead) == 1
            else f"{len(dead)} runs that killed quickstarts"
        )
        progress.say(f"ended {runs} left open")


def _require_workers(settings: Settings) -> None:
    """Somebody else's services may lack an engine; the run would wait for it without end."""
    with BrokerClient.of(settings, role="producer") as client:
        there = {str(consumer["engine"]) for consumer in client.status().consumers}
    if missing := [engine for engine in ENGINES if engine not in there]:
        raise UsageError(
            f"the running fabric has no worker for {', '.join(missing)}: start one with "
            "`fabric up --engine`, or run `fabric down` and quickstart again"
        )


def _prepare(settings: Settings) -> dict[str, Prepared]:
    """Every submission the run will make, by a name for its bar: ids are pure, so they are known beforehand."""
    worker = GpuWorkerResource(home=str(settings.home))
    return {
        " ".join(filter(None, (workload.name, partition))): _prepared(workload, partition, worker)
        for workload in WORKLOADS.values()
        for partition in workload.partitions
    }


def _prepared(workload: Workload, partition: str, worker: GpuWorkerResource) -> Prepared:
    engine: EngineChoice = worker.engine(workload.engine)
    return workload.prepare({}, engine, worker.tokeniser(workload.engine), partition)


@contextmanager
def _watched(
    settings: Settings, prepared: Mapping[str, Prepared], progress: ProgressBoard
) -> Iterator[None]:
    """A thread that turns broker state into bars, one a workload, in tokens."""
    done = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(settings, prepared, progress, done), name="quickstart-progress"
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch(
    settings: Settings,
    prepared: Mapping[str, Prepared],
    progress: ProgressBoard,
    done: threading.Event,
) -> None:
    by_bar: dict[str, list[Prepared]] = {}
    for item in prepared.values():
        by_bar.setdefault(item.submission.labels["workload"], []).append(item)
    for bar, items in by_bar.items():
        progress.add(bar, sum(item.tokens_max for item in items))
    last = False
    while not last:
        last = done.wait(POLL_S)
        try:
            with BrokerClient.of(settings, role="producer") as client:
                for bar, items in by_bar.items():
                    progress.advance_to(bar, sum(_tokens_done(client, item) for item in items))
        except FabricError as fault:
            # The run itself meets the same fault and reports it; a bar that stands still does no harm.
            progress.say(f"no progress to show: {fault}")


def _tokens_done(client: BrokerClient, prepared: Prepared) -> int:
    state = client.submission(prepared.submission.submission_id)
    if state is None:
        return 0
    return prepared.tokens_max if state.finished else state.retired_tokens + state.output_tokens


def _materialise(instance: dg.DagsterInstance) -> str:
    """All assets of the workloads and their checks in one run; the id of it. A failed step raises its own error."""
    # the bars say it already
    quiet = CompletionResource(
        broker=BrokerResource(), database=DatabaseResource(), say_every_s=0.0
    )
    defs = build_defs({"completion": quiet})
    # `current` is partitioned by shard, not by book, and follows what this run publishes
    wanted = sorted(defs.resolve_asset_graph().materializable_asset_keys - {upkeep.CURRENT_KEY})
    job = defs.resolve_implicit_global_asset_job_def()
    try:
        done = job.execute_in_process(
            instance=instance, asset_selection=wanted, tags=RUN_TAGS, run_config=QUIET
        )
        for request in upkeep.catch_up(instance, DatabaseResource()):
            job.execute_in_process(
                instance=instance,
                asset_selection=list(request.asset_selection or []),
                partition_key=request.partition_key,
                tags={**request.tags, BY_TAG: NAME},
                run_config=QUIET,
            )
    except dg.DagsterUserCodeExecutionError as fault:
        if isinstance(fault.__cause__, FabricError):
            raise fault.__cause__ from fault
        raise
    except dg.DagsterError as fault:
        if type(fault).__name__ != "DagsterAssetCheckFailedError":  # the class is not public
            raise
        raise CheckFailed(f"{fault} `fabric up` shows its numbers on the checks tab") from fault
    return done.run_id


def _report(
    settings: Settings,
    instance: dg.DagsterInstance,
    prepared: Mapping[str, Prepared],
    run_id: str,
    settled_before: int,
    started_s: float,
    pull_s: float,
) -> QuickstartReport:
    states, status = _broker_facts(settings, prepared)
    published = [
        lineage.require_latest(instance, lineage.results_key(name), partition)
        for name, workload in WORKLOADS.items()
        for partition in workload.partitions
    ]
    issued = lineage.require_latest(instance, RECEIPT_KEY)
    shard = lineage.require_latest(instance, SHARD_KEY)
    synthetic = lineage.require_latest(instance, lineage.results_key("synthetic"))
    probes = lineage.require_latest(instance, dg.AssetKey(["probes", "report"]))
    verdict = receipts.verify(Database.of(settings), settings.shards_dir, issued["receipt_id"])
    tokens_in = sum(int(item["tokens_in"]) for item in published)
    tokens_out = sum(int(item["tokens_out"]) for item in published)
    span_s = _span_s(published)
    return QuickstartReport(
        tasks=sum(state.tasks for state in states),
        tasks_ran=sum(state.retired + state.dead for state in states) - settled_before,
        retired=sum(state.retired for state in states),
        dead=sum(state.dead for state in states),
        balance=status.total.balance.tasks,
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        rows_landed=sum(int(item["dagster/row_count"]) for item in published),
        vectors=int(shard["dagster/row_count"]),
        receipt_id=str(issued["receipt_id"]),
        receipt_ok=verdict.ok,
        recall_at_10=float(issued[f"recall_at_{RECALL_AT}"]),
        seconds=time.monotonic() - started_s,
        tokens_per_s=(tokens_in + tokens_out) / span_s if span_s else 0.0,
        padding_waste=_padding_waste(status, tokens_out),
        model_pull_seconds=pull_s,
        verifier_pass_rate=float(synthetic["verifier_pass_rate"]),
        probe_accuracy=float(probes["best_accuracy"]),
        samples=_samples(settings, synthetic),
        paths={
            "tables": "fabric.generate, fabric.embed, fabric.hidden_states",
            "parquet": settings.lake_url,
            "index": str(shard["dagster/uri"]),
            "runs, logs": f"{settings.dagster_home}, {settings.log_dir}",
        },
        run_id=run_id,
    )


def _settled(settings: Settings, prepared: Mapping[str, Prepared]) -> int:
    """Tasks of this quickstart that are retired or dead by now."""
    states, _ = _broker_facts(settings, prepared)
    return sum(state.retired + state.dead for state in states)


def _broker_facts(
    settings: Settings, prepared: Mapping[str, Prepared]
) -> tuple[list[SubmissionState], BrokerStatus]:
    with BrokerClient.of(settings, role="producer") as client:
        states = [client.submission(item.submission.submission_id) for item in prepared.values()]
        return [state for state in states if state is not None], client.status()


def _span_s(published: Sequence[Mapping[str, Any]]) -> float:
    """Seconds in which tasks of any workload ran: the union of their spans, since a run that finds half of its
    work done earlier must not count the time between."""
    covered = until = 0
    for first, last in sorted(
        (int(item["first_start_us"]), int(item["last_end_us"])) for item in published
    ):
        covered += max(0, last - max(first, until))
        until = max(until, last)
    return covered / 1e6


def _samples(settings: Settings, synthetic: Mapping[str, Any]) -> list[dict[str, str]]:
    table = Lake.of(settings).read_table(str(synthetic["dagster/uri"]))
    columns = ["generator", "prompt", "reply", "answer", "passed"]
    return [
        {name: str(value) for name, value in record.items()}
        for record in table.select(columns).slice(0, SAMPLES).to_pylist()
    ]


def _padding_waste(status: BrokerStatus, tokens_out: int) -> float:
    """From what engines reported: padding over padding and tokens of everything retired in this journal."""
    padding = status.counters["computed_padded_tokens"]
    return padding / max(padding + status.total.retired.tokens + tokens_out, 1)
