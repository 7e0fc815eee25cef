"""The vector shard of the verses: built from the rows in Postgres, measured, and proven by a receipt.

shard -> cluster_health -> receipt. A build is asked of the shards package, which keeps the current generation
when neither the rows nor the recipe have moved. Only generation numbers pass between the assets.
"""

from typing import Any

import dagster as dg
import numpy as np

from assets.flow import INTERMEDIATES
from assets.lineage import latest_submission, require_latest, results_key
from assets.metadata import column_schema, figure, sample
from fabric_pipelines.workloads import embeddings, figures
from resources.database import DatabaseResource
from resources.gpu_worker import GpuWorkerResource
from resources.lake import LakeResource
from resources.shards import ShardsResource

SHARD = "verses"
LISTS = 16
SEED = 11
METRIC = "cosine"
RECALL_AT = 10
CODE_VERSION = "1"


@dg.op(ins={"vectors": dg.In(dg.Nothing)})
def build_shard(
    context: dg.AssetExecutionContext,
    database: DatabaseResource,
    gpu_worker: GpuWorkerResource,
    shards: ShardsResource,
) -> dg.MaterializeResult:
    submitted = latest_submission(context.instance, embeddings.NAME)
    assert submitted is not None
    found = require_latest(context.instance, results_key(embeddings.NAME))
    with database.open() as db:
        generation, built = shards.ensure(
            db,
            SHARD,
            submission_id=submitted.submission_id,
            lists=LISTS,
            seed=SEED,
            metric=METRIC,
            recipe={
                "engine": submitted.engine,
                "engine_identity": gpu_worker.engine(submitted.engine).identity,
                "engine_fingerprint": found["engine_fingerprint"],
                "tokeniser": gpu_worker.tokeniser(submitted.engine).sha256,
            },
        )
    manifest = generation.manifest
    return dg.MaterializeResult(
        metadata={
            "shard": SHARD,
            "generation": generation.number,
            "built": built,
            "lists": manifest.lists,
            "dim": manifest.dim,
            "content_hash": manifest.source["content_hash"],
            "manifest_sha256": generation.manifest_sha256,
            "engine_fingerprint": found["engine_fingerprint"],
            "dagster/uri": str(generation.folder),
            "dagster/row_count": manifest.rows,
        },
        data_version=dg.DataVersion(generation.manifest_sha256),
    )


@dg.graph_asset(
    key=["indexes", "shard"],
    ins={"vectors": dg.AssetIn(key=results_key(embeddings.NAME), dagster_type=dg.Nothing)},
    code_version=CODE_VERSION,
    description="The current generation of shard `verses`: vectors, ids and columns of fabric.embed, in lists.",
)
def shard(vectors: Any) -> dg.MaterializeResult:
    found: dg.MaterializeResult = build_shard(vectors)
    return found


@dg.op(ins={"shard": dg.In(dg.Nothing)})
def measure_health(
    context: dg.AssetExecutionContext,
    database: DatabaseResource,
    lake: LakeResource,
    shards: ShardsResource,
) -> dg.MaterializeResult:
    built = require_latest(context.instance, SHARD_KEY)
    with database.open() as db, shards.open(db, SHARD, built["generation"]) as opened:
        health = measure(opened.vectors(), opened.indptr, opened.ids(), metric=METRIC)
    table = health.to_arrow()
    artifact = lake.put("indexes/cluster_health.parquet", table)
    names = list(health.readings)
    values = np.stack([health.readings[name].value for name in names], axis=1)
    clusters = [str(number) for number in range(health.clusters)]
    return dg.MaterializeResult(
        metadata={
            "generation": built["generation"],
            "clusters": health.clusters,
            "metrics": len(names),
            "breaches": len(health.breaches),
            "health": figure(figures.health_map(values, clusters, names)),
            "summary": dg.MetadataValue.json(health.summary()),
            "sha256": artifact.sha256,
            "dagster/uri": artifact.uri,
            "dagster/row_count": table.num_rows,
            "dagster/column_schema": column_schema(table),
        },
        data_version=dg.DataVersion(artifact.sha256),
    )


@dg.graph_asset(
    key=["indexes", "cluster_health"],
    ins={"shard": dg.AssetIn(key=SHARD_KEY, dagster_type=dg.Nothing)},
    code_version=CODE_VERSION,
    description="Health metrics of every list of the shard, exact, with a status beside every value.",
)
def cluster_health(shard: Any) -> dg.MaterializeResult:
    found: dg.MaterializeResult = measure_health(shard)
    return found


@dg.op(ins={"health": dg.In(dg.Nothing)})
def issue_receipt(
    context: dg.AssetExecutionContext, database: DatabaseResource, shards: ShardsResource
) -> dg.MaterializeResult:
    built = require_latest(context.instance, SHARD_KEY)
    health = require_latest(context.instance, HEALTH_KEY)
    with database.open() as db:
        recall, queries = shards.recall(db, SHARD, built["generation"], RECALL_AT)
        receipt = shards.receipt(
            db,
            SHARD,
            built["generation"],
            quality={
                f"recall_at_{RECALL_AT}": recall,
                "recall_queries": queries,
                "health": health["summary"],
            },
        )
    return dg.MaterializeResult(
        metadata={
            "receipt_id": receipt.receipt_id,
            "generation": built["generation"],
            f"recall_at_{RECALL_AT}": recall,
            "content_hash": receipt.source["content_hash"],
            "files": len(receipt.outputs["files"]),
            "statement": dg.MetadataValue.json(_without_bucket_sums(receipt.to_statement())),
        },
        data_version=dg.DataVersion(receipt.receipt_id),
    )
