"""What runs by itself: one sensor that fetches finished work, one schedule that submits the day's.

The sensor is level-triggered: each tick compares what was submitted with what was published, so a tick that
is missed, or a run that failed, costs nothing but time. It sets no run key: Dagster keeps those for ever, and
a failed run would never be asked for again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import dagster as dg

from assets.flow import PARTITIONS_PER_RUN_MAX
from assets.lineage import latest, latest_submission, results_key, submission_key
from fabric_pipelines.errors import BrokerUnavailable
from fabric_pipelines.workloads.catalogue import WORKLOADS, Workload
from fabric_pipelines.workloads.request import WHOLE
from resources.broker import BrokerResource

RESULTS_TAG = "fabric/results"
RANGE_START, RANGE_END = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"
IN_FLIGHT = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)

with_results = dg.AssetSelection.assets(*(results_key(name) for name in WORKLOADS)).downstream()


@dg.sensor(
    target=with_results,
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Requests the results of every submission whose last task is retired, and what follows them.",
)
def finished_submissions(
    context: dg.SensorEvaluationContext, broker: BrokerResource
) -> Iterator[dg.RunRequest | dg.SkipReason]:
    try:
        due = {name: _due(context.instance, broker, item) for name, item in WORKLOADS.items()}
    except BrokerUnavailable as fault:
        yield dg.SkipReason(str(fault))
        return
    if not any(due.values()):
        yield dg.SkipReason("nothing submitted has finished since its results were published")
    for name, partitions in due.items():
        for run in contiguous(partitions, WORKLOADS[name].partitions):
            yield _request(context, name, run)


def _due(instance: dg.DagsterInstance, broker: BrokerResource, workload: Workload) -> list[str]:
    """Partitions that are finished in the broker and not published, unless a run is on them."""
    in_flight = instance.get_run_records(
        dg.RunsFilter(tags={RESULTS_TAG: workload.name}, statuses=list(IN_FLIGHT)), limit=1
    )
    if in_flight:
        return []
    due = []
    for partition in workload.partitions:
        ref = latest_submission(instance, workload.name, partition)
        if ref is None:
            continue
        published = latest(instance, results_key(workload.name), partition)
        if published is not None and published["submission_id"] == ref.submission_id:
            continue
        state = broker.submission(ref.submission_id)
        if state is not None and state.finished and not state.abandoned:
            due.append(partition)
    return due


def contiguous(partitions: Sequence[str], order: Sequence[str]) -> list[list[str]]:
    """`partitions` cut into ranges of neighbours in `order`: one run takes one range."""
    runs: list[list[str]] = []
    last = None
    for at, name in enumerate(order):
        if name not in partitions:
            continue
        if last is not None and at == last + 1 and len(runs[-1]) < PARTITIONS_PER_RUN_MAX:
            runs[-1].append(name)
        else:
            runs.append([name])
        last = at
    return runs


def _request(
    context: dg.SensorEvaluationContext, workload: str, partitions: Sequence[str]
) -> dg.RunRequest:
    assert context.repository_def is not None
    graph = context.repository_def.asset_graph
    wanted = dg.AssetSelection.assets(results_key(workload)).downstream().resolve(graph)
    tags = {RESULTS_TAG: workload}
    if list(partitions) != [WHOLE]:
        tags |= {RANGE_START: partitions[0], RANGE_END: partitions[-1]}
    return dg.RunRequest(asset_selection=sorted(wanted), tags=tags)


nightly_submissions = dg.ScheduleDefinition(
    name="nightly_submissions",
    cron_schedule="0 2 * * *",
    target=dg.AssetSelection.assets(
        *(submission_key(name) for name, item in WORKLOADS.items() if item.partitions == (WHOLE,))
    ),
    default_status=dg.DefaultScheduleStatus.STOPPED,
    description="Submits every workload that has no partitions; what is unchanged is not submitted again.",
)
