"""The composition root: gathers assets, checks, resources and automation, and applies policy over all of them.

`build_defs` is the one factory; the UI, the command and the tests all go through it. Policy that concerns
every asset (owner, group, kinds, tags) is applied here once, so that no asset can forget it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from assets import (
    automation,
    checks,
    embeddings,
    hidden_states,
    indexes,
    probes,
    synthetic,
    upkeep,
)
from resources.broker import BrokerResource
from resources.completion import CompletionResource
from resources.database import DatabaseResource
from resources.gpu_worker import GpuWorkerResource
from resources.intermediates import ArrowJsonIOManager
from resources.lake import LakeResource
from resources.shards import ShardsResource

OWNER = "team:fabric"
KINDS = {
    "submission": {"python", "arrow"},
    "results": {"postgres", "parquet"},
    "report": {"numpy", "parquet"},
    "cluster_health": {"numpy", "parquet"},
    "near_duplicates": {"numpy", "parquet"},
}
INDEX_KINDS = {"numpy", "postgres"}
WORKLOAD_MODULES = (synthetic, probes, hidden_states, embeddings, indexes, upkeep)


def build_defs(resource_overrides: Mapping[str, Any] | None = None) -> dg.Definitions:
    """Everything in the code location; `resource_overrides` replaces resources by name."""
    return dg.Definitions(
        assets=[with_policy(asset) for module in WORKLOAD_MODULES for asset in module.assets],
        asset_checks=checks.checks,
        sensors=[automation.finished_submissions, upkeep.moved_shards],
        schedules=[automation.nightly_submissions],
        resources=resources_of(resource_overrides or {}),
        executor=dg.in_process_executor,
    )


def resources_of(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults under their overrides; what is built on an overridden resource is built on the override."""
    broker = overrides.get("broker", BrokerResource())
    database = overrides.get("database", DatabaseResource())
    intermediates = ArrowJsonIOManager()
    return {
        "broker": broker,
        "database": database,
        "completion": CompletionResource(broker=broker, database=database),
        "gpu_worker": GpuWorkerResource(),
        "lake": LakeResource(database=database),
        "shards": ShardsResource(),
        "intermediates": intermediates,
        # also the default, so that no value can fall into the pickling one
        "io_manager": intermediates,
        **overrides,
    }


def with_policy(
    asset: dg.AssetsDefinition | dg.SourceAsset,
) -> dg.AssetsDefinition | dg.SourceAsset:
    """What is only observed has a group and tags of its own; it takes no owner."""
    if isinstance(asset, dg.SourceAsset):
        return asset
    return asset.map_asset_specs(
        lambda spec: spec.replace_attributes(
            owners=[OWNER],
            group_name=spec.key.path[0],
            kinds=KINDS.get(spec.key.path[-1], INDEX_KINDS),
        ).merge_attributes(tags={"fabric/workload": spec.key.path[0]})
    )


@dg.definitions
def defs() -> dg.Definitions:
    return build_defs()
