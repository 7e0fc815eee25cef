"""The vector shard of the verses: built from the rows in Postgres, measured, and proven by a receipt.

shard -> cluster_health -> receipt, and near_duplicates beside them. Only generation numbers pass between the
assets; rows, blocks and receipts stay where their owners keep them.
"""

from typing import Any

import dagster as dg

from assets.lineage import latest_submission, require_latest, results_key
from assets.metadata import column_schema, figure, records_table, sample, shown
from fabric_pipelines import receipts
from fabric_pipelines.analytics.health import METRICS, HealthTable, Metric
from fabric_pipelines.analytics.rules import Verdict
from fabric_pipelines.shards import Judged, build_if_moved, judge, recall_of, record
from fabric_pipelines.workloads import embeddings, figures, health_figures
from resources.database import DatabaseResource
from resources.gpu_worker import GpuWorkerResource
from resources.lake import LakeResource
from resources.shards import ShardsResource

SHARD = "verses"
LISTS = 16
SEED = 11
METRIC: Metric = "cosine"
RECALL_AT = 10
SPREAD = ("least", "median", "greatest")
CODE_VERSION = "1"
SHARD_KEY = dg.AssetKey(["indexes", "shard"])
HEALTH_KEY = dg.AssetKey(["indexes", "cluster_health"])
RECEIPT_KEY = dg.AssetKey(["indexes", "receipt"])
NEAR_DUPLICATES_KEY = dg.AssetKey(["indexes", "near_duplicates"])


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
    generation, built = build_if_moved(
        database.of(),
        shards.root,
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
    key=SHARD_KEY,
    ins={"vectors": dg.AssetIn(key=results_key(embeddings.NAME), dagster_type=dg.Nothing)},
    code_version=CODE_VERSION,
    description="The current generation of shard `verses`: vectors, ids and columns of fabric.embed, in lists.",
)
def shard(vectors: Any) -> Any:
    return build_shard(vectors)


@dg.op(ins={"shard": dg.In(dg.Nothing)})
def measure_health(
    context: dg.AssetExecutionContext,
    database: DatabaseResource,
    lake: LakeResource,
    shards: ShardsResource,
) -> dg.MaterializeResult:
    built = require_latest(context.instance, SHARD_KEY)
    with shards.open(database.of(), SHARD, built["generation"]) as opened:
        judged = judge(database.of(), shards.root, opened, shards.rules())
        record(opened.generation, judged)
    health, table = judged.health, judged.to_arrow()
    artifact = lake.put("indexes/cluster_health.parquet", table)
    names = list(health.readings)
    pictures = health_figures.drawn(health, judged.odd())
    return dg.MaterializeResult(
        metadata={
            "metrics_by_cluster": records_table(_health_rows(health)),
            **{name: figure(svg) for name, svg in pictures.items()},
            "generation": built["generation"],
            "clusters": health.clusters,
            "metrics": len(names),
            "breaches": len(health.breaches),
            "verdicts": dg.MetadataValue.json(judged.verdicts()),
            "decisions": dg.MetadataValue.json(_not_plain(judged)),
            "rules_sha256": judged.rules_sha256,
            "summary": dg.MetadataValue.json(health.summary()),
            "sha256": artifact.sha256,
            "dagster/uri": artifact.uri,
            "dagster/row_count": table.num_rows,
            "dagster/column_schema": column_schema(
                table, {name: f"{spec.formula}; {spec.range}" for name, spec in METRICS.items()}
            ),
        },
        data_version=dg.DataVersion(artifact.sha256),
    )


def _not_plain(judged: Judged) -> list[dict[str, Any]]:
    """Decisions that say something: a verdict other than KEEP, or one that is on its way."""
    return [
        each.to_json()
        for each in judged.decisions
        if each.pending or each.verdict is not Verdict.KEEP
    ]


def _health_rows(health: HealthTable) -> list[dict[str, Any]]:
    """One row a metric: its spread, and its value in every cluster as a small chart. "-" where no cluster has
    a value, as for what needs an earlier measurement to compare with."""
    return [
        {
            "metric": name,
            "by_cluster": figures.sparkline(health.readings[name].value),
            **{end: "-" if item[end] is None else item[end] for end in SPREAD},
        }
        for name, item in health.summary().items()
    ]


@dg.graph_asset(
    key=HEALTH_KEY,
    ins={"shard": dg.AssetIn(key=SHARD_KEY, dagster_type=dg.Nothing)},
    code_version=CODE_VERSION,
    description="Health metrics of every list of the shard, exact, with a status beside every value, and the verdict on each list.",
)
def cluster_health(shard: Any) -> Any:
    return measure_health(shard)


@dg.op(ins={"health": dg.In(dg.Nothing)})
def issue_receipt(
    context: dg.AssetExecutionContext, database: DatabaseResource, shards: ShardsResource
) -> dg.MaterializeResult:
    built = require_latest(context.instance, SHARD_KEY)
    health = require_latest(context.instance, HEALTH_KEY)
    with shards.open(database.of(), SHARD, built["generation"]) as opened:
        recall = recall_of(database.of(), opened, RECALL_AT)
        quality = receipts.measure_quality(opened)
    receipt = receipts.issue(
        database.of(),
        shards.root,
        SHARD,
        number=built["generation"],
        quality={
            **quality,
            "recall_at_10_against_source": recall.recall,
            "health": health["summary"],
            "verdicts": health["verdicts"],
            "decisions": health["decisions"],
            "rules_sha256": health["rules_sha256"],
        },
    )
    return dg.MaterializeResult(
        metadata={
            "receipt_id": receipt.receipt_id,
            "generation": built["generation"],
            f"recall_at_{RECALL_AT}": recall.recall,
            "recall_queries": recall.queries,
            "imbalance": shown(quality["imbalance"]),
            "content_hash": receipt.source["content_hash"],
            "pg_snapshot": receipt.source["pg_snapshot"],
            "files": len(receipt.outputs["files"]),
            "recipe": dg.MetadataValue.json(dict(receipt.recipe)),
            "dagster/row_count": receipt.source["rows"],
        },
        data_version=dg.DataVersion(receipt.receipt_id),
    )


@dg.graph_asset(
    key=RECEIPT_KEY,
    ins={"health": dg.AssetIn(key=HEALTH_KEY, dagster_type=dg.Nothing)},
    code_version=CODE_VERSION,
    description="All that is needed to rebuild the generation and to prove it equal, with what was measured.",
)
def receipt(health: Any) -> Any:
    return issue_receipt(health)


@dg.op(ins={"shard": dg.In(dg.Nothing)})
def find_near_duplicates(
    context: dg.AssetExecutionContext,
    database: DatabaseResource,
    lake: LakeResource,
    shards: ShardsResource,
) -> dg.MaterializeResult:
    built = require_latest(context.instance, SHARD_KEY)
    with shards.open(database.of(), SHARD, built["generation"]) as opened:
        vectors, ids = opened.vectors(), opened.ids()
        rows = opened.columns().column("source_row").to_numpy()
        _, neighbours = opened.search(vectors, embeddings.NEIGHBOURS + 1)
    found = embeddings.near_duplicates(rows, vectors, embeddings.others(ids, rows, neighbours))
    artifact = lake.put("indexes/near_duplicates.parquet", found.table)
    cosines = found.table.column("cosine").to_numpy()
    return dg.MaterializeResult(
        metadata={
            "similarity": figure(figures.similarity_histogram(found.similarities, cosines)),
            "known_pairs": found.known,
            "found_pairs": found.found,
            "found_share": shown(found.found_share),
            "pairs": sample(found.table, found.table.column_names),
            "sha256": artifact.sha256,
            "dagster/uri": artifact.uri,
            "dagster/row_count": found.table.num_rows,
            "dagster/column_schema": column_schema(found.table),
        },
        data_version=dg.DataVersion(artifact.sha256),
    )


@dg.graph_asset(
    key=NEAR_DUPLICATES_KEY,
    ins={"shard": dg.AssetIn(key=SHARD_KEY, dagster_type=dg.Nothing)},
    code_version=CODE_VERSION,
    description="Known near-duplicates of the corpus, and which of them the vectors find.",
)
def near_duplicates(shard: Any) -> Any:
    return find_near_duplicates(shard)


assets: list[dg.AssetsDefinition] = [shard, cluster_health, receipt, near_duplicates]
