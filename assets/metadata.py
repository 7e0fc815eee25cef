"""The standard metadata of every asset, under one set of names, and figures that show inline in the UI."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

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
SHOWN_DIGITS = 4
PLAIN_IN_URL = " '/:;,.=()-"


def figure(svg: str) -> dg.MarkdownMetadataValue:
    """As short as it can be, since a page shows only short Markdown in place: a small SVG as it is, with what
    Markdown and URLs forbid escaped, a large one in base64."""
    readable = f"<data:image/svg+xml,{quote(svg, safe=PLAIN_IN_URL)}>"
    packed = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
    return dg.MetadataValue.md(f"![figure]({min(readable, packed, key=len)})")


def column_schema(table: pa.Table, words: Mapping[str, str] | None = None) -> dg.TableSchema:
    """`words`: what a column means, where its name does not say it."""
    described = words or {}
    return dg.TableSchema(
        [
            dg.TableColumn(field.name, _type_name(field.type), described.get(field.name))
            for field in table.schema
        ]
    )


def _type_name(kind: pa.DataType) -> str:
    """Arrow's name; of a dictionary, that of what it holds."""
    return str(kind.value_type if pa.types.is_dictionary(kind) else kind)


def sample(table: pa.Table, columns: list[str], rows: int = SAMPLE_ROWS) -> dg.TableMetadataValue:
    """The first rows as a table; only columns whose values are plain."""
    records = table.select(columns).slice(0, rows).to_pylist()
    return records_table(records)


def records_table(records: Sequence[Mapping[str, Any]]) -> dg.TableMetadataValue:
    """Rows for a person: floats to four digits, since 17 push every other column off the page."""
    return dg.MetadataValue.table(
        [dg.TableRecord({k: shown(v) for k, v in record.items()}) for record in records]
    )


def shown(value: Any) -> Any:
    return float(f"{value:.{SHOWN_DIGITS}g}") if isinstance(value, float) else value


def of_submission(prepared: Prepared, state: SubmissionState) -> Metadata:
    """What was enqueued, figure first. `request` and `submission_id` are what `results` starts from."""
    submission = prepared.submission
    found: Metadata = {
        "engine": submission.engine,
        "tasks_submitted": submission.tasks,
        "tokens_in": submission.tokens,
        "tokens_max": prepared.tokens_max,
        "padding_ratio": shown(prepared.padding_ratio),
        "request": dg.MetadataValue.json(dict(prepared.request)),
        "submission_id": submission.submission_id,
        "fingerprint": submission.fingerprint,
        "first_task_id": str(state.first_task_id),
    }
    if sampling_kind(submission.sampling) != "generate":
        lengths = np.concatenate([token_counts(batch) for batch in prepared.batches()])
        chart = figure(padding_by_lane(lengths, aligned_lengths(lengths)))
        found = {"padding_by_lane": chart, **found}
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
        "tasks_submitted": state.tasks,
        "tasks_retired": state.retired,
        "tasks_dead": state.dead,
        "tasks_lost": state.tasks - landed.num_rows - state.dead,
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "wall_s": shown(seconds),
        "tokens_per_s": shown((tokens_in + tokens_out) / seconds if seconds else 0.0),
        "padding_ratio": shown(0.0 if tokens_out else _padding(prompt_tokens)),
        "first_start_us": first_us,
        "last_end_us": last_us,
        "submission_id": state.submission_id,
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
