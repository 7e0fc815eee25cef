"""What the Dagster instance remembers about an asset: the metadata of its latest materialisation.

Assets, checks and the sensor hand facts to each other this way, across runs: a submission's id, a table's
address, a shard's generation. The event log is the record, so nothing else has to be kept in step with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg

from fabric_pipelines.errors import UsageError
from fabric_pipelines.workloads.request import WHOLE

PAGE = 1000  # records that Dagster gives at once


def submission_key(workload: str) -> dg.AssetKey:
    return dg.AssetKey([workload, "submission"])


def results_key(workload: str) -> dg.AssetKey:
    return dg.AssetKey([workload, "results"])


def latest(
    instance: dg.DagsterInstance, key: dg.AssetKey, partition: str = WHOLE
) -> Mapping[str, Any] | None:
    """Plain metadata values of the newest materialisation, None if there is none."""
    found = instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=key, asset_partitions=[partition] if partition else None),
        limit=1,
    ).records
    if not found or found[0].asset_materialization is None:
        return None
    return {name: item.value for name, item in found[0].asset_materialization.metadata.items()}


def latest_events(
    instance: dg.DagsterInstance, key: dg.AssetKey, kind: dg.DagsterEventType
) -> dict[str, dg.AssetMaterialization | dg.AssetObservation]:
    """The newest materialisation or observation of every partition that has one, in two questions to the event
    log and one more a PAGE of partitions: a question a partition takes seconds for thousands."""
    at = sorted(instance.get_latest_storage_id_by_partition(key, kind).values())
    made = kind is dg.DagsterEventType.ASSET_MATERIALIZATION
    fetch = instance.fetch_materializations if made else instance.fetch_observations
    found: dict[str, dg.AssetMaterialization | dg.AssetObservation] = {}
    for start in range(0, len(at), PAGE):
        ids = at[start : start + PAGE]
        for record in fetch(dg.AssetRecordsFilter(key, storage_ids=ids), limit=PAGE).records:
            event = record.asset_materialization if made else record.asset_observation
            assert event is not None
            assert event.partition is not None
            found[event.partition] = event
    return found


def require_latest(
    instance: dg.DagsterInstance, key: dg.AssetKey, partition: str = WHOLE
) -> Mapping[str, Any]:
    found = latest(instance, key, partition)
    if found is None:
        raise UsageError(
            f"{key.to_user_string()} {partition} has never been materialised; do that first".replace(
                "  ", " "
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class SubmissionRef:
    """The submission that an asset last recorded, and the request it was made from."""

    submission_id: str
    engine: str
    tasks: int
    request: Mapping[str, Any]


def latest_submission(
    instance: dg.DagsterInstance, workload: str, partition: str = WHOLE
) -> SubmissionRef | None:
    found = latest(instance, submission_key(workload), partition)
    if found is None:
        return None
    return SubmissionRef(
        str(found["submission_id"]),
        str(found["engine"]),
        int(found["tasks_submitted"]),
        found["request"],
    )
