"""Shards kept up to date with their rows: what the database says moved, and the generation that follows it.

source -> current, one partition a published shard, 1:1. `source` is observed, never made: its data version
changes only when the database's verdict does, so that lineage shows why a shard is stale and the event log
does not fill. `current` lays over a shard what moved; where nothing did, it tells lineage which generation is
published. The sensor `moved_shards` is level-triggered: it compares what the database says now with what was
built and with what lineage last heard, so a tick that is missed or a run that failed is made good.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from assets.automation import IN_FLIGHT
from assets.lineage import latest_events
from fabric_pipelines import receipts
from fabric_pipelines import shards as library
from fabric_pipelines.dataplane.staleness import Staleness
from fabric_pipelines.errors import AlreadyRunning, DatabaseUnavailable, FencingLost, UsageError
from resources.database import DatabaseResource
from resources.shards import ShardsResource

SOURCE_KEY = dg.AssetKey(["indexes", "source"])
CURRENT_KEY = dg.AssetKey(["indexes", "current"])
REFRESH_TAG, HEAD_TAG = "fabric/refresh", "fabric/head"
TOLD = 5  # shards that a skipped tick tells of, each with its reason
FIRST_WAIT_S, FAILURES_COUNTED = 60.0, 7  # after seven failures of the same thing: an hour
VERSION_TAG = "dagster/data_version"
REPORT_TAG = "fabric/report"  # says what is published, and leaves what moved to the policy
LEFT, LOOK_AGAIN_S = "left_by_refresh", 86_400.0  # what nobody watches is compared once a day
WHY = {"none": "it is the published one", "increment": "what moved was laid over it"}
shard_names = dg.DynamicPartitionsDefinition(name="shards")


def observed_versions(instance: dg.DagsterInstance) -> dict[str, str]:
    """The data version that `source` was last seen with, by shard."""
    found = latest_events(instance, SOURCE_KEY, dg.DagsterEventType.ASSET_OBSERVATION)
    tags = {shard: event.tags or {} for shard, event in found.items()}
    return {shard: given[VERSION_TAG] for shard, given in tags.items() if VERSION_TAG in given}


def changed_versions(
    instance: dg.DagsterInstance, found: Sequence[Staleness]
) -> dict[str, dg.DataVersion]:
    """Data versions of the shards whose verdict is another than when they were last observed.

    A fresh shard keeps the version that its generation was made from: to change it then would call a
    shard stale because it was brought up to date."""
    versions, known = {}, observed_versions(instance)
    for item in found:
        seen = known.get(item.shard)
        wanted = f"{item.generation}-{item.verdict}"
        if seen is None or (item.verdict != "fresh" and seen != wanted):
            versions[item.shard] = dg.DataVersion(wanted)
    return versions


@dg.observable_source_asset(
    key=SOURCE_KEY,
    partitions_def=shard_names,
    group_name="indexes",
    tags={"fabric/workload": "indexes", "dagster/kind/postgres": ""},
    description="Rows that a shard is made of, as the database judges them: a new version when they turn stale.",
)
def source(
    context: dg.OpExecutionContext, database: DatabaseResource
) -> dg.DataVersionsByPartition:
    known = set(context.instance.get_dynamic_partitions("shards"))
    found = [item for item in database.staleness() if item.shard in known]
    return dg.DataVersionsByPartition(changed_versions(context.instance, found))


@dg.op(ins={"source": dg.In(dg.Nothing)})
def refresh_shard(
    context: dg.AssetExecutionContext, database: DatabaseResource, shards: ShardsResource
) -> dg.MaterializeResult:
    name = context.partition_key
    before = database.staleness(name)
    if REPORT_TAG in context.run.tags:
        done = library.Refreshed(
            library.open_generation(database.of(), shards.root, name), "none", "", 0, 0
        )
    else:
        done = library.refresh(database.of(), shards.root, name)
    manifest = done.generation.manifest
    # who published a generation that stands gives it its receipt
    receipt = (
        receipts.issue(database.of(), shards.root, name).receipt_id if done.how != "none" else None
    )
    return dg.MaterializeResult(
        metadata={
            "shard": name,
            **pruned(database, shards, name),
            **left(before, database.staleness(name)),
            "generation": done.generation.number,
            "how": done.how,
            "why": done.why or WHY[done.how],
            "rows_moved": done.moved,
            "bytes_written": done.written,
            "files_linked": done.generation.linked,
            "content_hash": manifest.source["content_hash"],
            "manifest_sha256": done.generation.manifest_sha256,
            "dagster/uri": str(done.generation.folder),
            "dagster/row_count": manifest.rows,
            **({"receipt_id": receipt} if receipt else {}),
        },
        data_version=dg.DataVersion(done.generation.manifest_sha256),
    )


def left(before: Sequence[Staleness], after: Sequence[Staleness]) -> dict[str, Any]:
    """What the refresh between the two did not settle, so that the next one would not either (a bound on recall out of
    reach, rows that nobody may watch): for the sensor in a word, for the reader in a sentence."""
    for then, now in zip(before, after, strict=False):
        if now.beyond_refresh and now.beyond_refresh == then.beyond_refresh:
            return {LEFT: now.beyond_refresh, "still_stale": now.why, "looked_at_s": now_s()}
    return {}


def pruned(database: DatabaseResource, shards: ShardsResource, name: str) -> dict[str, Any]:
    """Old generations go after each new one; while somebody builds the next one, they go after that."""
    try:
        done = library.prune(database.of(), shards.root, name, keep=shards.kept)
    except (AlreadyRunning, FencingLost) as fault:
        return {"generations_pruned": 0, "prune_waits": str(fault)}
    return {"generations_pruned": len(done.pruned), "bytes_freed": done.bytes_freed}


@dg.graph_asset(
    key=CURRENT_KEY,
    ins={"source": dg.AssetIn(key=SOURCE_KEY, dagster_type=dg.Nothing)},
    partitions_def=shard_names,
    code_version="1",
    description="The current generation of a shard: what moved is laid over it, or it is built anew by rule.",
)
def current(source: Any) -> Any:
    return refresh_shard(source)


def observations(
    instance: dg.DagsterInstance, found: Sequence[Staleness]
) -> list[dg.AssetObservation]:
    """Verdicts that lineage has not heard."""
    why = {item.shard: item.why for item in found}
    return [
        dg.AssetObservation(
            SOURCE_KEY,
            partition=shard,
            tags={VERSION_TAG: version.value},
            metadata={"why": why[shard]} if why[shard] else {},
        )
        for shard, version in changed_versions(instance, found).items()
    ]


def heard(instance: dg.DagsterInstance) -> dict[str, dict[str, Any]]:
    """What lineage last heard of each shard: its generation, and what its refresh left."""
    found = latest_events(instance, CURRENT_KEY, dg.DagsterEventType.ASSET_MATERIALIZATION)
    return {
        shard: {name: item.value for name, item in event.metadata.items()}
        for shard, event in found.items()
    }


def request(item: Staleness) -> dg.RunRequest:
    """A run of `current` for a shard that is due, or one that only reports which generation is published."""
    # No run key: Dagster keeps those for ever, and a failed refresh would never be asked for again.
    return dg.RunRequest(
        asset_selection=[CURRENT_KEY],
        partition_key=item.shard,
        tags={
            REFRESH_TAG: item.shard,
            HEAD_TAG: _head(item),
            "fabric/verdict": item.verdict,
            **({} if item.due else {REPORT_TAG: str(item.generation)}),
        },
    )


@dg.sensor(
    target=dg.AssetSelection.assets(CURRENT_KEY),
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Requests a refresh of exactly the shards that the database calls stale, and shows the verdict; a "
    "generation that lineage has not heard of is reported the same way.",
)
def moved_shards(
    context: dg.SensorEvaluationContext, database: DatabaseResource
) -> dg.SensorResult | dg.SkipReason:
    try:
        found = database.staleness()
    except (DatabaseUnavailable, UsageError) as fault:  # away, or without a schema so far
        return dg.SkipReason(str(fault))
    instance = context.instance
    new = _new(instance, found)
    # a partition has runs once it is there
    known = [item for item in found if item.shard not in new]
    last = heard(instance)
    wanted = _wanted(instance, known, last)
    return dg.SensorResult(
        run_requests=wanted,
        skip_reason=None if wanted else dg.SkipReason(_why_none(found, new, last)),
        asset_events=observations(instance, found),
        dynamic_partitions_requests=[shard_names.build_add_request(new)] if new else [],
    )


def _why_none(
    found: Sequence[Staleness], new: Sequence[str], last: Mapping[str, Mapping[str, Any]]
) -> str:
    """Why no run is asked for, in counts; of what a refresh does not settle, what to do."""
    if not found:
        return "no shard is published yet"
    stuck = [item for item in found if _settled(item, last.get(item.shard, {}))]
    names = {*new, *(item.shard for item in stuck)}
    held = sum(item.due for item in found if item.shard not in names)
    parts = [
        f"{len(found)} shard{'s' * (len(found) > 1)}",
        f"{held} moved and in a run, or waiting after one that failed" if held else "",
        "" if held or stuck else "none moved",
        f"{len(stuck)} stale as a refresh left it" if stuck else "",
        f"{len(new)} new, looked at by the next tick" if new else "",
    ]
    told = [f"{item.shard}: {item.why}" for item in stuck[:TOLD]]
    return ". ".join([", ".join(filter(None, parts)), *told])


def catch_up(instance: dg.DagsterInstance, database: DatabaseResource) -> list[dg.RunRequest]:
    """What a tick of `moved_shards` does, done at once and without a daemon; the runs are left to the caller."""
    found = database.staleness()
    instance.add_dynamic_partitions("shards", _new(instance, found))
    for event in observations(instance, found):
        instance.report_runless_asset_event(event)
    return _wanted(instance, found, heard(instance))


def _new(instance: dg.DagsterInstance, found: Sequence[Staleness]) -> list[str]:
    return sorted({item.shard for item in found} - set(instance.get_dynamic_partitions("shards")))


def _wanted(
    instance: dg.DagsterInstance,
    found: Sequence[Staleness],
    last: Mapping[str, Mapping[str, Any]],
) -> list[dg.RunRequest]:
    """Of shards that are due, or whose published generation lineage does not know (the first, or one that a
    command published)."""
    due = [
        item
        for item in found
        if last.get(item.shard, {}).get("generation") != item.generation
        or (item.due and not _settled(item, last[item.shard]))
    ]
    held = _held(instance, due)
    return [request(item) for item in due if item.shard not in held]


def _settled(item: Staleness, last: Mapping[str, Any]) -> bool:
    """Whether the last refresh made this very generation, or left it, and with it this very verdict: another would do
    the same until rows, bound or generation change. What nobody watches can change unseen: after a day it is due again."""
    if last.get("generation") != item.generation or last.get(LEFT) != item.beyond_refresh:
        return False
    return item.verdict != "audit" or now_s() - last["looked_at_s"] < LOOK_AGAIN_S


def _held(instance: dg.DagsterInstance, due: Sequence[Staleness]) -> set[str]:
    """Shards that a run is on, or whose last one on the same state of things failed a short while ago: each failure
    doubles the wait, so that what cannot be built (an emptied source) does not fill the event log, and what could
    not be built for a while is tried again."""
    if not due:
        return set()
    heads = {item.shard: _head(item) for item in due}
    running = instance.get_run_records(
        dg.RunsFilter(tags={REFRESH_TAG: list(heads)}, statuses=list(IN_FLIGHT))
    )
    held = {record.dagster_run.tags[REFRESH_TAG] for record in running}
    failed = instance.get_run_records(
        dg.RunsFilter(
            tags={REFRESH_TAG: list(heads), HEAD_TAG: sorted(set(heads.values()))},
            statuses=[dg.DagsterRunStatus.FAILURE],
        ),
        # newest first; who failed seven times fails once an hour, so the recent ones of all fit
        limit=FAILURES_COUNTED * len(heads),
    )
    failed_s: dict[str, list[float]] = {}
    for record in failed:
        shard = record.dagster_run.tags[REFRESH_TAG]
        if record.dagster_run.tags[HEAD_TAG] == heads[shard]:
            failed_s.setdefault(shard, []).append(record.update_timestamp.timestamp())
    now = now_s()
    for shard, times in failed_s.items():
        if now - times[0] < FIRST_WAIT_S * 2 ** (min(len(times), FAILURES_COUNTED) - 1):
            held.add(shard)
    return held


def _head(item: Staleness) -> str:
    """What the verdict is about: another change makes another head."""
    changed = item.last_change_at
    return f"{item.generation}-{item.verdict}-{changed.isoformat() if changed else 'never'}"


def now_s() -> float:
    return time.time()


assets: list[dg.AssetsDefinition | dg.SourceAsset] = [source, current]
