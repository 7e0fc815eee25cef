"""Hidden states: each book of the corpus through the trunk, the declared layers pooled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg
import pyarrow as pa

from assets.flow import results_asset, submission_asset
from assets.metadata import Metadata, figure, sample
from assets.partitions import books
from fabric_pipelines.workloads import figures
from fabric_pipelines.workloads.catalogue import WORKLOADS
from fabric_pipelines.workloads.hidden_states import NAME, layer_summary


def describe(request: Mapping[str, Any], table: pa.Table) -> Metadata:
    summary = layer_summary(table)
    columns = summary.to_pydict()
    return {
        "norms": figure(figures.norms_by_layer(columns["layer"], columns["norm_mean"])),
        "layers": sample(summary, summary.column_names),
        "pooling": request["pooling"],
        "non_finite": sum(columns["non_finite"]),
    }


submission = submission_asset(
    WORKLOADS[NAME],
    description="Verses of one book, tokenised for the trunk and durable in the broker.",
    partitions_def=books,
)
results = results_asset(
    WORKLOADS[NAME],
    description="Pooled states of the declared layers, one fp16 vector a verse and layer, as Parquet.",
    describe=describe,
    partitions_def=books,
    await_priority=2,
)
assets: list[dg.AssetsDefinition] = [submission, results]
