"""The two graphs every workload has: tokenise -> submit, and await -> publish.

`submission` ends when the broker has the work on disk. `results` starts from the id that `submission`
recorded. If the work is not finished, it publishes nothing and its run ends green with the asset skipped;
the sensor asks again once the last task is retired. A run tagged fabric/wait=true waits instead.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import dagster as dg
import pyarrow as pa

from assets.lineage import (
    SubmissionRef,
    latest_submission,
    results_key,
    submission_key,
)
from assets.metadata import Metadata, Published, of_results, of_submission
from fabric_pipelines.broker.replies import SubmissionState
from fabric_pipelines.errors import UsageError
from fabric_pipelines.given import value_of
from fabric_pipelines.workloads.catalogue import Workload
from fabric_pipelines.workloads.request import WHOLE, Prepared
from resources.broker import BrokerResource
from resources.completion import CompletionResource
from resources.gpu_worker import GpuWorkerResource
from resources.lake import LakeResource

WAIT_TAG = "fabric/wait"
PARTITIONS_PER_RUN_MAX = 64
INTERMEDIATES = "intermediates"
PRIORITY = "dagster/priority"
SUBMIT_FIRST = 10  # within one run everything is submitted before anything waits

Describe = Callable[[Mapping[str, Any], pa.Table], Metadata]


def submission_asset(
    workload: Workload,
    *,
    description: str,
    partitions_def: dg.PartitionsDefinition[str] | None = None,
) -> dg.AssetsDefinition:
    @dg.op(
        name=f"tokenise_{workload.name}",
        config_schema=request_schema(workload.request),
        out=dg.Out(io_manager_key=INTERMEDIATES, dagster_type=dg.Any),
        tags={PRIORITY: str(SUBMIT_FIRST)},
    )
    def tokenise(context: dg.OpExecutionContext, gpu_worker: GpuWorkerResource) -> Any:
        engine = gpu_worker.engine(workload.engine)
        tokeniser = gpu_worker.tokeniser(workload.engine)
        return {
            partition: workload.prepare(context.op_config, engine, tokeniser, partition).to_table()
            for partition in _partitions(context, partitions_def)
        }

    @dg.op(
        name=f"submit_{workload.name}",
        ins={"tasks": dg.In(dg.Any)},
        tags={PRIORITY: str(SUBMIT_FIRST)},
    )
    def submit(
        context: dg.AssetExecutionContext, broker: BrokerResource, tasks: Any
    ) -> dg.MaterializeResult:
        metadata = {}
        for partition, table in tasks.items():
            prepared = Prepared.from_table(table)
            metadata[partition] = of_submission(prepared, broker.submit(prepared))
        return _materialised(context, metadata, "fingerprint")

    @dg.graph_asset(
        key=submission_key(workload.name),
        description=description,
        partitions_def=partitions_def,
        backfill_policy=_backfill(partitions_def),
        code_version=workload.code_version,
    )
    def submission() -> dg.MaterializeResult:
        found: dg.MaterializeResult = submit(tokenise())
        return found

    return submission


def results_asset(
    workload: Workload,
    *,
    description: str,
    describe: Describe,
    partitions_def: dg.PartitionsDefinition[str] | None = None,
    await_priority: int = 0,
) -> dg.AssetsDefinition:
    """`describe` adds the workload's own metadata. Of several results in one run the one with the highest
    `await_priority` is waited for first."""

    @dg.op(
        name=f"await_{workload.name}",
        ins={"submission": dg.In(dg.Nothing)},
        out=dg.Out(is_required=False, io_manager_key=INTERMEDIATES, dagster_type=dg.Any),
        tags={PRIORITY: str(await_priority)},
    )
    def await_finished(
        context: dg.OpExecutionContext, completion: CompletionResource
    ) -> Iterator[dg.Output[Any]]:
        wait = context.run.tags.get(WAIT_TAG) == "true"
        finished = {}
        for partition in _partitions(context, partitions_def):
            ref = _require_submission(context.instance, workload, partition)
            state = _finished(completion, ref, wait)
            if state is None:
                context.log.info(
                    f"{workload.name} {partition} is not finished; the sensor asks again when it is"
                )
                return
            finished[partition] = {"state": asdict(state), "request": dict(ref.request)}
        yield dg.Output(finished)

    @dg.op(
        name=f"publish_{workload.name}",
        ins={"finished": dg.In(dg.Any)},
        tags={PRIORITY: str(await_priority)},
    )
    def publish(
        context: dg.AssetExecutionContext,
        completion: CompletionResource,
        lake: LakeResource,
        finished: Any,
    ) -> dg.MaterializeResult:
        metadata = {}
        for partition, entry in finished.items():
            state = value_of(
                SubmissionState, entry["state"], f"what the await of {partition} left", what="submission",
                remedy="run that step again",
            )  # fmt: skip
            landed = completion.landed(workload.function, state.submission_id)
            table = workload.results(entry["request"], landed)
            artifact = lake.put(_artifact_name(workload.name, partition), table)
            metadata[partition] = {
                **describe(entry["request"], table),  # first: what a reader came for
                **of_results(Published(state, landed, table, artifact)),
            }
        return _materialised(context, metadata, "sha256")

    @dg.graph_asset(
        key=results_key(workload.name),
        description=description,
        ins={"submission": dg.AssetIn(key=submission_key(workload.name), dagster_type=dg.Nothing)},
        partitions_def=partitions_def,
        backfill_policy=_backfill(partitions_def),
        code_version=workload.code_version,
    )
    def results(submission: Any) -> dg.MaterializeResult:
        found: dg.MaterializeResult = publish(await_finished(submission))
        return found

    return results


def request_schema(request: type) -> dict[str, dg.Field]:
    """The launchpad's form of a request dataclass: its fields, types and defaults, stated once there."""
    defaults = request()
    scalar = {str: dg.String, int: dg.Int, float: dg.Float}
    schema = {}
    for item in fields(request):
        value = getattr(defaults, item.name)
        if isinstance(value, tuple):
            kind: Any = dg.Array(scalar[type(value[0])])
            schema[item.name] = dg.Field(kind, default_value=list(value), is_required=False)
        else:
            kind = scalar[type(value)]
            schema[item.name] = dg.Field(kind, default_value=value, is_required=False)
    return schema


def _backfill(partitions_def: dg.PartitionsDefinition[str] | None) -> dg.BackfillPolicy | None:
    return dg.BackfillPolicy.multi_run(PARTITIONS_PER_RUN_MAX) if partitions_def else None


def _partitions(
    context: dg.OpExecutionContext, partitions_def: dg.PartitionsDefinition[str] | None
) -> Sequence[str]:
    return list(context.partition_keys) if partitions_def else [WHOLE]


def _require_submission(
    instance: dg.DagsterInstance, workload: Workload, partition: str
) -> SubmissionRef:
    ref = latest_submission(instance, workload.name, partition)
    if ref is None:
        raise UsageError(
            f"nothing was submitted for {workload.name} {partition}; "
            f"materialise {submission_key(workload.name).to_user_string()} first"
        )
    return ref


def _finished(
    completion: CompletionResource, ref: SubmissionRef, wait: bool
) -> SubmissionState | None:
    """The state once every task is retired or dead, else None; `wait` waits for it."""
    state = completion.state(ref.submission_id)
    if state is None:
        raise UsageError(
            f"the broker does not know submission {ref.submission_id[:12]}; "
            "its journal is another one than when it was submitted: materialise the submission again"
        )
    if wait and not state.finished:
        state = completion.wait(ref.submission_id, _progress_line(completion.say_every_s))
    if state.abandoned:
        raise UsageError(
            f"submission {ref.submission_id[:12]} was abandoned with {state.enqueued} of its {state.tasks} tasks: "
            "materialise it again with another salt"
        )
    return state if state.finished else None


def _progress_line(every_s: float) -> Callable[[SubmissionState], None]:
    """Progress to the step's stderr, which Dagster keeps: each context.log line would be a row in the event log."""
    said_s = time.monotonic()

    def say(state: SubmissionState) -> None:
        nonlocal said_s
        if every_s and time.monotonic() - said_s >= every_s:
            said_s = time.monotonic()
            sys.stderr.write(
                f"{state.function} {state.submission_id[:12]}: "
                f"{state.retired:,} of {state.tasks:,} tasks retired\n"
            )
            sys.stderr.flush()

    return say


def _artifact_name(workload: str, partition: str) -> str:
    return f"{workload}/{partition.replace(' ', '_') or 'all'}.parquet"


def _materialised(
    context: dg.AssetExecutionContext, metadata: Mapping[str, Metadata], version: str
) -> dg.MaterializeResult:
    """One result for the run; with partitions each gets its own metadata. One run can carry only one data
    version for all of its partitions, so only a single one gets the content's."""
    only = next(iter(metadata.values())) if len(metadata) == 1 else None
    data_version = dg.DataVersion(str(only[version])) if only else None
    if list(metadata) == [WHOLE]:
        return dg.MaterializeResult(metadata=only, data_version=data_version)
    for partition, found in metadata.items():
        context.add_asset_metadata(found, partition_key=partition)
    return dg.MaterializeResult(data_version=data_version)
