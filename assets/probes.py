"""Probes: does a linear reader find in the hidden states whether a statement is true?"""

from collections.abc import Mapping
from typing import Any

import dagster as dg
import pyarrow as pa

from assets.flow import results_asset, submission_asset
from assets.lineage import latest_submission, require_latest, results_key
from assets.metadata import Metadata, column_schema, figure, sample, shown
from fabric_pipelines.workloads import figures, probes
from fabric_pipelines.workloads.catalogue import WORKLOADS
from resources.lake import LakeResource

COLUMNS = {
    "layer": "0 is the embedding, n the output of block n",
    "accuracy": "share of held-out statements judged right",
    "low": "lower end of the 95 % interval",
    "high": "upper end of the 95 % interval",
    "control": "accuracy after training on shuffled labels: what luck gives",
    "majority": "accuracy of always saying the commoner label",
    "bag_of_words": "accuracy of a reader of the words alone",
    "train_rows": "statements the probe learned from",
    "test_rows": "held-out statements, of other entities",
}


def describe(request: Mapping[str, Any], table: pa.Table) -> Metadata:
    return {
        "layers": ", ".join(str(layer) for layer in request["layers"]),
        "true_share": shown(sum(table.column("label").to_pylist()) / max(table.num_rows, 1)),
        "statements": sample(table, ["topic", "statement", "label", "held_out"]),
    }


submission = submission_asset(
    WORKLOADS[probes.NAME],
    description="True and false statements that differ in one fact, split by entity, durable in the broker.",
)
results = results_asset(
    WORKLOADS[probes.NAME],
    description="Last-token states of each statement at the declared layers, with label and split, as Parquet.",
    describe=describe,
    await_priority=1,
)


@dg.op(ins={"results": dg.In(dg.Nothing)})
def fit_probes(context: dg.AssetExecutionContext, lake: LakeResource) -> dg.MaterializeResult:
    found = require_latest(context.instance, results_key(probes.NAME))
    submitted = latest_submission(context.instance, probes.NAME)
    assert submitted is not None
    table = lake.table(found["dagster/uri"])
    fits, floor = probes.fit_layers(submitted.request, table)
    report = probes.report(fits, floor)
    artifact = lake.put("probes/report.parquet", report)
    best = max(fits, key=lambda item: item.fit.accuracy)
    return dg.MaterializeResult(
        metadata={
            "accuracy_by_layer": figure(figures.probe_accuracy(report.to_pydict())),
            "best_layer": best.layer,
            "best_accuracy": shown(best.fit.accuracy),
            "control_accuracy": shown(best.fit.control),
            "bag_of_words": shown(floor.accuracy),
            "report": sample(report, list(report.column_names), rows=report.num_rows),
            "sha256": artifact.sha256,
            "dagster/uri": artifact.uri,
            "dagster/row_count": report.num_rows,
            "dagster/column_schema": column_schema(report, COLUMNS),
        },
        data_version=dg.DataVersion(artifact.sha256),
    )


@dg.graph_asset(
    key=["probes", "report"],
    ins={"results": dg.AssetIn(key=results_key(probes.NAME), dagster_type=dg.Nothing)},
    code_version=probes.CODE_VERSION,
    description="Held-out accuracy by layer with its interval, beside shuffled labels and a bag of words.",
)
def report(results: Any) -> dg.MaterializeResult:
    found: dg.MaterializeResult = fit_probes(results)
    return found


assets: list[dg.AssetsDefinition] = [submission, results, report]
