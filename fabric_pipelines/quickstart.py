"""`fabric quickstart`: the whole loop once, on this machine, and what came of it on one screen.

Models, then services (only if none run; what it started it stops), then one Dagster run on the persistent
instance that submits every workload before it waits for any, then the receipt verified once more from
outside. Running it again submits nothing twice: ids follow from content, so the broker already has all of it.

Sizes: 48 generations of at most 32 tokens, 160 probe statements, 48 verses for hidden states (6 of each of 8
books), 800 verses for embeddings. They are the defaults of the workloads' requests, so the same run is what
the UI offers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.instance.ref import InstanceRef

from assets import lineage
from assets.automation import RANGE_END, RANGE_START
from assets.flow import WAIT_TAG
from assets.indexes import RECALL_AT, RECEIPT_KEY, SHARD_KEY
from fabric_pipelines import models, receipts, supervise
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.broker.replies import BrokerStatus, SubmissionState
from fabric_pipelines.dagster_home import ensure_dagster_home, write_env_file
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.lake import Lake
from fabric_pipelines.definitions import build_defs
from fabric_pipelines.errors import CheckFailed, FabricError, Interrupted, StorageFailed, UsageError
from fabric_pipelines.settings import Settings
from fabric_pipelines.telemetry import ProgressBoard
from fabric_pipelines.worker.engines.registry import engine_spec
from fabric_pipelines.workloads.catalogue import WORKLOADS, Workload
from fabric_pipelines.workloads.corpus import BOOKS
from fabric_pipelines.workloads.request import EngineChoice, Prepared
from resources.broker import BrokerResource
from resources.completion import CompletionResource
from resources.database import DatabaseResource
from resources.gpu_worker import GpuWorkerResource

POLL_S = 0.5
SAMPLES = 10
ENGINES = tuple(dict.fromkeys(workload.engine for workload in WORKLOADS.values()))
RUN_TAGS = {
    WAIT_TAG: "true",
    RANGE_START: BOOKS[0],
    RANGE_END: BOOKS[-1],
    "fabric/run": "quickstart",
}


@dataclass(frozen=True, slots=True)
class QuickstartReport:
    """What happened. tokens_per_s: of retired tasks, prompt and output together, over the time in which tasks
    ran; padding_waste: share of padding among all tokens that the engines computed on;
    seconds: wall time without model_pull_seconds."""

    tasks: int
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

    def summary(self) -> str:
        """One screen."""
        verdict = "verified" if self.receipt_ok else "DOES NOT VERIFY"
        lines = [
            f"tasks      {self.retired:,} of {self.tasks:,} retired, {self.dead} dead, balance {self.balance}",
            f"tokens     {self.tokens_in:,} in, {self.tokens_out:,} out, {self.tokens_per_s:,.0f} a second, "
            f"padding waste {self.padding_waste:.1%}",
            f"landed     {self.rows_landed:,} rows; {self.vectors:,} vectors, recall@10 {self.recall_at_10:.3f}",
            f"quality    verifiers pass {self.verifier_pass_rate:.0%} of the puzzles; "
            f"the best probe is right on {self.probe_accuracy:.0%} of held-out statements",
            f"receipt    {self.receipt_id[:16]} {verdict}",
            f"time       {self.seconds:.0f} s, and {self.model_pull_seconds:.0f} s for models",
            "",
            *(f"{name:<10} {place}" for name, place in self.paths.items()),
            "",
            "Some of what the model said:",
            *(f"  {_short(item['prompt'])} -> {_short(item['reply'])}" for item in self.samples),
            "",
            "next       fabric up            the Dagster UI with this run in it",
            "           fabric results generate --out generations.parquet",
            f"           fabric receipt verify {self.receipt_id[:16]}",
        ]
        return "\n".join(lines)


def run(settings: Settings, *, progress: ProgressBoard) -> QuickstartReport:
    """Raises a FabricError of what went wrong; on Ctrl-C Interrupted, which says what is kept."""
    with _environment(settings), _interruptible(settings):
        ensure_dagster_home(settings)  # first: a home that takes no file is no reason to download
        pull_s = _pull_models(settings, progress)
        started_s = time.monotonic()
        _write_env_file(settings, progress)
        prepared = _prepare(settings)
        with (
            _services(settings, progress),
            _instance(settings) as instance,
        ):
            with _watched(settings, prepared, progress):
                run_id = _materialise(instance)
            return _report(settings, instance, prepared, run_id, started_s, pull_s)


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
    """Broker, workers, completion and Postgres: those that run, else started here and stopped at the end."""
    if supervise.state(settings).running:
        progress.say("using the services that run already")
        _require_workers(settings)
        yield
        return
    progress.say("starting Postgres, broker, completion and three workers")
    supervise.up(settings, ui=False, engines=ENGINES, say=progress.say)
    try:
        yield
    finally:
        supervise.down(settings)


def _require_workers(settings: Settings) -> None:
    """Somebody else's services may lack an engine; the run would wait for it without end."""
    with BrokerClient(settings.broker_endpoint, role="producer") as client:
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
            with BrokerClient(settings.broker_endpoint, role="producer") as client:
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
    """All assets and checks in one run; the id of it. A failed step raises its own error."""
    # the bars say it already
    quiet = CompletionResource(
        broker=BrokerResource(), database=DatabaseResource(), say_every_s=0.0
    )
    job = build_defs({"completion": quiet}).resolve_implicit_global_asset_job_def()
    try:
        done = job.execute_in_process(
            instance=instance,
            tags=RUN_TAGS,
            run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
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
            "results": f"{settings.lake_url} (Parquet)",
            "tables": "fabric.generate, fabric.embed, fabric.hidden_states (`fabric db url`)",
            "shard": str(shard["dagster/uri"]),
            "dagster": str(settings.dagster_home),
        },
        run_id=run_id,
    )


def _broker_facts(
    settings: Settings, prepared: Mapping[str, Prepared]
) -> tuple[list[SubmissionState], BrokerStatus]:
    with BrokerClient(settings.broker_endpoint, role="producer") as client:
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


def _short(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _padding_waste(status: BrokerStatus, tokens_out: int) -> float:
    """From what engines reported: padding over padding and tokens of everything retired in this journal."""
    padding = status.counters["computed_padded_tokens"]
    return padding / max(padding + status.total.retired.tokens + tokens_out, 1)
