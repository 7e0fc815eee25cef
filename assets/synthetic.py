"""Synthetic data: puzzles with known answers, answered by the model and judged by their own verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg
import pyarrow as pa

from assets.flow import results_asset, submission_asset
from assets.metadata import Metadata, figure, sample, shown
from fabric_pipelines.workloads import figures
from fabric_pipelines.workloads.catalogue import WORKLOADS
from fabric_pipelines.workloads.synthetic import NAME, pass_rates


def describe(request: Mapping[str, Any], table: pa.Table) -> Metadata:
    rates = pass_rates(table)
    return {
        "pass_rate_by_generator": figure(figures.pass_rates(rates)),
        "verifier_pass_rate": shown(rates["all"]),
        "seed": request["seed"],
        "generations": sample(table, ["passed", "reply", "answer", "prompt", "generator"]),
    }


submission = submission_asset(
    WORKLOADS[NAME],
    description="Chat prompts of seeded reasoning-gym generators, durable in the broker.",
)
results = results_asset(
    WORKLOADS[NAME],
    description="Generations with prompt, true answer and the verifier's score, as Parquet in the lake.",
    describe=describe,
)
assets: list[dg.AssetsDefinition] = [submission, results]
