"""Embeddings: the verse corpus as unit vectors, ready for the shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc

from assets.flow import results_asset, submission_asset
from assets.metadata import Metadata, sample
from fabric_pipelines.workloads.catalogue import WORKLOADS
from fabric_pipelines.workloads.embeddings import NAME


def describe(request: Mapping[str, Any], table: pa.Table) -> Metadata:
    books = pc.value_counts(table.column("book")).to_pylist()
    return {
        "dim": len(table.column("vector")[0]) if table.num_rows else 0,
        "verses_by_book": dg.MetadataValue.json({item["values"]: item["counts"] for item in books}),
        "verses": sample(table, ["reference", "text"]),
    }


submission = submission_asset(
    WORKLOADS[NAME],
    description="The verse corpus, tokenised for the embedder and durable in the broker.",
)
results = results_asset(
    WORKLOADS[NAME],
    description="One unit vector a verse, with book and reference, as Parquet and as rows of fabric.embed.",
    describe=describe,
    await_priority=3,
)
assets: list[dg.AssetsDefinition] = [submission, results]
