"""The standard metadata of every asset, under one set of names, and figures that show inline in the UI."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_pipelines.broker.replies import SubmissionState
from fabric_pipelines.dataplane.lake import Artifact
from fabric_pipelines.records.shape import aligned_lengths, sampling_kind
from fabric_pipelines.records.task import token_counts
from fabric_pipelines.workloads.figures import padding_by_lane
from fabric_pipelines.workloads.request import Prepared

Metadata = dict[str, Any]
SAMPLE_ROWS = 10


def figure(svg: str) -> dg.MarkdownMetadataValue:
    return dg.MetadataValue.md(
        f"![figure](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"
    )


def column_schema(table: pa.Table) -> dg.TableSchema:
    return dg.TableSchema([dg.TableColumn(field.name, str(field.type)) for field in table.schema])


def sample(table: pa.Table, columns: list[str], rows: int = SAMPLE_ROWS) -> dg.TableMetadataValue:
    """The first rows as a table; only columns whose values are plain."""
    records = table.select(columns).slice(0, rows).to_pylist()
    return dg.MetadataValue.table([dg.TableRecord(record) for record in records])


def of_submission(prepared: Prepared, state: SubmissionState) -> Metadata:
    """What was enqueued. `request` and `submission_id` are what `results` starts from."""
    submission = prepared.submission
    found: Metadata = {
        "submission_id": submission.submission_id,
        "request": dg.MetadataValue.json(json.loads(submission.labels["request"])),
        "engine": submission.engine,
        "tasks_submitted": submission.tasks,
        "tokens_in": submission.tokens,
        "tokens_max": prepared.tokens_max,
        "fingerprint": submission.fingerprint,
        "padding_ratio": prepared.padding_ratio,
        "first_task_id": str(state.first_task_id),
    }
    if sampling_kind(submission.sampling) != "generate":
        lengths = np.concatenate([token_counts(batch) for batch in prepared.batches()])
        found["padding_by_lane"] = figure(padding_by_lane(lengths, aligned_lengths(lengths)))
    return found


@dataclass(frozen=True, slots=True)
class Published:
    """A submission's results on their way out: state in the broker, rows in Postgres, table in the lake."""

    state: SubmissionState
    landed: pa.Table
    table: pa.Table
    artifact: Artifact


def of_results(published: Published) -> Metadata:
    state, landed, artifact = published.state, published.landed, published.artifact
    prompt_tokens = landed.column("prompt_tokens").to_numpy().astype(np.int64)
    tokens_in = int(prompt_tokens.sum())
    tokens_out = (
        int(pc.sum(landed.column("output_tokens")).as_py() or 0)
        if "output_tokens" in landed.column_names
        else 0
    )
    first_us, last_us = _span_us(landed)
    seconds = (last_us - first_us) / 1e6
    return {
        "submission_id": state.submission_id,
        "tasks_submitted": state.tasks,
        "tasks_retired": state.retired,
        "tasks_dead": state.dead,
        "tasks_lost": state.tasks - landed.num_rows - state.dead,
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "first_start_us": first_us,
        "last_end_us": last_us,
        "wall_s": seconds,
        "tokens_per_s": (tokens_in + tokens_out) / seconds if seconds else 0.0,
        "padding_ratio": 0.0 if tokens_out else _padding(prompt_tokens),
        "engine_fingerprint": ", ".join(
            sorted(pc.unique(landed.column("engine_fingerprint")).to_pylist())
        ),
        "sha256": artifact.sha256,
        "dagster/uri": artifact.uri,
        "dagster/row_count": published.table.num_rows,
        "dagster/column_schema": column_schema(published.table),
    }


def _span_us(landed: pa.Table) -> tuple[int, int]:
    """The first task's start and the last one's end, wall time in us; zeros without a row."""
    if not landed.num_rows:
        return 0, 0
    first, last = pc.min(landed.column("t_start_us")), pc.max(landed.column("t_end_us"))
    return int(first.as_py()), int(last.as_py())


def _padding(prompt_tokens: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    if not len(prompt_tokens):
        return 0.0
    return float(1 - prompt_tokens.sum() / aligned_lengths(prompt_tokens).sum())
